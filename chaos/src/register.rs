//! The state the simulated members keep: the list of every operation in the order of the log.

use std::io::{self, Read};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use kvpool_raft::{MemberId, SnapshotWriter, StateMachine, StopMember};

use crate::machine::{Machine, Model};
use crate::oracle::Oracle;

/// One operation: a number that is used once.
pub type Operation = u64;

/// What a member holds: log index and operation of everything applied.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct History {
    /// Index and operation, in order.
    pub applied: Vec<(u64, Operation)>,
}

/// One life of one member's state.
pub struct Register {
    member: MemberId,
    history: Arc<Mutex<History>>,
    oracle: Oracle,
}

/// Reads a register from outside.
#[derive(Clone)]
pub struct View(Arc<Mutex<History>>);

impl View {
    /// What the member holds now.
    pub fn get(&self) -> History {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// Members that keep a register whose every step the oracle sees.
#[derive(Clone)]
pub struct Registers(pub Oracle);

impl Model for Registers {
    type View = View;

    fn machine(&self, member: MemberId) -> (Machine, View) {
        let history = Arc::new(Mutex::new(History::default()));
        let register = Register {
            member,
            history: history.clone(),
            oracle: self.0.clone(),
        };
        (Machine(Box::new(register)), View(history))
    }
}

impl Register {
    fn lock(&self) -> MutexGuard<'_, History> {
        self.history.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A command's bytes: the operation, and padding so that entries differ in size.
pub fn command(operation: Operation, padding: usize) -> Bytes {
    let mut bytes = operation.to_le_bytes().to_vec();
    bytes.resize(8 + padding, b'x');
    bytes.into()
}

fn u64_of(bytes: &[u8]) -> Option<u64> {
    Some(u64::from_le_bytes(*bytes.first_chunk::<8>()?))
}

impl StateMachine for Register {
    fn apply(&mut self, index: u64, term: u64, command: &[u8]) -> Result<Bytes, StopMember> {
        let operation = u64_of(command).ok_or_else(|| StopMember("a command that is too short".to_string()))?;
        self.oracle.applied(self.member, index, term, operation);
        let mut history = self.lock();
        if history.applied.last().is_some_and(|(last, _)| *last >= index) {
            drop(history);
            self.oracle
                .violation(format!("member {} applied {index} twice or out of order", self.member));
            return Ok(Bytes::new());
        }
        history.applied.push((index, operation));
        Ok(Bytes::from((history.applied.len() as u64).to_le_bytes().to_vec()))
    }

    fn snapshot(&self) -> SnapshotWriter {
        let history = self.lock().clone();
        Box::new(move |out| {
            for (index, operation) in history.applied {
                out.write_all(&index.to_le_bytes())?;
                out.write_all(&operation.to_le_bytes())?;
            }
            Ok(())
        })
    }

    fn restore(&mut self, from: &mut dyn Read) -> io::Result<()> {
        let mut bytes = Vec::new();
        from.read_to_end(&mut bytes)?;
        let mut applied = Vec::new();
        for pair in bytes.chunks(16) {
            let (Some(index), Some(operation)) = (u64_of(pair), pair.get(8..).and_then(u64_of)) else {
                return Err(io::ErrorKind::InvalidData.into());
            };
            applied.push((index, operation));
        }
        self.oracle.restored(self.member, &applied);
        *self.lock() = History { applied };
        Ok(())
    }
}
