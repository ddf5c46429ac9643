//! A shard's front ends in this process, over a router with a local store, and small raw-socket clients.

// Each test binary uses its part of this.
#![allow(dead_code, unused_imports, clippy::unwrap_used)]

mod counters;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use kvpool_shard::front::{self, FrontLimits};
use kvpool_shard::ops::Router;
use kvpool_store::Store;
use kvpool_wire::lm::{LmCommand, LmMeta, LmReply, LmRequest, REPLY_BYTES};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio_util::sync::CancellationToken;

pub use counters::counted;

/// Longer than anything here takes on a loaded machine: a test fails rather than hangs.
const PATIENCE: Duration = Duration::from_secs(60);

pub const MIB: usize = 1 << 20;

/// Both ports of one shard.
pub struct Server {
    pub resp: SocketAddr,
    pub lm: SocketAddr,
    stop: CancellationToken,
    tasks: Vec<tokio::task::JoinHandle<()>>,
}

impl Server {
    pub async fn start() -> Self {
        Self::with(FrontLimits::default(), 256 * MIB as u64).await
    }

    pub async fn with(limits: FrontLimits, memory: u64) -> Self {
        counters::install();
        let router = Router::standalone(Store::new(memory).unwrap());
        let stop = CancellationToken::new();
        let resp = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let lm = TcpListener::bind("127.0.0.1:0").await.unwrap();
        Server {
            resp: resp.local_addr().unwrap(),
            lm: lm.local_addr().unwrap(),
            tasks: vec![
                tokio::spawn(front::serve_resp(
                    resp,
                    Arc::clone(&router),
                    limits.clone(),
                    stop.clone(),
                )),
                tokio::spawn(front::serve_lm(lm, router, limits, stop.clone())),
            ],
            stop,
        }
    }

    pub async fn resp(&self) -> Client {
        Client::connect(self.resp).await
    }

    pub async fn lm(&self) -> Client {
        Client::connect(self.lm).await
    }

    /// Stops both ports; returns when every connection has ended.
    pub async fn stop(self) {
        self.stop.cancel();
        for task in self.tasks {
            task.await.unwrap();
        }
    }
}

/// A raw connection.
pub struct Client {
    pub stream: TcpStream,
}

impl Client {
    pub async fn connect(address: SocketAddr) -> Self {
        let stream = TcpStream::connect(address).await.unwrap();
        stream.set_nodelay(true).unwrap();
        Client { stream }
    }

    pub async fn send(&mut self, bytes: &[u8]) {
        self.stream.write_all(bytes).await.unwrap();
    }

    pub async fn read(&mut self, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        let read = self.stream.read_exact(&mut bytes);
        tokio::time::timeout(PATIENCE, read).await.unwrap().unwrap();
        bytes
    }

    /// Everything until the server closes.
    pub async fn read_to_end(&mut self) -> Vec<u8> {
        let mut bytes = Vec::new();
        let read = self.stream.read_to_end(&mut bytes);
        match tokio::time::timeout(PATIENCE, read).await.unwrap() {
            Ok(_) => {}
            // A close with unread input behind it arrives as a reset; what came before counts.
            Err(error) => assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset),
        }
        bytes
    }

    /// Sends a command as RESP clients do.
    pub async fn command(&mut self, args: &[&[u8]]) {
        self.send(&encode(args)).await;
    }

    /// Sends a command and compares the whole reply.
    pub async fn expect(&mut self, command: &str, reply: &str) {
        let args: Vec<&[u8]> = command.split(' ').map(str::as_bytes).collect();
        self.expect_args(&args, reply.as_bytes()).await;
    }

    pub async fn expect_args(&mut self, args: &[&[u8]], reply: &[u8]) {
        self.command(args).await;
        self.expect_bytes(reply, args[0]).await;
    }

    pub async fn expect_bytes(&mut self, reply: &[u8], what: &[u8]) {
        let got = self.read(reply.len()).await;
        let what = String::from_utf8_lossy(what);
        assert!(
            got == reply,
            "{what}: got {:?}, expected {:?}",
            String::from_utf8_lossy(&got[..got.len().min(80)]),
            String::from_utf8_lossy(&reply[..reply.len().min(80)])
        );
    }

    /// The server has nothing more to say: a PING is answered and nothing else comes first.
    pub async fn in_step(&mut self) {
        self.expect("PING", "+PONG\r\n").await;
    }

    pub async fn lm_send(&mut self, command: LmCommand, key: &[u8], meta: LmMeta, body: &[u8]) {
        self.send(&lm_request(command, key, meta, body.len() as u32)).await;
        self.send(body).await;
    }

    pub async fn lm_put(&mut self, key: &str, meta: LmMeta, body: &[u8]) {
        self.lm_send(LmCommand::Put, key.as_bytes(), meta, body).await;
    }

    pub async fn lm_reply(&mut self) -> LmReply {
        let bytes: [u8; REPLY_BYTES] = self.read(REPLY_BYTES).await.try_into().unwrap();
        LmReply::decode(&bytes).unwrap()
    }

    /// GET: the metadata and the value, or `None` for a miss (whose 36 bytes are checked).
    pub async fn lm_get(&mut self, key: &str) -> Option<(LmMeta, Vec<u8>)> {
        self.lm_send(LmCommand::Get, key.as_bytes(), LmMeta::default(), b"")
            .await;
        let reply = self.lm_reply().await;
        if !reply.ok {
            assert_eq!(reply, LmReply::FAIL);
            return None;
        }
        let body = self.read(reply.length as usize).await;
        Some((reply.meta, body))
    }

    pub async fn lm_exist(&mut self, key: &str) -> bool {
        self.lm_send(LmCommand::Exist, key.as_bytes(), LmMeta::default(), b"")
            .await;
        self.lm_reply().await.ok
    }
}

pub fn lm_request(command: LmCommand, key: &[u8], meta: LmMeta, length: u32) -> Vec<u8> {
    LmRequest {
        command,
        length,
        meta,
        key,
    }
    .encode()
    .to_vec()
}

pub fn encode(args: &[&[u8]]) -> Vec<u8> {
    let mut bytes = format!("*{}\r\n", args.len()).into_bytes();
    for arg in args {
        bytes.extend_from_slice(format!("${}\r\n", arg.len()).as_bytes());
        bytes.extend_from_slice(arg);
        bytes.extend_from_slice(b"\r\n");
    }
    bytes
}

/// `$len\r\n…\r\n`.
pub fn bulk(value: &[u8]) -> Vec<u8> {
    [format!("${}\r\n", value.len()).as_bytes(), value, b"\r\n"].concat()
}

/// Bytes that differ from place to place and from seed to seed.
pub fn pattern(seed: u64, len: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut bytes = vec![0; len];
    for chunk in bytes.chunks_mut(8) {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        chunk.copy_from_slice(&state.to_le_bytes()[..chunk.len()]);
    }
    bytes
}

pub const BF16: LmMeta = LmMeta {
    fmt: 2,
    dtype: 3,
    shape: [2, 4, 256, 1024],
};

/// Waits, for as long as a loaded machine may need, until `check` holds.
pub async fn eventually(what: &str, mut check: impl AsyncFnMut() -> bool) {
    let start = std::time::Instant::now();
    while !check().await {
        assert!(start.elapsed() < PATIENCE, "never: {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}
