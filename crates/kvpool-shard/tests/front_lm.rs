//! `lm://` over real sockets: what the stock client relies on, and what it must never see.

#![allow(clippy::unwrap_used)]

mod front_support;

use std::time::Duration;

use front_support::{BF16, Client, MIB, Server, bulk, counted, lm_request, pattern};
use kvpool_wire::lm::{LmCommand, LmMeta, LmReply, REPLY_BYTES};
use tokio::io::AsyncReadExt;

fn meta(dtype: i32) -> LmMeta {
    LmMeta { dtype, ..BF16 }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_put_is_seen_by_the_next_request_and_comes_back_as_it_was() {
    let server = Server::start().await;
    let mut client = server.lm().await;
    assert!(client.lm_get("m@1@0@7b@bfloat16").await.is_none());
    assert!(!client.lm_exist("m@1@0@7b@bfloat16").await);
    for (index, size) in [1, 186, 4096, 300_000, 4 * MIB, 32 * MIB].into_iter().enumerate() {
        let key = format!("m@1@0@{index:x}@bfloat16");
        let value = pattern(index as u64, size);
        client.lm_put(&key, BF16, &value).await;
        assert!(client.lm_exist(&key).await);
        assert!(client.lm_get(&key).await == Some((BF16, value)));
    }
    // An old form, an odd one and the longest: keys are opaque.
    for key in ["vllm@m@1@0@7b", "a key with spaces", &"k".repeat(150)] {
        client.lm_put(key, BF16, b"value").await;
        assert_eq!(client.lm_get(key).await, Some((BF16, b"value".to_vec())));
    }
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn o01_formats_and_o02_layouts_never_share_a_key() {
    let server = Server::start().await;
    let mut client = server.lm().await;
    client.lm_put("m@1@0@7b@bfloat16", meta(3), b"A").await;
    client.lm_put("m@1@0@7b@fp8_e4m3fn", meta(7), b"B").await;
    client.lm_put("m@2@0@7b@bfloat16", meta(3), b"C").await;
    client.lm_put("m@2@1@7b@bfloat16", meta(3), b"D").await;
    for (key, dtype, value) in [
        ("m@1@0@7b@bfloat16", 3, b"A"),
        ("m@1@0@7b@fp8_e4m3fn", 7, b"B"),
        ("m@2@0@7b@bfloat16", 3, b"C"),
        ("m@2@1@7b@bfloat16", 3, b"D"),
    ] {
        assert_eq!(client.lm_get(key).await, Some((meta(dtype), value.to_vec())));
    }
    assert!(!client.lm_exist("m@1@0@7b@half").await);
    for rank in 0..4 {
        assert!(!client.lm_exist(&format!("m@4@{rank}@7b@bfloat16")).await);
    }
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_block_stored_by_resp_is_a_miss_and_one_stored_by_lm_is_for_all() {
    let server = Server::start().await;
    let mut lm = server.lm().await;
    let mut resp = server.resp().await;
    resp.in_step().await;
    resp.expect("SET shared value", "+OK\r\n").await;
    assert!(lm.lm_get("shared").await.is_none());
    assert!(!lm.lm_exist("shared").await);
    let value = pattern(1, 100_000);
    lm.lm_put("shared", BF16, &value).await;
    assert_eq!(lm.lm_get("shared").await, Some((BF16, value.clone())));
    resp.expect_args(&[b"GET", b"shared"], &bulk(&value)).await;
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reply_header_arrives_with_the_first_bytes_of_its_value() {
    let server = Server::start().await;
    let mut client = server.lm().await;
    client.lm_put("k", BF16, &pattern(1, MIB)).await;
    assert!(client.lm_exist("k").await);
    for _ in 0..50 {
        client.lm_send(LmCommand::Get, b"k", BF16, b"").await;
        // One read, as the stock client does: never less than the header.
        let mut bytes = vec![0; 1000];
        let n = client.stream.read(&mut bytes).await.unwrap();
        assert!(n > REPLY_BYTES, "{n}");
        client.read(REPLY_BYTES + MIB - n).await;
    }
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn o08_a_torn_put_is_a_miss_and_leaves_the_key_writable() {
    let server = Server::start().await;
    let mut other = server.lm().await;
    let mut torn = server.lm().await;
    torn.send(&lm_request(LmCommand::Put, b"k", BF16, 64 << 20)).await;
    torn.send(&vec![1; 10 * MIB]).await;
    assert!(!other.lm_exist("k").await);
    drop(torn);
    assert!(!other.lm_exist("k").await);
    assert!(other.lm_get("k").await.is_none());
    other.lm_put("k", BF16, &pattern(2, MIB)).await;
    assert_eq!(other.lm_get("k").await, Some((BF16, pattern(2, MIB))));
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn o09_two_writers_of_one_key_never_mix() {
    let server = Server::start().await;
    let size = 8 * MIB;
    let writers = [b'A', b'B'].map(|byte| {
        let address = server.lm;
        tokio::spawn(async move {
            let mut client = Client::connect(address).await;
            for _ in 0..12 {
                client.lm_put("k", BF16, &vec![byte; size]).await;
                client.lm_exist("k").await;
            }
        })
    });
    let mut reader = server.lm().await;
    for _ in 0..30 {
        let exists = reader.lm_exist("k").await;
        if let Some((_, value)) = reader.lm_get("k").await {
            assert_eq!(value.len(), size);
            assert!(value.iter().all(|&byte| byte == value[0]));
        } else {
            assert!(!exists, "nothing evicts here: what exists is whole");
        }
    }
    for writer in writers {
        writer.await.unwrap();
    }
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn o10_values_of_boundary_sizes_come_back_in_any_order() {
    let server = Server::start().await;
    let mut client = server.lm().await;
    let sizes = [0, 1, 4095, 4096, 4097, 16 * MIB - 1, 16 * MIB];
    for (index, &size) in sizes.iter().enumerate() {
        client
            .lm_put(&format!("k{index}"), BF16, &pattern(index as u64, size))
            .await;
    }
    for index in [6, 0, 3, 5, 1, 4, 2] {
        let value = pattern(index as u64, sizes[index]);
        assert!(client.lm_get(&format!("k{index}")).await == Some((BF16, value)));
    }
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_put_that_is_refused_is_read_to_its_end() {
    let server = Server::start().await;
    let mut client = server.lm().await;
    // Too large for this store; unknown codes; keys that are none. No answer to any of them, and still in step.
    client.lm_put("big", BF16, &vec![0; 200 * MIB]).await;
    for (key, meta) in [
        (&b"fmt"[..], LmMeta { fmt: 99, ..BF16 }),
        (b"dtype", meta(-1)),
        (
            b"shape",
            LmMeta {
                shape: [-1, 0, 0, 0],
                ..BF16
            },
        ),
        (b"", BF16),
        (b"not utf-8 \xff\xfe", BF16),
    ] {
        client.lm_send(LmCommand::Put, key, meta, &[5; 5000]).await;
        client.lm_send(LmCommand::Exist, key, BF16, b"").await;
        assert_eq!(client.lm_reply().await, LmReply::FAIL);
    }
    assert!(!client.lm_exist("big").await);
    client.lm_put("k", BF16, b"value").await;
    assert!(client.lm_exist("k").await);
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn o22_probes_that_connect_and_leave_are_no_trouble() {
    let server = Server::start().await;
    for round in 0..300 {
        for address in [server.lm, server.resp] {
            let mut probe = Client::connect(address).await;
            if round % 3 == 0 {
                probe.send(&[1, 0, 0, 0, 0, 0, 0, 0, 0, 0]).await;
            }
        }
    }
    let mut client = server.lm().await;
    for key in [&b""[..], b"m@1@0@7b@bfloat16", b"\xff"] {
        client.lm_send(LmCommand::Health, key, LmMeta::default(), b"").await;
        assert_eq!(client.lm_reply().await, LmReply::OK);
    }
    // No task outlives its client: the port ends without having to abort anything.
    let begun = std::time::Instant::now();
    drop(client);
    server.stop().await;
    assert!(begun.elapsed() < Duration::from_secs(30));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn o23_headers_that_must_not_be_believed() {
    let server = Server::start().await;
    let mut other = server.lm().await;
    let header = |command: i32, length: i32| {
        let mut bytes = lm_request(LmCommand::Put, b"k", BF16, 0);
        bytes[..4].copy_from_slice(&command.to_le_bytes());
        bytes[4..8].copy_from_slice(&length.to_le_bytes());
        bytes
    };
    for (bytes, reply, reason) in [
        (header(1, -1), &b""[..], "negative_length"),
        (header(1, i32::MAX), b"", "too_long"),
        (header(2, i32::MIN), b"", "negative_length"),
        (header(99, 0), &LmReply::FAIL.encode(), "unknown"),
        (header(0, 0), &LmReply::FAIL.encode(), "unknown"),
    ] {
        let labels = ["front=lm", &format!("reason={reason}")];
        let before = counted("kvpool_shard_refused_input_total", &labels);
        let mut client = server.lm().await;
        client.send(&bytes).await;
        assert_eq!(client.read_to_end().await, reply, "{reason}");
        front_support::eventually("counted", async || {
            counted("kvpool_shard_refused_input_total", &labels) > before
        })
        .await;
        assert!(!other.lm_exist("k").await);
    }
    for meta in [meta(99), LmMeta { fmt: -7, ..BF16 }] {
        other.lm_put("known", BF16, b"v").await;
        other.lm_send(LmCommand::Get, b"known", meta, b"").await;
        assert_eq!(other.lm_reply().await, LmReply::FAIL);
    }
    assert!(counted("kvpool_shard_refused_input_total", &["front=lm", "reason=meta"]) >= 2);
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn o24_other_protocols_get_a_short_answer_and_a_close() {
    let server = Server::start().await;
    let hello = [0x16, 0x03, 0x01, 0x00, 0xc8, 0x01, 0x00, 0x00, 0xc4, 0x03, 0x03];
    for address in [server.lm, server.resp] {
        for (bytes, reply) in [
            (
                &b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"[..],
                &b"HTTP/1.1 400 Bad Request\r\n"[..],
            ),
            (
                b"POST /v1/models HTTP/1.1\r\nContent-Length: 2\r\n\r\n{}",
                b"HTTP/1.1 400 ",
            ),
            (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\0\0\0\x04\0\0\0\0\0"),
            (&hello, &[0x15, 0x03, 0x03, 0x00, 0x02, 0x02, 0x46]),
        ] {
            let mut client = Client::connect(address).await;
            client.send(bytes).await;
            let got = client.read_to_end().await;
            assert!(got.starts_with(reply), "{:?}", String::from_utf8_lossy(&got));
        }
    }
    // Each other's clients.
    let mut client = Client::connect(server.lm).await;
    client.send(b"*1\r\n$4\r\nPING\r\n").await;
    assert!(
        client
            .read_to_end()
            .await
            .starts_with(b"-ERR this is a kvpool lm:// port")
    );
    let mut client = Client::connect(server.resp).await;
    client.send(&lm_request(LmCommand::Health, b"", BF16, 0)).await;
    assert!(client.read_to_end().await.starts_with(b"-ERR Protocol error"));
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn o25_list_is_answered_and_health_is_answered_under_load() {
    let server = Server::start().await;
    let mut client = server.lm().await;
    client.lm_send(LmCommand::List, b"", LmMeta::default(), b"").await;
    assert_eq!(client.lm_reply().await, LmReply::FAIL);
    let load = [1u64, 2].map(|seed| {
        let address = server.lm;
        tokio::spawn(async move {
            let mut client = Client::connect(address).await;
            let value = pattern(seed, 16 * MIB);
            for _ in 0..8 {
                client.lm_put(&format!("load{seed}"), BF16, &value).await;
                assert!(client.lm_get(&format!("load{seed}")).await.is_some());
            }
        })
    });
    for _ in 0..20 {
        client.lm_send(LmCommand::Health, b"", LmMeta::default(), b"").await;
        assert_eq!(client.lm_reply().await, LmReply::OK);
    }
    for task in load {
        task.await.unwrap();
    }
    server.stop().await;
}
