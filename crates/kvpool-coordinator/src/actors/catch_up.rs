//! What a new leader waits for before its actors are built from the state.

use crate::core::Core;
use kvpool_client::Backoff;
use kvpool_state::Command;
use kvpool_state::command::CreateCluster;
use std::time::Duration;

/// The pool that a new cluster has.
const FIRST_POOL: &str = "default";

/// Until the replica holds everything that was committed before this term, and the cluster's first entry.
pub(super) async fn catch_up(core: &Core) {
    let mut backoff = Backoff::new(Duration::from_millis(10), Duration::from_millis(500));
    loop {
        if core.read_barrier().await.is_ok() {
            if core.replica.read(|s| s.cluster().is_some()) {
                return;
            }
            let create = CreateCluster {
                cluster_id: core.cluster_id(),
                pool: FIRST_POOL.into(),
                factor: core.factor,
            };
            if let Err(refused) = core.propose(&Command::CreateCluster(create), None).await {
                tracing::debug!(reason = refused.reason.word(), "the cluster is not created yet");
            }
        }
        tokio::time::sleep(backoff.next_wait()).await;
    }
}
