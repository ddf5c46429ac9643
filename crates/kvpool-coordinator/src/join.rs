//! Joining a cluster that exists, and staying in it: an empty process asks the leader for a raft id; a member tells its address
//! when it starts and whenever it has lost contact.
//!
//! Invariants: a process whose disk was empty runs under an id that no disk has had; a disk that was replaced meanwhile stops
//! by name; what is waited for stands in the status.

use crate::boot::ask_member;
use crate::config::CoordinatorError;
use crate::core::Core;
use kvpool_client::Backoff;
use kvpool_proto::meta::{Reason, Refused};
use kvpool_proto::v1::{JoinReply, JoinRequest};
use std::collections::BTreeSet;
use std::time::Duration;
use tokio::time::sleep;

/// Asks until the leader hands out a raft id. `id` is what the disk has; 0 = it is empty.
pub(crate) async fn join(core: &Core, cluster_id: &str, boot: &str, id: u64) -> Result<u64, CoordinatorError> {
    let mut backoff = Backoff::new(Duration::from_millis(50), Duration::from_millis(500));
    loop {
        match ask_leader(core, cluster_id, boot, id).await {
            Ok(reply) if reply.raft_id != 0 => {
                *core.waits.lock() = None;
                return Ok(reply.raft_id);
            }
            Ok(reply) if !reply.refused.is_empty() => return Err(CoordinatorError::Boot(reply.refused)),
            Ok(reply) => say(core, reply.wait),
            Err(why) => say(core, why),
        }
        sleep(backoff.next_wait()).await;
    }
}

fn say(core: &Core, why: String) {
    let status = core.status();
    // A member that only waits to tell its address is one all the same.
    if status.members.contains_key(&status.member_id) && core.contacts.quorum(&status) {
        return;
    }
    let mut waits = core.waits.lock();
    if waits.as_deref() != Some(&why) {
        tracing::info!(name = core.name, why, "not let in yet");
        *waits = Some(why);
    }
}

/// Tells the leader where this member is: at the start, and again when it has not heard one for long. Ends only when the
/// member's disk was replaced.
pub(crate) async fn stay(core: &Core, id: u64) -> CoordinatorError {
    let lone = core.seeds.len() == 1;
    loop {
        // Before the cluster is created, and in a group of one, there is nobody to tell.
        let created = core.replica.read(|s| s.members().next().is_some()) || !core.contacts.quorum(&core.status());
        if created && !(lone && core.status().is_leader()) {
            if let Err(gone) = join(core, &core.cluster_id(), "", id).await {
                return gone;
            }
            while core.contacts.quorum(&core.status()) {
                sleep(core.timing.heartbeat()).await;
            }
        }
        sleep(core.timing.heartbeat()).await;
    }
}

/// Any member says who leads.
async fn ask_leader(core: &Core, cluster_id: &str, boot: &str, id: u64) -> Result<JoinReply, String> {
    let known = core.status().members.into_values();
    let mut places: BTreeSet<String> = core.seeds.values().cloned().chain(known).collect();
    let mut next = None;
    let mut why = "no coordinator answers".to_owned();
    while let Some(address) = next.take().or_else(|| places.pop_first()) {
        places.remove(&address);
        match ask(core, &address, cluster_id, boot, id).await {
            Ok(reply) => return Ok(reply),
            Err(Some(refused)) => {
                if refused.reason == Reason::NotLeader {
                    next = refused.leader.filter(|l| places.contains(l));
                }
                // A member that has no cluster itself says nothing of it.
                if refused.reason != Reason::NoCluster {
                    why = refused.message;
                }
            }
            Err(None) => {}
        }
    }
    Err(why)
}

/// `Err(None)`: not reached.
async fn ask(core: &Core, address: &str, cluster_id: &str, boot: &str, id: u64) -> Result<JoinReply, Option<Refused>> {
    let message = JoinRequest {
        name: core.name,
        address: core.seeds.get(&core.name).cloned().unwrap_or_default(),
        boot: boot.to_owned(),
        raft_id: id,
        cluster_id: cluster_id.to_owned(),
    };
    ask_member(core, address, message, |mut c, r| async move { c.join(r).await }).await
}
