//! Other shards, seen from here: a pool of connections to each, a breaker, and the calls that use them.
//!
//! One request at a time per connection, so no reply waits behind another and a missed deadline costs one internal
//! connection only. Connections and waits for them are bounded. A [`Peer`] is one *incarnation* of a shard: when the map
//! names another, there is a new `Peer` and nothing of the old one is used again.

mod breaker;
pub(crate) mod gaps;
pub(crate) mod send;
pub(crate) mod server;
pub(crate) mod wire;

use std::io::IoSlice;
use std::sync::{Arc, Weak};
use std::time::Duration;

use kvpool_wire::peer::hello::{HELLO_PREFIX_BYTES, prefix};
use kvpool_wire::peer::{
    FrameHead, Hello, HelloReply, HelloStatus, Known, PeerError, RefusalCode, Reply, ReplyHead, Request, RequestHead,
    VERSIONS,
};
use parking_lot::Mutex;
use tokio::net::TcpStream;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, timeout_at};
use tracing::debug;

use crate::identity::Identity;
use crate::metric_definitions as names;
use crate::ops::{FIRST_COPY_DEADLINE, OP_DEADLINE};
use crate::staging::{Buffer, Staging};
use breaker::{Breaker, SKIP};
use gaps::Gaps;
use wire::{Patience, Wire, WireError};

pub(crate) use breaker::State as BreakerState;

/// Most connections to one peer.
const MAX_CONNECTIONS: usize = 64;
/// Idle connections kept to one peer.
const MAX_IDLE: usize = 16;

/// Why a peer did not answer a request.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Failure {
    #[error("failed to ask a peer: all connections are in use")]
    Busy,
    #[error(transparent)]
    Wire(#[from] WireError),
    #[error("failed to ask a peer: it refused the connection ({})", .0.word())]
    Hello(HelloStatus),
    #[error("failed to ask a peer: it refused the request ({})", .0.word())]
    Refused(RefusalCode),
    #[error("failed to ask a peer: it answered out of turn")]
    OutOfTurn,
}

impl From<PeerError> for Failure {
    fn from(error: PeerError) -> Self {
        Failure::Wire(error.into())
    }
}

impl Failure {
    pub(crate) fn is_deadline(&self) -> bool {
        matches!(self, Failure::Wire(WireError::Deadline))
    }
}

/// One incarnation of another shard.
pub(crate) struct Peer {
    pub(crate) id: String,
    /// `host:port` of its peer listener.
    pub(crate) address: String,
    /// 0: whoever answers there (seeds of a proxy that has no map yet).
    pub(crate) incarnation: u64,
    pub(crate) gaps: Gaps,
    identity: Arc<Identity>,
    idle: Mutex<Vec<Wire>>,
    permits: Arc<Semaphore>,
    breaker: Breaker,
    /// One place for a question to a peer that is skipped.
    last_resort: Semaphore,
}

/// A connection in use. Dropped, it is closed; [`Conn::release`] keeps it for the next request.
pub(crate) struct Conn {
    pub(crate) wire: Wire,
    pub(crate) peer: Arc<Peer>,
    reused: bool,
    _permit: OwnedSemaphorePermit,
}

impl std::fmt::Debug for Conn {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Conn")
            .field("peer", &self.peer.id)
            .finish_non_exhaustive()
    }
}

impl Peer {
    pub(crate) fn new(id: &str, address: &str, incarnation: u64, identity: Arc<Identity>) -> Arc<Self> {
        let peer = Arc::new(Peer {
            id: id.to_owned(),
            address: address.to_owned(),
            incarnation,
            gaps: Gaps::default(),
            identity,
            idle: Mutex::new(Vec::new()),
            permits: Arc::new(Semaphore::new(MAX_CONNECTIONS)),
            breaker: Breaker::default(),
            last_resort: Semaphore::new(1),
        });
        peer.show();
        peer
    }

    pub(crate) fn state(&self) -> BreakerState {
        self.breaker.state()
    }

    /// How long it has given no answer; `None` when it answers.
    pub(crate) fn silent_for(&self) -> Option<Duration> {
        self.breaker.open_for()
    }

    fn show(&self) {
        metrics::gauge!(names::PEER_BREAKER, "peer" => self.id.clone()).set(self.breaker.state().number());
    }

    /// The first-byte deadline passed; the answer may still come.
    pub(crate) fn late(&self) {
        metrics::counter!(names::PEER_LATE_TOTAL, "peer" => self.id.clone()).increment(1);
        self.breaker.late();
        self.show();
    }

    /// It answered something.
    pub(crate) fn answered(&self) {
        if self.breaker.state() != BreakerState::Closed {
            self.breaker.answered();
            self.show();
        }
    }

    /// It gave no answer, or broke the connection: skipped until the probe gets through.
    pub(crate) fn failed(self: &Arc<Self>) {
        metrics::counter!(names::PEER_FAILED_TOTAL, "peer" => self.id.clone()).increment(1);
        // Others of the pool are as dead as the one that broke, or will be found out one by one.
        self.idle.lock().clear();
        if self.breaker.failed() {
            tokio::spawn(probe(Arc::downgrade(self)));
        }
        self.show();
    }

    /// Asks a peer that may be skipped, since nobody else is left: one question at a time, whose end the others wait for; and
    /// after one in vain none for a second. So a peer that is back is found by whoever needs it, and one that is not costs one
    /// deadline a second, not one per key. `None`: it is skipped.
    pub(crate) async fn as_last_resort<T>(&self, deadline: Instant, ask: impl Future<Output = T>) -> Option<T> {
        let turn = timeout_at(deadline, self.last_resort.acquire()).await.ok()?.ok()?;
        if self.state() != BreakerState::Open {
            drop(turn);
            return Some(ask.await);
        }
        if !self.breaker.may_be_tried() {
            return None;
        }
        let answer = ask.await;
        if self.state() == BreakerState::Open {
            self.breaker.tried();
        }
        Some(answer)
    }

    /// What a request's outcome says about the peer. `started` is when it was asked.
    pub(crate) fn observe(self: &Arc<Self>, failure: &Failure, started: Instant) {
        debug!(peer = self.id, %failure, "a peer did not answer");
        match failure {
            // Asked too late to be blamed.
            Failure::Wire(WireError::Deadline) if started.elapsed() < FIRST_COPY_DEADLINE => {}
            Failure::Busy | Failure::Refused(RefusalCode::NotOwner) => {}
            Failure::Wire(_) | Failure::Hello(_) | Failure::Refused(_) | Failure::OutOfTurn => self.failed(),
        }
    }

    /// An idle connection, or a new one. Waits for one of the bounded number at most until `deadline`.
    pub(crate) async fn connect(self: &Arc<Self>, deadline: Instant) -> Result<Conn, Failure> {
        let wait = Arc::clone(&self.permits).acquire_owned();
        let permit = match timeout_at(deadline, wait).await {
            Ok(Ok(permit)) => permit,
            _ => return Err(Failure::Busy),
        };
        loop {
            let idle = self.idle.lock().pop();
            match idle {
                Some(wire) if wire.is_quiet() => {
                    return Ok(Conn {
                        wire,
                        peer: Arc::clone(self),
                        reused: true,
                        _permit: permit,
                    });
                }
                Some(_) => {}
                None => break,
            }
        }
        let stream = match timeout_at(deadline, TcpStream::connect(&*self.address)).await {
            Ok(stream) => stream.map_err(WireError::Io)?,
            Err(_) => return Err(WireError::Deadline.into()),
        };
        let mut wire = Wire::new(stream);
        self.greet(&mut wire, deadline).await?;
        Ok(Conn {
            wire,
            peer: Arc::clone(self),
            reused: false,
            _permit: permit,
        })
    }

    async fn greet(self: &Arc<Self>, wire: &mut Wire, deadline: Instant) -> Result<(), Failure> {
        let cluster_id = self.identity.cluster_id();
        let hello = Hello {
            versions: VERSIONS,
            cluster_id: &cluster_id,
            join_token: &self.identity.join_token,
            sender: &self.identity.id,
            sender_incarnation: self.identity.incarnation(),
            target_incarnation: self.incarnation,
            known: self.identity.known(),
        };
        hello.encode(&mut wire.out);
        let patience = Patience::Until(deadline);
        wire.flush(patience).await?;
        let front = prefix(&wire.peek::<HELLO_PREFIX_BYTES>(patience).await?)?;
        wire.skip(HELLO_PREFIX_BYTES);
        wire.envelope(patience).await?;
        let reply = HelloReply::decode(front, wire.body())?;
        self.identity.heard(reply.known, self);
        match reply.status {
            HelloStatus::Welcome => Ok(()),
            refused => Err(Failure::Hello(refused)),
        }
    }

    /// Sends a request and reads the head of its reply, which is left in the connection. A connection from the pool that
    /// turns out to be dead is replaced once.
    pub(crate) async fn ask(self: &Arc<Self>, asked: Asked, request: Request<'_>) -> Result<Conn, Failure> {
        let mut head = RequestHead {
            request_id: asked.request_id,
            deadline_ms: 0,
            known: asked.known,
            request,
        };
        loop {
            let mut conn = self.connect(asked.deadline).await?;
            let left = asked.deadline.saturating_duration_since(Instant::now());
            head.deadline_ms = u32::try_from(left.as_millis()).unwrap_or(u32::MAX);
            head.encode(&mut conn.wire.out);
            let patience = Patience::Until(asked.deadline);
            let sent = match conn.wire.flush(patience).await {
                Ok(()) => conn.reply(patience).await,
                Err(error) => Err(error.into()),
            };
            match sent {
                Err(Failure::Wire(WireError::Closed | WireError::Io(_))) if conn.reused => {}
                Err(failure) => return Err(failure),
                Ok(()) => return Ok(conn),
            }
        }
    }

    /// A request whose reply is all there is; tells the breaker how it went.
    pub(crate) async fn call(self: &Arc<Self>, asked: Asked, request: Request<'_>) -> Result<Conn, Failure> {
        let started = Instant::now();
        let answer = self.ask(asked, request).await;
        match &answer {
            Ok(_) => self.answered(),
            Err(failure) => self.observe(failure, started),
        }
        answer
    }
}

/// The circumstances of a request to a peer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Asked {
    pub(crate) request_id: u64,
    pub(crate) known: Known,
    pub(crate) deadline: Instant,
}

impl Conn {
    /// Reads the head of a reply, learns what its sender knows, and turns refusals into failures.
    pub(crate) async fn reply(&mut self, patience: Patience) -> Result<(), Failure> {
        self.wire.envelope(patience).await?;
        let head = ReplyHead::decode(self.wire.body())?;
        self.peer.identity.heard(head.known, &self.peer);
        match head.reply {
            Reply::Refused { code } => Err(Failure::Refused(code)),
            _ => Ok(()),
        }
    }

    /// The reply that was read last.
    pub(crate) fn last_reply(&self) -> Result<Reply<'_>, Failure> {
        Ok(ReplyHead::decode(self.wire.body())?.reply)
    }

    /// Heights that the sender of the last reply told.
    pub(crate) fn last_known(&self) -> Result<Known, Failure> {
        Ok(ReplyHead::decode(self.wire.body())?.known)
    }

    /// Reads one frame, verified. `left` bytes of the value are to come; a frame is as long as it can be, so that a body
    /// is always between two pieces when its source stops.
    pub(crate) async fn frame(
        &mut self,
        staging: &Arc<Staging>,
        left: u64,
        patience: Patience,
    ) -> Result<Buffer, Failure> {
        let mut buffer = staging.buffer(usize::try_from(left).unwrap_or(usize::MAX));
        self.frame_into(&mut buffer, patience).await?;
        Ok(buffer)
    }

    /// Reads one frame of exactly the length of `into`, verified. Returns its sum.
    pub(crate) async fn frame_into(&mut self, into: &mut [u8], patience: Patience) -> Result<u32, Failure> {
        match self.wire.frame_head(patience).await? {
            FrameHead::Data { len, crc } if len == into.len() => {
                let content = self.wire.frame_content(into, crc, patience).await;
                if matches!(content, Err(WireError::Protocol(PeerError::Checksum))) {
                    // R5 at work: the bytes are dropped. That it could fire is worth knowing.
                    metrics::counter!(names::PEER_CHECKSUM_TOTAL).increment(1);
                }
                content?;
                Ok(crc)
            }
            FrameHead::Data { .. } => Err(PeerError::Value("frame length").into()),
            FrameHead::End { .. } => Err(Failure::OutOfTurn),
        }
    }

    pub(crate) async fn write(&mut self, slices: &mut [IoSlice<'_>], patience: Patience) -> Result<(), Failure> {
        Ok(self.wire.write(slices, patience).await?)
    }

    /// The reply is used up: the connection may serve the next request.
    pub(crate) fn release(self) {
        let mut idle = self.peer.idle.lock();
        if idle.len() < MAX_IDLE {
            idle.push(self.wire);
        }
    }
}

/// Asks a peer that failed once a second whether it is back. Ends when it is, or when nobody has it any more.
async fn probe(peer: Weak<Peer>) {
    loop {
        tokio::time::sleep(SKIP).await;
        let Some(peer) = peer.upgrade() else { return };
        let asked = Asked {
            request_id: rand::random(),
            known: peer.identity.known(),
            deadline: Instant::now() + OP_DEADLINE,
        };
        if let Ok(conn) = peer.call(asked, Request::Ping).await {
            conn.release();
            if peer.breaker.probe_done() {
                return;
            }
        }
    }
}

/// A deadline that starts now.
pub(crate) fn within(time: Duration) -> Instant {
    Instant::now() + time
}
