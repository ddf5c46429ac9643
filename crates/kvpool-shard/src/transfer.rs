//! Slot transfer: the one way in which a copy of a slot comes to be.
//!
//! When the map lists this shard as *filling*, it pulls the slot's blocks from an in-sync copy, page by page, at a bounded
//! rate, and then reports the slot as complete. Repair, return, drain and rebalance are all this.
//!
//! Why the copy is complete when it says so:
//! - New writes and removals go to every copy in the primary's list, filling ones too. Pulling begins only once the source
//!   holds the epoch in which we joined, so from then on nothing new is missed; a write that was under way across that
//!   epoch, or did not reach us, is a *gap* that its primary keeps and closes ([`crate::peer::gaps`]).
//! - A pulled block carries its write id and is stored only over an older one, so a newer write that came first stays.
//! - A removal leaves its write id behind in the store, so an older block that is pulled after it is dropped. That memory
//!   is bounded; it outlasts a pull of one block by far. The source is the primary whenever it answers, and it removes a
//!   block before it tells us: a pull that begins after the removal does not find the block.
//! - A slot begins empty: what this shard held of it in an earlier epoch was dropped when the slot left, or, when this shard
//!   never saw the epoch in which it left, when the map tells of it ([`Routing::dropped_at`]).

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures::StreamExt;
use kvpool_state::records::{SlotCopy, SlotRange};
use kvpool_wire::lm::LmMeta;
use kvpool_wire::peer::request::MAX_PAGE;
use kvpool_wire::peer::{Info, Reply, Request};
use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::time::{Instant, sleep, timeout};
use tokio_util::sync::CancellationToken;
use tracing::{debug, info};

use crate::metric_definitions as names;
use crate::ops::BODY_STALL;
use crate::peer::wire::Patience;
use crate::peer::{Asked, BreakerState, Failure, Peer, within};
use crate::router::Router;
use crate::routing::{Holder, Routing};

/// Bytes pulled per second, at most: a few percent of what a machine moves, so that clients hardly notice.
const RATE_BYTES: u64 = 256 << 20;
/// Blocks pulled at a time.
const PARALLEL: usize = 4;
/// Most slots in one pull, so that complete ones are reported early.
const RUN_SLOTS: usize = 1024;
/// Pause before a source that did not answer, or does not know of us yet, is asked again.
const RETRY: Duration = Duration::from_millis(100);
/// Time between two reports while slots are being filled.
const REPORT_EVERY: Duration = Duration::from_millis(250);
/// At the latest after this time the map is looked at again.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// Says to the coordinator that these slots are complete as of the map of this epoch.
pub(crate) type Report = Box<dyn Fn(u64, &[SlotRange]) + Send + Sync>;

/// Spreads bytes over time.
struct Bucket {
    free_at: Mutex<Instant>,
}

impl Bucket {
    /// Waits until `bytes` more may be moved.
    async fn take(&self, bytes: u64) {
        let wait = {
            let mut free_at = self.free_at.lock();
            let now = Instant::now();
            let start = (*free_at).max(now);
            *free_at = start + Duration::from_nanos(bytes.saturating_mul(1_000_000_000) / RATE_BYTES);
            start.saturating_duration_since(now)
        };
        if !wait.is_zero() {
            sleep(wait).await;
        }
    }
}

/// Where a run of slots is pulled from.
enum Origin {
    Peer(Arc<Peer>),
    /// No other copy is in-sync: there is nothing to pull.
    Nobody,
    /// The in-sync copies do not answer at the moment.
    Later,
}

/// The task that fills slots.
pub(crate) struct Transfer {
    router: Arc<Router>,
    report: Report,
    bucket: Bucket,
    /// Something besides the map calls for another look (a refused report).
    pub(crate) again: Arc<Notify>,
}

impl Transfer {
    pub(crate) fn new(router: Arc<Router>, report: Report) -> Self {
        let bucket = Bucket {
            free_at: Mutex::new(Instant::now()),
        };
        Transfer {
            router,
            report,
            bucket,
            again: Arc::new(Notify::new()),
        }
    }

    /// Runs until `shutdown`.
    pub(crate) async fn run(self, shutdown: CancellationToken) {
        tokio::select! {
            () = shutdown.cancelled() => {}
            () = self.fill() => {}
        }
    }

    async fn fill(&self) {
        let mut changes = self.router.changes();
        let mut complete: BTreeSet<u16> = BTreeSet::new();
        let mut incarnation = 0;
        let mut seen_epoch = 0;
        let mut reported_at = None::<Instant>;
        let mut pulled_slots = 0;
        loop {
            changes.borrow_and_update();
            let now = self.router.identity().incarnation();
            if incarnation != now {
                // The store was cleared: nothing is complete.
                complete.clear();
                incarnation = now;
            }
            let routing = self.router.routing_now();
            if routing.dropped_at > seen_epoch {
                // A slot that is filling may have gone and come back since, even in the middle of a pull.
                complete.clear();
                self.empty_filling(&routing);
            }
            seen_epoch = routing.map.epoch;
            let wanted = reconcile(&routing, &mut complete);
            let waiting = self.report_complete(&routing, &complete, wanted.is_empty(), &mut reported_at);
            metrics::gauge!(names::TRANSFER_SLOTS_LEFT).set(wanted.len() as f64);
            let Some((run, origin)) = next_run(&routing, &wanted) else {
                // Done, until the map changes.
                if pulled_slots > 0 {
                    info!(
                        slots = pulled_slots,
                        epoch = routing.map.epoch,
                        "filled the slots that were missing"
                    );
                    pulled_slots = 0;
                }
                tokio::select! {
                    _ = changes.changed() => {}
                    () = self.again.notified() => {}
                    () = sleep(LOOK_EVERY), if waiting => {}
                }
                continue;
            };
            let pulled = match origin {
                Origin::Nobody => Ok(()),
                Origin::Later => Err(None),
                Origin::Peer(peer) => self.pull_run(&peer, &run, routing.map.epoch).await.map_err(Some),
            };
            match pulled {
                Ok(()) => {
                    pulled_slots += run.len();
                    complete.extend(run);
                }
                Err(failure) => {
                    if let Some(failure) = failure {
                        debug!(%failure, first = run.first(), "failed to pull slots");
                    }
                    let _ = timeout(RETRY, changes.changed()).await;
                }
            }
            if incarnation != self.router.identity().incarnation() {
                complete.clear();
            }
        }
    }

    /// Drops what the store holds of slots that are filling.
    fn empty_filling(&self, routing: &Routing) {
        let Some(store) = self.router.store() else { return };
        for (slot, _) in routing.mine.iter().filter(|(_, in_sync)| !in_sync) {
            store.remove_slot(*slot);
        }
    }

    /// Reports slots that are complete and that the map still calls filling; true when there are some.
    fn report_complete(
        &self,
        routing: &Routing,
        complete: &BTreeSet<u16>,
        all: bool,
        reported_at: &mut Option<Instant>,
    ) -> bool {
        let filling = routing
            .mine
            .iter()
            .filter(|(_, in_sync)| !in_sync)
            .map(|(slot, _)| *slot);
        let done: Vec<u16> = filling.filter(|slot| complete.contains(slot)).collect();
        // Each report becomes a new epoch: some slots at a time while pulling, the rest at the end.
        let due = all || reported_at.is_none_or(|at| at.elapsed() >= REPORT_EVERY);
        if !done.is_empty() && due {
            (self.report)(routing.map.epoch, &ranges_of(&done));
            *reported_at = Some(Instant::now());
        }
        !done.is_empty()
    }

    /// Pulls what the slots of a run hold.
    async fn pull_run(&self, peer: &Arc<Peer>, run: &[u16], epoch: u64) -> Result<(), Failure> {
        let (Some(&first), Some(&last)) = (run.first(), run.last()) else {
            return Ok(());
        };
        let mut from = (first, None::<Bytes>);
        let mut blocks = 0;
        loop {
            let asked = self.asked();
            let (slot, after) = &from;
            let request = Request::SlotList {
                first: *slot,
                last,
                after: after.as_deref(),
                max: MAX_PAGE,
            };
            let conn = peer.call(asked, request).await?;
            if conn.last_known()?.epoch < epoch {
                // It does not send us the new writes yet. Our epoch in the request makes it fetch the map.
                conn.release();
                return Err(Failure::OutOfTurn);
            }
            let Reply::Slots { entries, next } = conn.last_reply()? else {
                return Err(Failure::OutOfTurn);
            };
            let missing: Vec<(Bytes, u64)> = entries
                .iter()
                // The range spans slots that are not in this run.
                .filter(|entry| run.binary_search(&entry.slot).is_ok() && self.lacks(entry.key, entry.write_id))
                .map(|entry| (Bytes::copy_from_slice(entry.key), entry.len))
                .collect();
            let next = next.map(|(slot, key)| (slot, Some(Bytes::copy_from_slice(key))));
            conn.release();
            blocks += missing.len();
            let mut pulls = futures::stream::iter(missing)
                .map(|(key, len)| async move {
                    self.bucket.take(len).await;
                    self.pull_block(peer, &key).await
                })
                .buffer_unordered(PARALLEL);
            while let Some(pulled) = pulls.next().await {
                pulled?;
            }
            match next {
                // A page must move on, or a peer could keep us here for ever.
                Some(next) if next > from => from = next,
                _ => break,
            }
        }
        debug!(from = peer.id, slots = run.len(), first, last, blocks, "pulled slots");
        Ok(())
    }

    fn asked(&self) -> Asked {
        Asked {
            request_id: rand::random(),
            known: self.router.known(),
            deadline: within(BODY_STALL),
        }
    }

    fn lacks(&self, key: &[u8], write_id: u64) -> bool {
        self.router.peek(key).is_none_or(|block| block.write_id() < write_id)
    }

    /// Pulls one block into the store. A block that is gone, or has no room here, is none: it is a cache.
    async fn pull_block(&self, peer: &Arc<Peer>, key: &Bytes) -> Result<(), Failure> {
        let Some(store) = self.router.store() else {
            return Ok(());
        };
        let request = Request::Get {
            key,
            offset: 0,
            write_id: 0,
            peek: true,
        };
        let mut conn = peer.call(self.asked(), request).await?;
        let info = match conn.last_reply()? {
            Reply::Hit { info, .. } => info,
            Reply::Miss { .. } => {
                conn.release();
                return Ok(());
            }
            _ => return Err(Failure::OutOfTurn),
        };
        self.router.ids().saw(info.write_id);
        let now = self.router.now_ms();
        let meta = info.meta.map(LmMeta::to_bytes);
        let spec = kvpool_store::PutSpec {
            len: info.len,
            meta: meta.as_ref().map_or(&[], |meta| &meta[..]),
            write_id: info.write_id,
            expires_at_ms: info.ttl_ms.map(|ttl| now.saturating_add(ttl)),
            condition: kvpool_store::Condition::Always,
            only_if_newer: true,
        };
        // No room: the connection has the body on it and is closed.
        let Ok(mut writer) = store.reserve(key, spec, now) else {
            return Ok(());
        };
        let pulled = receive(&mut conn, &mut writer).await;
        if let Err(failure) = pulled {
            peer.observe(&failure, Instant::now() - BODY_STALL);
            return Err(failure);
        }
        conn.release();
        if writer.commit(self.router.now_ms()).is_ok() {
            self.count(key, &info);
        }
        Ok(())
    }

    fn count(&self, key: &[u8], info: &Info) {
        self.router.lengths().wrote(key, info.len, self.router.now_ms());
        metrics::counter!(names::TRANSFER_BLOCKS_TOTAL).increment(1);
        metrics::counter!(names::TRANSFER_BYTES_TOTAL).increment(info.len);
    }
}

/// Reads a body straight into the store's memory, frame by verified frame.
async fn receive(conn: &mut crate::peer::Conn, writer: &mut kvpool_store::BlockWriter) -> Result<(), Failure> {
    while writer.remaining() > 0 {
        let spare = writer.spare();
        let crc = conn.frame_into(spare, Patience::Stall(BODY_STALL)).await?;
        let n = spare.len();
        writer.advance_with_crc(n, crc);
    }
    Ok(())
}

/// Forgets slots that are no longer ours, notes those that the map calls in-sync, and returns those still to be filled.
fn reconcile(routing: &Routing, complete: &mut BTreeSet<u16>) -> Vec<u16> {
    let mine: BTreeSet<u16> = routing.mine.iter().map(|(slot, _)| *slot).collect();
    complete.retain(|slot| mine.contains(slot));
    let mut wanted = Vec::new();
    for (slot, in_sync) in &routing.mine {
        if *in_sync {
            complete.insert(*slot);
        } else if !complete.contains(slot) {
            wanted.push(*slot);
        }
    }
    wanted.sort_unstable();
    wanted
}

/// The next slots with one origin, not necessarily neighbours. Slots that must wait are passed over while others can go on.
fn next_run(routing: &Routing, wanted: &[u16]) -> Option<(Vec<u16>, Origin)> {
    let origins = wanted.iter().map(|slot| origin_of(routing, *slot));
    let ready = origins.into_iter().find(|origin| !matches!(origin, Origin::Later));
    let origin = match ready {
        Some(origin) => origin,
        None if wanted.is_empty() => return None,
        None => Origin::Later,
    };
    let run = wanted
        .iter()
        .copied()
        .filter(|slot| same_origin(&origin, &origin_of(routing, *slot)));
    Some((run.take(RUN_SLOTS).collect(), origin))
}

fn same_origin(a: &Origin, b: &Origin) -> bool {
    match (a, b) {
        (Origin::Peer(a), Origin::Peer(b)) => Arc::ptr_eq(a, b),
        (Origin::Nobody, Origin::Nobody) | (Origin::Later, Origin::Later) => true,
        _ => false,
    }
}

fn origin_of(routing: &Routing, slot: u16) -> Origin {
    let mut origin = Origin::Nobody;
    for copy in routing.list(slot) {
        let Holder::Peer(peer) = &copy.holder else { continue };
        if !copy.in_sync {
            continue;
        }
        if peer.state() != BreakerState::Open {
            return Origin::Peer(Arc::clone(peer));
        }
        origin = Origin::Later;
    }
    origin
}

/// Slots as ranges, with empty lists: a report names slots only.
fn ranges_of(slots: &[u16]) -> Vec<SlotRange> {
    let mut ranges: Vec<SlotRange> = Vec::new();
    for slot in slots {
        let slot = u32::from(*slot);
        match ranges.last_mut() {
            Some(range) if range.last + 1 == slot => range.last = slot,
            _ => ranges.push(SlotRange {
                first: slot,
                last: slot,
                copies: Vec::<SlotCopy>::new(),
            }),
        }
    }
    ranges
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_become_ranges() {
        let ranges = ranges_of(&[1, 2, 3, 7, 9, 10]);
        let bounds: Vec<_> = ranges.iter().map(|range| (range.first, range.last)).collect();
        assert_eq!(bounds, [(1, 3), (7, 7), (9, 10)]);
    }

    #[tokio::test(start_paused = true)]
    async fn the_bucket_spreads_bytes_over_time() {
        let bucket = Bucket {
            free_at: Mutex::new(Instant::now()),
        };
        let started = Instant::now();
        for _ in 0..9 {
            bucket.take(RATE_BYTES / 4).await;
        }
        assert_eq!(started.elapsed().as_secs(), 2);
    }
}
