//! Whole members over loopback sockets with real disks. Each member has a runtime of its own, so that a kill is abrupt:
//! sockets close, tasks vanish, nothing is handed over.

mod bad_input;
mod black_hole;
mod boot;
mod calls;
mod cluster;
mod group;
mod membership;
mod panics;
mod scale;
mod sessions;
mod shards;
mod watches;

use cluster::TestCluster;

/// Waits until `look` gives a value. The bound is for a machine that is starved, not a measure.
async fn eventually<T>(what: &str, mut look: impl AsyncFnMut() -> Option<T>) -> T {
    let deadline = tokio::time::Instant::now() + std::time::Duration::from_secs(90);
    loop {
        if let Some(found) = look().await {
            return found;
        }
        assert!(tokio::time::Instant::now() < deadline, "waited in vain until {what}");
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
    }
}
