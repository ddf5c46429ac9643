//! NodeSupervisor: one NodeActor per node, made from state or when a shard of the node asks for its first session.

use crate::actors::duty::{Attach, Duty};
use crate::actors::node::{NodeActor, NodeArgs, NodeMsg};
use crate::actors::restart::Nursery;
use kvpool_proto::meta::{Reason, Refused};
use ractor::{Actor, ActorProcessingErr, ActorRef, SupervisionEvent};
use std::collections::BTreeMap;
use std::sync::Arc;

/// The state holds as many nodes at most.
const MAX_NODES: usize = 32_768;

pub(crate) struct NodeSupervisor;

pub(crate) enum NodeSupervisorMsg {
    Attach(Box<Attach>),
    Respawn(String),
    #[cfg(test)]
    Panic(super::Target),
}

pub(crate) struct NodesState {
    duty: Arc<Duty>,
    children: Nursery<NodeMsg>,
}

impl NodesState {
    async fn spawn(&mut self, myself: &ActorRef<NodeSupervisorMsg>, node: &str, up: Vec<(String, u64)>) {
        let args = NodeArgs {
            duty: self.duty.clone(),
            node: node.to_owned(),
            up,
        };
        match NodeActor::spawn_linked(None, NodeActor, args, myself.get_cell()).await {
            Ok((actor, _)) => self.children.put(node, actor),
            Err(e) => {
                let after = self.children.failed(node, &e.to_string());
                respawn_after(myself, Some((node.to_owned(), after)));
            }
        }
    }

    async fn attach(&mut self, myself: &ActorRef<NodeSupervisorMsg>, attach: Box<Attach>) {
        let Some(node) = attach.hello.node.as_ref().map(|n| n.id.clone()) else {
            let refused = Refused::new(Reason::Invalid, "the hello names no node");
            // The caller may have given up meanwhile, here as below.
            let _ = attach.reply.send(Err(refused));
            return;
        };
        if !self.children.contains(&node) {
            if self.children.len() >= MAX_NODES {
                let _ = attach.reply.send(Err(Refused::new(Reason::Overload, "too many nodes")));
                return;
            }
            self.spawn(myself, &node, Vec::new()).await;
        }
        if let Some(actor) = self.children.get(&node) {
            // Dropped with its reply port when the actor is dead: the caller comes again.
            let _ = actor.cast(NodeMsg::Attach(attach));
        }
    }
}

/// The shards whose incarnation is in force, by node.
fn shards_up(duty: &Duty) -> BTreeMap<String, Vec<(String, u64)>> {
    let mut nodes: BTreeMap<String, Vec<(String, u64)>> = BTreeMap::new();
    duty.core.replica.read(|state| {
        for shard in state.shards().filter(|s| s.is_up()) {
            nodes
                .entry(shard.node.clone())
                .or_default()
                .push((shard.id.clone(), shard.incarnation));
        }
    });
    nodes
}

fn respawn_after(myself: &ActorRef<NodeSupervisorMsg>, died: Option<(String, std::time::Duration)>) {
    if let Some((node, after)) = died {
        myself.send_after(after, move || NodeSupervisorMsg::Respawn(node));
    }
}

impl Actor for NodeSupervisor {
    type Msg = NodeSupervisorMsg;
    type State = NodesState;
    type Arguments = Arc<Duty>;

    async fn pre_start(
        &self,
        myself: ActorRef<NodeSupervisorMsg>,
        duty: Arc<Duty>,
    ) -> Result<NodesState, ActorProcessingErr> {
        let nodes = shards_up(&duty);
        let children = Nursery::new("NodeActor", duty.core.conditions.clone());
        let mut state = NodesState { duty, children };
        for (node, up) in nodes {
            state.spawn(&myself, &node, up).await;
        }
        Ok(state)
    }

    async fn handle(
        &self,
        myself: ActorRef<NodeSupervisorMsg>,
        message: NodeSupervisorMsg,
        state: &mut NodesState,
    ) -> Result<(), ActorProcessingErr> {
        match message {
            NodeSupervisorMsg::Attach(attach) => state.attach(&myself, attach).await,
            NodeSupervisorMsg::Respawn(node) => {
                if state.children.is_missing(&node) {
                    let up = shards_up(&state.duty).remove(&node).unwrap_or_default();
                    state.spawn(&myself, &node, up).await;
                }
            }
            #[cfg(test)]
            NodeSupervisorMsg::Panic(target) => match target {
                super::Target::NodeSupervisor => panic!("injected"),
                super::Target::Node(node) => {
                    if let Some(actor) = state.children.get(&node) {
                        actor.cast(NodeMsg::Panic)?;
                    }
                }
                _ => {}
            },
        }
        Ok(())
    }

    async fn handle_supervisor_evt(
        &self,
        myself: ActorRef<NodeSupervisorMsg>,
        event: SupervisionEvent,
        state: &mut NodesState,
    ) -> Result<(), ActorProcessingErr> {
        respawn_after(&myself, state.children.died(&event));
        Ok(())
    }
}
