//! Entries, memberships and snapshot headers as bytes: the same on disk and between members.
//!
//! Protobuf with tags given by hand, so that fields can be added. Decoding never panics and trusts no length.

use std::collections::{BTreeMap, BTreeSet};

use bytes::Bytes;
use openraft::{BasicNode, EntryPayload};
use prost::Message;

use crate::types::{LogEntry, LogId, Membership, Opaque, SnapshotMeta, StoredMembership};

/// Bytes that are not what they should be.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("failed to decode {0}")]
pub(crate) struct DecodeError(pub(crate) &'static str);

/// A log id. A missing one is a missing message, for index 0 is a real index.
#[derive(Clone, Copy, PartialEq, Eq, prost::Message)]
pub(crate) struct PbId {
    #[prost(uint64, tag = "1")]
    pub term: u64,
    #[prost(uint64, tag = "2")]
    pub index: u64,
}

impl From<LogId> for PbId {
    fn from(id: LogId) -> Self {
        PbId {
            term: id.leader_id.term,
            index: id.index,
        }
    }
}

impl From<PbId> for LogId {
    fn from(id: PbId) -> Self {
        LogId::new_term_index(id.term, id.index)
    }
}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct PbMembership {
    /// One set of voters, or two while a change is in progress.
    #[prost(message, repeated, tag = "1")]
    pub configs: Vec<PbVoters>,
    /// Every member with its address.
    #[prost(btree_map = "uint64, string", tag = "2")]
    pub nodes: BTreeMap<u64, String>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct PbVoters {
    #[prost(uint64, repeated, tag = "1")]
    pub ids: Vec<u64>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct PbSnapshotMeta {
    #[prost(message, optional, tag = "1")]
    pub last: Option<PbId>,
    #[prost(message, optional, tag = "2")]
    pub membership_id: Option<PbId>,
    #[prost(message, optional, tag = "3")]
    pub membership: Option<PbMembership>,
}

/// What an entry holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Blank = 1,
    Command = 2,
    Membership = 3,
}

impl Kind {
    pub(crate) fn from_u8(kind: u8) -> Option<Kind> {
        match kind {
            1 => Some(Kind::Blank),
            2 => Some(Kind::Command),
            3 => Some(Kind::Membership),
            _ => None,
        }
    }
}

/// The kind and payload bytes of an entry.
pub(crate) fn encode_payload(entry: &LogEntry) -> (Kind, Bytes) {
    match &entry.payload {
        EntryPayload::Blank => (Kind::Blank, Bytes::new()),
        EntryPayload::Normal(command) => (Kind::Command, command.0.clone()),
        EntryPayload::Membership(m) => (Kind::Membership, encode_membership(m).encode_to_vec().into()),
    }
}

/// The reverse of [`encode_payload`].
pub(crate) fn decode_entry(id: LogId, kind: Kind, payload: Bytes) -> Result<LogEntry, DecodeError> {
    let payload = match kind {
        Kind::Blank => EntryPayload::Blank,
        Kind::Command => EntryPayload::Normal(Opaque(payload)),
        Kind::Membership => {
            let m = PbMembership::decode(payload).map_err(|_| DecodeError("a membership"))?;
            EntryPayload::Membership(decode_membership(m)?)
        }
    };
    Ok(LogEntry { log_id: id, payload })
}

/// Payload bytes of an entry, as far as they matter for limits.
pub(crate) fn payload_len(entry: &LogEntry) -> usize {
    match &entry.payload {
        EntryPayload::Normal(command) => command.0.len(),
        // A membership has at most a few dozen members with short addresses.
        EntryPayload::Blank | EntryPayload::Membership(_) => 64,
    }
}

pub(crate) fn encode_membership(m: &Membership) -> PbMembership {
    PbMembership {
        configs: m
            .get_joint_config()
            .iter()
            .map(|set| PbVoters {
                ids: set.iter().copied().collect(),
            })
            .collect(),
        nodes: m.nodes().map(|(id, node)| (*id, node.addr.clone())).collect(),
    }
}

pub(crate) fn decode_membership(m: PbMembership) -> Result<Membership, DecodeError> {
    if m.configs.is_empty() && m.nodes.is_empty() {
        return Ok(Membership::default());
    }
    let configs: Vec<BTreeSet<u64>> = m.configs.into_iter().map(|set| set.ids.into_iter().collect()).collect();
    let nodes: BTreeMap<u64, BasicNode> = m.nodes.into_iter().map(|(id, addr)| (id, BasicNode { addr })).collect();
    Membership::new(configs, nodes).map_err(|_| DecodeError("a membership"))
}

pub(crate) fn encode_meta(meta: &SnapshotMeta) -> PbSnapshotMeta {
    PbSnapshotMeta {
        last: meta.last_log_id.map(PbId::from),
        membership_id: meta.last_membership.log_id().map(PbId::from),
        membership: Some(encode_membership(meta.last_membership.membership())),
    }
}

pub(crate) fn decode_meta(meta: PbSnapshotMeta) -> Result<SnapshotMeta, DecodeError> {
    let membership = decode_membership(meta.membership.ok_or(DecodeError("a snapshot header"))?)?;
    Ok(SnapshotMeta {
        last_log_id: meta.last.map(LogId::from),
        last_membership: StoredMembership::new(meta.membership_id.map(LogId::from), membership),
    })
}
