//! The work behind routing: adopting maps, fetching newer ones from peers, closing gaps, leases at other copies.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use kvpool_state::records::SlotMap;
use kvpool_state::slot_of;
use kvpool_wire::peer::request::MAX_LEASE_KEYS;
use kvpool_wire::peer::{Reply, Request, Role};
use prost::Message;
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, warn};

use super::{Router, meta_of};
use crate::clock::to_ms;
use crate::identity::is_newer;
use crate::metric_definitions as names;
use crate::ops::{BODY_STALL, LEASE, OP_DEADLINE};
use crate::peer::gaps::Gap;
use crate::peer::send::{Outgoing, Sent, Source, Step, send_block};
use crate::peer::wire::Patience;
use crate::peer::{Asked, BreakerState, Failure, Peer, within};
use crate::routing::{Holder, Routing};

/// How often gaps are looked at.
const CATCH_UP_EVERY: Duration = Duration::from_millis(500);
/// Gaps closed per peer and look.
const CATCH_UP_BATCH: usize = 32;
/// Longest time for fetching a map.
const MAP_FETCH: Duration = Duration::from_secs(2);

/// Background work of a router. Run it with [`Upkeep::run`].
pub(crate) struct Upkeep {
    router: Arc<Router>,
    behind: mpsc::Receiver<Arc<Peer>>,
    leases: mpsc::Receiver<Bytes>,
}

impl Router {
    /// Takes a slot map if it is newer than the one in force. True if it was taken.
    pub(crate) fn adopt(&self, map: &Arc<SlotMap>) -> bool {
        let _turn = self.adopting.lock();
        let before = self.routing.load_full();
        let cluster = self.identity.cluster_id();
        if map.pool != self.pool || (!cluster.is_empty() && *cluster != *map.cluster_id) {
            warn!(
                pool = map.pool,
                cluster = map.cluster_id,
                "ignored the slot map of another pool or cluster"
            );
            return false;
        }
        let theirs = (map.cluster_generation, map.epoch);
        if theirs <= (before.map.cluster_generation, before.map.epoch) {
            return false;
        }
        self.put_in_force(map, &before)
    }

    /// Compiles the map in force again, after this process has got another incarnation.
    fn readopt(&self) {
        let _turn = self.adopting.lock();
        let before = self.routing.load_full();
        if before.map.epoch > 0 {
            self.put_in_force(&Arc::clone(&before.map), &before);
        }
    }

    /// This process is no longer the incarnation it was: it holds nothing and serves nothing.
    pub(crate) fn leave(&self) {
        self.set_serving(false);
        self.identity.set_incarnation(0);
        self.readopt();
        if let Some(store) = &self.store {
            let dropped = store.clear();
            info!(dropped, "cleared the store for a new registration");
        }
    }

    /// This process has been given an incarnation.
    pub(crate) fn enlist(&self, incarnation: u64) {
        info!(incarnation, "registered");
        self.identity.set_incarnation(incarnation);
        self.readopt();
    }

    fn put_in_force(&self, map: &Arc<SlotMap>, before: &Routing) -> bool {
        let routing = match Routing::compile(Arc::clone(map), before, &self.identity) {
            Ok(routing) => Arc::new(routing),
            Err(error) => {
                warn!(epoch = map.epoch, error, "ignored a slot map that makes no sense");
                return false;
            }
        };
        self.identity.set_cluster_id(&map.cluster_id);
        self.identity.set_known(routing.known());
        self.routing.store(Arc::clone(&routing));
        metrics::gauge!(names::EPOCH).set(map.epoch as f64);
        metrics::gauge!(names::GENERATION).set(map.generation as f64);
        info!(
            epoch = map.epoch,
            generation = map.generation,
            slots = routing.mine.len(),
            "slot map in force"
        );
        if let Some(store) = &self.store {
            let renewed =
                (before.map.cluster_generation, before.map.generation) != (map.cluster_generation, map.generation);
            if before.map.epoch > 0 && renewed {
                // What an older generation stored is never served again (R4).
                let dropped = store.clear();
                info!(
                    dropped,
                    generation = map.generation,
                    "dropped the blocks of an older generation"
                );
            }
            for (slot, _) in &before.mine {
                if routing.my_copy(*slot).is_none() {
                    store.remove_slot(*slot);
                }
            }
            // A slot may have gone and come back in an epoch that this process never saw.
            let missed_a_drop = routing.dropped_at > before.map.epoch;
            for (slot, in_sync) in &routing.mine {
                // A copy begins empty. What was stored before this process knew of its place will be pulled.
                if !in_sync && (missed_a_drop || before.my_copy(*slot).is_none()) {
                    store.remove_slot(*slot);
                }
            }
        }
        self.changes.send_replace(theirs_of(map));
        true
    }

    /// Tells of every map that comes into force.
    pub(crate) fn changes(&self) -> watch::Receiver<(u64, u64)> {
        self.changes.subscribe()
    }

    /// Fetches a peer's map and takes it if it is newer.
    pub(crate) async fn fetch_map(&self, peer: &Arc<Peer>) -> Result<bool, Failure> {
        let asked = Asked {
            request_id: rand::random(),
            known: self.known(),
            deadline: within(MAP_FETCH),
        };
        let mut conn = peer.call(asked, Request::MapFetch).await?;
        let Reply::Map { len } = conn.last_reply()? else {
            return Err(Failure::OutOfTurn);
        };
        let mut bytes = Vec::with_capacity(len as usize);
        while (bytes.len() as u64) < u64::from(len) {
            let left = u64::from(len) - bytes.len() as u64;
            bytes.extend_from_slice(&conn.frame(&self.staging, left, Patience::Until(asked.deadline)).await?);
        }
        conn.release();
        if len == 0 {
            return Ok(false);
        }
        match SlotMap::decode(&*bytes) {
            Ok(map) => Ok(self.adopt(&Arc::new(map))),
            Err(_) => Err(Failure::OutOfTurn),
        }
    }
}

fn theirs_of(map: &SlotMap) -> (u64, u64) {
    (map.cluster_generation, map.epoch)
}

impl Upkeep {
    pub(super) fn new(router: Arc<Router>, behind: mpsc::Receiver<Arc<Peer>>, leases: mpsc::Receiver<Bytes>) -> Self {
        Upkeep { router, behind, leases }
    }

    /// Runs until `shutdown`.
    pub(crate) async fn run(self, shutdown: CancellationToken) {
        let Upkeep {
            router,
            mut behind,
            mut leases,
        } = self;
        let fetching = async {
            while let Some(peer) = behind.recv().await {
                match router.fetch_map(&peer).await {
                    Ok(newer) => debug!(peer = peer.id, newer, "fetched a slot map"),
                    Err(failure) => debug!(peer = peer.id, %failure, "failed to fetch a slot map"),
                }
                // One reply in many says the same: what was queued meanwhile is old news.
                while behind.try_recv().is_ok() {}
            }
        };
        let leasing = async {
            let mut keys = Vec::with_capacity(MAX_LEASE_KEYS);
            while leases.recv_many(&mut keys, MAX_LEASE_KEYS).await > 0 {
                router.lease_at_others(&keys).await;
                keys.clear();
            }
        };
        let catching_up = async {
            loop {
                tokio::time::sleep(CATCH_UP_EVERY).await;
                let peers: Vec<Arc<Peer>> = router.routing().peers.values().cloned().collect();
                for peer in peers {
                    router.catch_up(&peer).await;
                }
            }
        };
        tokio::select! {
            () = shutdown.cancelled() => {}
            () = fetching => {}
            () = leasing => {}
            () = catching_up => {}
        }
    }
}

impl Router {
    /// Takes leases on `keys` at the other copies of their slots. Best effort.
    async fn lease_at_others(&self, keys: &[Bytes]) {
        let mut by_peer: Vec<(Arc<Peer>, Vec<&[u8]>)> = Vec::new();
        for key in keys {
            let routing = self.routing();
            for copy in routing.list(slot_of(key)) {
                let Holder::Peer(peer) = &copy.holder else { continue };
                match by_peer.iter_mut().find(|(known, _)| Arc::ptr_eq(known, peer)) {
                    Some((_, keys)) => keys.push(key),
                    None => by_peer.push((Arc::clone(peer), vec![key])),
                }
            }
        }
        let asking = by_peer
            .into_iter()
            .filter(|(peer, _)| peer.state() != BreakerState::Open)
            .map(|(peer, keys)| {
                let asked = Asked {
                    request_id: 0,
                    known: self.known(),
                    deadline: within(OP_DEADLINE),
                };
                let lease_ms = u32::try_from(to_ms(LEASE)).unwrap_or(u32::MAX);
                async move {
                    if let Ok(conn) = peer.call(asked, Request::Lease { keys, lease_ms }).await {
                        conn.release();
                    }
                }
            });
        futures::future::join_all(asking).await;
    }

    /// Brings a peer that answers again some of the writes it missed.
    async fn catch_up(self: &Arc<Self>, peer: &Arc<Peer>) {
        metrics::gauge!(names::PEER_GAPS, "peer" => peer.id.clone()).set(peer.gaps.len() as f64);
        if peer.state() != BreakerState::Closed {
            return;
        }
        for (key, gap) in peer.gaps.some(CATCH_UP_BATCH) {
            let closed = if gap.removal {
                self.bring_removal(peer, &key, gap).await
            } else {
                self.bring_block(peer, &key, gap).await
            };
            if !closed {
                return;
            }
        }
    }

    async fn bring_removal(&self, peer: &Arc<Peer>, key: &Bytes, gap: Gap) -> bool {
        let asked = Asked {
            request_id: 0,
            known: self.known(),
            deadline: within(OP_DEADLINE),
        };
        let request = Request::Del {
            key,
            role: Role::Replica,
            write_id: gap.write_id,
        };
        match peer.call(asked, request).await {
            Ok(conn) => {
                conn.release();
                peer.gaps.close(key, gap.write_id);
                true
            }
            Err(_) => false,
        }
    }

    /// True when the gap is closed, or has nothing in it any more.
    async fn bring_block(self: &Arc<Self>, peer: &Arc<Peer>, key: &Bytes, gap: Gap) -> bool {
        let listed = self.routing().list(slot_of(key)).iter().any(|copy| match &copy.holder {
            Holder::Peer(there) => Arc::ptr_eq(there, peer),
            Holder::Me => false,
        });
        let block = self.peek(key).filter(|_| listed);
        let Some(block) = block else {
            peer.gaps.close(key, gap.write_id);
            return true;
        };
        let write_id = block.write_id();
        match self.push_block(peer, key, block).await {
            Ok(Sent::Stored { .. }) => {
                peer.gaps.close(key, write_id.max(gap.write_id));
                true
            }
            // It has no room, or is not in the list by its own map: its turn comes again.
            Ok(_) | Err(_) => false,
        }
    }

    /// Sends a block of the local store to a copy.
    async fn push_block(
        self: &Arc<Self>,
        peer: &Arc<Peer>,
        key: &Bytes,
        block: kvpool_store::BlockRef,
    ) -> Result<Sent, Failure> {
        let now = self.now_ms();
        let ttl_ms = block.expires_at_ms().map(|at| at.saturating_sub(now));
        let condition = kvpool_wire::peer::Condition::Always;
        let end = kvpool_wire::peer::PutEnd {
            commit: true,
            condition,
            ttl_ms,
        };
        let step = Step {
            pieces: block.piece_count(),
            end: Some(end),
        };
        let (_steps, follow) = watch::channel(step);
        let outgoing = Outgoing {
            key: key.clone(),
            role: Role::Replica,
            len: block.len(),
            meta: meta_of(block.meta()),
            write_id: block.write_id(),
            asked: Asked {
                request_id: rand::random(),
                known: self.known(),
                deadline: Instant::now() + BODY_STALL,
            },
        };
        send_block(Arc::clone(peer), outgoing, Source::Stored(block), follow).await
    }

    /// A peer spoke of heights above ours; when it is in the map, its map is fetched.
    pub(crate) fn heard_from(&self, sender: &str, theirs: kvpool_wire::peer::Known) {
        let routing = self.routing();
        if is_newer(theirs, routing.known())
            && let Some(peer) = routing.peers.values().find(|peer| peer.id == sender)
        {
            self.identity.heard(theirs, peer);
        }
    }
}
