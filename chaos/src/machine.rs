//! Whatever a simulated member keeps, behind one type: the consensus library is compiled once for all of it.

use std::io::{self, Read};

use bytes::Bytes;
use kvpool_raft::{MemberId, SnapshotWriter, StateMachine, StopMember};

/// A state machine of any kind.
pub struct Machine(pub Box<dyn StateMachine>);

impl StateMachine for Machine {
    fn apply(&mut self, index: u64, term: u64, command: &[u8]) -> Result<Bytes, StopMember> {
        self.0.apply(index, term, command)
    }

    fn snapshot(&self) -> SnapshotWriter {
        self.0.snapshot()
    }

    fn restore(&mut self, from: &mut dyn Read) -> io::Result<()> {
        self.0.restore(from)
    }
}

/// What the members of a cluster keep: the register's history, or the state of kvpool.
pub trait Model: Clone + Send + Sync + 'static {
    /// Reads a running member's state from outside.
    type View: Clone + Send + Sync + 'static;

    /// An empty state for a new life of a member.
    fn machine(&self, member: MemberId) -> (Machine, Self::View);

    /// Starts what else runs in the member's process. Called at the member's place.
    fn started(&self, _member: MemberId, _node: &crate::net::Node, _view: &Self::View) {}
}
