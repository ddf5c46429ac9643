//! Time as the store takes it, and the write ids that order the writes of a key.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use tokio::time::Instant;

/// Milliseconds on a monotonic clock since the process began to use it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Clock {
    origin: Instant,
}

impl Clock {
    pub(crate) fn new() -> Self {
        Clock { origin: Instant::now() }
    }

    pub(crate) fn now_ms(&self) -> u64 {
        to_ms(self.origin.elapsed())
    }
}

/// Whole milliseconds, saturating.
pub(crate) fn to_ms(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

/// Bits of a write id below the milliseconds.
const COUNTER_BITS: u32 = 20;
/// An id from a peer may be this far ahead of our clock and still move our own ids. More is a broken clock or a broken
/// peer, and must not use up the number space.
const MAX_AHEAD_MS: u64 = 24 * 3600 * 1000;

/// Hands out write ids: a hybrid clock, 44 bits of Unix milliseconds above 20 bits of counter.
///
/// What is needed is that a later write of a key gets the greater id, also when another copy has become the primary
/// meanwhile. Within a process ids only grow. Across processes: whoever takes a replicated write moves its own clock
/// past that id, so a promoted replica continues above everything it holds; and writes that it never saw are ordered by
/// wall time, where a counter under an epoch would restart among equals when two copies act within one epoch (the
/// primary frozen but not yet replaced). A clock set back is harmless: ids stand still in time and go on by count.
#[derive(Debug, Default)]
pub(crate) struct WriteIds {
    last: AtomicU64,
}

impl WriteIds {
    /// The id of a write that begins now.
    pub(crate) fn next(&self) -> u64 {
        let wall = unix_ms() << COUNTER_BITS;
        let next = |last: u64| Some(last.saturating_add(1).max(wall));
        let before = self
            .last
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, next)
            .unwrap_or_else(|last| last);
        before.saturating_add(1).max(wall)
    }

    /// Another process gave out `id`: ours come after it.
    pub(crate) fn saw(&self, id: u64) {
        let limit = unix_ms().saturating_add(MAX_AHEAD_MS) << COUNTER_BITS;
        if id <= limit {
            self.last.fetch_max(id, Ordering::Relaxed);
        }
    }
}

fn unix_ms() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, to_ms)
        .min(u64::MAX >> COUNTER_BITS >> 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_grow_and_follow_what_was_seen() {
        let ids = WriteIds::default();
        let first = ids.next();
        assert!(ids.next() > first);
        let ahead = first + (60_000 << COUNTER_BITS);
        ids.saw(ahead);
        assert!(ids.next() > ahead);
        ids.saw(u64::MAX);
        assert!(ids.next() < ahead + 10);
    }
}
