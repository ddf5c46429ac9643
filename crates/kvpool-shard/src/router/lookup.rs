//! GET and EXISTS: who is asked, in which order, until when.
//!
//! 1. This process is the primary and in-sync: its store answers, hit or miss.
//! 2. Otherwise the copies of the slot are asked in the list's order, in-sync ones first, skipping peers whose breaker is
//!    open. The next one is asked when the one before has failed, or has been silent for 150 ms. The first hit wins; so
//!    does a miss of the primary.
//! 3. A miss of another copy is believed when nobody who could know better is left.
//!
//! Whoever was asked and loses is waited for in the background, so that its breaker learns whether it was slow or dead.

use std::pin::Pin;
use std::sync::Arc;

use bytes::Bytes;
use futures::StreamExt;
use futures::stream::FuturesUnordered;
use kvpool_state::slot_of;
use kvpool_store::{BlockRef, Existence, Lookup, Miss};
use kvpool_wire::peer::{FRAME_BYTES, Info, MissCode, Reply, Request};
use tokio::time::Instant;

use super::{Router, usual_from};
use crate::body::{Opening, Stream, take_rest};
use crate::clock::to_ms;
use crate::ops::{
    BlockInfo, Body, ExistsAnswer, FIRST_COPY_DEADLINE, GetAnswer, LEASE, MissReason, OP_DEADLINE, Op, Path, Usual,
};
use crate::peer::wire::Patience;
use crate::peer::{BreakerState, Conn, Failure, Peer};
use crate::routing::{HeldCopy, Holder};
use crate::staging::{Buffer, Reservation, Staging};
use crate::ticks::sleep_until;

/// What is looked for.
#[derive(Clone, Copy, PartialEq, Eq)]
enum What {
    Bytes,
    Presence,
}

/// A block that was found.
struct Found {
    info: BlockInfo,
    usual: Usual,
    source: Source,
    /// Place of its copy among those asked.
    place: usize,
    /// It came from the slot's primary.
    from_primary: bool,
}

enum Source {
    Local(BlockRef),
    Remote(Box<Remote>),
    /// Presence was asked for.
    Nothing,
}

struct Remote {
    conn: Conn,
    /// The first frame; `None` for an empty value.
    first: Option<Buffer>,
    held: Reservation,
}

/// One copy's answer.
enum Answer {
    Hit {
        info: BlockInfo,
        usual: Usual,
        source: Source,
    },
    Miss {
        reason: MissReason,
        usual: Usual,
    },
    /// It could not say.
    Failed(MissReason),
}

type Asking = Pin<Box<dyn Future<Output = (usize, Answer)> + Send>>;

struct NotFound {
    reason: MissReason,
    usual: Usual,
}

/// Waits until `at`. Not even a moment when it has come: a timer that is due fires with the next millisecond only.
async fn due(at: Instant) {
    if at > Instant::now() {
        sleep_until(at).await;
    }
}

impl Router {
    /// Reads a block. The first byte comes within the deadline, or it is a miss.
    pub async fn get(self: &Arc<Self>, op: &Op, key: &Bytes) -> GetAnswer {
        let found = match self.find(op, key, What::Bytes).await {
            Ok((found, others)) => self.deliver(op, key, found, others).await,
            Err(not_found) => Err(not_found),
        };
        found.unwrap_or_else(|NotFound { reason, usual }| GetAnswer::Miss { reason, usual })
    }

    /// Looks a block up and takes the read lease, here and at the other copies.
    pub async fn exists(self: &Arc<Self>, op: &Op, key: &Bytes) -> ExistsAnswer {
        match self.find(op, key, What::Presence).await {
            Ok((found, _)) => ExistsAnswer {
                hit: Some(found.info),
                usual: found.usual,
                reason: None,
            },
            Err(NotFound { reason, usual }) => ExistsAnswer {
                hit: None,
                usual,
                reason: Some(reason),
            },
        }
    }

    /// Finds the block, and the copies that could go on with its body.
    async fn find(self: &Arc<Self>, op: &Op, key: &Bytes, what: What) -> Result<(Found, Vec<Holder>), NotFound> {
        let (copies, primary) = {
            let routing = self.routing();
            let list = routing.list(slot_of(key));
            if op.generation != routing.map.generation {
                return Err(self.not_found(key, MissReason::Generation));
            }
            let first_is_me = list.first().is_some_and(|copy| copy.holder.is_me() && copy.in_sync);
            if first_is_me && self.is_serving() {
                drop(routing);
                return match self.ask_me(key, what) {
                    Answer::Hit { info, usual, source } => Ok((
                        Found {
                            info,
                            usual,
                            source,
                            place: 0,
                            from_primary: true,
                        },
                        Vec::new(),
                    )),
                    Answer::Miss { reason, usual } => Err(NotFound { reason, usual }),
                    Answer::Failed(reason) => Err(self.not_found(key, reason)),
                };
            }
            (self.candidates(list), list.first().map(|copy| copy.holder.clone()))
        };
        let found = self.ask_around(op, key, what, &copies, primary.as_ref()).await?;
        let others = copies
            .into_iter()
            .enumerate()
            .filter(|(place, copy)| *place != found.place && copy.in_sync && !is_skipped(copy));
        let others = others.map(|(_, copy)| copy.holder).collect();
        Ok((found, others))
    }

    /// Copies worth asking: in-sync before filling, prompt before suspect, the list's order within. Last come the in-sync ones
    /// that are skipped at the moment, for when nobody else is left.
    fn candidates(&self, list: &[HeldCopy]) -> Vec<HeldCopy> {
        let state = |copy: &HeldCopy| match &copy.holder {
            Holder::Me => self.is_serving().then_some(BreakerState::Closed),
            Holder::Peer(peer) => Some(peer.state()).filter(|state| *state != BreakerState::Open || copy.in_sync),
        };
        let mut copies: Vec<_> = list
            .iter()
            .filter_map(|copy| Some((state(copy)?, copy.clone())))
            .collect();
        copies.sort_by_key(|(state, copy)| {
            (
                *state == BreakerState::Open,
                !copy.in_sync,
                *state != BreakerState::Closed,
            )
        });
        copies.into_iter().map(|(_, copy)| copy).collect()
    }

    fn not_found(&self, key: &[u8], reason: MissReason) -> NotFound {
        NotFound {
            reason,
            usual: self.lengths.usual(key, self.now_ms()),
        }
    }

    async fn ask_around(
        self: &Arc<Self>,
        op: &Op,
        key: &Bytes,
        what: What,
        copies: &[HeldCopy],
        primary: Option<&Holder>,
    ) -> Result<Found, NotFound> {
        let deadline = op.started + OP_DEADLINE;
        let prompt = copies.iter().take_while(|copy| !is_skipped(copy)).count();
        let mut asked = 0;
        let mut asking: FuturesUnordered<Asking> = FuturesUnordered::new();
        let mut next_at = Instant::now();
        let mut miss: Option<NotFound> = None;
        let mut trouble = MissReason::OwnerDown;
        let found = loop {
            if asking.is_empty() && asked >= prompt {
                match copies.get(asked) {
                    Some(copy) if miss.is_none() => {
                        asking.push(self.ask_copy(op, key, what, asked, copy, deadline));
                        asked += 1;
                    }
                    _ => break None,
                }
            }
            tokio::select! {
                biased;
                Some((place, answer)) = asking.next(), if !asking.is_empty() => match answer {
                    Answer::Hit { info, usual, source } => {
                        let holder = copies.get(place).map(|copy| &copy.holder);
                        let from_primary = holder.zip(primary).is_some_and(|(holder, primary)| same(holder, primary));
                        break Some(Found { info, usual, source, place, from_primary });
                    }
                    Answer::Miss { reason, usual } => {
                        miss = Some(NotFound { reason, usual });
                        let knows = copies.get(place).is_some_and(|copy| is_authority(copy, primary));
                        if knows {
                            break None;
                        }
                        next_at = Instant::now();
                    }
                    Answer::Failed(reason) => {
                        trouble = reason;
                        next_at = Instant::now();
                    }
                },
                () = due(next_at), if asked < prompt => {
                    if let Some(HeldCopy { holder: Holder::Peer(late), .. }) = asked.checked_sub(1).and_then(|at| copies.get(at))
                        && !asking.is_empty()
                    {
                        late.late();
                    }
                    if let Some(copy) = copies.get(asked) {
                        asking.push(self.ask_copy(op, key, what, asked, copy, deadline));
                    }
                    asked += 1;
                    next_at = Instant::now() + FIRST_COPY_DEADLINE;
                }
                () = sleep_until(deadline) => {
                    trouble = MissReason::Deadline;
                    break None;
                }
            }
        };
        if !asking.is_empty() {
            // Bounded: each of them ends at the operation's deadline.
            tokio::spawn(async move { while asking.next().await.is_some() {} });
        }
        match (found, miss) {
            (Some(found), _) => Ok(found),
            (None, Some(miss)) => Err(miss),
            (None, None) => Err(self.not_found(key, trouble)),
        }
    }

    fn ask_copy(
        self: &Arc<Self>,
        op: &Op,
        key: &Bytes,
        what: What,
        place: usize,
        copy: &HeldCopy,
        deadline: Instant,
    ) -> Asking {
        let (router, op, key) = (Arc::clone(self), *op, key.clone());
        match &copy.holder {
            Holder::Me => Box::pin(async move { (place, router.ask_me(&key, what)) }),
            Holder::Peer(peer) => {
                let peer = Arc::clone(peer);
                Box::pin(async move {
                    let ask = router.ask_peer(&peer, &op, &key, what, deadline);
                    if peer.state() != BreakerState::Open {
                        return (place, ask.await);
                    }
                    let answer = peer.as_last_resort(deadline, ask).await;
                    (place, answer.unwrap_or(Answer::Failed(MissReason::OwnerDown)))
                })
            }
        }
    }

    /// The local store's answer.
    fn ask_me(&self, key: &Bytes, what: What) -> Answer {
        let now = self.now_ms();
        let usual = self.lengths.usual(key, now);
        let Some(store) = &self.store else {
            return Answer::Failed(MissReason::OwnerDown);
        };
        let miss = |miss| Answer::Miss {
            reason: reason_of(miss),
            usual,
        };
        match what {
            What::Bytes => match store.get(key, now) {
                Lookup::Hit(block) => Answer::Hit {
                    info: self.info_of(&block),
                    usual,
                    source: Source::Local(block),
                },
                Lookup::Miss(why) => miss(why),
            },
            What::Presence => match self.exists_here(key, to_ms(LEASE)) {
                Ok(block) => {
                    self.lease_elsewhere(key);
                    Answer::Hit {
                        info: self.info_of(&block),
                        usual,
                        source: Source::Nothing,
                    }
                }
                Err(reason) => Answer::Miss { reason, usual },
            },
        }
    }

    /// Looks a block up in the local store and takes the lease.
    pub(crate) fn exists_here(&self, key: &[u8], lease_ms: u64) -> Result<BlockRef, MissReason> {
        let now = self.now_ms();
        let store = self.store().ok_or(MissReason::OwnerDown)?;
        let block = store.peek(key, now);
        match (store.exists(key, now, Some(lease_ms)), block) {
            (Existence::Present { .. }, Some(block)) => Ok(block),
            (Existence::Miss(why), _) => Err(reason_of(why)),
            // It was written between the two calls; it is there for the next one.
            (Existence::Present { .. }, None) => Err(MissReason::Absent),
        }
    }

    /// A peer's answer; for bytes, with the first frame of them. Tells the breaker.
    async fn ask_peer(
        self: &Arc<Self>,
        peer: &Arc<Peer>,
        op: &Op,
        key: &Bytes,
        what: What,
        deadline: Instant,
    ) -> Answer {
        let started = Instant::now();
        match self.try_peer(peer, op, key, what, deadline).await {
            Ok(answer) => {
                peer.answered();
                answer
            }
            Err(failure) => {
                peer.observe(&failure, started);
                Answer::Failed(match failure {
                    Failure::Busy => MissReason::Shed,
                    failure if failure.is_deadline() => MissReason::Deadline,
                    _ => MissReason::OwnerDown,
                })
            }
        }
    }

    async fn try_peer(
        self: &Arc<Self>,
        peer: &Arc<Peer>,
        op: &Op,
        key: &Bytes,
        what: What,
        deadline: Instant,
    ) -> Result<Answer, Failure> {
        let request = match what {
            What::Bytes => Request::Get {
                key,
                offset: 0,
                write_id: 0,
                peek: false,
            },
            What::Presence => Request::Exists {
                key,
                lease_ms: u32::try_from(to_ms(LEASE)).unwrap_or(u32::MAX),
            },
        };
        let mut conn = peer.ask(self.asked(op, deadline), request).await?;
        let (info, usual) = match conn.last_reply()? {
            Reply::Hit { info, usual } => (info, usual),
            Reply::Miss { reason, usual } => {
                let (reason, usual) = (miss_from(reason), usual_from(usual));
                conn.release();
                let usual = self.lengths.learn(key, usual, self.now_ms());
                return Ok(Answer::Miss { reason, usual });
            }
            _ => return Err(Failure::OutOfTurn),
        };
        let usual = self.lengths.learn(key, usual_from(usual), self.now_ms());
        let info = info_from(info);
        if what == What::Presence {
            conn.release();
            return Ok(Answer::Hit {
                info,
                usual,
                source: Source::Nothing,
            });
        }
        let Some(held) = self.hold(&info, deadline).await else {
            return Ok(Answer::Failed(MissReason::Shed));
        };
        let first = match info.len {
            0 => None,
            len => Some(conn.frame(&self.staging, len, Patience::Until(deadline)).await?),
        };
        Ok(Answer::Hit {
            info,
            usual,
            source: Source::Remote(Box::new(Remote { conn, first, held })),
        })
    }

    /// Room for a body: a streamed one holds one frame at a time, a single copy is taken whole.
    async fn hold(&self, info: &BlockInfo, deadline: Instant) -> Option<Reservation> {
        let bytes = if info.copies >= 2 {
            info.len.min(FRAME_BYTES as u64)
        } else {
            info.len
        };
        self.staging.reserve(bytes, deadline).await
    }

    /// Turns a block that was found into an answer.
    async fn deliver(
        self: &Arc<Self>,
        op: &Op,
        key: &Bytes,
        found: Found,
        others: Vec<Holder>,
    ) -> Result<GetAnswer, NotFound> {
        let Found {
            info,
            usual,
            source,
            from_primary,
            ..
        } = found;
        let (body, path) = match source {
            Source::Nothing => return Err(self.not_found(key, MissReason::Absent)),
            Source::Local(block) => {
                let path = if from_primary { Path::Local } else { Path::Replica };
                (Body::local(block), path)
            }
            Source::Remote(remote) => {
                let Remote { conn, first, held } = *remote;
                let path = if from_primary { Path::Forwarded } else { Path::Replica };
                let len = info.len;
                let all_there = first.as_ref().map_or(0, |first| first.len() as u64) >= len;
                let body = if all_there {
                    conn.release();
                    Body::whole(len, first.into_iter().collect(), held)
                } else if info.copies >= 2 && can_go_on(&others, len) {
                    let opening = Opening {
                        conn,
                        first,
                        held,
                        len,
                        write_id: info.write_id,
                    };
                    Body::stream(Stream::new(Arc::clone(self), *op, key.clone(), opening, others))
                } else {
                    self.take_whole(op, key, conn, first, held, len).await?
                };
                (body, path)
            }
        };
        Ok(GetAnswer::Hit {
            info,
            usual,
            body,
            path,
        })
    }

    /// A block that no second copy could finish: all of it must be here before the first byte is promised.
    async fn take_whole(
        &self,
        op: &Op,
        key: &[u8],
        mut conn: Conn,
        first: Option<Buffer>,
        mut held: Reservation,
        len: u64,
    ) -> Result<Body, NotFound> {
        let deadline = op.started + OP_DEADLINE;
        if !held.covers(len) {
            // Its peer counted on a copy that we cannot reach: the room for the whole block is still to be had.
            drop(held);
            held = match self.staging.reserve(len, deadline).await {
                Some(held) => held,
                None => return Err(self.not_found(key, MissReason::Shed)),
            };
        }
        let started = Instant::now();
        match take_rest(self, &mut conn, first, len, deadline).await {
            Ok(pieces) => {
                conn.release();
                Ok(Body::whole(len, pieces, held))
            }
            Err(failure) => {
                conn.peer.observe(&failure, started);
                let reason = if failure.is_deadline() {
                    MissReason::Deadline
                } else {
                    MissReason::OwnerDown
                };
                Err(self.not_found(key, reason))
            }
        }
    }

    /// Has the lease of an EXISTS taken at the other copies too. A hint: dropped when the queue is full.
    pub(crate) fn lease_elsewhere(&self, key: &Bytes) {
        let several = self.routing().list(slot_of(key)).len() > 1;
        if several && self.leases.try_send(key.clone()).is_err() {
            metrics::counter!(crate::metric_definitions::LEASES_DROPPED_TOTAL).increment(1);
        }
    }
}

/// Whether a body may be streamed on the strength of these copies: one of them answered promptly of late. A block that is
/// too long to be taken whole is streamed on the strength of any.
fn can_go_on(others: &[Holder], len: u64) -> bool {
    let prompt = |holder: &Holder| match holder {
        Holder::Me => true,
        Holder::Peer(peer) => peer.state() == BreakerState::Closed,
    };
    others.iter().any(prompt) || (!others.is_empty() && !Staging::fits(len))
}

/// Whether a copy's miss is the slot's: it is the primary, and in-sync.
/// A peer that failed, whose probe has not got through yet.
fn is_skipped(copy: &HeldCopy) -> bool {
    matches!(&copy.holder, Holder::Peer(peer) if peer.state() == BreakerState::Open)
}

fn is_authority(copy: &HeldCopy, primary: Option<&Holder>) -> bool {
    copy.in_sync && primary.is_some_and(|primary| same(&copy.holder, primary))
}

pub(crate) fn same(a: &Holder, b: &Holder) -> bool {
    match (a, b) {
        (Holder::Me, Holder::Me) => true,
        (Holder::Peer(a), Holder::Peer(b)) => Arc::ptr_eq(a, b),
        _ => false,
    }
}

fn info_from(info: Info) -> BlockInfo {
    BlockInfo {
        len: info.len,
        write_id: info.write_id,
        meta: info.meta,
        copies: info.copies,
    }
}

fn miss_from(code: MissCode) -> MissReason {
    match code {
        MissCode::Absent | MissCode::OtherWrite => MissReason::Absent,
        MissCode::Evicted => MissReason::Evicted,
        MissCode::Generation => MissReason::Generation,
    }
}

pub(crate) fn reason_of(miss: Miss) -> MissReason {
    match miss {
        Miss::Absent | Miss::Expired => MissReason::Absent,
        Miss::Evicted => MissReason::Evicted,
    }
}
