//! Leadership: watches raft; builds the leader's actors from state when this member begins to lead, kills them when it
//! stops. It never waits inside a handler, so that a lost leadership is always noticed at once.

use crate::actors::catch_up::catch_up;
use crate::actors::gate::{OwnedTask, Signal};
use crate::actors::tree::{Branch, Tree};
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
    Respawn(Branch),
    #[cfg(test)]
    Panic(super::Target),
}

pub(crate) struct LeadershipState {
    core: Arc<Core>,
    signal: Arc<Signal>,
    _watch: OwnedTask,
    /// The term being led; its actors stand once the state has caught up.
    term: Option<u64>,
    catching_up: Option<OwnedTask>,
    tree: Option<Tree>,
}

impl LeadershipState {
    fn look(&mut self, myself: &ActorRef<LeadershipMsg>) {
        let status = self.core.status();
        let leads = status.is_leader().then_some(status.term);
        if self.term == leads {
            return;
        }
        self.catching_up = None;
        self.tree = None;
        self.term = leads;
        let Some(term) = leads else { return };
        metrics::counter!(m::LEADER_CHANGES).increment(1);
        tracing::info!(term, member = self.core.raft_id(), "this member leads");
        let (core, myself) = (self.core.clone(), myself.clone());
        self.catching_up = Some(OwnedTask::spawn(async move {
            catch_up(&core).await;
            // Fails only when Leadership is gone.
            let _ = myself.cast(LeadershipMsg::Caught { term });
        }));
    }

    async fn build(&mut self, myself: &ActorRef<LeadershipMsg>, term: u64) {
        if self.term == Some(term) && self.tree.is_none() {
            self.tree = Some(Tree::build(self.core.clone(), term, myself).await);
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
        myself.cast(LeadershipMsg::Look)?;
        Ok(LeadershipState {
            core,
            signal,
            _watch: watch,
            term: None,
            catching_up: None,
            tree: None,
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
            LeadershipMsg::Respawn(branch) => {
                if let Some(tree) = &mut state.tree {
                    tree.respawn(&myself, branch).await;
                }
            }
            #[cfg(test)]
            LeadershipMsg::Panic(super::Target::Leadership) => panic!("injected"),
            #[cfg(test)]
            LeadershipMsg::Panic(target) => {
                if let Some(tree) = &state.tree {
                    tree.let_panic(&target);
                }
            }
        }
        Ok(())
    }

    async fn handle_supervisor_evt(
        &self,
        myself: ActorRef<LeadershipMsg>,
        event: SupervisionEvent,
        state: &mut LeadershipState,
    ) -> Result<(), ActorProcessingErr> {
        if let Some(tree) = &mut state.tree {
            tree.died(&myself, &event);
        }
        Ok(())
    }
}
