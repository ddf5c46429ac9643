//! The state with the newest events beside it: what a member applies entries to, and what its watchers read.
//!
//! Keeps: state and events change together, so a relist and the events after it fit together, and a watcher that goes from
//! page to page sees every event once and in order; an entry that can't be decoded changes nothing.

use crate::command::{DecodeError, Response};
use crate::records::{Event, Record};
use crate::ring::Ring;
use crate::state::State;
use std::sync::Arc;

pub use crate::ring::{MAX_BYTES, MAX_EVENTS};

/// See the module.
#[derive(Default)]
pub struct Feed {
    state: State,
    ring: Ring,
}

/// What one watcher sees next.
pub enum Page {
    /// Events above its position, at most as many as asked for but whole revisions; none: it has seen everything.
    Events { events: Vec<Arc<Event>>, revision: u64 },
    /// It asked for everything, or events above its position are gone: all records as of `revision`.
    Relist { records: Vec<Record>, revision: u64 },
}

/// What applying an entry did.
pub struct Step {
    pub response: Response,
    /// Older events that had to go.
    pub dropped: usize,
    /// A sentence when R4 was broken: an epoch that did not grow.
    pub violation: Option<String>,
}

impl Feed {
    /// A state without history: watchers below its revision relist.
    #[must_use]
    pub fn starting_from(state: State) -> Self {
        let ring = Ring::starting_after(state.revision());
        Feed { state, ring }
    }

    #[must_use]
    pub fn state(&self) -> &State {
        &self.state
    }

    /// Events kept and their bytes.
    #[must_use]
    pub fn depth(&self) -> (usize, usize) {
        self.ring.depth()
    }

    /// Applies one log entry. `index` must grow from call to call.
    ///
    /// # Errors
    /// [`DecodeError`] when the entry can't be read; nothing is changed then and the member must stop.
    pub fn apply(&mut self, index: u64, entry: &[u8]) -> Result<Step, DecodeError> {
        let applied = self.state.apply(index, entry)?;
        let violation = check_growth(&self.ring, index, &applied.events);
        let dropped = self.ring.push(index, applied.events);
        Ok(Step {
            response: applied.response,
            dropped,
            violation,
        })
    }

    /// What a watcher at `position` sees next; `relist` asks for everything.
    #[must_use]
    pub fn page(&self, position: u64, relist: bool, most: usize) -> Page {
        let applied = self.state.revision();
        match self.ring.after(position, most).filter(|_| !relist) {
            // Nothing is left after the last event: the watcher has seen every applied revision.
            Some((events, last)) if self.ring.after(last, 1).is_some_and(|(e, _)| e.is_empty()) => Page::Events {
                events,
                revision: last.max(applied).max(position),
            },
            Some((events, last)) => Page::Events { events, revision: last },
            None => Page::Relist {
                records: self.state.records(),
                revision: applied,
            },
        }
    }
}

/// R4, as far as two neighbouring events show it: an epoch is above the last one of its pool in the ring.
fn check_growth(ring: &Ring, index: u64, events: &[Event]) -> Option<String> {
    let (last, _) = ring.after(index.checked_sub(64)?, 64)?;
    let fell = |event: &Event| {
        let Some(Record::Slots(new)) = &event.record else {
            return None;
        };
        let older = last.iter().rev().find_map(|e| match &e.record {
            Some(Record::Slots(old)) if old.pool == new.pool => Some(old.epoch),
            _ => None,
        });
        let fell = older.is_some_and(|old| old >= new.epoch);
        fell.then(|| format!("epoch of pool {} did not grow at revision {index}", new.pool))
    };
    events.iter().find_map(fell)
}

/// How far a follower of a watch has come, across the members that serve it.
///
/// Invariant: what it takes is above what it took before, so nothing is doubled and nothing goes back in time; a relist at
/// its very position is taken, since it may be the first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cursor {
    position: u64,
}

impl Cursor {
    #[must_use]
    pub fn at(position: u64) -> Self {
        Cursor { position }
    }

    /// The revision to resume from; 0 asks for everything.
    #[must_use]
    pub fn position(self) -> u64 {
        self.position
    }

    /// Whether changes up to `revision` are news.
    #[must_use]
    pub fn takes_changes(self, revision: u64) -> bool {
        revision > self.position
    }

    /// Whether everything as of `revision` may replace what the follower has.
    #[must_use]
    pub fn takes_relist(self, revision: u64) -> bool {
        revision >= self.position
    }

    /// Everything up to `revision` has been taken, or is known to hold nothing for this follower.
    pub fn advance(&mut self, revision: u64) {
        self.position = self.position.max(revision);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::command::{Command, ConfigurePool, CreateCluster};

    fn filled() -> Feed {
        let mut feed = Feed::default();
        let create = CreateCluster {
            cluster_id: "c".into(),
            pool: "default".into(),
            factor: 2,
        };
        feed.apply(3, &Command::CreateCluster(create).to_entry(None, 1_000))
            .unwrap();
        for index in 4..20 {
            let pool = ConfigurePool {
                pool: format!("p{}", index % 3),
                factor: index as u32 % 4 + 1,
            };
            let step = feed
                .apply(index, &Command::ConfigurePool(pool).to_entry(None, 1_000 + index))
                .unwrap();
            assert_eq!(step.violation, None);
        }
        feed
    }

    #[test]
    fn pages_join_without_loss() {
        let feed = filled();
        let Page::Relist { records, revision } = feed.page(0, true, 9) else {
            panic!()
        };
        assert_eq!((records.len(), revision), (1 + 4 + 4, 19));
        let (mut at, mut seen) = (3, Vec::new());
        while at < 19 {
            let Page::Events { events, revision } = feed.page(at, false, 3) else {
                panic!()
            };
            assert!(revision > at);
            seen.extend(events.iter().map(|e| e.revision));
            at = revision;
        }
        assert!(seen.is_sorted());
        let Page::Events { events, .. } = feed.page(3, false, 1_000) else {
            panic!()
        };
        assert_eq!(seen, events.iter().map(|e| e.revision).collect::<Vec<_>>());
    }

    #[test]
    fn an_undecodable_entry_changes_nothing() {
        let mut feed = filled();
        let before = feed.state().clone();
        assert!(feed.apply(20, b"\xff\xff\xff").is_err());
        assert!(before == *feed.state());
        assert!(matches!(feed.page(19, false, 9), Page::Events { revision: 19, .. }));
    }

    #[test]
    fn a_restored_state_has_no_history_below_it() {
        let feed = Feed::starting_from(filled().state().clone());
        assert!(matches!(feed.page(18, false, 9), Page::Relist { revision: 19, .. }));
        assert!(matches!(feed.page(19, false, 9), Page::Events { revision: 19, .. }));
    }

    #[test]
    fn a_cursor_never_goes_back() {
        let mut cursor = Cursor::at(5);
        assert!(!cursor.takes_changes(5) && cursor.takes_changes(6));
        assert!(!cursor.takes_relist(4) && cursor.takes_relist(5));
        cursor.advance(9);
        cursor.advance(7);
        assert_eq!(cursor.position(), 9);
    }
}
