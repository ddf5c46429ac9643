//! Memory for bytes that pass through this process without belonging to its store: bounded, and recycled.
//!
//! A *reservation* is the right to hold so many bytes; whoever streams or keeps blocks takes one before its first byte.
//! Buffers are taken under a reservation and return to a small free list.

use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use kvpool_wire::peer::FRAME_BYTES;
use parking_lot::Mutex;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, timeout_at};

/// Bytes that may be held at a time in one process: a 32 MiB block, and room for streams beside it.
const BUDGET_BYTES: u64 = 40 << 20;
/// Of these, bytes of uploads that are kept whole until they are stored.
const KEEP_BYTES: u64 = 32 << 20;
/// Reservations are counted in units of this many bytes.
const UNIT_BYTES: u64 = 4096;
/// Bytes that buffers in use and buffers kept for reuse may have together. As many as fit are kept: a block taken whole
/// would otherwise fault fresh memory in each time, which costs more than moving its bytes.
const OWNED_BYTES: u64 = BUDGET_BYTES + (2 << 20);
/// Buffers up to this size are plain allocations.
const SMALL_BYTES: usize = 16 * 1024;

pub(crate) struct Staging {
    permits: Arc<Semaphore>,
    /// The part that uploads may keep whole, so that slow uploaders never leave readers without room.
    keep: Arc<Semaphore>,
    free: Mutex<Vec<Box<[u8]>>>,
    /// Bytes of buffers in use and kept.
    owned: AtomicU64,
}

/// The right to hold bytes.
#[derive(Debug)]
pub(crate) struct Reservation {
    permit: OwnedSemaphorePermit,
    _keep: Option<OwnedSemaphorePermit>,
}

impl Reservation {
    /// Whether it is enough for `bytes`.
    pub(crate) fn covers(&self, bytes: u64) -> bool {
        self.permit.num_permits() as u64 * UNIT_BYTES >= bytes
    }
}

impl Staging {
    pub(crate) fn new() -> Arc<Self> {
        Arc::new(Staging {
            permits: Arc::new(Semaphore::new((BUDGET_BYTES / UNIT_BYTES) as usize)),
            keep: Arc::new(Semaphore::new((KEEP_BYTES / UNIT_BYTES) as usize)),
            free: Mutex::new(Vec::new()),
            owned: AtomicU64::new(0),
        })
    }

    fn units(bytes: u64) -> Option<u32> {
        let units = bytes.max(1).div_ceil(UNIT_BYTES);
        (units <= BUDGET_BYTES / UNIT_BYTES).then_some(units as u32)
    }

    /// Whether that much can be reserved at all.
    pub(crate) fn fits(bytes: u64) -> bool {
        Self::units(bytes).is_some()
    }

    /// Takes a reservation if there is room now.
    pub(crate) fn try_reserve(&self, bytes: u64) -> Option<Reservation> {
        let permit = Arc::clone(&self.permits)
            .try_acquire_many_owned(Self::units(bytes)?)
            .ok()?;
        Some(Reservation { permit, _keep: None })
    }

    /// As [`Self::try_reserve`], for an upload that is kept whole.
    pub(crate) fn try_keep(&self, bytes: u64) -> Option<Reservation> {
        let keep = Arc::clone(&self.keep)
            .try_acquire_many_owned(Self::units(bytes)?)
            .ok()?;
        let reservation = self.try_reserve(bytes)?;
        Some(Reservation {
            _keep: Some(keep),
            ..reservation
        })
    }

    /// Waits for room, at most until `deadline`.
    pub(crate) async fn reserve(&self, bytes: u64, deadline: Instant) -> Option<Reservation> {
        let wait = Arc::clone(&self.permits).acquire_many_owned(Self::units(bytes)?);
        let permit = timeout_at(deadline, wait).await.ok()?.ok()?;
        Some(Reservation { permit, _keep: None })
    }

    /// A buffer of `len` bytes (at most a frame). The caller holds a reservation for it.
    pub(crate) fn buffer(self: &Arc<Self>, len: usize) -> Buffer {
        let len = len.min(FRAME_BYTES);
        let pool = Arc::clone(self);
        if len > SMALL_BYTES {
            if let Some(bytes) = self.free.lock().pop() {
                return Buffer { bytes, len, pool };
            }
            if self.owned.load(Ordering::Relaxed) + FRAME_BYTES as u64 <= OWNED_BYTES {
                self.owned.fetch_add(FRAME_BYTES as u64, Ordering::Relaxed);
                return Buffer {
                    bytes: vec![0; FRAME_BYTES].into_boxed_slice(),
                    len,
                    pool,
                };
            }
        }
        self.owned.fetch_add(len as u64, Ordering::Relaxed);
        while self.owned.load(Ordering::Relaxed) > OWNED_BYTES
            && let Some(kept) = self.free.lock().pop()
        {
            self.owned.fetch_sub(kept.len() as u64, Ordering::Relaxed);
        }
        Buffer {
            bytes: vec![0; len].into_boxed_slice(),
            len,
            pool,
        }
    }

    /// Bytes reserved now.
    pub(crate) fn held_bytes(&self) -> u64 {
        BUDGET_BYTES - self.permits.available_permits() as u64 * UNIT_BYTES
    }
}

/// Some bytes of staging memory.
pub struct Buffer {
    bytes: Box<[u8]>,
    len: usize,
    pool: Arc<Staging>,
}

impl Deref for Buffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes[..self.len]
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.bytes[..self.len]
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let pool = &self.pool;
        let whole = self.bytes.len() == FRAME_BYTES;
        if whole && pool.owned.load(Ordering::Relaxed) <= OWNED_BYTES {
            pool.free.lock().push(std::mem::take(&mut self.bytes));
        } else {
            pool.owned.fetch_sub(self.bytes.len() as u64, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reservations_and_memory_are_bounded_and_buffers_come_back() {
        let staging = Staging::new();
        assert!(!Staging::fits(BUDGET_BYTES + 1));
        let half = staging.try_reserve(BUDGET_BYTES / 2).unwrap();
        assert!(half.covers(BUDGET_BYTES / 2) && !half.covers(BUDGET_BYTES / 2 + 1));
        assert!(staging.try_reserve(BUDGET_BYTES / 2 + 1).is_none());
        assert!(staging.try_keep(KEEP_BYTES + 1).is_none());
        drop(half);
        assert_eq!(staging.held_bytes(), 0);
        // Whole buffers are kept, all of them; small ones in their place push them out.
        let most = BUDGET_BYTES as usize / FRAME_BYTES;
        let whole: Vec<_> = (0..most).map(|_| staging.buffer(FRAME_BYTES)).collect();
        drop(whole);
        assert_eq!(staging.free.lock().len(), most);
        let small: Vec<_> = (0..BUDGET_BYTES as usize / SMALL_BYTES)
            .map(|_| staging.buffer(SMALL_BYTES))
            .collect();
        assert!(staging.owned.load(Ordering::Relaxed) <= OWNED_BYTES);
        drop(small);
        let medium: Vec<_> = (0..most * 2).map(|_| staging.buffer(FRAME_BYTES / 2)).collect();
        assert!(medium.iter().all(|buffer| buffer.len() == FRAME_BYTES / 2));
        assert!(staging.owned.load(Ordering::Relaxed) <= OWNED_BYTES + BUDGET_BYTES / 2);
        drop(medium);
        assert!(staging.owned.load(Ordering::Relaxed) <= OWNED_BYTES);
    }
}
