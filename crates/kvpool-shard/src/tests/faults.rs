//! Peers that die, freeze, stall or lie: what the other side sees of it.

use super::*;
use crate::ops::DropReason;
use crate::peer::BreakerState;
use kvpool_wire::peer::hello::HELLO_PREFIX_BYTES;
use kvpool_wire::peer::{
    ENVELOPE_BYTES, FRAME_BYTES, FrameHead, HelloReply, HelloStatus, Info, Known, Reply, ReplyHead, Usual,
};
use std::sync::atomic::{AtomicUsize, Ordering};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::Instant;

/// Longest a single-key call may take, whatever one peer does (the product's promise).
const PROMISE: Duration = Duration::from_secs(1);

/// A listener that accepts and never says a word: what a frozen process looks like.
async fn frozen() -> (SocketAddr, Arc<AtomicUsize>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let accepted = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&accepted);
    tokio::spawn(async move {
        let mut open = Vec::new();
        while let Ok((stream, _)) = listener.accept().await {
            count.fetch_add(1, Ordering::Relaxed);
            open.push(stream);
        }
    });
    (address, accepted)
}

/// A shard made of wire: greets, reads each request and answers GET with what the script says.
#[derive(Clone)]
struct Liar {
    number: u32,
    bytes: Arc<Vec<u8>>,
    write_id: u64,
    copies: u8,
    /// Frames it sends before it stops.
    frames: usize,
    then: Then,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Then {
    Close,
    Freeze,
    /// One frame with a flipped bit under a sum of the true bytes.
    Lie,
}

impl Liar {
    async fn start(self) -> SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let liar = self.clone();
                tokio::spawn(async move { liar.serve(stream).await });
            }
        });
        address
    }

    async fn envelope(stream: &mut TcpStream, prefix: usize) -> Option<Vec<u8>> {
        let mut front = vec![0; prefix + ENVELOPE_BYTES];
        stream.read_exact(&mut front).await.ok()?;
        let len = u32::from_le_bytes(front[prefix..prefix + 4].try_into().unwrap());
        let mut body = vec![0; len as usize];
        stream.read_exact(&mut body).await.ok()?;
        Some(body)
    }

    async fn serve(self, mut stream: TcpStream) -> Option<()> {
        Self::envelope(&mut stream, HELLO_PREFIX_BYTES).await?;
        let known = Known {
            cluster_generation: 1,
            epoch: 1,
            generation: 1,
        };
        let id = format!("shard-{}", self.number);
        let mut out = Vec::new();
        let status = HelloStatus::Welcome;
        let incarnation = incarnation(self.number);
        HelloReply {
            version: 1,
            status,
            cluster_id: "cluster",
            id: &id,
            incarnation,
            known,
        }
        .encode(&mut out);
        stream.write_all(&out).await.ok()?;
        loop {
            Self::envelope(&mut stream, 0).await?;
            let info = Info {
                len: self.bytes.len() as u64,
                write_id: self.write_id,
                copies: self.copies,
                meta: None,
                ttl_ms: None,
            };
            let mut out = Vec::new();
            ReplyHead {
                known,
                reply: Reply::Hit {
                    info,
                    usual: Usual::Unknown,
                },
            }
            .encode(&mut out);
            for (at, frame) in self.bytes.chunks(FRAME_BYTES).enumerate().take(self.frames + 1) {
                let crc = crc32c::crc32c(frame);
                let mut frame = frame.to_vec();
                if at == self.frames {
                    if self.then != Then::Lie {
                        break;
                    }
                    frame[0] ^= 4;
                }
                out.extend_from_slice(&FrameHead::Data { len: frame.len(), crc }.encode());
                out.extend_from_slice(&frame);
            }
            stream.write_all(&out).await.ok()?;
            if self.then == Then::Close {
                return None;
            }
            std::future::pending::<()>().await;
        }
    }
}

/// Shard 1 is `first`; shard 2 is real and holds `name`.
async fn with_replica(first: impl AsyncFnOnce(u64) -> SocketAddr, name: &str, bytes: &[u8]) -> (Node, Proxy) {
    let second = Node::start(2).await;
    second.router.adopt(&map_of(1, &[(2, second.address)], &[(2, true)]));
    assert_eq!(put(&second.router, name, bytes).await, PutOutcome::Stored1);
    let write_id = second.router.peek(name.as_bytes()).unwrap().write_id();
    let address = first(write_id).await;
    let map = map_of(2, &[(1, address), (2, second.address)], &[(1, true), (2, true)]);
    second.router.adopt(&map);
    let proxy = Proxy::start();
    proxy.router.adopt(&map);
    (second, proxy)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_body_that_stops_is_finished_from_the_other_copy() {
    let bytes = value(3, 4 * MIB + 5);
    for then in [Then::Close, Then::Freeze, Then::Lie] {
        for frames in [0, 1, 7, 16] {
            let liar = |write_id| {
                let liar = Liar {
                    number: 1,
                    bytes: Arc::new(bytes.clone()),
                    write_id,
                    copies: 2,
                    frames,
                    then,
                };
                liar.start()
            };
            let (_second, proxy) = with_replica(liar, "k", &bytes).await;
            let started = Instant::now();
            match get(&proxy.router, "k").await {
                Got::Hit(got, _) => assert!(got == bytes, "other bytes came back"),
                Got::Miss(reason) => panic!("a miss after {frames} frames: {reason:?}"),
                Got::Lost => panic!("lost after {frames} frames"),
            }
            assert!(started.elapsed() < PROMISE);
            eventually("staging is given back", || proxy.router.staging().held_bytes() == 0).await;
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_a_second_copy_nothing_is_promised_before_all_is_there() {
    let bytes = value(3, 4 * MIB + 5);
    for then in [Then::Close, Then::Freeze, Then::Lie] {
        let liar = Liar {
            number: 1,
            bytes: Arc::new(bytes.clone()),
            write_id: 5,
            copies: 1,
            frames: 7,
            then,
        };
        let address = liar.start().await;
        let proxy = Proxy::start();
        proxy.router.adopt(&map_of(1, &[(1, address)], &[(1, true)]));
        let started = Instant::now();
        assert!(
            matches!(get(&proxy.router, "k").await, Got::Miss(_)),
            "a miss, not half a block"
        );
        assert!(started.elapsed() < PROMISE);
    }
    let whole = Liar {
        number: 1,
        bytes: Arc::new(bytes.clone()),
        write_id: 5,
        copies: 1,
        frames: 99,
        then: Then::Freeze,
    };
    let proxy = Proxy::start();
    proxy
        .router
        .adopt(&map_of(1, &[(1, whole.start().await)], &[(1, true)]));
    expect(&proxy.router, "k", &bytes, Path::Forwarded).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn another_write_of_the_key_never_finishes_a_body() {
    let bytes = value(3, 2 * MIB);
    let liar = |_| {
        let write_id = 77; // not the one that the replica holds
        let liar = Liar {
            number: 1,
            bytes: Arc::new(value(4, 2 * MIB)),
            write_id,
            copies: 2,
            frames: 2,
            then: Then::Close,
        };
        liar.start()
    };
    let (_second, proxy) = with_replica(liar, "k", &bytes).await;
    assert!(
        matches!(get(&proxy.router, "k").await, Got::Lost),
        "rather lost than mixed from two writes"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn o15_a_frozen_primary_costs_one_deadline_and_no_miss() {
    let bytes = value(5, MIB);
    let accepted = Arc::new(AtomicUsize::new(0));
    let freeze = async |_| {
        let (address, count) = frozen().await;
        let accepted = Arc::clone(&accepted);
        tokio::spawn(async move {
            loop {
                accepted.store(count.load(Ordering::Relaxed), Ordering::Relaxed);
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        });
        address
    };
    let (second, proxy) = with_replica(freeze, "k", &bytes).await;
    let started = Instant::now();
    for _ in 0..64 {
        let one = Instant::now();
        expect(&proxy.router, "k", &bytes, Path::Replica).await;
        assert!(exists(&proxy.router, "k").await);
        assert!(one.elapsed() < PROMISE);
    }
    // 128 operations; one by one each would wait 150 ms, 19 s in all.
    assert!(
        started.elapsed() < Duration::from_secs(8),
        "a deadline was paid per key: {:?}",
        started.elapsed()
    );
    // Writes go to the copy that answers, and to nobody's loss.
    let first = Instant::now();
    assert_eq!(put(&proxy.router, "new", &bytes).await, PutOutcome::Stored1);
    assert!(first.elapsed() < PROMISE);
    assert!(second.router.peek(b"new").is_some());
    assert!(!exists(&proxy.router, "absent").await);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_copy_that_is_back_serves_at_once_when_it_is_the_last_one() {
    let (mut nodes, proxy) = cluster(2, &[(1, true), (2, true)]).await;
    put(&proxy.router, "k", b"v").await;
    let routing = proxy.router.routing_now();
    let peer = &routing.peers[&1];
    // It failed a while ago, is back, and no probe has got through since.
    peer.failed();
    tokio::time::sleep(Duration::from_millis(700)).await;
    peer.failed();
    nodes[1].kill().await;
    let back = async {
        loop {
            peer.failed();
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    let read = async {
        // Skipped for a second after it failed, then the first to need it finds it.
        loop {
            if let Got::Hit(..) = get(&proxy.router, "k").await {
                break;
            }
        }
    };
    tokio::select! {
        () = back => {}
        read = tokio::time::timeout(Duration::from_secs(20), read) => read.expect("the last copy was never asked"),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_dead_copies_cost_a_deadline_a_second_and_not_one_per_key() {
    let addresses = [(1, frozen().await.0), (2, frozen().await.0)];
    let proxy = Proxy::start();
    proxy.router.adopt(&map_of(1, &addresses, &[(1, true), (2, true)]));
    assert!(!exists(&proxy.router, "first").await);
    let started = Instant::now();
    let mut slow = 0;
    for at in 0..200 {
        let one = Instant::now();
        assert!(!exists(&proxy.router, &format!("k{at}")).await);
        assert!(one.elapsed() < PROMISE);
        slow += u32::from(one.elapsed() > Duration::from_millis(100));
    }
    // One by one each would wait 500 ms, 100 s in all.
    let seconds = started.elapsed().as_secs();
    assert!(
        u64::from(slow) <= 2 * (seconds + 1),
        "{slow} operations waited in {seconds} s"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_put_to_a_frozen_primary_is_stored_at_the_replica_within_the_promise() {
    for len in [100, 3 * MIB, 40 * MIB] {
        let (second, proxy) = with_replica(async |_| frozen().await.0, "k", b"v").await;
        let bytes = value(6, len);
        let started = Instant::now();
        let outcome = put(&proxy.router, "new", &bytes).await;
        assert!(started.elapsed() < PROMISE, "{len} bytes took {:?}", started.elapsed());
        if len > 36 * MIB {
            // Too long to be kept for another try.
            assert!(
                matches!(outcome, PutOutcome::Dropped(DropReason::Stalled)),
                "{outcome:?}"
            );
        } else {
            assert_eq!(outcome, PutOutcome::Stored1);
            expect(&second.router, "new", &bytes, Path::Replica).await;
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stalled_replica_makes_a_write_degraded_and_no_slower_than_the_promise() {
    let first = Node::start(1).await;
    let (address, _) = frozen().await;
    let map = map_of(1, &[(1, first.address), (2, address)], &[(1, true), (2, true)]);
    first.router.adopt(&map);
    let proxy = Proxy::start();
    proxy.router.adopt(&map);
    let bytes = value(7, 5 * MIB);
    for (at, router) in [&first.router, &proxy.router, &first.router, &proxy.router]
        .into_iter()
        .enumerate()
    {
        let started = Instant::now();
        let name = format!("k{at}");
        assert_eq!(put(router, &name, &bytes).await, PutOutcome::Stored1);
        assert!(started.elapsed() < PROMISE);
        expect(&first.router, &name, &bytes, Path::Local).await;
        let GetAnswer::Hit { info, .. } = proxy.router.get(&proxy.router.op(Front::Resp), &key(&name)).await else {
            panic!("it is there")
        };
        assert_eq!(info.copies, 1, "nobody confirmed a second copy");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_primary_is_skipped_and_a_returning_peer_catches_up() {
    let (mut nodes, proxy) = cluster(2, &[(1, true), (2, true)]).await;
    let bytes = value(8, 2 * MIB);
    assert_eq!(put(&proxy.router, "before", &bytes).await, PutOutcome::Stored2);
    assert_eq!(put(&proxy.router, "removed", &bytes).await, PutOutcome::Stored2);
    let address = nodes[0].address;
    nodes[0].kill().await;
    for _ in 0..10 {
        let started = Instant::now();
        expect(&proxy.router, "before", &bytes, Path::Replica).await;
        assert!(started.elapsed() < PROMISE);
    }
    assert_eq!(put(&proxy.router, "during", &bytes).await, PutOutcome::Stored1);
    assert!(proxy.router.del(&proxy.router.op(Front::Resp), &key("removed")).await);
    // The same process answers again (it was cut off, not restarted).
    let listener = TcpListener::bind(address).await.unwrap();
    let stop = CancellationToken::new();
    let router = Arc::clone(&nodes[0].router);
    tokio::spawn(server::serve(listener, router, stop.clone()));
    let first = Arc::clone(&nodes[0].router);
    eventually("the probe finds it", || {
        proxy.router.routing().peers[&1].state() == BreakerState::Closed
    })
    .await;
    eventually("it gets the write that it missed", || first.peek(b"during").is_some()).await;
    eventually("and the removal", || first.peek(b"removed").is_none()).await;
    eventually("and counts as a confirmed copy again", || {
        nodes[1].router.routing().peers[&1].gaps.is_confirmed(b"during")
    })
    .await;
    expect(&proxy.router, "during", &bytes, Path::Forwarded).await;
    stop.cancel();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn all_copies_gone_is_a_quick_miss() {
    let (mut nodes, proxy) = cluster(2, &[(1, true), (2, true)]).await;
    put(&proxy.router, "k", b"v").await;
    for node in &mut nodes {
        node.kill().await;
    }
    for _ in 0..100 {
        let started = Instant::now();
        assert!(matches!(
            get(&proxy.router, "k").await,
            Got::Miss(MissReason::OwnerDown)
        ));
        assert_eq!(
            put(&proxy.router, "k", &value(1, MIB)).await,
            PutOutcome::Dropped(DropReason::OwnerDown)
        );
        assert!(started.elapsed() < PROMISE);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn o06_a_restarted_shard_of_another_incarnation_is_not_taken_for_the_old_one() {
    let (nodes, proxy) = cluster(2, &[(1, true), (2, true)]).await;
    put(&proxy.router, "k", b"v").await;
    nodes[0].router.leave();
    nodes[0].router.enlist(999);
    nodes[0].router.set_serving(true);
    // The map still names the old incarnation: it is skipped, and the replica answers.
    expect(&proxy.router, "k", b"v", Path::Replica).await;
    assert_eq!(put(&proxy.router, "k2", b"v").await, PutOutcome::Stored1);
    assert!(matches!(get(&nodes[0].router, "k").await, Got::Hit(_, Path::Forwarded)));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_shard_that_may_not_serve_sends_others_elsewhere_and_answers_misses() {
    let (nodes, proxy) = cluster(1, &[(1, true)]).await;
    put(&proxy.router, "k", b"v").await;
    nodes[0].router.set_serving(false);
    assert!(matches!(
        get(&proxy.router, "k").await,
        Got::Miss(MissReason::OwnerDown)
    ));
    assert!(matches!(
        get(&nodes[0].router, "k").await,
        Got::Miss(MissReason::OwnerDown)
    ));
    assert_eq!(
        put(&nodes[0].router, "k", b"v").await,
        PutOutcome::Dropped(DropReason::OwnerDown)
    );
    nodes[0].router.set_serving(true);
    expect(&nodes[0].router, "k", b"v", Path::Local).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn o13_foreign_protocols_on_the_peer_port_get_a_short_answer_and_a_close() {
    let (nodes, proxy) = cluster(1, &[(1, true)]).await;
    for (sent, answer) in [
        (&b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"[..], &b"HTTP/1.1 400"[..]),
        (b"\x16\x03\x01\x02\x00\x01\x00", b"\x15\x03"),
        (b"*1\r\n$4\r\nPING\r\n", b"-ERR"),
        (b"\0\0\0\0\0\0\0\0", b""),
        (b"KVP\x01\x01\0\x01\0\xff\xff\xff\xff\0\0\0\0", b""),
    ] {
        let mut stream = TcpStream::connect(nodes[0].address).await.unwrap();
        stream.write_all(sent).await.unwrap();
        let mut got = Vec::new();
        tokio::time::timeout(Duration::from_secs(10), stream.read_to_end(&mut got))
            .await
            .expect("closed")
            .ok();
        assert!(got.starts_with(answer), "{got:?}");
        assert!(got.len() < 300);
    }
    assert_eq!(put(&proxy.router, "k", b"v").await, PutOutcome::Stored1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_wrong_token_or_cluster_is_refused() {
    let (nodes, _proxy) = cluster(1, &[(1, true)]).await;
    let (stranger, _upkeep) = Router::new("proxy".into(), POOL.into(), "wrong".into(), None);
    stranger.adopt(&map_of(1, &addresses(&nodes), &[(1, true)]));
    assert!(matches!(get(&stranger, "k").await, Got::Miss(MissReason::OwnerDown)));
    let other = Proxy::start();
    let mut map = (*map_of(1, &addresses(&nodes), &[(1, true)])).clone();
    map.cluster_id = "another".into();
    assert!(other.router.adopt(&Arc::new(map)));
    assert_eq!(
        put(&other.router, "k", b"v").await,
        PutOutcome::Dropped(DropReason::OwnerDown)
    );
}

/// Relays to `to`, each piece of the stream late by `delay`.
async fn slow_path(to: SocketAddr, delay: Duration) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((client, _)) = listener.accept().await {
            tokio::spawn(async move {
                let Ok(server) = TcpStream::connect(to).await else {
                    return;
                };
                let (mut client_read, mut client_write) = client.into_split();
                let (mut server_read, mut server_write) = server.into_split();
                let there = async {
                    let mut buffer = vec![0; 1 << 16];
                    while let Ok(n @ 1..) = client_read.read(&mut buffer).await {
                        tokio::time::sleep(delay).await;
                        if server_write.write_all(&buffer[..n]).await.is_err() {
                            break;
                        }
                    }
                };
                let back = tokio::io::copy(&mut server_read, &mut client_write);
                tokio::select! {
                    () = there => {}
                    _ = back => {}
                }
            });
        }
    });
    address
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn o18_a_slow_path_to_one_shard_costs_time_within_the_promise_and_no_hits() {
    let nodes = [Node::start(1).await, Node::start(2).await];
    let slow = slow_path(nodes[0].address, Duration::from_millis(300)).await;
    let map = map_of(1, &[(1, slow), (2, nodes[1].address)], &[(1, true), (2, true)]);
    nodes.iter().for_each(|node| assert!(node.router.adopt(&map)));
    let bytes = value(9, MIB);
    for at in 0..8 {
        put(&nodes[1].router, &format!("k{at}"), &bytes).await;
        assert!(nodes[1].router.peek(format!("k{at}").as_bytes()).is_some());
    }
    let proxy = Proxy::start();
    proxy.router.adopt(&map);
    for round in 0..24 {
        let started = Instant::now();
        let name = format!("k{}", round % 8);
        let Got::Hit(got, _) = get(&proxy.router, &name).await else {
            panic!("{name}: both copies are alive")
        };
        assert!(got == bytes);
        assert!(started.elapsed() < PROMISE, "{:?}", started.elapsed());
        let started = Instant::now();
        let outcome = put(&proxy.router, &format!("new{round}"), &bytes).await;
        assert!(
            matches!(outcome, PutOutcome::Stored1 | PutOutcome::Stored2),
            "{outcome:?}"
        );
        assert!(started.elapsed() < PROMISE, "{:?}", started.elapsed());
    }
    assert_ne!(
        proxy.router.routing().peers[&1].state(),
        BreakerState::Closed,
        "and the breaker shows it"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn o04_what_a_lookup_promised_outlives_eviction_and_the_loss_of_the_primary() {
    let (mut nodes, proxy) = cluster(2, &[(1, true), (2, true)]).await;
    let bytes = |at: u64| value(at, 128 << 10);
    for at in 0..64 {
        assert_eq!(
            put(&proxy.router, &format!("promised-{at}"), &bytes(at)).await,
            PutOutcome::Stored2
        );
    }
    for at in 0..64 {
        assert!(exists(&proxy.router, &format!("promised-{at}")).await);
    }
    // Both copies hold leases on all of them: 8 MiB each.
    for node in &nodes {
        let leased = || node.router.store().unwrap().stats().leased >= 8 << 20;
        eventually("leased at both copies", leased).await;
    }
    for at in 0..200 {
        put(&proxy.router, &format!("pressure-{at}"), &value(at, MIB)).await;
    }
    for node in &nodes {
        let counts = node.router.store().unwrap().stats().counts;
        assert!(counts.evicted_small + counts.evicted_main > 0, "there was pressure");
    }
    for at in 0..64 {
        expect(&proxy.router, &format!("promised-{at}"), &bytes(at), Path::Forwarded).await;
    }
    nodes[0].kill().await;
    for at in 0..64 {
        expect(&proxy.router, &format!("promised-{at}"), &bytes(at), Path::Replica).await;
    }
}
