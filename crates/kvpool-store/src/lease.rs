//! EXISTS leases: a bounded hint that keeps blocks from eviction for a while.
//!
//! Invariant: the bytes of leased blocks never exceed the budget; when it is used up the newest lease is refused. A
//! lease ends by time, by removal, expiry or replacement of the block.
//! Listed = counted = `Block::leased`, all under the store's lease lock.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::block::Block;

pub(crate) struct Leases {
    budget: u64,
    bytes: u64,
    /// Leases by the end they had when last looked at; renewals only move the block's own time.
    by_end: BTreeMap<(u64, u64), Arc<Block>>,
    next: u64,
}

/// Ended leases looked at per call, so that no single EXISTS pays for all.
const REAP_PER_CALL: usize = 256;

impl Leases {
    pub(crate) fn new(budget: u64) -> Self {
        Self {
            budget,
            bytes: 0,
            by_end: BTreeMap::new(),
            next: 0,
        }
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Takes or renews a lease until `until_ms`; false if the budget has no room for one more.
    pub(crate) fn take(&mut self, block: &Arc<Block>, now_ms: u64, until_ms: u64) -> bool {
        if block.lease_holds(now_ms) {
            block.leased_until.fetch_max(until_ms, Ordering::Relaxed);
            return true;
        }
        if self.bytes + block.charge() > self.budget {
            self.reap(now_ms);
        }
        if block.leased.load(Ordering::Relaxed) {
            // Ended but not reaped yet: it is counted and listed already.
            block.leased_until.store(until_ms, Ordering::Relaxed);
            return true;
        }
        if self.bytes + block.charge() > self.budget {
            return false;
        }
        self.bytes += block.charge();
        block.leased_until.store(until_ms, Ordering::Relaxed);
        block.leased.store(true, Ordering::Relaxed);
        self.list(block, until_ms);
        true
    }

    fn list(&mut self, block: &Arc<Block>, end_ms: u64) {
        self.next += 1;
        block.lease_listed_end.store(end_ms, Ordering::Relaxed);
        block.lease_listed_id.store(self.next, Ordering::Relaxed);
        self.by_end.insert((end_ms, self.next), Arc::clone(block));
    }

    /// The block is gone from the index: its lease ends.
    pub(crate) fn end(&mut self, block: &Block) {
        if block.leased.swap(false, Ordering::Relaxed) {
            self.bytes -= block.charge();
            let end = block.lease_listed_end.load(Ordering::Relaxed);
            let id = block.lease_listed_id.load(Ordering::Relaxed);
            self.by_end.remove(&(end, id));
        }
    }

    /// Ends leases whose time is over (a bounded number).
    pub(crate) fn reap(&mut self, now_ms: u64) {
        for _ in 0..REAP_PER_CALL {
            match self.by_end.first_key_value() {
                Some((&(end, _), _)) if end <= now_ms => {}
                _ => return,
            }
            let Some((_, block)) = self.by_end.pop_first() else {
                return;
            };
            let until = block.leased_until.load(Ordering::Relaxed);
            if until > now_ms {
                self.list(&block, until);
            } else {
                block.leased.store(false, Ordering::Relaxed);
                self.bytes -= block.charge();
            }
        }
    }
}
