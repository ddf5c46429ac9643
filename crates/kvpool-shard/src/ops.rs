//! The seam between front ends and routing: one client request, its answers, and the words for what went wrong.
//!
//! Front ends know protocols, routing knows copies; neither knows the other's business. Every call here ends within the
//! operation's deadlines, whatever peers do, and none of them fails: trouble is a miss or a dropped write, with a reason.

use std::time::Duration;

use kvpool_wire::lm::LmMeta;
use tokio::time::Instant;

pub use crate::body::{Body, BodyLost, Piece};
pub use crate::router::Router;
pub use crate::sink::PutSink;
pub use kvpool_store::{Condition, Usual};

/// Longest time from the start of an operation to its answer or the first byte of it. Part of the product's promise.
pub const OP_DEADLINE: Duration = Duration::from_millis(500);
/// How long the primary has for its first byte before another copy is asked too.
pub const FIRST_COPY_DEADLINE: Duration = Duration::from_millis(150);
/// Longest pause of a body under way when no other copy can take over.
pub const BODY_STALL: Duration = Duration::from_secs(2);
/// Longest time a finished upload waits for its second copy.
pub const SECOND_COPY_DEADLINE: Duration = Duration::from_millis(250);
/// Longest pause of an onward connection of an upload.
pub const ONWARD_STALL: Duration = Duration::from_millis(100);
/// How long EXISTS keeps a block from eviction, when there is room for the lease.
pub const LEASE: Duration = Duration::from_secs(30);

/// Which door an operation came through.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Front {
    /// RESP2 or RESP3.
    Resp,
    /// `lm://`.
    Lm,
    /// Another shard or a proxy.
    Peer,
}

/// One client request as routing sees it.
#[derive(Clone, Copy, Debug)]
pub struct Op {
    /// Random; names the operation in spans, slow logs and peer frames of every process it passes.
    pub request_id: u64,
    /// When it began; deadlines count from here.
    pub started: Instant,
    /// Generation of the pool that was current then.
    pub generation: u64,
    /// Its door.
    pub front: Front,
}

/// `lm://` metadata of a block; `None` when it was stored by RESP.
pub type BlockMeta = Option<LmMeta>;

/// What a reply says about a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockInfo {
    /// Bytes of the value.
    pub len: u64,
    /// The write that made it.
    pub write_id: u64,
    /// What the `lm://` writer said of it.
    pub meta: BlockMeta,
    /// Copies known to hold this very write.
    pub copies: u8,
}

/// Why a read found nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MissReason {
    /// Never stored, removed or expired.
    Absent,
    /// It had to make room.
    Evicted,
    /// No process that holds the slot could be asked.
    OwnerDown,
    /// Nobody answered in time.
    Deadline,
    /// The block has another length than the client can take.
    Size,
    /// The request belongs to another generation of the pool.
    Generation,
    /// A bound (memory or connections) was reached.
    Shed,
}

impl MissReason {
    /// The word in metric labels and logs.
    #[must_use]
    pub fn word(self) -> &'static str {
        match self {
            MissReason::Absent => "absent",
            MissReason::Evicted => "evicted",
            MissReason::OwnerDown => "owner_down",
            MissReason::Deadline => "deadline",
            MissReason::Size => "size",
            MissReason::Generation => "generation",
            MissReason::Shed => "shed",
        }
    }
}

/// Why a write was dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DropReason {
    /// Longer than a shard takes.
    Size,
    /// A bound (memory or connections) was reached.
    Shed,
    /// No process that holds the slot could be reached.
    OwnerDown,
    /// The onward connection stopped, or the upload did.
    Stalled,
    /// The request belongs to another generation of the pool.
    Generation,
    /// The process asked is not in the slot's list.
    NotOwner,
}

impl DropReason {
    /// The word in metric labels and logs.
    #[must_use]
    pub fn word(self) -> &'static str {
        match self {
            DropReason::Size => "size",
            DropReason::Shed => "shed",
            DropReason::OwnerDown => "owner_down",
            DropReason::Stalled => "stalled",
            DropReason::Generation => "generation",
            DropReason::NotOwner => "not_owner",
        }
    }
}

/// The way a hit came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Path {
    /// From this process' own store.
    Local,
    /// From the slot's primary.
    Forwarded,
    /// From another copy, because the primary was slow or gone.
    Replica,
}

impl Path {
    /// The word in metric labels and logs.
    #[must_use]
    pub fn word(self) -> &'static str {
        match self {
            Path::Local => "local",
            Path::Forwarded => "forwarded",
            Path::Replica => "replica",
        }
    }
}

/// Answer to a GET.
#[derive(Debug)]
pub enum GetAnswer {
    /// The block; its bytes follow through `body`.
    Hit {
        /// About the block.
        info: BlockInfo,
        /// Usual length of the key's prefix.
        usual: Usual,
        /// The bytes.
        body: Body,
        /// The way they come.
        path: Path,
    },
    /// No block.
    Miss {
        /// Why.
        reason: MissReason,
        /// Usual length of the key's prefix.
        usual: Usual,
    },
}

/// Answer to an EXISTS.
#[derive(Clone, Copy, Debug)]
pub struct ExistsAnswer {
    /// The block, if it is there.
    pub hit: Option<BlockInfo>,
    /// Usual length of the key's prefix.
    pub usual: Usual,
    /// Why not, if it is not.
    pub reason: Option<MissReason>,
}

/// What a write announces before its bytes.
#[derive(Clone, Copy, Debug)]
pub struct PutSpec {
    /// Bytes of the value.
    pub len: u64,
    /// `lm://` metadata.
    pub meta: BlockMeta,
    /// Time to live; `None` for ever.
    pub ttl: Option<Duration>,
    /// When the write may happen.
    pub condition: Condition,
}

/// What became of a write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PutOutcome {
    /// Two copies or more hold it.
    Stored2,
    /// One copy holds it: degraded, or a pool of factor 1.
    Stored1,
    /// Nobody holds it.
    Dropped(DropReason),
    /// The condition did not hold.
    ConditionFailed,
}

/// Answer to a TTL.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ttl {
    /// No such key.
    NoKey,
    /// It never expires.
    NoExpiry,
    /// Time left.
    Remaining(Duration),
}
