//! The replicated state on this member: kvpool-state behind kvpool-raft's state machine, with the events of the newest
//! revisions beside it.
//!
//! Invariants: state and ring change under one lock, so a relist and the events after it fit together; an entry that can't
//! be decoded changes nothing and stops the member; epochs and incarnations that went back are counted (R4).

use crate::metric_definitions as m;
use crate::ring::Ring;
use bytes::Bytes;
use kvpool_raft::{SnapshotWriter, StateMachine, StopMember};
use kvpool_state::State;
use kvpool_state::records::{Event, Record};
use parking_lot::{RwLock, RwLockReadGuard};
use prost::Message;
use std::io::{self, Read, Write};
use std::sync::Arc;
use tokio::sync::watch;

/// Largest item of a snapshot in bytes; a pool with 16384 ranges has about 1.2 MiB.
const MAX_ITEM_BYTES: usize = 8 << 20;

#[derive(Default)]
struct Inner {
    state: State,
    ring: Ring,
}

/// What everybody on this member reads.
pub(crate) struct Replica {
    inner: RwLock<Inner>,
    revision: watch::Sender<u64>,
}

/// Events for one watcher.
pub(crate) enum Page {
    Events { events: Vec<Arc<Event>>, revision: u64 },
    Relist { records: Vec<Record>, revision: u64 },
}

impl Replica {
    pub(crate) fn new() -> Arc<Self> {
        Arc::new(Replica {
            inner: RwLock::default(),
            revision: watch::Sender::new(0),
        })
    }

    /// Reads the state. The guard must not be held across an await.
    pub(crate) fn read<T>(&self, look: impl FnOnce(&State) -> T) -> T {
        let inner: RwLockReadGuard<'_, Inner> = self.inner.read();
        look(&inner.state)
    }

    pub(crate) fn revision(&self) -> watch::Receiver<u64> {
        self.revision.subscribe()
    }

    /// What a watcher at `position` sees next; `relist` asks for everything.
    pub(crate) fn page(&self, position: u64, relist: bool, most: usize) -> Page {
        let inner = self.inner.read();
        let applied = inner.state.revision();
        match inner.ring.after(position, most).filter(|_| !relist) {
            // Nothing is left after the last event: the watcher has seen every applied revision.
            Some((events, last)) if inner.ring.after(last, 1).is_some_and(|(e, _)| e.is_empty()) => Page::Events {
                events,
                revision: last.max(applied).max(position),
            },
            Some((events, last)) => Page::Events { events, revision: last },
            None => Page::Relist {
                records: inner.state.records(),
                revision: applied,
            },
        }
    }

    fn apply(&self, index: u64, command: &[u8]) -> Result<Bytes, StopMember> {
        let mut inner = self.inner.write();
        let applied = inner
            .state
            .apply(index, command)
            .map_err(|e| StopMember(e.to_string()))?;
        check_growth(&inner.ring, index, &applied.events);
        let dropped = inner.ring.push(index, applied.events);
        let (events, bytes) = inner.ring.depth();
        drop(inner);
        #[allow(clippy::cast_precision_loss)]
        {
            metrics::counter!(m::RING_DROPPED).increment(dropped as u64);
            metrics::gauge!(m::RING_DEPTH).set(events as f64);
            metrics::gauge!(m::RING_BYTES).set(bytes as f64);
            metrics::gauge!(m::REVISION).set(index as f64);
        }
        self.revision.send_replace(index);
        Ok(applied.response.encode_to_vec().into())
    }

    fn replace(&self, state: State) {
        let revision = state.revision();
        *self.inner.write() = Inner {
            state,
            ring: Ring::starting_after(revision),
        };
        self.revision.send_replace(revision);
    }
}

/// R4, as far as two neighbouring events show it: an epoch is above the last one of its pool in the ring.
fn check_growth(ring: &Ring, index: u64, events: &[Event]) {
    let Some((last, _)) = index.checked_sub(64).and_then(|from| ring.after(from, 64)) else {
        return;
    };
    for event in events {
        let Some(Record::Slots(new)) = &event.record else {
            continue;
        };
        let older = last.iter().rev().find_map(|e| match &e.record {
            Some(Record::Slots(old)) if old.pool == new.pool => Some(old.epoch),
            _ => None,
        });
        if older.is_some_and(|old| old >= new.epoch) {
            m::violation(
                "R4",
                &format!("epoch of pool {} did not grow at revision {index}", new.pool),
            );
        }
    }
}

/// The state machine that kvpool-raft owns.
pub(crate) struct Machine(pub(crate) Arc<Replica>);

impl StateMachine for Machine {
    fn apply(&mut self, index: u64, _term: u64, command: &[u8]) -> Result<Bytes, StopMember> {
        self.0.apply(index, command)
    }

    fn snapshot(&self) -> SnapshotWriter {
        // A clone shares the records: the leader waits for this alone.
        let state = self.0.read(State::clone);
        Box::new(move |out| write_snapshot(&state, out))
    }

    fn restore(&mut self, from: &mut dyn Read) -> io::Result<()> {
        let state = read_snapshot(from)?;
        self.0.replace(state);
        Ok(())
    }
}

/// Items of the state, each behind its length (u32, little endian).
fn write_snapshot(state: &State, out: &mut dyn Write) -> io::Result<()> {
    for item in state.snapshot_items() {
        let len = u32::try_from(item.len()).map_err(|_| invalid("an item is too large"))?;
        out.write_all(&len.to_le_bytes())?;
        out.write_all(&item)?;
    }
    Ok(())
}

fn read_snapshot(from: &mut dyn Read) -> io::Result<State> {
    let mut failed = None;
    let items = std::iter::from_fn(|| match read_item(from) {
        Ok(item) => item,
        Err(e) => {
            failed = Some(e);
            None
        }
    });
    let state = State::from_snapshot_items(items);
    match failed {
        Some(e) => Err(e),
        None => state.map_err(|e| io::Error::new(io::ErrorKind::InvalidData, e)),
    }
}

fn read_item(from: &mut dyn Read) -> io::Result<Option<Vec<u8>>> {
    let mut len = [0; 4];
    match from.read(&mut len[..1])? {
        0 => return Ok(None),
        _ => from.read_exact(&mut len[1..])?,
    }
    let len = u32::from_le_bytes(len) as usize;
    if len > MAX_ITEM_BYTES {
        return Err(invalid("an item is too large"));
    }
    let mut item = vec![0; len];
    from.read_exact(&mut item)?;
    Ok(Some(item))
}

fn invalid(what: &str) -> io::Error {
    io::Error::new(
        io::ErrorKind::InvalidData,
        format!("failed to read or write a snapshot: {what}"),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvpool_state::Command;
    use kvpool_state::command::{ConfigurePool, CreateCluster};

    fn filled() -> Arc<Replica> {
        let replica = Replica::new();
        let create = CreateCluster {
            cluster_id: "c".into(),
            pool: "default".into(),
            factor: 2,
        };
        replica
            .apply(3, &Command::CreateCluster(create).to_entry(None, 1_000))
            .unwrap();
        for index in 4..20 {
            let pool = ConfigurePool {
                pool: format!("p{}", index % 3),
                factor: index as u32 % 4 + 1,
            };
            replica
                .apply(index, &Command::ConfigurePool(pool).to_entry(None, 1_000 + index))
                .unwrap();
        }
        replica
    }

    #[test]
    fn a_snapshot_comes_back_equal() {
        let replica = filled();
        let mut bytes = Vec::new();
        Machine(replica.clone()).snapshot()(&mut bytes).unwrap();
        let copy = Replica::new();
        Machine(copy.clone()).restore(&mut bytes.as_slice()).unwrap();
        assert!(replica.read(State::clone) == copy.read(State::clone));
        assert_eq!(*copy.revision().borrow(), 19);
        assert!(matches!(copy.page(18, false, 9), Page::Relist { revision: 19, .. }));
        for cut in 0..bytes.len() {
            assert!(read_snapshot(&mut &bytes[..cut]).is_err(), "cut at {cut}");
        }
    }

    #[test]
    fn pages_join_without_loss() {
        let replica = filled();
        let Page::Relist { records, revision } = replica.page(0, true, 9) else {
            panic!()
        };
        assert_eq!((records.len(), revision), (1 + 4 + 4, 19));
        let (mut at, mut seen) = (3, Vec::new());
        while at < 19 {
            let Page::Events { events, revision } = replica.page(at, false, 3) else {
                panic!()
            };
            assert!(revision > at);
            seen.extend(events.iter().map(|e| e.revision));
            at = revision;
        }
        assert!(seen.is_sorted());
        let Page::Events { events, .. } = replica.page(3, false, 1_000) else {
            panic!()
        };
        assert_eq!(seen, events.iter().map(|e| e.revision).collect::<Vec<_>>());
    }

    #[test]
    fn an_undecodable_entry_stops_and_changes_nothing() {
        let replica = filled();
        let before = replica.read(State::clone);
        assert!(replica.apply(20, b"\xff\xff\xff").is_err());
        assert!(before == replica.read(State::clone));
    }
}
