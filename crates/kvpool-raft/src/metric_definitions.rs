//! Names of this crate's metrics.

use metrics::{Unit, describe_counter, describe_gauge, describe_histogram};

/// Seconds to write and sync one batch of the log.
pub const FSYNC_SECONDS: &str = "kvpool_raft_fsync_seconds";
/// Seconds from proposing to the applied response, on the leader.
pub const COMMIT_SECONDS: &str = "kvpool_raft_commit_seconds";
/// Seconds to apply one entry.
pub const APPLY_SECONDS: &str = "kvpool_raft_apply_seconds";
/// Bytes written to the log.
pub const LOG_BYTES_TOTAL: &str = "kvpool_raft_log_bytes_total";
/// Entries that a follower lacks, by follower, on the leader.
pub const LAG_ENTRIES: &str = "kvpool_raft_lag_entries";
/// Entries committed but not applied on this member.
pub const APPLY_LAG_ENTRIES: &str = "kvpool_raft_apply_lag_entries";
/// Changes of the leader this member knows of.
pub const LEADER_CHANGES_TOTAL: &str = "kvpool_raft_leader_changes_total";
/// The term of this member.
pub const TERM: &str = "kvpool_raft_term_count";
/// 1 while this member leads.
pub const IS_LEADER: &str = "kvpool_raft_is_leader_count";
/// Proposals and reads refused, by reason.
pub const REFUSED_TOTAL: &str = "kvpool_raft_refused_total";
/// Proposals in flight.
pub const IN_FLIGHT: &str = "kvpool_raft_in_flight_count";
/// Messages that got no reply, by lane and cause.
pub const SEND_FAILURES_TOTAL: &str = "kvpool_raft_send_failures_total";
/// Snapshots, by what was done: built, sent, received.
pub const SNAPSHOTS_TOTAL: &str = "kvpool_raft_snapshots_total";
/// Bytes of the newest snapshot.
pub const SNAPSHOT_BYTES: &str = "kvpool_raft_snapshot_bytes";

/// Describes all of them to the installed recorder.
pub fn describe_metrics() {
    describe_histogram!(
        FSYNC_SECONDS,
        Unit::Seconds,
        "Time to write and sync one batch of the log"
    );
    describe_histogram!(
        COMMIT_SECONDS,
        Unit::Seconds,
        "Time from proposing to the applied response"
    );
    describe_histogram!(APPLY_SECONDS, Unit::Seconds, "Time to apply one entry");
    describe_counter!(LOG_BYTES_TOTAL, Unit::Bytes, "Bytes written to the log");
    describe_gauge!(LAG_ENTRIES, Unit::Count, "Entries that a follower lacks, by follower");
    describe_gauge!(APPLY_LAG_ENTRIES, Unit::Count, "Entries committed but not applied here");
    describe_counter!(LEADER_CHANGES_TOTAL, Unit::Count, "Changes of the known leader");
    describe_gauge!(TERM, Unit::Count, "Term of this member");
    describe_gauge!(IS_LEADER, Unit::Count, "1 while this member leads");
    describe_counter!(REFUSED_TOTAL, Unit::Count, "Proposals and reads refused, by reason");
    describe_gauge!(IN_FLIGHT, Unit::Count, "Proposals in flight");
    describe_counter!(
        SEND_FAILURES_TOTAL,
        Unit::Count,
        "Messages without a reply, by lane and cause"
    );
    describe_counter!(SNAPSHOTS_TOTAL, Unit::Count, "Snapshots built, sent, received");
    describe_gauge!(SNAPSHOT_BYTES, Unit::Bytes, "Bytes of the newest snapshot");
}
