//! What GroupActor does outside of its mailbox: changes of raft's membership, commits, and asking what members can do.

use crate::actors::duty::{Duty, refused_by_state};
use crate::boot::hello;
use kvpool_policy::group::Step;
use kvpool_state::Command;
use kvpool_state::command::{AdmitMember, ConfigureGroup, READER};

/// Does one step. A failure is told; the next look decides anew.
pub(super) async fn do_step(duty: &Duty, step: Step) {
    let Ok(raft) = duty.core.raft() else { return };
    tracing::info!(?step, term = duty.term, "a step of the group");
    let outcome = match step {
        Step::Rest | Step::Wait(_) => return,
        Step::Want(target) => {
            let why = "as many as the cluster was created with";
            commit(duty, configure(target, 0, why)).await
        }
        Step::Record { id, address } => {
            let first = AdmitMember {
                name: id,
                address,
                member_id: id,
                why: "of the first boot".into(),
                ..AdmitMember::default()
            };
            commit(duty, Command::AdmitMember(first)).await
        }
        Step::Move { id, address } => raft.set_address(id, address).await.map_err(|e| e.to_string()),
        Step::AddLearner { id, address } => raft.add_learner(id, address).await.map_err(|e| e.to_string()),
        Step::Voters(to) => raft.change_voters(to).await.map_err(|e| e.to_string()),
        Step::HandOver(to) => raft.transfer_leader(to).await.map_err(|e| e.to_string()),
        Step::Remove(id) => raft.remove(id).await.map_err(|e| e.to_string()),
    };
    if let Err(why) = outcome {
        tracing::warn!(why, term = duty.term, "a step of the group was not done");
        *duty.group_waits.lock() = Some(why);
        // The next look comes with the end of this task: not at once.
        tokio::time::sleep(duty.tick()).await;
    }
}

fn configure(target_members: u32, feature_level: u32, why: &str) -> Command {
    Command::ConfigureGroup(ConfigureGroup {
        target_members,
        feature_level,
        why: why.into(),
    })
}

async fn commit(duty: &Duty, command: Command) -> Result<(), String> {
    let response = duty.propose(command).await.map_err(|r| r.message)?;
    refused_by_state(&response).map_or(Ok(()), |r| Err(r.message))
}

/// Raises the feature level once every member of the group can do more, or says who can't.
pub(super) async fn agree_level(duty: &Duty) {
    let core = &duty.core;
    let raft = core.status();
    let others = raft.members.iter().filter(|(id, _)| **id != raft.member_id);
    let asked = others.map(|(id, address)| async move {
        let said = hello(core, &core.cluster_id(), *id, address).await;
        (*id, address.clone(), said.map_or(0, |r| r.features))
    });
    let mut all: Vec<(u64, String, u32)> = futures::future::join_all(asked).await;
    all.push((raft.member_id, String::new(), core.features));
    let blocks = all.iter().find(|(_, _, can)| *can < READER);
    *duty.group_waits.lock() = blocks.map(|(id, address, can)| match can {
        0 => format!("feature level {READER} waits for member id {id} at {address}, which does not say what it can do"),
        n => {
            format!("feature level {READER} waits for member id {id} at {address}, which can do level {n}: upgrade it")
        }
    });
    if blocks.is_none()
        && let Err(why) = commit(duty, configure(0, READER, "every member can do it")).await
    {
        tracing::debug!(why, "the feature level is not raised yet");
    }
    tokio::time::sleep(duty.tick()).await;
}
