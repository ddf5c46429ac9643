//! The peer listener: requests of proxies and other shards, answered from the local store.
//!
//! Nothing here is forwarded again. Connections are bounded in number, half-sent heads in time, upload memory by the
//! store's own limit; a foreign protocol gets a short reply and a close.

mod blocks;

use std::sync::{Arc, LazyLock};
use std::time::Duration;

use bytes::Bytes;
use kvpool_state::{SLOTS, slot_of};
use kvpool_store::Existence;
use kvpool_wire::foreign::Foreign;
use kvpool_wire::peer::hello::{HELLO_PREFIX_BYTES, prefix};
use kvpool_wire::peer::reply::page_bytes;
use kvpool_wire::peer::request::MAX_PAGE;
use kvpool_wire::peer::{
    FRAME_BYTES, FrameHead, Hello, HelloReply, HelloStatus, Known, MissCode, PeerError, RefusalCode, Reply, ReplyHead,
    Request, RequestHead, Role, SlotEntry,
};
use prost::Message;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::{Instrument, debug, debug_span, warn};

use super::wire::{Patience, Wire, WireError};
use super::within;
use crate::front::{LOG_EVERY, LogGate};
use crate::metric_definitions as names;
use crate::ops::{Front, MissReason, Op, Ttl};
use crate::router::{Router, usual_to};

/// Most connections of peers.
const MAX_CONNECTIONS: usize = 4096;
/// Time for a hello and for the rest of a request's head once it has begun.
const HEAD_TIME: Duration = Duration::from_secs(2);
/// Longest pause of a reader: somewhat more than front ends allow their clients.
const READER_STALL: Duration = Duration::from_secs(65);
/// Pause after a failed accept (usually: no file descriptors left).
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);
/// A request that took longer than this (half of `op_deadline`) is logged.
const SLOW: Duration = Duration::from_millis(250);

/// One line about strangers at a time (O24).
static STRANGERS: LazyLock<LogGate> = LazyLock::new(|| LogGate::new(LOG_EVERY));

/// Serves peers until `shutdown`.
pub(crate) async fn serve(listener: TcpListener, router: Arc<Router>, shutdown: CancellationToken) {
    let open = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    let mut tasks = JoinSet::new();
    loop {
        let accepted = tokio::select! {
            biased;
            () = shutdown.cancelled() => break,
            Some(done) = tasks.join_next() => {
                reap(done);
                continue;
            }
            accepted = listener.accept() => accepted,
        };
        match (accepted, Arc::clone(&open).try_acquire_owned()) {
            (Ok((stream, _)), Ok(permit)) => {
                metrics::gauge!(names::PEER_CONNECTIONS).increment(1.0);
                let router = Arc::clone(&router);
                tasks.spawn(async move {
                    connection(stream, router).await;
                    drop(permit);
                });
            }
            (Ok(_), Err(_)) => refused("full"),
            (Err(error), _) => {
                debug!(%error, "failed to accept a peer");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
    tasks.shutdown().await;
    metrics::gauge!(names::PEER_CONNECTIONS).set(0.0);
}

fn reap(done: Result<(), tokio::task::JoinError>) {
    metrics::gauge!(names::PEER_CONNECTIONS).decrement(1.0);
    if let Err(error) = done
        && error.is_panic()
    {
        // Contained: the task owned the connection and nothing else.
        tracing::error!(%error, "a peer connection's task panicked");
    }
}

fn refused(reason: &'static str) {
    metrics::counter!(names::PEER_REFUSED_TOTAL, "reason" => reason).increment(1);
}

async fn connection(stream: TcpStream, router: Arc<Router>) {
    let mut wire = Wire::new(stream);
    let greeted = match greet(&mut wire, &router).await {
        Ok(greeted) => greeted,
        Err(WireError::Protocol(PeerError::Foreign)) => {
            let foreign = Foreign::of(wire.first_bytes());
            if let Some(suppressed) = STRANGERS.open() {
                warn!(
                    likely = foreign.hint(),
                    suppressed, "closed a client that does not speak the peer protocol"
                );
            }
            refused("foreign");
            return wire.say_and_close(foreign.reply());
        }
        Err(WireError::Protocol(error)) => return refused(error.word()),
        Err(_) => return,
    };
    let Some((sender, target)) = greeted else { return };
    let mut peer = Serving {
        wire,
        router,
        sender,
        target,
        body: Vec::new(),
    };
    loop {
        match peer.request().await {
            Ok(true) => {}
            Ok(false) => return,
            Err(error) => {
                if let WireError::Protocol(error) = &error {
                    refused(error.word());
                }
                debug!(peer = peer.sender, %error, "a peer connection ended");
                return;
            }
        }
    }
}

/// Both hellos. `None` when the connection was refused; else who speaks, and to which incarnation.
async fn greet(wire: &mut Wire, router: &Arc<Router>) -> Result<Option<(String, u64)>, WireError> {
    let patience = Patience::Until(within(HEAD_TIME));
    // A foreign protocol shows in the first four bytes and is not waited for.
    let first = wire.peek::<4>(patience).await?;
    if first != kvpool_wire::peer::hello::MAGIC {
        return Err(PeerError::Foreign.into());
    }
    let versions = prefix(&wire.peek::<HELLO_PREFIX_BYTES>(patience).await?)?;
    wire.skip(HELLO_PREFIX_BYTES);
    wire.envelope(patience).await?;
    let body = wire.body().to_vec();
    let hello = Hello::decode(versions, &body)?;
    let identity = router.identity();
    let (cluster_id, incarnation) = (identity.cluster_id(), identity.incarnation());
    let version = hello.common_version();
    let status = if version.is_none() {
        HelloStatus::Version
    } else if !equal(hello.join_token.as_bytes(), identity.join_token.as_bytes()) {
        HelloStatus::Token
    } else if !hello.cluster_id.is_empty() && !cluster_id.is_empty() && *hello.cluster_id != *cluster_id {
        HelloStatus::Cluster
    } else if hello.target_incarnation != 0 && hello.target_incarnation != incarnation {
        HelloStatus::Incarnation
    } else {
        HelloStatus::Welcome
    };
    let welcome = status == HelloStatus::Welcome;
    // Who does not know the token learns nothing about the cluster.
    let told = status != HelloStatus::Token;
    let reply = HelloReply {
        version: if welcome { version.unwrap_or(0) } else { 0 },
        status,
        cluster_id: if told { &cluster_id } else { "" },
        id: if told { &identity.id } else { "" },
        incarnation: if told { incarnation } else { 0 },
        known: if told { identity.known() } else { Known::default() },
    };
    reply.encode(&mut wire.out);
    wire.flush(patience).await?;
    if !welcome {
        refused(status.word());
        return Ok(None);
    }
    router.heard_from(hello.sender, hello.known);
    Ok(Some((hello.sender.to_owned(), hello.target_incarnation)))
}

/// Compares without telling by its duration how much was equal.
fn equal(a: &[u8], b: &[u8]) -> bool {
    a.len() == b.len() && a.iter().zip(b).fold(0, |differ, (a, b)| differ | (a ^ b)) == 0
}

/// A connection after its hello.
struct Serving {
    wire: Wire,
    router: Arc<Router>,
    sender: String,
    /// The incarnation that the other side means; 0 for any.
    target: u64,
    /// Body of the request in hand; kept for its memory.
    body: Vec<u8>,
}

impl Serving {
    /// One request; false when the peer has closed.
    async fn request(&mut self) -> Result<bool, WireError> {
        if !self.wire.begins().await? {
            return Ok(false);
        }
        self.wire.envelope(Patience::Until(within(HEAD_TIME))).await?;
        let mut body = std::mem::take(&mut self.body);
        body.clear();
        body.extend_from_slice(self.wire.body());
        let head = RequestHead::decode(&body)?;
        let started = Instant::now();
        let (kind, request_id) = (head.request.word(), head.request_id);
        metrics::counter!(names::PEER_REQUESTS_TOTAL, "kind" => kind).increment(1);
        let span = debug_span!("peer_request", kind, request_id, peer = %self.sender);
        let handled = self.handle(&head).instrument(span).await;
        let took = started.elapsed();
        if took > SLOW && !matches!(head.request, Request::Put { .. }) {
            warn!(
                request_id,
                kind,
                peer = self.sender,
                ms = took.as_millis() as u64,
                "slow peer request"
            );
        }
        self.body = body;
        handled.map(|()| true)
    }

    async fn handle(&mut self, head: &RequestHead<'_>) -> Result<(), WireError> {
        self.router.heard_from(&self.sender, head.known);
        match &head.request {
            Request::Ping => return self.answer(Reply::Done { yes: true }).await,
            Request::MapFetch => return self.map().await,
            _ => {}
        }
        let router = Arc::clone(&self.router);
        let refusal = if self.target == 0 || self.target != router.identity().incarnation() {
            Some(RefusalCode::Incarnation)
        } else if !router.is_serving() {
            Some(RefusalCode::NotServing)
        } else {
            None
        };
        if let Some(code) = refusal {
            return self.answer(Reply::Refused { code }).await;
        }
        let op = Op {
            request_id: head.request_id,
            started: Instant::now(),
            generation: head.known.generation,
            front: Front::Peer,
        };
        let current = op.generation == router.known().generation;
        match &head.request {
            Request::Get { key, .. } | Request::Exists { key, .. } if !current => {
                self.miss(key, MissReason::Generation).await
            }
            Request::Get {
                key,
                offset,
                write_id,
                peek,
            } => self.get(key, *offset, *write_id, *peek).await,
            Request::Exists { key, lease_ms } => self.exists(key, *lease_ms).await,
            Request::Lease { keys, lease_ms } => {
                for key in keys {
                    // A hint: whether it was taken is the store's to count.
                    let now = router.now_ms();
                    let _: Option<Existence> = router
                        .store()
                        .map(|store| store.exists(key, now, Some(u64::from(*lease_ms))));
                }
                self.answer(Reply::Done { yes: true }).await
            }
            Request::Put { .. } => self.put(&op, head, current).await,
            Request::SlotList {
                first,
                last,
                after,
                max,
            } => self.slot_list(*first, *last, *after, *max).await,
            request => {
                let reply = self.small(&op, request, current).await;
                self.answer(reply).await
            }
        }
    }

    /// Requests without bytes. A primary's part is played by members of the slot's list only.
    async fn small(&self, op: &Op, request: &Request<'_>, current: bool) -> Reply<'static> {
        let router = &self.router;
        let listed = |key| router.routing().my_copy(slot_of(key)).is_some();
        let refused = Reply::Refused {
            code: RefusalCode::NotOwner,
        };
        match request {
            _ if !current => refused,
            Request::Del {
                key,
                role: Role::Replica,
                write_id,
            } => Reply::Done {
                yes: router.del_copy(key, *write_id),
            },
            Request::Expire {
                key,
                role: Role::Replica,
                ttl_ms,
            } => Reply::Done {
                yes: router.expire_copy(key, *ttl_ms),
            },
            Request::Del { key, .. } if listed(key) => Reply::Done {
                yes: router.del_here(op, &Bytes::copy_from_slice(key)).await,
            },
            Request::Expire { key, ttl_ms, .. } if listed(key) => Reply::Done {
                yes: router.expire_here(op, &Bytes::copy_from_slice(key), *ttl_ms).await,
            },
            Request::Ttl { key } if listed(key) => {
                let left = match router.ttl_here(key) {
                    Ttl::NoKey => None,
                    Ttl::NoExpiry => Some(None),
                    Ttl::Remaining(left) => Some(Some(crate::clock::to_ms(left))),
                };
                Reply::Ttl { left }
            }
            _ => refused,
        }
    }

    fn encode(&mut self, reply: Reply<'_>) {
        let known = self.router.known();
        ReplyHead { known, reply }.encode(&mut self.wire.out);
    }

    async fn answer(&mut self, reply: Reply<'_>) -> Result<(), WireError> {
        self.encode(reply);
        self.wire.flush(Patience::Stall(READER_STALL)).await
    }

    async fn miss(&mut self, key: &[u8], reason: MissReason) -> Result<(), WireError> {
        let usual = usual_to(self.router.lengths().usual(key, self.router.now_ms()));
        let reason = match reason {
            MissReason::Evicted => MissCode::Evicted,
            MissReason::Generation => MissCode::Generation,
            _ => MissCode::Absent,
        };
        self.answer(Reply::Miss { reason, usual }).await
    }

    /// Our own miss; worth something only from an in-sync copy.
    async fn own_miss(&mut self, key: &[u8], reason: MissReason) -> Result<(), WireError> {
        if self.router.routing().my_copy(slot_of(key)) == Some(true) {
            self.miss(key, reason).await
        } else {
            self.answer(Reply::Refused {
                code: RefusalCode::NotOwner,
            })
            .await
        }
    }

    async fn map(&mut self) -> Result<(), WireError> {
        let map = Arc::clone(&self.router.routing().map);
        let bytes = if map.epoch == 0 {
            Vec::new()
        } else {
            map.encode_to_vec()
        };
        let len = u32::try_from(bytes.len()).unwrap_or(u32::MAX);
        self.encode(Reply::Map { len });
        for frame in bytes.chunks(FRAME_BYTES) {
            let head = FrameHead::Data {
                len: frame.len(),
                crc: crc32c::crc32c(frame),
            }
            .encode();
            self.wire.out.extend_from_slice(&head);
            self.wire.out.extend_from_slice(frame);
        }
        self.wire.flush(Patience::Stall(HEAD_TIME)).await
    }

    async fn slot_list(&mut self, first: u16, last: u16, after: Option<&[u8]>, max: u16) -> Result<(), WireError> {
        let router = Arc::clone(&self.router);
        let Some(store) = router.store() else {
            return self
                .answer(Reply::Refused {
                    code: RefusalCode::NotOwner,
                })
                .await;
        };
        let max = usize::from(max.clamp(1, MAX_PAGE));
        let mut found = Vec::new();
        let mut room = page_bytes();
        let mut cursor = after.map(Box::from);
        let mut next = None;
        'slots: for slot in first..=last.min(SLOTS - 1) {
            let page = store.slot_keys(slot, cursor.take().as_deref(), max - found.len());
            let more = page.next.is_some();
            for entry in page.entries {
                let bytes = entry.key.len()
                    + SlotEntry {
                        slot,
                        key: &[],
                        write_id: 0,
                        len: 0,
                    }
                    .bytes();
                if bytes > room {
                    next = found
                        .last()
                        .map(|(slot, entry): &(u16, kvpool_store::SlotEntry)| (*slot, entry.key.clone()));
                    break 'slots;
                }
                room -= bytes;
                found.push((slot, entry));
            }
            if more || (found.len() >= max && slot < last) {
                next = found.last().map(|(slot, entry)| (*slot, entry.key.clone()));
                break;
            }
        }
        let entries = found
            .iter()
            .map(|(slot, entry)| SlotEntry {
                slot: *slot,
                key: &entry.key,
                write_id: entry.write_id,
                len: entry.len,
            })
            .collect();
        let next = next.as_ref().map(|(slot, key)| (*slot, &key[..]));
        self.answer(Reply::Slots { entries, next }).await
    }
}
