//! Many sessions on one real leader: a few in every run, and as a measurement
//! `KVPOOL_TEST_SESSIONS=10000 cargo test --release -p kvpool-coordinator --lib scale -- --nocapture`.
//!
//! The clients are this test binary again, as a process of its own, so that the process clock tells what the leader costs.

use super::shards::hello;
use super::{TestCluster, eventually};
use crate::tests::calls::with_token;
use kvpool_client::Kind;
use kvpool_proto::Timing;
use kvpool_proto::v1::nodes_client::NodesClient;
use kvpool_proto::v1::{Heartbeat, ShardHello, session_down, session_up};
use kvpool_proto::v1::{SessionDown, SessionUp};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;

const ADDRESS: &str = "KVPOOL_TEST_SCALE_ADDRESS";
const WINDOW: Duration = Duration::from_secs(5);

fn wanted() -> usize {
    let set = std::env::var("KVPOOL_TEST_SESSIONS").ok();
    set.and_then(|n| n.parse().ok()).unwrap_or(100)
}

/// CPU that this process has used.
fn cpu() -> Duration {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap();
    let fields: Vec<&str> = stat.rsplit(')').next().unwrap().split_whitespace().collect();
    // User and system time in ticks of 10 ms (proc(5), fields 14 and 15).
    let ticks: u64 = fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap();
    Duration::from_millis(ticks * 10)
}

/// One node with one shard: a session with a heartbeat a second, opened again when it ends.
async fn node(address: String, n: usize) {
    loop {
        let shard = hello(&format!("s{n}"), &format!("n{n}"), "boot");
        let hello = ShardHello {
            shard: shard.shard,
            pool: shard.pool,
            node: Some(shard.node),
            boot_id: shard.boot_id,
            addresses: Some(shard.addresses),
            capacity_bytes: shard.capacity_bytes,
            ..ShardHello::default()
        };
        let say = |what| SessionUp { what: Some(what) };
        let (up, rx) = mpsc::channel(4);
        up.try_send(say(session_up::What::Hello(hello))).unwrap();
        let mut nodes = NodesClient::new(
            kvpool_client::Trust::Plain
                .endpoint(&address, Timing::Relaxed)
                .unwrap()
                .connect_lazy(),
        );
        if let Ok(down) = nodes.session(with_token(ReceiverStream::new(rx))).await {
            let mut down = down.into_inner();
            let mut beat = tokio::time::interval(Duration::from_secs(1));
            loop {
                tokio::select! {
                    _ = beat.tick() => if up.try_send(say(session_up::What::Heartbeat(Heartbeat::default()))).is_err() { break },
                    message = down.message() => match message {
                        Ok(Some(SessionDown { what: Some(session_down::What::Welcome(_) | session_down::What::Beat(_)) })) => {}
                        Ok(Some(_)) => {}
                        _ => break,
                    },
                }
            }
        }
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_sessions_stay_open() {
    let count = wanted();
    if let Ok(address) = std::env::var(ADDRESS) {
        for n in 0..count {
            tokio::spawn(node(address.clone(), n));
            // Registrations are bounded at the leader; this only keeps the start calm.
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        std::future::pending::<()>().await;
    }
    let cluster = TestCluster::start(1, 1).await;
    // No pool of that many shards would settle without a data plane: placement is not what is measured.
    let mut clients = Command::new(std::env::current_exe().unwrap())
        .args(["many_sessions_stay_open", "--nocapture"])
        .env(ADDRESS, &cluster.members[0].address)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let began = Instant::now();
    let core = cluster.running(1).core.clone();
    let up = || core.replica.read(|s| s.shards().filter(|r| r.is_up()).count());
    while up() < count {
        assert!(
            began.elapsed() < Duration::from_secs(900),
            "{} of {count} have registered",
            up()
        );
        tokio::time::sleep(Duration::from_millis(500)).await;
    }
    let opened = began.elapsed();
    // Until the plans that the registrations called for are made.
    eventually("the log stands still", async || {
        let at = core.status().last_log;
        tokio::time::sleep(Duration::from_secs(3)).await;
        (core.status().last_log == at).then_some(())
    })
    .await;
    let (from, at) = (cpu(), Instant::now());
    tokio::time::sleep(WINDOW).await;
    let (used, passed) = (cpu() - from, at.elapsed());
    let down = core.replica.read(|s| s.shards().filter(|r| !r.is_up()).count());
    clients.kill().unwrap();
    clients.wait().unwrap();
    let percent = used.as_millis() * 1_000 / passed.as_millis();
    println!(
        "{count} sessions: all open after {opened:?}; then {}.{} % of a core, {down} Down",
        percent / 10,
        percent % 10
    );
    assert_eq!(down, 0);
    assert!(cluster.client().list(Kind::Node).await.unwrap().records.len() >= count);
}
