//! When a shard is Down, and who may have a session: the leader's judgement from heartbeats and broken sessions.
//!
//! Invariants:
//! - Nobody is declared Down within one lease of the leader's start: it has heard nobody yet (fault O38).
//! - Nobody is declared Down for silence while the leader itself was starved: then its clocks start again.
//! - A verdict names the incarnation it is about; hearing of another incarnation is no evidence for this one.
//!
//! Times are milliseconds on any clock that does not go back.

use std::collections::BTreeMap;

/// Times of the detector, in milliseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// A shard that was not heard for this long is Down.
    pub lease_ms: u64,
    /// A shard whose session broke and was not resumed for this long is Down.
    pub broken_grace_ms: u64,
    /// How often [`FailureDetector::tick`] is meant to be called.
    pub tick_ms: u64,
}

impl Limits {
    /// A tick later than this means that the leader was starved: it may have missed heartbeats that were sent.
    fn starved_ms(&self) -> u64 {
        self.tick_ms.saturating_add(self.lease_ms / 4)
    }
}

/// What was seen of a shard last.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Evidence {
    /// Incarnation that the session was for.
    pub incarnation: u64,
    pub heard_ms: u64,
    /// Since when there is no session; `None` while there is one.
    pub broken_ms: Option<u64>,
}

/// Why a shard is Down.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    LeaseExpired { silent_ms: u64 },
    SessionBroken { since_ms: u64 },
}

impl Cause {
    /// The reason for people, as it stands in the shard's record.
    #[must_use]
    pub fn words(self) -> String {
        match self {
            Cause::LeaseExpired { silent_ms } => format!("lease expired: no heartbeat for {silent_ms} ms"),
            Cause::SessionBroken { since_ms } => format!("session broken and not resumed for {since_ms} ms"),
        }
    }

    /// The word in metrics and logs.
    #[must_use]
    pub fn word(self) -> &'static str {
        match self {
            Cause::LeaseExpired { .. } => "lease_expired",
            Cause::SessionBroken { .. } => "session_broken",
        }
    }
}

/// A shard that should be declared Down.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Verdict {
    pub shard: String,
    pub incarnation: u64,
    pub cause: Cause,
}

#[derive(Clone, Copy, Debug)]
struct Watched {
    incarnation: u64,
    heard_ms: u64,
    broken_ms: Option<u64>,
}

/// The failure detector for the shards of a node.
#[derive(Clone, Debug)]
pub struct FailureDetector {
    limits: Limits,
    /// Nobody is declared Down before.
    not_before_ms: u64,
    /// Silence before this is not counted.
    floor_ms: u64,
    last_tick_ms: u64,
    watched: BTreeMap<String, Watched>,
}

impl FailureDetector {
    /// A detector of a leader that leads since `leader_since_ms`.
    #[must_use]
    pub fn new(limits: Limits, leader_since_ms: u64, now_ms: u64) -> Self {
        let not_before_ms = leader_since_ms.saturating_add(limits.lease_ms);
        FailureDetector {
            limits,
            not_before_ms,
            floor_ms: leader_since_ms,
            last_tick_ms: now_ms,
            watched: BTreeMap::new(),
        }
    }

    /// Watches an incarnation that the state has Up. Nothing changes when it is watched already.
    pub fn watch(&mut self, shard: &str, incarnation: u64, now_ms: u64) {
        match self.watched.get(shard) {
            Some(w) if w.incarnation == incarnation => {}
            _ => {
                let fresh = Watched {
                    incarnation,
                    heard_ms: now_ms,
                    broken_ms: None,
                };
                self.watched.insert(shard.to_owned(), fresh);
            }
        }
    }

    /// Stops watching a shard that is not Up any more.
    pub fn forget(&mut self, shard: &str) {
        self.watched.remove(shard);
    }

    /// Takes note of what was seen. Evidence about another incarnation is passed over.
    pub fn observe(&mut self, shard: &str, evidence: Evidence) {
        if let Some(w) = self
            .watched
            .get_mut(shard)
            .filter(|w| w.incarnation == evidence.incarnation)
        {
            w.heard_ms = w.heard_ms.max(evidence.heard_ms);
            w.broken_ms = evidence.broken_ms;
        }
    }

    /// The shards that should be declared Down now. Repeats a verdict until the shard is forgotten.
    pub fn tick(&mut self, now_ms: u64) -> Vec<Verdict> {
        let late = now_ms.saturating_sub(self.last_tick_ms) > self.limits.starved_ms();
        self.last_tick_ms = self.last_tick_ms.max(now_ms);
        if late {
            self.floor_ms = self.floor_ms.max(now_ms);
        }
        if late || now_ms < self.not_before_ms {
            return Vec::new();
        }
        let verdict = |(shard, w): (&String, &Watched)| {
            let cause = self.judge(w, now_ms)?;
            Some(Verdict {
                shard: shard.clone(),
                incarnation: w.incarnation,
                cause,
            })
        };
        self.watched.iter().filter_map(verdict).collect()
    }

    fn judge(&self, w: &Watched, now_ms: u64) -> Option<Cause> {
        let since = |t: u64| now_ms.saturating_sub(t.max(self.floor_ms));
        let broken = w.broken_ms.map(since).filter(|ms| *ms >= self.limits.broken_grace_ms);
        let silent = Some(since(w.heard_ms)).filter(|ms| *ms >= self.limits.lease_ms);
        broken
            .map(|since_ms| Cause::SessionBroken { since_ms })
            .or(silent.map(|silent_ms| Cause::LeaseExpired { silent_ms }))
    }

    /// Names of the shards being watched.
    pub fn shards(&self) -> impl Iterator<Item = (&str, u64)> {
        self.watched.iter().map(|(shard, w)| (shard.as_str(), w.incarnation))
    }
}

/// What the state says of a shard that asks for a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Known<'a> {
    pub up: bool,
    pub boot_id: &'a str,
    pub incarnation: u64,
}

/// What is to be done with a shard that asks for a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Admission {
    /// The same process as before, still Up: it goes on as this incarnation.
    Resume { incarnation: u64 },
    /// A new process, or one that was declared Down: it gets a new incarnation.
    Register,
    /// Another process has a live session under this shard id: two would take it from each other for ever.
    Duplicate,
}

/// Decides about a shard that asks for a session with `boot_id` and the incarnation it believes in (0: none).
/// `live_boot_id` is the process that has a session now, open and heard lately.
#[must_use]
pub fn admit(known: Option<Known<'_>>, boot_id: &str, believed: u64, live_boot_id: Option<&str>) -> Admission {
    if live_boot_id.is_some_and(|live| live != boot_id) {
        return Admission::Duplicate;
    }
    match known {
        Some(k) if k.up && k.boot_id == boot_id && k.incarnation == believed && believed != 0 => Admission::Resume {
            incarnation: k.incarnation,
        },
        _ => Admission::Register,
    }
}
