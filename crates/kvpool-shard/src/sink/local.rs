//! A write into the local store, followed by one sender per other copy.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use kvpool_state::slot_of;
use kvpool_store::{BlockWriter, Committed, PIECE_BYTES};
use kvpool_wire::peer::{PutEnd, Role};
use smallvec::SmallVec;
use tokio::sync::watch;
use tokio::time::Instant;
use tracing::{Instrument, debug_span};

use super::{Sending, outcome_of};
use crate::clock::to_ms;
use crate::ops::{Condition, Op, PutOutcome, PutSpec, SECOND_COPY_DEADLINE};
use crate::peer::gaps::Gap;
use crate::peer::send::{Outgoing, Sent, Source, Step, send_block};
use crate::peer::{BreakerState, Peer};
use crate::router::Router;
use crate::routing::Holder;
use crate::ticks::until;

/// A write into the local store, followed by one sender per other copy.
pub(crate) struct LocalPut {
    writer: BlockWriter,
    steps: watch::Sender<Step>,
    copies: SmallVec<[(Arc<Peer>, Sending); 2]>,
    /// Other copies get the write too.
    replicated: bool,
}

impl LocalPut {
    pub(crate) fn new(
        router: &Arc<Router>,
        op: Op,
        key: &Bytes,
        spec: PutSpec,
        writer: BlockWriter,
        replicated: bool,
    ) -> Self {
        let (steps, follow) = watch::channel(Step::default());
        let mut put = LocalPut {
            writer,
            steps,
            copies: SmallVec::new(),
            replicated,
        };
        if !replicated {
            return put;
        }
        let write_id = put.writer.write_id();
        let routing = router.routing();
        for copy in routing.list(slot_of(key)) {
            let Holder::Peer(peer) = &copy.holder else { continue };
            if peer.state() == BreakerState::Open {
                continue;
            }
            let outgoing = Outgoing {
                key: key.clone(),
                role: Role::Replica,
                len: spec.len,
                meta: spec.meta,
                write_id,
                asked: router.asked(&op, op.started),
            };
            let source = Source::Tail(put.writer.tail());
            let sending = send_block(Arc::clone(peer), outgoing, source, follow.clone());
            let span = debug_span!("replicate", request_id = op.request_id, peer = %peer.id);
            put.copies
                .push((Arc::clone(peer), tokio::spawn(sending.instrument(span))));
        }
        put
    }

    pub(super) fn spare(&mut self) -> &mut [u8] {
        self.writer.spare()
    }

    pub(super) fn remaining(&self) -> u64 {
        self.writer.remaining()
    }

    /// The next `n` bytes are there; `crc` is theirs when it was verified already.
    pub(super) fn advance(&mut self, n: usize, crc: Option<u32>) {
        match crc {
            Some(crc) => self.writer.advance_with_crc(n, crc),
            None => self.writer.advance(n),
        }
        self.progress();
    }

    /// Tells the senders of pieces that became complete.
    fn progress(&self) {
        if self.copies.is_empty() {
            return;
        }
        let filled = self.writer.filled();
        let complete = if self.writer.remaining() == 0 {
            filled.div_ceil(PIECE_BYTES as u64)
        } else {
            filled / PIECE_BYTES as u64
        };
        self.steps.send_if_modified(|step| {
            let more = complete as usize > step.pieces;
            step.pieces = complete as usize;
            more
        });
    }

    pub(super) async fn settle(
        self,
        router: &Arc<Router>,
        key: &Bytes,
        ttl: Option<Duration>,
        condition: Condition,
    ) -> (PutOutcome, u8) {
        let LocalPut {
            mut writer,
            steps,
            copies,
            replicated,
        } = self;
        let (len, write_id, now) = (writer.len(), writer.write_id(), router.now_ms());
        let ttl_ms = ttl.map(to_ms);
        writer.set_terms(ttl_ms.map(|ttl| now.saturating_add(ttl)), condition);
        match writer.commit(now) {
            Ok(Committed::Stored { .. } | Committed::Superseded) => {}
            // The senders see the end of `steps`: nobody keeps what the primary refused.
            Err(refused) => return (outcome_of(refused), 0),
        }
        router.lengths().wrote(key, len, now);
        if !replicated {
            return (PutOutcome::Stored1, 1);
        }
        // The condition was decided here; the copies follow.
        let end = PutEnd {
            commit: true,
            condition: kvpool_wire::peer::Condition::Always,
            ttl_ms,
        };
        steps.send_modify(|step| step.end = Some(end));
        // Whoever is in the list now holds the write only once it has said so; a copy that joined meanwhile is told later.
        let gap = Gap {
            write_id,
            removal: false,
        };
        for copy in router.routing().list(slot_of(key)) {
            if let Holder::Peer(peer) = &copy.holder {
                peer.gaps.add(key, gap);
            }
        }
        let copies = second_copies(key, write_id, copies).await;
        if copies == 0 {
            return (PutOutcome::Stored1, 1);
        }
        (PutOutcome::Stored2, 1 + copies)
    }
}

/// Waits until one other copy holds the write, or time is up; the others go on by themselves. Returns how many hold it.
async fn second_copies(key: &Bytes, write_id: u64, copies: SmallVec<[(Arc<Peer>, Sending); 2]>) -> u8 {
    use futures::StreamExt;
    use futures::stream::FuturesUnordered;

    let mut waiting: FuturesUnordered<_> = copies
        .into_iter()
        .map(|(peer, sending)| {
            let key = key.clone();
            async move {
                let stored = matches!(sending.await, Ok(Ok(Sent::Stored { .. })));
                if stored {
                    peer.gaps.close(&key, write_id);
                }
                stored
            }
        })
        .collect();
    let first = async {
        while let Some(stored) = waiting.next().await {
            if stored {
                return 1;
            }
        }
        0
    };
    let copies = until(Instant::now() + SECOND_COPY_DEADLINE, first).await.unwrap_or(0);
    if !waiting.is_empty() {
        // Bounded by the senders' own deadlines.
        tokio::spawn(async move { while waiting.next().await.is_some() {} });
    }
    copies
}
