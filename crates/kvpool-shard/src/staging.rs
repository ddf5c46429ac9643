//! Memory for bytes that pass through this process without belonging to its store: bounded, and recycled.
//!
//! A *reservation* is the right to hold so many bytes; whoever streams or keeps blocks takes one before its first byte.
//! Buffers are taken under a reservation and return to a small free list.

use std::ops::{Deref, DerefMut};
use std::sync::Arc;

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
/// Full-size buffers kept for reuse: the whole budget. Fewer, and a block taken whole before it is passed on would fault
/// fresh memory in each time, which costs more than moving its bytes.
const FREE_BUFFERS: usize = BUDGET_BYTES as usize / FRAME_BYTES;
/// Buffers up to this size are plain allocations.
const SMALL_BYTES: usize = 16 * 1024;

pub(crate) struct Staging {
    permits: Arc<Semaphore>,
    /// The part that uploads may keep whole, so that slow uploaders never leave readers without room.
    keep: Arc<Semaphore>,
    free: Mutex<Vec<Box<[u8]>>>,
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
        if len <= SMALL_BYTES {
            return Buffer {
                bytes: vec![0; len].into_boxed_slice(),
                len,
                pool: None,
            };
        }
        let recycled = self.free.lock().pop();
        let bytes = recycled.unwrap_or_else(|| vec![0; FRAME_BYTES].into_boxed_slice());
        Buffer {
            bytes,
            len,
            pool: Some(Arc::clone(self)),
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
    pool: Option<Arc<Staging>>,
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
        if let Some(pool) = &self.pool {
            let mut free = pool.free.lock();
            if free.len() < FREE_BUFFERS {
                free.push(std::mem::take(&mut self.bytes));
            }
        }
    }
}
