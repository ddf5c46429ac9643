//! Metadata keys, and refusals: a status with its reason as a word, the same word as in metrics and logs.

use std::time::Duration;
use tonic::metadata::{AsciiMetadataValue, MetadataMap};
use tonic::{Code, Status};

/// Carries the join token (binary, so that any token can be sent).
pub const TOKEN: &str = "kvpool-token-bin";
/// Marks a call that a member has forwarded: it is never forwarded again.
pub const FORWARDED: &str = "kvpool-forwarded";
/// The reason of a refusal.
pub const REASON: &str = "kvpool-reason";
/// `host:port` of the leader, where a refusal can name it.
pub const LEADER: &str = "kvpool-leader";
/// Milliseconds to wait before a retry.
pub const RETRY_MS: &str = "kvpool-retry-ms";

/// Why a call was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Reason {
    /// The join token is not this cluster's.
    JoinToken,
    /// The caller's certificate does not allow it.
    NotAllowed,
    /// The caller names another cluster.
    ClusterId,
    /// The asked member does not lead; the leader may be named.
    NotLeader,
    /// No leader right now: an election, or a leader whose lease has run out. Retry soon.
    LeaseExpired,
    /// A quorum of the members has been out of contact for a while.
    NoQuorum,
    /// Too much in flight. Retry after the time given.
    Overload,
    /// The cluster has not been created yet.
    NoCluster,
    /// It may or may not have happened: retry with the same request id.
    Unknown,
    /// The call makes no sense.
    Invalid,
    /// Another process with this shard id has a live session.
    DuplicateShard,
    /// The session's incarnation is not the shard's newest one any more.
    StaleIncarnation,
    /// The member is shutting down or has failed.
    Stopping,
}

impl Reason {
    /// Every reason, for metrics.
    pub const ALL: [Reason; 13] = [
        Reason::JoinToken,
        Reason::NotAllowed,
        Reason::ClusterId,
        Reason::NotLeader,
        Reason::LeaseExpired,
        Reason::NoQuorum,
        Reason::Overload,
        Reason::NoCluster,
        Reason::Unknown,
        Reason::Invalid,
        Reason::DuplicateShard,
        Reason::StaleIncarnation,
        Reason::Stopping,
    ];

    /// The word in metadata, metric labels and logs.
    #[must_use]
    pub fn word(self) -> &'static str {
        match self {
            Reason::JoinToken => "join_token",
            Reason::NotAllowed => "not_allowed",
            Reason::ClusterId => "cluster_id",
            Reason::NotLeader => "not_leader",
            Reason::LeaseExpired => "lease_expired",
            Reason::NoQuorum => "no_quorum",
            Reason::Overload => "overload",
            Reason::NoCluster => "no_cluster",
            Reason::Unknown => "unknown",
            Reason::Invalid => "invalid",
            Reason::DuplicateShard => "duplicate_shard",
            Reason::StaleIncarnation => "stale_incarnation",
            Reason::Stopping => "stopping",
        }
    }

    fn code(self) -> Code {
        match self {
            Reason::JoinToken => Code::Unauthenticated,
            Reason::NotAllowed => Code::PermissionDenied,
            Reason::ClusterId | Reason::StaleIncarnation => Code::FailedPrecondition,
            Reason::DuplicateShard => Code::AlreadyExists,
            Reason::Overload => Code::ResourceExhausted,
            Reason::Unknown => Code::DeadlineExceeded,
            Reason::Invalid => Code::InvalidArgument,
            Reason::NotLeader | Reason::LeaseExpired | Reason::NoQuorum | Reason::NoCluster | Reason::Stopping => {
                Code::Unavailable
            }
        }
    }
}

/// A refused call: what a server says and a client reads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refused {
    pub reason: Reason,
    pub message: String,
    /// `host:port` of the leader.
    pub leader: Option<String>,
    pub retry_after: Option<Duration>,
}

impl Refused {
    #[must_use]
    pub fn new(reason: Reason, message: impl Into<String>) -> Self {
        let message = message.into();
        Refused {
            reason,
            message,
            leader: None,
            retry_after: None,
        }
    }

    #[must_use]
    pub fn with_leader(mut self, leader: Option<String>) -> Self {
        self.leader = leader;
        self
    }

    #[must_use]
    pub fn with_retry_after(mut self, after: Duration) -> Self {
        self.retry_after = Some(after);
        self
    }

    /// Reads a refusal back. `None` when the status is not one: a broken connection, another server, a newer word.
    #[must_use]
    pub fn from_status(status: &Status) -> Option<Self> {
        let text = |key| status.metadata().get(key).and_then(|v| v.to_str().ok());
        let word = text(REASON)?;
        let reason = Reason::ALL.into_iter().find(|r| r.word() == word)?;
        let leader = text(LEADER).filter(|l| !l.is_empty()).map(str::to_owned);
        let retry_after = text(RETRY_MS).and_then(|t| t.parse().ok()).map(Duration::from_millis);
        Some(Refused {
            reason,
            message: status.message().to_owned(),
            leader,
            retry_after,
        })
    }
}

impl From<Refused> for Status {
    fn from(refused: Refused) -> Status {
        let mut metadata = MetadataMap::new();
        metadata.insert(REASON, AsciiMetadataValue::from_static(refused.reason.word()));
        let leader = refused.leader.and_then(|l| AsciiMetadataValue::try_from(l).ok());
        if let Some(leader) = leader {
            metadata.insert(LEADER, leader);
        }
        if let Some(after) = refused.retry_after {
            let ms = u64::try_from(after.as_millis()).unwrap_or(u64::MAX);
            metadata.insert(RETRY_MS, AsciiMetadataValue::from(ms));
        }
        Status::with_metadata(refused.reason.code(), refused.message, metadata)
    }
}
