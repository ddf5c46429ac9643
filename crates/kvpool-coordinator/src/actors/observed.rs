//! What sessions have shown: heard when, broken since when. Outside of the actors, so that a crashed one loses nothing;
//! gone with the leadership (R10). Observations coalesce: the newest is kept.

use kvpool_policy::failure::{Accusation, Evidence, Limits, Report, accusation};
use kvpool_proto::v1::Heartbeat;
use parking_lot::Mutex;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio_util::sync::CancellationToken;

/// Reports of one heartbeat that are kept.
const MAX_REPORTS: usize = 16;

/// One entry per shard that has had a session in this leadership: bounded by the shards of the state.
#[derive(Default)]
pub(crate) struct Observed(Mutex<Inner>);

#[derive(Default)]
struct Inner {
    next_session: u64,
    shards: BTreeMap<String, Seen>,
    /// Shards that others can't reach, by who says so. Bounded by [`MAX_REPORTS`] per session.
    accused: BTreeMap<String, BTreeMap<String, Told>>,
}

/// What a reporter says of one shard.
#[derive(Clone, Copy, Debug)]
struct Told {
    incarnation: u64,
    for_ms: u64,
}

/// A shard as its sessions show it.
#[derive(Clone, Debug)]
pub(crate) struct Seen {
    session: u64,
    pub(crate) boot_id: String,
    pub(crate) incarnation: u64,
    pub(crate) heard: Instant,
    pub(crate) broken: Option<Instant>,
    pub(crate) used_bytes: u64,
    pub(crate) epoch: u64,
    node: String,
    /// Peers that it knows, and how many of them it can't reach.
    peers: u32,
    unreachable: u32,
    /// Whom its newest reports name.
    told: BTreeSet<String>,
    end: CancellationToken,
}

impl Seen {
    /// For the failure detector; `millis` turns times into its clock.
    pub(crate) fn evidence(&self, accused: Accusation, millis: impl Fn(Instant) -> u64) -> Evidence {
        Evidence {
            incarnation: self.incarnation,
            heard_ms: millis(self.heard),
            broken_ms: self.broken.map(millis),
            accused,
        }
    }
}

/// One session's hold on the table. Dropping it is the session's break.
pub(crate) struct SessionGuard {
    observed: Arc<Observed>,
    pub(crate) shard: String,
    session: u64,
    /// Cancelled when a newer session or a verdict ends this one.
    pub(crate) end: CancellationToken,
}

impl Observed {
    /// A session begins; an older one of the same shard ends.
    pub(crate) fn open(self: &Arc<Self>, shard: &str, node: &str, boot_id: &str, incarnation: u64) -> SessionGuard {
        let mut inner = self.0.lock();
        inner.untell(shard);
        inner.next_session += 1;
        let session = inner.next_session;
        let end = CancellationToken::new();
        let seen = Seen {
            session,
            boot_id: boot_id.to_owned(),
            incarnation,
            heard: Instant::now(),
            broken: None,
            used_bytes: 0,
            epoch: 0,
            node: node.to_owned(),
            peers: 0,
            unreachable: 0,
            told: BTreeSet::new(),
            end: end.clone(),
        };
        if let Some(old) = inner.shards.insert(shard.to_owned(), seen) {
            old.end.cancel();
        }
        SessionGuard {
            observed: self.clone(),
            shard: shard.to_owned(),
            session,
            end,
        }
    }

    pub(crate) fn get(&self, shard: &str) -> Option<Seen> {
        self.0.lock().shards.get(shard).cloned()
    }

    /// What other shards say of an incarnation. Those that were not heard within `lately` don't count.
    pub(crate) fn accusation(&self, shard: &str, incarnation: u64, lately: Duration, limits: &Limits) -> Accusation {
        let inner = self.0.lock();
        let Some(reports) = inner.accused.get(shard) else {
            return Accusation::default();
        };
        let about = reports.iter().filter(|(_, told)| told.incarnation == incarnation);
        let counted = about.filter_map(|(reporter, told)| {
            let seen = inner.shards.get(reporter)?;
            (seen.broken.is_none() && seen.heard.elapsed() < lately).then(|| Report {
                reporter,
                node: &seen.node,
                for_ms: told.for_ms,
                unreachable: seen.unreachable,
                peers: seen.peers,
            })
        });
        accusation(counted, limits)
    }

    /// The process that has an open session that was heard within `lately`.
    pub(crate) fn live_boot_id(&self, shard: &str, lately: Duration) -> Option<String> {
        let inner = self.0.lock();
        let seen = inner.shards.get(shard)?;
        (seen.broken.is_none() && seen.heard.elapsed() < lately).then(|| seen.boot_id.clone())
    }

    /// The incarnation was declared Down: its session, if it still stands, ends, and its entry goes.
    pub(crate) fn end(&self, shard: &str, incarnation: u64) {
        let mut inner = self.0.lock();
        if inner.shards.get(shard).is_some_and(|s| s.incarnation == incarnation) {
            inner.untell(shard);
            inner.accused.remove(shard);
            if let Some(seen) = inner.shards.remove(shard) {
                seen.end.cancel();
            }
        }
    }
}

impl Inner {
    /// Forgets what a shard has said of others.
    fn untell(&mut self, reporter: &str) {
        let told = self.shards.get_mut(reporter).map(|s| std::mem::take(&mut s.told));
        for shard in told.unwrap_or_default() {
            if let Some(reports) = self.accused.get_mut(&shard) {
                reports.remove(reporter);
                if reports.is_empty() {
                    self.accused.remove(&shard);
                }
            }
        }
    }

    /// Takes the reports of a heartbeat in the place of the ones before. Only shards that have had a session are named.
    fn tell(&mut self, reporter: &str, beat: &Heartbeat) {
        if beat.unreachable.is_empty() && self.shards.get(reporter).is_none_or(|s| s.told.is_empty()) {
            return;
        }
        self.untell(reporter);
        let mut named = BTreeSet::new();
        for report in beat.unreachable.iter().take(MAX_REPORTS) {
            if report.shard != reporter && self.shards.contains_key(&report.shard) {
                let told = Told {
                    incarnation: report.incarnation,
                    for_ms: report.for_ms,
                };
                let reports = self.accused.entry(report.shard.clone()).or_default();
                reports.insert(reporter.to_owned(), told);
                named.insert(report.shard.clone());
            }
        }
        if let Some(seen) = self.shards.get_mut(reporter) {
            seen.told = named;
        }
    }
}

impl SessionGuard {
    /// A heartbeat. False when this is not the shard's session any more.
    pub(crate) fn heard(&self, beat: &Heartbeat) -> bool {
        let mut inner = self.observed.0.lock();
        let Some(seen) = inner.shards.get_mut(&self.shard).filter(|s| s.session == self.session) else {
            return false;
        };
        seen.heard = Instant::now();
        seen.used_bytes = beat.used_bytes;
        seen.epoch = beat.epoch;
        seen.peers = beat.peers;
        seen.unreachable = beat.unreachable_peers;
        inner.tell(&self.shard, beat);
        true
    }
}

impl Drop for SessionGuard {
    fn drop(&mut self) {
        let mut inner = self.observed.0.lock();
        if let Some(seen) = inner.shards.get_mut(&self.shard).filter(|s| s.session == self.session) {
            seen.broken = Some(Instant::now());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvpool_proto::v1::PeerReport;

    #[test]
    fn the_newest_session_counts() {
        let observed = Arc::new(Observed::default());
        let old = observed.open("s", "n", "boot-1", 5);
        let lately = Duration::from_secs(3_600);
        assert_eq!(observed.live_boot_id("s", lately).as_deref(), Some("boot-1"));
        let new = observed.open("s", "n", "boot-2", 9);
        assert!(old.end.is_cancelled() && !new.end.is_cancelled());
        assert!(!old.heard(&Heartbeat::default()));
        drop(old);
        assert!(
            observed.get("s").unwrap().broken.is_none(),
            "an old session's end is no evidence"
        );
        assert!(new.heard(&Heartbeat::default()));
        observed.end("s", 5);
        assert!(!new.end.is_cancelled(), "a verdict about an older incarnation");
        drop(new);
        assert!(observed.get("s").unwrap().broken.is_some());
        assert_eq!(observed.live_boot_id("s", lately), None);
    }

    fn beat(peers: u32, unreachable: &[(&str, u64)]) -> Heartbeat {
        let report = |(shard, incarnation): &(&str, u64)| PeerReport {
            shard: (*shard).to_owned(),
            incarnation: *incarnation,
            for_ms: 9_000,
        };
        Heartbeat {
            peers,
            unreachable_peers: u32::try_from(unreachable.len()).unwrap(),
            unreachable: unreachable.iter().map(report).collect(),
            ..Heartbeat::default()
        }
    }

    #[test]
    fn the_newest_reports_of_live_sessions_about_this_incarnation_count() {
        let observed = Arc::new(Observed::default());
        let limits = Limits {
            lease_ms: 3_000,
            broken_grace_ms: 1_000,
            tick_ms: 250,
        };
        let count = |lately| observed.accusation("s", 5, lately, &limits).reporters;
        let lately = Duration::from_secs(3_600);
        let _s = observed.open("s", "n0", "b", 5);
        let a = observed.open("a", "n1", "b", 6);
        let b = observed.open("b", "n2", "b", 7);
        assert!(a.heard(&beat(9, &[("s", 5), ("a", 6), ("nobody", 1)])) && b.heard(&beat(9, &[("s", 4)])));
        assert_eq!(count(lately), 1, "b speaks of an older incarnation");
        assert!(b.heard(&beat(9, &[("s", 5)])));
        assert_eq!((count(lately), count(Duration::ZERO)), (2, 0));
        assert!(a.heard(&beat(2, &[("s", 5), ("b", 7)])));
        assert_eq!(count(lately), 1, "a can't reach most others");
        assert!(b.heard(&beat(9, &[])));
        assert_eq!(count(lately), 0);
        assert!(b.heard(&beat(9, &[("s", 5)])));
        drop(b);
        assert_eq!(count(lately), 0, "its session is broken");
        let again = observed.open("b", "n2", "b", 7);
        assert_eq!(count(lately), 0, "and a new one begins with nothing");
        drop((a, again));
        observed.end("a", 6);
        observed.end("b", 7);
        assert!(observed.0.lock().accused.is_empty());
    }
}
