//! One partition of the index: the published blocks of a range of slots, and the ghosts of blocks that went.
//!
//! A slot's blocks are an ordered set by key, so paging through a slot (transfer) and dropping it need no extra list.

use std::borrow::Borrow;
use std::cmp::Ordering;
use std::collections::{BTreeSet, HashMap, VecDeque};
use std::sync::Arc;

use crate::block::Block;

/// A published block, ordered and found by its key.
pub(crate) struct Published(pub(crate) Arc<Block>);

impl Borrow<[u8]> for Published {
    fn borrow(&self) -> &[u8] {
        &self.0.key
    }
}
impl Ord for Published {
    fn cmp(&self, other: &Self) -> Ordering {
        self.0.key.cmp(&other.0.key)
    }
}
impl PartialOrd for Published {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}
impl PartialEq for Published {
    fn eq(&self, other: &Self) -> bool {
        self.0.key == other.0.key
    }
}
impl Eq for Published {}

/// Why a block that was here is gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Gone {
    Evicted,
    Expired,
    Removed,
}

/// What is remembered of a block that went.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ghost {
    pub(crate) why: Gone,
    /// Write id of the block, or of the removal.
    pub(crate) write_id: u64,
    /// Tells this ghost's place in the order from that of an older one of the same key.
    stamp: u32,
}

/// The last blocks that went, by fingerprint of the key, oldest out. A collision is harmless: it makes a miss name the
/// other reason, or a block start in the main lane, or (removals) a transferred copy be skipped.
pub(crate) struct Ghosts {
    by_print: HashMap<u64, Ghost>,
    order: VecDeque<(u64, u32)>,
    cap: usize,
    stamp: u32,
}

/// Bytes one ghost costs (map slot with its share of empty ones, and place in the order).
pub(crate) const GHOST_BYTES: u64 = 80;

impl Ghosts {
    pub(crate) fn new(cap: usize) -> Self {
        Self {
            by_print: HashMap::new(),
            order: VecDeque::new(),
            cap,
            stamp: 0,
        }
    }

    pub(crate) fn get(&self, print: u64) -> Option<Ghost> {
        self.by_print.get(&print).copied()
    }

    pub(crate) fn put(&mut self, print: u64, why: Gone, write_id: u64) {
        self.stamp = self.stamp.wrapping_add(1);
        let stamp = self.stamp;
        let ghost = Ghost { why, write_id, stamp };
        self.by_print.insert(print, ghost);
        self.order.push_back((print, stamp));
        while self.order.len() > self.cap {
            let Some((old, stamp)) = self.order.pop_front() else {
                break;
            };
            if self.by_print.get(&old).is_some_and(|g| g.stamp == stamp) {
                self.by_print.remove(&old);
            }
        }
    }

    /// Forgets a key that is published again. Its place in the order runs out by itself.
    pub(crate) fn forget(&mut self, print: u64) {
        self.by_print.remove(&print);
    }
}

/// The blocks of `slots.len()` neighbouring slots.
pub(crate) struct Partition {
    pub(crate) slots: Box<[BTreeSet<Published>]>,
    pub(crate) ghosts: Ghosts,
    pub(crate) blocks: usize,
}

impl Partition {
    pub(crate) fn new(slots: usize, ghosts: usize) -> Self {
        Self {
            slots: (0..slots).map(|_| BTreeSet::new()).collect(),
            ghosts: Ghosts::new(ghosts),
            blocks: 0,
        }
    }

    pub(crate) fn get(&self, slot: usize, key: &[u8]) -> Option<&Arc<Block>> {
        self.slots[slot].get(key).map(|published| &published.0)
    }

    /// Publishes a block; returns the one it took the place of.
    pub(crate) fn insert(&mut self, slot: usize, block: Arc<Block>) -> Option<Arc<Block>> {
        let old = self.slots[slot].replace(Published(block));
        if old.is_none() {
            self.blocks += 1;
        }
        old.map(|published| published.0)
    }

    pub(crate) fn remove(&mut self, slot: usize, key: &[u8]) -> Option<Arc<Block>> {
        let old = self.slots[slot].take(key)?;
        self.blocks -= 1;
        if self.slots[slot].is_empty() {
            // An emptied set keeps a node; thousands of them would pin the heap pages they lie in.
            self.slots[slot] = BTreeSet::new();
        }
        Some(old.0)
    }

    /// Removes exactly this block, not another one that has come under its key.
    pub(crate) fn remove_block(&mut self, slot: usize, block: &Arc<Block>) -> bool {
        let same = self
            .get(slot, &block.key)
            .is_some_and(|found| Arc::ptr_eq(found, block));
        same && self.remove(slot, &block.key).is_some()
    }
}
