//! Where the bytes of an upload go: into the local store and on to the other copies, onward to a peer, or nowhere.
//!
//! Nothing is visible before `finish`. However peers behave, the uploader is never held up for longer than
//! [`ONWARD_STALL`] at a time, and the outcome is known within [`ANSWER`] of the last byte.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use kvpool_state::slot_of;
use kvpool_store::{BlockWriter, Committed, PIECE_BYTES, Refused};
use kvpool_wire::peer::{DropCode, FRAME_BYTES, PutEnd, Role};
use smallvec::SmallVec;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::Instant;

use crate::clock::to_ms;
use crate::ops::{Condition, DropReason, ONWARD_STALL, OP_DEADLINE, Op, PutOutcome, PutSpec, SECOND_COPY_DEADLINE};
use crate::peer::gaps::Gap;
use crate::peer::send::{Outgoing, Sent, Source, StagedBlock, Step, send_block};
use crate::peer::{BreakerState, Failure, Peer};
use crate::router::{Router, usual_from};
use crate::routing::Holder;
use crate::staging::{Buffer, Reservation};
use crate::ticks::until;

/// Longest time from the last byte to the outcome.
const ANSWER: Duration = Duration::from_millis(900);
/// Bytes of scratch memory of a discarding sink.
const SCRATCH_BYTES: usize = 16 * 1024;
/// Pieces that a forwarded upload holds when it cannot keep all of them.
const WINDOW_PIECES: u64 = 4;

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
            State::Local(put) => put.writer.spare(),
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
                put.writer.advance(n);
                put.progress();
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
                put.writer.advance_with_crc(n, crc);
                put.progress();
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
            State::Local(put) => put.writer.remaining(),
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

/// A write into the local store, followed by one sender per other copy.
pub(crate) struct LocalPut {
    writer: BlockWriter,
    steps: watch::Sender<Step>,
    copies: SmallVec<[(Arc<Peer>, Sending); 2]>,
    /// Other copies get the write too.
    replicated: bool,
}

impl LocalPut {
    pub(crate) fn new(
        router: &Arc<Router>,
        op: Op,
        key: &Bytes,
        spec: PutSpec,
        writer: BlockWriter,
        replicated: bool,
    ) -> Self {
        let (steps, follow) = watch::channel(Step::default());
        let mut put = LocalPut {
            writer,
            steps,
            copies: SmallVec::new(),
            replicated,
        };
        if !replicated {
            return put;
        }
        let write_id = put.writer.write_id();
        let routing = router.routing();
        for copy in routing.list(slot_of(key)) {
            let Holder::Peer(peer) = &copy.holder else { continue };
            if peer.state() == BreakerState::Open {
                continue;
            }
            let outgoing = Outgoing {
                key: key.clone(),
                role: Role::Replica,
                len: spec.len,
                meta: spec.meta,
                write_id,
                asked: router.asked(&op, op.started),
            };
            let source = Source::Tail(put.writer.tail());
            let sending = send_block(Arc::clone(peer), outgoing, source, follow.clone());
            put.copies.push((Arc::clone(peer), tokio::spawn(sending)));
        }
        put
    }

    /// Tells the senders of pieces that became complete.
    fn progress(&self) {
        if self.copies.is_empty() {
            return;
        }
        let filled = self.writer.filled();
        let complete = if self.writer.remaining() == 0 {
            filled.div_ceil(PIECE_BYTES as u64)
        } else {
            filled / PIECE_BYTES as u64
        };
        self.steps.send_if_modified(|step| {
            let more = complete as usize > step.pieces;
            step.pieces = complete as usize;
            more
        });
    }

    async fn settle(
        self,
        router: &Arc<Router>,
        key: &Bytes,
        ttl: Option<Duration>,
        condition: Condition,
    ) -> (PutOutcome, u8) {
        let LocalPut {
            mut writer,
            steps,
            copies,
            replicated,
        } = self;
        let (len, write_id, now) = (writer.len(), writer.write_id(), router.now_ms());
        let ttl_ms = ttl.map(to_ms);
        writer.set_terms(ttl_ms.map(|ttl| now.saturating_add(ttl)), condition);
        match writer.commit(now) {
            Ok(Committed::Stored { .. } | Committed::Superseded) => {}
            // The senders see the end of `steps`: nobody keeps what the primary refused.
            Err(refused) => return (outcome_of(refused), 0),
        }
        router.lengths().wrote(key, len, now);
        if !replicated {
            return (PutOutcome::Stored1, 1);
        }
        // The condition was decided here; the copies follow.
        let end = PutEnd {
            commit: true,
            condition: kvpool_wire::peer::Condition::Always,
            ttl_ms,
        };
        steps.send_modify(|step| step.end = Some(end));
        // Whoever is in the list now holds the write only once it has said so; a copy that joined meanwhile is told later.
        let gap = Gap {
            write_id,
            removal: false,
        };
        for copy in router.routing().list(slot_of(key)) {
            if let Holder::Peer(peer) = &copy.holder {
                peer.gaps.add(key, gap);
            }
        }
        let copies = second_copies(key, write_id, copies).await;
        if copies == 0 {
            return (PutOutcome::Stored1, 1);
        }
        (PutOutcome::Stored2, 1 + copies)
    }
}

/// Waits until one other copy holds the write, or time is up; the others go on by themselves. Returns how many hold it.
async fn second_copies(key: &Bytes, write_id: u64, copies: SmallVec<[(Arc<Peer>, Sending); 2]>) -> u8 {
    use futures::StreamExt;
    use futures::stream::FuturesUnordered;

    let mut waiting: FuturesUnordered<_> = copies
        .into_iter()
        .map(|(peer, sending)| {
            let key = key.clone();
            async move {
                let stored = matches!(sending.await, Ok(Ok(Sent::Stored { .. })));
                if stored {
                    peer.gaps.close(&key, write_id);
                }
                stored
            }
        })
        .collect();
    let first = async {
        while let Some(stored) = waiting.next().await {
            if stored {
                return 1;
            }
        }
        0
    };
    let copies = until(Instant::now() + SECOND_COPY_DEADLINE, first).await.unwrap_or(0);
    if !waiting.is_empty() {
        // Bounded by the senders' own deadlines.
        tokio::spawn(async move { while waiting.next().await.is_some() {} });
    }
    copies
}

/// An upload passed on to a peer. Its pieces are kept until the outcome when there is room, so that another copy can be
/// tried; otherwise a window of them slides.
struct Forward {
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
    fn new(
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
            .try_reserve(spec.len.div_ceil(FRAME_BYTES as u64) * FRAME_BYTES as u64);
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

    fn remaining(&self) -> u64 {
        self.block.len - self.staged - self.filled as u64
    }

    fn spare(&mut self) -> &mut [u8] {
        &mut self.buffer[self.filled..]
    }

    /// Sums new bytes; a full piece goes to the sender. An error is the outcome: nothing more is worth sending.
    async fn advance(&mut self, router: &Arc<Router>, key: &Bytes, spec: &PutSpec, n: usize) -> Result<(), PutOutcome> {
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

    async fn settle(
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
            condition: crate::router::condition_to(condition),
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
    tokio::spawn(send_block(
        Arc::clone(target),
        outgoing,
        Source::Staged(Arc::clone(block)),
        follow,
    ))
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
