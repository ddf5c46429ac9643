//! A block and the ways to hold it: [`BlockRef`] (published, read-only), [`BlockTail`] (still being filled, or not).
//!
//! Invariant: bytes that a reference can see never change; memory is freed when the last reference is dropped,
//! whatever eviction, DEL or an overwrite did meanwhile.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering};

use smallvec::SmallVec;

use crate::arena::Memory;

/// Value of `expires_at` for "never".
pub(crate) const NEVER: u64 = u64::MAX;
/// Value of `node` for "in no queue".
pub(crate) const NO_NODE: u32 = u32::MAX;

pub(crate) const FILLING: u8 = 0;
pub(crate) const COMMITTED: u8 = 1;
pub(crate) const ABORTED: u8 = 2;

/// Everything known of one block. Shared by index, queue and references.
pub(crate) struct Block {
    pub(crate) key: Box<[u8]>,
    pub(crate) slot: u16,
    pub(crate) write_id: u64,
    pub(crate) meta: SmallVec<[u8; 32]>,
    pub(crate) memory: Memory,
    pub(crate) expires_at: AtomicU64,
    pub(crate) leased_until: AtomicU64,
    /// Counted in the lease budget. Changes under the lease lock only.
    pub(crate) leased: AtomicBool,
    /// Where the lease list has it.
    pub(crate) lease_listed_end: AtomicU64,
    pub(crate) lease_listed_id: AtomicU64,
    pub(crate) hit: AtomicBool,
    pub(crate) state: AtomicU8,
    /// Place in the eviction queue. Changes under the queue lock only.
    pub(crate) node: AtomicU32,
}

impl Block {
    pub(crate) fn len(&self) -> u64 {
        self.memory.cost().len
    }

    pub(crate) fn charge(&self) -> u64 {
        self.memory.cost().charge()
    }

    pub(crate) fn expired(&self, now_ms: u64) -> bool {
        self.expires_at.load(Ordering::Relaxed) <= now_ms
    }

    pub(crate) fn lease_holds(&self, now_ms: u64) -> bool {
        self.leased.load(Ordering::Relaxed) && self.leased_until.load(Ordering::Relaxed) > now_ms
    }
}

/// A complete, immutable block. Cheap to clone; keeps the bytes alive.
#[derive(Clone)]
pub struct BlockRef(pub(crate) Arc<Block>);

impl BlockRef {
    /// Bytes of the value.
    #[must_use]
    #[allow(clippy::len_without_is_empty)] // length zero is a value like any other here
    pub fn len(&self) -> u64 {
        self.0.len()
    }

    /// The key it was stored under.
    #[must_use]
    pub fn key(&self) -> &[u8] {
        &self.0.key
    }

    /// The opaque bytes stored with it (at most [`crate::MAX_META_BYTES`]).
    #[must_use]
    pub fn meta(&self) -> &[u8] {
        &self.0.meta
    }

    /// The write that made it.
    #[must_use]
    pub fn write_id(&self) -> u64 {
        self.0.write_id
    }

    /// When it expires, in the caller's milliseconds; `None` for never.
    #[must_use]
    pub fn expires_at_ms(&self) -> Option<u64> {
        let at = self.0.expires_at.load(Ordering::Relaxed);
        (at != NEVER).then_some(at)
    }

    /// The value in order, one slice of at most [`crate::PIECE_BYTES`] per piece.
    pub fn slices(&self) -> impl ExactSizeIterator<Item = &[u8]> + Clone + Send {
        let memory = &self.0.memory;
        (0..memory.piece_count()).map(move |index| memory.piece(index))
    }

    /// The value in order in as few slices as memory allows (neighbouring pieces joined), for vectored writes.
    pub fn runs(&self) -> impl Iterator<Item = &[u8]> + Clone + Send {
        runs_of(&self.0.memory)
    }

    /// CRC32C of each piece, in the order of [`Self::slices`]; computed when the bytes came in.
    pub fn piece_crcs(&self) -> impl ExactSizeIterator<Item = u32> + Clone + Send {
        let memory = &self.0.memory;
        (0..memory.piece_count()).map(move |index| memory.crc(index))
    }

    /// Pieces of the value: `ceil(len / PIECE_BYTES)`.
    #[must_use]
    pub fn piece_count(&self) -> usize {
        self.0.memory.piece_count()
    }

    /// One piece as an owned handle, for writers that need `'static` bytes.
    #[must_use]
    pub fn piece(&self, index: usize) -> Option<BlockPiece> {
        BlockPiece::new(&self.0, index)
    }

    /// Sums the bytes in memory again and compares (the option "checked on memory reads").
    #[must_use]
    pub fn verify(&self) -> bool {
        self.slices()
            .zip(self.piece_crcs())
            .all(|(bytes, crc)| crc32c::crc32c(bytes) == crc)
    }
}

impl fmt::Debug for BlockRef {
    // Values and keys are prompts in another form and are not printed.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BlockRef")
            .field("len", &self.len())
            .field("write_id", &self.write_id())
            .finish_non_exhaustive()
    }
}

/// A complete piece of a block, owned: keeps the block's memory alive.
#[derive(Clone)]
pub struct BlockPiece {
    block: Arc<Block>,
    index: usize,
}

impl BlockPiece {
    fn new(block: &Arc<Block>, index: usize) -> Option<Self> {
        let memory = &block.memory;
        let complete = index < memory.piece_count() && memory.piece(index).len() == memory.piece_len(index);
        complete.then(|| Self {
            block: Arc::clone(block),
            index,
        })
    }

    /// CRC32C of the piece.
    #[must_use]
    pub fn crc(&self) -> u32 {
        self.block.memory.crc(self.index)
    }
}

impl AsRef<[u8]> for BlockPiece {
    fn as_ref(&self) -> &[u8] {
        self.block.memory.piece(self.index)
    }
}

/// What became of the write behind a [`BlockTail`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TailState {
    /// The writer is still at it.
    Filling,
    /// Complete and published (or superseded by a newer write): all bytes are there.
    Committed,
    /// The writer went away; the block never becomes visible.
    Aborted,
}

/// Reads a block behind its writer: what is filled may be read while the rest still arrives.
#[derive(Clone)]
pub struct BlockTail(pub(crate) Arc<Block>);

impl BlockTail {
    /// Bytes of the whole value.
    #[must_use]
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> u64 {
        self.0.len()
    }

    /// Bytes that may be read now; grows up to `len`.
    #[must_use]
    pub fn filled(&self) -> u64 {
        self.0.memory.filled()
    }

    /// The write this is.
    #[must_use]
    pub fn write_id(&self) -> u64 {
        self.0.write_id
    }

    /// The opaque bytes stored with it.
    #[must_use]
    pub fn meta(&self) -> &[u8] {
        &self.0.meta
    }

    /// Pieces of the whole value.
    #[must_use]
    pub fn piece_count(&self) -> usize {
        self.0.memory.piece_count()
    }

    /// Piece `index` once it is complete, else `None`.
    #[must_use]
    pub fn piece(&self, index: usize) -> Option<BlockPiece> {
        BlockPiece::new(&self.0, index)
    }

    /// Where the writer is. `Aborted` with `filled == len` is possible: complete, but never committed.
    #[must_use]
    pub fn state(&self) -> TailState {
        match self.0.state.load(Ordering::Acquire) {
            FILLING => TailState::Filling,
            COMMITTED => TailState::Committed,
            _ => TailState::Aborted,
        }
    }
}

/// The filled bytes of `memory` as maximal contiguous slices.
fn runs_of(memory: &Memory) -> impl Iterator<Item = &[u8]> + Clone + Send {
    let mut next = 0;
    std::iter::from_fn(move || {
        if next >= memory.piece_count() {
            return None;
        }
        let (run, after) = memory.run(next);
        next = after;
        Some(run)
    })
}
