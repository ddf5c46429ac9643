//! When is a pool ready? Every process says so at `/readyz`, and the leader says that every slot has all its copies.

use std::time::{Duration, Instant};

use anyhow::Result;
use kvpool_client::{Client, ClientConfig};
use kvpool_proto::v1::StatusReply;
use kvpool_state::SLOTS;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::home::Home;
use super::plan::Plan;
use crate::config::values::Timing;
use crate::exit::failure;
use crate::roles::timing;

/// How often to look.
const EVERY: Duration = Duration::from_millis(25);
/// Longest wait for one answer.
const ANSWER: Duration = Duration::from_secs(2);

/// Waits until the pool is ready.
///
/// # Errors
/// It is not within a minute (three with `--timing relaxed`); the error names what is missing.
pub async fn wait(plan: &Plan, home: &Home) -> Result<()> {
    let limit = match plan.timing {
        Timing::Normal => Duration::from_secs(60),
        Timing::Relaxed => Duration::from_secs(180),
    };
    let client = Client::new(ClientConfig {
        endpoints: plan.endpoints().split(',').map(str::to_owned).collect(),
        join_token: home.join_token.clone(),
        trust: kvpool_client::Trust::Plain,
        timing: timing(plan.timing),
    });
    let began = Instant::now();
    loop {
        let Some(missing) = missing(plan, &client).await else {
            return Ok(());
        };
        if began.elapsed() > limit {
            return Err(failure(format!(
                "the pool was not ready within {} s: {missing}. Logs are in {}",
                limit.as_secs(),
                home.root().display()
            )));
        }
        tokio::time::sleep(EVERY).await;
    }
}

/// What still stands in the way.
async fn missing(plan: &Plan, client: &Client) -> Option<String> {
    for spec in &plan.children {
        match tokio::time::timeout(ANSWER, probe(&spec.http)).await {
            Ok(Ok(None)) => {}
            Ok(Ok(Some(why))) => return Some(format!("{} is {why}", spec.name)),
            Ok(Err(error)) => return Some(format!("{} does not answer: {error}", spec.name)),
            Err(_) => return Some(format!("{} does not answer", spec.name)),
        }
    }
    match tokio::time::timeout(ANSWER, client.status()).await {
        Ok(Ok(status)) => unfilled(&status, plan.ports.shards.len()),
        Ok(Err(error)) => Some(error.to_string()),
        Err(_) => Some("the coordinators do not answer".to_owned()),
    }
}

/// What the leader still waits for. With fewer shards than copies, one copy on each shard is all there can be.
fn unfilled(status: &StatusReply, shards: usize) -> Option<String> {
    let Some(pool) = status.pools.first() else {
        return Some("no pool yet".to_owned());
    };
    if (pool.shards_up as usize) < shards {
        return Some(format!("{} of {shards} shards are Up", pool.shards_up));
    }
    let room_for_all = pool.factor as usize <= shards;
    let done = if room_for_all {
        pool.in_sync
    } else {
        pool.in_sync + pool.under_replicated
    };
    if pool.unserved == 0 && pool.filling == 0 && done >= u32::from(SLOTS) {
        return None;
    }
    Some(format!(
        "{} of {SLOTS} slots have all their copies, {} are filling",
        pool.in_sync, pool.filling
    ))
}

/// Asks `/readyz`: nothing when it is ready, else what it says.
async fn probe(http: &str) -> std::io::Result<Option<String>> {
    let mut stream = TcpStream::connect(http).await?;
    let request = format!("GET /readyz HTTP/1.1\r\nHost: {http}\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await?;
    let mut reply = Vec::new();
    stream.take(16 << 10).read_to_end(&mut reply).await?;
    let reply = String::from_utf8_lossy(&reply);
    if reply.starts_with("HTTP/1.1 200") {
        return Ok(None);
    }
    let body = reply.split_once("\r\n\r\n").map_or("", |(_, body)| body);
    Ok(Some(if body.is_empty() {
        "not ready".to_owned()
    } else {
        body.trim().to_owned()
    }))
}
