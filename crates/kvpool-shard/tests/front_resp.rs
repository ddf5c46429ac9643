//! RESP2 and RESP3 over real sockets: every command, pipelines, fragments, sizes, and what is refused.

#![allow(clippy::unwrap_used)]

mod front_support;

use front_support::{MIB, Server, bulk, counted, encode, eventually, pattern};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_clients_send_when_they_connect() {
    let server = Server::start().await;
    let mut client = server.resp().await;
    client.expect("PING", "+PONG\r\n").await;
    client.expect("ping hey", "$3\r\nhey\r\n").await;
    client.expect("AUTH user pass", "+OK\r\n").await;
    client.expect("SELECT 0", "+OK\r\n").await;
    client.expect("SELECT 1", "-ERR DB index is out of range\r\n").await;
    client.expect("CLIENT SETINFO LIB-NAME redis-py", "+OK\r\n").await;
    client.expect("CLIENT GETNAME", "$-1\r\n").await;
    client.expect("CLIENT SETNAME engine-0", "+OK\r\n").await;
    client.expect("CLIENT GETNAME", "$8\r\nengine-0\r\n").await;
    client.expect("COMMAND COUNT", ":18\r\n").await;
    client.expect("COMMAND DOCS GET", "*0\r\n").await;
    client.expect("DBSIZE", ":0\r\n").await;
    client
        .expect("HELLO 4", "-NOPROTO unsupported protocol version\r\n")
        .await;
    client
        .expect(
            "INFO REPLICATION",
            "$50\r\n# Replication\r\nrole:master\r\nconnected_slaves:0\r\n\r\n\r\n",
        )
        .await;
    client.expect("INFO nosuch", "$0\r\n\r\n").await;
    client.expect("GET nope", "$-1\r\n").await;
    client
        .command(&[b"HELLO", b"3", b"AUTH", b"u", b"p", b"SETNAME", b"x"])
        .await;
    let start =
        b"%7\r\n$6\r\nserver\r\n$5\r\nredis\r\n$7\r\nversion\r\n$5\r\n7.0.0\r\n$4\r\nmode\r\n$10\r\nstandalone\r\n\
                  $4\r\nrole\r\n$6\r\nmaster\r\n$5\r\nproto\r\n:3\r\n$2\r\nid\r\n:";
    client.expect_bytes(start, b"HELLO").await;
    while client.read(1).await != b"\n" {}
    client.expect_bytes(b"$7\r\nmodules\r\n*0\r\n", b"HELLO").await;
    client.expect("GET nope", "_\r\n").await;
    client.expect("CLIENT GETNAME", "$1\r\nx\r\n").await;
    client
        .expect(
            "COMMAND INFO get nope",
            "*2\r\n*6\r\n$3\r\nget\r\n:2\r\n~2\r\n+readonly\r\n+fast\r\n:1\r\n:1\r\n:1\r\n_\r\n",
        )
        .await;
    client.expect("QUIT", "+OK\r\n").await;
    assert_eq!(client.read_to_end().await, b"");
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn values_expiry_and_conditions() {
    let server = Server::start().await;
    let mut client = server.resp().await;
    client.expect("SET a 1", "+OK\r\n").await;
    client.expect("GET a", "$1\r\n1\r\n").await;
    client.expect("EXISTS a b a", ":2\r\n").await;
    client.expect("TTL a", ":-1\r\n").await;
    client.expect("TTL b", ":-2\r\n").await;
    client.expect("SET a 2 NX", "$-1\r\n").await;
    client.expect("GET a", "$1\r\n1\r\n").await;
    client.expect("SET a 2 XX EX 1000", "+OK\r\n").await;
    client.expect("TTL a", ":1000\r\n").await;
    client.expect("SET b 2 XX", "$-1\r\n").await;
    client.expect("EXISTS b", ":0\r\n").await;
    client.expect("SET b 2 PX 500000 NX", "+OK\r\n").await;
    client.expect("TTL b", ":500\r\n").await;
    client.expect("SET a 3", "+OK\r\n").await;
    client.expect("TTL a", ":-1\r\n").await;
    client.expect("EXPIRE a 50", ":1\r\n").await;
    client.expect("TTL a", ":50\r\n").await;
    client.expect("EXPIRE nope 50", ":0\r\n").await;
    client.expect("EXPIRE a -1", ":1\r\n").await;
    client.expect("EXISTS a", ":0\r\n").await;
    client.expect("SET c 1 PX 1", "+OK\r\n").await;
    eventually("c expires", async || {
        client.command(&[b"EXISTS", b"c"]).await;
        client.read(4).await == b":0\r\n"
    })
    .await;
    client.expect("DBSIZE", ":1\r\n").await;
    client.expect("DEL a b", ":1\r\n").await;
    client.expect("SET b 1", "+OK\r\n").await;
    client.expect("UNLINK b", ":1\r\n").await;
    client.expect("GET b", "$-1\r\n").await;
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_refused_set_leaves_the_old_value_and_the_connection_in_step() {
    let server = Server::start().await;
    let mut client = server.resp().await;
    client.expect("SET a old", "+OK\r\n").await;
    for (options, error) in [
        ("NX XX", "ERR syntax error"),
        ("EX", "ERR syntax error"),
        ("KEEPTTL", "ERR syntax error"),
        ("EX x", "ERR value is not an integer or out of range"),
        ("EX 0", "ERR invalid expire time in 'set' command"),
    ] {
        client
            .expect(&format!("SET a new {options}"), &format!("-{error}\r\n"))
            .await;
        client.expect("GET a", "$3\r\nold\r\n").await;
    }
    client
        .expect("SET a", "-ERR wrong number of arguments for 'set' command\r\n")
        .await;
    client
        .expect("EXPIRE a soon", "-ERR value is not an integer or out of range\r\n")
        .await;
    client.in_step().await;
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn wait_tells_how_many_copies_hold_the_last_writes() {
    let server = Server::start().await;
    let mut client = server.resp().await;
    client.expect("WAIT 1 100", ":0\r\n").await;
    client.expect("SET a 1", "+OK\r\n").await;
    client.expect("SET b 1", "+OK\r\n").await;
    client.expect("WAIT 2 100", ":1\r\n").await;
    // Too large for the store: dropped, +OK all the same, and WAIT says so.
    let dropped = counted("kvpool_shard_put_total", &["outcome=dropped"]);
    client
        .expect_args(&[b"SET", b"a", &vec![0; 200 * MIB]], b"+OK\r\n")
        .await;
    client.expect("SET b 1", "+OK\r\n").await;
    client.expect("WAIT 2 100", ":0\r\n").await;
    assert!(counted("kvpool_shard_put_total", &["outcome=dropped"]) > dropped);
    client
        .expect("WAIT x 100", "-ERR value is not an integer or out of range\r\n")
        .await;
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn o10_values_of_boundary_sizes_come_back_and_replies_stay_in_step() {
    let server = Server::start().await;
    let mut client = server.resp().await;
    let sizes = [
        0,
        1,
        1023,
        1024,
        1025,
        4095,
        4096,
        4097,
        256 * 1024,
        256 * 1024 + 1,
        16 * MIB - 1,
        16 * MIB,
    ];
    for (index, &size) in sizes.iter().enumerate() {
        let key = format!("k{index}");
        client
            .expect_args(&[b"SET", key.as_bytes(), &pattern(index as u64, size)], b"+OK\r\n")
            .await;
    }
    for index in [11, 0, 5, 10, 3, 1, 9, 2, 8, 4, 7, 6] {
        let key = format!("k{index}");
        let expected = bulk(&pattern(index as u64, sizes[index]));
        client.expect_args(&[b"GET", key.as_bytes()], &expected).await;
    }
    client.in_step().await;
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pipelines_are_answered_in_order_however_they_are_cut() {
    let server = Server::start().await;
    let values: Vec<Vec<u8>> = (0..20).map(|i| pattern(i, (i * i * 700) as usize)).collect();
    let mut request = Vec::new();
    let mut reply = Vec::new();
    for (index, value) in values.iter().enumerate() {
        let key = format!("key-{index}");
        request.extend(encode(&[b"SET", key.as_bytes(), value]));
        request.extend(encode(&[b"GET", key.as_bytes()]));
        request.extend(encode(&[b"GET", b"absent"]));
        request.extend(encode(&[b"NOSUCH"]));
        reply.extend_from_slice(b"+OK\r\n");
        reply.extend(bulk(value));
        reply.extend_from_slice(b"$-1\r\n-ERR unknown command 'NOSUCH', with args beginning with: \r\n");
    }
    for step in [usize::MAX, 1, 7, 4096, 65_537] {
        let mut client = server.resp().await;
        // Only the start byte by byte: the cut moves through every kind of boundary there.
        let fine = if step == 1 { 6000 } else { request.len() };
        let (mut read, mut write) = client.stream.split();
        let request = &request;
        let sending = async {
            use tokio::io::AsyncWriteExt;
            for piece in request[..fine].chunks(step.min(fine)) {
                write.write_all(piece).await.unwrap();
                tokio::task::yield_now().await;
            }
            write.write_all(&request[fine..]).await.unwrap();
        };
        let receiving = async {
            use tokio::io::AsyncReadExt;
            let mut got = vec![0; reply.len()];
            read.read_exact(&mut got).await.unwrap();
            got
        };
        let ((), got) = tokio::join!(sending, receiving);
        assert!(got == reply, "pieces of {step}");
        client.in_step().await;
    }
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn destructive_commands_are_refused_by_name() {
    let server = Server::start().await;
    let mut client = server.resp().await;
    client.expect("SET a 1", "+OK\r\n").await;
    for command in [
        "FLUSHALL",
        "flushdb",
        "CONFIG SET maxmemory 1",
        "DEBUG SLEEP 10",
        "SHUTDOWN NOSAVE",
        "EVAL x 0",
        "REPLICAOF h 1",
    ] {
        let name = command.split(' ').next().unwrap().to_lowercase();
        let error = format!("-NOPERM User default has no permissions to run the '{name}' command\r\n");
        client.expect(command, &error).await;
    }
    client.expect("GET a", "$1\r\n1\r\n").await;
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn o25_a_command_that_is_not_served_is_answered_whatever_it_carries() {
    let server = Server::start().await;
    let mut client = server.resp().await;
    client
        .expect(
            "LPUSH l x",
            "-ERR unknown command 'LPUSH', with args beginning with: 'l' 'x' \r\n",
        )
        .await;
    let big = vec![b'x'; 3 * MIB];
    client
        .expect_args(
            &[b"MSET", b"k", &big],
            b"-ERR unknown command 'MSET', with args beginning with: 'k' '' \r\n",
        )
        .await;
    client.in_step().await;
    client
        .expect("GET", "-ERR wrong number of arguments for 'get' command\r\n")
        .await;
    client.in_step().await;
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_key_too_long_to_store_is_absent_and_its_set_is_dropped() {
    let server = Server::start().await;
    let mut client = server.resp().await;
    let key = vec![b'k'; 9000];
    client.expect_args(&[b"SET", &key, b"value"], b"+OK\r\n").await;
    client.expect_args(&[b"SET", &key, &vec![0; 300_000]], b"+OK\r\n").await;
    client.expect_args(&[b"GET", &key], b"$-1\r\n").await;
    client.expect_args(&[b"EXISTS", &key], b":0\r\n").await;
    client.expect_args(&[b"DEL", &key], b":0\r\n").await;
    client.expect("DBSIZE", ":0\r\n").await;
    client.in_step().await;
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn o08_a_set_whose_client_dies_was_never_there_and_blocks_nobody() {
    let server = Server::start().await;
    let mut other = server.resp().await;
    other.expect("SET k old", "+OK\r\n").await;
    let mut client = server.resp().await;
    client.send(b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$67108864\r\n").await;
    client.send(&vec![7; 10 * MIB]).await;
    other.expect("GET k", "$3\r\nold\r\n").await;
    drop(client);
    other.expect("GET k", "$3\r\nold\r\n").await;
    other.expect("SET k new", "+OK\r\n").await;
    other.expect("GET k", "$3\r\nnew\r\n").await;
    // Complete but for the last CR LF is still not complete.
    let mut client = server.resp().await;
    client.send(b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$4\r\ntorn").await;
    drop(client);
    other.expect("GET k", "$3\r\nnew\r\n").await;
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn o23_lengths_that_must_not_be_believed_end_the_connection_and_nothing_else() {
    let server = Server::start().await;
    let mut other = server.resp().await;
    for (bytes, reply) in [
        (
            &b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$536870913\r\n"[..],
            "invalid bulk length",
        ),
        (b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$-1\r\n", "invalid bulk length"),
        (b"*2\r\n$3\r\nGET\r\n$99999999999999999999\r\n", "invalid bulk length"),
        (b"*1000000\r\n", "invalid multibulk length"),
        (b"*1\r\n+PING\r\n", "expected '$'"),
        (b"\xff\xfe\xfd\xfc", "expected '*'"),
    ] {
        let mut client = server.resp().await;
        client.send(bytes).await;
        let got = client.read_to_end().await;
        let expected = format!("-ERR Protocol error: {reply}\r\n");
        assert_eq!(String::from_utf8_lossy(&got), expected);
        other.in_step().await;
    }
    assert!(
        counted(
            "kvpool_shard_refused_input_total",
            &["front=resp", "reason=bulk_length"]
        ) >= 3
    );
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn o09_two_writers_of_one_key_never_mix() {
    let server = Server::start().await;
    let size = MIB + 17;
    let writers: Vec<_> = [b'A', b'B']
        .map(|byte| {
            let address = server.resp;
            tokio::spawn(async move {
                let mut client = front_support::Client::connect(address).await;
                for _ in 0..60 {
                    client.expect_args(&[b"SET", b"k", &vec![byte; size]], b"+OK\r\n").await;
                }
            })
        })
        .into();
    let mut reader = server.resp().await;
    reader.expect("HELLO 2 SETNAME reader", "*14\r\n").await;
    while reader.read(1).await != b"*" {}
    reader.expect_bytes(b"0\r\n", b"HELLO").await;
    for _ in 0..100 {
        reader.command(&[b"GET", b"k"]).await;
        if reader.read(3).await == b"$-1" {
            reader.expect_bytes(b"\r\n", b"GET").await;
            continue;
        }
        while reader.read(1).await != b"\n" {}
        let value = reader.read(size + 2).await;
        assert!(value[..size].iter().all(|&byte| byte == value[0]));
        assert_eq!(&value[size..], b"\r\n");
    }
    for writer in writers {
        writer.await.unwrap();
    }
    server.stop().await;
}
