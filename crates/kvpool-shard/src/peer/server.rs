//! The peer listener: requests of proxies and other shards, answered from the local store.
//!
//! Nothing here is forwarded again. Connections are bounded in number, half-sent heads in time, upload memory by the
//! store's own limit; a foreign protocol gets a short reply and a close.

use std::io::IoSlice;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use kvpool_state::{SLOTS, slot_of};
use kvpool_store::{BlockRef, Existence, Lookup, PIECE_BYTES};
use kvpool_wire::foreign::Foreign;
use kvpool_wire::peer::hello::{HELLO_PREFIX_BYTES, prefix};
use kvpool_wire::peer::reply::page_bytes;
use kvpool_wire::peer::request::MAX_PAGE;
use kvpool_wire::peer::{
    DropCode, FRAME_BYTES, FRAME_HEAD_BYTES, FrameHead, Hello, HelloReply, HelloStatus, Info, Known, MissCode,
    PUT_END_BYTES, PeerError, PutEnd, RefusalCode, Reply, ReplyHead, Request, RequestHead, Role, SlotEntry,
};
use prost::Message;
use smallvec::SmallVec;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::{Instrument, debug, debug_span, warn};

use super::wire::{Patience, Wire, WireError};
use super::within;
use crate::metric_definitions as names;
use crate::ops::{DropReason, Front, MissReason, Op, PutOutcome, PutSink, PutSpec, Ttl};
use crate::router::{Router, condition_from, reason_of, usual_to};

/// Most connections of peers.
const MAX_CONNECTIONS: usize = 4096;
/// Time for a hello and for the rest of a request's head once it has begun.
const HEAD_TIME: Duration = Duration::from_secs(2);
/// Longest pause of an upload: somewhat more than front ends allow their clients.
const UPLOAD_STALL: Duration = Duration::from_secs(35);
/// Longest pause of a reader: somewhat more than front ends allow their clients.
const READER_STALL: Duration = Duration::from_secs(65);
/// Frames handed to one `writev`.
const BATCH: usize = 16;
/// A head, and head and content of each frame; of the sizes that `SmallVec` has.
const SLICES: usize = 36;
/// Pause after a failed accept (usually: no file descriptors left).
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);
/// A request that took longer than this (half of `op_deadline`) is logged.
const SLOW: Duration = Duration::from_millis(250);

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
            warn!(
                likely = foreign.hint(),
                "closed a client that does not speak the peer protocol"
            );
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
        let router = Arc::clone(&self.router);
        match &head.request {
            Request::Ping => return self.answer(Reply::Done { yes: true }).await,
            Request::MapFetch => return self.map().await,
            _ => {}
        }
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
                if let Some(store) = router.store() {
                    for key in keys {
                        // A hint: whether it was taken is the store's to count.
                        let _: Existence = store.exists(key, router.now_ms(), Some(u64::from(*lease_ms)));
                    }
                }
                self.answer(Reply::Done { yes: true }).await
            }
            Request::Put { .. } => self.put(&op, head, current).await,
            Request::Del { .. } | Request::Expire { .. } | Request::Ttl { .. } if !current => {
                self.answer(Reply::Refused {
                    code: RefusalCode::NotOwner,
                })
                .await
            }
            Request::Del { key, role, write_id } => {
                let yes = match role {
                    Role::Primary => router.del_here(&op, &Bytes::copy_from_slice(key)).await,
                    Role::Replica => router.del_copy(key, *write_id),
                };
                self.answer(Reply::Done { yes }).await
            }
            Request::Ttl { key } => {
                let left = match router.ttl_here(key) {
                    Ttl::NoKey => None,
                    Ttl::NoExpiry => Some(None),
                    Ttl::Remaining(left) => Some(Some(crate::clock::to_ms(left))),
                };
                self.answer(Reply::Ttl { left }).await
            }
            Request::Expire { key, role, ttl_ms } => {
                let yes = match role {
                    Role::Primary => router.expire_here(&op, &Bytes::copy_from_slice(key), *ttl_ms).await,
                    Role::Replica => router.expire_copy(key, *ttl_ms),
                };
                self.answer(Reply::Done { yes }).await
            }
            Request::SlotList {
                first,
                last,
                after,
                max,
            } => self.slot_list(*first, *last, *after, *max).await,
            Request::Ping | Request::MapFetch => Ok(()),
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

    fn hit(&self, block: &BlockRef) -> Reply<'static> {
        let router = &self.router;
        let info = router.info_of(block);
        let now = router.now_ms();
        let info = Info {
            len: info.len,
            write_id: info.write_id,
            copies: info.copies,
            meta: info.meta,
            ttl_ms: block.expires_at_ms().map(|at| at.saturating_sub(now)),
        };
        Reply::Hit {
            info,
            usual: usual_to(router.lengths().usual(block.key(), now)),
        }
    }

    async fn get(&mut self, key: &[u8], offset: u64, write_id: u64, peek: bool) -> Result<(), WireError> {
        let router = Arc::clone(&self.router);
        let Some(store) = router.store() else {
            return self.own_miss(key, MissReason::Absent).await;
        };
        let now = router.now_ms();
        let found = if peek {
            store.peek(key, now).ok_or(MissReason::Absent)
        } else {
            match store.get(key, now) {
                Lookup::Hit(block) => Ok(block),
                Lookup::Miss(why) => Err(reason_of(why)),
            }
        };
        match found {
            Err(reason) => self.own_miss(key, reason).await,
            Ok(block) if write_id != 0 && block.write_id() != write_id => {
                let usual = usual_to(router.lengths().usual(key, now));
                self.answer(Reply::Miss {
                    reason: MissCode::OtherWrite,
                    usual,
                })
                .await
            }
            Ok(block) if offset > block.len() || !offset.is_multiple_of(FRAME_BYTES as u64) => {
                Err(PeerError::Value("offset").into())
            }
            Ok(block) => self.send(&block, offset).await,
        }
    }

    /// Writes the reply and the frames, as many as the socket takes in one call.
    async fn send(&mut self, block: &BlockRef, offset: u64) -> Result<(), WireError> {
        let reply = self.hit(block);
        self.encode(reply);
        let head = std::mem::take(&mut self.wire.out);
        let skip = (offset / PIECE_BYTES as u64) as usize;
        let mut front: &[u8] = &head;
        let mut pieces = block.slices().zip(block.piece_crcs()).skip(skip).peekable();
        let written = loop {
            let batch: SmallVec<[(&[u8], [u8; FRAME_HEAD_BYTES]); BATCH]> = pieces
                .by_ref()
                .take(BATCH)
                .map(|(bytes, crc)| (bytes, FrameHead::Data { len: bytes.len(), crc }.encode()))
                .collect();
            let mut slices: SmallVec<[IoSlice<'_>; SLICES]> = SmallVec::new();
            slices.push(IoSlice::new(front));
            for (bytes, frame) in &batch {
                slices.push(IoSlice::new(frame));
                slices.push(IoSlice::new(bytes));
            }
            let written = self.wire.write(&mut slices, Patience::Stall(READER_STALL)).await;
            front = &[];
            if written.is_err() || pieces.peek().is_none() {
                break written;
            }
        };
        self.wire.out = head;
        self.wire.out.clear();
        written
    }

    async fn exists(&mut self, key: &[u8], lease_ms: u32) -> Result<(), WireError> {
        let router = Arc::clone(&self.router);
        match router.exists_here(key, u64::from(lease_ms)) {
            Ok(block) => {
                router.lease_elsewhere(&Bytes::copy_from_slice(key));
                let reply = self.hit(&block);
                self.answer(reply).await
            }
            Err(reason) => self.own_miss(key, reason).await,
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

    /// Opens the sink of a PUT, or says why not.
    fn open(&self, op: &Op, head: &RequestHead<'_>, current: bool) -> Result<PutSink, DropCode> {
        let Request::Put {
            key,
            role,
            len,
            meta,
            write_id,
            ttl_ms,
            condition,
        } = &head.request
        else {
            return Err(DropCode::NotOwner);
        };
        if !current {
            return Err(DropCode::Generation);
        }
        let routing = self.router.routing();
        let listed = routing.my_copy(slot_of(key)).is_some();
        // Who knows a newer map may know that we have just joined the list.
        let newer = crate::identity::is_newer(head.known, routing.known());
        let key = Bytes::copy_from_slice(key);
        let ttl = ttl_ms.map(Duration::from_millis);
        let spec = PutSpec {
            len: *len,
            meta: *meta,
            ttl,
            condition: condition_from(*condition),
        };
        match role {
            Role::Primary if listed => Ok(self.router.accept_put(op, &key, spec)),
            Role::Replica if listed || newer => Ok(self.router.accept_copy(op, &key, spec, *write_id)),
            Role::Primary | Role::Replica => Err(DropCode::NotOwner),
        }
    }

    async fn put(&mut self, op: &Op, head: &RequestHead<'_>, current: bool) -> Result<(), WireError> {
        let mut sink = match self.open(op, head, current) {
            Ok(sink) => sink,
            Err(reason) => return self.turn_away(Reply::Dropped { reason }).await,
        };
        if let Some(outcome) = sink.refused() {
            let reply = outcome_reply(outcome, 0, kvpool_wire::peer::Usual::Unknown);
            return self.turn_away(reply).await;
        }
        self.answer(Reply::Ready).await?;
        let patience = Patience::Stall(UPLOAD_STALL);
        while sink.remaining() > 0 {
            let FrameHead::Data { len, crc } = self.wire.frame_head(patience).await? else {
                // The uploader gave up; dropping the sink forgets the block.
                return self.skip_end(patience).await;
            };
            let spare = sink.spare();
            if len != spare.len() {
                return Err(PeerError::Value("frame length").into());
            }
            let content = self.wire.frame_content(spare, crc, patience).await;
            if matches!(content, Err(WireError::Protocol(PeerError::Checksum))) {
                metrics::counter!(names::PEER_CHECKSUM_TOTAL).increment(1);
            }
            content?;
            sink.advance_verified(len, crc);
        }
        let FrameHead::End { crc } = self.wire.frame_head(patience).await? else {
            return Err(PeerError::Value("frame").into());
        };
        let content = self.wire.peek::<PUT_END_BYTES>(patience).await?;
        self.wire.skip(PUT_END_BYTES);
        let end = PutEnd::decode(&content, crc)?;
        if !end.commit {
            return Ok(());
        }
        let ttl = end.ttl_ms.map(Duration::from_millis);
        let (outcome, copies) = sink.settle(ttl, condition_from(end.condition)).await;
        let Request::Put { key, .. } = &head.request else {
            return Ok(());
        };
        let usual = usual_to(self.router.lengths().usual(key, self.router.now_ms()));
        self.answer(outcome_reply(outcome, copies, usual)).await
    }

    async fn skip_end(&mut self, patience: Patience) -> Result<(), WireError> {
        self.wire.peek::<PUT_END_BYTES>(patience).await?;
        self.wire.skip(PUT_END_BYTES);
        Ok(())
    }

    /// Says no to an upload. Its bytes are on the way: they are read off until the sender has heard it and closes,
    /// because a close with unread input would reset the connection and take the answer with it.
    async fn turn_away(&mut self, reply: Reply<'_>) -> Result<(), WireError> {
        self.answer(reply).await?;
        let until = within(HEAD_TIME);
        let mut scratch = [0; 16 * 1024];
        loop {
            self.wire.read_into(&mut scratch, false, Patience::Until(until)).await?;
            if Instant::now() >= until {
                return Err(WireError::Deadline);
            }
        }
    }
}

fn outcome_reply(outcome: PutOutcome, copies: u8, usual: kvpool_wire::peer::Usual) -> Reply<'static> {
    match outcome {
        PutOutcome::Stored1 | PutOutcome::Stored2 => Reply::Stored { copies, usual },
        PutOutcome::ConditionFailed => Reply::ConditionFailed,
        PutOutcome::Dropped(reason) => Reply::Dropped {
            reason: match reason {
                DropReason::Size => DropCode::Size,
                DropReason::Shed => DropCode::Shed,
                DropReason::Generation => DropCode::Generation,
                DropReason::Stalled => DropCode::Stalled,
                DropReason::NotOwner | DropReason::OwnerDown => DropCode::NotOwner,
            },
        },
    }
}
