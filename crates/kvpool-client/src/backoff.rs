//! Waits between attempts: they double up to a bound and are jittered, so that many clients do not return together.

use std::time::Duration;

/// Full jitter over the upper half: a wait is between half of the current step and the whole.
#[derive(Clone, Debug)]
pub struct Backoff {
    first: Duration,
    most: Duration,
    step: Duration,
}

impl Backoff {
    #[must_use]
    pub fn new(first: Duration, most: Duration) -> Self {
        Backoff {
            first,
            most,
            step: first,
        }
    }

    /// The next wait.
    #[must_use]
    pub fn next_wait(&mut self) -> Duration {
        let step = self.step;
        self.step = (step * 2).min(self.most);
        let half = u64::try_from(step.as_micros() / 2).unwrap_or(u64::MAX);
        Duration::from_micros(half + rand::random_range(0..=half))
    }

    /// After a success.
    pub fn reset(&mut self) {
        self.step = self.first;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_grow_to_their_bound_and_start_again() {
        let mut backoff = Backoff::new(Duration::from_millis(10), Duration::from_millis(80));
        for most in [10, 20, 40, 80, 80] {
            let wait = backoff.next_wait();
            assert!(
                wait >= Duration::from_millis(most / 2) && wait <= Duration::from_millis(most),
                "{wait:?}"
            );
        }
        backoff.reset();
        assert!(backoff.next_wait() <= Duration::from_millis(10));
    }
}
