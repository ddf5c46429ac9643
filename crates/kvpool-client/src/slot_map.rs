//! Follows the slot map of one pool: the newest one is always at hand, and it never goes back (R4).

use crate::client::Client;
use crate::metric_definitions as m;
use crate::watch::{WatchFilter, WatchItem};
use kvpool_proto::v1::Kind;
use kvpool_state::records::{Record, SlotMap};
use std::sync::Arc;
use tokio::sync::watch;
use tokio::task::JoinHandle;

/// Starts a task that follows the pool's slot map; `None` until the first one arrives. Abort the handle to end it.
#[must_use]
pub fn follow_slot_map(client: Client, pool: String) -> (watch::Receiver<Option<Arc<SlotMap>>>, JoinHandle<()>) {
    let (tx, rx) = watch::channel(None);
    let task = tokio::spawn(async move {
        let filter = WatchFilter {
            kinds: vec![Kind::SlotMap],
            pool: pool.clone(),
        };
        let mut changes = client.watch(filter, 0);
        while let Some(item) = changes.next().await {
            let records = match item {
                WatchItem::Changes { events, .. } => events.into_iter().filter_map(|e| e.record).collect(),
                WatchItem::Relisted { records, .. } => records,
            };
            for record in records {
                match record {
                    Record::Slots(map) if map.pool == pool => publish(&tx, map),
                    _ => {}
                }
            }
            if tx.is_closed() {
                return;
            }
        }
    });
    (rx, task)
}

/// A relist from a member that lags may bring an older map: it is passed over.
fn publish(tx: &watch::Sender<Option<Arc<SlotMap>>>, map: SlotMap) {
    let age = |m: &SlotMap| (m.cluster_generation, m.epoch);
    tx.send_if_modified(|held| {
        let newer = held.as_deref().is_none_or(|h| age(h) < age(&map));
        if newer {
            #[allow(clippy::cast_precision_loss)]
            metrics::gauge!(m::EPOCH, "pool" => map.pool.clone()).set(map.epoch as f64);
            *held = Some(Arc::new(map));
        }
        newer
    });
}
