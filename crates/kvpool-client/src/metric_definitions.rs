//! Names of this crate's metrics.

use metrics::{describe_counter, describe_gauge};

/// Attempts that failed and were repeated, by call and reason.
pub const RETRIES: &str = "kvpool_client_retries_total";
/// Watches begun anew, by reason.
pub const WATCH_RESTARTS: &str = "kvpool_client_watch_restarts_total";
/// Sessions of this shard that ended, by reason.
pub const SESSION_ENDS: &str = "kvpool_client_session_ends_total";
/// 1 while the shard's session stands.
pub const SESSION_UP: &str = "kvpool_client_session_up";
/// Slots whose in-sync report the leader has not confirmed yet.
pub const REPORT_DEPTH: &str = "kvpool_client_report_slots";
/// Epoch of the slot map held.
pub const EPOCH: &str = "kvpool_client_slot_map_epoch";
/// Revision seen by the newest watch.
pub const REVISION: &str = "kvpool_client_watch_revision";

/// Registers the descriptions; a repeated call changes nothing.
pub fn describe_metrics() {
    describe_counter!(RETRIES, "Attempts of unary calls that failed and were repeated");
    describe_counter!(WATCH_RESTARTS, "Watches begun anew");
    describe_counter!(SESSION_ENDS, "Shard sessions that ended");
    describe_gauge!(SESSION_UP, "1 while the shard's session with the leader stands");
    describe_gauge!(REPORT_DEPTH, "Slots with an in-sync report that is not confirmed yet");
    describe_gauge!(EPOCH, "Epoch of the slot map held by this process");
    describe_gauge!(REVISION, "Revision up to which the watch has seen everything");
}
