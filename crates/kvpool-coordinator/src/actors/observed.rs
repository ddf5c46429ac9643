//! What sessions have shown: heard when, broken since when. Outside of the actors, so that a crashed one loses nothing;
//! gone with the leadership (R10). Observations coalesce: the newest is kept.

use kvpool_policy::failure::Evidence;
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio_util::sync::CancellationToken;

/// One entry per shard that has had a session in this leadership: bounded by the shards of the state.
#[derive(Default)]
pub(crate) struct Observed(Mutex<Inner>);

#[derive(Default)]
struct Inner {
    next_session: u64,
    shards: BTreeMap<String, Seen>,
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
    end: CancellationToken,
}

impl Seen {
    /// For the failure detector; `millis` turns times into its clock.
    pub(crate) fn evidence(&self, millis: impl Fn(Instant) -> u64) -> Evidence {
        Evidence {
            incarnation: self.incarnation,
            heard_ms: millis(self.heard),
            broken_ms: self.broken.map(millis),
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
    pub(crate) fn open(self: &Arc<Self>, shard: &str, boot_id: &str, incarnation: u64) -> SessionGuard {
        let mut inner = self.0.lock();
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

    /// The process that has an open session that was heard within `lately`.
    pub(crate) fn live_boot_id(&self, shard: &str, lately: Duration) -> Option<String> {
        let inner = self.0.lock();
        let seen = inner.shards.get(shard)?;
        (seen.broken.is_none() && seen.heard.elapsed() < lately).then(|| seen.boot_id.clone())
    }

    /// The incarnation was declared Down: its session, if it still stands, ends, and its entry goes.
    pub(crate) fn end(&self, shard: &str, incarnation: u64) {
        let mut inner = self.0.lock();
        if inner.shards.get(shard).is_some_and(|s| s.incarnation == incarnation)
            && let Some(seen) = inner.shards.remove(shard)
        {
            seen.end.cancel();
        }
    }
}

impl SessionGuard {
    /// A heartbeat. False when this is not the shard's session any more.
    pub(crate) fn heard(&self, used_bytes: u64, epoch: u64) -> bool {
        let mut inner = self.observed.0.lock();
        match inner.shards.get_mut(&self.shard).filter(|s| s.session == self.session) {
            Some(seen) => {
                seen.heard = Instant::now();
                seen.used_bytes = used_bytes;
                seen.epoch = epoch;
                true
            }
            None => false,
        }
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

    #[test]
    fn the_newest_session_counts() {
        let observed = Arc::new(Observed::default());
        let old = observed.open("s", "boot-1", 5);
        let lately = Duration::from_secs(3_600);
        assert_eq!(observed.live_boot_id("s", lately).as_deref(), Some("boot-1"));
        let new = observed.open("s", "boot-2", 9);
        assert!(old.end.is_cancelled() && !new.end.is_cancelled());
        assert!(!old.heard(1, 1));
        drop(old);
        assert!(
            observed.get("s").unwrap().broken.is_none(),
            "an old session's end is no evidence"
        );
        assert!(new.heard(7, 3));
        observed.end("s", 5);
        assert!(!new.end.is_cancelled(), "a verdict about an older incarnation");
        drop(new);
        assert!(observed.get("s").unwrap().broken.is_some());
        assert_eq!(observed.live_boot_id("s", lately), None);
    }
}
