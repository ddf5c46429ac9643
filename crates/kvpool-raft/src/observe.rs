//! Turns the library's metrics into [`Status`] and into ours.

use std::sync::Arc;

use openraft::alias::WatchReceiverOf;
use openraft::async_runtime::WatchReceiver;
use openraft::{AsyncRuntime, RaftMetrics, ServerState};
use tokio::sync::watch;

use crate::metric_definitions as metric;
use crate::node::fatal;
use crate::status::{Follower, Leader, Role, Status};
use crate::types::Types;

/// Publishes every change until the library's core ends.
pub(crate) async fn run<R: AsyncRuntime>(
    mut source: WatchReceiverOf<Types<R>, RaftMetrics<Types<R>>>,
    to: Arc<watch::Sender<Status>>,
) {
    loop {
        let now = status::<R>(&source.borrow_and_update());
        record(&to.borrow(), &now);
        to.send_if_modified(|old| {
            let changed = *old != now;
            *old = now;
            changed
        });
        if source.changed().await.is_err() {
            break;
        }
    }
    // A core that stops says so first. One that panics just goes.
    to.send_if_modified(|last| {
        let silent = last.role != Role::Stopped;
        if silent {
            last.role = Role::Stopped;
            last.fatal = Some("the consensus core panicked".to_string());
        }
        silent
    });
}

/// One status from one set of metrics.
pub(crate) fn status<R: AsyncRuntime>(m: &RaftMetrics<Types<R>>) -> Status {
    let fatal = fatal::<R>(&m.running_state);
    let role = match m.state {
        _ if m.running_state.is_err() => Role::Stopped,
        ServerState::Learner => Role::Learner,
        ServerState::Follower => Role::Follower,
        ServerState::Candidate => Role::Candidate,
        ServerState::Leader => Role::Leader,
        ServerState::Shutdown => Role::Stopped,
    };
    let membership = m.membership_config.membership();
    let address = |id: &u64| {
        membership
            .get_node(id)
            .map(|node| node.addr.clone())
            .unwrap_or_default()
    };
    let followers = m
        .replication
        .iter()
        .flatten()
        .filter(|(id, _)| **id != m.id)
        .map(|(id, matched)| {
            let matched = matched.map(|id| id.index);
            let lag = m
                .last_log_index
                .map_or(0, |i| i + 1)
                .saturating_sub(matched.map_or(0, |i| i + 1));
            (*id, Follower { matched, lag })
        });
    Status {
        member_id: m.id,
        role,
        term: m.current_term,
        leader: m.current_leader.map(|id| Leader {
            id,
            address: address(&id),
        }),
        last_log: m.last_log_index,
        committed: m.local_committed.map(|id| id.index),
        applied: m.last_applied.map(|id| id.index),
        snapshot: m.snapshot.map(|id| id.index),
        purged: m.purged.map(|id| id.index),
        members: membership.nodes().map(|(id, node)| (*id, node.addr.clone())).collect(),
        voters: membership.voter_ids().collect(),
        joint: match membership.get_joint_config()[..] {
            [_, .., ref target] => Some(target.clone()),
            _ => None,
        },
        membership_committed: m.membership_config.log_id().is_some()
            && m.committed_membership_config == m.membership_config,
        followers: followers.collect(),
        fatal,
    }
}

fn record(old: &Status, new: &Status) {
    metrics::gauge!(metric::TERM).set(new.term as f64);
    metrics::gauge!(metric::IS_LEADER).set(f64::from(u8::from(new.is_leader())));
    let next = |index: Option<u64>| index.map_or(0, |i| i + 1);
    metrics::gauge!(metric::APPLY_LAG_ENTRIES).set(next(new.committed).saturating_sub(next(new.applied)) as f64);
    for (id, follower) in &new.followers {
        metrics::gauge!(metric::LAG_ENTRIES, "follower" => id.to_string()).set(follower.lag as f64);
    }
    // Only a leader knows a follower's lag, so a former leader's last word must not stay.
    for id in old.followers.keys().filter(|id| !new.followers.contains_key(id)) {
        metrics::gauge!(metric::LAG_ENTRIES, "follower" => id.to_string()).set(0.0);
    }
    if new.leader != old.leader && new.leader.is_some() {
        metrics::counter!(metric::LEADER_CHANGES_TOTAL).increment(1);
        tracing::info!(member = new.member_id, term = new.term, leader = ?new.leader, "the leader changed");
    }
    if let Some(fatal) = new.fatal.as_ref().filter(|_| old.fatal.is_none()) {
        tracing::error!(member = new.member_id, error = fatal, "the member has stopped");
    }
}
