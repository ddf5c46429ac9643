//! PoolSupervisor: one PoolActor per pool of the state.

use crate::actors::duty::Duty;
use crate::actors::follow_state;
use crate::actors::gate::{OwnedTask, Signal};
use crate::actors::pool::{PoolActor, PoolMsg};
use crate::actors::restart::Nursery;
use ractor::{Actor, ActorProcessingErr, ActorRef, SupervisionEvent};
use std::sync::Arc;
use std::time::Duration;

pub(crate) struct PoolSupervisor;

pub(crate) enum PoolSupervisorMsg {
    /// The state changed.
    Look,
    Respawn(String),
    #[cfg(test)]
    Panic(super::Target),
}

pub(crate) struct PoolsState {
    duty: Arc<Duty>,
    signal: Arc<Signal>,
    _watch: OwnedTask,
    children: Nursery<PoolMsg>,
}

impl PoolsState {
    async fn look(&mut self, myself: &ActorRef<PoolSupervisorMsg>) {
        // Pools are never removed in this version.
        let pools: Vec<String> = self
            .duty
            .core
            .replica
            .read(|s| s.pools().map(|p| p.name.clone()).collect());
        for pool in pools {
            if !self.children.contains(&pool) {
                self.spawn(myself, &pool).await;
            }
        }
    }

    async fn spawn(&mut self, myself: &ActorRef<PoolSupervisorMsg>, pool: &str) {
        let args = (self.duty.clone(), pool.to_owned());
        match PoolActor::spawn_linked(None, PoolActor, args, myself.get_cell()).await {
            Ok((actor, _)) => self.children.put(pool, actor),
            Err(e) => {
                let after = self.children.failed(pool, &e.to_string());
                respawn_after(myself, Some((pool.to_owned(), after)));
            }
        }
    }
}

fn respawn_after(myself: &ActorRef<PoolSupervisorMsg>, died: Option<(String, Duration)>) {
    if let Some((pool, after)) = died {
        myself.send_after(after, move || PoolSupervisorMsg::Respawn(pool));
    }
}

impl Actor for PoolSupervisor {
    type Msg = PoolSupervisorMsg;
    type State = PoolsState;
    type Arguments = Arc<Duty>;

    async fn pre_start(
        &self,
        myself: ActorRef<PoolSupervisorMsg>,
        duty: Arc<Duty>,
    ) -> Result<PoolsState, ActorProcessingErr> {
        let signal = Arc::new(Signal::default());
        let look = || PoolSupervisorMsg::Look;
        let watch = follow_state(&duty.core.replica, myself.clone(), signal.clone(), look);
        let children = Nursery::new("PoolActor", duty.core.conditions.clone());
        myself.cast(PoolSupervisorMsg::Look)?;
        Ok(PoolsState {
            duty,
            signal,
            _watch: watch,
            children,
        })
    }

    async fn handle(
        &self,
        myself: ActorRef<PoolSupervisorMsg>,
        message: PoolSupervisorMsg,
        state: &mut PoolsState,
    ) -> Result<(), ActorProcessingErr> {
        match message {
            PoolSupervisorMsg::Look => {
                state.signal.take();
                state.look(&myself).await;
            }
            PoolSupervisorMsg::Respawn(pool) => {
                if state.children.is_missing(&pool) {
                    state.spawn(&myself, &pool).await;
                }
            }
            #[cfg(test)]
            PoolSupervisorMsg::Panic(target) => match target {
                super::Target::PoolSupervisor => panic!("injected"),
                super::Target::Pool(pool) => {
                    if let Some(actor) = state.children.get(&pool) {
                        actor.cast(PoolMsg::Panic(None))?;
                    }
                }
                super::Target::Shard { pool, shard } => {
                    if let Some(actor) = state.children.get(&pool) {
                        actor.cast(PoolMsg::Panic(Some(shard)))?;
                    }
                }
                _ => {}
            },
        }
        Ok(())
    }

    async fn handle_supervisor_evt(
        &self,
        myself: ActorRef<PoolSupervisorMsg>,
        event: SupervisionEvent,
        state: &mut PoolsState,
    ) -> Result<(), ActorProcessingErr> {
        respawn_after(&myself, state.children.died(&event));
        Ok(())
    }
}
