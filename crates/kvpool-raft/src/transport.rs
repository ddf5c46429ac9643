//! How messages reach other members: a trait, so that gRPC carries them in production and the simulated
//! network in tests.
//!
//! Invariant: messages are opaque bytes. Each names the cluster, the sender and the receiver, and a member
//! refuses what is not meant for it, so an address that changed hands does no harm.

use std::future::Future;
use std::time::Duration;

use bytes::Bytes;

use crate::config::MemberId;

/// Which traffic a message belongs to. A transport gives each lane its own connection, so that a large append
/// or a snapshot never delays a heartbeat.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Lane {
    /// Log replication.
    Append,
    /// Heartbeats and read confirmations.
    Heartbeat,
    /// Votes, pre-votes and leader transfer.
    Vote,
    /// Snapshot chunks.
    Snapshot,
}

impl Lane {
    /// Every lane.
    pub const ALL: [Lane; 4] = [Lane::Append, Lane::Heartbeat, Lane::Vote, Lane::Snapshot];

    /// The lane's name in metrics and logs.
    pub fn name(self) -> &'static str {
        match self {
            Lane::Append => "append",
            Lane::Heartbeat => "heartbeat",
            Lane::Vote => "vote",
            Lane::Snapshot => "snapshot",
        }
    }
}

/// The member a message goes to.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Peer {
    /// Its id.
    pub id: MemberId,
    /// Its address as given to `initialize`.
    pub address: String,
}

/// Why a message got no reply.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TransportError {
    /// Nothing was sent: no connection. The sender waits a little before it tries again.
    #[error("failed to reach the member: {0}")]
    Unreachable(String),
    /// No reply within the time to live.
    #[error("failed to get a reply in time")]
    Timeout,
    /// Sent, and the reply was an error or got lost.
    #[error("failed to get a reply: {0}")]
    Failed(String),
}

/// Sends one message and waits for its reply.
pub trait Transport: Clone + Send + Sync + 'static {
    /// Sends `message` (at most [`crate::MAX_MESSAGE_BYTES`]) to `to` and returns what
    /// [`crate::RaftNode::handle`] returned there. Must give up after `ttl`, and must neither queue without
    /// bound nor resend.
    fn send(
        &self,
        to: &Peer,
        lane: Lane,
        message: Bytes,
        ttl: Duration,
    ) -> impl Future<Output = Result<Bytes, TransportError>> + Send;
}
