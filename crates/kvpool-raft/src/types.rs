//! The type configuration of the consensus library, generic over the runtime only.

use std::cmp::Ordering;
use std::fmt;
use std::marker::PhantomData;

use bytes::Bytes;
use openraft::raft::responder::Responder;
use openraft::type_config::async_runtime::{AsyncRuntime, Oneshot, OneshotSender};
use openraft::{AnyError, BasicNode, EntryPayload, OptionalSend, RaftTypeConfig};
use serde::{Deserialize, Serialize};

use crate::config::MemberId;

/// One member leads a term, so a term alone names a leader's log.
pub(crate) type LeaderId = openraft::impls::leader_id_std::LeaderId<u64, MemberId>;
pub(crate) type CommittedLeaderId = <LeaderId as openraft::vote::RaftLeaderId>::Committed;
pub(crate) type LogId = openraft::LogId<CommittedLeaderId>;
pub(crate) type Vote = openraft::Vote<LeaderId>;
pub(crate) type Payload = EntryPayload<Opaque, MemberId, BasicNode>;
pub(crate) type LogEntry = openraft::Entry<CommittedLeaderId, Payload>;
pub(crate) type Membership = openraft::Membership<MemberId, BasicNode>;
pub(crate) type StoredMembership = openraft::StoredMembership<CommittedLeaderId, MemberId, BasicNode>;
pub(crate) type SnapshotMeta = openraft::SnapshotMeta<CommittedLeaderId, MemberId, BasicNode>;

/// A proposed command, or the response to one: bytes this crate never looks into.
#[derive(Clone, PartialEq, Eq, Default)]
pub struct Opaque(pub(crate) Bytes);

impl fmt::Debug for Opaque {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes", self.0.len())
    }
}

impl fmt::Display for Opaque {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

// The library asks for serde although nothing here goes through it: our own codec does disk and wire.
impl Serialize for Opaque {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_bytes(&self.0)
    }
}

impl<'de> Deserialize<'de> for Opaque {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Ok(Opaque(Bytes::from(Vec::<u8>::deserialize(deserializer)?)))
    }
}

/// The library's type parameters for runtime `R`.
pub struct Types<R>(PhantomData<fn() -> R>);

// By hand: derives would ask the same of `R`.
impl<R> Clone for Types<R> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<R> Copy for Types<R> {}
impl<R> Default for Types<R> {
    fn default() -> Self {
        Types(PhantomData)
    }
}
impl<R> fmt::Debug for Types<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Types")
    }
}
impl<R> PartialEq for Types<R> {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}
impl<R> Eq for Types<R> {}
impl<R> PartialOrd for Types<R> {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}
impl<R> Ord for Types<R> {
    fn cmp(&self, _: &Self) -> Ordering {
        Ordering::Equal
    }
}

impl<R: AsyncRuntime> RaftTypeConfig for Types<R> {
    type D = Opaque;
    type R = Opaque;
    type NodeId = MemberId;
    type Node = BasicNode;
    type Term = u64;
    type LeaderId = LeaderId;
    type Vote = Vote;
    type Payload = Payload;
    type Entry = LogEntry;
    type AsyncRuntime = R;
    type Responder<T>
        = Reply<R, T>
    where
        T: OptionalSend + 'static;
    type Batch<T>
        = openraft::impls::InlineBatch<T>
    where
        T: OptionalSend + 'static;
    type ErrorSource = AnyError;
}

pub(crate) type ReplySender<R, T> = <<R as AsyncRuntime>::Oneshot as Oneshot>::Sender<T>;

/// Carries a proposal's result back, and its place among those in flight until then.
pub struct Reply<R: AsyncRuntime, T: OptionalSend + 'static> {
    tx: ReplySender<R, T>,
    _permit: tokio::sync::OwnedSemaphorePermit,
}

impl<R: AsyncRuntime, T: OptionalSend + 'static> Reply<R, T> {
    pub(crate) fn new(tx: ReplySender<R, T>, permit: tokio::sync::OwnedSemaphorePermit) -> Self {
        Reply { tx, _permit: permit }
    }
}

impl<R: AsyncRuntime, T: OptionalSend + 'static> Responder<Types<R>, T> for Reply<R, T> {
    fn on_complete(self, result: T) {
        // The proposer may have stopped waiting.
        let _ = self.tx.send(result);
    }
}
