//! Bringing one block to one peer while it still arrives: the same for a front end that forwards an upload, a primary that
//! replicates it, and the catch-up of a peer that missed it.

use std::io::IoSlice;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use bytes::Bytes;
use kvpool_store::{BlockPiece, BlockRef, BlockTail};
use kvpool_wire::lm::LmMeta;
use kvpool_wire::peer::{
    Condition, DropCode, FRAME_HEAD_BYTES, FrameHead, PutEnd, Reply, Request, RequestHead, Role, Usual,
};
use parking_lot::Mutex;
use smallvec::SmallVec;
use tokio::sync::{Notify, watch};
use tokio::time::Instant;

use super::wire::{Patience, WireError};
use super::{Asked, Conn, Failure, Peer, within};
use crate::ops::{FIRST_COPY_DEADLINE, ONWARD_STALL, SECOND_COPY_DEADLINE};
use crate::staging::Buffer;

/// Pieces handed to one `writev`.
const BATCH: usize = 16;
/// A head, and head and content of each frame; of the sizes that `SmallVec` has.
const SLICES: usize = 36;
/// After the last byte a primary may wait for its own second copy; its answer then has the way back as well.
const PRIMARY_ANSWER: std::time::Duration = SECOND_COPY_DEADLINE.saturating_add(FIRST_COPY_DEADLINE);

/// A frame's worth of a staged block, with its sum.
pub(crate) struct StagedPiece {
    pub(crate) bytes: Buffer,
    pub(crate) crc: u32,
}

/// A block on its way through a process without the slot: its pieces, kept (so that another copy can be tried) or let go
/// as they are sent.
pub(crate) struct StagedBlock {
    pub(crate) len: u64,
    /// Pieces are kept until the block is stored somewhere.
    pub(crate) kept: bool,
    pieces: Mutex<Vec<Option<Arc<StagedPiece>>>>,
    /// Pieces let go so far.
    gone: AtomicUsize,
    moved: Notify,
}

impl StagedBlock {
    pub(crate) fn new(len: u64, kept: bool) -> Arc<Self> {
        let pieces = Mutex::new(Vec::new());
        Arc::new(StagedBlock {
            len,
            kept,
            pieces,
            gone: AtomicUsize::new(0),
            moved: Notify::new(),
        })
    }

    pub(crate) fn push(&self, bytes: Buffer, crc: u32) {
        self.pieces.lock().push(Some(Arc::new(StagedPiece { bytes, crc })));
    }

    pub(crate) fn piece(&self, index: usize) -> Option<Arc<StagedPiece>> {
        self.pieces.lock().get(index)?.clone()
    }

    /// Pieces that are held.
    pub(crate) fn waiting(&self) -> usize {
        self.pieces
            .lock()
            .len()
            .saturating_sub(self.gone.load(Ordering::Acquire))
    }

    /// Waits until a piece is let go.
    pub(crate) async fn moved(&self) {
        self.moved.notified().await;
    }

    /// Piece `index` has been sent.
    fn sent(&self, index: usize) {
        if self.kept {
            return;
        }
        let piece = self.pieces.lock().get_mut(index).and_then(Option::take);
        if piece.is_some() {
            self.gone.fetch_add(1, Ordering::Release);
            // One waiter, and a permit is kept when it is not waiting yet.
            self.moved.notify_one();
        }
    }
}

/// Where the bytes come from.
#[derive(Clone)]
pub(crate) enum Source {
    /// A block being written into the local store.
    Tail(BlockTail),
    /// A block in the local store.
    Stored(BlockRef),
    /// A block passing through.
    Staged(Arc<StagedBlock>),
}

enum Piece {
    Stored(BlockPiece),
    Staged(Arc<StagedPiece>),
}

impl Piece {
    fn bytes(&self) -> &[u8] {
        match self {
            Piece::Stored(piece) => piece.as_ref(),
            Piece::Staged(piece) => &piece.bytes,
        }
    }

    fn head(&self) -> [u8; FRAME_HEAD_BYTES] {
        let crc = match self {
            Piece::Stored(piece) => piece.crc(),
            Piece::Staged(piece) => piece.crc,
        };
        FrameHead::Data {
            len: self.bytes().len(),
            crc,
        }
        .encode()
    }
}

impl Source {
    fn piece(&self, index: usize) -> Option<Piece> {
        match self {
            Source::Tail(tail) => tail.piece(index).map(Piece::Stored),
            Source::Stored(block) => block.piece(index).map(Piece::Stored),
            Source::Staged(block) => block.piece(index).map(Piece::Staged),
        }
    }

    fn sent(&self, index: usize) {
        if let Source::Staged(block) = self {
            block.sent(index);
        }
    }
}

/// How far the upload is, for the senders that follow it. Dropped by the uploader: the upload ended early.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Step {
    /// Complete pieces.
    pub(crate) pieces: usize,
    /// Set when it is over, one way or the other.
    pub(crate) end: Option<PutEnd>,
}

/// What a peer made of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sent {
    Stored {
        copies: u8,
        usual: Usual,
    },
    Dropped(DropCode),
    ConditionFailed,
    /// The upload ended early.
    Aborted,
}

/// What is sent: the head of the put.
#[derive(Clone)]
pub(crate) struct Outgoing {
    pub(crate) key: Bytes,
    pub(crate) role: Role,
    pub(crate) len: u64,
    pub(crate) meta: Option<LmMeta>,
    /// 0 when the receiver is to give it.
    pub(crate) write_id: u64,
    pub(crate) asked: Asked,
}

/// Sends a block and waits for the outcome. Tells the peer's breaker how it went. Ends soon after the upload does,
/// whatever the peer does.
pub(crate) async fn send_block(
    peer: Arc<Peer>,
    outgoing: Outgoing,
    source: Source,
    steps: watch::Receiver<Step>,
) -> Result<Sent, Failure> {
    let started = Instant::now();
    let sent = attempt(&peer, &outgoing, &source, steps).await;
    match &sent {
        Ok(Sent::Aborted) => {}
        Ok(_) => peer.answered(),
        Err(failure) => peer.observe(failure, started),
    }
    sent
}

async fn attempt(
    peer: &Arc<Peer>,
    outgoing: &Outgoing,
    source: &Source,
    mut steps: watch::Receiver<Step>,
) -> Result<Sent, Failure> {
    let mut conn = peer.connect(within(FIRST_COPY_DEADLINE)).await?;
    let request = Request::Put {
        key: &outgoing.key,
        role: outgoing.role,
        len: outgoing.len,
        meta: outgoing.meta,
        write_id: outgoing.write_id,
        ttl_ms: None,
        condition: Condition::Always,
    };
    let Asked { request_id, known, .. } = outgoing.asked;
    RequestHead {
        request_id,
        deadline_ms: 0,
        known,
        request,
    }
    .encode(&mut conn.wire.out);
    // The head leaves with the first pieces when some are there.
    let mut sender = Sender {
        conn,
        next: 0,
        ready: false,
        admitted_by: within(FIRST_COPY_DEADLINE),
    };
    loop {
        let step = *steps.borrow_and_update();
        if let Some(refused) = sender.write(source, step).await? {
            return Ok(refused);
        }
        if let Some(end) = step.end {
            return sender.finish(end).await;
        }
        tokio::select! {
            biased;
            refused = sender.admission(), if !sender.ready => {
                if let Some(refused) = refused? {
                    return Ok(refused);
                }
            }
            changed = steps.changed() => {
                if changed.is_err() {
                    return Ok(Sent::Aborted);
                }
            }
        }
    }
}

struct Sender {
    conn: Conn,
    /// Pieces sent.
    next: usize,
    /// The peer has said that there is room.
    ready: bool,
    /// When it must have said so.
    admitted_by: Instant,
}

impl Sender {
    /// Waits for the early answer; `Some` when it is a refusal. Cancel-safe.
    async fn admission(&mut self) -> Result<Option<Sent>, Failure> {
        self.conn.reply(Patience::Until(self.admitted_by)).await?;
        match self.conn.last_reply()? {
            Reply::Ready => {
                self.ready = true;
                Ok(None)
            }
            // The connection is dropped with what was sent after the refusal.
            Reply::Dropped { reason } => Ok(Some(Sent::Dropped(reason))),
            Reply::ConditionFailed => Ok(Some(Sent::ConditionFailed)),
            _ => Err(Failure::OutOfTurn),
        }
    }

    /// Writes the pieces that are there. A refusal may come between.
    async fn write(&mut self, source: &Source, step: Step) -> Result<Option<Sent>, Failure> {
        let patience = Patience::Stall(ONWARD_STALL);
        if self.next == 0 && step.pieces == 0 && !self.conn.wire.out.is_empty() {
            self.conn.wire.flush(patience).await?;
        }
        while self.next < step.pieces {
            let upto = step.pieces.min(self.next + BATCH);
            let pieces: SmallVec<[Piece; BATCH]> = (self.next..upto).map_while(|index| source.piece(index)).collect();
            if pieces.is_empty() {
                // Let go after it was sent elsewhere: this attempt came too late.
                return Err(WireError::Deadline.into());
            }
            let heads: SmallVec<[_; BATCH]> = pieces.iter().map(Piece::head).collect();
            let front = std::mem::take(&mut self.conn.wire.out);
            let mut slices: SmallVec<[IoSlice<'_>; SLICES]> = SmallVec::new();
            slices.push(IoSlice::new(&front));
            for (head, piece) in heads.iter().zip(&pieces) {
                slices.push(IoSlice::new(head));
                slices.push(IoSlice::new(piece.bytes()));
            }
            let written = self.conn.write(&mut slices, patience).await;
            drop(slices);
            self.conn.wire.out = front;
            self.conn.wire.out.clear();
            written?;
            (self.next..self.next + pieces.len()).for_each(|index| source.sent(index));
            self.next += pieces.len();
            if !self.ready && Instant::now() >= self.admitted_by {
                // It takes bytes but does not speak: the kernel of a frozen process does that.
                if let Some(refused) = self.admission().await? {
                    return Ok(Some(refused));
                }
            }
        }
        Ok(None)
    }

    async fn finish(mut self, end: PutEnd) -> Result<Sent, Failure> {
        if !end.commit {
            // Closing says it as well, and at once.
            return Ok(Sent::Aborted);
        }
        self.conn
            .write(&mut [IoSlice::new(&end.encode())], Patience::Stall(ONWARD_STALL))
            .await?;
        if !self.ready
            && let Some(refused) = self.admission().await?
        {
            return Ok(refused);
        }
        self.conn.reply(Patience::Until(within(PRIMARY_ANSWER))).await?;
        let sent = match self.conn.last_reply()? {
            Reply::Stored { copies, usual } => Sent::Stored { copies, usual },
            Reply::Dropped { reason } => Sent::Dropped(reason),
            Reply::ConditionFailed => Sent::ConditionFailed,
            _ => return Err(Failure::OutOfTurn),
        };
        self.conn.release();
        Ok(sent)
    }
}
