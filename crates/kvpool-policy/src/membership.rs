//! What membership means for placement, and when the leader stops declaring shards Down.
//!
//! - *Up* and *in* are two things. A shard is up while its incarnation is in force; it is in while it takes part in placement. A
//!   suspect is both, and gets nothing new. One that was asked to leave is up and not in. One that went Down too often
//!   lately comes back up at once and in a little later ([`settle_ms`]).
//! - The brake: when at least two members with more than a quarter of a pool's capacity would be Down within
//!   [`BRAKE_WINDOW_MS`], nobody is declared Down: that many shards seldom die at once, but a network or the leader's own view
//!   of it does, and evicting them would throw away what they hold. A single shard is always declared, however large its share.
//!
//! Capacities are bytes, times are milliseconds of log time.

use crate::failure::Suspicion;
use crate::placement::Part;
use kvpool_state::records::{ShardRecord, ShardState};
use std::collections::BTreeSet;

/// Members that went Down within this time count as one failure with those that would be next.
pub const BRAKE_WINDOW_MS: u64 = 60_000;
/// A shard may go Down so often in [`kvpool_state::DOWNS_WINDOW_MS`] without consequences.
const FREE_DOWNS: u32 = 2;
/// What the first time beyond that costs; each further time doubles it.
const FIRST_SETTLE_MS: u64 = 15_000;
/// Longest wait of a shard that comes and goes.
pub const MAX_SETTLE_MS: u64 = 5 * 60_000;

/// The state of a member as people see it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Phase {
    /// Up, and no copy of it is complete yet.
    Joining,
    Up,
    Suspect,
    Down,
    Draining,
    Drained,
}

impl Phase {
    /// The word in status, tables and logs.
    #[must_use]
    pub fn word(self) -> &'static str {
        match self {
            Phase::Joining => "Joining",
            Phase::Up => "Up",
            Phase::Suspect => "Suspect",
            Phase::Down => "Down",
            Phase::Draining => "Draining",
            Phase::Drained => "Drained",
        }
    }
}

/// The phase of a shard from its record, what the leader suspects, and how many of its copies are complete.
#[must_use]
pub fn phase(shard: &ShardRecord, suspicion: Option<Suspicion>, complete: u32) -> Phase {
    match shard.state() {
        ShardState::Draining => Phase::Draining,
        ShardState::Drained => Phase::Drained,
        ShardState::Up if suspicion.is_some() => Phase::Suspect,
        ShardState::Up if complete == 0 => Phase::Joining,
        ShardState::Up => Phase::Up,
        ShardState::Down | ShardState::Removed | ShardState::Unspecified => Phase::Down,
    }
}

/// How long a shard that registered waits before it takes part in placement, for having been Down `downs` times lately.
#[must_use]
pub fn settle_ms(downs: u32) -> u64 {
    match downs.saturating_sub(FREE_DOWNS) {
        0 => 0,
        times => FIRST_SETTLE_MS
            .saturating_mul(1 << times.saturating_sub(1).min(16))
            .min(MAX_SETTLE_MS),
    }
}

/// Log time until which a shard stays out of placement for coming and going; `None` when it need not wait at `now_ms`.
#[must_use]
pub fn settles_until(shard: &ShardRecord, now_ms: u64) -> Option<u64> {
    let until = shard.since_ms.saturating_add(settle_ms(shard.downs));
    (shard.state() == ShardState::Up && now_ms < until).then_some(until)
}

/// The parts that the shards of a pool take in placement. `suspicion` is what the leader suspects of a shard.
///
/// A shard that has to settle is left out only while the others have room for `factor` copies on different nodes: its
/// coming and going is worse than none, but better than a missing copy.
pub fn parts<'a>(
    shards: &[&'a ShardRecord],
    factor: u32,
    now_ms: u64,
    suspicion: impl Fn(&'a ShardRecord) -> Option<Suspicion>,
) -> Vec<Part> {
    let settles = |s: &ShardRecord| settles_until(s, now_ms).is_some();
    let calm = shards.iter().filter(|s| s.state() == ShardState::Up && !settles(s));
    let nodes: BTreeSet<&str> = calm.map(|s| s.node.as_str()).collect();
    let enough = nodes.len() >= factor as usize;
    let part = |s: &&'a ShardRecord| match s.state() {
        ShardState::Draining | ShardState::Drained => Part::Leaving,
        ShardState::Up if enough && settles(s) => Part::Leaving,
        ShardState::Up => match suspicion(s) {
            Some(suspicion) if suspicion.demotes() => Part::Demoted,
            Some(_) => Part::Held,
            None => Part::In,
        },
        ShardState::Down | ShardState::Removed | ShardState::Unspecified => Part::Gone,
    };
    shards.iter().map(part).collect()
}

/// What the brake says of declaring shards of a pool Down.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Brake {
    Open,
    /// Nobody is declared Down. The arithmetic in words.
    Held(String),
}

/// Looks at all shards of a pool. `out_of_contact` says of a shard that is up whether it may be Down soon.
pub fn brake<'a>(
    shards: impl IntoIterator<Item = &'a ShardRecord>,
    released_until_ms: u64,
    now_ms: u64,
    mut out_of_contact: impl FnMut(&ShardRecord) -> bool,
) -> Brake {
    let (mut total, mut lost) = (0u128, 0u128);
    let (mut down, mut silent) = (0u32, 0u32);
    for shard in shards {
        let bytes = u128::from(shard.capacity_bytes);
        match shard.state() {
            // What holds nothing loses nothing.
            ShardState::Drained => {}
            ShardState::Up | ShardState::Draining => {
                total += bytes;
                if out_of_contact(shard) {
                    silent += 1;
                    lost += bytes;
                }
            }
            ShardState::Down if now_ms.saturating_sub(shard.since_ms) < BRAKE_WINDOW_MS && !shard.out => {
                total += bytes;
                down += 1;
                lost += bytes;
            }
            ShardState::Down | ShardState::Removed | ShardState::Unspecified => {}
        }
    }
    let members = down.saturating_add(silent);
    if silent == 0 || members < 2 || lost * 4 <= total || now_ms < released_until_ms {
        return Brake::Open;
    }
    let percent = lost * 100 / total.max(1);
    Brake::Held(format!(
        "{silent} out of contact and {down} Down within {} s are {members} shards with {lost} of {total} bytes ({percent} %, \
         more than 25 %): nobody is declared Down until they return or a person releases the brake",
        BRAKE_WINDOW_MS / 1_000
    ))
}
