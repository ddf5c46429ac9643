//! Names of this crate's metrics. Labels are bounded: reasons, rules and kinds are enums, pools are at most 64.

use metrics::{describe_counter, describe_gauge};

/// Times that this member began to lead.
pub const LEADER_CHANGES: &str = "kvpool_coordinator_leader_changes_total";
/// 1 while this member leads.
pub const IS_LEADER: &str = "kvpool_coordinator_is_leader";
/// Raft term of this member.
pub const TERM: &str = "kvpool_coordinator_term";
/// Last applied command.
pub const REVISION: &str = "kvpool_coordinator_revision";
/// Calls refused, by reason.
pub const REFUSALS: &str = "kvpool_coordinator_refusals_total";
/// Unary calls handed on to the leader.
pub const FORWARDED: &str = "kvpool_coordinator_forwarded_total";
/// Open shard sessions.
pub const SESSIONS: &str = "kvpool_coordinator_sessions";
/// Open watches.
pub const WATCHERS: &str = "kvpool_coordinator_watchers";
/// Watches that had to relist because they fell behind the ring.
pub const RELISTS: &str = "kvpool_coordinator_watch_relists_total";
/// Open connections.
pub const CONNECTIONS: &str = "kvpool_coordinator_connections";
/// Connections closed before they spoke HTTP/2, by reason.
pub const CONNECTIONS_DROPPED: &str = "kvpool_coordinator_connections_dropped_total";
/// Events kept for watchers.
pub const RING_DEPTH: &str = "kvpool_coordinator_ring_events";
/// Bytes of events kept for watchers.
pub const RING_BYTES: &str = "kvpool_coordinator_ring_bytes";
/// Events dropped from the ring because it was full.
pub const RING_DROPPED: &str = "kvpool_coordinator_ring_dropped_total";
/// Messages inside a gate, by gate.
pub const MAILBOX_DEPTH: &str = "kvpool_coordinator_mailbox_depth";
/// Messages refused because a gate was full, by gate.
pub const MAILBOX_REFUSED: &str = "kvpool_coordinator_mailbox_refused_total";
/// Actors restarted, by kind.
pub const ACTOR_RESTARTS: &str = "kvpool_coordinator_actor_restarts_total";
/// Shards declared Down, by cause.
pub const SHARDS_DOWN: &str = "kvpool_coordinator_shards_down_total";
/// 1 while the mass-failure brake of a pool keeps shards from being declared Down.
pub const BRAKE_HELD: &str = "kvpool_coordinator_brake_held";
/// Shards of a pool by state, as people see them: Joining, Up, Suspect, Down, Draining, Drained.
pub const SHARDS: &str = "kvpool_coordinator_shards";
/// Slots of a pool, by state: in_sync, under_replicated, unserved, filling.
pub const SLOTS: &str = "kvpool_coordinator_slots";
/// Epoch of a pool's slot map.
pub const EPOCH: &str = "kvpool_coordinator_slot_map_epoch";
/// Breaches of a rule of the design; every test asserts 0.
pub const VIOLATIONS: &str = "kvpool_coordinator_violations_total";

/// Registers the descriptions; a repeated call changes nothing.
pub fn describe_metrics() {
    kvpool_raft::metric_definitions::describe_metrics();
    describe_counter!(LEADER_CHANGES, "Times that this member began to lead");
    describe_gauge!(IS_LEADER, "1 while this member leads");
    describe_gauge!(TERM, "Raft term of this member");
    describe_gauge!(REVISION, "Last applied command");
    describe_counter!(REFUSALS, "Calls refused, by reason");
    describe_counter!(FORWARDED, "Unary calls handed on to the leader");
    describe_gauge!(SESSIONS, "Open shard sessions");
    describe_gauge!(WATCHERS, "Open watches");
    describe_counter!(RELISTS, "Watches that relisted because they fell behind");
    describe_gauge!(CONNECTIONS, "Open connections");
    describe_counter!(CONNECTIONS_DROPPED, "Connections closed before they spoke HTTP/2");
    describe_gauge!(RING_DEPTH, "Events kept for watchers");
    describe_gauge!(RING_BYTES, "Bytes of events kept for watchers");
    describe_counter!(RING_DROPPED, "Events dropped from the ring");
    describe_gauge!(MAILBOX_DEPTH, "Messages inside an actor's gate");
    describe_counter!(MAILBOX_REFUSED, "Messages refused by a full gate");
    describe_counter!(ACTOR_RESTARTS, "Actors restarted after a failure");
    describe_counter!(SHARDS_DOWN, "Shards declared Down, by cause");
    describe_gauge!(BRAKE_HELD, "1 while the mass-failure brake is held");
    describe_gauge!(SHARDS, "Shards of a pool by state");
    describe_gauge!(SLOTS, "Slots of a pool by state");
    describe_gauge!(EPOCH, "Epoch of a pool's slot map");
    describe_counter!(VIOLATIONS, "Breaches of a rule; must stay 0");
    for rule in ["R1", "R4"] {
        metrics::counter!(VIOLATIONS, "rule" => rule).absolute(0);
    }
}

/// Counts a breach of a rule and says it aloud.
pub(crate) fn violation(rule: &'static str, what: &str) {
    metrics::counter!(VIOLATIONS, "rule" => rule).increment(1);
    tracing::error!(rule, what, "a rule was broken");
    if cfg!(test) {
        panic!("rule {rule} was broken: {what}");
    }
}
