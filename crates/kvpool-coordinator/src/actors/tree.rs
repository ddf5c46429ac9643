//! The actors of one leadership: built from state with a [`Duty`], killed when it is dropped (also by a panic of Leadership).

use crate::actors::duty::Duty;
use crate::actors::group::{GroupActor, GroupMsg};
use crate::actors::leadership::LeadershipMsg;
use crate::actors::node_supervisor::{NodeSupervisor, NodeSupervisorMsg};
use crate::actors::pool_supervisor::{PoolSupervisor, PoolSupervisorMsg};
use crate::actors::restart::Nursery;
use crate::core::Core;
use crate::metric_definitions as m;
use ractor::{Actor, ActorRef, SupervisionEvent};
use std::sync::Arc;

/// What stands right below Leadership.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Branch {
    Nodes,
    Pools,
    Group,
}

pub(crate) struct Tree {
    duty: Arc<Duty>,
    nodes: Nursery<NodeSupervisorMsg>,
    pools: Nursery<PoolSupervisorMsg>,
    group: Nursery<GroupMsg>,
}

impl Tree {
    pub(crate) async fn build(core: Arc<Core>, term: u64, leadership: &ActorRef<LeadershipMsg>) -> Tree {
        let stands = |other: &&Arc<Duty>| !other.end.is_cancelled() || other.term > term;
        if let Some(other) = core.duty.borrow().as_ref().filter(stands) {
            m::violation(
                "R1",
                &format!("term {term} begins while the duties of term {} stand", other.term),
            );
        }
        let nodes = Nursery::new("NodeSupervisor", core.conditions.clone());
        let pools = Nursery::new("PoolSupervisor", core.conditions.clone());
        let group = Nursery::new("GroupActor", core.conditions.clone());
        let mut tree = Tree {
            duty: Duty::new(core, term),
            nodes,
            pools,
            group,
        };
        tree.spawn(leadership, Branch::Nodes).await;
        tree.spawn(leadership, Branch::Pools).await;
        tree.spawn(leadership, Branch::Group).await;
        tree.duty.core.duty.send_replace(Some(tree.duty.clone()));
        tree
    }

    async fn spawn(&mut self, leadership: &ActorRef<LeadershipMsg>, branch: Branch) {
        let (duty, above) = (self.duty.clone(), leadership.get_cell());
        let failed = match branch {
            Branch::Nodes => match NodeSupervisor::spawn_linked(None, NodeSupervisor, duty, above).await {
                Ok((actor, _)) => {
                    *self.duty.nodes.lock() = Some(actor.clone());
                    self.nodes.put("", actor);
                    return;
                }
                Err(e) => self.nodes.failed("", &e.to_string()),
            },
            Branch::Pools => match PoolSupervisor::spawn_linked(None, PoolSupervisor, duty, above).await {
                Ok((actor, _)) => return self.pools.put("", actor),
                Err(e) => self.pools.failed("", &e.to_string()),
            },
            Branch::Group => match GroupActor::spawn_linked(None, GroupActor, duty, above).await {
                Ok((actor, _)) => {
                    *self.duty.group.lock() = Some(actor.clone());
                    return self.group.put("", actor);
                }
                Err(e) => self.group.failed("", &e.to_string()),
            },
        };
        leadership.send_after(failed, move || LeadershipMsg::Respawn(branch));
    }

    pub(crate) async fn respawn(&mut self, leadership: &ActorRef<LeadershipMsg>, branch: Branch) {
        // A late message of an earlier tree finds nothing missing.
        let missing = match branch {
            Branch::Nodes => self.nodes.is_missing(""),
            Branch::Pools => self.pools.is_missing(""),
            Branch::Group => self.group.is_missing(""),
        };
        if missing {
            self.spawn(leadership, branch).await;
        }
    }

    pub(crate) fn died(&mut self, leadership: &ActorRef<LeadershipMsg>, event: &SupervisionEvent) {
        if let Some((_, after)) = self.nodes.died(event) {
            leadership.send_after(after, || LeadershipMsg::Respawn(Branch::Nodes));
        }
        if let Some((_, after)) = self.pools.died(event) {
            leadership.send_after(after, || LeadershipMsg::Respawn(Branch::Pools));
        }
        if let Some((_, after)) = self.group.died(event) {
            leadership.send_after(after, || LeadershipMsg::Respawn(Branch::Group));
        }
    }

    #[cfg(test)]
    pub(crate) fn let_panic(&self, target: &super::Target) {
        if let (super::Target::Group, Some(group)) = (target, self.group.get("")) {
            let _ = group.cast(GroupMsg::Panic);
        }
        if let Some(nodes) = self.nodes.get("") {
            let _ = nodes.cast(NodeSupervisorMsg::Panic(target.clone()));
        }
        if let Some(pools) = self.pools.get("") {
            let _ = pools.cast(PoolSupervisorMsg::Panic(target.clone()));
        }
    }
}

impl Drop for Tree {
    fn drop(&mut self) {
        let core = &self.duty.core;
        tracing::info!(
            term = self.duty.term,
            member = core.raft_id(),
            "the duties of this leadership end"
        );
        self.duty.end.cancel();
        // A successor's duty is left alone.
        core.duty
            .send_if_modified(|held| held.take_if(|held| Arc::ptr_eq(held, &self.duty)).is_some());
        // Killed, not stopped: a stop would wait for a handler that may hang.
        self.nodes.remove("");
        self.pools.remove("");
        self.group.remove("");
    }
}
