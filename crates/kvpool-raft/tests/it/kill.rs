//! A member is killed with SIGKILL again and again while it writes; what it acknowledged must be there.
//!
//! The child is this test binary run again for `child` with the directory in an environment variable.
use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::common::{Direct, Journal, Node, small};
use bytes::Bytes;
use kvpool_raft::FileDisk;

const DIR: &str = "KVPOOL_TEST_KILL_DIR";
const ROUNDS: usize = 12;

async fn open(dir: &std::path::Path) -> (Node, Journal) {
    let journal = Journal::default();
    let disk = FileDisk::open(dir).unwrap();
    let node = Node::start(small(1), disk, Direct::default(), journal.clone())
        .await
        .unwrap();
    if !node.status().initialized() {
        node.initialize([(1, "member-1".to_string())].into()).await.unwrap();
    }
    // The first write of a term is only taken once the member leads again.
    node.status_watch().wait_for(|s| s.is_leader()).await.unwrap();
    (node, journal)
}

#[test]
fn child() {
    let Some(dir) = std::env::var_os(DIR) else { return };
    let runtime = tokio::runtime::Runtime::new().unwrap();
    runtime.block_on(async {
        let (node, journal) = open(dir.as_ref()).await;
        // Several writers, so that batches hold more than one entry when the kill comes.
        let writers = (0..4u32).map(|writer| {
            let (node, journal) = (node.clone(), journal.clone());
            async move {
                for i in 0u32.. {
                    let command = format!("{}-{writer}-{i}-{}", journal.len(), "x".repeat((i % 300) as usize));
                    if let Ok(applied) = node.propose(Bytes::from(command.clone())).await {
                        let mut out = std::io::stdout().lock();
                        writeln!(out, "ack {} {command}", applied.index).unwrap();
                        out.flush().unwrap();
                    }
                }
            }
        });
        futures::future::join_all(writers).await;
    });
}

#[test]
fn acknowledged_writes_survive_sigkill() {
    let seed: u64 = std::env::var("KVPOOL_SEED").ok().map_or_else(
        || u64::from(std::process::id()) ^ u64::from(Instant::now().elapsed().subsec_nanos()),
        |s| s.parse().unwrap(),
    );
    println!("KVPOOL_SEED={seed}");
    let dir = tempfile::tempdir().unwrap();
    let mut acknowledged: Vec<String> = Vec::new();
    let mut random = seed;
    for round in 0..ROUNDS {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["kill::child", "--exact", "--nocapture"])
            .env(DIR, dir.path())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        random = random
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        let writes = 1 + random as usize % 400;
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let mut seen = 0;
        for line in lines.by_ref() {
            // The test harness prints lines of its own.
            if let Some(at) = line.as_ref().unwrap().find("ack ") {
                acknowledged.push(line.unwrap()[at + 4..].to_string());
                seen += 1;
            }
            if seen >= writes {
                break;
            }
        }
        child.kill().unwrap();
        // What was acknowledged before the kill took effect; the last line may be cut.
        acknowledged.extend(
            lines
                .map_while(Result::ok)
                .filter_map(|line| line.strip_prefix("ack ").map(String::from)),
        );
        child.wait().unwrap();
        assert!(seen >= writes, "round {round}: the member stopped by itself");
    }
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let (mut present, applied) = runtime.block_on(async {
        let (node, journal) = open(dir.path()).await;
        let applied = node.propose(Bytes::from_static(b"end")).await.unwrap().index;
        node.shutdown().await;
        (journal.all(), applied)
    });
    assert_eq!(present.pop().unwrap(), b"end");
    let present: std::collections::BTreeSet<Vec<u8>> = present.into_iter().collect();
    assert!(applied as usize > acknowledged.len());
    for line in &acknowledged {
        let (_, command) = line.split_once(' ').unwrap();
        assert!(present.contains(command.as_bytes()), "acknowledged but lost: {line}");
    }
    runtime.shutdown_timeout(Duration::from_secs(5));
}
