//! Routing: which copy answers, within which time. One piece of code with a store (shard) and without (proxy).
//!
//! - `lookup`: GET and EXISTS; the primary, then with a head start of 150 ms for it the other copies.
//! - `write`: PUT; local with replication, or forwarded.
//! - `small`: DEL, TTL, EXPIRE.
//! - `upkeep`: adopting maps, fetching newer ones, closing gaps, leases at other copies.

mod lookup;
mod small;
mod upkeep;
mod write;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use arc_swap::{ArcSwap, Guard};
use bytes::Bytes;
use kvpool_state::slot_of;
use kvpool_store::{BlockRef, Store};
use kvpool_wire::lm::LmMeta;
use kvpool_wire::peer::Known;
use parking_lot::Mutex;
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;

use crate::clock::{Clock, WriteIds};
use crate::identity::Identity;
use crate::ops::{BlockInfo, BlockMeta, Front, Op, Usual};
use crate::routing::{HeldCopy, Holder, Routing};
use crate::staging::Staging;
use crate::usual::Lengths;
use kvpool_wire::peer as wire;

pub(crate) use lookup::reason_of;
pub(crate) use upkeep::Upkeep;
pub(crate) use write::{condition_from, condition_to};

/// Peers waiting to be asked for their newer map.
const BEHIND_QUEUE: usize = 4;
/// Leases waiting to be taken at other copies.
const LEASE_QUEUE: usize = 1024;

/// Routes operations to the copies of their slots. The same with and without a store.
pub struct Router {
    identity: Arc<Identity>,
    pool: String,
    store: Option<Store>,
    clock: Clock,
    ids: WriteIds,
    lengths: Lengths,
    staging: Arc<Staging>,
    routing: ArcSwap<Routing>,
    /// Serializes the adoption of maps.
    adopting: Mutex<()>,
    /// False: this shard answers misses, and peers are told to go elsewhere.
    serving: AtomicBool,
    leases: mpsc::Sender<Bytes>,
    /// Cluster generation and epoch of the map in force.
    changes: watch::Sender<(u64, u64)>,
}

impl Router {
    /// A router without a map: everything is a miss until [`Self::adopt`]. The second part does the work behind it.
    pub(crate) fn new(id: String, pool: String, join_token: String, store: Option<Store>) -> (Arc<Self>, Upkeep) {
        let (behind, wanted) = mpsc::channel(BEHIND_QUEUE);
        let (leases, leased) = mpsc::channel(LEASE_QUEUE);
        let router = Arc::new(Router {
            identity: Identity::new(id, join_token, behind),
            pool,
            store,
            clock: Clock::new(),
            ids: WriteIds::default(),
            lengths: Lengths::default(),
            staging: Staging::new(),
            routing: ArcSwap::from_pointee(Routing::empty()),
            adopting: Mutex::new(()),
            serving: AtomicBool::new(true),
            leases,
            changes: watch::Sender::new((0, 0)),
        });
        let upkeep = Upkeep::new(Arc::clone(&router), wanted, leased);
        (router, upkeep)
    }

    /// A router over one store that holds every slot, with no peers and no coordinator.
    #[must_use]
    pub fn standalone(store: Store) -> Arc<Self> {
        let (router, _) = Router::new("alone".into(), String::new(), String::new(), Some(store));
        router.routing.store(Arc::new(Routing::alone()));
        router
    }

    pub(crate) fn now_ms(&self) -> u64 {
        self.clock.now_ms()
    }

    pub(crate) fn lengths(&self) -> &Lengths {
        &self.lengths
    }

    pub(crate) fn staging(&self) -> &Arc<Staging> {
        &self.staging
    }

    pub(crate) fn identity(&self) -> &Arc<Identity> {
        &self.identity
    }

    pub(crate) fn store(&self) -> Option<&Store> {
        self.store.as_ref()
    }

    pub(crate) fn ids(&self) -> &WriteIds {
        &self.ids
    }

    pub(crate) fn routing(&self) -> Guard<Arc<Routing>> {
        self.routing.load()
    }

    /// The map in force, to be kept across waits.
    pub(crate) fn routing_now(&self) -> Arc<Routing> {
        self.routing.load_full()
    }

    pub(crate) fn known(&self) -> Known {
        self.routing().known()
    }

    /// Whether this process may answer from its store.
    pub(crate) fn is_serving(&self) -> bool {
        self.serving.load(Ordering::Relaxed)
    }

    /// Switches answers from the store on or off (registered and in contact, or not).
    pub(crate) fn set_serving(&self, serving: bool) {
        self.serving.store(serving, Ordering::Relaxed);
    }

    /// Begins an operation.
    #[must_use]
    pub fn op(&self, front: Front) -> Op {
        Op {
            request_id: rand::random(),
            started: Instant::now(),
            generation: self.routing().map.generation,
            front,
        }
    }

    /// A block of the local store, not counted as use.
    pub(crate) fn peek(&self, key: &[u8]) -> Option<BlockRef> {
        self.store.as_ref()?.peek(key, self.now_ms())
    }

    /// What is known of a block in the local store.
    pub(crate) fn info_of(&self, block: &BlockRef) -> BlockInfo {
        let routing = self.routing();
        let others = routing
            .list(slot_of(block.key()))
            .iter()
            .filter(|copy| confirms(copy, block.key()));
        BlockInfo {
            len: block.len(),
            write_id: block.write_id(),
            meta: meta_of(block.meta()),
            copies: u8::try_from(1 + others.count()).unwrap_or(u8::MAX),
        }
    }

    /// Blocks in the local store.
    #[must_use]
    pub fn key_count(&self) -> u64 {
        self.store.as_ref().map_or(0, |store| store.len() as u64)
    }
}

/// Another in-sync copy without a gap at the key holds the block, as far as anybody knows.
fn confirms(copy: &HeldCopy, key: &[u8]) -> bool {
    match &copy.holder {
        Holder::Peer(peer) => copy.in_sync && peer.gaps.is_confirmed(key),
        Holder::Me => false,
    }
}

pub(crate) fn meta_of(bytes: &[u8]) -> BlockMeta {
    bytes.first_chunk().map(LmMeta::from_bytes)
}

/// A peer's word for a usual length, in the store's terms.
pub(crate) fn usual_from(usual: wire::Usual) -> Usual {
    match usual {
        wire::Usual::Unknown => Usual::Unknown,
        wire::Usual::Size(len) => Usual::Size(len),
        wire::Usual::Mixed => Usual::Mixed,
    }
}

/// And the other way round.
pub(crate) fn usual_to(usual: Usual) -> wire::Usual {
    match usual {
        Usual::Unknown => wire::Usual::Unknown,
        Usual::Size(len) => wire::Usual::Size(len),
        Usual::Mixed => wire::Usual::Mixed,
    }
}
