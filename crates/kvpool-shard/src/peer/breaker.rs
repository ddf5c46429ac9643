//! Circuit breaker of one peer: who missed a deadline is not asked for a while.
//!
//! - *closed*: ask it.
//! - *suspect* (missed the first-byte deadline, may still answer): others are asked first; it is asked when there is no
//!   other. An answer, even a late one, closes the breaker. On a machine without spare cycles everybody is suspect at
//!   times, and skipping all copies would turn slowness into misses.
//! - *open* (no answer within the whole deadline, or the connection broke): not asked at all for [`SKIP`]; then *one*
//!   probe in the background decides, so that no client pays for finding out. Only where no other copy is left one
//!   question a second may try it: it may have come back between two probes.

use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

/// How long a peer that failed is skipped.
pub(crate) const SKIP: Duration = Duration::from_secs(1);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    Closed,
    Suspect,
    Open,
}

impl State {
    /// The value of the gauge.
    pub(crate) fn number(self) -> f64 {
        match self {
            State::Closed => 0.0,
            State::Suspect => 1.0,
            State::Open => 2.0,
        }
    }
}

#[derive(Debug, Default)]
struct Inner {
    suspect_until: Option<Instant>,
    /// Since when there has been no answer; `None` = not open.
    open_since: Option<Instant>,
    probing: bool,
    /// When it opened, or was last tried in vain.
    tried: Option<Instant>,
}

#[derive(Debug, Default)]
pub(crate) struct Breaker {
    inner: Mutex<Inner>,
}

impl Breaker {
    pub(crate) fn state(&self) -> State {
        let inner = self.inner.lock();
        match inner.suspect_until {
            _ if inner.open_since.is_some() => State::Open,
            Some(until) if until > Instant::now() => State::Suspect,
            _ => State::Closed,
        }
    }

    /// It was late; it may still answer.
    pub(crate) fn late(&self) {
        self.inner.lock().suspect_until = Some(Instant::now() + SKIP);
    }

    /// It did not answer, or the connection broke. True when the caller must start the probe.
    pub(crate) fn failed(&self) -> bool {
        let mut inner = self.inner.lock();
        if inner.open_since.is_none() {
            inner.open_since = Some(Instant::now());
            inner.tried = inner.open_since;
        }
        !std::mem::replace(&mut inner.probing, true)
    }

    /// Open for so long without a try that one is worth a deadline.
    pub(crate) fn may_be_tried(&self) -> bool {
        let inner = self.inner.lock();
        inner.open_since.is_some() && inner.tried.is_none_or(|at| at.elapsed() >= SKIP)
    }

    /// The try was in vain: no other one for [`SKIP`].
    pub(crate) fn tried(&self) {
        self.inner.lock().tried = Some(Instant::now());
    }

    /// It answered.
    pub(crate) fn answered(&self) {
        let mut inner = self.inner.lock();
        inner.open_since = None;
        inner.suspect_until = None;
    }

    /// The probe was answered. False when the peer failed again meanwhile and the probe must go on.
    pub(crate) fn probe_done(&self) -> bool {
        let mut inner = self.inner.lock();
        inner.probing = inner.open_since.is_some();
        !inner.probing
    }

    /// How long there has been no answer; `None` when it is not open.
    pub(crate) fn open_for(&self) -> Option<Duration> {
        self.inner.lock().open_since.map(|since| since.elapsed())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn late_is_suspect_for_a_while_and_an_answer_closes() {
        let breaker = Breaker::default();
        assert_eq!(breaker.state(), State::Closed);
        breaker.late();
        assert_eq!(breaker.state(), State::Suspect);
        breaker.answered();
        assert_eq!(breaker.state(), State::Closed);
        breaker.late();
        tokio::time::advance(SKIP + Duration::from_millis(1)).await;
        assert_eq!(breaker.state(), State::Closed);
    }

    #[tokio::test(start_paused = true)]
    async fn an_open_one_may_be_tried_once_a_second() {
        let breaker = Breaker::default();
        assert!(!breaker.may_be_tried());
        breaker.failed();
        assert!(!breaker.may_be_tried(), "it has just failed");
        tokio::time::advance(SKIP / 2).await;
        // What was under way when it opened fails later: that is no try.
        breaker.failed();
        tokio::time::advance(SKIP / 2).await;
        assert!(breaker.may_be_tried());
        breaker.tried();
        assert!(!breaker.may_be_tried());
        tokio::time::advance(SKIP).await;
        assert!(breaker.may_be_tried());
        breaker.answered();
        assert!(!breaker.may_be_tried());
    }

    #[tokio::test(start_paused = true)]
    async fn open_stays_open_until_an_answer_and_has_one_probe() {
        let breaker = Breaker::default();
        assert!(breaker.failed());
        assert!(!breaker.failed());
        tokio::time::advance(10 * SKIP).await;
        assert_eq!(breaker.state(), State::Open);
        assert!(!breaker.failed(), "its time runs from the first failure");
        assert_eq!(breaker.open_for(), Some(10 * SKIP));
        assert!(!breaker.probe_done());
        breaker.answered();
        assert!(breaker.probe_done());
        assert_eq!((breaker.state(), breaker.open_for()), (State::Closed, None));
        assert!(breaker.failed());
    }
}
