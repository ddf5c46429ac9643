//! What forwarding and replication cost, in CPU of this process. Not a test of speed: run by hand with
//! `cargo test --release -p kvpool-shard --lib cost -- --ignored --nocapture`; the bench with processes is `kvpool bench`.

use super::*;
use crate::front::{FrontLimits, serve_resp};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// CPU seconds used by this process, from the kernel's clock.
fn cpu() -> f64 {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    let nanos: u64 = tasks
        .filter_map(|task| std::fs::read_to_string(task.ok()?.path().join("schedstat")).ok())
        .filter_map(|text| text.split(' ').next()?.parse::<u64>().ok())
        .sum();
    nanos as f64 / 1e9
}

async fn front(router: &Arc<Router>) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(serve_resp(
        listener,
        Arc::clone(router),
        FrontLimits::default(),
        CancellationToken::new(),
    ));
    address
}

async fn gets(address: SocketAddr, name: &str, len: usize, count: usize) {
    let mut stream = TcpStream::connect(address).await.unwrap();
    stream.set_nodelay(true).unwrap();
    let request = format!("*2\r\n$3\r\nGET\r\n${}\r\n{name}\r\n", name.len());
    let mut buffer = vec![0; format!("${len}\r\n").len() + len + 2];
    for _ in 0..count {
        stream.write_all(request.as_bytes()).await.unwrap();
        stream.read_exact(&mut buffer).await.unwrap();
    }
}

async fn puts(address: SocketAddr, len: usize, count: usize) {
    let mut stream = TcpStream::connect(address).await.unwrap();
    stream.set_nodelay(true).unwrap();
    let bytes = value(1, len);
    let mut reply = [0; 5];
    for at in 0..count {
        let name = format!("p{:02}", at % 2);
        stream
            .write_all(format!("*3\r\n$3\r\nSET\r\n$3\r\n{name}\r\n${len}\r\n").as_bytes())
            .await
            .unwrap();
        stream.write_all(&bytes).await.unwrap();
        stream.write_all(b"\r\n").await.unwrap();
        stream.read_exact(&mut reply).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "prints costs; run by hand"]
async fn cost_of_forwarding_and_replication() {
    let (nodes, proxy) = cluster(2, &[(1, true), (2, true)]).await;
    let alone = Node::start(3).await;
    alone.router.adopt(&map_of(1, &[(3, alone.address)], &[(3, true)]));
    let (direct, forwarded) = (front(&nodes[0].router).await, front(&proxy.router).await);
    let single = front(&alone.router).await;
    let sizes = match std::env::var("KVPOOL_COST_BYTES") {
        Ok(bytes) => vec![bytes.parse().unwrap()],
        Err(_) => vec![64 << 10, MIB, 4 * MIB, 16 * MIB],
    };
    for len in sizes {
        put(&proxy.router, "g", &value(1, len)).await;
        let count = (128 * MIB / len).min(500);
        let (mut gets_cost, mut puts_cost) = (Vec::new(), Vec::new());
        for _ in 0..5 {
            // Puts may have evicted it.
            put(&proxy.router, "g", &value(1, len)).await;
            let at = cpu();
            gets(direct, "g", len, count).await;
            let middle = cpu();
            gets(forwarded, "g", len, count).await;
            let end = cpu();
            gets_cost.push((
                (end - middle) / (middle - at),
                (middle - at) * 1024.0 / (count * len / MIB) as f64,
            ));
            let at = cpu();
            puts(single, len, count).await;
            let middle = cpu();
            puts(direct, len, count).await;
            let end = cpu();
            puts_cost.push((
                (end - middle) / (middle - at),
                (middle - at) * 1024.0 / (count * len / MIB) as f64,
            ));
        }
        gets_cost.sort_by(|a, b| a.0.total_cmp(&b.0));
        puts_cost.sort_by(|a, b| a.0.total_cmp(&b.0));
        println!(
            "{:>6} KiB: forwarded GET {:.2} x (direct {:.3} s/GiB), factor-2 PUT {:.2} x (factor 1 {:.3} s/GiB)",
            len >> 10,
            gets_cost[2].0,
            gets_cost[2].1,
            puts_cost[2].0,
            puts_cost[2].1
        );
    }
}
