//! Any bytes on the port: a close, no panic, and no effect on others.

use super::TestCluster;
use kvpool_client::Kind;
use rand::{RngExt, SeedableRng};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// Replay with KVPOOL_TEST_SEED.
fn seed() -> u64 {
    let seed = std::env::var("KVPOOL_TEST_SEED")
        .ok()
        .and_then(|s| s.parse().ok())
        .unwrap_or_else(rand::random);
    eprintln!("KVPOOL_TEST_SEED={seed}");
    seed
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn any_bytes_are_survived() {
    let cluster = TestCluster::start(1, 1).await;
    let address = &cluster.members[0].address;
    let client = cluster.client();
    let mut rng = rand::rngs::StdRng::seed_from_u64(seed());
    let mut inputs: Vec<Vec<u8>> = vec![
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n".to_vec(),
        b"*1\r\n$4\r\nPING\r\n".to_vec(),
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03".to_vec(),
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\xff\xff\xff\xff\xff\xff\xff\xff\xff".to_vec(),
    ];
    inputs.extend((0..20).map(|_| (0..rng.random_range(1..4_000)).map(|_| rng.random()).collect()));
    for input in inputs {
        let mut stream = TcpStream::connect(address).await.unwrap();
        // It may close before everything was sent.
        let _ = stream.write_all(&input).await;
        let _ = stream.shutdown().await;
        let mut rest = Vec::new();
        let _ = stream.read_to_end(&mut rest).await;
        client.list(Kind::Pool).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_half_sent_preface_is_closed() {
    let cluster = TestCluster::start(1, 1).await;
    let mut stream = TcpStream::connect(&cluster.members[0].address).await.unwrap();
    stream.write_all(b"PRI * HTTP/2.0\r").await.unwrap();
    let mut rest = Vec::new();
    let _ = stream.read_to_end(&mut rest).await;
    cluster.client().list(Kind::Pool).await.unwrap();
}
