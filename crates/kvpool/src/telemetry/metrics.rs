//! The Prometheus recorder of the process, its histogram buckets and the descriptions of every crate's metrics.

use std::time::Duration;

use anyhow::{Context, Result};
use metrics_exporter_prometheus::{Matcher, PrometheusBuilder, PrometheusHandle};

/// Buckets of every `..._seconds` histogram, from 50 µs (a memory read) to 10 s (far beyond every deadline). Deadlines
/// (150 ms, 250 ms, 500 ms, 1 s, 2 s) are boundaries, so that "within the deadline" can be read off exactly.
const SECONDS: [f64; 17] = [
    0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.15, 0.25, 0.5, 1.0, 2.0, 10.0,
];
/// Buckets of every `..._bytes` histogram: powers of four from 1 KiB to 256 MiB.
const BYTES: [f64; 10] = [
    1024.0,
    4096.0,
    16384.0,
    65536.0,
    262_144.0,
    1_048_576.0,
    4_194_304.0,
    16_777_216.0,
    67_108_864.0,
    268_435_456.0,
];
/// How often recorded samples are moved into their histograms, which bounds what waits in memory between two scrapes.
const UPKEEP: Duration = Duration::from_secs(1);

/// Installs the recorder for this process and describes all metrics. Call once, inside the runtime.
pub fn install(role: &'static str) -> Result<PrometheusHandle> {
    let handle = PrometheusBuilder::new()
        .set_buckets_for_metric(Matcher::Suffix("_seconds".into()), &SECONDS)
        .and_then(|b| b.set_buckets_for_metric(Matcher::Suffix("_bytes".into()), &BYTES))
        .and_then(PrometheusBuilder::install_recorder)
        .context("failed to start the metrics recorder")?;
    describe_all();
    metrics::gauge!(super::process::BUILD_INFO, "version" => env!("CARGO_PKG_VERSION"), "role" => role).set(1.0);
    let upkeep = handle.clone();
    tokio::spawn(async move {
        let mut tick = tokio::time::interval(UPKEEP);
        loop {
            tick.tick().await;
            upkeep.run_upkeep();
        }
    });
    Ok(handle)
}

/// Describes the metrics of every crate. `docs/metrics.md` is compared with this by a test.
pub fn describe_all() {
    super::process::describe();
    crate::http::describe();
    kvpool_client::metric_definitions::describe_metrics();
    kvpool_shard::describe();
    kvpool_coordinator::metric_definitions::describe_metrics();
}

#[cfg(test)]
mod tests;
