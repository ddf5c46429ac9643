//! Where a front end puts the bytes of an upload.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use kvpool_store::{BlockWriter, Committed, Refused};

use crate::ops::{Condition, DropReason, PutOutcome, PutSpec};
use crate::router::Router;

/// Bytes of scratch memory of a discarding sink.
const SCRATCH_BYTES: usize = 16 * 1024;

/// Takes exactly the announced bytes. Dropped before `finish`, the block was never visible.
pub struct PutSink {
    router: Arc<Router>,
    key: Bytes,
    spec: PutSpec,
    state: State,
}

enum State {
    Local(BlockWriter),
    /// Reads to the end and forgets.
    Discard {
        remaining: u64,
        scratch: Box<[u8]>,
        outcome: PutOutcome,
    },
}

impl PutSink {
    pub(crate) fn local(router: Arc<Router>, key: Bytes, spec: PutSpec, writer: BlockWriter) -> Self {
        PutSink { router, key, spec, state: State::Local(writer) }
    }

    pub(crate) fn discard(router: Arc<Router>, key: Bytes, spec: PutSpec, outcome: PutOutcome) -> Self {
        let size = usize::try_from(spec.len).map_or(SCRATCH_BYTES, |len| len.min(SCRATCH_BYTES));
        let scratch = vec![0; size].into_boxed_slice();
        let state = State::Discard { remaining: spec.len, scratch, outcome };
        PutSink { router, key, spec, state }
    }

    /// Memory for the next bytes; not empty while bytes remain.
    pub fn spare(&mut self) -> &mut [u8] {
        match &mut self.state {
            State::Local(writer) => writer.spare(),
            State::Discard { remaining, scratch, .. } => {
                let n = usize::try_from(*remaining).map_or(scratch.len(), |left| left.min(scratch.len()));
                &mut scratch[..n]
            }
        }
    }

    /// `n` bytes of `spare` are filled.
    pub async fn advance(&mut self, n: usize) {
        match &mut self.state {
            State::Local(writer) => writer.advance(n),
            State::Discard { remaining, .. } => *remaining = remaining.saturating_sub(n as u64),
        }
    }

    /// Bytes still to come.
    #[must_use]
    pub fn remaining(&self) -> u64 {
        match &self.state {
            State::Local(writer) => writer.remaining(),
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
        match self.state {
            State::Local(mut writer) => {
                let now = self.router.now_ms();
                writer.set_terms(ttl.map(|ttl| now.saturating_add(crate::clock::to_ms(ttl))), condition);
                match writer.commit(now) {
                    Ok(Committed::Stored { .. } | Committed::Superseded) => {
                        self.router.lengths().wrote(&self.key, self.spec.len, now);
                        PutOutcome::Stored1
                    }
                    Err(refused) => outcome_of(refused),
                }
            }
            State::Discard { outcome, .. } => outcome,
        }
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
