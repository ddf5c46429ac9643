//! The shards that are looked at, with nodes and zones as small indices.

use super::{Copies, Part, PlaceShard};
use std::collections::BTreeMap;

/// Shards by index, in order of their numbers.
pub(super) struct Fleet {
    pub numbers: Vec<u32>,
    /// Capacities, at least 1: a pool of empty shards still has a map.
    pub weights: Vec<u64>,
    pub node: Vec<u32>,
    pub part: Vec<Part>,
    /// Zone of each node: that of its shard with the lowest number.
    pub zone_of_node: Vec<u32>,
    pub zones: u32,
}

impl Fleet {
    /// The shards whose part is wanted.
    pub fn new(shards: &[PlaceShard], wanted: impl Fn(Part) -> bool) -> Fleet {
        let mut by_number: BTreeMap<u32, &PlaceShard> = BTreeMap::new();
        for shard in shards {
            by_number.entry(shard.number).or_insert(shard);
        }
        let mut fleet = Fleet {
            numbers: Vec::new(),
            weights: Vec::new(),
            node: Vec::new(),
            part: Vec::new(),
            zone_of_node: Vec::new(),
            zones: 0,
        };
        let mut nodes: BTreeMap<&str, u32> = BTreeMap::new();
        let mut zones: BTreeMap<&str, u32> = BTreeMap::new();
        for (number, shard) in by_number.into_iter().filter(|(_, s)| wanted(s.part)) {
            let next_zone = zones.len() as u32;
            let next_node = nodes.len() as u32;
            let node = *nodes.entry(&shard.node).or_insert(next_node);
            if node == next_node {
                fleet.zone_of_node.push(*zones.entry(&shard.zone).or_insert(next_zone));
            }
            fleet.numbers.push(number);
            fleet.weights.push(shard.capacity_bytes.max(1));
            fleet.node.push(node);
            fleet.part.push(shard.part);
        }
        fleet.zones = zones.len() as u32;
        fleet
    }

    pub fn len(&self) -> usize {
        self.numbers.len()
    }

    pub fn nodes(&self) -> u32 {
        self.zone_of_node.len() as u32
    }

    /// Index of a shard number; `None` when it is not among them.
    pub fn index(&self, number: u32) -> Option<u32> {
        self.numbers.binary_search(&number).ok().map(|i| i as u32)
    }

    pub fn node_of(&self, shard: u32) -> u32 {
        self.node[shard as usize]
    }

    pub fn zone_of(&self, shard: u32) -> u32 {
        self.zone_of_node[self.node_of(shard) as usize]
    }

    pub fn has_node(&self, copies: &Copies, node: u32) -> bool {
        copies.as_slice().iter().any(|s| self.node_of(*s) == node)
    }

    pub fn has_zone(&self, copies: &Copies, zone: u32) -> bool {
        copies.as_slice().iter().any(|s| self.zone_of(*s) == zone)
    }

    /// Whether the next copy of a slot may stand in a zone that has one already: the places left after it must do for the
    /// zones that are still to be covered.
    pub fn may_share_zone(&self, copies: &Copies, per_slot: u32) -> bool {
        let slice = copies.as_slice();
        let covered = slice
            .iter()
            .enumerate()
            .filter(|(i, s)| !slice[..*i].iter().any(|t| self.zone_of(*t) == self.zone_of(**s)));
        let needed = per_slot.min(self.zones).saturating_sub(covered.count() as u32);
        per_slot.saturating_sub(copies.len as u32) > needed
    }

    /// Whether a shard may be the next copy beside these.
    pub fn allowed(&self, copies: &Copies, shard: u32, per_slot: u32) -> bool {
        (copies.len as u32) < per_slot
            && !self.has_node(copies, self.node_of(shard))
            && (!self.has_zone(copies, self.zone_of(shard)) || self.may_share_zone(copies, per_slot))
    }
}
