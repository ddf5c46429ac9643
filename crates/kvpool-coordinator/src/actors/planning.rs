//! What a PoolActor does outside of its mailbox: take a snapshot of the pool, let kvpool-policy plan, commit in batches.

use crate::actors::duty::{Duty, Placement, Suspects};
use crate::actors::gate::Finally;
use crate::actors::pool::PoolMsg;
use crate::core::wall_clock_ms;
use kvpool_policy::membership::parts;
use kvpool_policy::placement::{Input, Part, PlaceShard, Plan, plan};
use kvpool_proto::meta::{Reason, Refused};
use kvpool_state::command::{PlanSlots, ShardDrained};
use kvpool_state::records::{ShardRecord, ShardState, SlotRange};
use kvpool_state::{Command, Refusal, SlotTable, State};
use ractor::ActorRef;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Slots that one shard may be filling at a time. What a transfer costs is bounded by the shard, in bytes per second; many small
/// steps would only make an empty pool slow to spread (each costs a commit, a map and a report).
const MAX_FILLING: u32 = 8_192;
/// Slots that one plan may change.
const MAX_CHANGES: u32 = 16_384;
/// Ranges in one command: about 150 kB at the highest factor, far below what raft takes.
const BATCH: usize = 4_096;
/// What a plan is made from, taken at one moment.
struct Snapshot {
    epoch: u64,
    factor: u32,
    shards: Vec<PlaceShard>,
    table: SlotTable,
    /// Parts by shard id.
    parts: Vec<(String, Part)>,
    /// Shards that are to leave and hold nothing any more.
    empty: Vec<ShardDrained>,
}

/// Plans and commits in a task; the actor hears the end of it.
pub(super) fn make_plan(duty: Arc<Duty>, pool: String, myself: ActorRef<PoolMsg>) {
    tokio::spawn(async move {
        let mut end = Finally::new(myself, PoolMsg::Planned { committed: false });
        match plan_and_commit(&duty, &pool).await {
            Ok(()) => end.set(PoolMsg::Planned { committed: true }),
            Err(refused) => {
                tracing::debug!(
                    pool,
                    term = duty.term,
                    why = refused.message,
                    "a plan was not committed"
                );
            }
        }
    });
}

async fn plan_and_commit(duty: &Duty, pool: &str) -> Result<(), Refused> {
    let suspects = duty.suspects();
    let Some(mut snapshot) = duty.core.replica.read(|s| take_snapshot(&suspects, s, pool)) else {
        return Ok(());
    };
    for drained in std::mem::take(&mut snapshot.empty) {
        let shard = drained.id.clone();
        let response = duty.propose(Command::ShardDrained(drained)).await?;
        tracing::info!(shard, outcome = response.refusal().word(), "drained");
    }
    let parts = std::mem::take(&mut snapshot.parts);
    let mut base_epoch = snapshot.epoch;
    // Some milliseconds of work: not on a thread that serves I/O.
    let made = tokio::task::spawn_blocking(move || place(&snapshot)).await;
    let made = made.map_err(|e| Refused::new(Reason::Unknown, format!("failed to plan: {e}")))?;
    let why = why(&made);
    let placement = Placement {
        epoch: base_epoch,
        settled: made.settled,
        shortfall: made.shortfall,
        parts,
    };
    duty.placements.lock().insert(pool.to_owned(), placement);
    for ranges in made.ranges.chunks(BATCH) {
        let step = PlanSlots {
            pool: pool.to_owned(),
            base_epoch,
            ranges: ranges.to_vec(),
            why: why.clone(),
        };
        let response = duty.propose(Command::PlanSlots(step)).await?;
        if response.refusal() != Refusal::None {
            let text = format!("{}: {}", response.refusal().word(), response.message);
            return Err(Refused::new(Reason::Invalid, text));
        }
        base_epoch = response.epoch;
    }
    Ok(())
}

/// The parts of a pool's shards now.
pub(super) fn parts_now(duty: &Duty, pool: &str) -> Vec<(String, Part)> {
    let suspects = duty.suspects();
    duty.core.replica.read(|s| parts_of(&suspects, s, pool))
}

fn parts_of(suspects: &Suspects, state: &State, pool: &str) -> Vec<(String, Part)> {
    let shards: Vec<&ShardRecord> = state.shards().filter(|s| s.pool == pool).collect();
    let factor = state.pool(pool).map_or(1, |p| p.factor);
    let suspicion = |s: &ShardRecord| suspects.of(s).map(|x| x.suspicion);
    let parts = parts(&shards, factor, wall_clock_ms(), suspicion);
    shards.iter().map(|s| s.id.clone()).zip(parts).collect()
}

fn take_snapshot(suspects: &Suspects, state: &State, pool: &str) -> Option<Snapshot> {
    let factor = state.pool(pool)?.factor;
    let (epoch, table) = state.slot_table(pool)?;
    let zones: BTreeMap<&str, &str> = state.nodes().map(|n| (n.id.as_str(), n.zone.as_str())).collect();
    let parts = parts_of(suspects, state, pool);
    let mine = state.shards().filter(|s| s.pool == pool).zip(&parts);
    let shards = mine.map(|(s, (_, part))| PlaceShard {
        number: s.number,
        node: s.node.clone(),
        zone: zones.get(s.node.as_str()).copied().unwrap_or_default().to_owned(),
        capacity_bytes: s.capacity_bytes,
        part: *part,
    });
    let leaves = |s: &&ShardRecord| s.pool == pool && s.state() == ShardState::Draining;
    let empty = state
        .shards()
        .filter(leaves)
        .filter(|s| state.copies_of(pool, s.number) == 0);
    Some(Snapshot {
        empty: empty
            .map(|s| ShardDrained {
                id: s.id.clone(),
                incarnation: s.incarnation,
            })
            .collect(),
        epoch,
        factor,
        shards: shards.collect(),
        table: table.clone(),
        parts,
    })
}

fn place(snapshot: &Snapshot) -> Plan {
    plan(&Input {
        factor: snapshot.factor,
        shards: &snapshot.shards,
        table: &snapshot.table,
        max_filling_per_shard: MAX_FILLING,
        max_changes: MAX_CHANGES,
    })
}

fn why(plan: &Plan) -> String {
    let slots = |r: &SlotRange| r.last.saturating_sub(r.first).saturating_add(1);
    let changed: u32 = plan.ranges.iter().map(slots).sum();
    format!(
        "{changed} slots: {} unserved, {} under-replicated",
        plan.unserved, plan.under_replicated
    )
}
