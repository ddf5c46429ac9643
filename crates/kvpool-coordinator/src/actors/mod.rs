//! The actors: shells around kvpool-policy. Root stands on every member and keeps Leadership; Leadership builds the rest
//! from state when raft makes this member the leader, and kills it when that ends.
//!
//! Invariants: every way in has a bounded gate; every call has a timeout; every supervisor restarts its children by the one
//! [`restart::RestartPolicy`]; effects carry the term they were computed in; nothing but observation lives in an actor.

mod catch_up;
mod duty;
mod gate;
mod group;
mod group_effects;
mod inbox;
mod leadership;
mod node;
mod node_effects;
mod node_supervisor;
mod observed;
mod planning;
mod pool;
mod pool_supervisor;
mod restart;
mod root;
mod shard;
mod tree;

pub(crate) use duty::{Duty, Suspects};
pub(crate) use gate::OwnedTask;
pub(crate) use inbox::Done;
pub(crate) use observed::SessionGuard;
pub(crate) use restart::Conditions;
pub(crate) use root::start_root;

#[cfg(test)]
pub(crate) use leadership::LeadershipMsg;
#[cfg(test)]
pub(crate) use root::RootMsg;

use crate::replica::Replica;
use gate::Signal;
use ractor::{ActorRef, Message};
use std::sync::Arc;

/// Casts `look` whenever the applied revision grows, one message at a time. Ends with its owner.
fn follow_state<M: Message>(
    replica: &Arc<Replica>,
    actor: ActorRef<M>,
    signal: Arc<Signal>,
    look: fn() -> M,
) -> OwnedTask {
    let mut revision = replica.revision();
    OwnedTask::spawn(async move {
        while revision.changed().await.is_ok() {
            if signal.raise() && actor.cast(look()).is_err() {
                return;
            }
        }
    })
}

/// Where a test lets an actor panic.
#[cfg(test)]
#[derive(Clone, Debug)]
pub(crate) enum Target {
    Leadership,
    Group,
    NodeSupervisor,
    Node(String),
    PoolSupervisor,
    Pool(String),
    Shard { pool: String, shard: String },
}
