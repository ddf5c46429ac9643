//! Errors at the crate's boundary. A refusal carries its reason in the words of the metrics.

use std::io;
use std::time::Duration;

use crate::config::ConfigError;
use crate::status::Leader;

/// Damage found in a member's files, or a directory that is not this member's. The member must not run.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Damage {
    /// Bytes that were made durable are not what was written.
    #[error("failed to read {file} at offset {offset}: {what}; the file is corrupt, replace this member")]
    Corrupt {
        /// File name within the data directory.
        file: String,
        /// Byte offset of the damage.
        offset: u64,
        /// What is wrong there.
        what: String,
    },
    /// A file that must exist is not there.
    #[error("failed to find {0} in the data directory; data was lost, replace this member")]
    Missing(String),
    /// A whole file of a newer version.
    #[error(
        "failed to read {file}: it has format {found}, this build reads formats up to {known}; run a newer version"
    )]
    TooNew {
        /// File name within the data directory.
        file: String,
        /// Format found.
        found: u32,
        /// Newest format that this build reads.
        known: u32,
    },
    /// The directory belongs to another member or cluster.
    #[error(
        "failed to accept the data directory: it belongs to member {found_member} of cluster {found_cluster:?}, \
         not to member {member} of cluster {cluster:?}"
    )]
    Foreign {
        /// Cluster expected.
        cluster: String,
        /// Member expected.
        member: u64,
        /// Cluster in the marker.
        found_cluster: String,
        /// Member in the marker.
        found_member: u64,
    },
    /// There is a log but no marker that says whose it is.
    #[error("failed to find the marker of a data directory that holds a log; it was lost or moved")]
    MarkerLost,
}

/// Why a disk operation of the log failed.
#[derive(Debug, thiserror::Error)]
pub enum LogError {
    /// The disk said no.
    #[error("failed to {what}: {source}")]
    Io {
        /// The step.
        what: String,
        /// The disk's error.
        source: io::Error,
    },
    /// The files are damaged.
    #[error(transparent)]
    Damage(#[from] Damage),
}

impl LogError {
    pub(crate) fn io(what: impl Into<String>) -> impl FnOnce(io::Error) -> LogError {
        let what = what.into();
        move |source| LogError::Io { what, source }
    }
}

impl From<LogError> for io::Error {
    fn from(e: LogError) -> io::Error {
        let kind = match &e {
            LogError::Io { source, .. } => source.kind(),
            LogError::Damage(_) => io::ErrorKind::InvalidData,
        };
        io::Error::new(kind, e)
    }
}

/// Why a member did not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// Settings that cannot work.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The log could not be opened.
    #[error(transparent)]
    Log(#[from] LogError),
    /// The state could not be rebuilt from snapshot and log.
    #[error("failed to start the member: {0}")]
    Raft(String),
}

/// Why a proposal was not confirmed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ProposeError {
    /// Not applied: this member does not lead. Ask the leader, if known.
    #[error("failed to propose: this member is not the leader")]
    NotLeader {
        /// The leader this member knows of.
        leader: Option<Leader>,
    },
    /// Not applied: too many proposals in flight.
    #[error("failed to propose: overload, retry after {retry_after:?}")]
    Overloaded {
        /// When to try again.
        retry_after: Duration,
    },
    /// Not applied: the leader has not heard from a quorum lately. Retry; there is no better member to name.
    #[error("failed to propose: the leader's lease has expired")]
    LeaseExpired,
    /// Not applied: the command is larger than allowed.
    #[error("failed to propose: the command has {bytes} bytes, {limit} are allowed")]
    TooLarge {
        /// Bytes proposed.
        bytes: usize,
        /// Bytes allowed.
        limit: usize,
    },
    /// May or may not be applied, now or later: retry with the same request id.
    #[error("failed to learn whether the proposal was applied: {0}")]
    Unknown(&'static str),
    /// The member has stopped for good; the process must exit.
    #[error("failed to propose: the member has stopped: {0}")]
    Fatal(String),
}

impl ProposeError {
    /// The reason as metrics and logs spell it.
    pub fn reason(&self) -> &'static str {
        match self {
            ProposeError::NotLeader { .. } => "not_leader",
            ProposeError::Overloaded { .. } => "overload",
            ProposeError::LeaseExpired => "lease_expired",
            ProposeError::TooLarge { .. } => "size",
            ProposeError::Unknown(_) => "unknown",
            ProposeError::Fatal(_) => "fatal",
        }
    }
}

/// Why a linearizable read was refused. A refused read has no effect and may be tried again.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ReadError {
    /// This member does not lead. Ask the leader, if known.
    #[error("failed to read: this member is not the leader")]
    NotLeader {
        /// The leader this member knows of.
        leader: Option<Leader>,
    },
    /// Leadership was not confirmed by a quorum.
    #[error("failed to read: no quorum confirmed the leader")]
    NoQuorum,
    /// The member has stopped for good; the process must exit.
    #[error("failed to read: the member has stopped: {0}")]
    Fatal(String),
}

impl ReadError {
    /// The reason as metrics and logs spell it.
    pub fn reason(&self) -> &'static str {
        match self {
            ReadError::NotLeader { .. } => "not_leader",
            ReadError::NoQuorum => "no_quorum",
            ReadError::Fatal(_) => "fatal",
        }
    }
}

/// Why the group was not created.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum InitializeError {
    /// There must be 1, 3 or 5 members, this one among them.
    #[error("failed to initialize: {0}")]
    Members(String),
    /// This member already belongs to a group.
    #[error("failed to initialize: this member already belongs to a group")]
    AlreadyInitialized,
    /// The membership was written but no quorum confirmed it in time; it may still become committed.
    #[error("failed to learn whether the membership was committed in time")]
    Unconfirmed,
    /// The member has stopped for good; the process must exit.
    #[error("failed to initialize: the member has stopped: {0}")]
    Fatal(String),
}

/// Why a change of the membership was not even proposed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ChangeRefusal {
    /// Only a leader changes the group.
    #[error("this member does not lead")]
    NotLeading,
    /// Another change is not finished.
    #[error("another change of the membership is under way")]
    InProgress,
    /// The change would take out the leader that makes it.
    #[error("the leader must hand over before it can leave")]
    Leads,
    /// Too few or too many voters.
    #[error("a group has 1 to {max} voters, not {0}", max = crate::change::MAX_VOTERS)]
    Size(usize),
    /// A voter is made of a learner only.
    #[error("member {0} is not in the group")]
    NotAMember(u64),
    /// It would count before it can help.
    #[error("member {0} does not answer or lacks too much of the log to vote")]
    NotCaughtUp(u64),
    /// The change could not be committed, or nothing after it.
    #[error("only {sound} of the {of} {which} voters answer and have the log: that is no majority")]
    NoMajority {
        /// `old` or `new`.
        which: &'static str,
        /// Voters that answer and have the log.
        sound: usize,
        /// All of them.
        of: usize,
    },
    /// The consensus library refused.
    #[error("{0}")]
    Library(String),
}

/// Why a change of the membership was not confirmed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ChangeError {
    /// Nothing was changed.
    #[error("failed to change the membership: {0}")]
    Refused(#[from] ChangeRefusal),
    /// Nothing was changed: ask the leader, if known.
    #[error("failed to change the membership: this member is not the leader")]
    NotLeader {
        /// The leader this member knows of.
        leader: Option<Leader>,
    },
    /// It may be done, half done (see [`crate::Status::joint`]) or not.
    #[error("failed to learn whether the membership was changed: {0}")]
    Unknown(String),
    /// The member has stopped for good; the process must exit.
    #[error("failed to change the membership: the member has stopped: {0}")]
    Fatal(String),
}

/// Why a message from another member was not answered.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum HandleError {
    /// Not a message of this crate, or too large.
    #[error("failed to understand the message: {0}")]
    Malformed(&'static str),
    /// Meant for another member or cluster.
    #[error("failed to accept the message: it is for member {to} of cluster {cluster:?}")]
    Misdirected {
        /// The member it is for.
        to: u64,
        /// The cluster it is for.
        cluster: String,
    },
    /// A snapshot that this member cannot take now or at all.
    #[error("failed to take the snapshot: {0}")]
    Snapshot(String),
    /// The member has stopped for good; the process must exit.
    #[error("failed to handle the message: the member has stopped: {0}")]
    Fatal(String),
}
