//! Making room: takes memory for a write and evicts what must go, within a bounded number of steps.
//!
//! Leased blocks and blocks that somebody reads stay; expired ones go first. A candidate is out of the queue but still
//! in the index for a moment; the index decides, under the partition's lock, whether it really goes.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::arena::{Cost, FillToken, Memory, Short};
use crate::block::Block;
use crate::error::Refused;
use crate::index::Gone;
use crate::queue::Lane;
use crate::stats::add;
use crate::store::{Inner, within};

/// Blocks the evictor may look at for one reservation. 64 Ki keep a call in the low milliseconds and still free a
/// 16 MiB run out of 256-byte blocks.
const MAX_EVICTION_STEPS: usize = 64 * 1024;

/// Someone besides the index, the lease list and the evictor holds the block: evicting it would free nothing now.
fn being_read(candidate: &Arc<Block>) -> bool {
    let listed = usize::from(candidate.leased.load(Ordering::Relaxed));
    Arc::strong_count(candidate) > 2 + listed
}

impl Inner {
    /// Takes memory, evicting until it fits, or gives up within a bounded number of steps.
    pub(crate) fn allocate(&self, cost: &Cost, now_ms: u64) -> Result<(Memory, FillToken), Refused> {
        let mut short = match self.arena.allocate(cost) {
            Ok(taken) => return Ok(taken),
            Err(short) => short,
        };
        let _turn = self.evicting.lock();
        let mut steps = MAX_EVICTION_STEPS;
        while short == Short::Memory {
            if !self.evict_one(&mut steps, now_ms) {
                add(&self.counters.refused_all_held);
                break;
            }
            short = match self.arena.allocate(cost) {
                Ok(taken) => return Ok(taken),
                Err(short) => short,
            };
        }
        add(&self.counters.refused_shed);
        Err(Refused::Shed)
    }

    /// Evicts one block; false if nothing can go now.
    fn evict_one(&self, steps: &mut usize, now_ms: u64) -> bool {
        // Two rounds: the first clears hit bits, so a third would only meet held blocks again.
        let rounds = self.queue.lock().len() * 2 + 1;
        let mut budget = rounds.min(*steps);
        *steps -= budget;
        while budget > 0 {
            let held = |block: &Arc<Block>| block.lease_holds(now_ms) || being_read(block);
            let candidate = self
                .queue
                .lock()
                .candidate(&mut budget, held, |block| block.expired(now_ms));
            let Some((block, lane)) = candidate else {
                break;
            };
            if self.evict(block, lane, now_ms) {
                *steps += budget;
                return true;
            }
        }
        false
    }

    /// Drops a candidate from the index unless it was leased or taken up meanwhile (then it is kept).
    fn evict(&self, block: Arc<Block>, lane: Lane, now_ms: u64) -> bool {
        let mut partition = self.partition(block.slot);
        let at = within(block.slot);
        let published = partition
            .get(at, &block.key)
            .is_some_and(|found| Arc::ptr_eq(found, &block));
        if !published {
            // Replaced or removed since: whoever did that found it in no lane; our reference was the last one.
            return true;
        }
        let expired = block.expired(now_ms);
        if !expired && (block.lease_holds(now_ms) || being_read(&block)) {
            self.queue.lock().push(block, Lane::Main);
            return false;
        }
        partition.remove_block(at, &block);
        self.detach(&block);
        let why = if expired { Gone::Expired } else { Gone::Evicted };
        let print = self.print(&block.key);
        partition.ghosts.put(print, why, block.write_id);
        drop(partition);
        add(match (expired, lane) {
            (true, _) => &self.counters.expired,
            (false, Lane::Small) => &self.counters.evicted_small,
            (false, Lane::Main) => &self.counters.evicted_main,
        });
        true
    }
}
