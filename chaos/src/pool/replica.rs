//! The state of kvpool on a simulated member: `kvpool-state`'s feed behind the state machine's seam, as in the coordinator,
//! with the rules looking at every step.

use std::io::{self, Read};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use kvpool_raft::{MemberId, SnapshotWriter, StateMachine, StopMember};
use kvpool_state::State;
use kvpool_state::command::decode;
use kvpool_state::feed::{Feed, Page};
use prost::Message;

use crate::machine::{Machine, Model};
use crate::mutation::Mutation;
use crate::net::Node;
use crate::oracle::Oracle;
use crate::pool::leader::{self, Offices};
use crate::pool::rules::Rules;

/// What every member of the pool scenario has in common.
#[derive(Clone)]
pub struct Pools {
    /// Judges the log.
    pub oracle: Oracle,
    /// Judges the state.
    pub rules: Rules,
    /// What leaders remember outside of the log.
    pub offices: Offices,
    /// What is broken on purpose.
    pub mutation: Option<Mutation>,
}

impl Pools {
    /// A model that `oracle` judges.
    pub fn new(oracle: Oracle, mutation: Option<Mutation>) -> Pools {
        Pools {
            rules: Rules::new(oracle.clone()),
            oracle,
            offices: Offices::default(),
            mutation,
        }
    }
}

/// Reads a member's state from outside.
#[derive(Clone)]
pub struct View(Arc<Mutex<Feed>>);

impl View {
    fn lock(&self) -> MutexGuard<'_, Feed> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Looks at the state.
    pub fn read<T>(&self, look: impl FnOnce(&State) -> T) -> T {
        look(self.lock().state())
    }

    /// What a watcher sees next.
    pub fn page(&self, position: u64, relist: bool, most: usize) -> Page {
        self.lock().page(position, relist, most)
    }
}

impl Model for Pools {
    type View = View;

    fn machine(&self, member: MemberId) -> (Machine, View) {
        let view = View(Arc::default());
        let replica = Replica {
            member,
            view: view.clone(),
            pools: self.clone(),
            old_snapshot: None,
        };
        (Machine(Box::new(replica)), view)
    }

    fn started(&self, member: MemberId, node: &Node, view: &View) {
        leader::start(self.clone(), member, node.clone(), view.clone());
    }
}

struct Replica {
    member: MemberId,
    view: View,
    pools: Pools,
    /// For a mutation only.
    old_snapshot: Option<Vec<u8>>,
}

/// A number that stands for a log entry: of its request where it has one, since a retried entry is the same operation.
pub fn operation(entry: &[u8]) -> u64 {
    let request = decode(entry).ok().and_then(|(_, envelope)| envelope.request);
    let bytes = request.map_or_else(|| entry.to_vec(), |id| id.encode_to_vec());
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

impl Replica {
    fn mutated(&self, mutation: Mutation) -> bool {
        self.pools.mutation == Some(mutation)
    }

    fn apply_once(&self, index: u64, term: u64, entry: &[u8]) -> Result<Bytes, StopMember> {
        self.pools.oracle.applied(self.member, index, term, operation(entry));
        let mut feed = self.view.lock();
        // The state is copied only for the first member that comes here: it is compared with what came before.
        let before = self.pools.rules.is_new(index).then(|| feed.state().clone());
        let tampered = self
            .pools
            .mutation
            .and_then(|m| m.rewrite(entry, feed.state(), self.member));
        let step = feed
            .apply(index, tampered.as_deref().unwrap_or(entry))
            .map_err(|e| StopMember(e.to_string()))?;
        if let Some(more) = self.pools.mutation.and_then(|m| m.append(entry, feed.state())) {
            feed.apply(index, &more).map_err(|e| StopMember(e.to_string()))?;
        }
        if let Some(state) = self.pools.mutation.and_then(|m| m.tamper(index, feed.state())) {
            *feed = Feed::starting_from(state);
        }
        if let Some(what) = step.violation {
            self.pools.oracle.violation(what);
        }
        let response = step.response;
        match before {
            Some(before) => self.pools.rules.first(index, entry, &before, feed.state(), &response),
            None => self.pools.rules.again(self.member, index, feed.state(), &response),
        }
        Ok(response.encode_to_vec().into())
    }
}

impl StateMachine for Replica {
    fn apply(&mut self, index: u64, term: u64, command: &[u8]) -> Result<Bytes, StopMember> {
        if self.mutated(Mutation::SkipAnEntry) && self.member == 2 && index.is_multiple_of(40) {
            return Ok(Bytes::new());
        }
        let answer = self.apply_once(index, term, command)?;
        if self.mutated(Mutation::ApplyTwice) && self.member == 2 && index.is_multiple_of(40) {
            return self.apply_once(index, term, command);
        }
        Ok(answer)
    }

    fn snapshot(&self) -> SnapshotWriter {
        let state = self.view.read(State::clone);
        let state = self.pools.mutation.and_then(|m| m.snapshot(&state)).unwrap_or(state);
        Box::new(move |out| state.write_snapshot(out))
    }

    fn restore(&mut self, from: &mut dyn Read) -> io::Result<()> {
        let mut bytes = Vec::new();
        from.read_to_end(&mut bytes)?;
        let state = State::read_snapshot(&mut bytes.as_slice())?;
        let state = if self.mutated(Mutation::StaleSnapshot) {
            // It installs the one before.
            let old = self.old_snapshot.replace(bytes);
            old.map_or(Ok(State::default()), |old| State::read_snapshot(&mut old.as_slice()))?
        } else {
            state
        };
        self.pools.rules.restored(self.member, &state);
        *self.view.lock() = Feed::starting_from(state);
        Ok(())
    }
}
