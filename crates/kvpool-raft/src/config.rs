//! Settings of a member, and the relations between them that are checked at start.
//!
//! The values and their reasons are in `docs/adr/0002-raft-log.md`; the invariants kept here: a follower
//! never campaigns because one heartbeat was late, a snapshot always cures a lagging follower, and the log
//! keeps many times more applied entries than the largest apply backlog (openraft issue 2116).

use std::time::Duration;

use openraft::SnapshotPolicy;

use crate::log::LogOptions;

/// The id of a member of the group; never reused after the member lost its disk.
pub type MemberId = u64;

/// Most proposals in flight on one member by default; beyond it they are refused as overload.
pub const MAX_IN_FLIGHT: usize = 1_024;
/// Largest command in bytes that can be proposed.
pub const MAX_COMMAND_BYTES: usize = 1 << 20;
/// Largest message in bytes that this crate hands to a transport or accepts from one.
pub const MAX_MESSAGE_BYTES: usize = 4 << 20;
/// Largest cluster id in bytes.
pub const MAX_CLUSTER_ID_BYTES: usize = 64;

/// Payload bytes in one append message; the first entry is sent even when it is larger.
pub(crate) const APPEND_BYTES: usize = 1 << 20;
/// Entries in one append message.
pub(crate) const APPEND_ENTRIES: u64 = 300;
/// Body bytes of a snapshot sent in one message.
pub(crate) const SNAPSHOT_CHUNK_BYTES: usize = 512 << 10;

/// How patient the group is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Timing {
    /// Heartbeat 100 ms, election 250–500 ms: a lost leader is replaced within about a second.
    #[default]
    Normal,
    /// Heartbeat 250 ms, election 750–1500 ms: for starved machines and for tests that are not about failover.
    Relaxed,
}

impl Timing {
    /// Time between two heartbeats of a leader.
    pub fn heartbeat(self) -> Duration {
        Duration::from_millis(match self {
            Timing::Normal => 100,
            Timing::Relaxed => 250,
        })
    }

    /// Least random wait of a follower before it campaigns.
    pub fn election_min(self) -> Duration {
        Duration::from_millis(match self {
            Timing::Normal => 250,
            Timing::Relaxed => 750,
        })
    }

    /// Greatest random wait, and the length of a leader's lease.
    pub fn election_max(self) -> Duration {
        Duration::from_millis(match self {
            Timing::Normal => 500,
            Timing::Relaxed => 1_500,
        })
    }
}

/// Settings of one member.
#[derive(Debug, Clone)]
pub struct Config {
    /// The cluster this member belongs to: 1 to [`MAX_CLUSTER_ID_BYTES`] bytes.
    pub cluster_id: String,
    /// The id of this member.
    pub member_id: MemberId,
    /// Heartbeat and election times.
    pub timing: Timing,
    /// Proposals in flight at once, [`MAX_IN_FLIGHT`] by default.
    pub max_in_flight: usize,
    /// Entries between two snapshots.
    pub snapshot_every: u64,
    /// Applied entries kept in the log for followers that lag.
    pub keep_applied: u64,
    /// Largest snapshot in bytes that is accepted from a leader.
    pub max_snapshot_bytes: u64,
    /// Sizes of the log's segments, batches and cache.
    pub log: LogOptions,
}

/// Settings that cannot work together.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    /// The cluster id is empty or too long.
    #[error("failed to accept the cluster id: it has {0} bytes, 1 to {MAX_CLUSTER_ID_BYTES} are allowed")]
    ClusterId(usize),
    /// A late heartbeat would start an election.
    #[error("failed to accept the timing: election minimum {election_min:?} is below 2.5 heartbeats of {heartbeat:?}")]
    ElectionTooShort {
        /// The least election time.
        election_min: Duration,
        /// The heartbeat.
        heartbeat: Duration,
    },
    /// Too few applied entries are kept behind a snapshot.
    #[error("failed to accept the log settings: {keep} applied entries are kept, at least {least} are needed")]
    KeepTooSmall {
        /// Entries kept.
        keep: u64,
        /// Entries needed.
        least: u64,
    },
    /// Log sizes that do not fit in each other.
    #[error("failed to accept the log settings: {0}")]
    Log(&'static str),
    /// The consensus library refused the settings.
    #[error("failed to accept the settings: {0}")]
    Library(String),
}

impl Config {
    /// Production settings for a member.
    pub fn new(cluster_id: impl Into<String>, member_id: MemberId, timing: Timing) -> Self {
        Config {
            cluster_id: cluster_id.into(),
            member_id,
            timing,
            max_in_flight: MAX_IN_FLIGHT,
            snapshot_every: 10_000,
            keep_applied: 100_000,
            max_snapshot_bytes: 4 << 30,
            log: LogOptions::default(),
        }
    }

    /// How long a proposal or a read is waited for before its outcome is called unknown.
    pub fn wait_bound(&self) -> Duration {
        self.timing.election_max() * 10
    }

    /// How long a snapshot transfer may stand still before it is given up.
    pub(crate) fn no_progress(&self) -> Duration {
        self.timing.election_max() * 10
    }

    /// Checks the relations and renders the library's settings.
    pub(crate) fn checked(&self) -> Result<openraft::Config, ConfigError> {
        let id = self.cluster_id.len();
        if id == 0 || id > MAX_CLUSTER_ID_BYTES {
            return Err(ConfigError::ClusterId(id));
        }
        let (heartbeat, min, max) = (
            self.timing.heartbeat(),
            self.timing.election_min(),
            self.timing.election_max(),
        );
        if min < heartbeat * 5 / 2 {
            return Err(ConfigError::ElectionTooShort {
                election_min: min,
                heartbeat,
            });
        }
        // Everything in flight may wait to be applied: ten times that is what must not be purged under it.
        let least = 10 * self.max_in_flight as u64;
        if self.keep_applied < least {
            return Err(ConfigError::KeepTooSmall {
                keep: self.keep_applied,
                least,
            });
        }
        self.log.check().map_err(ConfigError::Log)?;
        let max_ms = max.as_millis() as u64;
        let config = openraft::Config {
            cluster_name: self.cluster_id.clone(),
            heartbeat_interval: heartbeat.as_millis() as u64,
            election_timeout_min: min.as_millis() as u64,
            election_timeout_max: max_ms,
            // The library bounds the whole transfer by this; our own bound is on *no progress*.
            install_snapshot_timeout: 10 * 60 * 1_000,
            max_payload_entries: APPEND_ENTRIES,
            replication_lag_threshold: self.snapshot_every.saturating_mul(5),
            snapshot_policy: SnapshotPolicy::LogsSinceLast(self.snapshot_every),
            snapshot_max_chunk_size: SNAPSHOT_CHUNK_BYTES as u64,
            max_in_snapshot_log_to_keep: self.keep_applied,
            purge_batch_size: self.snapshot_every.max(1),
            api_channel_size: Some(self.max_in_flight.max(1) as u64),
            backoff: "20ms 50ms 100ms ...250ms".to_string(),
            quorum_loss_probe_interval: Some(2 * max_ms),
            enable_pre_vote: Some(true),
            enable_leader_restore: Some(false),
            ..openraft::Config::default()
        };
        config.validate().map_err(|e| ConfigError::Library(e.to_string()))
    }
}
