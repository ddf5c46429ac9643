//! Shards as the coordinator sees them: a session, and a data plane that completes every copy it is told to fill.

use super::TestCluster;
use kvpool_client::{Client, PeerReport, SessionState, ShardHello, ShardSession, ShardSummary, follow_slot_map};
use kvpool_state::records::{NodeRecord, ShardAddresses, SlotMap, SlotRange};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use tokio::sync::watch;
use tokio::task::JoinHandle;

pub(super) struct FakeShard {
    _session: Arc<ShardSession>,
    pub(super) state: watch::Receiver<SessionState>,
    pub(super) clears: Arc<AtomicU64>,
    pub(super) map: watch::Receiver<Option<Arc<SlotMap>>>,
    summary: Arc<watch::Sender<ShardSummary>>,
    tasks: Vec<JoinHandle<()>>,
}

pub(super) fn hello(id: &str, node: &str, boot: &str) -> ShardHello {
    ShardHello {
        shard: id.into(),
        pool: "default".into(),
        node: NodeRecord {
            id: node.into(),
            ..NodeRecord::default()
        },
        boot_id: boot.into(),
        addresses: ShardAddresses {
            peer: "127.0.0.1:1".into(),
            ..ShardAddresses::default()
        },
        capacity_bytes: 1 << 30,
    }
}

impl FakeShard {
    pub(super) fn start(cluster: &TestCluster, id: &str, boot: &str) -> FakeShard {
        Self::start_with(cluster.client(), hello(id, &format!("node-of-{id}"), boot))
    }

    pub(super) fn start_with(client: Client, hello: ShardHello) -> FakeShard {
        let clears = Arc::new(AtomicU64::new(0));
        let (count, id) = (clears.clone(), hello.shard.clone());
        let (summary_tx, summary) = watch::channel(ShardSummary::default());
        let summary_tx = Arc::new(summary_tx);
        let session = ShardSession::start(client.clone(), hello, summary, move || {
            count.fetch_add(1, Ordering::SeqCst);
            async {}
        });
        let session = Arc::new(session);
        let (map, follow) = follow_slot_map(client, "default".into());
        let fill = tokio::spawn(fill(session.clone(), map.clone(), id, summary_tx.clone()));
        FakeShard {
            state: session.state(),
            _session: session,
            clears,
            map,
            summary: summary_tx,
            tasks: vec![follow, fill],
        }
    }

    /// Says in its heartbeats that it can't reach these, of `peers` that it knows.
    pub(super) fn accuse(&self, peers: u32, others: &[(&str, u64)]) {
        let report = |(shard, incarnation): &(&str, u64)| PeerReport {
            shard: (*shard).to_owned(),
            incarnation: *incarnation,
            for_ms: 60_000,
        };
        self.summary.send_modify(|s| {
            s.unreachable = others.iter().map(report).collect();
            s.unreachable_peers = u32::try_from(others.len()).unwrap();
            s.peers = peers;
        });
    }

    /// The incarnation, once there is one.
    pub(super) async fn incarnation(&self) -> u64 {
        let mut state = self.state.clone();
        let up = state
            .wait_for(|s| s.connected && s.incarnation.is_some())
            .await
            .unwrap();
        up.incarnation.unwrap()
    }
}

impl Drop for FakeShard {
    fn drop(&mut self) {
        self.tasks.iter().for_each(JoinHandle::abort);
    }
}

/// Reports every copy that the map lists as filling here, as if it had been pulled.
async fn fill(
    session: Arc<ShardSession>,
    mut map: watch::Receiver<Option<Arc<SlotMap>>>,
    id: String,
    summary: Arc<watch::Sender<ShardSummary>>,
) {
    let mut state = session.state();
    loop {
        let held = map.borrow_and_update().clone();
        let incarnation = state.borrow_and_update().incarnation;
        if let Some(map) = held {
            summary.send_modify(|s| (s.used_bytes, s.epoch) = (7, map.epoch));
            let me = map
                .shards
                .iter()
                .find(|s| s.id == id && Some(s.incarnation) == incarnation);
            let filling =
                |r: &&SlotRange| me.is_some_and(|me| r.copies.iter().any(|c| c.shard == me.number && !c.in_sync));
            let ranges: Vec<SlotRange> = map.ranges.iter().filter(filling).cloned().collect();
            if !ranges.is_empty() {
                session.report_in_sync("default".into(), map.epoch, &ranges);
            }
        }
        tokio::select! {
            changed = map.changed() => if changed.is_err() { return },
            changed = state.changed() => if changed.is_err() { return },
        }
    }
}
