//! The mapping and the slices into it: the one module with `unsafe` code.
//!
//! The argument in one place: `Books` gives each part of the region to one [`Memory`] at a time and takes it back
//! only when that `Memory` is dropped (property-tested). Within a `Memory`, bytes below the `filled` watermark are
//! never written again and may be read by anyone; bytes at or above it are touched only through the one
//! [`FillToken`]. The watermark moves with release/acquire order, so a reader sees the bytes it covers.
#![allow(unsafe_code)]

use super::{Arena, PIECE_BYTES, alloc::Cost, alloc::UNIT_BYTES};

use std::io;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// One anonymous private mapping. Its pages count as memory only once they are touched.
pub(super) struct Region {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: the mapping is plain memory that lives until drop; which thread touches which part is ruled by `Memory`.
unsafe impl Send for Region {}
// SAFETY: as above; `Region` itself hands out no references.
unsafe impl Sync for Region {}

impl Region {
    pub(super) fn map(len: usize) -> io::Result<Self> {
        let len = len.max(PIECE_BYTES);
        let prot = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: a fresh anonymous mapping at an address the kernel chooses aliases nothing.
        let addr = unsafe { libc::mmap(std::ptr::null_mut(), len, prot, flags, -1, 0) };
        if addr == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        // Cached blocks are prompts in another form: they stay out of core dumps. A kernel that cannot do it is
        // too old to matter; the failure is harmless to memory safety.
        // SAFETY: exactly the mapping just made.
        unsafe { libc::madvise(addr, len, libc::MADV_DONTDUMP) };
        let base = NonNull::new(addr.cast::<u8>()).ok_or_else(io::Error::last_os_error)?;
        Ok(Self { base, len })
    }

    /// Gives the pages of a free extent back to the kernel; it reads as zeroes afterwards.
    pub(super) fn decommit(&self, extent: u32) {
        let at = extent as usize * PIECE_BYTES;
        assert!(at + PIECE_BYTES <= self.len, "extent outside the region");
        // SAFETY: inside the mapping; the extent is free, so no reference into it exists.
        unsafe { libc::madvise(self.base.as_ptr().add(at).cast(), PIECE_BYTES, libc::MADV_DONTNEED) };
    }

    /// Faults pages in for writing without changing their contents. False if the kernel can't (before 5.14).
    pub(super) fn populate(&self, extent: u32, count: u32) -> bool {
        let at = extent as usize * PIECE_BYTES;
        let len = count as usize * PIECE_BYTES;
        assert!(at + len <= self.len, "extents outside the region");
        // SAFETY: inside the mapping; MADV_POPULATE_WRITE changes no byte, whoever owns the pages.
        let rc = unsafe { libc::madvise(self.base.as_ptr().add(at).cast(), len, libc::MADV_POPULATE_WRITE) };
        rc == 0
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: every `Memory` holds the arena, so no slice into the mapping is left.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.len) };
    }
}

/// Asks the allocator to give free pages back to the kernel (glibc; others do it by themselves).
pub(super) fn trim_heap() {
    #[cfg(target_env = "gnu")]
    // SAFETY: callable at any time from any thread; it changes no live allocation.
    unsafe {
        libc::malloc_trim(0);
    }
}

/// One piece of a block: where it lies and the CRC32C of what has been filled of it.
struct Piece {
    /// Offset into the region in units of [`UNIT_BYTES`].
    offset: u32,
    crc: AtomicU32,
}

/// The memory of one block: its pieces in order, and how much of it is filled.
pub(crate) struct Memory {
    arena: Arc<Arena>,
    cost: Cost,
    pieces: Box<[Piece]>,
    /// Bytes from the start that are final. Only grows, only by the holder of the token.
    filled: AtomicU64,
    id: u64,
}

/// The right to fill one [`Memory`]; there is exactly one per memory and it cannot be cloned.
pub(crate) struct FillToken {
    id: u64,
}

static NEXT_ID: AtomicU64 = AtomicU64::new(1);

impl Memory {
    pub(super) fn new(arena: Arc<Arena>, cost: &Cost, offsets: &[u32]) -> (Self, FillToken) {
        let id = NEXT_ID.fetch_add(1, Ordering::Relaxed);
        let pieces = offsets
            .iter()
            .map(|&offset| Piece {
                offset,
                crc: AtomicU32::new(0),
            })
            .collect();
        let memory = Self {
            arena,
            cost: *cost,
            pieces,
            filled: AtomicU64::new(0),
            id,
        };
        (memory, FillToken { id })
    }

    pub(crate) fn cost(&self) -> &Cost {
        &self.cost
    }

    pub(crate) fn arena(&self) -> &Arena {
        &self.arena
    }

    pub(crate) fn filled(&self) -> u64 {
        self.filled.load(Ordering::Acquire)
    }

    pub(crate) fn piece_count(&self) -> usize {
        self.pieces.len()
    }

    /// Bytes that piece `index` has when complete.
    pub(crate) fn piece_len(&self, index: usize) -> usize {
        let start = index as u64 * PIECE_BYTES as u64;
        (self.cost.len.saturating_sub(start)).min(PIECE_BYTES as u64) as usize
    }

    fn pointer(&self, index: usize) -> *mut u8 {
        let at = self.pieces[index].offset as usize * UNIT_BYTES;
        assert!(at + self.piece_len(index) <= self.arena.region.len);
        // SAFETY: the offset was just checked to lie inside the mapping.
        unsafe { self.arena.region.base.as_ptr().add(at) }
    }

    /// The filled part of piece `index`.
    pub(crate) fn piece(&self, index: usize) -> &[u8] {
        if index >= self.pieces.len() {
            return &[];
        }
        let start = index as u64 * PIECE_BYTES as u64;
        let ready = self.filled().saturating_sub(start);
        let len = ready.min(self.piece_len(index) as u64) as usize;
        // SAFETY: this memory owns the piece until drop; bytes below the watermark are initialised (the mapping
        // starts as zeroes) and are never written again, and the acquire load of `filled` orders their writes
        // before this read.
        unsafe { std::slice::from_raw_parts(self.pointer(index), len) }
    }

    /// Filled bytes from the start of piece `index` on that are contiguous in memory, and the next piece's index.
    pub(crate) fn run(&self, index: usize) -> (&[u8], usize) {
        let mut len = self.piece(index).len();
        let mut next = index + 1;
        while next < self.pieces.len()
            && self.piece_len(next - 1) == PIECE_BYTES
            && self.pieces[next].offset as usize == self.pieces[next - 1].offset as usize + PIECE_BYTES / UNIT_BYTES
        {
            len += self.piece(next).len();
            next += 1;
        }
        // SAFETY: as in `piece`, for adjacent pieces of this same memory inside the one mapping. A piece only has
        // filled bytes when the one before it is full, so the run has no hole.
        let run = unsafe { std::slice::from_raw_parts(self.pointer(index), len) };
        (run, next)
    }

    /// CRC32C of the filled part of piece `index`.
    pub(crate) fn crc(&self, index: usize) -> u32 {
        self.pieces[index].crc.load(Ordering::Acquire)
    }

    /// The rest of the piece being filled; empty when the block is full.
    pub(crate) fn spare<'a>(&'a self, token: &'a mut FillToken) -> &'a mut [u8] {
        assert_eq!(token.id, self.id, "a token fills its own memory only");
        let filled = self.filled.load(Ordering::Relaxed);
        let index = (filled / PIECE_BYTES as u64) as usize;
        let within = (filled % PIECE_BYTES as u64) as usize;
        if index >= self.pieces.len() {
            return &mut [];
        }
        let len = self.piece_len(index) - within;
        // SAFETY: bytes at or above the watermark are read by nobody, and written only through the one token, which
        // the result borrows mutably: there is one such slice at a time and `advance` can't run while it lives.
        unsafe { std::slice::from_raw_parts_mut(self.pointer(index).add(within), len) }
    }

    /// Makes the next `n` bytes final. `crc` is theirs when the caller has verified them already.
    pub(crate) fn advance(&self, token: &mut FillToken, n: usize, crc: Option<u32>) {
        let filled = self.filled.load(Ordering::Relaxed);
        let index = (filled / PIECE_BYTES as u64) as usize;
        let spare = self.spare(token);
        let n = n.min(spare.len());
        if n == 0 {
            return;
        }
        let before = self.pieces[index].crc.load(Ordering::Relaxed);
        let after = match crc {
            Some(crc) if filled.is_multiple_of(PIECE_BYTES as u64) => crc,
            Some(crc) => crc32c::crc32c_combine(before, crc, n),
            None => crc32c::crc32c_append(before, &spare[..n]),
        };
        self.pieces[index].crc.store(after, Ordering::Release);
        self.filled.store(filled + n as u64, Ordering::Release);
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        self.arena.release(&self.cost, self.pieces.iter().map(|p| p.offset));
    }
}
