//! Records of the replicated state, as hand-tagged prost messages. `proto/kvpool/v1/records.proto` declares the same
//! messages; the generated services use these very types, and golden bytes in the tests hold both together.
//!
//! Tags are never reused. Sizes are bytes, times are milliseconds of log time (Unix epoch).

use std::collections::BTreeMap;

/// The cluster itself. One per state.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct ClusterRecord {
    /// Random UUID, chosen at first boot.
    #[prost(string, tag = "1")]
    pub cluster_id: String,
    /// Raised by `recover` and `restore`.
    #[prost(uint64, tag = "2")]
    pub cluster_generation: u64,
    #[prost(uint64, tag = "3")]
    pub created_at_ms: u64,
    /// Highest command format the leader may propose.
    #[prost(uint32, tag = "4")]
    pub feature_level: u32,
    /// Voters that are wanted: 1, 3 or 5; 0 = not said yet.
    #[prost(uint32, tag = "5")]
    pub target_members: u32,
    /// The next raft id to hand out; 0 = none was yet.
    #[prost(uint64, tag = "6")]
    pub next_member_id: u64,
    /// Revision that `state_hash` is of; 0 = none yet.
    #[prost(uint64, tag = "7")]
    pub hashed_revision: u64,
    /// BLAKE3 of the state's snapshot.
    #[prost(bytes = "vec", tag = "8")]
    pub state_hash: Vec<u8>,
}

/// What a coordinator is wanted to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, prost::Enumeration)]
#[repr(i32)]
pub enum MemberRole {
    Unspecified = 0,
    /// One of the lowest `target_members` names.
    Voter = 1,
    /// Beyond the target.
    Idle = 2,
}

impl MemberRole {
    /// The word in CLI tables and logs.
    #[must_use]
    pub fn word(self) -> &'static str {
        match self {
            MemberRole::Unspecified => "unspecified",
            MemberRole::Voter => "voter",
            MemberRole::Idle => "idle",
        }
    }
}

/// A coordinator by its stable name. Never forgotten, so that an old disk is known when it comes back.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct MemberRecord {
    /// Its number in the list of members (the StatefulSet's ordinal); stays when its disk is lost.
    #[prost(uint64, tag = "1")]
    pub name: u64,
    /// Its raft id: unique per life of its disk.
    #[prost(uint64, tag = "2")]
    pub id: u64,
    /// `host:port`.
    #[prost(string, tag = "3")]
    pub address: String,
    /// Of the empty process that got the id; empty for a member of the first boot.
    #[prost(string, tag = "4")]
    pub boot: String,
    #[prost(enumeration = "MemberRole", tag = "5")]
    pub role: i32,
    #[prost(uint64, tag = "6")]
    pub since_ms: u64,
    /// Why it is what it is, for people.
    #[prost(string, tag = "7")]
    pub reason: String,
}

/// A machine with cache memory.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct NodeRecord {
    #[prost(string, tag = "1")]
    pub id: String,
    #[prost(string, tag = "2")]
    pub zone: String,
    #[prost(btree_map = "string, string", tag = "3")]
    pub labels: BTreeMap<String, String>,
}

/// Membership state of a shard.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, prost::Enumeration)]
#[repr(i32)]
pub enum ShardState {
    Unspecified = 0,
    Up = 1,
    Down = 2,
    /// Up, and asked to leave: it gets no new copies, and those it has move away.
    Draining = 3,
    /// Up, and holds no copy any more.
    Drained = 4,
    /// The last word about a shard that is no longer a record. Lists don't show it.
    Removed = 5,
}

impl ShardState {
    /// The word in CLI tables, logs and metric labels.
    #[must_use]
    pub fn word(self) -> &'static str {
        match self {
            ShardState::Unspecified => "Unspecified",
            ShardState::Up => "Up",
            ShardState::Down => "Down",
            ShardState::Draining => "Draining",
            ShardState::Drained => "Drained",
            ShardState::Removed => "Removed",
        }
    }

    /// Its incarnation is in force: it may have a session and stand in lists.
    #[must_use]
    pub fn is_up(self) -> bool {
        matches!(self, ShardState::Up | ShardState::Draining | ShardState::Drained)
    }
}

/// One cache-server process.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct ShardRecord {
    #[prost(string, tag = "1")]
    pub id: String,
    #[prost(string, tag = "2")]
    pub node: String,
    #[prost(string, tag = "3")]
    pub pool: String,
    /// Small stable number of this shard id; slot lists name shards by it.
    #[prost(uint32, tag = "4")]
    pub number: u32,
    /// Random, chosen by the process at start.
    #[prost(string, tag = "5")]
    pub boot_id: String,
    /// Handed out by the committed registration (its log index).
    #[prost(uint64, tag = "6")]
    pub incarnation: u64,
    #[prost(message, optional, tag = "7")]
    pub addresses: Option<ShardAddresses>,
    #[prost(uint64, tag = "8")]
    pub capacity_bytes: u64,
    #[prost(enumeration = "ShardState", tag = "9")]
    pub state: i32,
    #[prost(uint64, tag = "10")]
    pub since_ms: u64,
    /// Why the shard is in its state, for people.
    #[prost(string, tag = "11")]
    pub reason: String,
    /// Asked to leave: it takes no part in placement, whatever becomes of its process, until that is taken back.
    #[prost(bool, tag = "12")]
    pub out: bool,
    /// How often it went Down, each time within [`crate::DOWNS_WINDOW_MS`] of the time before.
    #[prost(uint32, tag = "13")]
    pub downs: u32,
    #[prost(uint64, tag = "14")]
    pub last_down_ms: u64,
}

impl ShardRecord {
    /// Its incarnation is in force.
    #[must_use]
    pub fn is_up(&self) -> bool {
        self.state().is_up()
    }
}

/// Where a shard listens, each `host:port`; empty = not offered.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct ShardAddresses {
    /// Shard-to-shard protocol.
    #[prost(string, tag = "1")]
    pub peer: String,
    #[prost(string, tag = "2")]
    pub resp: String,
    #[prost(string, tag = "3")]
    pub lm: String,
    #[prost(string, tag = "4")]
    pub http: String,
}

/// A named set of shards.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct PoolRecord {
    #[prost(string, tag = "1")]
    pub name: String,
    /// Copies of each slot that are aimed for, 1..=MAX_FACTOR.
    #[prost(uint32, tag = "2")]
    pub factor: u32,
    /// Namespace generation; one for the whole pool before models exist. Raised to invalidate.
    #[prost(uint64, tag = "3")]
    pub generation: u64,
    /// Until this log time a person has allowed any number of shards to be declared Down.
    #[prost(uint64, tag = "4")]
    pub brake_released_until_ms: u64,
}

/// One copy in a slot's list.
#[derive(Clone, Copy, PartialEq, Eq, Hash, prost::Message)]
pub struct SlotCopy {
    /// [`ShardRecord::number`].
    #[prost(uint32, tag = "1")]
    pub shard: u32,
    /// `false` = filling.
    #[prost(bool, tag = "2")]
    pub in_sync: bool,
}

/// Slots `first..=last` that share one list, primary first. An empty list: nobody holds the slot.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct SlotRange {
    #[prost(uint32, tag = "1")]
    pub first: u32,
    #[prost(uint32, tag = "2")]
    pub last: u32,
    #[prost(message, repeated, tag = "3")]
    pub copies: Vec<SlotCopy>,
}

/// What a data-plane process needs to know of a shard of its pool.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct MapShard {
    #[prost(uint32, tag = "1")]
    pub number: u32,
    #[prost(string, tag = "2")]
    pub id: String,
    #[prost(uint64, tag = "3")]
    pub incarnation: u64,
    #[prost(string, tag = "4")]
    pub node: String,
    #[prost(string, tag = "5")]
    pub peer: String,
    #[prost(bool, tag = "6")]
    pub up: bool,
    /// Last epoch at which a plan took a copy from this incarnation, 0 = never. A shard whose map was older than that may
    /// hold leftovers of a slot that went and came back.
    #[prost(uint64, tag = "7")]
    pub dropped_at: u64,
}

/// The slot map of a pool, complete in itself: the one record that shards and proxies route by.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct SlotMap {
    #[prost(string, tag = "1")]
    pub pool: String,
    #[prost(string, tag = "2")]
    pub cluster_id: String,
    #[prost(uint64, tag = "3")]
    pub cluster_generation: u64,
    /// Grows with every change of lists, shards or generation.
    #[prost(uint64, tag = "4")]
    pub epoch: u64,
    #[prost(uint64, tag = "5")]
    pub generation: u64,
    #[prost(uint32, tag = "6")]
    pub factor: u32,
    #[prost(message, repeated, tag = "7")]
    pub shards: Vec<MapShard>,
    #[prost(message, repeated, tag = "8")]
    pub ranges: Vec<SlotRange>,
}

/// A committed choice, for `kvpool explain`. Its number is the log index.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct Decision {
    #[prost(uint64, tag = "1")]
    pub number: u64,
    #[prost(uint64, tag = "2")]
    pub at_ms: u64,
    #[prost(string, tag = "3")]
    pub what: String,
    #[prost(string, tag = "4")]
    pub why: String,
}

/// A request id with the time it was made: a retried write is told from a new one by it (R2).
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, prost::Message)]
pub struct RequestId {
    #[prost(uint64, tag = "1")]
    pub created_at_ms: u64,
    /// Random per client process.
    #[prost(uint64, tag = "2")]
    pub client: u64,
    #[prost(uint64, tag = "3")]
    pub sequence: u64,
}

/// What changed, for watchers. One per changed record and revision.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct Event {
    #[prost(uint64, tag = "1")]
    pub revision: u64,
    #[prost(oneof = "Record", tags = "2, 3, 4, 5, 6, 7")]
    pub record: Option<Record>,
}

/// Any record that can be listed and watched.
#[derive(Clone, PartialEq, Eq, prost::Oneof)]
pub enum Record {
    #[prost(message, tag = "2")]
    Cluster(ClusterRecord),
    #[prost(message, tag = "3")]
    Node(NodeRecord),
    #[prost(message, tag = "4")]
    Shard(ShardRecord),
    #[prost(message, tag = "5")]
    Pool(PoolRecord),
    #[prost(message, tag = "6")]
    Slots(SlotMap),
    #[prost(message, tag = "7")]
    Member(MemberRecord),
}
