//! Commands of the log, their envelope and their answers. Tags are never reused; new behaviour of an old command is a new
//! command.

use crate::records::{NodeRecord, RequestId, ShardAddresses, SlotRange};
use prost::Message;

/// Format that this build writes.
pub const FORMAT: u32 = 1;
/// Highest `min_reader` that this build can apply, and so the highest feature level that it can work at.
pub const READER: u32 = 2;

/// What stands in a log entry.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct Envelope {
    #[prost(uint32, tag = "1")]
    pub format: u32,
    /// A member whose [`READER`] is lower stops before applying.
    #[prost(uint32, tag = "2")]
    pub min_reader: u32,
    /// Tag of the command in [`Command`], so that tools can name what they can't decode.
    #[prost(uint32, tag = "3")]
    pub kind: u32,
    #[prost(bytes = "vec", tag = "4")]
    pub body: Vec<u8>,
    #[prost(message, optional, tag = "5")]
    pub request: Option<RequestId>,
    /// The proposer's clock; log time is max(previous, this).
    #[prost(uint64, tag = "6")]
    pub proposed_at_ms: u64,
}

/// The first entry of a cluster.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct CreateCluster {
    #[prost(string, tag = "1")]
    pub cluster_id: String,
    #[prost(string, tag = "2")]
    pub pool: String,
    #[prost(uint32, tag = "3")]
    pub factor: u32,
}

/// Creates a pool or changes its factor.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct ConfigurePool {
    #[prost(string, tag = "1")]
    pub pool: String,
    #[prost(uint32, tag = "2")]
    pub factor: u32,
}

/// A process start asks for an incarnation. Its memory is empty: it leaves every slot list it stood in.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct RegisterShard {
    #[prost(string, tag = "1")]
    pub id: String,
    #[prost(string, tag = "2")]
    pub pool: String,
    #[prost(message, optional, tag = "3")]
    pub node: Option<NodeRecord>,
    #[prost(string, tag = "4")]
    pub boot_id: String,
    #[prost(message, optional, tag = "5")]
    pub addresses: Option<ShardAddresses>,
    #[prost(uint64, tag = "6")]
    pub capacity_bytes: u64,
}

/// The leader has evidence that an incarnation is gone.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct ShardDown {
    #[prost(string, tag = "1")]
    pub id: String,
    #[prost(uint64, tag = "2")]
    pub incarnation: u64,
    #[prost(string, tag = "3")]
    pub reason: String,
}

/// New lists for some slots. Copies that were in-sync stay so, new ones start filling (whatever `in_sync` says).
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct PlanSlots {
    #[prost(string, tag = "1")]
    pub pool: String,
    /// Epoch that the plan was made from; another one refuses it.
    #[prost(uint64, tag = "2")]
    pub base_epoch: u64,
    #[prost(message, repeated, tag = "3")]
    pub ranges: Vec<SlotRange>,
    #[prost(string, tag = "4")]
    pub why: String,
}

/// Copies of these slots on this incarnation are complete. `copies` of the ranges are not used.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct SlotsInSync {
    #[prost(string, tag = "1")]
    pub pool: String,
    #[prost(string, tag = "2")]
    pub shard: String,
    #[prost(uint64, tag = "3")]
    pub incarnation: u64,
    #[prost(message, repeated, tag = "4")]
    pub ranges: Vec<SlotRange>,
    /// Epoch of the map that the shard filled by. Refused when a plan has taken a copy from this shard since: the report
    /// may be about a copy that was dropped and listed again.
    #[prost(uint64, tag = "5")]
    pub epoch: u64,
}

/// A process is the member of this name now. Its raft id is one disk life's and is never used again.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct AdmitMember {
    #[prost(uint64, tag = "1")]
    pub name: u64,
    /// `host:port` that the other members reach it at.
    #[prost(string, tag = "2")]
    pub address: String,
    /// Random, chosen by an empty process at start: the same one asks again and gets the same id.
    #[prost(string, tag = "3")]
    pub boot: String,
    /// The raft id on its disk; 0 = its disk is empty, hand out a new one.
    #[prost(uint64, tag = "4")]
    pub member_id: u64,
    #[prost(string, tag = "5")]
    pub why: String,
}

/// Settings of the group. A field that is 0 is left as it is.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct ConfigureGroup {
    /// Voters that are wanted: 1, 3 or 5.
    #[prost(uint32, tag = "1")]
    pub target_members: u32,
    /// What every member can do; only grows.
    #[prost(uint32, tag = "2")]
    pub feature_level: u32,
    #[prost(string, tag = "3")]
    pub why: String,
}

/// As [`ShardDown`], and counts how often that happened lately, for flap damping.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct ShardLost {
    #[prost(string, tag = "1")]
    pub id: String,
    #[prost(uint64, tag = "2")]
    pub incarnation: u64,
    #[prost(string, tag = "3")]
    pub reason: String,
}

/// Asks a shard to leave, or takes that back.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct DrainShard {
    #[prost(string, tag = "1")]
    pub id: String,
    /// `false`: it may take part in placement again.
    #[prost(bool, tag = "2")]
    pub out: bool,
    /// Who asked, and why.
    #[prost(string, tag = "3")]
    pub why: String,
}

/// The hash of the leader's state as of a revision. A member whose own differs stops.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct StateHash {
    #[prost(uint64, tag = "1")]
    pub revision: u64,
    #[prost(bytes = "vec", tag = "2")]
    pub hash: Vec<u8>,
}

/// A Draining shard holds no copy any more. Refused while a list names it.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct ShardDrained {
    #[prost(string, tag = "1")]
    pub id: String,
    #[prost(uint64, tag = "2")]
    pub incarnation: u64,
}

/// Forgets a shard that is Drained or Down.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct RemoveShard {
    #[prost(string, tag = "1")]
    pub id: String,
}

/// Allows any number of shards of a pool to be declared Down for a while.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct ReleaseBrake {
    #[prost(string, tag = "1")]
    pub pool: String,
    /// From now on in log time; at most [`crate::MAX_RELEASE_MS`].
    #[prost(uint64, tag = "2")]
    pub for_ms: u64,
}

/// Every command of this build.
#[derive(Clone, PartialEq, Eq, prost::Oneof)]
pub enum Command {
    #[prost(message, tag = "1")]
    CreateCluster(CreateCluster),
    #[prost(message, tag = "2")]
    ConfigurePool(ConfigurePool),
    #[prost(message, tag = "3")]
    RegisterShard(RegisterShard),
    #[prost(message, tag = "4")]
    ShardDown(ShardDown),
    #[prost(message, tag = "5")]
    PlanSlots(PlanSlots),
    #[prost(message, tag = "6")]
    SlotsInSync(SlotsInSync),
    #[prost(message, tag = "7")]
    AdmitMember(AdmitMember),
    #[prost(message, tag = "8")]
    ConfigureGroup(ConfigureGroup),
    #[prost(message, tag = "9")]
    StateHash(StateHash),
    #[prost(message, tag = "10")]
    ShardLost(ShardLost),
    #[prost(message, tag = "11")]
    DrainShard(DrainShard),
    #[prost(message, tag = "12")]
    ShardDrained(ShardDrained),
    #[prost(message, tag = "13")]
    RemoveShard(RemoveShard),
    #[prost(message, tag = "14")]
    ReleaseBrake(ReleaseBrake),
}

impl Command {
    fn kind(&self) -> u32 {
        match self {
            Command::CreateCluster(_) => 1,
            Command::ConfigurePool(_) => 2,
            Command::RegisterShard(_) => 3,
            Command::ShardDown(_) => 4,
            Command::PlanSlots(_) => 5,
            Command::SlotsInSync(_) => 6,
            Command::AdmitMember(_) => 7,
            Command::ConfigureGroup(_) => 8,
            Command::StateHash(_) => 9,
            Command::ShardLost(_) => 10,
            Command::DrainShard(_) => 11,
            Command::ShardDrained(_) => 12,
            Command::RemoveShard(_) => 13,
            Command::ReleaseBrake(_) => 14,
        }
    }

    fn body(&self) -> Vec<u8> {
        match self {
            Command::CreateCluster(c) => c.encode_to_vec(),
            Command::ConfigurePool(c) => c.encode_to_vec(),
            Command::RegisterShard(c) => c.encode_to_vec(),
            Command::ShardDown(c) => c.encode_to_vec(),
            Command::PlanSlots(c) => c.encode_to_vec(),
            Command::SlotsInSync(c) => c.encode_to_vec(),
            Command::AdmitMember(c) => c.encode_to_vec(),
            Command::ConfigureGroup(c) => c.encode_to_vec(),
            Command::StateHash(c) => c.encode_to_vec(),
            Command::ShardLost(c) => c.encode_to_vec(),
            Command::DrainShard(c) => c.encode_to_vec(),
            Command::ShardDrained(c) => c.encode_to_vec(),
            Command::RemoveShard(c) => c.encode_to_vec(),
            Command::ReleaseBrake(c) => c.encode_to_vec(),
        }
    }

    /// The feature level from which on it may be proposed, and the reader that it needs.
    #[must_use]
    pub fn level(&self) -> u32 {
        match self {
            Command::ConfigureGroup(c) => c.feature_level.max(2),
            other if other.kind() <= 6 => 1,
            _ => 2,
        }
    }

    /// The bytes of a log entry that holds this command.
    #[must_use]
    pub fn to_entry(&self, request: Option<RequestId>, proposed_at_ms: u64) -> Vec<u8> {
        Envelope {
            format: FORMAT,
            min_reader: self.level(),
            kind: self.kind(),
            body: self.body(),
            request,
            proposed_at_ms,
        }
        .encode_to_vec()
    }
}

/// Why a log entry can't be read. The member stops: applying past it would make it differ from the others.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DecodeError {
    #[error("failed to decode a log entry: {0}")]
    Malformed(String),
    #[error("failed to apply a log entry: it needs reader {needed}, this build has {READER}: upgrade this member")]
    TooNew { needed: u32 },
    #[error("failed to apply a log entry: unknown command kind {0}")]
    UnknownKind(u32),
}

/// Reads a log entry back.
///
/// # Errors
/// [`DecodeError`] when the bytes are damaged or from a newer build.
pub fn decode(entry: &[u8]) -> Result<(Command, Envelope), DecodeError> {
    let malformed = |e: prost::DecodeError| DecodeError::Malformed(e.to_string());
    let mut envelope = Envelope::decode(entry).map_err(malformed)?;
    if envelope.min_reader > READER {
        return Err(DecodeError::TooNew {
            needed: envelope.min_reader,
        });
    }
    let body = std::mem::take(&mut envelope.body);
    let body = body.as_slice();
    let command = match envelope.kind {
        1 => Command::CreateCluster(CreateCluster::decode(body).map_err(malformed)?),
        2 => Command::ConfigurePool(ConfigurePool::decode(body).map_err(malformed)?),
        3 => Command::RegisterShard(RegisterShard::decode(body).map_err(malformed)?),
        4 => Command::ShardDown(ShardDown::decode(body).map_err(malformed)?),
        5 => Command::PlanSlots(PlanSlots::decode(body).map_err(malformed)?),
        6 => Command::SlotsInSync(SlotsInSync::decode(body).map_err(malformed)?),
        7 => Command::AdmitMember(AdmitMember::decode(body).map_err(malformed)?),
        8 => Command::ConfigureGroup(ConfigureGroup::decode(body).map_err(malformed)?),
        9 => Command::StateHash(StateHash::decode(body).map_err(malformed)?),
        10 => Command::ShardLost(ShardLost::decode(body).map_err(malformed)?),
        11 => Command::DrainShard(DrainShard::decode(body).map_err(malformed)?),
        12 => Command::ShardDrained(ShardDrained::decode(body).map_err(malformed)?),
        13 => Command::RemoveShard(RemoveShard::decode(body).map_err(malformed)?),
        14 => Command::ReleaseBrake(ReleaseBrake::decode(body).map_err(malformed)?),
        other => return Err(DecodeError::UnknownKind(other)),
    };
    Ok((command, envelope))
}

/// Why a command changed nothing. The same words in errors, metrics and logs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, prost::Enumeration)]
#[repr(i32)]
pub enum Refusal {
    None = 0,
    /// A request id older than the window: it may have been applied long ago.
    RequestExpired = 1,
    AlreadyCreated = 2,
    NotCreated = 3,
    UnknownPool = 4,
    UnknownShard = 5,
    StaleEpoch = 6,
    StaleIncarnation = 7,
    Invalid = 8,
    /// A bounded table is full.
    Full = 9,
    /// The name belongs to another disk now.
    MemberReplaced = 10,
    /// The shard holds copies or may still get some.
    NotDrained = 15,
}

impl Refusal {
    /// The word in errors, metric labels and logs.
    #[must_use]
    pub fn word(self) -> &'static str {
        match self {
            Refusal::None => "none",
            Refusal::RequestExpired => "request_expired",
            Refusal::AlreadyCreated => "already_created",
            Refusal::NotCreated => "not_created",
            Refusal::UnknownPool => "unknown_pool",
            Refusal::UnknownShard => "unknown_shard",
            Refusal::StaleEpoch => "stale_epoch",
            Refusal::StaleIncarnation => "stale_incarnation",
            Refusal::Invalid => "invalid",
            Refusal::Full => "full",
            Refusal::MemberReplaced => "member_replaced",
            Refusal::NotDrained => "not_drained",
        }
    }
}

/// What a command answers. Equal requests get the recorded answer.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct Response {
    /// Log index of the entry that was applied (of the first one, for a repeated request).
    #[prost(uint64, tag = "1")]
    pub revision: u64,
    #[prost(enumeration = "Refusal", tag = "2")]
    pub refusal: i32,
    #[prost(string, tag = "3")]
    pub message: String,
    /// For a registration.
    #[prost(uint64, tag = "4")]
    pub incarnation: u64,
    /// Epoch of the pool afterwards, where a pool was named.
    #[prost(uint64, tag = "5")]
    pub epoch: u64,
}
