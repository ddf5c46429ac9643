//! The log in memory: where each entry lies on disk, the newest entries themselves, vote and marks.
//!
//! Invariants: entries are consecutive and terms never fall; an entry that is not on disk yet is in the cache;
//! the cache is bounded, counting only what it may drop.

use std::collections::VecDeque;

use crate::codec;
use crate::types::{LogEntry, LogId, Vote};

/// Where an entry's record lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Place {
    pub segment: u64,
    pub offset: u64,
    pub len: u32,
}

#[derive(Debug)]
struct Slot {
    term: u64,
    /// Tells this entry from one that was truncated at the same index while its write was on the way.
    ticket: u64,
    place: Option<Place>,
    cached: Option<LogEntry>,
}

/// One entry as a reader finds it.
#[derive(Debug)]
pub(crate) enum Lookup {
    Cached(LogEntry),
    OnDisk(LogId, Place),
}

impl Lookup {
    pub(crate) fn place(&self) -> Option<Place> {
        match self {
            Lookup::Cached(_) => None,
            Lookup::OnDisk(_, place) => Some(*place),
        }
    }
}

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct Index {
    pub purged: Option<LogId>,
    pub last: Option<LogId>,
    pub committed: Option<LogId>,
    pub vote: Option<Vote>,
    /// The library's suite starts a log at index 1; a real one starts at 0 and anything else is a gap.
    #[cfg(test)]
    pub any_start: bool,
    /// Set when a write failed: nothing is written after it.
    pub failed: Option<String>,
    slots: VecDeque<Slot>,
    first: u64,
    next_ticket: u64,
    cache_bytes: usize,
    cache_limit: usize,
    /// Entries below this index are not in the cache.
    cache_from: u64,
}

/// A record that does not fit the history before it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Misfit {
    #[error("entry {found} where {expected} belongs")]
    Gap { expected: u64, found: u64 },
    #[error("entry {index} has term {found}, below {before} of the entry before it")]
    TermFell { index: u64, before: u64, found: u64 },
    #[error("truncation after {0:?}, which is not in the log")]
    Truncation(Option<u64>),
}

impl Index {
    pub(crate) fn new(cache_limit: usize) -> Self {
        Index {
            cache_limit,
            ..Index::default()
        }
    }

    /// Index of the next entry.
    pub(crate) fn next(&self) -> u64 {
        self.last.map_or(0, |id| id.index + 1)
    }

    /// Takes the state that a segment's header starts from.
    pub(crate) fn start_from(&mut self, previous: Option<LogId>, purged: Option<LogId>, committed: Option<LogId>) {
        self.last = previous;
        self.purged = purged;
        self.committed = committed;
        self.first = self.next();
        self.cache_from = self.first;
    }

    fn admit(&mut self, id: LogId) -> Result<(), Misfit> {
        let expected = self.next();
        #[cfg(test)]
        let expected = if self.any_start && self.last.is_none() {
            id.index
        } else {
            expected
        };
        if id.index != expected {
            return Err(Misfit::Gap {
                expected,
                found: id.index,
            });
        }
        if let Some(last) = self.last
            && id.leader_id < last.leader_id
        {
            let (before, found) = (last.leader_id.term, id.leader_id.term);
            return Err(Misfit::TermFell {
                index: id.index,
                before,
                found,
            });
        }
        if self.slots.is_empty() {
            self.first = id.index;
            self.cache_from = id.index;
        }
        self.last = Some(id);
        Ok(())
    }

    /// Adds an entry that is about to be written; returns its ticket.
    pub(crate) fn append(&mut self, entry: LogEntry) -> Result<u64, Misfit> {
        self.admit(entry.log_id)?;
        let ticket = self.next_ticket;
        self.next_ticket += 1;
        self.cache_bytes += codec::payload_len(&entry);
        let term = entry.log_id.leader_id.term;
        self.slots.push_back(Slot {
            term,
            ticket,
            place: None,
            cached: Some(entry),
        });
        Ok(ticket)
    }

    /// Adds an entry found on disk.
    pub(crate) fn recovered(&mut self, id: LogId, place: Place) -> Result<(), Misfit> {
        self.admit(id)?;
        let slot = Slot {
            term: id.leader_id.term,
            ticket: u64::MAX,
            place: Some(place),
            cached: None,
        };
        self.slots.push_back(slot);
        self.cache_from = id.index + 1;
        Ok(())
    }

    /// Notes that an appended entry is durable.
    pub(crate) fn written(&mut self, index: u64, ticket: u64, place: Place) {
        if let Some(slot) = self.slot_mut(index)
            && slot.ticket == ticket
        {
            slot.place = Some(place);
        }
    }

    fn slot_mut(&mut self, index: u64) -> Option<&mut Slot> {
        let at = index.checked_sub(self.first)?;
        self.slots.get_mut(usize::try_from(at).ok()?)
    }

    /// The id of an entry in the log, or of the last purged one.
    pub(crate) fn id_at(&self, index: u64) -> Option<LogId> {
        if let Some(purged) = self.purged
            && purged.index == index
        {
            return Some(purged);
        }
        let slot = self.slots.get(usize::try_from(index.checked_sub(self.first)?).ok()?)?;
        Some(LogId::new_term_index(slot.term, index))
    }

    /// Drops everything after `after`.
    pub(crate) fn truncate(&mut self, after: Option<LogId>) -> Result<(), Misfit> {
        let misfit = Misfit::Truncation(after.map(|id| id.index));
        let known = match after {
            None => self.purged.is_none(),
            Some(id) => self.id_at(id.index) == Some(id),
        };
        if !known || after < self.purged {
            return Err(misfit);
        }
        let keep = after.map_or(0, |id| id.index + 1);
        while self.first + self.slots.len() as u64 > keep {
            let Some(slot) = self.slots.pop_back() else { break };
            self.uncache(slot);
        }
        self.cache_from = self.cache_from.min(keep.max(self.first));
        self.last = after;
        // Only uncommitted entries are ever truncated, so this changes nothing unless the mark ran ahead.
        self.committed = self.committed.min(after);
        Ok(())
    }

    /// Replays a truncation. It may reach before the oldest segment that is left: what it took away was
    /// purged later, or [`Index::hole`] will tell.
    pub(crate) fn replay_truncate(&mut self, after: Option<LogId>) -> Result<(), Misfit> {
        if self.next() < after.map_or(0, |id| id.index + 1) {
            return Err(Misfit::Truncation(after.map(|id| id.index)));
        }
        let inside = after.is_some_and(|id| id.index >= self.first);
        if inside || (after.is_none() && self.first == 0) || self.id_before_first() == after {
            return self.truncate(after);
        }
        self.slots.clear();
        self.last = after;
        self.first = self.next();
        self.cache_from = self.first;
        Ok(())
    }

    fn id_before_first(&self) -> Option<LogId> {
        if self.slots.is_empty() {
            self.last
        } else {
            self.first.checked_sub(1).and_then(|i| self.id_at(i))
        }
    }

    /// The first entry that should be in the log but is not, if any.
    pub(crate) fn hole(&self) -> Option<u64> {
        let wanted = self.purged.map_or(0, |id| id.index + 1);
        (wanted < self.first).then_some(wanted)
    }

    /// Drops everything up to `upto`, which may be beyond the last entry after a snapshot came in.
    pub(crate) fn purge(&mut self, upto: LogId) {
        if self.purged >= Some(upto) {
            return;
        }
        self.purged = Some(upto);
        while self.first <= upto.index {
            let Some(slot) = self.slots.pop_front() else { break };
            self.uncache(slot);
            self.first += 1;
        }
        if self.last.is_none_or(|last| last.index <= upto.index) {
            self.last = Some(upto);
            self.first = upto.index + 1;
        }
        self.cache_from = self.cache_from.max(self.first);
    }

    fn uncache(&mut self, slot: Slot) {
        if let Some(entry) = slot.cached {
            self.cache_bytes -= codec::payload_len(&entry);
        }
    }

    /// Drops the oldest entries from the cache while it is too large, as far as they are on disk.
    pub(crate) fn shrink_cache(&mut self) {
        while self.cache_bytes > self.cache_limit {
            let from = self.cache_from.max(self.first);
            let Some(slot) = self.slot_mut(from) else { return };
            if slot.place.is_none() {
                return;
            }
            let taken = slot.cached.take();
            if let Some(entry) = taken {
                self.cache_bytes -= codec::payload_len(&entry);
            }
            self.cache_from = from + 1;
        }
    }

    /// The entries of `from..until` that exist, stopping once their payloads pass `bytes` (but never before one).
    pub(crate) fn lookup(&self, from: u64, until: u64, bytes: usize) -> Vec<Lookup> {
        let mut found = Vec::new();
        let mut total = 0;
        let from = from.max(self.first);
        for index in from..until.min(self.next()) {
            let Some(slot) = self.slots.get((index - self.first) as usize) else {
                break;
            };
            let (lookup, len) = match (&slot.cached, slot.place) {
                (Some(entry), _) => (Lookup::Cached(entry.clone()), codec::payload_len(entry)),
                (None, Some(place)) => (
                    Lookup::OnDisk(LogId::new_term_index(slot.term, index), place),
                    place.len as usize,
                ),
                (None, None) => break,
            };
            if !found.is_empty() && total + len > bytes {
                break;
            }
            total += len;
            found.push(lookup);
        }
        found
    }

    #[cfg(test)]
    pub(crate) fn cache_bytes(&self) -> usize {
        self.cache_bytes
    }
}
