//! `kvpool get`: one kind of thing as a table or as JSON.

use std::collections::BTreeMap;
use std::process::ExitCode;

use anyhow::Result;
use clap::{Args, ValueEnum};
use kvpool_client::Kind;
use kvpool_proto::v1::{ShardStatus, StatusReply};
use kvpool_state::records::{NodeRecord, Record, ShardRecord, ShardState, SlotMap, SlotRange};
use serde_json::json;

use super::Target;
use super::table::{Output, Rows};
use super::text::{age, now_ms};
use crate::config::values::ByteSize;
use crate::out;

const EXAMPLES: &str = "\
Examples:
  kvpool get shards
  kvpool get slots -o json
  kvpool get members --endpoints 127.0.0.1:7400,127.0.0.1:7402,127.0.0.1:7404
  KVPOOL_ENDPOINTS=10.0.0.1:7400 kvpool get pools

JSON is always an array of objects; fields are added in later versions, never renamed. Sizes are bytes, times are
milliseconds since 1970.
Exit codes: 0 shown, 1 refused (for example: no quorum), 2 wrong usage, 3 no coordinator answered.";

/// Show nodes, shards, slots, members (the coordinators) or pools.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct GetArgs {
    /// What to show
    #[arg(value_enum)]
    what: What,
    /// How to print it
    #[arg(short, long, value_enum, default_value_t)]
    output: Output,
    #[command(flatten)]
    target: Target,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum What {
    /// Machines with cache memory
    #[value(alias = "node")]
    Nodes,
    /// Cache servers
    #[value(alias = "shard")]
    Shards,
    /// Ranges of slots with their copies, primary first
    #[value(alias = "slot")]
    Slots,
    /// Members of the Raft group: the coordinators
    #[value(alias = "member", alias = "coordinators", alias = "coordinator")]
    Members,
    /// Named sets of shards
    #[value(alias = "pool")]
    Pools,
}

/// Runs the command.
pub async fn run(args: GetArgs) -> Result<ExitCode> {
    let client = args.target.client()?;
    let target = &args.target;
    let (rows, word) = match args.what {
        What::Members => (members(&target.ask(client.status()).await?, now_ms()), "members"),
        What::Pools => (pools(&target.ask(client.status()).await?), "pools"),
        What::Nodes => {
            let nodes = target.ask(client.list(Kind::Node)).await?.records;
            let shards = target.ask(client.list(Kind::Shard)).await?.records;
            (self::nodes(nodes, &shards_of(shards)), "nodes")
        }
        What::Shards => {
            let records = shards_of(target.ask(client.list(Kind::Shard)).await?.records);
            let status = target.ask(client.status()).await?;
            (shards(&records, &status, now_ms()), "shards")
        }
        What::Slots => (slots(target.ask(client.list(Kind::SlotMap)).await?.records), "slots"),
    };
    out::show(&rows.render(args.output, word));
    Ok(ExitCode::SUCCESS)
}

fn shards_of(records: Vec<Record>) -> Vec<ShardRecord> {
    let shard = |record| {
        if let Record::Shard(shard) = record {
            Some(shard)
        } else {
            None
        }
    };
    records.into_iter().filter_map(shard).collect()
}

fn nodes(records: Vec<Record>, shards: &[ShardRecord]) -> Rows {
    let row = |node: NodeRecord| {
        let here: Vec<&ShardRecord> = shards.iter().filter(|s| s.node == node.id).collect();
        let names: Vec<&str> = here.iter().map(|s| s.id.as_str()).collect();
        let capacity: u64 = here.iter().map(|s| s.capacity_bytes).sum();
        let labels: Vec<String> = node.labels.iter().map(|(k, v)| format!("{k}={v}")).collect();
        let cells = vec![
            node.id.clone(),
            node.zone.clone(),
            names.join(","),
            ByteSize(capacity).to_string(),
            labels.join(","),
        ];
        let json = json!({
            "id": node.id, "zone": node.zone, "labels": node.labels, "shards": names, "capacity_bytes": capacity,
        });
        (cells, json)
    };
    let node = |record| {
        if let Record::Node(node) = record {
            Some(node)
        } else {
            None
        }
    };
    Rows {
        columns: &["NAME", "ZONE", "SHARDS", "CAPACITY", "LABELS"],
        rows: records.into_iter().filter_map(node).map(row).collect(),
    }
}

/// Records, with what the leader knows besides: the phase, whether it is in, its slots.
fn shards(shards: &[ShardRecord], status: &StatusReply, now_ms: u64) -> Rows {
    let row = |shard: &ShardRecord| {
        let at = shard.addresses.clone().unwrap_or_default();
        let known = status.shard_status.iter().find(|s| s.id == shard.id).cloned();
        let now = known.unwrap_or_else(|| ShardStatus {
            phase: shard.state().word().to_owned(),
            r#in: shard.state() == ShardState::Up,
            reason: shard.reason.clone(),
            since_ms: shard.since_ms,
            ..ShardStatus::default()
        });
        let cells = vec![
            shard.id.clone(),
            now.phase.clone(),
            if now.r#in { "in" } else { "out" }.to_owned(),
            age(now.since_ms, now_ms),
            now.slots.to_string(),
            now.primary.to_string(),
            shard.node.clone(),
            shard.pool.clone(),
            ByteSize(shard.capacity_bytes).to_string(),
            shard.incarnation.to_string(),
            at.resp.clone(),
            at.lm.clone(),
            now.reason.clone(),
        ];
        let json = json!({
            "id": shard.id, "state": shard.state().word(), "since_ms": now.since_ms, "reason": now.reason,
            "phase": now.phase, "in": now.r#in, "slots": now.slots, "slots_in_sync": now.in_sync,
            "slots_primary": now.primary, "times_down": shard.downs,
            "node": shard.node, "pool": shard.pool, "number": shard.number, "capacity_bytes": shard.capacity_bytes,
            "incarnation": shard.incarnation, "boot_id": shard.boot_id,
            "peer": at.peer, "resp": at.resp, "lm": at.lm, "http": at.http,
        });
        (cells, json)
    };
    Rows {
        columns: &[
            "NAME",
            "STATE",
            "IN/OUT",
            "SINCE",
            "SLOTS",
            "PRIMARY",
            "NODE",
            "POOL",
            "CAPACITY",
            "INCARNATION",
            "RESP",
            "LM",
            "REASON",
        ],
        rows: shards.iter().map(row).collect(),
    }
}

fn members(status: &StatusReply, now_ms: u64) -> Rows {
    let row = |member: &kvpool_proto::v1::MemberStatus| {
        let leads = member.id == status.leader_id && status.leader_id != 0;
        let reachable = if member.reachable { "yes" } else { "no" };
        let known = |shown: String, number: u64| if number == 0 { "-".to_owned() } else { shown };
        let cells = vec![
            known(member.name.to_string(), member.name),
            member.id.to_string(),
            member.endpoint.clone(),
            member.role.clone(),
            status.term.to_string(),
            reachable.to_owned(),
            member.lag.to_string(),
            known(age(member.since_ms, now_ms), member.since_ms),
        ];
        let json = json!({
            "name": member.name, "id": member.id, "since_ms": member.since_ms, "endpoint": member.endpoint, "role": member.role, "leader": leads, "term": status.term,
            "reachable": member.reachable, "lag": member.lag,
        });
        (cells, json)
    };
    Rows {
        columns: &["NAME", "ID", "ENDPOINT", "ROLE", "TERM", "REACHABLE", "LAG", "SINCE"],
        rows: status.members.iter().map(row).collect(),
    }
}

fn pools(status: &StatusReply) -> Rows {
    let row = |pool: &kvpool_proto::v1::PoolStatus| {
        let numbers = [
            u64::from(pool.factor),
            pool.epoch,
            u64::from(pool.shards_up),
            u64::from(pool.in_sync),
            u64::from(pool.under_replicated),
            u64::from(pool.unserved),
            u64::from(pool.filling),
        ];
        let mut cells = vec![pool.name.clone()];
        cells.extend(numbers.iter().map(u64::to_string));
        let json = json!({
            "name": pool.name, "factor": pool.factor, "epoch": pool.epoch, "shards_up": pool.shards_up,
            "slots_in_sync": pool.in_sync, "slots_under_replicated": pool.under_replicated,
            "slots_unserved": pool.unserved, "slots_filling": pool.filling,
        });
        (cells, json)
    };
    Rows {
        columns: &[
            "NAME",
            "FACTOR",
            "EPOCH",
            "SHARDS UP",
            "IN-SYNC",
            "UNDER-REPLICATED",
            "UNSERVED",
            "FILLING",
        ],
        rows: status.pools.iter().map(row).collect(),
    }
}

fn slots(records: Vec<Record>) -> Rows {
    let map = |record| {
        if let Record::Slots(map) = record {
            Some(map)
        } else {
            None
        }
    };
    Rows {
        columns: &["POOL", "SLOTS", "COUNT", "STATE", "COPIES", "EPOCH"],
        rows: records
            .into_iter()
            .filter_map(map)
            .flat_map(|map| slots_of(&map))
            .collect(),
    }
}

/// The ranges of one map. A copy is named by its shard, as `shard-2 filling` when it is not in-sync.
fn slots_of(map: &SlotMap) -> Vec<(Vec<String>, serde_json::Value)> {
    let names: BTreeMap<u32, &str> = map.shards.iter().map(|s| (s.number, s.id.as_str())).collect();
    let row = |range: &SlotRange| {
        let copies: Vec<(&str, &str)> = range
            .copies
            .iter()
            .map(|copy| {
                let name = names.get(&copy.shard).copied().unwrap_or("(unknown)");
                (name, if copy.in_sync { "in-sync" } else { "filling" })
            })
            .collect();
        let in_sync = range.copies.iter().filter(|copy| copy.in_sync).count();
        let state = match in_sync {
            0 => "unserved",
            n if n >= map.factor as usize => "in-sync",
            _ => "under-replicated",
        };
        let shown: Vec<String> = copies
            .iter()
            .map(|(name, state)| {
                if *state == "in-sync" {
                    (*name).to_owned()
                } else {
                    format!("{name} ({state})")
                }
            })
            .collect();
        let count = u64::from(range.last).saturating_sub(u64::from(range.first)) + 1;
        let cells = vec![
            map.pool.clone(),
            format!("{}-{}", range.first, range.last),
            count.to_string(),
            state.to_owned(),
            shown.join(", "),
            map.epoch.to_string(),
        ];
        let copies: Vec<_> = copies
            .iter()
            .map(|(name, state)| json!({"shard": name, "state": state}))
            .collect();
        let json = json!({
            "pool": map.pool, "first": range.first, "last": range.last, "count": count, "state": state,
            "copies": copies, "epoch": map.epoch,
        });
        (cells, json)
    };
    map.ranges.iter().map(row).collect()
}

#[cfg(test)]
mod tests;
