//! Choosing one shard of each slot's copies, so that every shard gets its quota of slots. Slots of shards with too many pass
//! along shared slots to shards with too few, by shortest chains, many at a time (the scheme of Hopcroft and Karp).

use super::Copies;
use super::quota::largest_remainder;
use kvpool_state::SLOTS;
use std::collections::VecDeque;

pub(super) struct Flow<'a> {
    sets: &'a [Copies],
    quota: &'a [u64],
    /// Slots of each shard.
    pub slots_of: Vec<Vec<u16>>,
}

impl<'a> Flow<'a> {
    /// Starts from a present choice; rows of slots without one and with equal copies are split among these by their room.
    pub fn new(sets: &'a [Copies], quota: &'a [u64], present: &[Option<u32>]) -> Flow<'a> {
        let mut flow = Flow {
            sets,
            quota,
            slots_of: vec![Vec::new(); quota.len()],
        };
        flow.take(present);
        flow
    }

    /// How many slots a shard has above its quota.
    fn excess(&self, shard: u32) -> i64 {
        self.slots_of[shard as usize].len() as i64 - self.quota[shard as usize] as i64
    }

    fn take(&mut self, present: &[Option<u32>]) {
        for (slot, shard) in (0..SLOTS).zip(present) {
            if let Some(shard) = shard {
                self.slots_of[*shard as usize].push(slot);
            }
        }
        let mut slot = 0;
        while slot < self.sets.len() {
            let set = self.sets[slot];
            let open = |s: &usize| present[*s].is_none() && self.sets[*s] == set;
            let row = (slot..self.sets.len()).take_while(open).count();
            self.split(slot, row, &set);
            slot += row.max(1);
        }
    }

    fn split(&mut self, first: usize, row: usize, set: &Copies) {
        let mut room: Vec<u64> = set
            .as_slice()
            .iter()
            .map(|s| u64::try_from(-self.excess(*s)).unwrap_or(0))
            .collect();
        if room.iter().all(|r| *r == 0) {
            room.fill(1);
        }
        let mut slot = first;
        for (shard, part) in set.as_slice().iter().zip(largest_remainder(row as u64, &room)) {
            for _ in 0..part {
                self.slots_of[*shard as usize].extend(u16::try_from(slot));
                slot += 1;
            }
        }
    }

    /// Moves primaries from shards with an excess above `over` to shards with one below `under`, along shortest chains, until
    /// there is none.
    pub fn run(&mut self, over: i64, under: i64) {
        loop {
            let sources: Vec<u32> = (0..self.slots_of.len() as u32)
                .filter(|s| self.excess(*s) > over)
                .collect();
            let Some(mut search) = self.levels(&sources, under) else {
                return;
            };
            let mut moved = false;
            for source in sources {
                while self.excess(source) > over && self.chain(source, under, &mut search) {
                    moved = true;
                }
            }
            if !moved {
                return;
            }
        }
    }

    /// Distance of each shard from the sources; `None` when no shard with room is reached.
    fn levels(&self, sources: &[u32], under: i64) -> Option<Search> {
        let shards = self.slots_of.len();
        let mut search = Search {
            level: vec![u32::MAX; shards],
            next: vec![0; shards],
        };
        let mut queue: VecDeque<u32> = sources.iter().copied().collect();
        sources.iter().for_each(|s| search.level[*s as usize] = 0);
        let mut found = false;
        while let Some(at) = queue.pop_front() {
            let level = search.level[at as usize] + 1;
            for slot in &self.slots_of[at as usize] {
                for to in self.sets[usize::from(*slot)].as_slice() {
                    if search.level[*to as usize] == u32::MAX {
                        search.level[*to as usize] = level;
                        found |= self.excess(*to) < under;
                        queue.push_back(*to);
                    }
                }
            }
        }
        found.then_some(search)
    }

    /// One chain from `source`, depth first along rising levels. A shard that leads nowhere is left out of the search.
    fn chain(&mut self, source: u32, under: i64, search: &mut Search) -> bool {
        let mut path: Vec<(u32, u32)> = Vec::new();
        let mut at = source;
        while at == source || self.excess(at) >= under {
            if let Some(to) = self.step(at, search) {
                path.push((at, to));
                at = to;
            } else {
                search.level[at as usize] = u32::MAX;
                let Some((before, _)) = path.pop() else { return false };
                at = before;
            }
        }
        for (from, to) in path {
            let place = search.next[from as usize];
            let slot = self.slots_of[from as usize].swap_remove(place);
            self.slots_of[to as usize].push(slot);
        }
        true
    }

    /// The next shard to go on to from `at`; its `next` points at the slot that leads there.
    fn step(&self, at: u32, search: &mut Search) -> Option<u32> {
        let level = search.level[at as usize].checked_add(1)?;
        while let Some(slot) = self.slots_of[at as usize].get(search.next[at as usize]) {
            let set = self.sets[usize::from(*slot)];
            if let Some(to) = set.as_slice().iter().find(|s| search.level[**s as usize] == level) {
                return Some(*to);
            }
            search.next[at as usize] += 1;
        }
        None
    }
}

struct Search {
    level: Vec<u32>,
    /// First slot of each shard that has not been found to lead nowhere.
    next: Vec<usize>,
}
