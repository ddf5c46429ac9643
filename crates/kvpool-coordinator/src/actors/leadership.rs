//! Leadership: watches raft; builds the leader's actors from state when this member begins to lead, kills them when it
//! stops. It never waits inside a handler, so that a lost leadership is always noticed at once.

use crate::actors::catch_up::catch_up;
use crate::actors::duty::Duty;
use crate::actors::gate::{OwnedTask, Signal};
use crate::actors::node_supervisor::{NodeSupervisor, NodeSupervisorMsg};
use crate::actors::pool_supervisor::{PoolSupervisor, PoolSupervisorMsg};
use crate::actors::restart::Nursery;
use crate::core::Core;
use crate::metric_definitions as m;
use ractor::{Actor, ActorProcessingErr, ActorRef, SupervisionEvent};
use std::sync::Arc;

pub(crate) struct Leadership;

pub(crate) enum LeadershipMsg {
    /// Raft's status changed.
    Look,
    /// The state holds everything committed before this term: the actors can be built from it.
    Caught {
        term: u64,
    },
    RespawnNodes,
    RespawnPools,
    #[cfg(test)]
    Panic(super::Target),
}

pub(crate) struct LeadershipState {
    core: Arc<Core>,
    signal: Arc<Signal>,
    _watch: OwnedTask,
    /// The term being led; the duty once its actors stand.
    term: Option<u64>,
    catching_up: Option<OwnedTask>,
    duty: Option<Arc<Duty>>,
    nodes: Nursery<NodeSupervisorMsg>,
    pools: Nursery<PoolSupervisorMsg>,
}

impl Drop for LeadershipState {
    /// Also after a panic: sessions of a tree that is gone must not stand.
    fn drop(&mut self) {
        self.end_duty();
    }
}

impl LeadershipState {
    fn look(&mut self, myself: &ActorRef<LeadershipMsg>) {
        let status = self.core.status();
        let leads = status.is_leader().then_some(status.term);
        if self.term == leads {
            return;
        }
        self.tear_down();
        self.term = leads;
        let Some(term) = leads else { return };
        metrics::counter!(m::LEADER_CHANGES).increment(1);
        tracing::info!(term, member = self.core.id, "this member leads");
        let (core, myself) = (self.core.clone(), myself.clone());
        self.catching_up = Some(OwnedTask::spawn(async move {
            catch_up(&core).await;
            // Fails only when Leadership is gone.
            let _ = myself.cast(LeadershipMsg::Caught { term });
        }));
    }

    fn tear_down(&mut self) {
        self.catching_up = None;
        self.end_duty();
        // Killed, not stopped: a stop would wait for a handler that may hang.
        self.nodes.remove("");
        self.pools.remove("");
    }

    fn end_duty(&mut self) {
        if let Some(duty) = self.duty.take() {
            tracing::info!(
                term = duty.term,
                member = self.core.id,
                "the duties of this leadership end"
            );
            duty.end.cancel();
            // A successor's duty is left alone.
            self.core
                .duty
                .send_if_modified(|held| held.take_if(|held| Arc::ptr_eq(held, &duty)).is_some());
        }
    }

    async fn build(&mut self, myself: &ActorRef<LeadershipMsg>, term: u64) {
        if self.term != Some(term) || self.duty.is_some() {
            return;
        }
        let stands = |other: &&Arc<Duty>| !other.end.is_cancelled() || other.term > term;
        if let Some(other) = self.core.duty.borrow().as_ref().filter(stands) {
            m::violation(
                "R1",
                &format!("term {term} begins while the duties of term {} stand", other.term),
            );
        }
        let duty = Duty::new(self.core.clone(), term);
        self.duty = Some(duty.clone());
        self.spawn_nodes(myself).await;
        self.spawn_pools(myself).await;
        self.core.duty.send_replace(Some(duty));
    }

    async fn spawn_nodes(&mut self, myself: &ActorRef<LeadershipMsg>) {
        let Some(duty) = self.duty.clone() else { return };
        match NodeSupervisor::spawn_linked(None, NodeSupervisor, duty.clone(), myself.get_cell()).await {
            Ok((actor, _)) => {
                *duty.nodes.lock() = Some(actor.clone());
                self.nodes.put("", actor);
            }
            Err(e) => {
                let after = self.nodes.failed("", &e.to_string());
                myself.send_after(after, || LeadershipMsg::RespawnNodes);
            }
        }
    }

    async fn spawn_pools(&mut self, myself: &ActorRef<LeadershipMsg>) {
        let Some(duty) = self.duty.clone() else { return };
        match PoolSupervisor::spawn_linked(None, PoolSupervisor, duty, myself.get_cell()).await {
            Ok((actor, _)) => self.pools.put("", actor),
            Err(e) => {
                let after = self.pools.failed("", &e.to_string());
                myself.send_after(after, || LeadershipMsg::RespawnPools);
            }
        }
    }

    #[cfg(test)]
    fn let_panic(&self, target: super::Target) {
        assert!(!matches!(target, super::Target::Leadership), "injected");
        if let Some(nodes) = self.nodes.get("") {
            let _ = nodes.cast(NodeSupervisorMsg::Panic(target.clone()));
        }
        if let Some(pools) = self.pools.get("") {
            let _ = pools.cast(PoolSupervisorMsg::Panic(target));
        }
    }
}

impl Actor for Leadership {
    type Msg = LeadershipMsg;
    type State = LeadershipState;
    type Arguments = Arc<Core>;

    async fn pre_start(
        &self,
        myself: ActorRef<LeadershipMsg>,
        core: Arc<Core>,
    ) -> Result<LeadershipState, ActorProcessingErr> {
        let signal = Arc::new(Signal::default());
        let mut changes = core.raft().map_err(|r| r.message)?.status_watch();
        let (sender, raise) = (myself.clone(), signal.clone());
        let watch = OwnedTask::spawn(async move {
            while changes.changed().await.is_ok() {
                if raise.raise() && sender.cast(LeadershipMsg::Look).is_err() {
                    return;
                }
            }
        });
        let nodes = Nursery::new("NodeSupervisor", core.conditions.clone());
        let pools = Nursery::new("PoolSupervisor", core.conditions.clone());
        myself.cast(LeadershipMsg::Look)?;
        Ok(LeadershipState {
            core,
            signal,
            _watch: watch,
            term: None,
            catching_up: None,
            duty: None,
            nodes,
            pools,
        })
    }

    async fn handle(
        &self,
        myself: ActorRef<LeadershipMsg>,
        message: LeadershipMsg,
        state: &mut LeadershipState,
    ) -> Result<(), ActorProcessingErr> {
        match message {
            LeadershipMsg::Look => {
                state.signal.take();
                state.look(&myself);
            }
            LeadershipMsg::Caught { term } => state.build(&myself, term).await,
            LeadershipMsg::RespawnNodes if state.nodes.is_missing("") => state.spawn_nodes(&myself).await,
            LeadershipMsg::RespawnPools if state.pools.is_missing("") => state.spawn_pools(&myself).await,
            LeadershipMsg::RespawnNodes | LeadershipMsg::RespawnPools => {}
            #[cfg(test)]
            LeadershipMsg::Panic(target) => state.let_panic(target),
        }
        Ok(())
    }

    async fn handle_supervisor_evt(
        &self,
        myself: ActorRef<LeadershipMsg>,
        event: SupervisionEvent,
        state: &mut LeadershipState,
    ) -> Result<(), ActorProcessingErr> {
        let (who, why) = match &event {
            SupervisionEvent::ActorFailed(who, error) => (who, error.to_string()),
            SupervisionEvent::ActorTerminated(who, _, _) => (who, "ended".to_owned()),
            _ => return Ok(()),
        };
        if let Some((_, after)) = state.nodes.died(who, &why) {
            myself.send_after(after, || LeadershipMsg::RespawnNodes);
        }
        if let Some((_, after)) = state.pools.died(who, &why) {
            myself.send_after(after, || LeadershipMsg::RespawnPools);
        }
        Ok(())
    }
}
