//! The store: admission, lookup, removal and eviction over the arena, the index and the queue.
//!
//! Lock order: evicting → partition → queue or leases → books of the arena. No lock is held while bytes are copied. A block is
//! published, replaced and removed under its partition's lock, so readers see a whole block or none (R5).

use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering};

use kvpool_state::{SLOTS, slot_of};
use parking_lot::Mutex;
use smallvec::SmallVec;

use crate::arena::{Arena, Cost, PIECE_BYTES};
use crate::block::{Block, BlockRef, FILLING, NEVER, NO_NODE};
use crate::error::{Refused, StoreError};
use crate::index::{GHOST_BYTES, Gone, Partition};
use crate::lease::Leases;
use crate::queue::{Lane, Queue};
use crate::stats::{Counters, Stats, add};
use crate::writer::{BlockWriter, Committed};

/// Longest key taken, in bytes.
pub const MAX_KEY_BYTES: usize = 8 * 1024;
/// Longest opaque metadata of a block, in bytes.
pub const MAX_META_BYTES: usize = 64;

const PARTITIONS: usize = 16;
const SLOTS_PER_PARTITION: usize = SLOTS as usize / PARTITIONS;
/// Bytes of the empty slot sets.
const TABLE_BYTES: u64 = SLOTS as u64 * 24;
/// Heap bytes of an entry besides key, metadata and piece list: the shared block, its place in the index, the queue
/// and the lease list, with the allocator's rounding. `tests/accounting.rs` compares it with the process.
const ENTRY_BYTES: u64 = 400;
/// Heap bytes per piece.
const PIECE_ENTRY_BYTES: u64 = 8;
/// When a write may happen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Condition {
    /// In any case.
    #[default]
    Always,
    /// Only if the key is absent (RESP `NX`).
    IfAbsent,
    /// Only if the key is present (RESP `XX`).
    IfPresent,
}

/// A write to be reserved.
#[derive(Clone, Copy, Debug, Default)]
pub struct PutSpec<'a> {
    /// Bytes of the value.
    pub len: u64,
    /// Opaque bytes kept with the block, at most [`MAX_META_BYTES`].
    pub meta: &'a [u8],
    /// Orders the writes and removals of one key; given by the slot's primary.
    pub write_id: u64,
    /// When the block expires, in the clock of `now_ms`; `None` for never.
    pub expires_at_ms: Option<u64>,
    /// Checked at reservation and again at commit.
    pub condition: Condition,
    /// Commit only over an older write id, and not under a removal with a newer one. Replicas, transfers, and a
    /// primary whose writes finish out of order set it, so that all copies agree.
    pub only_if_newer: bool,
}

/// Why a key is not there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Miss {
    /// Never seen, removed, or forgotten.
    Absent,
    /// It was here and had to go.
    Evicted,
    /// Its time was over.
    Expired,
}

/// Result of a read.
#[derive(Clone, Debug)]
pub enum Lookup {
    /// The block.
    Hit(BlockRef),
    /// No block, and why.
    Miss(Miss),
}

/// Result of `exists`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Existence {
    /// It is here.
    Present {
        /// Bytes of the value.
        len: u64,
        /// The write that made it.
        write_id: u64,
        /// A lease was asked for and taken.
        leased: bool,
    },
    /// It is not, and why.
    Miss(Miss),
}

/// One block in a page of a slot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SlotEntry {
    /// The key.
    pub key: Box<[u8]>,
    /// The write that made it.
    pub write_id: u64,
    /// Bytes of the value.
    pub len: u64,
}

/// A page of a slot's blocks in the order of their keys.
#[derive(Clone, Debug, Default)]
pub struct SlotPage {
    /// The blocks.
    pub entries: Vec<SlotEntry>,
    /// Cursor for the next page; `None` after the last.
    pub next: Option<Box<[u8]>>,
}

/// A block store with a hard byte limit. A handle: clones share one store.
#[derive(Clone)]
pub struct Store(Arc<Inner>);

pub(crate) struct Inner {
    pub(crate) arena: Arc<Arena>,
    partitions: [Mutex<Partition>; PARTITIONS],
    pub(crate) queue: Mutex<Queue>,
    leases: Mutex<Leases>,
    /// Held while making room: of two evictors the second would find the first's candidate in no lane.
    pub(crate) evicting: Mutex<()>,
    hasher: RandomState,
    max_block: u64,
    pub(crate) counters: Counters,
}

impl Store {
    /// Creates a store that never holds more than `limit_bytes`: blocks, their metadata, unfinished writes and tables.
    ///
    /// # Errors
    /// The limit is below 4 MiB, or the kernel refuses the mapping.
    pub fn new(limit_bytes: u64) -> Result<Self, StoreError> {
        let min = 4 << 20;
        let limit = limit_bytes;
        if limit < min {
            return Err(StoreError::LimitTooSmall { limit, min });
        }
        let ghosts = (limit / (16 * 1024)).clamp(1024, 128 * 1024);
        let fixed = TABLE_BYTES + ghosts * GHOST_BYTES;
        let arena = Arena::new(limit, fixed).map_err(|source| StoreError::Map { limit, source })?;
        let partition = |_| Mutex::new(Partition::new(SLOTS_PER_PARTITION, ghosts as usize / PARTITIONS));
        Ok(Self(Arc::new(Inner {
            arena,
            partitions: std::array::from_fn(partition),
            queue: Mutex::new(Queue::new(limit / 10)),
            leases: Mutex::new(Leases::new(limit / 4)),
            evicting: Mutex::new(()),
            hasher: RandomState::new(),
            max_block: limit / 2,
            counters: Counters::default(),
        })))
    }

    /// Longest value taken, in bytes (half the limit).
    #[must_use]
    pub fn max_block_bytes(&self) -> u64 {
        self.0.max_block
    }

    /// Admits a write before its first body byte and takes its memory, evicting what must go. Bounded work.
    ///
    /// # Errors
    /// See [`Refused`]; the store is unchanged then, apart from evictions.
    pub fn reserve(&self, key: &[u8], spec: PutSpec<'_>, now_ms: u64) -> Result<BlockWriter, Refused> {
        let inner = &self.0;
        let cost = inner.admit(key, &spec).inspect_err(|_| {
            add(&inner.counters.refused_size);
        })?;
        let slot = slot_of(key);
        inner.check_condition(slot, key, spec.condition, now_ms)?;
        let (memory, token) = inner.allocate(&cost, now_ms)?;
        let block = Block {
            key: key.into(),
            slot,
            write_id: spec.write_id,
            meta: SmallVec::from_slice(spec.meta),
            memory,
            expires_at: AtomicU64::new(spec.expires_at_ms.unwrap_or(NEVER)),
            leased_until: AtomicU64::new(0),
            leased: AtomicBool::new(false),
            lease_listed_end: AtomicU64::new(0),
            lease_listed_id: AtomicU64::new(0),
            hit: AtomicBool::new(false),
            state: AtomicU8::new(FILLING),
            node: AtomicU32::new(NO_NODE),
        };
        Ok(BlockWriter {
            store: Arc::clone(inner),
            block: Arc::new(block),
            token,
            condition: spec.condition,
            only_if_newer: spec.only_if_newer,
        })
    }

    /// Reads a block and marks it as used.
    #[must_use]
    pub fn get(&self, key: &[u8], now_ms: u64) -> Lookup {
        match self.0.find(key, now_ms, |block| {
            block.hit.store(true, Ordering::Relaxed);
            Arc::clone(block)
        }) {
            Ok(block) => Lookup::Hit(BlockRef(block)),
            Err(miss) => Lookup::Miss(miss),
        }
    }

    /// Reads a block without marking it as used (transfer, inspection).
    #[must_use]
    pub fn peek(&self, key: &[u8], now_ms: u64) -> Option<BlockRef> {
        self.0.find(key, now_ms, Arc::clone).ok().map(BlockRef)
    }

    /// Asks for a key; with `lease_ms` also keeps the block from eviction that long if the lease budget (a quarter
    /// of the limit) has room. Renews a lease that holds already.
    #[must_use]
    pub fn exists(&self, key: &[u8], now_ms: u64, lease_ms: Option<u64>) -> Existence {
        let inner = &self.0;
        let found = inner.find(key, now_ms, |block| {
            let leased = lease_ms.is_some_and(|ms| {
                let until = now_ms.saturating_add(ms);
                inner.leases.lock().take(block, now_ms, until)
            });
            (block.len(), block.write_id, leased)
        });
        match found {
            Ok((len, write_id, leased)) => {
                match (lease_ms.is_some(), leased) {
                    (true, true) => add(&inner.counters.leases_taken),
                    (true, false) => add(&inner.counters.leases_refused),
                    _ => {}
                }
                Existence::Present { len, write_id, leased }
            }
            Err(miss) => Existence::Miss(miss),
        }
    }

    /// Removes a key; true if it was there. With `write_id` it is a removal ordered among the key's writes: a newer
    /// block stays, and older ones that come later (a transfer under way) are superseded.
    pub fn remove(&self, key: &[u8], write_id: Option<u64>, now_ms: u64) -> bool {
        let inner = &self.0;
        let slot = slot_of(key);
        let mut partition = inner.partition(slot);
        let (at, print) = (within(slot), inner.print(key));
        let found = partition.get(at, key).map(|block| block.write_id);
        if found.is_some_and(|there| write_id.is_some_and(|id| there > id)) {
            return false;
        }
        let before = partition.ghosts.get(print).map(|ghost| ghost.write_id);
        if let Some(id) = write_id.or(found).max(before) {
            partition.ghosts.put(print, Gone::Removed, id);
        }
        let Some(block) = partition.remove(at, key) else {
            return false;
        };
        inner.detach(&block);
        drop(partition);
        let live = !block.expired(now_ms);
        add(if live {
            &inner.counters.removed
        } else {
            &inner.counters.expired
        });
        live
    }

    /// Sets when a block expires (`None`: never); false if it is not there.
    pub fn expire(&self, key: &[u8], at_ms: Option<u64>, now_ms: u64) -> bool {
        let set = |block: &Arc<Block>| {
            let at = at_ms.unwrap_or(NEVER);
            block.expires_at.store(at, Ordering::Relaxed);
        };
        self.0.find(key, now_ms, set).is_ok()
    }

    /// Milliseconds until a block expires; `Some(None)` if it never does, `None` if it is not there.
    #[must_use]
    pub fn ttl(&self, key: &[u8], now_ms: u64) -> Option<Option<u64>> {
        let at = self
            .0
            .find(key, now_ms, |block| block.expires_at.load(Ordering::Relaxed))
            .ok()?;
        Some((at != NEVER).then(|| at - now_ms))
    }

    /// Blocks published (expired ones that nobody has asked for are among them).
    #[must_use]
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> usize {
        self.0.partitions.iter().map(|p| p.lock().blocks).sum()
    }

    /// Blocks of one slot.
    #[must_use]
    pub fn slot_len(&self, slot: u16) -> usize {
        let slot = slot % SLOTS;
        self.0.partition(slot).slots[within(slot)].len()
    }

    /// A page of at most `max` blocks of a slot with keys after `cursor`. Blocks that come or go meanwhile may or may
    /// not be seen; all others are seen exactly once.
    #[must_use]
    pub fn slot_keys(&self, slot: u16, cursor: Option<&[u8]>, max: usize) -> SlotPage {
        use std::ops::Bound::{Excluded, Unbounded};
        let slot = slot % SLOTS;
        let partition = self.0.partition(slot);
        let from = cursor.map_or(Unbounded, Excluded);
        let mut rest = partition.slots[within(slot)].range::<[u8], _>((from, Unbounded));
        let entries: Vec<SlotEntry> = rest
            .by_ref()
            .take(max)
            .map(|published| SlotEntry {
                key: published.0.key.clone(),
                write_id: published.0.write_id,
                len: published.0.len(),
            })
            .collect();
        let more = rest.next().is_some();
        let last = entries.last().map(|entry| entry.key.clone());
        SlotPage {
            next: last.filter(|_| more),
            entries,
        }
    }

    /// Drops all blocks of a slot; returns how many.
    #[allow(clippy::mutable_key_type)] // the order is by the key bytes, which never change
    pub fn remove_slot(&self, slot: u16) -> usize {
        let slot = slot % SLOTS;
        let mut partition = self.0.partition(slot);
        let blocks = std::mem::take(&mut partition.slots[within(slot)]);
        partition.blocks -= blocks.len();
        for published in &blocks {
            self.0.detach(&published.0);
        }
        drop(partition);
        let count = blocks.len();
        let dropped = &self.0.counters.dropped;
        dropped.fetch_add(count as u64, Ordering::Relaxed);
        count
    }

    /// Drops all blocks, slot by slot; returns how many.
    pub fn clear(&self) -> usize {
        (0..SLOTS).map(|slot| self.remove_slot(slot)).sum()
    }

    /// Faults in up to about `max_bytes` (at least one extent) of memory that was never touched; returns how much, 0
    /// when all is done. For a background task, a few MiB per call: the first touch costs more than moving the bytes.
    /// Call it once a second or so when done, too: it also gives heap pages of dropped entries back.
    pub fn prefault_step(&self, max_bytes: usize) -> usize {
        self.0.arena.prefault(max_bytes)
    }

    /// A snapshot of bytes and counters.
    #[must_use]
    pub fn stats(&self) -> Stats {
        let inner = &self.0;
        // Each lock is let go before the next is taken.
        let leased = {
            let leases = inner.leases.lock();
            leases.bytes()
        };
        let (small, main) = {
            let queue = inner.queue.lock();
            (queue.lane(Lane::Small).0, queue.lane(Lane::Main).0)
        };
        Stats {
            memory: inner.arena.bytes(),
            classes: inner.arena.classes(),
            leased,
            blocks: self.len() as u64,
            small,
            main,
            counts: inner.counters.read(),
        }
    }
}

pub(crate) fn within(slot: u16) -> usize {
    slot as usize % SLOTS_PER_PARTITION
}

impl Inner {
    pub(crate) fn partition(&self, slot: u16) -> parking_lot::MutexGuard<'_, Partition> {
        self.partitions[slot as usize / SLOTS_PER_PARTITION].lock()
    }

    pub(crate) fn print(&self, key: &[u8]) -> u64 {
        self.hasher.hash_one(key)
    }

    fn admit(&self, key: &[u8], spec: &PutSpec<'_>) -> Result<Cost, Refused> {
        if key.len() > MAX_KEY_BYTES {
            return Err(Refused::KeyTooLong { len: key.len() });
        }
        if spec.meta.len() > MAX_META_BYTES {
            return Err(Refused::MetaTooLong { len: spec.meta.len() });
        }
        if spec.len > self.max_block {
            return Err(Refused::Size {
                len: spec.len,
                max: self.max_block,
            });
        }
        let pieces = spec.len.div_ceil(PIECE_BYTES as u64);
        let lists = pieces * PIECE_ENTRY_BYTES + spec.meta.len() as u64;
        Ok(Cost::new(spec.len, ENTRY_BYTES + key.len() as u64 + lists))
    }

    fn check_condition(&self, slot: u16, key: &[u8], condition: Condition, now_ms: u64) -> Result<(), Refused> {
        if condition == Condition::Always {
            return Ok(());
        }
        let partition = self.partition(slot);
        let block = partition.get(within(slot), key);
        let there = block.is_some_and(|block| !block.expired(now_ms));
        drop(partition);
        match (condition, there) {
            (Condition::IfAbsent, true) => Err(Refused::Exists),
            (Condition::IfPresent, false) => Err(Refused::NotFound),
            _ => Ok(()),
        }
    }

    /// Looks a key up and applies `use_it` under the partition's lock; drops the block if its time is over.
    fn find<T>(&self, key: &[u8], now_ms: u64, use_it: impl FnOnce(&Arc<Block>) -> T) -> Result<T, Miss> {
        let slot = slot_of(key);
        let mut partition = self.partition(slot);
        match partition.get(within(slot), key) {
            Some(block) if !block.expired(now_ms) => return Ok(use_it(block)),
            Some(_) => {}
            None => {
                let ghost = partition.ghosts.get(self.print(key));
                return Err(match ghost.map(|ghost| ghost.why) {
                    Some(Gone::Evicted) => Miss::Evicted,
                    Some(Gone::Expired) => Miss::Expired,
                    Some(Gone::Removed) | None => Miss::Absent,
                });
            }
        }
        if let Some(block) = partition.remove(within(slot), key) {
            partition.ghosts.put(self.print(key), Gone::Expired, block.write_id);
            self.detach(&block);
            drop(partition);
            add(&self.counters.expired);
        }
        Err(Miss::Expired)
    }

    /// Takes a block that has just left the index out of queue and lease list. Called under its partition's lock.
    pub(crate) fn detach(&self, block: &Arc<Block>) {
        self.queue.lock().unlink(block);
        if block.leased.load(Ordering::Relaxed) {
            self.leases.lock().end(block);
        }
    }

    /// Publishes a complete block (called by the writer's `commit`).
    pub(crate) fn publish(
        &self,
        block: &Arc<Block>,
        condition: Condition,
        only_if_newer: bool,
        now_ms: u64,
    ) -> Result<Committed, Refused> {
        let (at, print) = (within(block.slot), self.print(&block.key));
        let mut partition = self.partition(block.slot);
        let there = partition.get(at, &block.key);
        let live = there.is_some_and(|old| !old.expired(now_ms));
        match (condition, live) {
            (Condition::IfAbsent, true) => return Err(Refused::Exists),
            (Condition::IfPresent, false) => return Err(Refused::NotFound),
            _ => {}
        }
        let ghost = partition.ghosts.get(print);
        if only_if_newer {
            let newer = there.is_some_and(|old| old.write_id > block.write_id)
                || ghost.is_some_and(|ghost| match ghost.why {
                    Gone::Removed => ghost.write_id >= block.write_id,
                    Gone::Evicted | Gone::Expired => ghost.write_id > block.write_id,
                });
            if newer {
                add(&self.counters.superseded);
                return Ok(Committed::Superseded);
            }
        }
        let lane = match ghost.map(|ghost| ghost.why) {
            Some(Gone::Evicted) => Lane::Main,
            _ => Lane::Small,
        };
        let old = partition.insert(at, Arc::clone(block));
        if let Some(old) = &old {
            self.detach(old);
        }
        if ghost.is_some() {
            partition.ghosts.forget(print);
        }
        self.queue.lock().push(Arc::clone(block), lane);
        drop(partition);
        add(&self.counters.stored);
        if live {
            add(&self.counters.replaced);
        }
        Ok(Committed::Stored { replaced: live })
    }
}
