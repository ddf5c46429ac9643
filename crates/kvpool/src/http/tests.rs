use std::sync::atomic::{AtomicBool, Ordering};

use metrics_exporter_prometheus::PrometheusBuilder;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::*;

struct Server {
    address: std::net::SocketAddr,
    well: Arc<AtomicBool>,
    shutdown: CancellationToken,
}

async fn server() -> Server {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let (well, shutdown) = (Arc::new(AtomicBool::new(false)), CancellationToken::new());
    let handle = PrometheusBuilder::new().build_recorder().handle();
    let asked = well.clone();
    let obstacles = move || {
        if asked.load(Ordering::Relaxed) {
            vec![]
        } else {
            vec!["no slot map".to_owned()]
        }
    };
    tokio::spawn(serve(listener, Probes::new(handle, obstacles), shutdown.clone()));
    Server {
        address,
        well,
        shutdown,
    }
}

async fn ask(server: &Server, request: &str) -> String {
    let mut stream = TcpStream::connect(server.address).await.unwrap();
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut reply = String::new();
    stream.read_to_string(&mut reply).await.unwrap();
    reply
}

async fn get(server: &Server, path: &str) -> String {
    ask(
        server,
        &format!("GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"),
    )
    .await
}

#[tokio::test]
async fn probes_say_why_not() {
    let server = server().await;
    assert!(get(&server, "/livez").await.starts_with("HTTP/1.1 200"));
    let reply = get(&server, "/readyz").await;
    assert!(
        reply.starts_with("HTTP/1.1 503") && reply.ends_with("not ready: no slot map\n"),
        "{reply}"
    );
    server.well.store(true, Ordering::Relaxed);
    assert!(get(&server, "/readyz").await.starts_with("HTTP/1.1 200"));
    let reply = get(&server, "/metrics").await;
    assert!(reply.contains("text/plain"), "{reply}");
    assert!(get(&server, "/").await.starts_with("HTTP/1.1 404"));
    assert!(
        ask(
            &server,
            "POST /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
        )
        .await
        .contains(" 405 ")
    );
}

#[tokio::test]
async fn bad_input_is_closed_and_others_are_served() {
    let server = server().await;
    let long = format!("GET /livez HTTP/1.1\r\nx: {}\r\n\r\n", "y".repeat(2 * MAX_HEAD));
    for bytes in ["\u{0}\u{1}\u{2} garbage\r\n\r\n", &long] {
        // The server may close while the rest is still being sent.
        let mut stream = TcpStream::connect(server.address).await.unwrap();
        let _ = stream.write_all(bytes.as_bytes()).await;
        let mut reply = Vec::new();
        let _ = stream.read_to_end(&mut reply).await;
        assert!(!String::from_utf8_lossy(&reply).starts_with("HTTP/1.1 200"));
    }
    assert!(get(&server, "/livez").await.starts_with("HTTP/1.1 200"));
}

#[tokio::test]
async fn connections_beyond_the_limit_are_closed() {
    let server = server().await;
    let mut held = Vec::new();
    for _ in 0..MAX_CONNECTIONS {
        let mut stream = TcpStream::connect(server.address).await.unwrap();
        stream
            .write_all(b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n")
            .await
            .unwrap();
        stream.read_u8().await.unwrap();
        held.push(stream);
    }
    let mut more = TcpStream::connect(server.address).await.unwrap();
    assert_eq!(more.read(&mut [0]).await.unwrap_or(0), 0);
    drop(held);
    // Room comes back as the server notices.
    while !matches!(ask_softly(&server).await, Some(reply) if reply.starts_with("HTTP/1.1 200")) {
        tokio::task::yield_now().await;
    }
}

async fn ask_softly(server: &Server) -> Option<String> {
    let mut stream = TcpStream::connect(server.address).await.ok()?;
    stream
        .write_all(b"GET /livez HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        .await
        .ok()?;
    let mut reply = String::new();
    stream.read_to_string(&mut reply).await.ok()?;
    Some(reply)
}

#[tokio::test]
async fn shutdown_ends_idle_connections() {
    let server = server().await;
    let mut idle = TcpStream::connect(server.address).await.unwrap();
    idle.write_all(b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n").await.unwrap();
    idle.read_u8().await.unwrap();
    server.shutdown.cancel();
    let mut rest = Vec::new();
    idle.read_to_end(&mut rest).await.unwrap();
}
