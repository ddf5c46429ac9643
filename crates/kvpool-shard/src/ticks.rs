//! Deadlines that are looked at every 20 ms instead of having a timer each.
//!
//! An operation between processes waits a few times, each wait with a deadline that is hardly ever reached. A timer of the
//! runtime is dear there: one that ends before all others wakes the thread that sleeps in the I/O driver, so that every
//! forwarded read would cost one or two needless context switches (measured: more than half the cost of a 64 KiB GET).
//! One thread ticks for the whole process; who waits looks at its deadline at each tick. Deadlines of 100 ms and more are
//! late by at most a tick.

use std::pin::pin;
use std::sync::OnceLock;
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::Instant;

/// Time between two looks.
pub(crate) const TICK: Duration = Duration::from_millis(20);

static TICKS: OnceLock<&'static Notify> = OnceLock::new();

/// The process' ticks; started by the first who asks.
fn ticks() -> &'static Notify {
    TICKS.get_or_init(|| {
        let ticks: &'static Notify = Box::leak(Box::new(Notify::new()));
        let tick = move || {
            loop {
                std::thread::sleep(TICK);
                ticks.notify_waiters();
            }
        };
        std::thread::Builder::new()
            .name("kvpool-ticks".to_owned())
            .spawn(tick)
            .expect("a process that cannot start one thread cannot serve at all");
        ticks
    })
}

/// Waits for `future`, at most until `deadline` (and a tick): `None` when it passed.
pub(crate) async fn until<F: Future>(deadline: Instant, future: F) -> Option<F::Output> {
    let mut future = pin!(future);
    loop {
        tokio::select! {
            biased;
            output = &mut future => return Some(output),
            () = ticks().notified() => {
                if Instant::now() >= deadline {
                    return None;
                }
            }
        }
    }
}

/// Waits until `deadline`, and at most a tick longer.
pub(crate) async fn sleep_until(deadline: Instant) {
    while Instant::now() < deadline {
        ticks().notified().await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn what_is_ready_is_taken_and_what_is_not_is_given_up() {
        let soon = || Instant::now() + 2 * TICK;
        assert_eq!(until(Instant::now() - TICK, std::future::ready(1)).await, Some(1));
        assert_eq!(until(soon(), std::future::pending::<()>()).await, None);
        let end = soon();
        sleep_until(end).await;
        assert!(Instant::now() >= end);
    }
}
