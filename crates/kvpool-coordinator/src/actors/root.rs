//! Root: on every member, keeps Leadership alive.

use crate::actors::leadership::{Leadership, LeadershipMsg};
use crate::actors::restart::Nursery;
use crate::core::Core;
use ractor::{Actor, ActorProcessingErr, ActorRef, SpawnErr, SupervisionEvent};
use std::sync::Arc;
use tokio::task::JoinHandle;

pub(crate) struct Root;

pub(crate) enum RootMsg {
    Respawn,
    #[cfg(test)]
    Leadership(LeadershipMsg),
}

pub(crate) struct RootState {
    core: Arc<Core>,
    child: Nursery<LeadershipMsg>,
}

/// # Errors
/// When Leadership's first start failed.
pub(crate) async fn start_root(core: Arc<Core>) -> Result<(ActorRef<RootMsg>, JoinHandle<()>), SpawnErr> {
    Actor::spawn(None, Root, core).await
}

impl Root {
    async fn spawn_child(myself: &ActorRef<RootMsg>, state: &mut RootState) {
        let spawned = Leadership::spawn_linked(None, Leadership, state.core.clone(), myself.get_cell()).await;
        match spawned {
            Ok((actor, _)) => state.child.put("", actor),
            Err(e) => {
                let after = state.child.failed("", &e.to_string());
                myself.send_after(after, || RootMsg::Respawn);
            }
        }
    }
}

impl Actor for Root {
    type Msg = RootMsg;
    type State = RootState;
    type Arguments = Arc<Core>;

    async fn pre_start(&self, myself: ActorRef<RootMsg>, core: Arc<Core>) -> Result<RootState, ActorProcessingErr> {
        #[cfg(test)]
        {
            *core.root.lock() = Some(myself.clone());
        }
        let child = Nursery::new("Leadership", core.conditions.clone());
        let mut state = RootState { core, child };
        Self::spawn_child(&myself, &mut state).await;
        Ok(state)
    }

    async fn handle(
        &self,
        myself: ActorRef<RootMsg>,
        message: RootMsg,
        state: &mut RootState,
    ) -> Result<(), ActorProcessingErr> {
        match message {
            RootMsg::Respawn => Self::spawn_child(&myself, state).await,
            #[cfg(test)]
            RootMsg::Leadership(message) => {
                if let Some(child) = state.child.get("") {
                    child.cast(message)?;
                }
            }
        }
        Ok(())
    }

    async fn handle_supervisor_evt(
        &self,
        myself: ActorRef<RootMsg>,
        event: SupervisionEvent,
        state: &mut RootState,
    ) -> Result<(), ActorProcessingErr> {
        if let Some((_, after)) = state.child.died(&event) {
            myself.send_after(after, || RootMsg::Respawn);
        }
        Ok(())
    }
}
