//! Where the bytes of an upload go: into the local store and on to the other copies, onward to a peer, or nowhere.
//!
//! Nothing is visible before `finish`. However peers behave, the uploader is never held up for longer than
//! [`crate::ops::ONWARD_STALL`] at a time, and the outcome is known within [`forward::ANSWER`] of the last byte.

mod forward;
mod local;

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use kvpool_store::Refused;
use tokio::task::JoinHandle;

use crate::ops::{Condition, DropReason, Op, PutOutcome, PutSpec};
use crate::peer::Failure;
use crate::peer::send::Sent;
use crate::router::Router;
use crate::routing::Holder;
use forward::Forward;

pub(crate) use local::LocalPut;

/// Bytes of scratch memory of a discarding sink.
const SCRATCH_BYTES: usize = 16 * 1024;

/// A sender at work.
type Sending = JoinHandle<Result<Sent, Failure>>;

/// Takes exactly the announced bytes. Dropped before `finish`, the block was never visible.
pub struct PutSink {
    router: Arc<Router>,
    key: Bytes,
    spec: PutSpec,
    state: State,
}

enum State {
    Local(Box<LocalPut>),
    Forward(Box<Forward>),
    /// Reads to the end and forgets.
    Discard {
        remaining: u64,
        scratch: Box<[u8]>,
        outcome: PutOutcome,
    },
}

impl PutSink {
    pub(crate) fn local(router: Arc<Router>, key: Bytes, spec: PutSpec, put: LocalPut) -> Self {
        PutSink {
            router,
            key,
            spec,
            state: State::Local(Box::new(put)),
        }
    }

    pub(crate) fn discard(router: Arc<Router>, key: Bytes, spec: PutSpec, outcome: PutOutcome) -> Self {
        PutSink {
            router,
            key,
            spec,
            state: discard(spec.len, outcome),
        }
    }

    /// Passes the upload on to `first`, and when that fails to one of `others`.
    pub(crate) fn forward(
        router: Arc<Router>,
        op: Op,
        key: Bytes,
        spec: PutSpec,
        first: Holder,
        others: Vec<Holder>,
    ) -> Self {
        let state = match Forward::new(&router, op, &key, &spec, first, others) {
            Some(forward) => State::Forward(Box::new(forward)),
            None => discard(spec.len, PutOutcome::Dropped(DropReason::Shed)),
        };
        PutSink {
            router,
            key,
            spec,
            state,
        }
    }

    /// The write was refused before its first byte, with this outcome.
    pub(crate) fn refused(&self) -> Option<PutOutcome> {
        match &self.state {
            State::Discard { outcome, .. } => Some(*outcome),
            State::Local(_) | State::Forward(_) => None,
        }
    }

    /// Memory for the next bytes; not empty while bytes remain.
    pub fn spare(&mut self) -> &mut [u8] {
        match &mut self.state {
            State::Local(put) => put.spare(),
            State::Forward(forward) => forward.spare(),
            State::Discard { remaining, scratch, .. } => {
                let n = usize::try_from(*remaining).map_or(scratch.len(), |left| left.min(scratch.len()));
                &mut scratch[..n]
            }
        }
    }

    /// `n` bytes of `spare` are filled. Waits at most [`ONWARD_STALL`] for onward progress; then the rest is discarded.
    pub async fn advance(&mut self, n: usize) {
        match &mut self.state {
            State::Local(put) => {
                put.advance(n, None);
            }
            State::Forward(forward) => {
                if let Err(outcome) = forward.advance(&self.router, &self.key, &self.spec, n).await {
                    let remaining = forward.remaining();
                    self.state = discard(remaining, outcome);
                }
            }
            State::Discard { remaining, .. } => *remaining = remaining.saturating_sub(n as u64),
        }
    }

    /// As `advance`, for bytes that came in a frame whose sum was just verified.
    pub(crate) fn advance_verified(&mut self, n: usize, crc: u32) {
        match &mut self.state {
            State::Local(put) => {
                put.advance(n, Some(crc));
            }
            // Peers' uploads are never forwarded again.
            State::Forward(_) => {}
            State::Discard { remaining, .. } => *remaining = remaining.saturating_sub(n as u64),
        }
    }

    /// Bytes still to come.
    #[must_use]
    pub fn remaining(&self) -> u64 {
        match &self.state {
            State::Local(put) => put.remaining(),
            State::Forward(forward) => forward.remaining(),
            State::Discard { remaining, .. } => *remaining,
        }
    }

    /// Ends the write after its last byte.
    pub async fn finish(self) -> PutOutcome {
        let (ttl, condition) = (self.spec.ttl, self.spec.condition);
        self.finish_with(ttl, condition).await
    }

    /// As [`Self::finish`], with terms that the protocol says only after the value.
    pub async fn finish_with(self, ttl: Option<Duration>, condition: Condition) -> PutOutcome {
        self.settle(ttl, condition).await.0
    }

    /// Ends the write; also says how many copies are known to hold it.
    pub(crate) async fn settle(self, ttl: Option<Duration>, condition: Condition) -> (PutOutcome, u8) {
        let outcome = match self.state {
            State::Local(put) => return put.settle(&self.router, &self.key, ttl, condition).await,
            State::Forward(forward) => forward.settle(&self.router, &self.key, self.spec, ttl, condition).await,
            State::Discard { outcome, .. } => outcome,
        };
        let copies = match outcome {
            PutOutcome::Stored2 => 2,
            PutOutcome::Stored1 => 1,
            PutOutcome::Dropped(_) | PutOutcome::ConditionFailed => 0,
        };
        (outcome, copies)
    }
}

fn discard(remaining: u64, outcome: PutOutcome) -> State {
    let size = usize::try_from(remaining).map_or(SCRATCH_BYTES, |len| len.min(SCRATCH_BYTES));
    State::Discard {
        remaining,
        scratch: vec![0; size].into_boxed_slice(),
        outcome,
    }
}

/// The outcome of a write that the store refused.
pub(crate) fn outcome_of(refused: Refused) -> PutOutcome {
    match refused {
        Refused::Exists | Refused::NotFound => PutOutcome::ConditionFailed,
        Refused::Size { .. } | Refused::KeyTooLong { .. } | Refused::MetaTooLong { .. } => {
            PutOutcome::Dropped(DropReason::Size)
        }
        Refused::Shed => PutOutcome::Dropped(DropReason::Shed),
        Refused::Incomplete { .. } => PutOutcome::Dropped(DropReason::Stalled),
    }
}
