//! Which shard gets the next copy: the one with the most room, found without looking at every shard.
//!
//! Room is ordered zone by zone, node by node, shard by shard, each level by the sum below it. Taking the largest first at the
//! level where a slot may choose once only (zones, or nodes when zones must be shared) is what makes quotas come out even when
//! nearly every choice is forced.

use super::Copies;
use super::fleet::Fleet;
use std::cmp::Reverse;
use std::collections::BTreeSet;

/// Room, then a mark that spreads equal ones, then the index.
type Key = (Reverse<i64>, u64, u32);

pub(super) struct Chooser<'a> {
    fleet: &'a Fleet,
    per_slot: u32,
    room: Vec<i64>,
    /// Shards without room are left out.
    only_room: bool,
    changes: u64,
    shard_key: Vec<Option<Key>>,
    node_sum: Vec<i64>,
    node_key: Vec<Option<Key>>,
    shards_of: Vec<BTreeSet<Key>>,
    zone_sum: Vec<i64>,
    zone_key: Vec<Option<Key>>,
    nodes_of: Vec<BTreeSet<Key>>,
    zones: BTreeSet<Key>,
    /// All nodes, for when zones must be shared.
    nodes: BTreeSet<Key>,
}

impl<'a> Chooser<'a> {
    pub fn new(fleet: &'a Fleet, per_slot: u32, room: &[i64], only_room: bool) -> Chooser<'a> {
        let (nodes, zones) = (fleet.nodes() as usize, fleet.zones as usize);
        let mut chooser = Chooser {
            fleet,
            per_slot,
            room: vec![0; room.len()],
            only_room,
            changes: 0,
            shard_key: vec![None; room.len()],
            node_sum: vec![0; nodes],
            node_key: vec![None; nodes],
            shards_of: vec![BTreeSet::new(); nodes],
            zone_sum: vec![0; zones],
            zone_key: vec![None; zones],
            nodes_of: vec![BTreeSet::new(); zones],
            zones: BTreeSet::new(),
            nodes: BTreeSet::new(),
        };
        for (shard, r) in room.iter().enumerate() {
            chooser.change(shard as u32, *r);
        }
        chooser
    }

    /// Whether no shard is left to choose.
    pub fn is_empty(&self) -> bool {
        self.zones.is_empty()
    }

    pub fn room(&self, shard: u32) -> i64 {
        self.room[shard as usize]
    }

    /// Changes the room of a shard.
    pub fn change(&mut self, shard: u32, by: i64) {
        self.changes += 1;
        let counted = |room: i64| if self.only_room { room.max(0) } else { room };
        let (s, n) = (shard as usize, self.fleet.node_of(shard) as usize);
        let z = self.fleet.zone_of_node[n] as usize;
        let before = counted(self.room[s]);
        let after = counted(self.room[s] + by);
        self.room[s] += by;
        self.node_sum[n] += after - before;
        self.zone_sum[z] += after - before;
        let key = |sum: i64, index: usize| Some((Reverse(sum), spread(index as u64, self.changes), index as u32));
        let shard_key = if self.only_room && after == 0 {
            None
        } else {
            key(after, s)
        };
        rekey(&mut self.shards_of[n], &mut self.shard_key[s], shard_key);
        let node_key = if self.shards_of[n].is_empty() {
            None
        } else {
            key(self.node_sum[n], n)
        };
        rekey(&mut self.nodes, &mut self.node_key[n].clone(), node_key);
        rekey(&mut self.nodes_of[z], &mut self.node_key[n], node_key);
        let zone_key = if self.nodes_of[z].is_empty() {
            None
        } else {
            key(self.zone_sum[z], z)
        };
        rekey(&mut self.zones, &mut self.zone_key[z], zone_key);
    }

    /// The shard that may stand beside these copies and has the most room. Passes over at most the zones and nodes of the
    /// copies.
    pub fn pick(&self, beside: &Copies) -> Option<u32> {
        if beside.len as u32 >= self.per_slot {
            return None;
        }
        let node = if self.fleet.may_share_zone(beside, self.per_slot) && self.fleet.zones < self.per_slot {
            self.nodes
                .iter()
                .map(|k| k.2)
                .find(|n| !self.fleet.has_node(beside, *n))?
        } else {
            let zone = self
                .zones
                .iter()
                .map(|k| k.2)
                .find(|z| !self.fleet.has_zone(beside, *z))?;
            self.nodes_of[zone as usize].first()?.2
        };
        self.shards_of[node as usize].first().map(|k| k.2)
    }
}

fn rekey(set: &mut BTreeSet<Key>, held: &mut Option<Key>, new: Option<Key>) {
    if let Some(old) = held.take() {
        set.remove(&old);
    }
    if let Some(key) = new {
        set.insert(key);
    }
    *held = new;
}

/// A fixed mixing function (the finalizer of splitmix64): shards with equal room are paired differently each time, so that the
/// second copies of one shard's slots are spread over many others.
fn spread(index: u64, change: u64) -> u64 {
    let mut x = (index << 32) ^ change.wrapping_mul(0x9E37_79B9_7F4A_7C15);
    x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    x ^ (x >> 31)
}
