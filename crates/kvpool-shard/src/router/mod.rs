//! Routing: which copy answers, within which time.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use kvpool_store::{BlockRef, Existence, Lookup, Miss, Store};
use kvpool_wire::lm::LmMeta;
use tokio::time::Instant;

use crate::clock::{Clock, WriteIds, to_ms};
use crate::ops::{
    BlockInfo, BlockMeta, Body, ExistsAnswer, Front, GetAnswer, LEASE, MissReason, Op, Path, PutSink, PutSpec, Ttl,
};
use crate::sink::outcome_of;
use crate::usual::Lengths;

/// Routes operations to the copies of their slots. The same with and without a store.
pub struct Router {
    store: Option<Store>,
    clock: Clock,
    ids: WriteIds,
    lengths: Lengths,
}

impl Router {
    /// A router over one store that holds every slot, with no peers and no coordinator.
    #[must_use]
    pub fn standalone(store: Store) -> Arc<Self> {
        Arc::new(Router {
            store: Some(store),
            clock: Clock::new(),
            ids: WriteIds::default(),
            lengths: Lengths::default(),
        })
    }

    pub(crate) fn now_ms(&self) -> u64 {
        self.clock.now_ms()
    }

    pub(crate) fn lengths(&self) -> &Lengths {
        &self.lengths
    }

    /// Begins an operation.
    #[must_use]
    pub fn op(&self, front: Front) -> Op {
        Op { request_id: rand::random(), started: Instant::now(), generation: 0, front }
    }

    /// Reads a block. The first byte comes within the deadline, or it is a miss.
    pub async fn get(&self, _op: &Op, key: &Bytes) -> GetAnswer {
        let now = self.now_ms();
        let usual = self.lengths.usual(key, now);
        let Some(store) = &self.store else {
            return GetAnswer::Miss { reason: MissReason::OwnerDown, usual };
        };
        match store.get(key, now) {
            Lookup::Hit(block) => {
                let info = info_of(&block);
                GetAnswer::Hit { info, usual, body: Body::local(block), path: Path::Local }
            }
            Lookup::Miss(miss) => GetAnswer::Miss { reason: reason_of(miss), usual },
        }
    }

    /// Looks a block up and takes the read lease.
    pub async fn exists(&self, _op: &Op, key: &Bytes) -> ExistsAnswer {
        let now = self.now_ms();
        let usual = self.lengths.usual(key, now);
        let miss = |reason| ExistsAnswer { hit: None, usual, reason: Some(reason) };
        let Some(store) = &self.store else {
            return miss(MissReason::OwnerDown);
        };
        let block = store.peek(key, now);
        match (store.exists(key, now, Some(to_ms(LEASE))), block) {
            (Existence::Present { .. }, Some(block)) => {
                ExistsAnswer { hit: Some(info_of(&block)), usual, reason: None }
            }
            (Existence::Miss(why), _) => miss(reason_of(why)),
            (Existence::Present { .. }, None) => miss(MissReason::Absent),
        }
    }

    /// Opens a write. A refused one is a sink that discards.
    pub async fn put(self: &Arc<Self>, _op: &Op, key: &Bytes, spec: PutSpec) -> PutSink {
        let now = self.now_ms();
        let meta = spec.meta.map(LmMeta::to_bytes);
        let wanted = kvpool_store::PutSpec {
            len: spec.len,
            meta: meta.as_ref().map_or(&[], |meta| &meta[..]),
            write_id: self.ids.next(),
            expires_at_ms: spec.ttl.map(|ttl| now.saturating_add(to_ms(ttl))),
            condition: spec.condition,
            only_if_newer: true,
        };
        let router = Arc::clone(self);
        let Some(store) = &self.store else {
            let outcome = crate::ops::PutOutcome::Dropped(crate::ops::DropReason::OwnerDown);
            return PutSink::discard(router, key.clone(), spec, outcome);
        };
        match store.reserve(key, wanted, now) {
            Ok(writer) => PutSink::local(router, key.clone(), spec, writer),
            Err(refused) => PutSink::discard(router, key.clone(), spec, outcome_of(refused)),
        }
    }

    /// Removes a block; true if it was there.
    pub async fn del(&self, _op: &Op, key: &Bytes) -> bool {
        let now = self.now_ms();
        self.store.as_ref().is_some_and(|store| store.remove(key, Some(self.ids.next()), now))
    }

    /// Time left of a block.
    pub async fn ttl(&self, _op: &Op, key: &Bytes) -> Ttl {
        match self.store.as_ref().and_then(|store| store.ttl(key, self.now_ms())) {
            None => Ttl::NoKey,
            Some(None) => Ttl::NoExpiry,
            Some(Some(ms)) => Ttl::Remaining(Duration::from_millis(ms)),
        }
    }

    /// Sets the time to live of a block; false if it is not there.
    pub async fn expire(&self, _op: &Op, key: &Bytes, ttl: Duration) -> bool {
        let now = self.now_ms();
        let at = now.saturating_add(to_ms(ttl));
        self.store.as_ref().is_some_and(|store| store.expire(key, Some(at), now))
    }

    /// Blocks in the local store.
    #[must_use]
    pub fn key_count(&self) -> u64 {
        self.store.as_ref().map_or(0, |store| store.len() as u64)
    }
}

fn meta_of(bytes: &[u8]) -> BlockMeta {
    bytes.first_chunk().map(LmMeta::from_bytes)
}

fn info_of(block: &BlockRef) -> BlockInfo {
    BlockInfo { len: block.len(), write_id: block.write_id(), meta: meta_of(block.meta()), copies: 1 }
}

fn reason_of(miss: Miss) -> MissReason {
    match miss {
        Miss::Absent | Miss::Expired => MissReason::Absent,
        Miss::Evicted => MissReason::Evicted,
    }
}
