//! `kvpool status`: one line that says how the pool is, then what is degraded and why.

use std::process::ExitCode;

use anyhow::Result;
use clap::Args;
use kvpool_proto::v1::{PoolStatus, StatusReply};
use kvpool_state::records::ShardState;

use super::Target;
use super::text::{age, count, now_ms};
use crate::out;

const EXAMPLES: &str = "\
Examples:
  kvpool status
  kvpool status --endpoints 127.0.0.1:7400,127.0.0.1:7402,127.0.0.1:7404
  until kvpool status >/dev/null; do sleep 1; done     # wait until the pool is healthy

Exit codes: 0 healthy, 1 degraded (the output says what and why), 2 wrong usage, 3 no coordinator answered.";

/// Say whether the pool is healthy, and if not, what is degraded and why.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct StatusArgs {
    #[command(flatten)]
    target: Target,
}

/// Runs the command.
pub async fn run(args: StatusArgs) -> Result<ExitCode> {
    let client = args.target.client()?;
    let status = args.target.ask(client.status()).await?;
    out::show(&render(&status, now_ms()));
    Ok(if status.healthy {
        ExitCode::SUCCESS
    } else {
        ExitCode::from(crate::exit::FAILED)
    })
}

/// The whole output.
fn render(status: &StatusReply, now_ms: u64) -> String {
    let mut out = String::new();
    if status.healthy {
        out += "healthy\n";
    } else {
        out += &format!("degraded: {}\n", count(status.conditions.len(), "condition"));
    }
    for condition in &status.conditions {
        let since = match age(condition.since_ms, now_ms) {
            age if age.is_empty() => age,
            age => format!(" (for {age})"),
        };
        out += &format!(
            "  {} {}: {}{since}\n",
            condition.kind, condition.subject, condition.message
        );
    }
    out += &format!("cluster       {}\n", cluster(status));
    let reachable = status.members.iter().filter(|m| m.reachable).count();
    let leader = match status.leader_id {
        0 => "no leader".to_owned(),
        id => format!("{id} leads in term {}", status.term),
    };
    out += &format!(
        "coordinators  {reachable} of {} reachable, {leader}\n",
        status.members.len()
    );
    out += &format!("shards        {}\n", shards(status));
    for pool in &status.pools {
        out += &format!("pool          {}\n", self::pool(pool));
    }
    out
}

/// `2 of 4 Up, 1 Draining, 1 Down`.
fn shards(status: &StatusReply) -> String {
    let count = |state: ShardState| status.shards.iter().filter(|s| s.state() == state).count();
    let mut out = format!("{} of {} Up", count(ShardState::Up), status.shards.len());
    for state in [ShardState::Draining, ShardState::Drained, ShardState::Down] {
        match count(state) {
            0 => {}
            n => out += &format!(", {n} {}", state.word()),
        }
    }
    out
}

fn cluster(status: &StatusReply) -> String {
    if status.cluster_id.is_empty() {
        return "not created yet".to_owned();
    }
    format!(
        "{}, generation {}, revision {}",
        status.cluster_id, status.cluster_generation, status.revision
    )
}

fn pool(pool: &PoolStatus) -> String {
    let mut parts = vec![format!(
        "{}: factor {}, epoch {}, {} slots in-sync",
        pool.name, pool.factor, pool.epoch, pool.in_sync
    )];
    let rest = [
        (pool.under_replicated, "under-replicated"),
        (pool.unserved, "without a copy"),
        (pool.filling, "filling"),
    ];
    parts.extend(
        rest.iter()
            .filter(|(n, _)| *n > 0)
            .map(|(n, what)| format!("{n} {what}")),
    );
    parts.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvpool_proto::v1::{Condition, MemberStatus};
    use kvpool_state::records::ShardRecord;

    fn status() -> StatusReply {
        let member = |id| MemberStatus {
            id,
            reachable: true,
            ..Default::default()
        };
        let shard = |id: &str| ShardRecord {
            id: id.into(),
            state: ShardState::Up.into(),
            ..Default::default()
        };
        StatusReply {
            healthy: true,
            cluster_id: "c0ffee".into(),
            cluster_generation: 1,
            leader_id: 2,
            term: 3,
            members: (1..=3).map(member).collect(),
            shards: vec![shard("shard-1"), shard("shard-2")],
            pools: vec![PoolStatus {
                name: "default".into(),
                factor: 2,
                in_sync: 16384,
                ..Default::default()
            }],
            ..Default::default()
        }
    }

    #[test]
    fn healthy_is_the_first_word() {
        let text = render(&status(), 0);
        assert!(text.starts_with("healthy\n"), "{text}");
        assert!(text.contains("3 of 3 reachable, 2 leads in term 3"), "{text}");
        assert!(
            text.contains("2 of 2 Up") && text.contains("16384 slots in-sync"),
            "{text}"
        );
    }

    #[test]
    fn degraded_says_what_and_why() {
        let mut degraded = status();
        degraded.healthy = false;
        degraded.shards[0].state = ShardState::Down.into();
        degraded.pools[0].under_replicated = 9;
        degraded.conditions.push(Condition {
            kind: "shard_down".into(),
            subject: "shard-1".into(),
            message: "no heartbeat for 3 s".into(),
            since_ms: 1_000,
        });
        let text = render(&degraded, 31_000);
        assert!(text.starts_with("degraded: 1 condition\n"), "{text}");
        assert!(
            text.contains("shard_down shard-1: no heartbeat for 3 s (for 30s)"),
            "{text}"
        );
        assert!(
            text.contains("1 of 2 Up, 1 Down") && text.contains("9 under-replicated"),
            "{text}"
        );
    }
}
