//! The arena: one bounded memory region that every block lives in.
//!
//! - `alloc` is the safe bookkeeping: which part of the region belongs to whom, and the byte ledger.
//! - `memory` holds the only `unsafe` code of the project: the mapping itself and the slices into it.
//!
//! Invariants: a part of the region has at most one owner at a time; `used extents + metadata <= limit`;
//! `resident extents + metadata <= limit` (free extents go back to the kernel when metadata needs the room).

mod alloc;
mod memory;

use parking_lot::Mutex;

pub use alloc::{CLASS_COUNT, ClassBytes, MemoryBytes, class_bytes};
pub(crate) use alloc::{Cost, Short};
pub(crate) use memory::{FillToken, Memory};

use alloc::Books;
use memory::Region;

use std::sync::Arc;

/// Bytes of one extent, and of every checksummed piece of a block except a shorter last one.
pub const PIECE_BYTES: usize = 256 * 1024;

/// The region and its books. Shared by the store and by every block that still has a reference.
pub(crate) struct Arena {
    region: Region,
    books: Mutex<Books>,
}

impl Arena {
    /// Maps a region for `limit` bytes, of which `fixed` are spoken for by tables outside it.
    pub(crate) fn new(limit: u64, fixed: u64) -> std::io::Result<Arc<Self>> {
        let books = Books::new(limit, fixed);
        let region = Region::map(books.extents() as usize * PIECE_BYTES)?;
        Ok(Arc::new(Self {
            region,
            books: Mutex::new(books),
        }))
    }

    /// Takes memory for a block under construction, or says what is short. Never blocks on I/O.
    pub(crate) fn allocate(self: &Arc<Self>, cost: &Cost) -> Result<(Memory, FillToken), Short> {
        let mut books = self.books.lock();
        let offsets = books.take(cost)?;
        self.trim_resident(&mut books);
        drop(books);
        Ok(Memory::new(Arc::clone(self), cost, &offsets))
    }

    /// Hands free but resident extents back while metadata grows; rare, and at most a few per call.
    fn trim_resident(&self, books: &mut Books) {
        while let Some(extent) = books.take_excess_resident() {
            self.region.decommit(extent);
        }
    }

    /// A writer has ended (committed or not): its bytes are no longer in flight.
    pub(crate) fn landed(&self, cost: &Cost) {
        self.books.lock().landed(cost);
    }

    fn release(&self, cost: &Cost, offsets: impl Iterator<Item = u32>) {
        self.books.lock().give_back(cost, offsets);
    }

    /// Faults in up to `max_bytes` of memory that no block has touched yet; 0 when nothing is left to do.
    pub(crate) fn prefault(&self, max_bytes: usize) -> usize {
        if self.books.lock().heap_shrank() {
            memory::trim_heap();
        }
        let max = (max_bytes / PIECE_BYTES).max(1) as u32;
        // The lock is not held while the kernel works: populating never changes contents, so it is harmless
        // when a writer takes the same extents in the meantime.
        let Some((start, count)) = self.books.lock().cold_run(max) else {
            return 0;
        };
        if !self.region.populate(start, count) {
            return 0;
        }
        let mut books = self.books.lock();
        books.warmed(start, count);
        // Metadata may have taken the room in the meantime.
        self.trim_resident(&mut books);
        count as usize * PIECE_BYTES
    }

    pub(crate) fn bytes(&self) -> MemoryBytes {
        self.books.lock().bytes()
    }

    pub(crate) fn classes(&self) -> Vec<ClassBytes> {
        self.books.lock().classes()
    }
}
