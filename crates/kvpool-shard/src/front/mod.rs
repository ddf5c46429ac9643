//! The front ends: RESP and `lm://` over TCP, on top of routing.
//!
//! ```text
//! listener ─► accept loop (bounded) ─► one task per connection ─► codec (kvpool-wire) ─► Router ─► reply
//!                                           Conn: 4 KiB read buffer, bodies straight to and from the store
//! ```
//!
//! What holds here, whatever a client sends: no panic leaves a connection's task, no client affects another, every
//! buffer and every wait has a bound, and an idle connection that keeps to its protocol is never closed. A stock
//! client's connection is closed in two cases only, both counted: a native client's miss of unknown size, and a reply
//! whose every copy failed in mid-body.

mod admin;
mod conn;
mod lm;
mod metric_definitions;
mod native;
mod resp;
mod set_options;

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use kvpool_wire::foreign::Foreign;
use socket2::{SockRef, TcpKeepalive};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::{Span, debug, debug_span, warn};

use crate::ops::{Op, Router};
use conn::{Conn, End, Shared};
use metric_definitions::FrontMetrics;

pub use metric_definitions::describe;

/// Half-sent headers that a port waits for with patience; others get a second.
const HALF_SENT_SLOTS: usize = 512;
/// How long connections may finish what they are at when the port closes.
const SHUTDOWN_GRACE: Duration = Duration::from_secs(2);
/// Pause after a failed accept (usually: no file descriptors left).
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);
/// One line about strangers of one kind in this time, per port.
pub(crate) const LOG_EVERY: Duration = Duration::from_secs(10);
/// One line of the slow log in this time, per port: a frozen shard costs about one deadline a second.
const SLOW_LOG_EVERY: Duration = Duration::from_secs(1);
/// An operation slower than this (half of `op_deadline`) is logged with its request id.
const SLOW_OP: Duration = Duration::from_millis(250);

/// Bounds of one port.
#[derive(Debug, Clone)]
pub struct FrontLimits {
    /// The most open connections; further ones are told so and closed.
    pub max_connections: usize,
    /// How long a half-sent header is waited for.
    pub header_timeout: Duration,
    /// How long an upload may make no progress before its memory is freed. Its connection stays.
    pub body_stall: Duration,
    /// How long a client may leave a reply unread before its connection is closed.
    pub write_stall: Duration,
}

impl Default for FrontLimits {
    fn default() -> Self {
        FrontLimits {
            max_connections: 10_000,
            header_timeout: Duration::from_secs(30),
            body_stall: Duration::from_secs(30),
            write_stall: Duration::from_secs(60),
        }
    }
}

/// What the connections of one port share.
struct Port {
    router: Arc<Router>,
    metrics: FrontMetrics,
    /// One for each kind of stranger, so that one kind does not hide another.
    odd_clients: [LogGate; Foreign::KINDS],
    slow_ops: LogGate,
    shared: Arc<Shared>,
    name: &'static str,
}

/// Serves RESP2 and RESP3 on `listener` until `shutdown`. Returns when every connection has ended.
pub async fn serve_resp(listener: TcpListener, router: Arc<Router>, limits: FrontLimits, shutdown: CancellationToken) {
    let full = b"-ERR max number of clients reached\r\n";
    let port = Arc::new(Port::new("resp", router, limits));
    serve(listener, port, full, shutdown, resp::run).await;
}

/// Serves `lm://` on `listener` until `shutdown`. Returns when every connection has ended.
pub async fn serve_lm(listener: TcpListener, router: Arc<Router>, limits: FrontLimits, shutdown: CancellationToken) {
    let port = Arc::new(Port::new("lm", router, limits));
    serve(listener, port, b"", shutdown, lm::run).await;
}

impl Port {
    fn new(name: &'static str, router: Arc<Router>, limits: FrontLimits) -> Self {
        Port {
            router,
            metrics: FrontMetrics::new(name),
            odd_clients: std::array::from_fn(|_| LogGate::new(LOG_EVERY)),
            slow_ops: LogGate::new(SLOW_LOG_EVERY),
            shared: Arc::new(Shared {
                limits,
                half_sent: Arc::new(Semaphore::new(HALF_SENT_SLOTS)),
            }),
            name,
        }
    }

    /// Counts why a connection ended.
    fn ended(&self, end: End) {
        match end {
            End::Gone | End::Finished => {}
            End::HalfHeader => self.metrics.refused("half_header"),
            End::SlowReader => self.metrics.refused("slow_reader"),
            End::Refused(reason) => self.metrics.refused(reason),
            End::UnknownSize => self.metrics.closed_unknown_size.increment(1),
            End::Aborted => self.metrics.aborted.increment(1),
        }
    }

    /// One line (see [`LOG_EVERY`]) about a client that speaks something else.
    fn log_foreign(&self, foreign: Foreign) {
        if let Some(gate) = self.odd_clients.get(foreign as usize)
            && let Some(suppressed) = gate.open()
        {
            warn!(
                port = self.name,
                suppressed,
                likely = foreign.hint(),
                "closed a client that does not speak this port's protocol"
            );
        }
    }

    /// The span of an operation. Its `request_id` also travels to the shards that are asked.
    fn span(&self, op: &Op, command: &'static str) -> Span {
        debug_span!("op", request_id = op.request_id, port = self.name, command)
    }

    /// The slow log: one line for an operation that took more than half its deadline from `since` to its answer. The
    /// client's own pace does not count: an upload begins with its last byte.
    fn log_slow(&self, op: &Op, since: Instant, command: &'static str) {
        let took = since.elapsed();
        if took > SLOW_OP
            && let Some(suppressed) = self.slow_ops.open()
        {
            let ms = took.as_millis() as u64;
            let request_id = op.request_id;
            warn!(request_id, port = self.name, command, ms, suppressed, "slow operation");
        }
    }
}

async fn serve<F>(
    listener: TcpListener,
    port: Arc<Port>,
    full: &'static [u8],
    shutdown: CancellationToken,
    run: impl Fn(Conn, Arc<Port>) -> F,
) where
    F: Future<Output = End> + Send + 'static,
{
    let mut open = JoinSet::new();
    loop {
        let accepted = tokio::select! {
            biased;
            () = shutdown.cancelled() => break,
            Some(done) = open.join_next() => {
                reap(&port, done);
                continue;
            }
            accepted = listener.accept() => accepted,
        };
        let stream = match accepted {
            Ok((stream, _)) => stream,
            Err(error) => {
                debug!(%error, port = port.name, "failed to accept");
                tokio::time::sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        if open.len() >= port.shared.limits.max_connections {
            port.metrics.connections_refused.increment(1);
            // The socket is new and empty, so this fits or the client is gone.
            let _ = stream.try_write(full);
            continue;
        }
        set_options(&stream);
        port.metrics.connections.increment(1.0);
        let conn = Conn::new(stream, Arc::clone(&port.shared), shutdown.clone());
        open.spawn(run(conn, Arc::clone(&port)));
    }
    drop(listener);
    let drained = async {
        while let Some(done) = open.join_next().await {
            reap(&port, done);
        }
    };
    if tokio::time::timeout(SHUTDOWN_GRACE, drained).await.is_err() {
        open.shutdown().await;
    }
    port.metrics.connections.set(0.0);
}

fn reap(port: &Port, done: Result<End, tokio::task::JoinError>) {
    port.metrics.connections.decrement(1.0);
    match done {
        Ok(end) => port.ended(end),
        // Contained: the task owned the connection and nothing else.
        Err(error) => tracing::error!(%error, port = port.name, "a connection's task panicked"),
    }
}

/// No delay for small replies; the kernel finds out about dead peers, so that idle live ones can be kept for ever.
fn set_options(stream: &TcpStream) {
    let keepalive = TcpKeepalive::new()
        .with_time(Duration::from_secs(60))
        .with_interval(Duration::from_secs(15))
        .with_retries(4);
    let socket = SockRef::from(stream);
    // Without these the connection is slower or lingers when its peer dies, but it works.
    if let Err(error) = socket
        .set_tcp_nodelay(true)
        .and_then(|()| socket.set_tcp_keepalive(&keepalive))
    {
        debug!(%error, "failed to set socket options");
    }
}

/// A key as routing takes it.
fn to_key(bytes: &[u8]) -> Bytes {
    Bytes::copy_from_slice(bytes)
}

/// Lets one line through per interval.
pub(crate) struct LogGate {
    every: Duration,
    origin: Instant,
    /// Milliseconds after `origin` of the last line, plus one; 0 for none yet.
    last_ms: AtomicU64,
    suppressed: AtomicU64,
}

impl LogGate {
    pub(crate) fn new(every: Duration) -> Self {
        LogGate {
            every,
            origin: Instant::now(),
            last_ms: AtomicU64::new(0),
            suppressed: AtomicU64::new(0),
        }
    }

    /// `Some` (with the number of lines swallowed since the last) when a line may be written now.
    pub(crate) fn open(&self) -> Option<u64> {
        let now = self.origin.elapsed().as_millis() as u64 + 1;
        let last = self.last_ms.load(Ordering::Relaxed);
        let due = last == 0 || now.saturating_sub(last) >= self.every.as_millis() as u64;
        let won = due
            && self
                .last_ms
                .compare_exchange(last, now, Ordering::Relaxed, Ordering::Relaxed)
                .is_ok();
        if won {
            return Some(self.suppressed.swap(0, Ordering::Relaxed));
        }
        self.suppressed.fetch_add(1, Ordering::Relaxed);
        None
    }
}
