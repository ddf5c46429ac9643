//! When a shard is suspected and when it is Down, and who may have a session: the leader's judgement from heartbeats, broken
//! sessions and what other shards report.
//!
//! | evidence | judgement |
//! | --- | --- |
//! | silent for a lease | Down |
//! | session broken and not resumed for the grace | Down |
//! | silent for half a lease, and out of reach of two others on different nodes | Down |
//! | out of reach of two others for the grace, but heard by the leader | suspect, demoted: others go before it in lists |
//! | silent for half a lease, or session broken | suspect: it gets nothing new |
//!
//! Invariants:
//! - Reports alone never make a shard Down. A reporter that can't reach most of the others is not counted: its own link is bad.
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

    /// A shard that was not heard for this long is late.
    fn late_ms(&self) -> u64 {
        self.lease_ms / 2
    }
}

/// Fewer reporters are no evidence: one link may be bad.
pub const REPORTERS: u32 = 2;

/// What one shard says of another one that it can't reach.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Report<'a> {
    pub reporter: &'a str,
    /// Node of the reporter: several shards of one node are one witness.
    pub node: &'a str,
    /// How long the reporter has had no answer.
    pub for_ms: u64,
    /// Others that the reporter can't reach, and all that it knows.
    pub unreachable: u32,
    pub peers: u32,
}

/// What all reports about a shard come to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Accusation {
    /// Independent reporters that can't reach it now.
    pub reporters: u32,
    /// Of these, those that have not reached it for the grace.
    pub lasting: u32,
}

/// Counts the witnesses in reports about one incarnation.
#[must_use]
pub fn accusation<'a>(reports: impl IntoIterator<Item = Report<'a>>, limits: &Limits) -> Accusation {
    let mut nodes: BTreeMap<&str, u64> = BTreeMap::new();
    for report in reports {
        // Who misses most of the others is cut off itself.
        let cut_off = report.unreachable.saturating_mul(2) > report.peers;
        if !cut_off {
            let longest = nodes.entry(report.node).or_default();
            *longest = (*longest).max(report.for_ms);
        }
    }
    let count = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
    Accusation {
        reporters: count(nodes.len()),
        lasting: count(nodes.values().filter(|ms| **ms >= limits.broken_grace_ms).count()),
    }
}

/// Why a shard is suspected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Suspicion {
    Late { silent_ms: u64 },
    Broken { since_ms: u64 },
    Unreachable { reporters: u32 },
}

impl Suspicion {
    /// The reason for people.
    #[must_use]
    pub fn words(self) -> String {
        match self {
            Suspicion::Late { silent_ms } => format!("no heartbeat for {silent_ms} ms"),
            Suspicion::Broken { since_ms } => format!("its session broke {since_ms} ms ago"),
            Suspicion::Unreachable { reporters } => {
                format!("{reporters} other shards can't reach it, though the coordinator can")
            }
        }
    }

    /// Whether others are to go before it in slot lists.
    #[must_use]
    pub fn demotes(self) -> bool {
        matches!(self, Suspicion::Unreachable { .. })
    }

    /// Whether it may be Down soon: this counts for the mass-failure brake.
    #[must_use]
    pub fn out_of_contact(self) -> bool {
        !self.demotes()
    }
}

/// What was seen of a shard last.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Evidence {
    /// Incarnation that the session was for.
    pub incarnation: u64,
    pub heard_ms: u64,
    /// Since when there is no session; `None` while there is one.
    pub broken_ms: Option<u64>,
    pub accused: Accusation,
}

/// Why a shard is Down.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    LeaseExpired { silent_ms: u64 },
    SessionBroken { since_ms: u64 },
    PeersAgree { silent_ms: u64, reporters: u32 },
}

impl Cause {
    /// The reason for people, as it stands in the shard's record.
    #[must_use]
    pub fn words(self) -> String {
        match self {
            Cause::LeaseExpired { silent_ms } => format!("lease expired: no heartbeat for {silent_ms} ms"),
            Cause::SessionBroken { since_ms } => format!("session broken and not resumed for {since_ms} ms"),
            Cause::PeersAgree { silent_ms, reporters } => {
                format!("no heartbeat for {silent_ms} ms, and {reporters} other shards can't reach it")
            }
        }
    }

    /// The word in metrics and logs.
    #[must_use]
    pub fn word(self) -> &'static str {
        match self {
            Cause::LeaseExpired { .. } => "lease_expired",
            Cause::SessionBroken { .. } => "session_broken",
            Cause::PeersAgree { .. } => "peers_agree",
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
    accused: Accusation,
    /// Demoted until then: for a lease after the last accusation, so that lists don't change to and fro.
    demoted_until_ms: u64,
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
                    accused: Accusation::default(),
                    demoted_until_ms: 0,
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
            w.accused = evidence.accused;
        }
    }

    /// The shards that should be declared Down now. Repeats a verdict until the shard is forgotten.
    pub fn tick(&mut self, now_ms: u64) -> Vec<Verdict> {
        let late = now_ms.saturating_sub(self.last_tick_ms) > self.limits.starved_ms();
        self.last_tick_ms = self.last_tick_ms.max(now_ms);
        if late {
            self.floor_ms = self.floor_ms.max(now_ms);
        } else {
            let until = now_ms.saturating_add(self.limits.lease_ms);
            let accused = self.watched.values_mut().filter(|w| w.accused.lasting >= REPORTERS);
            accused.for_each(|w| w.demoted_until_ms = until);
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
        let silent_ms = since(w.heard_ms);
        let broken = w.broken_ms.map(since).filter(|ms| *ms >= self.limits.broken_grace_ms);
        let reporters = w.accused.reporters;
        if let Some(since_ms) = broken {
            Some(Cause::SessionBroken { since_ms })
        } else if silent_ms >= self.limits.lease_ms {
            Some(Cause::LeaseExpired { silent_ms })
        } else if silent_ms >= self.limits.late_ms() && reporters >= REPORTERS {
            Some(Cause::PeersAgree { silent_ms, reporters })
        } else {
            None
        }
    }

    /// The shards that are suspected as of `now_ms`, as the last tick saw them. One that should be Down is among them.
    pub fn suspects(&self, now_ms: u64) -> impl Iterator<Item = (&str, Suspicion)> {
        self.watched.iter().filter_map(move |(shard, w)| {
            let since = |t: u64| now_ms.saturating_sub(t.max(self.floor_ms));
            let silent_ms = since(w.heard_ms);
            let suspicion = if let Some(broken) = w.broken_ms {
                Suspicion::Broken {
                    since_ms: since(broken),
                }
            } else if silent_ms >= self.limits.late_ms() {
                Suspicion::Late { silent_ms }
            } else if now_ms < w.demoted_until_ms {
                Suspicion::Unreachable {
                    reporters: w.accused.reporters,
                }
            } else {
                return None;
            };
            Some((shard.as_str(), suspicion))
        })
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
