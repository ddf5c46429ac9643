//! The bytes of a hit: all there (local), or coming piece by piece from a peer.
//!
//! A body from a peer is verified frame by frame before it is passed on (R5). When its source stops, the same write is
//! fetched from the same offset of another copy, inside [`Body::next`]; the client sees a pause, not an end.

use std::fmt;
use std::sync::Arc;

use bytes::Bytes;
use kvpool_store::{BlockPiece, BlockRef, PIECE_BYTES};
use kvpool_wire::peer::{Reply, Request};
use tokio::time::Instant;

use crate::metric_definitions as names;
use crate::ops::{BODY_STALL, Op, SECOND_COPY_DEADLINE};
use crate::peer::wire::{Patience, WireError};
use crate::peer::{Asked, Conn, Failure, within};
use crate::router::Router;
use crate::routing::Holder;
use crate::staging::{Buffer, Reservation};

/// Every copy failed in mid-body; the reply cannot be finished.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("failed to finish a block: every copy of it stopped")]
pub struct BodyLost;

/// Body of a hit, in order.
#[derive(Debug)]
pub struct Body {
    kind: Kind,
}

#[derive(Debug)]
enum Kind {
    Local {
        block: BlockRef,
        next: usize,
    },
    /// All of it, taken from a peer before the first byte was promised.
    Whole {
        len: u64,
        pieces: std::vec::IntoIter<Buffer>,
        _held: Reservation,
    },
    Stream(Box<Stream>),
}

/// Some bytes of a body, verified (R5). Drop it before asking for the next: staging memory is reserved for one.
pub enum Piece {
    /// In the local store's memory.
    Block(BlockPiece),
    /// In staging memory.
    Staged(Buffer),
    /// Bytes of their own.
    Owned(Bytes),
}

impl AsRef<[u8]> for Piece {
    fn as_ref(&self) -> &[u8] {
        match self {
            Piece::Block(piece) => piece.as_ref(),
            Piece::Staged(buffer) => buffer,
            Piece::Owned(bytes) => bytes,
        }
    }
}

impl fmt::Debug for Buffer {
    // Values are prompts in another form and are not printed.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Buffer")
            .field("len", &self.len())
            .finish_non_exhaustive()
    }
}

impl Body {
    pub(crate) fn local(block: BlockRef) -> Self {
        Body {
            kind: Kind::Local { block, next: 0 },
        }
    }

    pub(crate) fn whole(len: u64, pieces: Vec<Buffer>, held: Reservation) -> Self {
        Body {
            kind: Kind::Whole {
                len,
                pieces: pieces.into_iter(),
                _held: held,
            },
        }
    }

    pub(crate) fn stream(stream: Stream) -> Self {
        Body {
            kind: Kind::Stream(Box::new(stream)),
        }
    }

    /// Bytes of the whole value.
    #[must_use]
    #[allow(clippy::len_without_is_empty)] // length zero is a value like any other here
    pub fn len(&self) -> u64 {
        match &self.kind {
            Kind::Local { block, .. } => block.len(),
            Kind::Whole { len, .. } => *len,
            Kind::Stream(stream) => stream.len,
        }
    }

    /// The block itself when all of it is in the local store.
    #[must_use]
    pub fn as_local(&self) -> Option<&BlockRef> {
        match &self.kind {
            Kind::Local { block, .. } => Some(block),
            Kind::Whole { .. } | Kind::Stream(_) => None,
        }
    }

    /// The next bytes, `None` after the last.
    ///
    /// # Errors
    /// [`BodyLost`] when no copy can go on.
    pub async fn next(&mut self) -> Result<Option<Piece>, BodyLost> {
        match &mut self.kind {
            Kind::Local { block, next } => {
                let piece = block.piece(*next);
                *next += 1;
                Ok(piece.map(Piece::Block))
            }
            Kind::Whole { pieces, .. } => Ok(pieces.next().map(Piece::Staged)),
            Kind::Stream(stream) => stream.next().await,
        }
    }
}

/// A body under way from a peer.
pub(crate) struct Stream {
    router: Arc<Router>,
    op: Op,
    key: Bytes,
    len: u64,
    write_id: u64,
    /// Bytes passed on.
    sent: u64,
    /// The first frame, which came before the hit was announced.
    first: Option<Buffer>,
    from: From,
    /// Copies that may go on when this one stops.
    others: Vec<Holder>,
    _held: Reservation,
}

enum From {
    Peer(Conn),
    Local(BlockRef),
    Nobody,
}

impl fmt::Debug for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Stream")
            .field("len", &self.len)
            .field("sent", &self.sent)
            .finish_non_exhaustive()
    }
}

/// What a stream begins with.
pub(crate) struct Opening {
    pub(crate) conn: Conn,
    pub(crate) first: Option<Buffer>,
    pub(crate) held: Reservation,
    pub(crate) len: u64,
    pub(crate) write_id: u64,
}

impl Stream {
    pub(crate) fn new(router: Arc<Router>, op: Op, key: Bytes, opening: Opening, others: Vec<Holder>) -> Self {
        let Opening {
            conn,
            first,
            held,
            len,
            write_id,
        } = opening;
        Stream {
            router,
            op,
            key,
            len,
            write_id,
            sent: 0,
            first,
            from: From::Peer(conn),
            others,
            _held: held,
        }
    }

    async fn next(&mut self) -> Result<Option<Piece>, BodyLost> {
        if let Some(first) = self.first.take() {
            return Ok(Some(self.pass(Piece::Staged(first))));
        }
        if self.sent >= self.len {
            return Ok(None);
        }
        loop {
            match &mut self.from {
                From::Local(block) => {
                    let piece = block.piece((self.sent / PIECE_BYTES as u64) as usize).ok_or(BodyLost)?;
                    return Ok(Some(self.pass(Piece::Block(piece))));
                }
                From::Peer(conn) => {
                    // While another copy can take over there is no reason to wait the whole time for this one.
                    let stall = if self.others.is_empty() {
                        BODY_STALL
                    } else {
                        SECOND_COPY_DEADLINE
                    };
                    let left = self.len - self.sent;
                    match conn.frame(self.router.staging(), left, Patience::Stall(stall)).await {
                        Ok(buffer) => return Ok(Some(self.pass(Piece::Staged(buffer)))),
                        Err(failure) => self.lost(&failure),
                    }
                }
                From::Nobody => self.resume().await?,
            }
        }
    }

    /// Counts bytes passed on; with the last ones the connection goes back to its pool.
    fn pass(&mut self, piece: Piece) -> Piece {
        self.sent += piece.as_ref().len() as u64;
        if self.sent >= self.len
            && let From::Peer(conn) = std::mem::replace(&mut self.from, From::Nobody)
        {
            conn.release();
        }
        piece
    }

    fn lost(&mut self, failure: &Failure) {
        if let From::Peer(conn) = std::mem::replace(&mut self.from, From::Nobody) {
            tracing::debug!(request_id = self.op.request_id, peer = conn.peer.id, %failure, "a body stopped");
            if failure.is_deadline() {
                conn.peer.late();
            } else {
                conn.peer.failed();
            }
        }
    }

    /// Finds another copy of the same write and goes on at the same offset.
    async fn resume(&mut self) -> Result<(), BodyLost> {
        while !self.others.is_empty() {
            self.from = match self.others.remove(0) {
                Holder::Me => match self.router.peek(&self.key) {
                    Some(block) if block.write_id() == self.write_id => From::Local(block),
                    _ => continue,
                },
                Holder::Peer(peer) => {
                    let deadline = within(BODY_STALL);
                    let asked = self.router.asked(&self.op, deadline);
                    let (offset, write_id) = (self.sent, self.write_id);
                    let request = Request::Get {
                        key: &self.key,
                        offset,
                        write_id,
                        peek: false,
                    };
                    let Ok(conn) = peer.call(asked, request).await else {
                        continue;
                    };
                    let same = matches!(conn.last_reply(),
                        Ok(Reply::Hit { info, .. }) if info.write_id == write_id && info.len == self.len);
                    if !same {
                        continue;
                    }
                    From::Peer(conn)
                }
            };
            metrics::counter!(names::BODY_RESUMED_TOTAL).increment(1);
            return Ok(());
        }
        Err(BodyLost)
    }
}

/// Takes the rest of a block before any byte of it is promised.
///
/// # Errors
/// When the peer stops, or `deadline` passes.
pub(crate) async fn take_rest(
    router: &Router,
    conn: &mut Conn,
    first: Option<Buffer>,
    len: u64,
    deadline: Instant,
) -> Result<Vec<Buffer>, Failure> {
    let mut pieces = Vec::with_capacity(usize::try_from(len.div_ceil(PIECE_BYTES as u64)).unwrap_or(0));
    let mut taken = 0;
    if let Some(first) = first {
        taken += first.len() as u64;
        pieces.push(first);
    }
    while taken < len {
        if Instant::now() >= deadline {
            return Err(WireError::Deadline.into());
        }
        let buffer = conn
            .frame(router.staging(), len - taken, Patience::Until(deadline))
            .await?;
        taken += buffer.len() as u64;
        pieces.push(buffer);
    }
    Ok(pieces)
}

/// The circumstances of an operation's request to a peer.
impl Router {
    pub(crate) fn asked(&self, op: &Op, deadline: Instant) -> Asked {
        let mut known = self.known();
        known.generation = op.generation;
        Asked {
            request_id: op.request_id,
            known,
            deadline,
        }
    }
}
