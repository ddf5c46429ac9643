//! Blocks in memory: a recycled arena under a hard byte limit, an index by slot, S3-FIFO eviction, EXISTS leases.
//!
//! What it keeps: a block is immutable once published and visible only when complete (R5); bytes that a reference
//! can see never change; everything is counted against the limit, metadata and unfinished writes included (R12).
//! It knows no network, no clock and no runtime: time is an argument, in milliseconds.
//!
//! See `OVERVIEW.md` for the picture and the ways in.

mod arena;
mod block;
mod error;
mod evict;
mod index;
mod lease;
mod queue;
mod stats;
mod store;
mod usual;
mod writer;

pub use arena::{CLASS_COUNT, ClassBytes, MemoryBytes, PIECE_BYTES, class_bytes};
pub use block::{BlockPiece, BlockRef, BlockTail, TailState};
pub use error::{Refused, StoreError};
pub use stats::{Counts, Stats};
pub use store::{
    Condition, Existence, Lookup, MAX_KEY_BYTES, MAX_META_BYTES, Miss, PutSpec, SlotEntry, SlotPage, Store,
};
pub use usual::{Usual, UsualLengths};
pub use writer::{BlockWriter, Committed};
