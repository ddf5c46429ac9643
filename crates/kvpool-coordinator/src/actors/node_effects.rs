//! What a NodeActor does outside of its mailbox: commit registrations and verdicts.

use crate::actors::duty::{Attach, Duty, refused_by_state};
use crate::actors::gate::Finally;
use crate::actors::node::NodeMsg;
use crate::metric_definitions as m;
use kvpool_policy::failure::Verdict;
use kvpool_proto::v1::ShardHello;
use kvpool_state::Command;
use kvpool_state::command::{RegisterShard, ShardDown, ShardLost};
use ractor::ActorRef;
use std::sync::Arc;

/// Registers a shard and answers it. `replaced` is the incarnation in force of another process of this shard: that one is gone,
/// and counts as a time that the shard went Down.
pub(super) fn register(duty: Arc<Duty>, myself: ActorRef<NodeMsg>, attach: Box<Attach>, replaced: Option<u64>) {
    tokio::spawn(async move {
        let shard = attach.hello.shard.clone();
        let failed = NodeMsg::Registered {
            shard: shard.clone(),
            incarnation: None,
        };
        let mut end = Finally::new(myself, failed);
        if let Some(incarnation) = replaced {
            let reason = "it came back as another process".to_owned();
            // Refused or failed: the registration itself says what is wrong.
            let _ = duty.propose(lost(&duty, shard.clone(), incarnation, reason)).await;
        }
        let response = duty.propose(registration(&attach.hello)).await;
        let outcome = response.and_then(|r| refused_by_state(&r).map_or(Ok(r.incarnation), Err));
        if let Ok(incarnation) = outcome {
            end.set(NodeMsg::Registered {
                shard,
                incarnation: Some(incarnation),
            });
        }
        // First the actor, so that the new incarnation is watched from its first moment.
        drop(end);
        // The shard may have given up meanwhile: then the answer has no reader.
        let _ = attach
            .reply
            .send(outcome.and_then(|incarnation| duty.welcome(incarnation)));
    });
}

/// The command that an incarnation is gone. Members of the first level don't know the one that counts.
fn lost(duty: &Duty, id: String, incarnation: u64, reason: String) -> Command {
    let lost = Command::ShardLost(ShardLost {
        id: id.clone(),
        incarnation,
        reason: reason.clone(),
    });
    if duty.core.replica.read(|s| s.may_propose(&lost)) {
        return lost;
    }
    Command::ShardDown(ShardDown {
        id,
        incarnation,
        reason,
    })
}

fn registration(hello: &ShardHello) -> Command {
    Command::RegisterShard(RegisterShard {
        id: hello.shard.clone(),
        pool: hello.pool.clone(),
        node: hello.node.clone(),
        boot_id: hello.boot_id.clone(),
        addresses: hello.addresses.clone(),
        capacity_bytes: hello.capacity_bytes,
    })
}

/// Commits a verdict of the failure detector.
pub(super) fn declare(duty: Arc<Duty>, myself: ActorRef<NodeMsg>, verdict: Verdict) {
    tokio::spawn(async move {
        let Verdict {
            shard,
            incarnation,
            cause,
        } = verdict;
        let _end = Finally::new(myself, NodeMsg::Declared { shard: shard.clone() });
        let lost = lost(&duty, shard.clone(), incarnation, cause.words());
        match duty.propose(lost).await {
            Ok(response) if refused_by_state(&response).is_none() => {
                metrics::counter!(m::SHARDS_DOWN, "cause" => cause.word()).increment(1);
                tracing::warn!(%shard, incarnation, reason = cause.words(), term = duty.term, "declared Down");
                duty.observed.end(&shard, incarnation);
            }
            Ok(response) => tracing::info!(%shard, why = response.message, "not declared Down"),
            Err(refused) => tracing::debug!(%shard, why = refused.message, "not declared Down yet"),
        }
    });
}
