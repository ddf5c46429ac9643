//! The library's runtime trait on the simulated [`world`](crate::world).
//!
//! Channels and locks are tokio's, which need no tokio runtime; the order in which they wake tasks does not
//! matter here.

use std::fmt;
use std::future::Future;
use std::ops::{Add, AddAssign, Sub, SubAssign};
use std::panic::{AssertUnwindSafe, resume_unwind};
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use futures::FutureExt;
use futures::channel::oneshot;
use kvpool_raft::{AsyncRuntime, Tokio};
use openraft::OptionalSend;
use openraft::async_runtime;
use rand::rngs::SmallRng;

use crate::world;

/// The simulated runtime.
#[derive(Debug)]
pub struct Sim;

/// A point in virtual time, in nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct SimInstant(u64);

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

impl Add<Duration> for SimInstant {
    type Output = Self;
    fn add(self, time: Duration) -> Self {
        SimInstant(self.0.saturating_add(nanos(time)))
    }
}
impl AddAssign<Duration> for SimInstant {
    fn add_assign(&mut self, time: Duration) {
        *self = *self + time;
    }
}
impl Sub<Duration> for SimInstant {
    type Output = Self;
    fn sub(self, time: Duration) -> Self {
        SimInstant(self.0.saturating_sub(nanos(time)))
    }
}
impl Sub<Self> for SimInstant {
    type Output = Duration;
    fn sub(self, earlier: Self) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }
}
impl SubAssign<Duration> for SimInstant {
    fn sub_assign(&mut self, time: Duration) {
        *self = *self - time;
    }
}
impl async_runtime::Instant for SimInstant {
    fn now() -> Self {
        SimInstant(world::local_now())
    }
}

/// Why a task gave no result.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Ended {
    /// Its place was killed.
    Killed,
    /// It panicked.
    Panicked,
}

impl fmt::Display for Ended {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self:?}")
    }
}

/// A task's result to come.
pub struct Handle<T>(oneshot::Receiver<Result<T, Ended>>);

impl<T> Future for Handle<T> {
    type Output = Result<T, Ended>;
    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        self.0.poll_unpin(cx).map(|got| got.unwrap_or(Err(Ended::Killed)))
    }
}

/// A deadline passed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Elapsed;

impl fmt::Display for Elapsed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("deadline has elapsed")
    }
}

/// A future with a deadline. The future is polled first.
pub struct Timeout<F> {
    future: Pin<Box<F>>,
    sleep: world::Sleep,
}

impl<F: Future> Future for Timeout<F> {
    type Output = Result<F::Output, Elapsed>;
    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        if let Poll::Ready(out) = self.future.as_mut().poll(cx) {
            return Poll::Ready(Ok(out));
        }
        self.sleep.poll_unpin(cx).map(|()| Err(Elapsed))
    }
}

impl AsyncRuntime for Sim {
    type JoinError = Ended;
    type JoinHandle<T: OptionalSend + 'static> = Handle<T>;
    type Sleep = world::Sleep;
    type Instant = SimInstant;
    type TimeoutError = Elapsed;
    type Timeout<R, T: Future<Output = R> + OptionalSend> = Timeout<T>;
    type ThreadLocalRng = SmallRng;
    type Mpsc = <Tokio as AsyncRuntime>::Mpsc;
    type Watch = <Tokio as AsyncRuntime>::Watch;
    type Oneshot = <Tokio as AsyncRuntime>::Oneshot;
    type Mutex<T: OptionalSend + 'static> = <Tokio as AsyncRuntime>::Mutex<T>;

    fn spawn<T>(future: T) -> Self::JoinHandle<T::Output>
    where
        T: Future + OptionalSend + 'static,
        T::Output: OptionalSend + 'static,
    {
        let (tx, rx) = oneshot::channel();
        world::spawn(async move {
            match AssertUnwindSafe(future).catch_unwind().await {
                Ok(out) => drop(tx.send(Ok(out))),
                Err(panic) => {
                    let _ = tx.send(Err(Ended::Panicked));
                    // The world takes note of it.
                    resume_unwind(panic);
                }
            }
        });
        Handle(rx)
    }

    fn sleep(duration: Duration) -> Self::Sleep {
        world::sleep(duration)
    }

    fn sleep_until(deadline: Self::Instant) -> Self::Sleep {
        world::sleep_until(deadline.0)
    }

    fn timeout<R, F: Future<Output = R> + OptionalSend>(duration: Duration, future: F) -> Self::Timeout<R, F> {
        Timeout {
            future: Box::pin(future),
            sleep: world::sleep(duration),
        }
    }

    fn timeout_at<R, F: Future<Output = R> + OptionalSend>(deadline: Self::Instant, future: F) -> Self::Timeout<R, F> {
        Timeout {
            future: Box::pin(future),
            sleep: world::sleep_until(deadline.0),
        }
    }

    fn is_panic(join_error: &Self::JoinError) -> bool {
        *join_error == Ended::Panicked
    }

    fn thread_rng() -> Self::ThreadLocalRng {
        world::fork_rng()
    }

    fn new(_threads: usize) -> Self {
        Sim
    }

    fn block_on<F, T>(&mut self, future: F) -> T
    where
        F: Future<Output = T>,
    {
        world::run(0, future).0
    }

    async fn spawn_blocking<F, T>(f: F) -> Result<T, std::io::Error>
    where
        F: FnOnce() -> T + Send + 'static,
        T: Send + 'static,
    {
        Ok(f())
    }
}
