//! R5 under random faults: whatever happens to connections between processes, a read returns exactly the bytes of one
//! complete write of its key, or a miss; no call outlasts the promise; nothing panics.
//!
//! Peers are reached through a relay that delays, cuts, freezes and corrupts the stream by a seed. Prints the seed; replay
//! with `KVPOOL_TEST_SEED`.

use super::*;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use std::sync::atomic::{AtomicU64, Ordering};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::Instant;

/// Well above the promise: this test is about bytes, and runs on loaded machines.
const PATIENCE: Duration = Duration::from_secs(20);

/// Relays connections to `to`, spoiling some of them.
async fn relay(to: SocketAddr, seed: u64) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let next = Arc::new(AtomicU64::new(seed));
    tokio::spawn(async move {
        while let Ok((client, _)) = listener.accept().await {
            let seed = next.fetch_add(1, Ordering::Relaxed);
            tokio::spawn(async move {
                let Ok(server) = TcpStream::connect(to).await else {
                    return;
                };
                let (client_read, client_write) = client.into_split();
                let (server_read, server_write) = server.into_split();
                tokio::select! {
                    () = pump(client_read, server_write, seed * 2) => {}
                    () = pump(server_read, client_write, seed * 2 + 1) => {}
                }
            });
        }
    });
    address
}

/// Copies bytes until the script of this connection says otherwise.
async fn pump(mut from: tokio::net::tcp::OwnedReadHalf, mut to: tokio::net::tcp::OwnedWriteHalf, seed: u64) {
    let mut rng = StdRng::seed_from_u64(seed);
    // Where in the stream it happens: mostly within the first megabytes, sometimes never.
    let mut left: u64 = rng.random_range(0..6_000_000);
    let what = rng.random_range(0..6);
    let mut buffer = vec![0; 64 * 1024];
    loop {
        let Ok(n) = from.read(&mut buffer).await else { return };
        if n == 0 {
            return;
        }
        let bytes = &mut buffer[..n];
        if (n as u64) > left {
            let at = left as usize;
            left = u64::MAX;
            match what {
                0 => {
                    // Cut in the middle.
                    let _ = to.write_all(&bytes[..at]).await;
                    return;
                }
                1 => std::future::pending::<()>().await,
                2 => bytes[at] ^= 1 << rng.random_range(0..8),
                3 => tokio::time::sleep(Duration::from_millis(rng.random_range(1..400))).await,
                _ => {}
            }
        } else {
            left = left.saturating_sub(n as u64);
        }
        if to.write_all(bytes).await.is_err() {
            return;
        }
    }
}

/// The `version`-th value of a key: tells which key and version it is of, at its length and in every byte.
fn version(name: usize, version: u64) -> Vec<u8> {
    let len = match name % 4 {
        0 => 100,
        1 => PIECE + 17,
        2 => MIB,
        _ => 2 * MIB + 3,
    };
    let mut bytes = value(name as u64 * 1000 + version, len);
    bytes[..8].copy_from_slice(&version.to_le_bytes());
    bytes
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn r5_random_faults_between_processes_never_yield_other_bytes() {
    let seed = std::env::var("KVPOOL_TEST_SEED").map_or_else(|_| rand::random(), |seed| seed.parse().unwrap());
    println!("KVPOOL_TEST_SEED={seed}");
    let mut rng = StdRng::seed_from_u64(seed);
    let nodes = [Node::start(1).await, Node::start(2).await, Node::start(3).await];
    let mut relayed = Vec::new();
    for node in &nodes {
        relayed.push((node.number, relay(node.address, rng.random_range(0..1 << 40)).await));
    }
    let proxy = Proxy::start();
    let map = map_of(1, &relayed, &[(1, true), (2, true)]);
    nodes.iter().for_each(|node| assert!(node.router.adopt(&map)));
    proxy.router.adopt(&map);
    let routers = [&proxy.router, &nodes[0].router, &nodes[1].router, &nodes[2].router];
    let (mut hits, mut stored) = (0, 0);
    let mut tasks = tokio::task::JoinSet::new();
    for task in 0..4_u64 {
        let router = Arc::clone(routers[task as usize]);
        let mut rng = StdRng::seed_from_u64(seed.wrapping_add(task));
        tasks.spawn(async move {
            let (mut hits, mut stored) = (0, 0);
            for round in 0..40_u64 {
                let name = rng.random_range(0..8_usize);
                let started = Instant::now();
                match rng.random_range(0..5) {
                    0 | 1 => {
                        let bytes = version(name, task * 1000 + round);
                        let outcome = put(&router, &format!("key-{name}"), &bytes).await;
                        stored += u32::from(matches!(outcome, PutOutcome::Stored2 | PutOutcome::Stored1));
                    }
                    2 => drop(exists(&router, &format!("key-{name}")).await),
                    3 if round % 8 == 0 => {
                        router.del(&router.op(Front::Resp), &key(&format!("key-{name}"))).await;
                    }
                    _ => {
                        if let Got::Hit(got, _) = get(&router, &format!("key-{name}")).await {
                            let written = u64::from_le_bytes(got[..8].try_into().unwrap());
                            assert!(got == version(name, written), "key-{name}: not the bytes of one write");
                            hits += 1;
                        }
                    }
                }
                assert!(
                    started.elapsed() < PATIENCE,
                    "an operation took {:?}",
                    started.elapsed()
                );
            }
            (hits, stored)
        });
    }
    while let Some(done) = tasks.join_next().await {
        let (more_hits, more_stored) = done.unwrap();
        hits += more_hits;
        stored += more_stored;
    }
    println!("{hits} hits, {stored} stored");
    for node in &nodes {
        let store = node.router.store().unwrap();
        for slot in 0..SLOTS {
            for entry in store.slot_keys(slot, None, 100).entries {
                let block = node.router.peek(&entry.key).unwrap();
                assert!(block.verify());
                let name: usize = std::str::from_utf8(&entry.key[4..]).unwrap().parse().unwrap();
                let got = block.slices().collect::<Vec<_>>().concat();
                let written = u64::from_le_bytes(got[..8].try_into().unwrap());
                assert!(got == version(name, written), "stored bytes are those of one write");
            }
        }
    }
    eventually("staging is given back", || proxy.router.staging().held_bytes() == 0).await;
}
