//! The leader's duties, as the coordinator's actors do them: sessions, the failure detector, placement. Begun from the
//! state when a member begins to lead, gone when that ends (R10); every proposal is made in the term it was decided in (R1).

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use kvpool_policy::failure::{Admission, Evidence, FailureDetector, Known, Limits, admit};
use kvpool_policy::placement::{Input, Part, PlaceShard, plan};
use kvpool_raft::MemberId;
use kvpool_state::command::{PlanSlots, RegisterShard, ShardDown, SlotsInSync};
use kvpool_state::records::{ShardState, SlotRange};
use kvpool_state::{Command, Response, State};
use prost::Message;

use crate::mutation::Mutation;
use crate::net::Node;
use crate::pool::replica::{Pools, View};
use crate::world;

/// The pool that shards belong to.
pub const POOL: &str = "default";
/// Times of the failure detector.
pub const LIMITS: Limits = Limits {
    lease_ms: 1_500,
    broken_grace_ms: 500,
    tick_ms: 100,
};
const TICK: Duration = Duration::from_millis(100);
/// Ticks between two plans: each takes milliseconds of real time.
const PLAN_EVERY: u64 = 4;
/// Ranges in one command, so that it fits the simulator's small log segments.
const BATCH: usize = 1_024;

/// A shard's session with the leader.
struct Session {
    boot_id: String,
    incarnation: u64,
    heard_ms: u64,
}

/// What the leader of a term remembers outside of the log.
struct Office {
    term: u64,
    detector: FailureDetector,
    sessions: BTreeMap<String, Session>,
    planned: Option<u64>,
}

/// The offices of all members; one that does not lead has none.
#[derive(Clone, Default)]
pub struct Offices(Arc<Mutex<BTreeMap<MemberId, Office>>>);

impl Offices {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<MemberId, Office>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn with<T>(&self, member: MemberId, look: impl FnOnce(&mut Office) -> T) -> Option<T> {
        self.lock().get_mut(&member).map(look)
    }
}

/// A leader's answer to a shard.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Answer {
    /// A session, as this incarnation. The fence of everything that follows.
    Welcome {
        /// The leader's term.
        term: u64,
        /// The shard's incarnation.
        incarnation: u64,
    },
    /// Ask another member, or again.
    Elsewhere,
}

fn millis() -> u64 {
    world::local_now() / 1_000_000
}

/// Starts the duties of a member's process; called at its place.
pub fn start(pools: Pools, member: MemberId, node: Node, view: View) {
    pools.offices.lock().remove(&member);
    let leader = Leader {
        pools,
        member,
        node,
        view,
    };
    world::spawn(async move { leader.run().await });
}

/// A member that may lead.
#[derive(Clone)]
pub struct Leader {
    /// What all members have in common.
    pub pools: Pools,
    /// This one.
    pub member: MemberId,
    /// Its Raft.
    pub node: Node,
    /// Its state.
    pub view: View,
}

impl Leader {
    fn leads(&self, term: u64) -> bool {
        let status = self.node.status();
        status.is_leader() && status.term == term
    }

    async fn run(self) {
        let mut status = self.node.status_watch();
        loop {
            let now = status.borrow_and_update().clone();
            if now.is_leader() {
                self.lead(now.term).await;
                self.pools.offices.lock().remove(&self.member);
            }
            if status.changed().await.is_err() {
                return;
            }
        }
    }

    async fn lead(&self, term: u64) {
        self.pools.rules.leads(term, world::now());
        // The state must hold everything that was acknowledged before anything is decided by it (R10).
        while self.leads(term) {
            let mark = self.pools.oracle.begin();
            if self.node.linearizable_read().await.is_ok() {
                let revision = self.view.read(State::revision);
                self.pools.oracle.looked(mark, revision);
                break;
            }
            world::sleep(TICK).await;
        }
        let office = Office {
            term,
            detector: FailureDetector::new(LIMITS, millis(), millis()),
            sessions: BTreeMap::new(),
            planned: None,
        };
        self.pools.offices.lock().insert(self.member, office);
        for turn in 0u64.. {
            if !self.leads(term) {
                return;
            }
            self.judge(term).await;
            if turn.is_multiple_of(PLAN_EVERY) {
                self.place(term).await;
            }
            world::sleep(TICK).await;
        }
    }

    /// Commits an effect of this term.
    async fn propose(&self, term: u64, command: Command) -> Option<Response> {
        if !self.leads(term) {
            return None;
        }
        let entry = command.to_entry(None, world::wall_clock_ms());
        let applied = self.node.propose(entry.into()).await.ok()?;
        Response::decode(applied.response).ok()
    }

    /// Declares shards Down.
    async fn judge(&self, term: u64) {
        let up: BTreeMap<String, u64> = self.view.read(|state| {
            let up = state.shards().filter(|s| s.state() == ShardState::Up);
            up.map(|s| (s.id.clone(), s.incarnation)).collect()
        });
        let hasty = self.pools.mutation == Some(Mutation::HastyLeader);
        let verdicts = self.pools.offices.with(self.member, |office| {
            let now = millis();
            let known: Vec<String> = office.detector.shards().map(|(id, _)| id.to_owned()).collect();
            for gone in known.iter().filter(|id| !up.contains_key(*id)) {
                office.detector.forget(gone);
            }
            for (id, incarnation) in &up {
                office.detector.watch(id, *incarnation, now);
                if let Some(session) = office.sessions.get(id) {
                    let evidence = Evidence {
                        incarnation: session.incarnation,
                        heard_ms: session.heard_ms,
                        broken_ms: None,
                        ..Evidence::default()
                    };
                    office.detector.observe(id, evidence);
                }
            }
            let mut verdicts: Vec<(String, u64, String)> = Vec::new();
            for verdict in office.detector.tick(now) {
                verdicts.push((verdict.shard, verdict.incarnation, verdict.cause.words()));
            }
            if hasty {
                let silent = up.iter().filter(|(id, _)| !office.sessions.contains_key(*id));
                verdicts.extend(silent.map(|(id, i)| (id.clone(), *i, "never heard".to_owned())));
            }
            verdicts
        });
        for (id, incarnation, reason) in verdicts.unwrap_or_default() {
            // Its clock may run at up to twice the speed.
            let least = LIMITS.lease_ms * 1_000_000 / 2;
            self.pools.rules.declares_down(term, &id, world::now(), least);
            let down = ShardDown {
                id,
                incarnation,
                reason,
            };
            self.propose(term, Command::ShardDown(down)).await;
        }
    }

    /// Plans slots when the map has changed.
    async fn place(&self, term: u64) {
        let Some((epoch, _)) = self.view.read(|s| s.slot_table(POOL).map(|(e, t)| (e, t.get(0).len()))) else {
            return;
        };
        if self
            .pools
            .offices
            .with(self.member, |office| office.planned == Some(epoch))
            != Some(false)
        {
            return;
        }
        let ranges = self.view.read(make_plan);
        let mut base_epoch = epoch;
        for batch in ranges.chunks(BATCH) {
            let command = PlanSlots {
                pool: POOL.to_owned(),
                base_epoch,
                ranges: batch.to_vec(),
                why: "simulated".to_owned(),
            };
            match self.propose(term, Command::PlanSlots(command)).await {
                Some(response) if response.refusal() == kvpool_state::Refusal::None => base_epoch = response.epoch,
                _ => return,
            }
        }
        if ranges.is_empty() {
            self.pools
                .offices
                .with(self.member, |office| office.planned = Some(epoch));
        }
    }

    /// A shard asks for a session.
    pub async fn hello(&self, mut registration: RegisterShard, believed: u64) -> Answer {
        let id = registration.id.clone();
        let live = self.pools.offices.with(self.member, |office| {
            let live = office.sessions.get(&id);
            let live = live.filter(|s| millis().saturating_sub(s.heard_ms) < LIMITS.broken_grace_ms);
            (office.term, live.map(|s| s.boot_id.clone()))
        });
        let Some((term, live)) = live.filter(|(term, _)| self.leads(*term)) else {
            return Answer::Elsewhere;
        };
        let known = self.view.read(|state| state.shard(&id).cloned());
        let known = known.as_ref().map(|s| Known {
            up: s.state() == ShardState::Up,
            boot_id: &s.boot_id,
            incarnation: s.incarnation,
        });
        let boot_id = registration.boot_id.clone();
        let incarnation = match admit(known, &boot_id, believed, live.as_deref()) {
            Admission::Duplicate => return Answer::Elsewhere,
            Admission::Resume { incarnation } => incarnation,
            Admission::Register => {
                registration.pool = POOL.to_owned();
                match self.propose(term, Command::RegisterShard(registration)).await {
                    Some(response) if response.incarnation > 0 => response.incarnation,
                    _ => return Answer::Elsewhere,
                }
            }
        };
        let session = Session {
            boot_id,
            incarnation,
            heard_ms: millis(),
        };
        self.pools
            .offices
            .with(self.member, |office| office.sessions.insert(id, session));
        Answer::Welcome { term, incarnation }
    }

    /// A shard lives. False when this leader has no session of it, or the state has it Down.
    pub fn heartbeat(&self, shard: &str, incarnation: u64) -> bool {
        let up = self.view.read(|state| {
            let known = state.shard(shard).filter(|s| s.incarnation == incarnation);
            known.is_some_and(|s| s.state() == ShardState::Up)
        });
        if !up {
            return false;
        }
        let heard = self.pools.offices.with(self.member, |office| {
            let session = office.sessions.get_mut(shard);
            let session = session.filter(|s| s.incarnation == incarnation);
            session.map(|s| s.heard_ms = millis()).is_some()
        });
        heard == Some(true)
    }

    /// A shard reports complete slots.
    pub async fn in_sync(&self, report: SlotsInSync) {
        let Some(term) = self.pools.offices.with(self.member, |office| office.term) else {
            return;
        };
        self.propose(term, Command::SlotsInSync(report)).await;
    }
}

fn make_plan(state: &State) -> Vec<SlotRange> {
    let (Some(pool), Some((_, table))) = (state.pool(POOL), state.slot_table(POOL)) else {
        return Vec::new();
    };
    let zone = |node: &str| state.nodes().find(|n| n.id == node).map(|n| n.zone.clone());
    let shards: Vec<PlaceShard> = state
        .shards()
        .filter(|s| s.pool == POOL)
        .map(|s| PlaceShard {
            number: s.number,
            node: s.node.clone(),
            zone: zone(&s.node).unwrap_or_default(),
            capacity_bytes: s.capacity_bytes,
            part: if s.state() == ShardState::Up {
                Part::In
            } else {
                Part::Gone
            },
        })
        .collect();
    let input = Input {
        factor: pool.factor,
        shards: &shards,
        table,
        max_filling_per_shard: 8_192,
        max_changes: 16_384,
    };
    plan(&input).ranges
}
