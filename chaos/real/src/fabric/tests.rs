//! The network by itself: what arrives, when, and what the ends see.

use super::*;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

/// Longer than anything here takes; only reached when a test fails.
const LONG: Duration = Duration::from_secs(20);
/// How long something must not happen. A failure shows whenever it does; nothing depends on it being met exactly.
const QUIET: Duration = Duration::from_millis(300);

/// A member `server` whose connections are handed out, and this process as member `client`.
async fn world() -> (Fabric, u16, TcpListener) {
    let fabric = Fabric::new(7);
    let port = fabric.open_port("server").await.unwrap();
    let listener = TcpListener::bind(SocketAddr::from((INSIDE, port))).await.unwrap();
    fabric.set_pid("client", std::process::id());
    (fabric, port, listener)
}

async fn pair(port: u16, listener: &TcpListener) -> (TcpStream, TcpStream) {
    let client = TcpStream::connect(SocketAddr::from((OUTSIDE, port))).await.unwrap();
    let (server, _) = timeout(LONG, listener.accept()).await.unwrap().unwrap();
    (client, server)
}

async fn expect(stream: &mut TcpStream, what: &[u8]) {
    let mut got = vec![0; what.len()];
    timeout(LONG, stream.read_exact(&mut got)).await.unwrap().unwrap();
    assert_eq!(got, what);
}

async fn nothing(stream: &mut TcpStream) {
    let mut one = [0];
    let got = timeout(QUIET, stream.read(&mut one)).await;
    assert!(got.is_err(), "something came through: {got:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn bytes_and_ends_pass_both_ways() {
    let (_fabric, port, listener) = world().await;
    let (mut client, mut server) = pair(port, &listener).await;
    let body: Vec<u8> = (0..3_000_000_u32).map(|n| n as u8).collect();
    let sent = body.clone();
    let writing = tokio::spawn(async move {
        client.write_all(&sent).await.unwrap();
        client.shutdown().await.unwrap();
        client
    });
    let mut got = Vec::new();
    timeout(LONG, server.read_to_end(&mut got)).await.unwrap().unwrap();
    assert!(got == body);
    server.write_all(b"back").await.unwrap();
    drop(server);
    let mut client = writing.await.unwrap();
    expect(&mut client, b"back").await;
    assert_eq!(client.read(&mut [0]).await.unwrap(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cut_direction_is_silent_until_it_heals() {
    let (fabric, port, listener) = world().await;
    let (mut client, mut server) = pair(port, &listener).await;
    client.write_all(b"1").await.unwrap();
    expect(&mut server, b"1").await;
    fabric.change(|r| r.set("client", "server", Condition::cut()));
    client.write_all(b"2").await.unwrap();
    client.shutdown().await.unwrap();
    server.write_all(b"still").await.unwrap();
    expect(&mut client, b"still").await;
    nothing(&mut server).await;
    fabric.change(Rules::clear);
    expect(&mut server, b"2").await;
    assert_eq!(timeout(LONG, server.read(&mut [0])).await.unwrap().unwrap(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn no_connection_is_made_through_a_cut_in_either_direction() {
    let (fabric, port, listener) = world().await;
    for (from, to) in [("client", "server"), ("server", "client")] {
        fabric.change(|r| r.set(from, to, Condition::cut()));
        let mut client = TcpStream::connect(SocketAddr::from((OUTSIDE, port))).await.unwrap();
        client.write_all(b"x").await.unwrap();
        assert!(timeout(QUIET, listener.accept()).await.is_err());
        fabric.change(Rules::clear);
        let (mut server, _) = timeout(LONG, listener.accept()).await.unwrap().unwrap();
        expect(&mut server, b"x").await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn others_links_are_not_touched() {
    let (fabric, port, listener) = world().await;
    fabric.change(|r| r.set("somebody", "server", Condition::cut()));
    let (mut client, mut server) = pair(port, &listener).await;
    client.write_all(b"1").await.unwrap();
    expect(&mut server, b"1").await;
    assert_eq!(fabric.reset("somebody", "server"), 0);
    client.write_all(b"2").await.unwrap();
    expect(&mut server, b"2").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reset_reaches_both_ends() {
    let (fabric, port, listener) = world().await;
    let (mut client, mut server) = pair(port, &listener).await;
    client.write_all(b"1").await.unwrap();
    expect(&mut server, b"1").await;
    assert_eq!(fabric.reset("server", "client"), 1);
    for end in [&mut client, &mut server] {
        let error = timeout(LONG, end.read(&mut [0])).await.unwrap().unwrap_err();
        assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dead_member_refuses() {
    let (_fabric, port, listener) = world().await;
    drop(listener);
    let mut client = TcpStream::connect(SocketAddr::from((OUTSIDE, port))).await.unwrap();
    assert!(matches!(
        timeout(LONG, client.read(&mut [0])).await.unwrap(),
        Ok(0) | Err(_)
    ));
}

#[tokio::test(flavor = "multi_thread")]
async fn delay_loss_and_rate_slow_down_and_lose_nothing() {
    let (fabric, port, listener) = world().await;
    let slow = Condition {
        delay: Duration::from_millis(20),
        jitter: Duration::from_millis(20),
        loss_percent: 20,
        rate: 4 << 20,
        ..Condition::default()
    };
    fabric.change(|r| r.set("client", "server", slow));
    let (mut client, mut server) = pair(port, &listener).await;
    let body = vec![9_u8; 1 << 20];
    let sent = body.clone();
    let began = std::time::Instant::now();
    tokio::spawn(async move { client.write_all(&sent).await.map(|()| client) });
    let mut got = vec![0; body.len()];
    timeout(LONG, server.read_exact(&mut got)).await.unwrap().unwrap();
    assert!(got == body);
    assert!(began.elapsed() >= Duration::from_millis(240), "{:?}", began.elapsed());
}
