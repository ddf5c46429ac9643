//! An upload passed on to a peer, and when that fails to another copy.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use kvpool_wire::peer::{DropCode, FRAME_BYTES, PutEnd, Role};
use tokio::sync::watch;
use tokio::time::Instant;
use tracing::{Instrument, debug_span};

use super::Sending;
use crate::clock::to_ms;
use crate::ops::{Condition, DropReason, ONWARD_STALL, OP_DEADLINE, Op, PutOutcome, PutSpec};
use crate::peer::send::{Outgoing, Sent, Source, StagedBlock, Step, send_block};
use crate::peer::{Failure, Peer};
use crate::router::{Router, condition_to, usual_from};
use crate::routing::Holder;
use crate::staging::{Buffer, Reservation};
use crate::ticks::until;

/// Longest time from the last byte to the outcome.
pub(super) const ANSWER: Duration = Duration::from_millis(900);
/// Pieces that a forwarded upload holds when it cannot keep all of them.
const WINDOW_PIECES: u64 = 4;

/// An upload passed on to a peer. Its pieces are kept until the outcome when there is room, so that another copy can be
/// tried; otherwise a window of them slides.
pub(super) struct Forward {
    op: Op,
    block: Arc<StagedBlock>,
    buffer: Buffer,
    filled: usize,
    /// Bytes of complete pieces.
    staged: u64,
    crc: u32,
    steps: watch::Sender<Step>,
    attempt: Attempt,
    /// Copies not tried yet, best first.
    others: std::vec::IntoIter<Holder>,
    _held: Reservation,
}

/// The copy that is being tried.
enum Attempt {
    Peer(Arc<Peer>, Sending),
    /// This process, once all bytes are there.
    Me,
    /// Nobody is left.
    Failed(DropReason),
}

/// What `sending` said, for the one loop that decides what next.
enum Verdict {
    Outcome(PutOutcome),
    TryNext(DropReason),
}

impl Forward {
    pub(super) fn new(
        router: &Arc<Router>,
        op: Op,
        key: &Bytes,
        spec: &PutSpec,
        first: Holder,
        others: Vec<Holder>,
    ) -> Option<Self> {
        let Holder::Peer(target) = first else { return None };
        let window = spec.len.min(WINDOW_PIECES * FRAME_BYTES as u64);
        let whole = router
            .staging()
            .try_keep(spec.len.div_ceil(FRAME_BYTES as u64) * FRAME_BYTES as u64);
        let kept = whole.is_some();
        let held = whole.or_else(|| router.staging().try_reserve(window))?;
        let block = StagedBlock::new(spec.len, kept);
        let (steps, follow) = watch::channel(Step::default());
        let buffer = router.staging().buffer(piece_len(spec.len, 0));
        let sending = start(router, &op, key, spec, &target, &block, follow);
        Some(Forward {
            op,
            block,
            buffer,
            filled: 0,
            staged: 0,
            crc: 0,
            steps,
            attempt: Attempt::Peer(target, sending),
            others: others.into_iter(),
            _held: held,
        })
    }

    pub(super) fn remaining(&self) -> u64 {
        self.block.len - self.staged - self.filled as u64
    }

    pub(super) fn spare(&mut self) -> &mut [u8] {
        &mut self.buffer[self.filled..]
    }

    /// Sums new bytes; a full piece goes to the sender. An error is the outcome: nothing more is worth sending.
    pub(super) async fn advance(
        &mut self,
        router: &Arc<Router>,
        key: &Bytes,
        spec: &PutSpec,
        n: usize,
    ) -> Result<(), PutOutcome> {
        let n = n.min(self.buffer.len() - self.filled);
        self.crc = crc32c::crc32c_append(self.crc, &self.buffer[self.filled..self.filled + n]);
        self.filled += n;
        if self.filled < self.buffer.len() || self.filled == 0 {
            return Ok(());
        }
        self.staged += self.filled as u64;
        let next = router.staging().buffer(piece_len(self.block.len, self.staged));
        self.block.push(std::mem::replace(&mut self.buffer, next), self.crc);
        (self.filled, self.crc) = (0, 0);
        self.steps.send_modify(|step| step.pieces += 1);
        let mut stalled = !self.block.kept && self.slide().await.is_none();
        if let Attempt::Peer(_, sending) = &mut self.attempt
            && sending.is_finished()
        {
            let sent = sending.await;
            stalled = false;
            if let Some(outcome) = self.conclude(router, key, spec, Some(sent)) {
                return Err(outcome);
            }
        }
        match self.attempt {
            Attempt::Failed(reason) => Err(PutOutcome::Dropped(reason)),
            _ if stalled => Err(PutOutcome::Dropped(DropReason::Stalled)),
            Attempt::Peer(..) | Attempt::Me => Ok(()),
        }
    }

    /// Waits until the window has room again.
    async fn slide(&self) -> Option<()> {
        let end_by = Instant::now() + ONWARD_STALL;
        while self.block.waiting() as u64 > WINDOW_PIECES - 2 {
            until(end_by, self.block.moved()).await?;
        }
        Some(())
    }

    /// An attempt has ended, or its time is up: the outcome, or the next copy is tried.
    fn conclude(&mut self, router: &Arc<Router>, key: &Bytes, spec: &PutSpec, sent: Ended) -> Option<PutOutcome> {
        let reason = match verdict(router, key, sent) {
            Verdict::Outcome(outcome) => return Some(outcome),
            Verdict::TryNext(reason) => reason,
        };
        if let Attempt::Peer(peer, _) = &self.attempt {
            let (request_id, reason) = (self.op.request_id, reason.word());
            tracing::debug!(request_id, peer = peer.id, reason, "an upload failed at a copy");
        }
        self.attempt = match self.others.next().filter(|_| self.block.kept) {
            Some(Holder::Peer(next)) => {
                let follow = self.steps.subscribe();
                let sending = start(router, &self.op, key, spec, &next, &self.block, follow);
                Attempt::Peer(next, sending)
            }
            Some(Holder::Me) => Attempt::Me,
            None => Attempt::Failed(reason),
        };
        None
    }

    pub(super) async fn settle(
        mut self,
        router: &Arc<Router>,
        key: &Bytes,
        spec: PutSpec,
        ttl: Option<Duration>,
        condition: Condition,
    ) -> PutOutcome {
        let end_by = Instant::now() + ANSWER;
        let end = PutEnd {
            commit: true,
            condition: condition_to(condition),
            ttl_ms: ttl.map(to_ms),
        };
        self.steps.send_modify(|step| step.end = Some(end));
        loop {
            let sent = match &mut self.attempt {
                Attempt::Failed(reason) => return PutOutcome::Dropped(*reason),
                Attempt::Me => return keep_here(router, &self.op, key, spec, &self.block, ttl, condition).await,
                Attempt::Peer(_, sending) => until(end_by, sending).await,
            };
            let late = sent.is_none();
            let outcome = self.conclude(router, key, &spec, sent);
            if matches!(outcome, Some(PutOutcome::Stored2 | PutOutcome::Stored1)) {
                router.lengths().wrote(key, spec.len, router.now_ms());
            }
            match outcome {
                Some(outcome) => return outcome,
                None if late => return PutOutcome::Dropped(DropReason::Stalled),
                None => {}
            }
        }
    }
}

/// How a sender ended; `None` when its time was up.
type Ended = Option<Result<Result<Sent, Failure>, tokio::task::JoinError>>;

fn verdict(router: &Router, key: &[u8], sent: Ended) -> Verdict {
    match sent {
        None | Some(Err(_)) => Verdict::TryNext(DropReason::Stalled),
        Some(Ok(Err(failure))) if failure.is_deadline() => Verdict::TryNext(DropReason::Stalled),
        Some(Ok(Err(Failure::Busy))) => Verdict::TryNext(DropReason::Shed),
        Some(Ok(Err(_))) => Verdict::TryNext(DropReason::OwnerDown),
        Some(Ok(Ok(sent))) => match sent {
            Sent::Stored { copies, usual } => {
                router.lengths().learn(key, usual_from(usual), router.now_ms());
                Verdict::Outcome(if copies >= 2 {
                    PutOutcome::Stored2
                } else {
                    PutOutcome::Stored1
                })
            }
            Sent::ConditionFailed => Verdict::Outcome(PutOutcome::ConditionFailed),
            Sent::Dropped(DropCode::NotOwner) => Verdict::TryNext(DropReason::NotOwner),
            Sent::Dropped(code) => Verdict::Outcome(PutOutcome::Dropped(drop_from(code))),
            Sent::Aborted => Verdict::TryNext(DropReason::Stalled),
        },
    }
}

fn start(
    router: &Arc<Router>,
    op: &Op,
    key: &Bytes,
    spec: &PutSpec,
    target: &Arc<Peer>,
    block: &Arc<StagedBlock>,
    follow: watch::Receiver<Step>,
) -> Sending {
    let outgoing = Outgoing {
        key: key.clone(),
        role: Role::Primary,
        len: spec.len,
        meta: spec.meta,
        write_id: 0,
        asked: router.asked(op, op.started + OP_DEADLINE),
    };
    let span = debug_span!("forward", request_id = op.request_id, peer = %target.id);
    let source = Source::Staged(Arc::clone(block));
    tokio::spawn(send_block(Arc::clone(target), outgoing, source, follow).instrument(span))
}

/// Stores a staged block here, in the place of a primary that failed.
async fn keep_here(
    router: &Arc<Router>,
    op: &Op,
    key: &Bytes,
    spec: PutSpec,
    block: &StagedBlock,
    ttl: Option<Duration>,
    condition: Condition,
) -> PutOutcome {
    let mut sink = router.accept_put(op, key, spec);
    let mut index = 0;
    while sink.remaining() > 0 {
        let Some(piece) = block.piece(index) else {
            return PutOutcome::Dropped(DropReason::Stalled);
        };
        let mut bytes = &piece.bytes[..];
        // A discarding sink has less spare than a piece.
        while !bytes.is_empty() {
            let spare = sink.spare();
            let n = spare.len().min(bytes.len());
            spare[..n].copy_from_slice(&bytes[..n]);
            bytes = &bytes[n..];
            sink.advance(n).await;
        }
        index += 1;
    }
    let (outcome, _) = Box::pin(sink.settle(ttl, condition)).await;
    outcome
}

/// Bytes of the piece that begins at `offset`.
fn piece_len(len: u64, offset: u64) -> usize {
    usize::try_from(len.saturating_sub(offset)).map_or(FRAME_BYTES, |left| left.min(FRAME_BYTES))
}

fn drop_from(code: DropCode) -> DropReason {
    match code {
        DropCode::Size => DropReason::Size,
        DropCode::Shed => DropReason::Shed,
        DropCode::Generation => DropReason::Generation,
        DropCode::NotOwner => DropReason::NotOwner,
        DropCode::Stalled => DropReason::Stalled,
    }
}
