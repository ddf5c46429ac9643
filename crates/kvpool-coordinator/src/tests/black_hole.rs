//! Fault O12: something between client and member forgets idle connections without telling either.

use super::shards::{FakeShard, hello};
use super::{TestCluster, cluster::TOKEN};
use kvpool_client::{Client, ClientConfig, Kind, Timing, WatchFilter, WatchItem};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};

/// A proxy whose connections made before the last [`Proxy::forget`] carry nothing and stay open.
struct Proxy {
    address: String,
    generation: Arc<AtomicU64>,
}

impl Proxy {
    async fn start(to: String) -> Proxy {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let generation = Arc::new(AtomicU64::new(0));
        let newest = generation.clone();
        tokio::spawn(async move {
            while let Ok((here, _)) = listener.accept().await {
                let Ok(there) = TcpStream::connect(&to).await else {
                    continue;
                };
                let born = newest.load(Ordering::SeqCst);
                let (here, there) = (here.into_split(), there.into_split());
                tokio::spawn(carry(here.0, there.1, newest.clone(), born));
                tokio::spawn(carry(there.0, here.1, newest.clone(), born));
            }
        });
        Proxy { address, generation }
    }

    fn forget(&self) {
        self.generation.fetch_add(1, Ordering::SeqCst);
    }
}

async fn carry(mut from: OwnedReadHalf, mut to: OwnedWriteHalf, newest: Arc<AtomicU64>, born: u64) {
    let mut buffer = vec![0; 16 << 10];
    loop {
        let read = from.read(&mut buffer).await.unwrap_or(0);
        if newest.load(Ordering::SeqCst) != born {
            // Neither end hears of the other again.
            std::future::pending::<()>().await;
        }
        if read == 0 || to.write_all(&buffer[..read]).await.is_err() {
            return;
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn o12_a_black_holed_connection_costs_one_attempt() {
    let cluster = TestCluster::start(1, 1).await;
    let proxy = Proxy::start(cluster.members[0].address.clone()).await;
    let client = Client::new(ClientConfig {
        endpoints: vec![proxy.address.clone()],
        join_token: TOKEN.parse().unwrap(),
        trust: kvpool_client::Trust::Plain,
        timing: Timing::Relaxed,
    });
    let before = client.list(Kind::Pool).await.unwrap().revision;
    let mut changes = client.watch(WatchFilter::default(), before);
    let shard = FakeShard::start_with(client.clone(), hello("a", "node-1", "boot-1"));
    let incarnation = shard.incarnation().await;
    assert!(changes.next().await.is_some());

    for _ in 0..2 {
        proxy.forget();
        client.configure_pool("default", 2).await.unwrap();
        let factor = client.configure_pool("default", 1).await.unwrap();
        // The watch and the session come back by themselves, and the shard was Up all the time.
        while let Some(item) = changes.next().await {
            let WatchItem::Changes { revision, .. } = item else {
                panic!("relisted")
            };
            if revision >= factor.revision {
                break;
            }
        }
        let now = std::time::Instant::now();
        let heard = |s: &kvpool_client::SessionState| s.connected && s.last_contact.is_some_and(|at| at > now);
        shard.state.clone().wait_for(heard).await.unwrap();
        assert_eq!(shard.incarnation().await, incarnation);
    }
}
