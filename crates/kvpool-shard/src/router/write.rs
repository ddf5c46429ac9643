//! PUT: the writes of a slot go through its primary, which gives them their order and brings them to the other copies.

use std::sync::Arc;

use bytes::Bytes;
use kvpool_state::slot_of;
use kvpool_wire::lm::LmMeta;

use super::Router;
use crate::clock::to_ms;
use crate::ops::{Condition, DropReason, Op, PutOutcome, PutSink, PutSpec};
use crate::peer::BreakerState;
use crate::routing::{HeldCopy, Holder};
use crate::sink::{LocalPut, outcome_of};

impl Router {
    /// Opens a write. A refused one is a sink that discards.
    pub async fn put(self: &Arc<Self>, op: &Op, key: &Bytes, spec: PutSpec) -> PutSink {
        if op.generation != self.routing().map.generation {
            return self.refuse(key, spec, DropReason::Generation);
        }
        // In the list's order; a copy that cannot be reached passes its turn to the next.
        let mut targets = self.write_targets(key);
        match targets.first() {
            None => self.refuse(key, spec, DropReason::OwnerDown),
            Some(Holder::Me) => self.accept_put(op, key, spec),
            Some(Holder::Peer(_)) => {
                let first = targets.remove(0);
                PutSink::forward(Arc::clone(self), *op, key.clone(), spec, first, targets)
            }
        }
    }

    fn refuse(self: &Arc<Self>, key: &Bytes, spec: PutSpec, reason: DropReason) -> PutSink {
        PutSink::discard(Arc::clone(self), key.clone(), spec, PutOutcome::Dropped(reason))
    }

    /// Who may take a write, best first: in-sync copies before filling ones.
    pub(crate) fn write_targets(&self, key: &[u8]) -> Vec<Holder> {
        let routing = self.routing();
        let usable = |copy: &&HeldCopy| match &copy.holder {
            Holder::Me => self.is_serving() && self.store().is_some(),
            Holder::Peer(peer) => peer.state() != BreakerState::Open,
        };
        let mut copies: Vec<&HeldCopy> = routing.list(slot_of(key)).iter().filter(usable).collect();
        copies.sort_by_key(|copy| !copy.in_sync);
        copies.into_iter().map(|copy| copy.holder.clone()).collect()
    }

    /// Takes a write here and brings it to the other copies: the part of the primary, or of another copy in its place.
    pub(crate) fn accept_put(self: &Arc<Self>, op: &Op, key: &Bytes, spec: PutSpec) -> PutSink {
        match self.open_local(key, &spec, self.ids().next()) {
            Ok(writer) => {
                let put = LocalPut::new(self, *op, key, spec, writer, true);
                PutSink::local(Arc::clone(self), key.clone(), spec, put)
            }
            Err(outcome) => PutSink::discard(Arc::clone(self), key.clone(), spec, outcome),
        }
    }

    /// Takes a write under the id that its primary gave it, and tells nobody.
    pub(crate) fn accept_copy(self: &Arc<Self>, op: &Op, key: &Bytes, spec: PutSpec, write_id: u64) -> PutSink {
        self.ids().saw(write_id);
        match self.open_local(key, &spec, write_id) {
            Ok(writer) => {
                let put = LocalPut::new(self, *op, key, spec, writer, false);
                PutSink::local(Arc::clone(self), key.clone(), spec, put)
            }
            Err(outcome) => PutSink::discard(Arc::clone(self), key.clone(), spec, outcome),
        }
    }

    fn open_local(&self, key: &[u8], spec: &PutSpec, write_id: u64) -> Result<kvpool_store::BlockWriter, PutOutcome> {
        let now = self.now_ms();
        let store = self.store().ok_or(PutOutcome::Dropped(DropReason::NotOwner))?;
        let meta = spec.meta.map(LmMeta::to_bytes);
        let wanted = kvpool_store::PutSpec {
            len: spec.len,
            meta: meta.as_ref().map_or(&[], |meta| &meta[..]),
            write_id,
            expires_at_ms: spec.ttl.map(|ttl| now.saturating_add(to_ms(ttl))),
            condition: spec.condition,
            // Writes that finish out of order, and copies that get them in another one, end the same everywhere.
            only_if_newer: true,
        };
        store.reserve(key, wanted, now).map_err(outcome_of)
    }
}

pub(crate) fn condition_to(condition: Condition) -> kvpool_wire::peer::Condition {
    match condition {
        Condition::Always => kvpool_wire::peer::Condition::Always,
        Condition::IfAbsent => kvpool_wire::peer::Condition::IfAbsent,
        Condition::IfPresent => kvpool_wire::peer::Condition::IfPresent,
    }
}

pub(crate) fn condition_from(condition: kvpool_wire::peer::Condition) -> Condition {
    match condition {
        kvpool_wire::peer::Condition::Always => Condition::Always,
        kvpool_wire::peer::Condition::IfAbsent => Condition::IfAbsent,
        kvpool_wire::peer::Condition::IfPresent => Condition::IfPresent,
    }
}
