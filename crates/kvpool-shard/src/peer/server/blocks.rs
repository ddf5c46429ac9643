//! Blocks over a peer connection: GET, EXISTS and PUT, from and into the local store.

use std::io::IoSlice;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use kvpool_state::slot_of;
use kvpool_store::{BlockRef, Lookup, PIECE_BYTES};
use kvpool_wire::peer::{
    DropCode, FRAME_BYTES, FRAME_HEAD_BYTES, FrameHead, Info, MissCode, PUT_END_BYTES, PeerError, PutEnd, Reply,
    Request, RequestHead, Role,
};
use smallvec::SmallVec;
use tokio::time::Instant;

use super::{HEAD_TIME, READER_STALL, Serving};
use crate::metric_definitions as names;
use crate::ops::{DropReason, MissReason, Op, PutOutcome, PutSink, PutSpec};
use crate::peer::wire::{Patience, WireError};
use crate::peer::within;
use crate::router::{condition_from, reason_of, usual_to};

/// Longest pause of an upload: somewhat more than front ends allow their clients.
const UPLOAD_STALL: Duration = Duration::from_secs(35);
/// Frames handed to one `writev`.
const BATCH: usize = 16;
/// A head, and head and content of each frame; of the sizes that `SmallVec` has.
const SLICES: usize = 36;

impl Serving {
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

    pub(super) async fn get(&mut self, key: &[u8], offset: u64, write_id: u64, peek: bool) -> Result<(), WireError> {
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

    pub(super) async fn exists(&mut self, key: &[u8], lease_ms: u32) -> Result<(), WireError> {
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

    pub(super) async fn put(&mut self, op: &Op, head: &RequestHead<'_>, current: bool) -> Result<(), WireError> {
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
