//! Metrics of routing, peers and transfer. (The front ends have their own, [`crate::front::describe`].)

use metrics::Unit;

pub(crate) const PEER_BREAKER: &str = "kvpool_shard_peer_breaker";
pub(crate) const PEER_LATE_TOTAL: &str = "kvpool_shard_peer_late_total";
pub(crate) const PEER_FAILED_TOTAL: &str = "kvpool_shard_peer_failed_total";
pub(crate) const PEER_CHECKSUM_TOTAL: &str = "kvpool_shard_peer_checksum_total";
pub(crate) const PEER_GAPS: &str = "kvpool_shard_peer_gaps";
pub(crate) const PEER_CONNECTIONS: &str = "kvpool_shard_peer_connections";
pub(crate) const PEER_REQUESTS_TOTAL: &str = "kvpool_shard_peer_requests_total";
pub(crate) const PEER_REFUSED_TOTAL: &str = "kvpool_shard_peer_refused_total";
pub(crate) const BODY_RESUMED_TOTAL: &str = "kvpool_shard_body_resumed_total";
pub(crate) const LEASES_DROPPED_TOTAL: &str = "kvpool_shard_leases_dropped_total";
pub(crate) const STAGING_BYTES: &str = "kvpool_shard_staging_bytes";
pub(crate) const EPOCH: &str = "kvpool_shard_epoch";
pub(crate) const GENERATION: &str = "kvpool_shard_generation";
pub(crate) const INCARNATION: &str = "kvpool_shard_incarnation";
pub(crate) const SERVING: &str = "kvpool_shard_serving";
pub(crate) const SLOTS: &str = "kvpool_shard_slots";
pub(crate) const ARENA_BYTES: &str = "kvpool_shard_arena_bytes";
pub(crate) const ARENA_CLASS_BYTES: &str = "kvpool_shard_arena_class_bytes";
pub(crate) const BLOCKS: &str = "kvpool_shard_blocks";
pub(crate) const STORE_TOTAL: &str = "kvpool_shard_store_events_total";
pub(crate) const TRANSFER_BYTES_TOTAL: &str = "kvpool_shard_transfer_bytes_total";
pub(crate) const TRANSFER_BLOCKS_TOTAL: &str = "kvpool_shard_transfer_blocks_total";
pub(crate) const TRANSFER_SLOTS_LEFT: &str = "kvpool_shard_transfer_slots_left";
pub(crate) const VIOLATIONS_TOTAL: &str = "kvpool_shard_violations_total";

/// Describes every metric of this crate to the recorder, and shows the violation counters at 0.
pub fn describe() {
    use metrics::{describe_counter, describe_gauge};
    crate::front::describe();
    describe_gauge!(PEER_BREAKER, "Breaker of each peer: 0 closed, 1 suspect, 2 open");
    describe_counter!(PEER_LATE_TOTAL, "First-byte deadlines missed, by peer");
    describe_counter!(
        PEER_FAILED_TOTAL,
        "Requests without any answer and broken connections, by peer"
    );
    describe_counter!(
        PEER_CHECKSUM_TOTAL,
        "Frames from peers dropped because their checksum differed"
    );
    describe_gauge!(PEER_GAPS, "Writes that each peer is known to lack");
    describe_gauge!(PEER_CONNECTIONS, "Connections that peers have open to this shard");
    describe_counter!(PEER_REQUESTS_TOTAL, "Requests of peers, by kind");
    describe_counter!(
        PEER_REFUSED_TOTAL,
        "Connections and requests of peers refused, by reason"
    );
    describe_counter!(
        BODY_RESUMED_TOTAL,
        "Bodies finished from another copy after the first one stopped"
    );
    describe_counter!(
        LEASES_DROPPED_TOTAL,
        "Leases not taken at other copies because the queue was full"
    );
    describe_gauge!(
        STAGING_BYTES,
        Unit::Bytes,
        "Bytes reserved for blocks that pass through"
    );
    describe_gauge!(EPOCH, "Epoch of the slot map in force");
    describe_gauge!(GENERATION, "Generation of the pool in force");
    describe_gauge!(INCARNATION, "Incarnation of this shard; 0 before it has registered");
    describe_gauge!(SERVING, "1 when this process answers from its store");
    describe_gauge!(SLOTS, "Slots held by this shard, by state (in_sync, filling)");
    describe_gauge!(ARENA_BYTES, Unit::Bytes, "Memory of the store, by kind");
    describe_gauge!(
        ARENA_CLASS_BYTES,
        Unit::Bytes,
        "Tail pieces of the arena, by size class"
    );
    describe_gauge!(BLOCKS, "Blocks in the store");
    describe_counter!(STORE_TOTAL, "What the store did, by event");
    describe_counter!(TRANSFER_BYTES_TOTAL, Unit::Bytes, "Bytes pulled by slot transfer");
    describe_counter!(TRANSFER_BLOCKS_TOTAL, "Blocks pulled by slot transfer");
    describe_gauge!(TRANSFER_SLOTS_LEFT, "Slots still to be filled");
    describe_counter!(
        VIOLATIONS_TOTAL,
        "Violations of the rules of the design; anything but 0 is a bug"
    );
    for rule in ["R4", "R5", "R9", "R12"] {
        metrics::counter!(VIOLATIONS_TOTAL, "rule" => rule).increment(0);
    }
}

/// A rule of the design was broken: counted, so that tests and people notice.
pub(crate) fn violated(rule: &'static str) {
    metrics::counter!(VIOLATIONS_TOTAL, "rule" => rule).increment(1);
}
