//! Taking a snapshot from a leader, chunk by chunk, into a temporary file.
//!
//! Invariants: one transfer at a time, a newer one replaces it; chunks are appended in order, a repeated chunk
//! is acknowledged again; the total is bounded before anything is written; nothing is installed unverified.

use std::io;
use std::sync::Arc;

use bytes::Bytes;

use super::{Held, SnapshotFile};
use crate::disk::{Disk, DiskFile, offload};
use crate::log::TMP_SUFFIX;
use crate::types::SnapshotMeta;

/// One transfer: the leader's term and its own number for it.
pub(crate) type TransferId = (u64, u64);

struct Incoming<F> {
    id: TransferId,
    tmp: String,
    file: Arc<F>,
    total: u64,
    received: u64,
}

/// See the module.
pub(crate) struct Receiver<D: Disk> {
    disk: D,
    max_bytes: u64,
    incoming: tokio::sync::Mutex<Option<Incoming<D::File>>>,
}

/// What a chunk did.
pub(crate) enum Step<F> {
    /// Bytes are there up to this offset; the sender goes on from it.
    Need(u64),
    /// The transfer is whole and verified, in a synced temporary file of this name.
    Whole {
        meta: SnapshotMeta,
        snapshot: SnapshotFile<F>,
    },
}

impl<D: Disk> Receiver<D> {
    pub(crate) fn new(disk: D, max_bytes: u64) -> Self {
        Receiver {
            disk,
            max_bytes,
            incoming: tokio::sync::Mutex::new(None),
        }
    }

    /// Takes one chunk of a transfer of `total` bytes.
    pub(crate) async fn chunk(
        &self,
        id: TransferId,
        total: u64,
        offset: u64,
        data: Bytes,
    ) -> io::Result<Step<D::File>> {
        if total > self.max_bytes {
            let what = format!("it has {total} bytes, {} are allowed", self.max_bytes);
            return Err(io::Error::new(io::ErrorKind::FileTooLarge, what));
        }
        // Held over the write, so that chunks of one transfer are handled one after the other.
        let mut slot = self.incoming.lock().await;
        if slot.as_ref().is_some_and(|incoming| incoming.id > id) {
            return Err(io::Error::other("a newer transfer is under way"));
        }
        if slot.as_ref().is_none_or(|incoming| incoming.id != id) {
            if offset != 0 {
                return Ok(Step::Need(0));
            }
            *slot = Some(self.begin(id, total).await?);
        }
        let Some(incoming) = slot.as_mut() else {
            return Ok(Step::Need(0));
        };
        let end = offset.saturating_add(data.len() as u64);
        if offset != incoming.received || end > incoming.total || total != incoming.total {
            return Ok(Step::Need(incoming.received));
        }
        let file = incoming.file.clone();
        offload(&self.disk, "raft-snapshot-chunk", move || file.write_at(&data, offset)).await?;
        incoming.received = end;
        if end < incoming.total {
            return Ok(Step::Need(end));
        }
        let Some(done) = slot.take() else {
            return Ok(Step::Need(0));
        };
        let (tmp, file) = (done.tmp, done.file);
        let whole = move || {
            file.sync()?;
            Ok(SnapshotFile::verify(file, &tmp)?)
        };
        let (snapshot, meta) = offload(&self.disk, "raft-snapshot-verify", whole).await?;
        Ok(Step::Whole { meta, snapshot })
    }

    async fn begin(&self, id: TransferId, total: u64) -> io::Result<Incoming<D::File>> {
        // A name per transfer, so that a leftover of an older one is never written to again.
        let tmp = format!("incoming-{}-{}{TMP_SUFFIX}", id.0, id.1);
        let (disk, name) = (self.disk.clone(), tmp.clone());
        let create = move || {
            for old in disk.list()? {
                if old.starts_with("incoming-") && old != name {
                    disk.remove(&old)?;
                }
            }
            disk.create(&name)
        };
        let file = offload(&self.disk, "raft-snapshot-begin", create).await?;
        Ok(Incoming {
            id,
            tmp,
            file: Arc::new(file),
            total,
            received: 0,
        })
    }
}

impl<F> SnapshotFile<F> {
    /// A received snapshot with its header.
    pub(crate) fn held(self, meta: SnapshotMeta) -> Held<F> {
        Held { meta, snapshot: self }
    }
}
