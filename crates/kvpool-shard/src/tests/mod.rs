//! Routing over real sockets: several shards and a proxy in one process, under maps that the test decides.

mod faults;
mod prop_faults;
mod routes;
mod transfers;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use kvpool_state::SLOTS;
use kvpool_state::records::{MapShard, SlotCopy, SlotMap, SlotRange};
use kvpool_store::{PIECE_BYTES, Store};
use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use crate::ops::{Body, Condition, Front, GetAnswer, MissReason, Op, Path, PutOutcome, PutSpec};
use crate::peer::server;
use crate::router::Router;

const TOKEN: &str = "a shared secret";
const POOL: &str = "default";

/// One shard: router, store and peer server.
struct Node {
    number: u32,
    router: Arc<Router>,
    address: SocketAddr,
    stop: CancellationToken,
    tasks: Vec<JoinHandle<()>>,
}

impl Node {
    async fn start(number: u32) -> Node {
        Node::with_store(number, 64 << 20).await
    }

    async fn with_store(number: u32, bytes: u64) -> Node {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let store = Store::new(bytes).unwrap();
        let (router, upkeep) = Router::new(format!("shard-{number}"), POOL.into(), TOKEN.into(), Some(store));
        router.identity().set_incarnation(incarnation(number));
        let stop = CancellationToken::new();
        let tasks = vec![
            tokio::spawn(server::serve(listener, Arc::clone(&router), stop.clone())),
            tokio::spawn(upkeep.run(stop.clone())),
        ];
        Node {
            number,
            router,
            address,
            stop,
            tasks,
        }
    }

    /// Ends the peer server as a kill would: every connection closes.
    async fn kill(&mut self) {
        self.stop.cancel();
        for task in self.tasks.drain(..) {
            task.await.unwrap();
        }
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

fn incarnation(number: u32) -> u64 {
    u64::from(number) + 100
}

/// A process without a store.
struct Proxy {
    router: Arc<Router>,
    stop: CancellationToken,
}

impl Proxy {
    fn start() -> Proxy {
        let (router, upkeep) = Router::new("proxy".into(), POOL.into(), TOKEN.into(), None);
        let stop = CancellationToken::new();
        tokio::spawn(upkeep.run(stop.clone()));
        Proxy { router, stop }
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

/// A map in which every slot has the list `copies` (shard number, in-sync).
fn map_of(epoch: u64, nodes: &[(u32, SocketAddr)], copies: &[(u32, bool)]) -> Arc<SlotMap> {
    let shards = nodes.iter().map(|(number, address)| MapShard {
        number: *number,
        id: format!("shard-{number}"),
        incarnation: incarnation(*number),
        node: format!("node-{number}"),
        peer: address.to_string(),
        up: true,
        dropped_at: 0,
    });
    let copies = copies.iter().map(|(shard, in_sync)| SlotCopy {
        shard: *shard,
        in_sync: *in_sync,
    });
    Arc::new(SlotMap {
        pool: POOL.into(),
        cluster_id: "cluster".into(),
        cluster_generation: 1,
        epoch,
        generation: 1,
        factor: 2,
        shards: shards.collect(),
        ranges: vec![SlotRange {
            first: 0,
            last: u32::from(SLOTS) - 1,
            copies: copies.collect(),
        }],
    })
}

fn addresses(nodes: &[Node]) -> Vec<(u32, SocketAddr)> {
    nodes.iter().map(|node| (node.number, node.address)).collect()
}

/// `count` shards and a proxy; every slot's list is 1, 2, … of `copies`.
async fn cluster(count: u32, copies: &[(u32, bool)]) -> (Vec<Node>, Proxy) {
    let mut nodes = Vec::new();
    for number in 1..=count {
        nodes.push(Node::start(number).await);
    }
    let proxy = Proxy::start();
    let map = map_of(1, &addresses(&nodes), copies);
    nodes.iter().for_each(|node| assert!(node.router.adopt(&map)));
    assert!(proxy.router.adopt(&map));
    (nodes, proxy)
}

/// Bytes that differ at every place and between seeds.
fn value(seed: u64, len: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut out = Vec::with_capacity(len + 8);
    while out.len() < len {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        out.extend_from_slice(&state.to_le_bytes());
    }
    out.truncate(len);
    out
}

fn key(name: &str) -> Bytes {
    Bytes::copy_from_slice(name.as_bytes())
}

fn spec(len: usize) -> PutSpec {
    PutSpec {
        len: len as u64,
        meta: None,
        ttl: None,
        condition: Condition::Always,
    }
}

async fn put(router: &Arc<Router>, name: &str, bytes: &[u8]) -> PutOutcome {
    put_as(router, &router.op(Front::Resp), name, bytes).await
}

async fn put_as(router: &Arc<Router>, op: &Op, name: &str, bytes: &[u8]) -> PutOutcome {
    let mut sink = router.put(op, &key(name), spec(bytes.len())).await;
    let mut rest = bytes;
    while sink.remaining() > 0 {
        let spare = sink.spare();
        assert!(!spare.is_empty(), "a sink always has room for what remains");
        let n = spare.len().min(rest.len()).min(100_000);
        spare[..n].copy_from_slice(&rest[..n]);
        rest = &rest[n..];
        sink.advance(n).await;
    }
    sink.finish().await
}

/// Reads a body to its end; `None` when it was lost.
async fn drain(body: &mut Body) -> Option<Vec<u8>> {
    let mut out = Vec::new();
    loop {
        match body.next().await {
            Ok(Some(piece)) => out.extend_from_slice(piece.as_ref()),
            Ok(None) => return Some(out),
            Err(_) => return None,
        }
    }
}

enum Got {
    Hit(Vec<u8>, Path),
    Miss(MissReason),
    Lost,
}

async fn get(router: &Arc<Router>, name: &str) -> Got {
    let op = router.op(Front::Resp);
    match router.get(&op, &key(name)).await {
        GetAnswer::Miss { reason, .. } => Got::Miss(reason),
        GetAnswer::Hit {
            info, mut body, path, ..
        } => match drain(&mut body).await {
            Some(bytes) => {
                assert_eq!(bytes.len() as u64, info.len);
                Got::Hit(bytes, path)
            }
            None => Got::Lost,
        },
    }
}

async fn expect(router: &Arc<Router>, name: &str, bytes: &[u8], wanted: Path) {
    match get(router, name).await {
        Got::Hit(got, path) => {
            assert!(got == bytes, "{name}: other bytes came back");
            assert_eq!(path, wanted, "{name}");
        }
        Got::Miss(reason) => panic!("{name}: a miss, {reason:?}"),
        Got::Lost => panic!("{name}: the body was lost"),
    }
}

async fn exists(router: &Arc<Router>, name: &str) -> bool {
    let op = router.op(Front::Resp);
    router.exists(&op, &key(name)).await.hit.is_some()
}

/// Waits for something that must come true, for as long as a loaded machine may need.
async fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    for _ in 0..2000 {
        if holds() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("never: {what}");
}

const MIB: usize = 1 << 20;
const PIECE: usize = PIECE_BYTES;
