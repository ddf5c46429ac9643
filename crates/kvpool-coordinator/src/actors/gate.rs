//! Bounded ways into mailboxes, which are unbounded themselves (R12): a [`Gate`] counts messages that carry a caller, a
//! [`Signal`] coalesces those that only say "look again".

use crate::metric_definitions as m;
use kvpool_proto::meta::{Reason, Refused};
use ractor::{ActorRef, Message};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::JoinHandle;

/// At most so many messages are behind it.
pub(crate) struct Gate {
    name: &'static str,
    permits: Arc<Semaphore>,
}

/// Travels inside a message; the place is free again when the message was handled, or lost with its actor.
#[derive(Debug)]
pub(crate) struct Permit {
    name: &'static str,
    _permit: OwnedSemaphorePermit,
}

impl Gate {
    pub(crate) fn new(name: &'static str, size: usize) -> Self {
        Gate {
            name,
            permits: Arc::new(Semaphore::new(size)),
        }
    }

    /// # Errors
    /// `overload` when the gate is full.
    pub(crate) fn enter(&self) -> Result<Permit, Refused> {
        let Ok(permit) = self.permits.clone().try_acquire_owned() else {
            metrics::counter!(m::MAILBOX_REFUSED, "gate" => self.name).increment(1);
            let refused = Refused::new(Reason::Overload, format!("too many {} at once", self.name));
            return Err(refused.with_retry_after(Duration::from_millis(100)));
        };
        metrics::gauge!(m::MAILBOX_DEPTH, "gate" => self.name).increment(1.0);
        Ok(Permit {
            name: self.name,
            _permit: permit,
        })
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        metrics::gauge!(m::MAILBOX_DEPTH, "gate" => self.name).decrement(1.0);
    }
}

/// At most one message is on its way. Made anew with each life of an actor, so that none is missed after a crash.
#[derive(Default)]
pub(crate) struct Signal(AtomicBool);

impl Signal {
    /// True when the caller has to send the message.
    pub(crate) fn raise(&self) -> bool {
        !self.0.swap(true, Ordering::AcqRel)
    }

    /// The message arrived. To be called before looking, so that a later change sends another one.
    pub(crate) fn take(&self) {
        self.0.store(false, Ordering::Release);
    }
}

/// A task that ends with its owner, also when the owner panics.
pub(crate) struct OwnedTask(JoinHandle<()>);

impl OwnedTask {
    pub(crate) fn spawn(task: impl Future<Output = ()> + Send + 'static) -> Self {
        OwnedTask(tokio::spawn(task))
    }
}

impl Drop for OwnedTask {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Sends a message when it is dropped, so that an actor hears the end of its task even when the task fails.
pub(crate) struct Finally<M: Message> {
    actor: ActorRef<M>,
    message: Option<M>,
}

impl<M: Message> Finally<M> {
    /// `message` is for a task that fails; [`Self::set`] another one for its success.
    pub(crate) fn new(actor: ActorRef<M>, message: M) -> Self {
        Finally {
            actor,
            message: Some(message),
        }
    }

    pub(crate) fn set(&mut self, message: M) {
        self.message = Some(message);
    }
}

impl<M: Message> Drop for Finally<M> {
    fn drop(&mut self) {
        if let Some(message) = self.message.take() {
            // A dead actor's successor looks by itself.
            let _ = self.actor.cast(message);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_gate_refuses_and_opens_again() {
        let gate = Gate::new("attaches", 2);
        let first = gate.enter().unwrap();
        let _second = gate.enter().unwrap();
        assert_eq!(gate.enter().unwrap_err().reason, Reason::Overload);
        drop(first);
        assert!(gate.enter().is_ok());
    }

    #[test]
    fn a_signal_sends_once_until_taken() {
        let signal = Signal::default();
        assert!(signal.raise());
        assert!(!signal.raise());
        signal.take();
        assert!(signal.raise());
    }
}
