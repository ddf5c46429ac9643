//! Membership of shards: what is committed of it, and which state may follow which.
//!
//! ```text
//!   (none) ── RegisterShard ──► Up ── DrainShard ──► Draining ── ShardDrained ──► Drained ── RemoveShard ──► (none)
//!                               │ ◄──── taken back ────┘ ◄──────── taken back ──────┘
//!                               └───────────── ShardLost, from each of the three ───────► Down ── RemoveShard ──► (none)
//!   Down ── RegisterShard ──► Up, or Drained when it was asked to leave (`out`)
//! ```
//!
//! *Up* and *in* are two things: the process may come and go while `out` stays what a person asked for. Keeps: a Drained shard
//! stands in no list; a shard that is `out` gets no new copy; Down is for one incarnation only; what was removed comes back
//! by a new registration only, under a new number.

use crate::command::{DrainShard, Refusal, ReleaseBrake, RemoveShard, ShardDrained};
use crate::records::{Record, ShardRecord, ShardState};
use crate::state::{State, Step, cut, refuse};
use std::sync::Arc;

/// Times that a shard went Down are counted together while each is within this time of the one before.
pub const DOWNS_WINDOW_MS: u64 = 10 * 60 * 1000;
/// Longest time for which the brake can be released.
pub const MAX_RELEASE_MS: u64 = 60 * 60 * 1000;

impl State {
    fn member(&mut self, id: &str) -> Result<&mut ShardRecord, (Refusal, String)> {
        match self.shards.get_mut(id) {
            Some(shard) => Ok(Arc::make_mut(shard)),
            None => refuse(Refusal::UnknownShard, format!("shard {id:?} is not registered")),
        }
    }

    /// An incarnation is gone. `count` is what tells `ShardLost` from the older `ShardDown`.
    pub(crate) fn shard_down(&mut self, index: u64, id: &str, incarnation: u64, reason: &str, count: bool) -> Step {
        let now_ms = self.log_time_ms;
        let shard = self.member(id)?;
        if shard.incarnation != incarnation {
            let message = format!("shard {id} is incarnation {}, not {incarnation}", shard.incarnation);
            return refuse(Refusal::StaleIncarnation, message);
        }
        if shard.state() == ShardState::Down {
            let pool = shard.pool.clone();
            return Ok(self.outcome(Vec::new(), Some(&pool)));
        }
        if count {
            let again = shard.downs > 0 && now_ms.saturating_sub(shard.last_down_ms) <= DOWNS_WINDOW_MS;
            shard.downs = if again { shard.downs.saturating_add(1) } else { 1 };
            shard.last_down_ms = now_ms;
        }
        shard.set_state(ShardState::Down);
        shard.since_ms = now_ms;
        shard.reason = cut(reason);
        let shard = shard.clone();
        self.decide(index, format!("shard {id} is Down"), shard.reason.clone());
        self.take_out(&shard.pool, shard.number);
        let mut records = vec![Record::Shard(shard.clone())];
        records.extend(self.slot_map(&shard.pool).map(Record::Slots));
        Ok(self.outcome(records, Some(&shard.pool)))
    }

    pub(crate) fn drain_shard(&mut self, index: u64, c: &DrainShard) -> Step {
        let now_ms = self.log_time_ms;
        let shard = self.member(&c.id)?;
        if shard.out == c.out {
            let pool = shard.pool.clone();
            return Ok(self.outcome(Vec::new(), Some(&pool)));
        }
        shard.out = c.out;
        // A shard that is Down stays that: only its part in placement changes.
        if shard.is_up() {
            shard.set_state(if c.out { ShardState::Draining } else { ShardState::Up });
            shard.since_ms = now_ms;
            shard.reason = cut(&c.why);
        }
        let shard = shard.clone();
        let what = if c.out { "is to leave" } else { "is to stay" };
        self.decide(index, format!("shard {} {what}", c.id), cut(&c.why));
        Ok(self.outcome(vec![Record::Shard(shard.clone())], Some(&shard.pool)))
    }

    pub(crate) fn shard_drained(&mut self, index: u64, c: &ShardDrained) -> Step {
        let now_ms = self.log_time_ms;
        let shard = self.member(&c.id)?.clone();
        if shard.incarnation != c.incarnation {
            let message = format!(
                "shard {} is incarnation {}, not {}",
                c.id, shard.incarnation, c.incarnation
            );
            return refuse(Refusal::StaleIncarnation, message);
        }
        match shard.state() {
            ShardState::Draining => {}
            ShardState::Drained => return Ok(self.outcome(Vec::new(), Some(&shard.pool))),
            other => {
                let message = format!("shard {} is {}, not Draining", c.id, other.word());
                return refuse(Refusal::NotDrained, message);
            }
        }
        let copies = self.copies_of(&shard.pool, shard.number);
        if copies > 0 {
            return refuse(Refusal::NotDrained, format!("shard {} holds {copies} slots", c.id));
        }
        let shard = self.member(&c.id)?;
        shard.set_state(ShardState::Drained);
        shard.since_ms = now_ms;
        shard.reason = "it holds no slot any more".into();
        let shard = shard.clone();
        self.decide(index, format!("shard {} is Drained", c.id), shard.reason.clone());
        Ok(self.outcome(vec![Record::Shard(shard.clone())], Some(&shard.pool)))
    }

    pub(crate) fn remove_shard(&mut self, index: u64, c: &RemoveShard) -> Step {
        let mut shard = self.member(&c.id)?.clone();
        if !matches!(shard.state(), ShardState::Drained | ShardState::Down) {
            let message = format!("shard {} is {}: drain it first", c.id, shard.state().word());
            return refuse(Refusal::NotDrained, message);
        }
        self.shards.remove(&c.id);
        self.decide(
            index,
            format!("shard {} is Removed", c.id),
            format!("asked through the API; it was {}", shard.state().word()),
        );
        // The map names the shards that are up: without it the epoch is another one.
        self.take_out(&shard.pool, shard.number);
        shard.set_state(ShardState::Removed);
        shard.since_ms = self.log_time_ms;
        shard.reason = "asked through the API".into();
        let pool = shard.pool.clone();
        let map = self.slot_map(&pool).map(Record::Slots);
        let records = std::iter::once(Record::Shard(shard)).chain(map).collect();
        Ok(self.outcome(records, Some(&pool)))
    }

    pub(crate) fn release_brake(&mut self, index: u64, c: &ReleaseBrake) -> Step {
        let until_ms = self.log_time_ms.saturating_add(c.for_ms.min(MAX_RELEASE_MS));
        let Some(pool) = self.pools.get_mut(&c.pool) else {
            return refuse(Refusal::UnknownPool, format!("pool {:?} does not exist", c.pool));
        };
        let pool = Arc::make_mut(pool);
        pool.record.brake_released_until_ms = until_ms;
        let record = Record::Pool(pool.record.clone());
        let (what, why) = (format!("pool {}: brake released", c.pool), "asked through the API");
        self.decide(index, what, why.into());
        Ok(self.outcome(vec![record], Some(&c.pool)))
    }

    /// Slots whose list names a shard number.
    #[must_use]
    pub fn copies_of(&self, pool: &str, number: u32) -> u32 {
        let Some((_, table)) = self.slot_table(pool) else {
            return 0;
        };
        let names = |copies: &[crate::records::SlotCopy]| copies.iter().any(|c| c.shard == number);
        let slots = table.iter().filter(|(_, copies)| names(copies)).count();
        u32::try_from(slots).unwrap_or(u32::MAX)
    }
}
