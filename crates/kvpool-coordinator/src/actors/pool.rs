//! PoolActor: the shell around placement for one pool, and the supervisor of its ShardActors.

use crate::actors::duty::{Duty, Placement};
use crate::actors::follow_state;
use crate::actors::gate::{OwnedTask, Signal};
use crate::actors::restart::Nursery;
use crate::actors::shard::{ShardActor, ShardMsg};
use kvpool_policy::placement::{Input, PlaceShard, Plan, plan};
use kvpool_proto::meta::{Reason, Refused};
use kvpool_state::command::PlanSlots;
use kvpool_state::records::{ShardState, SlotRange};
use kvpool_state::{Command, Refusal, SlotTable, State};
use ractor::{Actor, ActorProcessingErr, ActorRef, SupervisionEvent};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

/// Slots that one shard may be filling at a time. What a transfer costs is bounded by the shard, in bytes per second; many small
/// steps would only make an empty pool slow to spread (each costs a commit, a map and a report).
const MAX_FILLING: u32 = 8_192;
/// Slots that one plan may change.
const MAX_CHANGES: u32 = 16_384;
/// Ranges in one command: about 150 kB at the highest factor, far below what raft takes.
const BATCH: usize = 4_096;
/// Between two plans, so that a burst of reports costs one plan.
const PAUSE: Duration = Duration::from_millis(50);
/// After a plan that was not committed.
const RETRY: Duration = Duration::from_millis(250);

pub(crate) struct PoolActor;

pub(crate) enum PoolMsg {
    /// The state changed.
    Look,
    /// A plan was made and, where it changes something, committed.
    Planned {
        committed: bool,
    },
    /// The pause after a plan is over.
    Go,
    Respawn(String),
    /// The actor itself, or the ShardActor of the shard named.
    #[cfg(test)]
    Panic(Option<String>),
}

pub(crate) struct PoolState {
    duty: Arc<Duty>,
    pool: String,
    signal: Arc<Signal>,
    _watch: OwnedTask,
    shards: Nursery<ShardMsg>,
    /// A plan is under way or its pause lasts.
    planning: bool,
    /// The state changed meanwhile.
    dirty: bool,
}

/// What a plan is made from, taken at one moment.
struct Snapshot {
    epoch: u64,
    factor: u32,
    shards: Vec<PlaceShard>,
    table: SlotTable,
}

impl PoolState {
    async fn look(&mut self, myself: &ActorRef<PoolMsg>) {
        let up: BTreeSet<String> = self.duty.core.replica.read(|s| {
            let mine = s
                .shards()
                .filter(|r| r.pool == self.pool && r.state() == ShardState::Up);
            mine.map(|r| r.id.clone()).collect()
        });
        for gone in self.shards.names().into_iter().filter(|n| !up.contains(n)) {
            self.shards.remove(&gone);
            self.duty.inbox.detach(&gone);
        }
        for shard in up {
            if !self.shards.contains(&shard) {
                self.spawn(myself, &shard).await;
            }
        }
        if self.planning {
            self.dirty = true;
        } else {
            self.planning = true;
            self.dirty = false;
            make_plan(self.duty.clone(), self.pool.clone(), myself.clone());
        }
    }

    async fn spawn(&mut self, myself: &ActorRef<PoolMsg>, shard: &str) {
        let args = (self.duty.clone(), shard.to_owned());
        match ShardActor::spawn_linked(None, ShardActor, args, myself.get_cell()).await {
            Ok((actor, _)) => self.shards.put(shard, actor),
            Err(e) => {
                let after = self.shards.failed(shard, &e.to_string());
                respawn_after(myself, Some((shard.to_owned(), after)));
            }
        }
    }
}

fn respawn_after(myself: &ActorRef<PoolMsg>, died: Option<(String, Duration)>) {
    if let Some((shard, after)) = died {
        myself.send_after(after, move || PoolMsg::Respawn(shard));
    }
}

fn make_plan(duty: Arc<Duty>, pool: String, myself: ActorRef<PoolMsg>) {
    tokio::spawn(async move {
        let committed = match plan_and_commit(&duty, &pool).await {
            Ok(()) => true,
            Err(refused) => {
                tracing::debug!(
                    pool,
                    term = duty.term,
                    why = refused.message,
                    "a plan was not committed"
                );
                false
            }
        };
        // A dead actor's successor plans anew.
        let _ = myself.cast(PoolMsg::Planned { committed });
    });
}

async fn plan_and_commit(duty: &Duty, pool: &str) -> Result<(), Refused> {
    let Some(snapshot) = duty.core.replica.read(|s| take_snapshot(s, pool)) else {
        return Ok(());
    };
    let mut base_epoch = snapshot.epoch;
    // Some milliseconds of work: not on a thread that serves I/O.
    let made = tokio::task::spawn_blocking(move || place(&snapshot)).await;
    let made = made.map_err(|e| Refused::new(Reason::Unknown, format!("failed to plan: {e}")))?;
    let why = why(&made);
    let placement = Placement {
        epoch: base_epoch,
        settled: made.settled,
        shortfall: made.shortfall,
    };
    duty.placements.lock().insert(pool.to_owned(), placement);
    for ranges in made.ranges.chunks(BATCH) {
        let step = PlanSlots {
            pool: pool.to_owned(),
            base_epoch,
            ranges: ranges.to_vec(),
            why: why.clone(),
        };
        let response = duty.propose(Command::PlanSlots(step)).await?;
        if response.refusal() != Refusal::None {
            let text = format!("{}: {}", response.refusal().word(), response.message);
            return Err(Refused::new(Reason::Invalid, text));
        }
        base_epoch = response.epoch;
    }
    Ok(())
}

fn take_snapshot(state: &State, pool: &str) -> Option<Snapshot> {
    let factor = state.pool(pool)?.factor;
    let (epoch, table) = state.slot_table(pool)?;
    let zones: BTreeMap<&str, &str> = state.nodes().map(|n| (n.id.as_str(), n.zone.as_str())).collect();
    let mine = state.shards().filter(|s| s.pool == pool);
    let shards = mine.map(|s| PlaceShard {
        number: s.number,
        node: s.node.clone(),
        zone: zones.get(s.node.as_str()).copied().unwrap_or_default().to_owned(),
        capacity_bytes: s.capacity_bytes,
        up: s.state() == ShardState::Up,
    });
    Some(Snapshot {
        epoch,
        factor,
        shards: shards.collect(),
        table: table.clone(),
    })
}

fn place(snapshot: &Snapshot) -> Plan {
    plan(&Input {
        factor: snapshot.factor,
        shards: &snapshot.shards,
        table: &snapshot.table,
        max_filling_per_shard: MAX_FILLING,
        max_changes: MAX_CHANGES,
    })
}

fn why(plan: &Plan) -> String {
    let slots = |r: &SlotRange| r.last.saturating_sub(r.first).saturating_add(1);
    let changed: u32 = plan.ranges.iter().map(slots).sum();
    format!(
        "{changed} slots: {} unserved, {} under-replicated",
        plan.unserved, plan.under_replicated
    )
}

impl Actor for PoolActor {
    type Msg = PoolMsg;
    type State = PoolState;
    type Arguments = (Arc<Duty>, String);

    async fn pre_start(
        &self,
        myself: ActorRef<PoolMsg>,
        (duty, pool): (Arc<Duty>, String),
    ) -> Result<PoolState, ActorProcessingErr> {
        let signal = Arc::new(Signal::default());
        let watch = follow_state(&duty.core.replica, myself.clone(), signal.clone(), || PoolMsg::Look);
        let shards = Nursery::new("ShardActor", duty.core.conditions.clone());
        myself.cast(PoolMsg::Look)?;
        Ok(PoolState {
            duty,
            pool,
            signal,
            _watch: watch,
            shards,
            planning: false,
            dirty: false,
        })
    }

    async fn handle(
        &self,
        myself: ActorRef<PoolMsg>,
        message: PoolMsg,
        state: &mut PoolState,
    ) -> Result<(), ActorProcessingErr> {
        match message {
            PoolMsg::Look => {
                state.signal.take();
                state.look(&myself).await;
            }
            PoolMsg::Planned { committed } => {
                state.dirty |= !committed;
                myself.send_after(if committed { PAUSE } else { RETRY }, || PoolMsg::Go);
            }
            PoolMsg::Go => {
                state.planning = false;
                if state.dirty {
                    state.look(&myself).await;
                }
            }
            PoolMsg::Respawn(shard) => {
                if state.shards.is_missing(&shard) {
                    state.spawn(&myself, &shard).await;
                }
            }
            #[cfg(test)]
            PoolMsg::Panic(shard) => match shard {
                None => panic!("injected"),
                Some(shard) => {
                    if let Some(actor) = state.shards.get(&shard) {
                        actor.cast(ShardMsg::Panic)?;
                    }
                }
            },
        }
        Ok(())
    }

    async fn handle_supervisor_evt(
        &self,
        myself: ActorRef<PoolMsg>,
        event: SupervisionEvent,
        state: &mut PoolState,
    ) -> Result<(), ActorProcessingErr> {
        let died = match &event {
            SupervisionEvent::ActorFailed(who, error) => state.shards.died(who, &error.to_string()),
            SupervisionEvent::ActorTerminated(who, _, _) => state.shards.died(who, "ended"),
            _ => None,
        };
        respawn_after(&myself, died);
        Ok(())
    }
}
