//! Numbers that are looked up rather than counted: published once a second.

use std::sync::Arc;
use std::time::Duration;

use kvpool_client::{MAX_PEER_REPORTS, PeerReport, ShardSummary};
use kvpool_store::{MemoryBytes, Stats};
use tokio::sync::watch;

use crate::metric_definitions as names;
use crate::router::Router;
use crate::routing::Routing;

/// Publishes for ever; with a store also what heartbeats tell.
pub(crate) async fn publish(router: Arc<Router>, summary: Option<watch::Sender<ShardSummary>>, every: Duration) {
    loop {
        metrics::gauge!(names::STAGING_BYTES).set(router.staging().held_bytes() as f64);
        let routing = router.routing_now();
        let in_sync = routing.mine.iter().filter(|(_, in_sync)| *in_sync).count();
        if let Some(store) = router.store() {
            metrics::gauge!(names::SLOTS, "state" => "in_sync").set(in_sync as f64);
            metrics::gauge!(names::SLOTS, "state" => "filling").set((routing.mine.len() - in_sync) as f64);
            let stats = store.stats();
            show(&stats);
            if let Some(summary) = &summary {
                let used_bytes = used(&stats.memory);
                summary.send_replace(ShardSummary {
                    used_bytes,
                    epoch: routing.map.epoch,
                    ..peers(&routing)
                });
            }
        }
        tokio::time::sleep(every).await;
    }
}

/// What the breakers say of the other shards: second evidence for the leader.
fn peers(routing: &Routing) -> ShardSummary {
    let report = |peer: &Arc<crate::peer::Peer>| {
        Some(PeerReport {
            shard: peer.id.clone(),
            incarnation: peer.incarnation,
            for_ms: u64::try_from(peer.silent_for()?.as_millis()).unwrap_or(u64::MAX),
        })
    };
    let mut unreachable: Vec<PeerReport> = routing.peers.values().filter_map(report).collect();
    let count = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
    let (silent, all) = (count(unreachable.len()), count(routing.peers.len()));
    unreachable.sort_by_key(|r| std::cmp::Reverse(r.for_ms));
    unreachable.truncate(MAX_PEER_REPORTS);
    ShardSummary {
        unreachable,
        unreachable_peers: silent,
        peers: all,
        ..ShardSummary::default()
    }
}

/// Bytes that count against the limit.
fn used(memory: &MemoryBytes) -> u64 {
    memory.arena_used + memory.metadata + memory.fixed
}

fn show(stats: &Stats) {
    metrics::gauge!(names::BLOCKS).set(stats.blocks as f64);
    let memory = &stats.memory;
    let kinds = [
        ("limit", memory.limit),
        ("used", used(memory)),
        ("in_flight", memory.in_flight),
        ("resident", memory.resident),
        ("metadata", memory.metadata),
        ("leased", stats.leased),
        ("small", stats.small),
        ("main", stats.main),
    ];
    for (kind, bytes) in kinds {
        metrics::gauge!(names::ARENA_BYTES, "kind" => kind).set(bytes as f64);
    }
    if used(memory) > memory.limit {
        names::violated("R12");
    }
    for class in &stats.classes {
        let size = class.piece_bytes.to_string();
        metrics::gauge!(names::ARENA_CLASS_BYTES, "class" => size).set(class.used as f64);
    }
    let counts = &stats.counts;
    let events = [
        ("stored", counts.stored),
        ("replaced", counts.replaced),
        ("superseded", counts.superseded),
        ("evicted_small", counts.evicted_small),
        ("evicted_main", counts.evicted_main),
        ("expired", counts.expired),
        ("removed", counts.removed),
        ("dropped", counts.dropped),
        ("leases_taken", counts.leases_taken),
        ("leases_refused", counts.leases_refused),
        ("refused_size", counts.refused_size),
        ("refused_shed", counts.refused_shed),
        ("aborted", counts.aborted),
    ];
    for (event, count) in events {
        metrics::counter!(names::STORE_TOTAL, "event" => event).absolute(count);
    }
}
