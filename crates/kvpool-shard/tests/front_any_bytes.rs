//! Any bytes on a data port: no task panics, nobody else notices. Prints its seed; replay with `KVPOOL_TEST_SEED`.

#![allow(clippy::unwrap_used)]

mod front_support;

use std::sync::atomic::{AtomicU64, Ordering};

use front_support::{BF16, Client, Server, encode, lm_request, pattern};
use kvpool_wire::lm::LmCommand;
use rand::rngs::StdRng;
use rand::{Rng, RngExt, SeedableRng};
use tokio::io::AsyncWriteExt;

static PANICS: AtomicU64 = AtomicU64::new(0);

/// A valid conversation of either protocol, with a few bytes spoiled, cut at some place.
fn spoiled(rng: &mut StdRng) -> Vec<u8> {
    let mut bytes = Vec::new();
    for _ in 0..rng.random_range(1..6) {
        let len = rng.random_range(0..6000);
        let value = pattern(rng.random(), len);
        match rng.random_range(0..6) {
            0 => bytes.extend(encode(&[b"SET", b"noise", &value])),
            1 => bytes.extend(encode(&[b"GET", b"m@1@0@7b@bfloat16"])),
            2 => bytes.extend(encode(&[b"SET", b"noise", &value, b"EX", b"10", b"NX"])),
            3 => bytes.extend(encode(&[b"HELLO", b"3", b"SETNAME", &value])),
            4 => {
                bytes.extend(lm_request(LmCommand::Put, b"noise", BF16, value.len() as u32));
                bytes.extend(value);
            }
            _ => bytes.extend(lm_request(LmCommand::Get, b"noise", BF16, 0)),
        }
    }
    for _ in 0..rng.random_range(0..4) {
        let at = rng.random_range(0..bytes.len());
        bytes[at] = rng.random();
    }
    bytes.truncate(rng.random_range(0..=bytes.len()));
    if rng.random_ratio(1, 4) {
        rng.fill_bytes(&mut bytes);
    }
    bytes
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn o23_any_bytes_harm_nobody_else() {
    let seed = std::env::var("KVPOOL_TEST_SEED").map_or_else(|_| rand::random(), |seed| seed.parse().unwrap());
    println!("KVPOOL_TEST_SEED={seed}");
    let before = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        PANICS.fetch_add(1, Ordering::Relaxed);
        before(info);
    }));
    let mut rng = StdRng::seed_from_u64(seed);
    let server = Server::start().await;
    let mut resp = server.resp().await;
    let mut lm = server.lm().await;
    for round in 0..400 {
        let mut client = Client::connect(if round % 2 == 0 { server.resp } else { server.lm }).await;
        // The server may have closed already: its right.
        let _ = client.stream.write_all(&spoiled(&mut rng)).await;
        if rng.random_ratio(1, 2) {
            let _ = client.stream.shutdown().await;
            client.read_to_end().await;
        }
        drop(client);
        let value = pattern(round, 2000);
        resp.expect_args(&[b"SET", b"bystander", &value], b"+OK\r\n").await;
        lm.lm_put("lm-bystander", BF16, &value).await;
        assert_eq!(lm.lm_get("lm-bystander").await, Some((BF16, value)));
    }
    server.stop().await;
    assert_eq!(PANICS.load(Ordering::Relaxed), 0);
}
