//! PoolActor: the shell around placement for one pool, and the supervisor of its ShardActors.

use crate::actors::duty::Duty;
use crate::actors::follow_state;
use crate::actors::gate::{OwnedTask, Signal};
use crate::actors::planning::{make_plan, parts_now};
use crate::actors::restart::Nursery;
use crate::actors::shard::{ShardActor, ShardMsg};
use ractor::{Actor, ActorProcessingErr, ActorRef, SupervisionEvent};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

/// Between two plans, so that a burst of reports costs one plan.
const PAUSE: Duration = Duration::from_millis(50);
/// How long a pool whose slots nobody holds yet waits for more shards after its first: one plan for all of them instead of one
/// for each that joins.
const GATHER: Duration = Duration::from_millis(400);
/// How often suspicions and waits are looked at: they change without a change of the state.
const TICK: Duration = Duration::from_secs(1);
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
    /// Time has passed.
    Tick,
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
    /// The pool was new and has waited for its shards.
    gathered: bool,
}

impl PoolState {
    async fn look(&mut self, myself: &ActorRef<PoolMsg>) {
        let up: BTreeSet<String> = self.duty.core.replica.read(|s| {
            let mine = s.shards().filter(|r| r.pool == self.pool && r.is_up());
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
        } else if !self.gathered && self.is_new() && !self.shards.names().is_empty() {
            self.gathered = true;
            self.planning = true;
            self.dirty = true;
            myself.send_after(GATHER, || PoolMsg::Go);
        } else {
            self.planning = true;
            self.dirty = false;
            make_plan(self.duty.clone(), self.pool.clone(), myself.clone());
        }
    }

    /// Plans anew when a shard's part in placement is another one than in the last plan.
    async fn tick(&mut self, myself: &ActorRef<PoolMsg>) {
        if self.duty.held.lock().contains_key(&self.pool) {
            // It opens by itself when the shards are back.
            self.duty.may_declare(&self.pool);
        }
        let parts = parts_now(&self.duty, &self.pool);
        let planned = self.duty.placements.lock().get(&self.pool).map(|p| p.parts.clone());
        if planned.is_some_and(|planned| planned != parts) {
            self.look(myself).await;
        }
        myself.send_after(TICK, || PoolMsg::Tick);
    }

    /// Nobody has ever held a slot of it.
    fn is_new(&self) -> bool {
        self.duty.core.replica.read(|s| {
            s.slot_table(&self.pool)
                .is_some_and(|(_, t)| t.iter().all(|(_, copies)| copies.is_empty()))
        })
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
        myself.cast(PoolMsg::Tick)?;
        Ok(PoolState {
            duty,
            pool,
            signal,
            _watch: watch,
            shards,
            planning: false,
            dirty: false,
            gathered: false,
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
            PoolMsg::Tick => state.tick(&myself).await,
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
        respawn_after(&myself, state.shards.died(&event));
        Ok(())
    }
}
