//! A simulated shard: a process that asks the leader for an incarnation, heartbeats, follows the slot map, fills the copies
//! it is told to hold and reports them. Its memory, and its incarnation, end with its process.

use std::collections::BTreeMap;
use std::time::Duration;

use kvpool_raft::MemberId;
use kvpool_state::SLOTS;
use kvpool_state::command::{RegisterShard, SlotsInSync};
use kvpool_state::records::{MapShard, NodeRecord, ShardAddresses, SlotRange};

use crate::cluster::{Cluster, MEMBERS};
use crate::faults::{PATIENCE, any_member};
use crate::mutation::Mutation;
use crate::pool::leader::{Answer, Leader, POOL};
use crate::pool::replica::Pools;
use crate::pool::watcher::{Mirror, Watcher};
use crate::rpc::{self, CALLERS};
use crate::world::{self, Place};

/// How many there are.
pub const SHARDS: u64 = 4;
const HEARTBEAT: Duration = Duration::from_millis(250);
/// Slots that are filled in one turn.
const FILL: usize = 6_000;

/// A shard's place in the world.
pub fn place(shard: u64) -> Place {
    CALLERS + 50 + shard
}

/// Starts a process of shard number `shard`; what ran there before must have been killed.
pub fn start(cluster: &Cluster<Pools>, shard: u64, life: u64) {
    let id = format!("s{shard}");
    let mirror = Mirror::default();
    let watcher = Watcher {
        name: format!("{id}, life {life}"),
        place: place(shard),
        mirror: mirror.clone(),
    };
    world::spawn_at(place(shard), watcher.run(cluster.clone()));
    let process = Process {
        cluster: cluster.clone(),
        place: place(shard),
        registration: registration(&id, shard, life),
        id,
        mirror,
        incarnation: 0,
        term: 0,
        epoch: 0,
        settled: false,
        leader: any_member(),
    };
    world::spawn_at(place(shard), process.run());
}

fn registration(id: &str, shard: u64, life: u64) -> RegisterShard {
    RegisterShard {
        id: id.to_owned(),
        pool: POOL.to_owned(),
        node: Some(NodeRecord {
            id: format!("n{shard}"),
            zone: format!("z{}", shard % 2),
            labels: BTreeMap::new(),
        }),
        boot_id: format!("{id}-{life}"),
        addresses: Some(ShardAddresses {
            peer: format!("10.0.0.{shard}:7000"),
            ..ShardAddresses::default()
        }),
        capacity_bytes: 1 << 30,
    }
}

struct Process {
    cluster: Cluster<Pools>,
    place: Place,
    id: String,
    registration: RegisterShard,
    mirror: Mirror,
    incarnation: u64,
    /// Highest term heard.
    term: u64,
    /// Epoch of the map it routes by.
    epoch: u64,
    /// Epoch of the map at its last report.
    /// Nothing is left to fill by this map.
    settled: bool,
    leader: MemberId,
}

impl Process {
    async fn run(mut self) {
        loop {
            if self.attach().await {
                while self.beat().await {
                    // Not always at once: maps are skipped, and a slot may go and come back between two.
                    let prompt = if self.cluster.mutation == Some(Mutation::KeepLeftovers) {
                        150
                    } else {
                        700
                    };
                    if world::chance(prompt) {
                        self.adopt();
                    }
                    self.report().await;
                    world::sleep(HEARTBEAT).await;
                }
            } else {
                self.leader = MEMBERS[(self.leader as usize) % MEMBERS.len()];
            }
            world::sleep(Duration::from_millis(20 + world::random(200))).await;
        }
    }

    /// Lets `work` run at the member that this shard takes for the leader.
    async fn ask<T, F>(&self, work: impl FnOnce(Leader) -> F + Send + 'static) -> Option<T>
    where
        T: Send + 'static,
        F: Future<Output = T> + Send + 'static,
    {
        let (pools, member) = (self.cluster.model.clone(), self.leader);
        let at = move |node, view| {
            work(Leader {
                pools,
                member,
                node,
                view,
            })
        };
        rpc::call(&self.cluster, self.place, member, PATIENCE, at).await
    }

    async fn attach(&mut self) -> bool {
        let (registration, believed) = (self.registration.clone(), self.incarnation);
        let answer = self.ask(move |leader| async move { leader.hello(registration, believed).await });
        let Some(Answer::Welcome { term, incarnation }) = answer.await else {
            return false;
        };
        // The fence: an older leader than one it has heard is not obeyed (R1).
        if term < self.term {
            return false;
        }
        self.cluster.model.rules.obeys(&self.id, self.term, term);
        self.term = term;
        if incarnation != self.incarnation {
            self.cluster.oracle.count("a shard got an incarnation");
            // Its memory is cleared: it is a new member.
            self.incarnation = incarnation;
            self.settled = false;
        }
        true
    }

    async fn beat(&self) -> bool {
        let (id, incarnation) = (self.id.clone(), self.incarnation);
        let beat = self.ask(move |leader| async move { leader.heartbeat(&id, incarnation) });
        beat.await == Some(true)
    }

    /// Takes over the newest map: empties what it does not hold any more, fills what it should.
    fn adopt(&mut self) {
        let Some(map) = self.mirror.get() else { return };
        if map.epoch < self.epoch || (map.epoch == self.epoch && self.settled) {
            return;
        }
        let rules = &self.cluster.model.rules;
        rules.adopts(&self.id, self.epoch, map.epoch);
        let mine = |s: &&MapShard| s.id == self.id && s.incarnation == self.incarnation;
        let Some(me) = map.shards.iter().find(mine) else {
            return;
        };
        // A copy that went and came back between two maps holds leftovers.
        let unseen = me.dropped_at > self.epoch && self.cluster.mutation != Some(Mutation::KeepLeftovers);
        let others: BTreeMap<u32, Vec<u64>> = map
            .shards
            .iter()
            .map(|s| (s.number, rules.filled(&s.id, s.incarnation)))
            .collect();
        let mut filled = rules.filled(&self.id, self.incarnation);
        let mut budget = FILL;
        for range in &map.ranges {
            let mine = range.copies.iter().find(|c| c.shard == me.number);
            let sources: Vec<&Vec<u64>> = range
                .copies
                .iter()
                .filter(|c| c.in_sync)
                .filter_map(|c| others.get(&c.shard))
                .collect();
            for (slot, filled) in filled.iter_mut().enumerate().skip(range.first as usize) {
                if slot > range.last as usize {
                    break;
                }
                match mine {
                    None => *filled = 0,
                    Some(copy) if !copy.in_sync && (*filled == 0 || unseen) => {
                        // From an in-sync copy that is complete; where there is none, there is nothing to copy.
                        let can = sources.is_empty() || sources.iter().any(|source| source[slot] > 0);
                        *filled = if can && budget > 0 { map.epoch } else { 0 };
                        budget -= usize::from(*filled > 0);
                    }
                    Some(_) => {}
                }
            }
        }
        let lacks = |range: &SlotRange| {
            let slots = range.first as usize..=range.last as usize;
            range.copies.iter().any(|c| c.shard == me.number) && filled[slots].contains(&0)
        };
        self.settled = !map.ranges.iter().any(lacks);
        rules.set_filled(&self.id, self.incarnation, filled);
        self.epoch = map.epoch;
    }

    /// Reports complete slots that the map does not show as in-sync.
    async fn report(&mut self) {
        let Some(map) = self.mirror.get() else { return };
        let Some(me) = map
            .shards
            .iter()
            .find(|s| s.id == self.id && s.incarnation == self.incarnation)
        else {
            return;
        };
        let hasty = self.cluster.mutation == Some(Mutation::ReportUnfilled);
        let filling = |range: &&SlotRange| range.copies.iter().any(|c| c.shard == me.number && !c.in_sync);
        if !map.ranges.iter().any(|range| filling(&range)) {
            return;
        }
        let filled = self.cluster.model.rules.filled(&self.id, self.incarnation);
        let slots = map.ranges.iter().filter(filling).flat_map(|r| r.first..=r.last);
        let complete = slots.filter(|slot| hasty || filled[*slot as usize] > 0);
        let ranges = joined(complete.filter(|slot| *slot < u32::from(SLOTS)));
        if ranges.is_empty() {
            return;
        }
        let report = SlotsInSync {
            pool: POOL.to_owned(),
            shard: self.id.clone(),
            incarnation: self.incarnation,
            ranges,
            epoch: self.epoch,
        };
        let call = self.ask(move |leader| async move {
            leader.in_sync(report).await;
        });
        call.await;
    }
}

/// Slots in order as ranges; at most 512 of them, the rest with the next report.
fn joined(slots: impl Iterator<Item = u32>) -> Vec<SlotRange> {
    let mut out: Vec<SlotRange> = Vec::new();
    for slot in slots {
        if let Some(range) = out.last_mut().filter(|range| range.last + 1 == slot) {
            range.last = slot;
        } else if out.len() < 512 {
            out.push(SlotRange {
                first: slot,
                last: slot,
                copies: Vec::new(),
            });
        } else {
            break;
        }
    }
    out
}
