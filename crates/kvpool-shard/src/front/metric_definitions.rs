//! Metrics of the front ends. Handles are taken once per port: the hot path only adds.

use metrics::{Counter, Gauge, Histogram, Unit};

use crate::ops::{DropReason, MissReason, Path, PutOutcome};

pub(crate) const GET_TOTAL: &str = "kvpool_shard_get_total";
pub(crate) const EXISTS_TOTAL: &str = "kvpool_shard_exists_total";
pub(crate) const PUT_TOTAL: &str = "kvpool_shard_put_total";
pub(crate) const FIRST_BYTE_SECONDS: &str = "kvpool_shard_first_byte_seconds";
pub(crate) const CLOSED_UNKNOWN_SIZE_TOTAL: &str = "kvpool_shard_closed_unknown_size_total";
pub(crate) const ABORTED_REPLIES_TOTAL: &str = "kvpool_shard_aborted_replies_total";
pub(crate) const REFUSED_INPUT_TOTAL: &str = "kvpool_shard_refused_input_total";
pub(crate) const STALLED_UPLOADS_TOTAL: &str = "kvpool_shard_stalled_uploads_total";
pub(crate) const CONNECTIONS: &str = "kvpool_shard_connections";
pub(crate) const CONNECTIONS_REFUSED_TOTAL: &str = "kvpool_shard_connections_refused_total";

/// Describes the metrics of the front ends to the recorder.
pub fn describe() {
    metrics::describe_counter!(
        GET_TOTAL,
        "Client reads by front, result (hit, miss) and reason of a miss"
    );
    metrics::describe_counter!(
        EXISTS_TOTAL,
        "Client lookups by front, result (hit, miss) and reason of a miss"
    );
    metrics::describe_counter!(
        PUT_TOTAL,
        "Client writes by front, outcome (stored2, stored1, dropped, condition) and reason of a drop"
    );
    metrics::describe_histogram!(
        FIRST_BYTE_SECONDS,
        Unit::Seconds,
        "Time from request to the first byte of a hit, by path (local, forwarded, replica)"
    );
    metrics::describe_counter!(
        CLOSED_UNKNOWN_SIZE_TOTAL,
        "Connections of native clients closed because a miss had no known size"
    );
    metrics::describe_counter!(
        ABORTED_REPLIES_TOTAL,
        "Replies cut off because every copy failed in mid-body"
    );
    metrics::describe_counter!(
        REFUSED_INPUT_TOTAL,
        "Requests and connections refused for their bytes, by front and reason"
    );
    metrics::describe_counter!(
        STALLED_UPLOADS_TOTAL,
        "Uploads whose client stopped in mid-body; their memory was freed"
    );
    metrics::describe_gauge!(CONNECTIONS, "Open client connections by front");
    metrics::describe_counter!(
        CONNECTIONS_REFUSED_TOTAL,
        "Client connections refused at the limit, by front"
    );
}

/// Hits, and misses by reason.
struct Lookups {
    hit: Counter,
    /// In the order of [`MISS_REASONS`].
    miss: [Counter; MISS_REASONS.len()],
}

const MISS_REASONS: [MissReason; 7] = [
    MissReason::Absent,
    MissReason::Evicted,
    MissReason::OwnerDown,
    MissReason::Deadline,
    MissReason::Size,
    MissReason::Generation,
    MissReason::Shed,
];

const DROP_REASONS: [DropReason; 6] = [
    DropReason::Size,
    DropReason::Shed,
    DropReason::OwnerDown,
    DropReason::Stalled,
    DropReason::Generation,
    DropReason::NotOwner,
];

const PATHS: [Path; 3] = [Path::Local, Path::Forwarded, Path::Replica];

impl Lookups {
    fn new(name: &'static str, front: &'static str) -> Self {
        let counter = |result: &'static str, reason: &'static str| metrics::counter!(name, "front" => front, "result" => result, "reason" => reason);
        Lookups {
            hit: counter("hit", ""),
            miss: MISS_REASONS.map(|reason| counter("miss", reason.word())),
        }
    }

    fn count(&self, miss: Option<MissReason>) {
        match miss {
            None => self.hit.increment(1),
            Some(reason) => {
                let at = MISS_REASONS.iter().position(|known| *known == reason);
                if let Some(counter) = at.and_then(|at| self.miss.get(at)) {
                    counter.increment(1);
                }
            }
        }
    }
}

/// The handles of one port.
pub(super) struct FrontMetrics {
    front: &'static str,
    get: Lookups,
    exists: Lookups,
    stored2: Counter,
    stored1: Counter,
    condition: Counter,
    dropped: [Counter; DROP_REASONS.len()],
    first_byte: [Histogram; PATHS.len()],
    pub(super) closed_unknown_size: Counter,
    pub(super) aborted: Counter,
    pub(super) stalled_uploads: Counter,
    pub(super) connections: Gauge,
    pub(super) connections_refused: Counter,
}

impl FrontMetrics {
    pub(super) fn new(front: &'static str) -> Self {
        let put = |outcome: &'static str, reason: &'static str| metrics::counter!(PUT_TOTAL, "front" => front, "outcome" => outcome, "reason" => reason);
        FrontMetrics {
            front,
            get: Lookups::new(GET_TOTAL, front),
            exists: Lookups::new(EXISTS_TOTAL, front),
            stored2: put("stored2", ""),
            stored1: put("stored1", ""),
            condition: put("condition", ""),
            dropped: DROP_REASONS.map(|reason| put("dropped", reason.word())),
            first_byte: PATHS.map(|path| metrics::histogram!(FIRST_BYTE_SECONDS, "path" => path.word())),
            closed_unknown_size: metrics::counter!(CLOSED_UNKNOWN_SIZE_TOTAL),
            aborted: metrics::counter!(ABORTED_REPLIES_TOTAL),
            stalled_uploads: metrics::counter!(STALLED_UPLOADS_TOTAL),
            connections: metrics::gauge!(CONNECTIONS, "front" => front),
            connections_refused: metrics::counter!(CONNECTIONS_REFUSED_TOTAL, "front" => front),
        }
    }

    /// A read was answered: with the block, or with a miss for this reason.
    pub(super) fn get(&self, miss: Option<MissReason>) {
        self.get.count(miss);
    }

    /// A lookup was answered.
    pub(super) fn exists(&self, miss: Option<MissReason>) {
        self.exists.count(miss);
    }

    /// A write was taken or dropped.
    pub(super) fn put(&self, outcome: &PutOutcome) {
        match outcome {
            PutOutcome::Stored2 => self.stored2.increment(1),
            PutOutcome::Stored1 => self.stored1.increment(1),
            PutOutcome::ConditionFailed => self.condition.increment(1),
            PutOutcome::Dropped(reason) => {
                let at = DROP_REASONS.iter().position(|known| known == reason);
                if let Some(counter) = at.and_then(|at| self.dropped.get(at)) {
                    counter.increment(1);
                }
            }
        }
    }

    /// The first byte of a hit is about to leave.
    pub(super) fn first_byte(&self, path: Path, seconds: f64) {
        let at = PATHS.iter().position(|known| *known == path);
        if let Some(histogram) = at.and_then(|at| self.first_byte.get(at)) {
            histogram.record(seconds);
        }
    }

    /// Input was refused; rare enough to look the counter up. `reason` comes from a fixed set of words (R12).
    pub(super) fn refused(&self, reason: &'static str) {
        metrics::counter!(REFUSED_INPUT_TOTAL, "front" => self.front, "reason" => reason).increment(1);
    }
}
