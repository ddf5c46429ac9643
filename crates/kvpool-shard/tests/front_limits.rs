//! Bounds in number and time. Where minutes pass they pass at once, on tokio's own clock: see [`skip`].

#![allow(clippy::unwrap_used)]

mod front_support;

use std::time::Duration;

use front_support::{BF16, Client, MIB, Server, counted, eventually, lm_request, pattern};
use kvpool_shard::front::FrontLimits;
use kvpool_wire::lm::LmCommand;

/// Lets time pass while nothing else happens. Only here does the clock stand still and jump: while data is on its way
/// through the kernel every task waits, and a paused clock would take that for idleness.
async fn skip(time: Duration) {
    tokio::time::pause();
    tokio::time::sleep(time).await;
    tokio::time::resume();
}

fn still_open(client: &Client) {
    let mut byte = [0];
    let error = client.stream.try_read(&mut byte).map_err(|error| error.kind());
    assert_eq!(error, Err(std::io::ErrorKind::WouldBlock));
}

#[tokio::test]
async fn o13_an_idle_client_is_served_after_15_minutes() {
    let server = Server::start().await;
    let mut fresh = server.resp().await;
    let mut resp = server.resp().await;
    let mut lm = server.lm().await;
    resp.expect("SET k v", "+OK\r\n").await;
    lm.lm_put("l", BF16, b"value").await;
    assert!(lm.lm_exist("l").await);
    skip(Duration::from_secs(15 * 60)).await;
    resp.expect("GET k", "$1\r\nv\r\n").await;
    resp.expect("SET k w", "+OK\r\n").await;
    assert_eq!(lm.lm_get("l").await, Some((BF16, b"value".to_vec())));
    lm.lm_put("l", BF16, b"other").await;
    assert!(lm.lm_exist("l").await);
    fresh.in_step().await;
    server.stop().await;
}

#[tokio::test]
async fn a_half_sent_header_is_given_up_after_30_seconds() {
    let server = Server::start().await;
    for (address, half) in [
        (server.resp, &b"*2\r\n$3\r\nGET\r\n$10\r\nabc"[..]),
        (server.resp, b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$2\r\nvv"),
        (server.resp, b"PIN"),
        (server.lm, &lm_request(LmCommand::Get, b"k", BF16, 0)[..100]),
        (server.lm, &[2]),
    ] {
        let mut client = Client::connect(address).await;
        client.send(half).await;
        skip(Duration::from_secs(29)).await;
        still_open(&client);
        skip(Duration::from_secs(2)).await;
        assert_eq!(client.read_to_end().await, b"");
    }
    assert!(counted("kvpool_shard_refused_input_total", &["reason=half_header"]) >= 4);
    server.stop().await;
}

#[tokio::test]
async fn half_sent_headers_beyond_the_slots_get_a_second_and_others_are_served() {
    let server = Server::start().await;
    let mut patient = Vec::new();
    for _ in 0..512 {
        let mut client = server.resp().await;
        client.send(b"*1\r\n$4\r\nPI").await;
        patient.push(client);
    }
    skip(Duration::from_millis(10)).await;
    let mut late = server.resp().await;
    late.send(b"*1\r\n$4\r\nPI").await;
    skip(Duration::from_secs(2)).await;
    assert_eq!(late.read_to_end().await, b"");
    let mut whole = server.resp().await;
    whole.in_step().await;
    // Those with a slot are still there, and a finished header gives the slot back.
    let mut first = patient.swap_remove(0);
    first.send(b"NG\r\n").await;
    first.expect_bytes(b"+PONG\r\n", b"PING").await;
    let mut next = server.resp().await;
    next.send(b"*1\r\n$4\r\nPI").await;
    skip(Duration::from_secs(10)).await;
    next.send(b"NG\r\n").await;
    next.expect_bytes(b"+PONG\r\n", b"PING").await;
    server.stop().await;
}

#[tokio::test]
async fn an_upload_that_stops_frees_its_memory_and_keeps_its_connection() {
    let server = Server::with(FrontLimits::default(), 64 * MIB as u64).await;
    let mut resp = server.resp().await;
    resp.send(b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$20971520\r\n").await;
    resp.send(&vec![1; MIB]).await;
    let mut lm = server.lm().await;
    lm.send(&lm_request(LmCommand::Put, b"l", BF16, 20 << 20)).await;
    lm.send(&vec![2; MIB]).await;
    skip(Duration::from_secs(31)).await;
    // Both reservations are gone: blocks that need their room fit.
    let mut other = server.lm().await;
    for key in ["a", "b"] {
        eventually("room", async || {
            other.lm_put(key, BF16, &pattern(3, 24 * MIB)).await;
            other.lm_exist(key).await
        })
        .await;
    }
    // The clients come back, finish, and are in step. What they sent was dropped.
    resp.send(&vec![1; 19 * MIB]).await;
    resp.send(b"\r\n").await;
    resp.expect_bytes(b"+OK\r\n", b"SET").await;
    resp.expect("EXISTS k", ":0\r\n").await;
    lm.send(&vec![2; 19 * MIB]).await;
    assert!(!lm.lm_exist("l").await);
    assert!(counted("kvpool_shard_put_total", &["outcome=dropped", "reason=stalled"]) >= 2);
    server.stop().await;
}

#[tokio::test]
async fn a_client_that_stops_reading_is_given_up_after_a_minute() {
    let server = Server::start().await;
    let mut client = server.resp().await;
    client
        .expect_args(&[b"SET", b"k", &pattern(1, 32 * MIB)], b"+OK\r\n")
        .await;
    for _ in 0..4 {
        client.command(&[b"GET", b"k"]).await;
    }
    let given_up = || {
        counted(
            "kvpool_shard_refused_input_total",
            &["front=resp", "reason=slow_reader"],
        ) > 0
    };
    skip(Duration::from_secs(55)).await;
    assert!(!given_up());
    eventually("given up", async || {
        skip(Duration::from_secs(6)).await;
        given_up()
    })
    .await;
    server.resp().await.in_step().await;
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connections_are_bounded_and_a_closed_one_makes_room() {
    let limits = FrontLimits {
        max_connections: 3,
        ..FrontLimits::default()
    };
    let server = Server::with(limits, 16 * MIB as u64).await;
    let mut open = Vec::new();
    for _ in 0..3 {
        let mut client = server.resp().await;
        client.in_step().await;
        open.push(client);
    }
    let mut refused = server.resp().await;
    assert_eq!(refused.read_to_end().await, b"-ERR max number of clients reached\r\n");
    for client in &mut open {
        client.in_step().await;
    }
    open.pop();
    eventually("room again", async || {
        let mut client = server.resp().await;
        client.send(b"PING\r\n").await;
        client.read(1).await == b"+"
    })
    .await;
    // Each port counts for itself.
    let mut lm = server.lm().await;
    lm.lm_put("k", BF16, b"v").await;
    assert!(lm.lm_exist("k").await);
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stopping_ends_idle_connections_at_once_and_others_soon() {
    let server = Server::start().await;
    let mut idle = server.resp().await;
    idle.in_step().await;
    let mut half = server.resp().await;
    half.send(b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$100\r\nhalf").await;
    let lm = server.lm().await;
    server.stop().await;
    for mut client in [idle, half, lm] {
        assert_eq!(client.read_to_end().await, b"");
    }
}
