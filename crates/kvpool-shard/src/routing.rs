//! The slot map as routing uses it: compiled once per epoch, read without locks.

use std::collections::BTreeMap;
use std::sync::Arc;

use kvpool_state::SLOTS;
use kvpool_state::records::{MapShard, SlotCopy, SlotMap, SlotRange};
use kvpool_state::table::SlotTable;
use kvpool_wire::peer::Known;

use crate::identity::Identity;
use crate::peer::Peer;

/// Who holds a copy.
#[derive(Clone)]
pub(crate) enum Holder {
    /// This process.
    Me,
    Peer(Arc<Peer>),
}

impl Holder {
    pub(crate) fn is_me(&self) -> bool {
        matches!(self, Holder::Me)
    }
}

/// One copy of a slot.
#[derive(Clone)]
pub(crate) struct HeldCopy {
    pub(crate) holder: Holder,
    pub(crate) in_sync: bool,
}

/// A compiled slot map.
pub(crate) struct Routing {
    /// What it was made from, for peers that hold an older one.
    pub(crate) map: Arc<SlotMap>,
    /// Distinct lists; slots share them.
    lists: Vec<Box<[HeldCopy]>>,
    slots: Box<[u16]>,
    /// Everybody in the map but this process, by shard number.
    pub(crate) peers: BTreeMap<u32, Arc<Peer>>,
    /// Slots whose list names this process, and whether that copy is in-sync.
    pub(crate) mine: Vec<(u16, bool)>,
    /// Last epoch at which a plan took a copy from this incarnation, 0 = never.
    pub(crate) dropped_at: u64,
}

impl Routing {
    /// No map yet: nobody holds anything.
    pub(crate) fn empty() -> Self {
        Routing {
            map: Arc::new(SlotMap::default()),
            lists: vec![Box::default()],
            slots: vec![0; usize::from(SLOTS)].into_boxed_slice(),
            peers: BTreeMap::new(),
            mine: Vec::new(),
            dropped_at: 0,
        }
    }

    /// One process that holds every slot.
    pub(crate) fn alone() -> Self {
        let me = HeldCopy {
            holder: Holder::Me,
            in_sync: true,
        };
        Routing {
            lists: vec![Box::new([me])],
            mine: (0..SLOTS).map(|slot| (slot, true)).collect(),
            ..Routing::empty()
        }
    }

    /// Compiles `map`. Peers of `before` that are the same incarnation at the same address are kept, with their
    /// connections, breakers and gaps.
    ///
    /// # Errors
    /// A sentence about what is wrong with the map.
    pub(crate) fn compile(map: Arc<SlotMap>, before: &Routing, identity: &Arc<Identity>) -> Result<Self, String> {
        // Checks bounds, order and repetition; the ranges are as good as the table then.
        SlotTable::from_ranges(&map.ranges)?;
        let mut peers = BTreeMap::new();
        let mut me = None;
        let mut dropped_at = 0;
        for shard in &map.shards {
            if shard.id == identity.id {
                // A list that names an older incarnation of us is about a store that no longer exists.
                me = (shard.incarnation == identity.incarnation()).then_some(shard.number);
                dropped_at = shard.dropped_at;
                continue;
            }
            peers.insert(shard.number, peer_for(shard, before, identity));
        }
        let mut routing = Routing {
            map: Arc::clone(&map),
            peers,
            dropped_at,
            ..Routing::empty()
        };
        for range in &map.ranges {
            routing.put(range, me);
        }
        Ok(routing)
    }

    fn put(&mut self, range: &SlotRange, me: Option<u32>) {
        let list: Box<[HeldCopy]> = range.copies.iter().filter_map(|copy| self.copy(copy, me)).collect();
        if list.is_empty() {
            return;
        }
        let mine = list.iter().find(|copy| copy.holder.is_me()).map(|copy| copy.in_sync);
        // Lists are at most one per slot, plus the empty one: the index fits.
        let index = u16::try_from(self.lists.len()).unwrap_or(0);
        self.lists.push(list);
        for slot in range.first..=range.last {
            let Ok(slot) = u16::try_from(slot) else { continue };
            if let Some(place) = self.slots.get_mut(usize::from(slot)) {
                *place = index;
            }
            if let Some(in_sync) = mine {
                self.mine.push((slot, in_sync));
            }
        }
    }

    fn copy(&self, copy: &SlotCopy, me: Option<u32>) -> Option<HeldCopy> {
        let holder = if Some(copy.shard) == me {
            Holder::Me
        } else {
            Holder::Peer(Arc::clone(self.peers.get(&copy.shard)?))
        };
        Some(HeldCopy {
            holder,
            in_sync: copy.in_sync,
        })
    }

    /// The copies of a slot, primary first.
    pub(crate) fn list(&self, slot: u16) -> &[HeldCopy] {
        let index = self.slots.get(usize::from(slot)).copied().unwrap_or(0);
        self.lists.get(usize::from(index)).map_or(&[], |list| list)
    }

    /// This process' own copy of a slot: is it in-sync?
    pub(crate) fn my_copy(&self, slot: u16) -> Option<bool> {
        self.list(slot)
            .iter()
            .find(|copy| copy.holder.is_me())
            .map(|copy| copy.in_sync)
    }

    pub(crate) fn known(&self) -> Known {
        Known {
            cluster_generation: self.map.cluster_generation,
            epoch: self.map.epoch,
            generation: self.map.generation,
        }
    }
}

fn peer_for(shard: &MapShard, before: &Routing, identity: &Arc<Identity>) -> Arc<Peer> {
    let same = before
        .peers
        .get(&shard.number)
        .filter(|peer| peer.id == shard.id && peer.address == shard.peer && peer.incarnation == shard.incarnation);
    match same {
        Some(peer) => Arc::clone(peer),
        None => Peer::new(&shard.id, &shard.peer, shard.incarnation, Arc::clone(identity)),
    }
}
