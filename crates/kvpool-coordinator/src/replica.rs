//! The replicated state on this member: kvpool-state behind kvpool-raft's state machine, and behind one lock.
//!
//! Invariants: state and events change together (kvpool-state's feed), so a relist and the events after it fit together; an
//! entry that can't be decoded changes nothing and stops the member; epochs that went back are counted (R4).

use crate::metric_definitions as m;
use bytes::Bytes;
use kvpool_raft::{SnapshotWriter, StateMachine, StopMember};
use kvpool_state::State;
use kvpool_state::feed::{Feed, Page};
use parking_lot::RwLock;
use prost::Message;
use std::io::{self, Read};
use std::sync::Arc;
use tokio::sync::watch;

/// What everybody on this member reads.
pub(crate) struct Replica {
    feed: RwLock<Feed>,
    revision: watch::Sender<u64>,
}

impl Replica {
    pub(crate) fn new() -> Arc<Self> {
        Arc::new(Replica {
            feed: RwLock::default(),
            revision: watch::Sender::new(0),
        })
    }

    /// Reads the state. The guard must not be held across an await.
    pub(crate) fn read<T>(&self, look: impl FnOnce(&State) -> T) -> T {
        look(self.feed.read().state())
    }

    pub(crate) fn revision(&self) -> watch::Receiver<u64> {
        self.revision.subscribe()
    }

    /// What a watcher at `position` sees next; `relist` asks for everything.
    pub(crate) fn page(&self, position: u64, relist: bool, most: usize) -> Page {
        self.feed.read().page(position, relist, most)
    }

    fn apply(&self, index: u64, command: &[u8]) -> Result<Bytes, StopMember> {
        let mut feed = self.feed.write();
        let step = feed.apply(index, command).map_err(|e| StopMember(e.to_string()))?;
        let (events, bytes) = feed.depth();
        drop(feed);
        if let Some(what) = step.violation {
            m::violation("R4", &what);
        }
        #[allow(clippy::cast_precision_loss)]
        {
            metrics::counter!(m::RING_DROPPED).increment(step.dropped as u64);
            metrics::gauge!(m::RING_DEPTH).set(events as f64);
            metrics::gauge!(m::RING_BYTES).set(bytes as f64);
            metrics::gauge!(m::REVISION).set(index as f64);
        }
        self.revision.send_replace(index);
        Ok(step.response.encode_to_vec().into())
    }

    fn replace(&self, state: State) {
        let revision = state.revision();
        *self.feed.write() = Feed::starting_from(state);
        self.revision.send_replace(revision);
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
        Box::new(move |out| state.write_snapshot(out))
    }

    fn restore(&mut self, from: &mut dyn Read) -> io::Result<()> {
        self.0.replace(State::read_snapshot(from)?);
        Ok(())
    }
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
            assert!(State::read_snapshot(&mut &bytes[..cut]).is_err(), "cut at {cut}");
        }
    }

    #[test]
    fn an_undecodable_entry_stops_and_changes_nothing() {
        let replica = filled();
        let before = replica.read(State::clone);
        assert!(replica.apply(20, b"\xff\xff\xff").is_err());
        assert!(before == replica.read(State::clone));
    }
}
