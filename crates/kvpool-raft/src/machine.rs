//! The state that the log builds, as the embedding crate implements it.

use std::io;

use bytes::Bytes;

/// What a member does with committed commands.
///
/// Invariant asked of an implementation: `apply` and `restore` are pure functions of the state and their
/// arguments, so that equal logs give equal states on every member. The state lives in memory; after a restart
/// it is rebuilt from the newest snapshot and the log behind it.
pub trait StateMachine: Send + Sync + 'static {
    /// Applies the command of log entry `index` of `term` and returns the proposer's response. Indexes only
    /// grow, with gaps where the log holds entries of its own.
    ///
    /// # Errors
    /// An error stops the member for good before anything after this entry is applied. It is for a command
    /// that this build must not guess at, not for a command that is refused: a refusal is a response.
    fn apply(&mut self, index: u64, term: u64, command: &[u8]) -> Result<Bytes, StopMember>;

    /// A view of the state now that writes itself later, on another thread, while `apply` goes on. Making it
    /// must be cheap: the leader waits for it.
    fn snapshot(&self) -> SnapshotWriter;

    /// Replaces the state by a snapshot's. A failed restore stops the member.
    ///
    /// # Errors
    /// When the snapshot cannot be read or understood.
    fn restore(&mut self, from: &mut dyn io::Read) -> io::Result<()>;
}

/// Writes a frozen state. The bytes may be of any length; they are streamed, checksummed and synced outside.
pub type SnapshotWriter = Box<dyn FnOnce(&mut dyn io::Write) -> io::Result<()> + Send>;

/// Why a member must not go on applying.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("failed to apply a command: {0}")]
pub struct StopMember(pub String);
