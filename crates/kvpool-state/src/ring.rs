//! The newest events, for watchers: bounded by count and by bytes. Who is further behind relists.
//!
//! Invariant: events stand in order of revision, all events of a revision together; every revision above `floor` is here.

use crate::records::Event;
use prost::Message;
use std::collections::VecDeque;
use std::sync::Arc;

/// Most events kept.
pub const MAX_EVENTS: usize = 8_192;
/// Most bytes of events kept. One slot map may have a megabyte.
pub const MAX_BYTES: usize = 64 << 20;

/// All events of one revision.
struct Entry {
    revision: u64,
    events: Vec<Arc<Event>>,
    bytes: usize,
}

#[derive(Default)]
pub(crate) struct Ring {
    entries: VecDeque<Entry>,
    events: usize,
    bytes: usize,
    /// Highest revision that may have been dropped.
    floor: u64,
}

impl Ring {
    /// An empty ring whose history begins after `revision`.
    pub(crate) fn starting_after(revision: u64) -> Self {
        Ring {
            floor: revision,
            ..Ring::default()
        }
    }

    /// Adds the events of a revision and returns how many older ones were dropped.
    pub(crate) fn push(&mut self, revision: u64, events: Vec<Event>) -> usize {
        if events.is_empty() {
            return 0;
        }
        let bytes = events.iter().map(Message::encoded_len).sum();
        self.events += events.len();
        self.bytes += bytes;
        let events = events.into_iter().map(Arc::new).collect();
        self.entries.push_back(Entry {
            revision,
            events,
            bytes,
        });
        let mut dropped = 0;
        while self.events > MAX_EVENTS || self.bytes > MAX_BYTES {
            let Some(oldest) = self.entries.pop_front() else { break };
            self.floor = oldest.revision;
            self.events -= oldest.events.len();
            self.bytes -= oldest.bytes;
            dropped += oldest.events.len();
        }
        dropped
    }

    /// Events above `revision`, at most `most` and whole revisions, and the last revision they belong to. `None` when some
    /// were dropped.
    pub(crate) fn after(&self, revision: u64, most: usize) -> Option<(Vec<Arc<Event>>, u64)> {
        if revision < self.floor {
            return None;
        }
        let mut out = Vec::new();
        let mut last = revision;
        let first = self.entries.partition_point(|e| e.revision <= revision);
        for entry in self.entries.range(first..) {
            if !out.is_empty() && out.len() + entry.events.len() > most {
                break;
            }
            out.extend(entry.events.iter().cloned());
            last = entry.revision;
        }
        Some((out, last))
    }

    pub(crate) fn depth(&self) -> (usize, usize) {
        (self.events, self.bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::records::{PoolRecord, Record};

    fn events(revision: u64, n: usize, name: usize) -> Vec<Event> {
        let pool = PoolRecord {
            name: "x".repeat(name),
            ..PoolRecord::default()
        };
        vec![
            Event {
                revision,
                record: Some(Record::Pool(pool))
            };
            n
        ]
    }

    fn revisions(ring: &Ring, after: u64, most: usize) -> Option<(Vec<u64>, u64)> {
        let (events, last) = ring.after(after, most)?;
        Some((events.iter().map(|e| e.revision).collect(), last))
    }

    #[test]
    fn whole_revisions_in_order_without_loss() {
        let mut ring = Ring::starting_after(4);
        ring.push(5, events(5, 2, 1));
        ring.push(9, events(9, 1, 1));
        assert_eq!(revisions(&ring, 3, 10), None, "before the history");
        assert_eq!(revisions(&ring, 4, 10), Some((vec![5, 5, 9], 9)));
        assert_eq!(revisions(&ring, 4, 1), Some((vec![5, 5], 5)), "a revision is never cut");
        assert_eq!(revisions(&ring, 5, 1), Some((vec![9], 9)));
        assert_eq!(revisions(&ring, 7, 1), Some((vec![9], 9)), "revisions jump");
        assert_eq!(revisions(&ring, 9, 1), Some((vec![], 9)));
        assert_eq!(revisions(&ring, 12, 1), Some((vec![], 12)), "a reader that is ahead");
    }

    #[test]
    fn it_is_bounded_by_count_and_bytes() {
        let mut ring = Ring::default();
        for revision in 1..=(MAX_EVENTS as u64 + 10) {
            ring.push(revision, events(revision, 1, 1));
        }
        assert_eq!(ring.depth().0, MAX_EVENTS);
        assert_eq!(revisions(&ring, 9, 1), None);
        assert_eq!(revisions(&ring, 10, 1), Some((vec![11], 11)));
        let mut ring = Ring::default();
        for revision in 1..=100 {
            ring.push(revision, events(revision, 1, 1 << 20));
        }
        assert!(ring.depth().1 <= MAX_BYTES);
        assert!(ring.depth().0 > 60);
    }
}
