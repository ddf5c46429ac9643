//! Shards in the status: their phase, and what is wrong with them.

use super::condition;
use crate::actors::{Duty, Suspects};
use crate::core::wall_clock_ms;
use crate::metric_definitions as m;
use kvpool_policy::membership::{Phase, phase, settles_until};
use kvpool_proto::v1::{Condition, ShardStatus};
use kvpool_state::State;
use kvpool_state::records::{ShardRecord, ShardState};
use std::collections::BTreeMap;

const PHASES: [Phase; 6] = [
    Phase::Joining,
    Phase::Up,
    Phase::Suspect,
    Phase::Down,
    Phase::Draining,
    Phase::Drained,
];

/// Slots of one shard.
#[derive(Clone, Copy, Default)]
struct Slots {
    all: u32,
    in_sync: u32,
    primary: u32,
}

/// By pool and shard number.
fn slots(state: &State) -> BTreeMap<(&str, u32), Slots> {
    let mut out: BTreeMap<(&str, u32), Slots> = BTreeMap::new();
    let tables = state
        .pools()
        .filter_map(|p| Some((p.name.as_str(), state.slot_table(&p.name)?.1)));
    for (pool, table) in tables {
        for range in table.to_ranges() {
            let count = range.last.saturating_sub(range.first).saturating_add(1);
            for (place, copy) in range.copies.iter().enumerate() {
                let slots = out.entry((pool, copy.shard)).or_default();
                slots.all += count;
                slots.in_sync += if copy.in_sync { count } else { 0 };
                slots.primary += if place == 0 { count } else { 0 };
            }
        }
    }
    out
}

/// One entry per shard, in the order of the state.
pub(super) fn status(state: &State, suspects: &Suspects) -> Vec<ShardStatus> {
    let slots = slots(state);
    let now_ms = wall_clock_ms();
    let one = |shard: &ShardRecord| {
        let of = slots
            .get(&(shard.pool.as_str(), shard.number))
            .copied()
            .unwrap_or_default();
        let suspect = suspects.of(shard);
        let phase = phase(shard, suspect.map(|s| s.suspicion), of.in_sync);
        let settles = settles_until(shard, now_ms);
        let (reason, since_ms) = match (phase, suspect, settles) {
            (Phase::Suspect, Some(s), _) => (s.suspicion.words(), s.since_ms),
            (_, _, Some(until)) => (settling(shard, until, now_ms), shard.since_ms),
            _ => (shard.reason.clone(), shard.since_ms),
        };
        ShardStatus {
            id: shard.id.clone(),
            phase: phase.word().to_owned(),
            r#in: shard.state() == ShardState::Up && settles.is_none(),
            slots: of.all,
            in_sync: of.in_sync,
            primary: of.primary,
            reason,
            since_ms,
        }
    };
    state.shards().map(one).collect()
}

fn settling(shard: &ShardRecord, until_ms: u64, now_ms: u64) -> String {
    let left = until_ms.saturating_sub(now_ms).div_ceil(1_000);
    format!(
        "it went Down {} times in short order: it takes new slots in {left} s, or earlier if copies would be missing",
        shard.downs
    )
}

pub(super) fn conditions(suspects: &Suspects, shards: &[ShardRecord], out: &mut Vec<Condition>) {
    let now_ms = wall_clock_ms();
    for shard in shards {
        let (kind, text, since_ms) = match (shard.state(), suspects.of(shard), settles_until(shard, now_ms)) {
            // It was asked to leave and is gone: that is as it should be.
            (ShardState::Down, _, _) if shard.out => continue,
            (ShardState::Down, _, _) => {
                let text = format!("shard {} on node {} is Down: {}", shard.id, shard.node, shard.reason);
                ("shard_down", text, shard.since_ms)
            }
            (_, Some(suspect), _) => {
                let text = format!("shard {} is suspected: {}", shard.id, suspect.suspicion.words());
                ("shard_suspect", text, suspect.since_ms)
            }
            (_, None, Some(until)) => {
                let text = format!("shard {} is Up again: {}", shard.id, settling(shard, until, now_ms));
                ("shard_settling", text, shard.since_ms)
            }
            (ShardState::Draining, _, _) if nobody_takes(shard, shards) => {
                let text = format!(
                    "shard {} can't be drained: no other shard of pool {} is in",
                    shard.id, shard.pool
                );
                ("drain_stuck", text, shard.since_ms)
            }
            _ => continue,
        };
        out.push(Condition {
            since_ms,
            ..condition(kind, &shard.id, &text)
        });
    }
}

fn nobody_takes(shard: &ShardRecord, shards: &[ShardRecord]) -> bool {
    !shards
        .iter()
        .any(|s| s.pool == shard.pool && s.state() == ShardState::Up)
}

/// Shards that are up in the state and have no session now, before they are suspected for it.
pub(super) fn unheard(duty: &Duty, suspects: &Suspects, shards: &[ShardRecord], out: &mut Vec<Condition>) {
    for shard in shards.iter().filter(|s| s.is_up() && suspects.of(s).is_none()) {
        let seen = duty
            .observed
            .get(&shard.id)
            .filter(|s| s.incarnation == shard.incarnation);
        let text = match seen {
            Some(seen) if seen.broken.is_none() => continue,
            Some(_) => format!("the session of shard {} has just ended", shard.id),
            None => format!("shard {} has not come to this leader yet", shard.id),
        };
        out.push(condition("shard_silent", &shard.id, &text));
    }
}

pub(super) fn set_gauges(state: &State, suspects: &Suspects) {
    let slots = slots(state);
    let mut counts: BTreeMap<(&str, Phase), u32> = BTreeMap::new();
    for shard in state.shards() {
        let of = slots
            .get(&(shard.pool.as_str(), shard.number))
            .copied()
            .unwrap_or_default();
        let phase = phase(shard, suspects.of(shard).map(|s| s.suspicion), of.in_sync);
        *counts.entry((&shard.pool, phase)).or_default() += 1;
    }
    for pool in state.pools() {
        for phase in PHASES {
            let count = counts.get(&(pool.name.as_str(), phase)).copied().unwrap_or(0);
            metrics::gauge!(m::SHARDS, "pool" => pool.name.clone(), "state" => phase.word()).set(f64::from(count));
        }
    }
}
