//! The state and its deterministic apply. Applying an entry either changes records (and says which) or is refused by name;
//! both leave every member with the same bytes.
//!
//! Keeps: epochs, generations and incarnations only grow (R4); a repeated request id changes nothing (R2); every table is
//! bounded (R12); no slot loses its last in-sync copy by a plan.

use crate::command::{
    self, Command, ConfigurePool, CreateCluster, DecodeError, PlanSlots, Refusal, RegisterShard, Response, SlotsInSync,
};
use crate::records::{
    ClusterRecord, Decision, Event, MapShard, MemberRecord, NodeRecord, PoolRecord, Record, RequestId, ShardRecord,
    ShardState, SlotCopy, SlotMap, SlotRange,
};
use crate::table::{MAX_FACTOR, SlotTable, check_range};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

/// How long a request id is remembered, in log time.
pub const REQUEST_WINDOW_MS: u64 = 10 * 60 * 1000;
const MAX_REQUESTS: usize = 16_384;
const MAX_DECISIONS: usize = 1_024;
const MAX_SHARDS: usize = 32_768;
const MAX_NODES: usize = 32_768;
const MAX_POOLS: usize = 64;
/// Longest id, name, label or reason, in bytes.
pub const MAX_NAME: usize = 253;
const MAX_LABELS: usize = 64;

/// A pool with its slot table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Pool {
    pub(crate) record: PoolRecord,
    pub(crate) epoch: u64,
    pub(crate) table: SlotTable,
    /// Shard number → last epoch at which a plan took a copy from it.
    pub(crate) dropped_at: BTreeMap<u32, u64>,
}

/// Everything that the log has built. A clone shares the records.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct State {
    pub(crate) cluster: Option<Arc<ClusterRecord>>,
    pub(crate) nodes: BTreeMap<String, Arc<NodeRecord>>,
    pub(crate) shards: BTreeMap<String, Arc<ShardRecord>>,
    pub(crate) pools: BTreeMap<String, Arc<Pool>>,
    /// Coordinators by name.
    pub(crate) members: BTreeMap<u64, Arc<MemberRecord>>,
    pub(crate) requests: BTreeMap<RequestId, Response>,
    /// Request ids made at or before this were forgotten: they are refused.
    pub(crate) request_floor_ms: u64,
    pub(crate) decisions: VecDeque<Arc<Decision>>,
    pub(crate) log_time_ms: u64,
    pub(crate) revision: u64,
    pub(crate) next_shard_number: u32,
}

/// What applying an entry did.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Applied {
    pub response: Response,
    /// One per changed record; empty when the command was refused, repeated, or changed nothing.
    pub events: Vec<Event>,
}

/// A command's own result, before it gets its revision.
pub(crate) struct Outcome {
    pub(crate) response: Response,
    pub(crate) records: Vec<Record>,
}

pub(crate) type Step = Result<Outcome, (Refusal, String)>;

pub(crate) fn refuse<T>(refusal: Refusal, message: impl Into<String>) -> Result<T, (Refusal, String)> {
    Err((refusal, message.into()))
}

impl State {
    /// Applies one log entry. `index` must grow from call to call.
    ///
    /// # Errors
    /// [`DecodeError`] when the entry can't be read; the state is then unchanged and the member must stop.
    pub fn apply(&mut self, index: u64, entry: &[u8]) -> Result<Applied, DecodeError> {
        let (command, envelope) = command::decode(entry)?;
        self.revision = self.revision.max(index);
        self.log_time_ms = self.log_time_ms.max(envelope.proposed_at_ms);
        self.forget_old_requests();
        if let Some(id) = &envelope.request {
            if let Some(recorded) = self.requests.get(id) {
                return Ok(Applied {
                    response: recorded.clone(),
                    events: Vec::new(),
                });
            }
            if let Some(response) = self.refuse_request(index, id) {
                return Ok(Applied {
                    response,
                    events: Vec::new(),
                });
            }
        }
        let applied = match self.run(index, &command) {
            Ok(outcome) => Applied {
                response: Response {
                    revision: index,
                    ..outcome.response
                },
                events: outcome
                    .records
                    .into_iter()
                    .map(|r| Event {
                        revision: index,
                        record: Some(r),
                    })
                    .collect(),
            },
            Err((refusal, message)) => Applied {
                response: Response {
                    revision: index,
                    refusal: refusal.into(),
                    // It may quote a word from outside, and is kept with the request id.
                    message: cut(&message),
                    ..Response::default()
                },
                events: Vec::new(),
            },
        };
        if let Some(id) = envelope.request {
            self.requests.insert(id, applied.response.clone());
        }
        Ok(applied)
    }

    fn run(&mut self, index: u64, command: &Command) -> Step {
        if self.cluster.is_none() && !matches!(command, Command::CreateCluster(_)) {
            return refuse(Refusal::NotCreated, "the cluster has not been created yet");
        }
        match command {
            Command::CreateCluster(c) => self.create_cluster(index, c),
            Command::ConfigurePool(c) => self.configure_pool(index, c),
            Command::RegisterShard(c) => self.register_shard(index, c),
            Command::ShardDown(c) => self.shard_down(index, &c.id, c.incarnation, &c.reason, false),
            Command::PlanSlots(c) => self.plan_slots(index, c),
            Command::SlotsInSync(c) => self.slots_in_sync(c),
            Command::AdmitMember(c) => self.admit_member(index, c),
            Command::ConfigureGroup(c) => self.configure_group(index, c),
            Command::StateHash(c) => self.state_hash(c),
            Command::ShardLost(c) => self.shard_down(index, &c.id, c.incarnation, &c.reason, true),
            Command::DrainShard(c) => self.drain_shard(index, c),
            Command::ShardDrained(c) => self.shard_drained(index, c),
            Command::RemoveShard(c) => self.remove_shard(index, c),
            Command::ReleaseBrake(c) => self.release_brake(index, c),
        }
    }

    fn forget_old_requests(&mut self) {
        let oldest = self.log_time_ms.saturating_sub(REQUEST_WINDOW_MS);
        while let Some((first, _)) = self.requests.first_key_value() {
            let over = self.requests.len() >= MAX_REQUESTS;
            if first.created_at_ms >= oldest && !over {
                break;
            }
            self.request_floor_ms = self.request_floor_ms.max(first.created_at_ms);
            self.requests.pop_first();
        }
        self.request_floor_ms = self.request_floor_ms.max(oldest.saturating_sub(1));
    }

    fn refuse_request(&self, index: u64, id: &RequestId) -> Option<Response> {
        let (refusal, message) = if id.created_at_ms <= self.request_floor_ms && self.request_floor_ms > 0 {
            (
                Refusal::RequestExpired,
                "the request id is older than the window: whether it was applied is unknown",
            )
        } else if id.created_at_ms > self.log_time_ms.saturating_add(REQUEST_WINDOW_MS) {
            (
                Refusal::Invalid,
                "the request id lies in the future: check the caller's clock",
            )
        } else {
            return None;
        };
        Some(Response {
            revision: index,
            refusal: refusal.into(),
            message: message.into(),
            ..Response::default()
        })
    }

    fn create_cluster(&mut self, index: u64, c: &CreateCluster) -> Step {
        if self.cluster.is_some() {
            return refuse(Refusal::AlreadyCreated, "the cluster exists");
        }
        check_name("cluster_id", &c.cluster_id)?;
        check_name("pool", &c.pool)?;
        check_factor(c.factor)?;
        let cluster = ClusterRecord {
            cluster_id: c.cluster_id.clone(),
            cluster_generation: 1,
            created_at_ms: self.log_time_ms,
            // What the oldest build writes there: all members make the same state of the first entry. The leader
            // raises it once all can do more.
            feature_level: 1,
            ..ClusterRecord::default()
        };
        self.cluster = Some(Arc::new(cluster.clone()));
        self.decide(
            index,
            format!("create cluster {}", c.cluster_id),
            "first boot: every seed was empty".into(),
        );
        let mut records = vec![Record::Cluster(cluster)];
        records.extend(self.put_pool(&c.pool, c.factor));
        Ok(self.outcome(records, Some(&c.pool)))
    }

    fn configure_pool(&mut self, index: u64, c: &ConfigurePool) -> Step {
        check_name("pool", &c.pool)?;
        check_factor(c.factor)?;
        match self.pools.get(&c.pool) {
            Some(p) if p.record.factor == c.factor => {
                return Ok(self.outcome(Vec::new(), Some(&c.pool)));
            }
            None if self.pools.len() >= MAX_POOLS => {
                return refuse(Refusal::Full, "too many pools");
            }
            _ => {}
        }
        self.decide(
            index,
            format!("pool {}: factor {}", c.pool, c.factor),
            "asked through the API".into(),
        );
        let records = self.put_pool(&c.pool, c.factor);
        Ok(self.outcome(records, Some(&c.pool)))
    }

    fn put_pool(&mut self, name: &str, factor: u32) -> Vec<Record> {
        let pool = self.pools.entry(name.to_owned()).or_insert_with(|| {
            let record = PoolRecord {
                name: name.to_owned(),
                factor,
                generation: 1,
                brake_released_until_ms: 0,
            };
            Arc::new(Pool {
                record,
                epoch: 0,
                table: SlotTable::default(),
                dropped_at: BTreeMap::new(),
            })
        });
        let pool = Arc::make_mut(pool);
        pool.record.factor = factor;
        pool.epoch += 1;
        let record = Record::Pool(pool.record.clone());
        std::iter::once(record)
            .chain(self.slot_map(name).map(Record::Slots))
            .collect()
    }

    fn register_shard(&mut self, index: u64, c: &RegisterShard) -> Step {
        let node = check_registration(c)?;
        if !self.pools.contains_key(&c.pool) {
            return refuse(Refusal::UnknownPool, format!("pool {:?} does not exist", c.pool));
        }
        let known = self.shards.get(&c.id).cloned();
        if let Some(old) = known.as_ref().filter(|old| old.pool != c.pool) {
            return refuse(
                Refusal::Invalid,
                format!("shard {} belongs to pool {:?}", c.id, old.pool),
            );
        }
        if known.is_none() && self.shards.len() >= MAX_SHARDS
            || !self.nodes.contains_key(&node.id) && self.nodes.len() >= MAX_NODES
        {
            return refuse(Refusal::Full, "too many shards or nodes");
        }
        let number = known.as_ref().map_or(self.next_shard_number, |old| old.number);
        if known.is_none() {
            let Some(next) = number.checked_add(1) else {
                return refuse(Refusal::Full, "no shard number is left");
            };
            self.next_shard_number = next;
        }
        let mut records = Vec::new();
        if self.nodes.get(&node.id).is_none_or(|old| old.as_ref() != node) {
            self.nodes.insert(node.id.clone(), Arc::new(node.clone()));
            records.push(Record::Node(node.clone()));
        }
        let out = known.as_ref().is_some_and(|old| old.out);
        let (state, reason) = if out {
            (ShardState::Drained, "registered, and asked to stay out since before")
        } else {
            (ShardState::Up, "registered")
        };
        let shard = ShardRecord {
            id: c.id.clone(),
            node: node.id.clone(),
            pool: c.pool.clone(),
            number,
            boot_id: c.boot_id.clone(),
            incarnation: index,
            addresses: c.addresses.clone(),
            capacity_bytes: c.capacity_bytes,
            state: state.into(),
            since_ms: self.log_time_ms,
            reason: reason.into(),
            out,
            downs: known.as_ref().map_or(0, |old| old.downs),
            last_down_ms: known.as_ref().map_or(0, |old| old.last_down_ms),
        };
        self.shards.insert(c.id.clone(), Arc::new(shard.clone()));
        self.decide(
            index,
            format!("shard {} is {} as incarnation {index}", c.id, state.word()),
            format!("boot {}", c.boot_id),
        );
        self.take_out(&c.pool, number);
        records.push(Record::Shard(shard));
        records.extend(self.slot_map(&c.pool).map(Record::Slots));
        let mut outcome = self.outcome(records, Some(&c.pool));
        outcome.response.incarnation = index;
        Ok(outcome)
    }

    /// Takes a shard out of every list of its pool; in-sync copies move to the front. The epoch grows even when no list
    /// changes, since the map names incarnations.
    pub(crate) fn take_out(&mut self, pool: &str, number: u32) {
        let Some(pool) = self.pools.get_mut(pool) else {
            return;
        };
        let pool = Arc::make_mut(pool);
        pool.epoch += 1;
        pool.dropped_at.remove(&number);
        pool.table.rewrite(|_, list| {
            list.iter()
                .any(|c| c.shard == number)
                .then(|| in_sync_first(list.iter().copied().filter(|c| c.shard != number).collect()))
        });
    }

    fn plan_slots(&mut self, index: u64, c: &PlanSlots) -> Step {
        let Some(pool) = self.pools.get(&c.pool).cloned() else {
            return refuse(Refusal::UnknownPool, format!("pool {:?} does not exist", c.pool));
        };
        if pool.epoch != c.base_epoch {
            let message = format!(
                "pool {} is at epoch {}, the plan was made from {}",
                c.pool, pool.epoch, c.base_epoch
            );
            return refuse(Refusal::StaleEpoch, message);
        }
        let mut table = pool.table.clone();
        let mut dropped = BTreeMap::new();
        check_ranges(&c.ranges)?;
        self.check_copies(&c.pool, &c.ranges)?;
        let mut ranges = c.ranges.iter().peekable();
        let out: BTreeSet<u32> = self.shards.values().filter(|s| s.out).map(|s| s.number).collect();
        let (mut lost, mut leaving) = (None, None);
        table.rewrite(|slot, old| {
            let slot = u32::from(slot);
            while ranges.next_if(|r| r.last < slot).is_some() {}
            let range = ranges.peek().filter(|r| r.first <= slot)?;
            let was_in_sync = |n: u32| old.iter().any(|c| c.shard == n && c.in_sync);
            let list = range.copies.iter().map(|c| SlotCopy {
                shard: c.shard,
                in_sync: was_in_sync(c.shard),
            });
            let list = in_sync_first(list.collect());
            for gone in old.iter().filter(|o| !list.iter().any(|c| c.shard == o.shard)) {
                dropped.insert(gone.shard, pool.epoch + 1);
            }
            if old.iter().any(|c| c.in_sync) && !list.iter().any(|c| c.in_sync) {
                lost.get_or_insert(slot);
            }
            let new = |c: &&SlotCopy| !old.iter().any(|o| o.shard == c.shard);
            if let Some(c) = list.iter().filter(new).find(|c| out.contains(&c.shard)) {
                leaving.get_or_insert(c.shard);
            }
            Some(list)
        });
        if let Some(number) = leaving {
            return refuse(
                Refusal::Invalid,
                format!("the plan gives slots to shard number {number}, which was asked to leave"),
            );
        }
        if let Some(slot) = lost {
            return refuse(
                Refusal::Invalid,
                format!("the plan would drop the last in-sync copy of slot {slot}"),
            );
        }
        if table == pool.table {
            return Ok(self.outcome(Vec::new(), Some(&c.pool)));
        }
        if let Some(pool) = self.pools.get_mut(&c.pool) {
            let pool = Arc::make_mut(pool);
            pool.table = table;
            pool.epoch += 1;
            pool.dropped_at.append(&mut dropped);
        }
        self.decide(
            index,
            format!("pool {}: {} slot ranges planned", c.pool, c.ranges.len()),
            cut(&c.why),
        );
        let records = self.slot_map(&c.pool).map(Record::Slots).into_iter().collect();
        Ok(self.outcome(records, Some(&c.pool)))
    }

    fn check_copies(&self, pool: &str, ranges: &[SlotRange]) -> Result<(), (Refusal, String)> {
        let of_pool = self.shards.values().filter(|s| s.pool == pool && s.is_up());
        let up: BTreeSet<u32> = of_pool.map(|s| s.number).collect();
        match ranges.iter().flat_map(|r| &r.copies).find(|c| !up.contains(&c.shard)) {
            Some(c) => refuse(
                Refusal::UnknownShard,
                format!("shard number {} is not Up in pool {pool}", c.shard),
            ),
            None => Ok(()),
        }
    }

    fn slots_in_sync(&mut self, c: &SlotsInSync) -> Step {
        let Some(shard) = self.shards.get(&c.shard).cloned() else {
            return refuse(Refusal::UnknownShard, format!("shard {:?} is not registered", c.shard));
        };
        if shard.incarnation != c.incarnation || !shard.is_up() {
            let message = format!(
                "shard {} is {} as incarnation {}",
                c.shard,
                shard.state().word(),
                shard.incarnation
            );
            return refuse(Refusal::StaleIncarnation, message);
        }
        let Some(pool) = self.pools.get_mut(&c.pool).filter(|_| shard.pool == c.pool) else {
            return refuse(
                Refusal::UnknownPool,
                format!("shard {} is not of pool {:?}", c.shard, c.pool),
            );
        };
        if pool.dropped_at.get(&shard.number).is_some_and(|at| c.epoch < *at) {
            return refuse(
                Refusal::StaleEpoch,
                "a plan has taken slots from the shard since: report again",
            );
        }
        check_ranges(&c.ranges)?;
        let pool = Arc::make_mut(pool);
        let mut ranges = c.ranges.iter().peekable();
        let changed = pool.table.rewrite(|slot, list| {
            let slot = u32::from(slot);
            while ranges.next_if(|r| r.last < slot).is_some() {}
            let named = ranges.peek().is_some_and(|r| r.first <= slot);
            let filling = list.iter().any(|copy| copy.shard == shard.number && !copy.in_sync);
            (named && filling).then(|| {
                let done = |copy: &SlotCopy| SlotCopy {
                    in_sync: copy.in_sync || copy.shard == shard.number,
                    ..*copy
                };
                in_sync_first(list.iter().map(done).collect())
            })
        });
        let mut records = Vec::new();
        if changed > 0 {
            pool.epoch += 1;
            records.extend(self.slot_map(&c.pool).map(Record::Slots));
        }
        Ok(self.outcome(records, Some(&c.pool)))
    }

    pub(crate) fn outcome(&self, records: Vec<Record>, pool: Option<&str>) -> Outcome {
        let epoch = pool.and_then(|p| self.pools.get(p)).map_or(0, |p| p.epoch);
        Outcome {
            response: Response {
                epoch,
                ..Response::default()
            },
            records,
        }
    }

    pub(crate) fn decide(&mut self, number: u64, what: String, why: String) {
        if self.decisions.len() >= MAX_DECISIONS {
            self.decisions.pop_front();
        }
        self.decisions.push_back(Arc::new(Decision {
            number,
            at_ms: self.log_time_ms,
            what,
            why,
        }));
    }
}

/// Queries.
impl State {
    #[must_use]
    pub fn cluster(&self) -> Option<&ClusterRecord> {
        self.cluster.as_deref()
    }

    pub fn nodes(&self) -> impl Iterator<Item = &NodeRecord> {
        self.nodes.values().map(Arc::as_ref)
    }

    pub fn shards(&self) -> impl Iterator<Item = &ShardRecord> {
        self.shards.values().map(Arc::as_ref)
    }

    #[must_use]
    pub fn shard(&self, id: &str) -> Option<&ShardRecord> {
        self.shards.get(id).map(Arc::as_ref)
    }

    pub fn pools(&self) -> impl Iterator<Item = &PoolRecord> {
        self.pools.values().map(|p| &p.record)
    }

    #[must_use]
    pub fn pool(&self, name: &str) -> Option<&PoolRecord> {
        self.pools.get(name).map(|p| &p.record)
    }

    /// Epoch and slot table of a pool.
    #[must_use]
    pub fn slot_table(&self, pool: &str) -> Option<(u64, &SlotTable)> {
        self.pools.get(pool).map(|p| (p.epoch, &p.table))
    }

    /// The slot map that shards and proxies route by: shards whose incarnation is in force, and every slot's list.
    #[must_use]
    pub fn slot_map(&self, pool: &str) -> Option<SlotMap> {
        let p = self.pools.get(pool)?;
        let cluster = self.cluster.as_ref()?;
        let shards = self.shards.values().filter(|s| s.pool == pool && s.is_up());
        Some(SlotMap {
            pool: pool.to_owned(),
            cluster_id: cluster.cluster_id.clone(),
            cluster_generation: cluster.cluster_generation,
            epoch: p.epoch,
            generation: p.record.generation,
            factor: p.record.factor,
            shards: shards
                .map(|s| map_shard(s, p.dropped_at.get(&s.number).copied()))
                .collect(),
            ranges: p.table.to_ranges(),
        })
    }

    /// The newest decisions, oldest first.
    pub fn decisions(&self) -> impl Iterator<Item = &Decision> {
        self.decisions.iter().map(Arc::as_ref)
    }

    /// Milliseconds of log time; never goes back.
    #[must_use]
    pub fn log_time_ms(&self) -> u64 {
        self.log_time_ms
    }

    /// Index of the last applied entry.
    #[must_use]
    pub fn revision(&self) -> u64 {
        self.revision
    }

    /// Every record, for a list or a relist.
    #[must_use]
    pub fn records(&self) -> Vec<Record> {
        let cluster = self.cluster().cloned().map(Record::Cluster);
        let nodes = self.nodes().cloned().map(Record::Node);
        let shards = self.shards().cloned().map(Record::Shard);
        let pools = self.pools().cloned().map(Record::Pool);
        let members = self.members().cloned().map(Record::Member);
        let maps = self.pools.keys().filter_map(|p| self.slot_map(p)).map(Record::Slots);
        cluster
            .into_iter()
            .chain(nodes)
            .chain(shards)
            .chain(pools)
            .chain(maps)
            .chain(members)
            .collect()
    }
}

fn map_shard(s: &ShardRecord, dropped_at: Option<u64>) -> MapShard {
    MapShard {
        number: s.number,
        id: s.id.clone(),
        incarnation: s.incarnation,
        node: s.node.clone(),
        peer: s.addresses.as_ref().map_or_else(String::new, |a| a.peer.clone()),
        up: s.is_up(),
        dropped_at: dropped_at.unwrap_or(0),
    }
}

/// Order within the two kinds is kept.
fn in_sync_first(mut list: Vec<SlotCopy>) -> Vec<SlotCopy> {
    list.sort_by_key(|c| !c.in_sync);
    list
}

/// Free text is cut to [`MAX_NAME`] bytes at a character boundary.
pub(crate) fn cut(text: &str) -> String {
    text.char_indices()
        .take_while(|(i, c)| i + c.len_utf8() <= MAX_NAME)
        .map(|(_, c)| c)
        .collect()
}

pub(crate) fn check_name(field: &str, value: &str) -> Result<(), (Refusal, String)> {
    let ok = !value.is_empty() && value.len() <= MAX_NAME && !value.chars().any(char::is_control);
    if ok {
        Ok(())
    } else {
        refuse(
            Refusal::Invalid,
            format!("{field} must have 1-{MAX_NAME} printable bytes"),
        )
    }
}

fn check_factor(factor: u32) -> Result<(), (Refusal, String)> {
    if (1..=MAX_FACTOR).contains(&factor) {
        Ok(())
    } else {
        refuse(Refusal::Invalid, format!("factor must be 1-{MAX_FACTOR}, not {factor}"))
    }
}

/// Each within bounds, in order, none overlapping.
fn check_ranges(ranges: &[SlotRange]) -> Result<(), (Refusal, String)> {
    let mut next = 0;
    for range in ranges {
        check_range(range).or_else(|m| refuse(Refusal::Invalid, m))?;
        if range.first < next {
            return refuse(Refusal::Invalid, format!("slot range {} is out of order", range.first));
        }
        next = range.last + 1;
    }
    Ok(())
}

fn check_registration(c: &RegisterShard) -> Result<&NodeRecord, (Refusal, String)> {
    check_name("shard id", &c.id)?;
    check_name("boot_id", &c.boot_id)?;
    let Some(node) = &c.node else {
        return refuse(Refusal::Invalid, "node is missing");
    };
    check_name("node id", &node.id)?;
    if node.zone.len() > MAX_NAME || node.labels.len() > MAX_LABELS {
        return refuse(
            Refusal::Invalid,
            format!("zone or labels of node {} are too long", node.id),
        );
    }
    if node
        .labels
        .iter()
        .any(|(k, v)| k.len() > MAX_NAME || v.len() > MAX_NAME)
    {
        return refuse(Refusal::Invalid, format!("a label of node {} is too long", node.id));
    }
    let Some(addresses) = &c.addresses else {
        return refuse(Refusal::Invalid, "addresses are missing");
    };
    check_name("peer address", &addresses.peer)?;
    let others = [&addresses.resp, &addresses.lm, &addresses.http];
    if others.iter().any(|a| a.len() > MAX_NAME) {
        return refuse(Refusal::Invalid, format!("an address of shard {} is too long", c.id));
    }
    Ok(node)
}
