//! A pool in miniature for the placement tests: shards come and go, plans are applied as the replicated state applies them, and
//! every step is checked against the rules.

#![allow(dead_code)] // each test binary uses a part

use kvpool_policy::placement::{Input, Part, PlaceShard, Plan, Rule, largest_remainder, plan};
use kvpool_state::records::SlotCopy;
use kvpool_state::table::check_range;
use kvpool_state::{SLOTS, SlotTable};
use proptest::prelude::ProptestConfig;
use std::collections::BTreeSet;
use std::sync::Arc;

/// A seed that is known (and printed) before the run, so that any failure can be replayed.
pub fn config(cases: u32) -> ProptestConfig {
    use proptest::test_runner::RngSeed;
    let default = ProptestConfig {
        cases,
        failure_persistence: None,
        ..ProptestConfig::default()
    };
    let seed = match default.rng_seed {
        RngSeed::Fixed(seed) => seed,
        RngSeed::Random => std::time::UNIX_EPOCH
            .elapsed()
            .map_or(0, |since| since.as_nanos() as u64),
    };
    println!("PROPTEST_RNG_SEED={seed}");
    ProptestConfig {
        rng_seed: RngSeed::Fixed(seed),
        ..default
    }
}

pub fn shard(number: u32, node: u32, zone: u32, capacity_bytes: u64) -> PlaceShard {
    PlaceShard {
        number,
        node: format!("node-{node}"),
        zone: format!("zone-{zone}"),
        capacity_bytes,
        part: Part::In,
    }
}

pub struct World {
    pub factor: u32,
    pub shards: Vec<PlaceShard>,
    pub table: SlotTable,
    pub max_filling: u32,
    pub max_changes: u32,
    /// Zones of nodes that join.
    pub zone_count: u32,
    /// Copies that were started from a live one: what moving has cost.
    pub fills: u64,
}

impl World {
    pub fn new(factor: u32, shards: Vec<PlaceShard>) -> World {
        let slots = u32::from(SLOTS);
        World {
            factor,
            shards,
            table: SlotTable::default(),
            max_filling: slots,
            max_changes: slots,
            zone_count: 1,
            fills: 0,
        }
    }

    pub fn plan(&self) -> Plan {
        plan(&Input {
            factor: self.factor,
            shards: &self.shards,
            table: &self.table,
            max_filling_per_shard: self.max_filling,
            max_changes: self.max_changes,
        })
    }

    pub fn up(&self) -> Vec<&PlaceShard> {
        self.shards.iter().filter(|s| s.part != Part::Gone).collect()
    }

    /// Those that are to hold copies.
    pub fn members(&self) -> Vec<&PlaceShard> {
        let member = |s: &&PlaceShard| !matches!(s.part, Part::Gone | Part::Leaving);
        self.shards.iter().filter(member).collect()
    }

    pub fn nodes(&self) -> u32 {
        self.members().iter().map(|s| &s.node).collect::<BTreeSet<_>>().len() as u32
    }

    pub fn zones(&self) -> u32 {
        self.members().iter().map(|s| &s.zone).collect::<BTreeSet<_>>().len() as u32
    }

    pub fn per_slot(&self) -> u32 {
        self.factor.min(self.nodes())
    }

    fn place(&self, number: u32) -> Option<&PlaceShard> {
        self.shards.iter().find(|s| s.number == number && s.part != Part::Gone)
    }

    /// A process dies: the state takes it out of every list.
    pub fn down(&mut self, index: usize) {
        let number = self.shards[index].number;
        self.shards[index].part = Part::Gone;
        self.table.rewrite(|_, list| {
            let mut left: Vec<SlotCopy> = list.iter().copied().filter(|c| c.shard != number).collect();
            left.sort_by_key(|c| !c.in_sync);
            Some(left)
        });
    }

    /// Checks a plan against the rules of one step and applies it.
    pub fn apply(&mut self, plan: &Plan) {
        let before = self.table.clone();
        let mut next = 0;
        for range in &plan.ranges {
            check_range(range).unwrap();
            assert!(range.first >= next, "ranges are in order");
            next = range.last + 1;
            for slot in range.first..=range.last {
                let slot = u16::try_from(slot).unwrap();
                let old = before.get(slot).to_vec();
                self.check_step(slot, &old, &range.copies);
                self.table.set(slot, Arc::from(range.copies.clone()));
            }
        }
        self.check_limits(&before);
    }

    fn check_step(&mut self, slot: u16, old: &[SlotCopy], new: &[SlotCopy]) {
        assert_ne!(old, new, "slot {slot} is named without a change");
        let live = |list: &[SlotCopy]| {
            list.iter()
                .filter(|c| c.in_sync && self.place(c.shard).is_some())
                .count()
        };
        let was = |shard: u32| old.iter().find(|c| c.shard == shard);
        assert!(
            new.iter().all(|c| self.place(c.shard).is_some()),
            "slot {slot} names a shard that is not up"
        );
        let at_least = live(old).min(self.per_slot().max(1) as usize);
        assert!(
            live(new) >= at_least,
            "slot {slot} loses in-sync copies: {old:?} -> {new:?}"
        );
        let first_filling = new.iter().position(|c| !c.in_sync).unwrap_or(new.len());
        assert!(
            new[first_filling..].iter().all(|c| !c.in_sync),
            "slot {slot}: {new:?} has filling before in-sync"
        );
        let first_added = new.iter().position(|c| was(c.shard).is_none()).unwrap_or(new.len());
        assert!(
            new[first_added..].iter().all(|c| was(c.shard).is_none()),
            "slot {slot}: new copies are not at the end"
        );
        assert!(
            new.iter().all(|c| c.in_sync == was(c.shard).is_some_and(|o| o.in_sync)),
            "slot {slot} makes copies in-sync"
        );
        let new_on = |part: Part| {
            let added = new.iter().filter(|c| was(c.shard).is_none());
            added
                .filter(|c| self.place(c.shard).is_some_and(|s| s.part == part))
                .count()
        };
        assert_eq!(new_on(Part::Leaving), 0, "slot {slot} goes to a shard that leaves");
        if live(old) > 0 {
            assert_eq!(
                new_on(Part::Held) + new_on(Part::Demoted),
                0,
                "slot {slot} goes to a suspect"
            );
            self.fills += (new.len() - first_added) as u64;
        } else {
            let stays = |c: &SlotCopy| self.place(c.shard).is_some_and(|s| s.part != Part::Leaving);
            let kept = |c: &SlotCopy| !stays(c) || new.iter().any(|n| n.shard == c.shard);
            assert!(old.iter().all(kept), "slot {slot} without copies to lose only gains");
        }
    }

    fn check_limits(&self, before: &SlotTable) {
        let mut changed = 0;
        for (slot, new) in self.table.iter() {
            let had_copy = before
                .get(slot)
                .iter()
                .any(|c| c.in_sync && self.place(c.shard).is_some());
            changed += u32::from(had_copy && before.get(slot) != &new[..]);
        }
        assert!(changed <= self.max_changes, "{changed} slots changed");
        for shard in self.up() {
            let filling = |table: &SlotTable| {
                let fills = |list: &[SlotCopy]| {
                    list.iter().any(|c| c.in_sync) && list.iter().any(|c| c.shard == shard.number && !c.in_sync)
                };
                table.iter().filter(|(_, list)| fills(list)).count() as u32
            };
            assert!(
                filling(&self.table) <= self.max_filling.max(filling(before)),
                "shard {} fills too much",
                shard.number
            );
        }
    }

    /// Filling copies for which `done` says so have become complete; the state puts them behind the in-sync ones.
    pub fn report(&mut self, mut done: impl FnMut(u16, u32) -> bool) {
        self.table.rewrite(|slot, list| {
            let mut list = list.to_vec();
            for copy in &mut list {
                copy.in_sync |= done(slot, copy.shard);
            }
            list.sort_by_key(|c| !c.in_sync);
            Some(list)
        });
    }

    /// Plans, applies and completes copies until settled; returns the number of rounds.
    pub fn settle(&mut self) -> u32 {
        // Nobody stays suspected: what such a shard lacks would be waited for.
        for shard in &mut self.shards {
            if matches!(shard.part, Part::Held | Part::Demoted) {
                shard.part = Part::In;
            }
        }
        let step = u32::from(SLOTS) * 4 / self.max_filling.min(self.max_changes).max(1);
        let bound = 3 * step + 24;
        for round in 0..bound {
            let plan = self.plan();
            if plan.settled {
                assert!(plan.ranges.is_empty(), "settled, and yet there is a change");
                self.check_settled(&plan);
                return round;
            }
            if plan.ranges.is_empty() && self.members().is_empty() {
                // Nobody is there to take over: shards that leave keep the last copies, and the pool is not settled.
                let kept = |list: &[SlotCopy]| list.len() <= 1 && list.iter().all(|c| c.in_sync);
                assert!(self.table.iter().all(|(_, list)| kept(list)));
                return round;
            }
            self.apply(&plan);
            self.report(|_, _| true);
        }
        panic!("not settled in {bound} rounds: factor {}, {:?}", self.factor, self.up());
    }

    pub fn counts(&self) -> Vec<(u64, u64)> {
        let index: std::collections::BTreeMap<u32, usize> =
            self.members().iter().enumerate().map(|(i, s)| (s.number, i)).collect();
        let mut out = vec![(0, 0); index.len()];
        for (_, list) in self.table.iter() {
            for (place, copy) in list.iter().enumerate() {
                let Some(i) = index.get(&copy.shard) else { continue };
                let count = &mut out[*i];
                *(if place == 0 { &mut count.0 } else { &mut count.1 }) += 1;
            }
        }
        out
    }

    /// Primaries and replicas per shard that is up, by largest remainder over capacity.
    pub fn quotas(&self) -> Vec<(u64, u64)> {
        let weights: Vec<u64> = self.members().iter().map(|s| s.capacity_bytes.max(1)).collect();
        let slots = u64::from(SLOTS);
        let primary = largest_remainder(slots, &weights);
        let copies = largest_remainder(slots * u64::from(self.per_slot()), &weights);
        primary.iter().zip(copies).map(|(p, c)| (*p, c - p)).collect()
    }

    fn check_settled(&self, plan: &Plan) {
        let per_slot = self.per_slot();
        let zones = self.zones().min(per_slot) as usize;
        for (slot, list) in self.table.iter() {
            assert_eq!(list.len() as u32, per_slot, "slot {slot} has {list:?}");
            assert!(list.iter().all(|c| c.in_sync));
            let places: Vec<&PlaceShard> = list.iter().map(|c| self.place(c.shard).unwrap()).collect();
            let nodes: BTreeSet<_> = places.iter().map(|s| &s.node).collect();
            assert_eq!(nodes.len(), list.len(), "slot {slot} has two copies on one node");
            assert_eq!(
                places.iter().map(|s| &s.zone).collect::<BTreeSet<_>>().len(),
                zones,
                "zones of slot {slot}"
            );
        }
        let missing = if per_slot < self.factor { u32::from(SLOTS) } else { 0 };
        assert_eq!(plan.under_replicated, missing);
        let says = |rule: Rule| plan.shortfall.iter().any(|s| s.rule == rule);
        assert_eq!(says(Rule::TooFewNodes), missing > 0);
        let rules_forbid = says(Rule::NodeShare) || says(Rule::ZoneShare) || says(Rule::Unmoved);
        for ((have, want), shard) in self.counts().iter().zip(self.quotas()).zip(self.members()) {
            let off = have.0.abs_diff(want.0);
            assert!(
                off <= 1 || says(Rule::PrimaryUnmoved),
                "primaries {have:?} of quota {want:?} on {shard:?}"
            );
            let off = have.1.abs_diff(want.1);
            assert!(
                off <= want.1 / 100 + 2 || rules_forbid,
                "replicas {have:?} of quota {want:?} on {shard:?}"
            );
        }
    }
}
