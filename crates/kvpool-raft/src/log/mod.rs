//! The durable log, and with it the vote.
//!
//! ```text
//! append ─▶ Index (readable at once) ─▶ queue ─▶ Writer: batch ─ write ─ one sync ─▶ callbacks
//! read   ◀─ Index (cache), or the segment file by place
//! ```
//!
//! Invariants: a gap is refused; an entry is reported durable only after the sync that covers it; a vote is
//! durable before it is known to anyone; after a failed write nothing is written until the process restarts.

mod format;
mod index;
mod segment;
mod store;
#[cfg(test)]
mod tests;
mod vote;
mod writer;

use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard};

use bytes::Bytes;
use futures::SinkExt;
use futures::channel::{mpsc, oneshot};

pub(crate) use segment::{Replayed, TMP_SUFFIX, scan};
pub(crate) use store::LogStore;

use crate::codec;
use crate::config::MAX_COMMAND_BYTES;
use crate::disk::{Disk, DiskFile, offload, read_exact_at};
use crate::error::{Damage, LogError};
use crate::marker::Marker;
use crate::types::{LogEntry, LogId, Vote};
use format::{Record, SegmentHeader};
use index::{Index, Lookup, Place};
use writer::{MAX_QUEUED, Op, Writer};

/// Sizes of the log, in bytes. The defaults are for production; tests and the simulator use smaller ones.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LogOptions {
    /// Bytes of a segment file, preallocated.
    pub segment_bytes: u64,
    /// Bytes of records written with one sync.
    pub batch_bytes: usize,
    /// Bytes of entries kept in memory for replication and apply.
    pub cache_bytes: usize,
}

impl Default for LogOptions {
    fn default() -> Self {
        LogOptions {
            segment_bytes: 8 << 20,
            batch_bytes: 2 << 20,
            cache_bytes: 16 << 20,
        }
    }
}

impl LogOptions {
    pub(crate) fn check(&self) -> Result<(), &'static str> {
        if self.batch_bytes == 0 || self.segment_bytes < 4096 {
            return Err("batches must not be empty and segments have at least 4096 bytes");
        }
        if self.segment_bytes + (self.batch_bytes + 2 * MAX_COMMAND_BYTES) as u64 > segment::MAX_SEGMENT_BYTES {
            return Err("segments and batches are too large");
        }
        Ok(())
    }
}

/// Called once, with the outcome of the sync that covers an append.
pub(crate) type Done = Box<dyn FnOnce(io::Result<()>) + Send>;

/// What the writer, the readers and the store share.
pub(crate) struct Shared<F> {
    inner: Mutex<Inner<F>>,
}

pub(crate) struct Inner<F> {
    pub index: Index,
    /// The segments that exist, by number.
    pub files: BTreeMap<u64, Arc<F>>,
}

impl<F> Shared<F> {
    pub(crate) fn lock(&self) -> MutexGuard<'_, Inner<F>> {
        // A panic under this lock leaves no half-made change that matters more than going on to stop cleanly.
        self.inner.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// Fails once a write has failed.
    pub(crate) fn check(&self) -> io::Result<()> {
        match &self.lock().index.failed {
            None => Ok(()),
            Some(what) => Err(io::Error::other(what.clone())),
        }
    }
}

/// The log of one member; openraft drives it through [`LogStore`].
pub(crate) struct Log<D: Disk> {
    disk: D,
    shared: Arc<Shared<D::File>>,
    queue: mpsc::Sender<Op>,
}

impl<D: Disk> Clone for Log<D> {
    fn clone(&self) -> Self {
        Log {
            disk: self.disk.clone(),
            shared: self.shared.clone(),
            queue: self.queue.clone(),
        }
    }
}

impl<D: Disk> Log<D> {
    /// Opens the log of `marker`'s member, creating it in an empty directory, and starts its writer.
    ///
    /// # Errors
    /// When the directory is another member's, when files are damaged or missing, or when the disk fails.
    pub(crate) fn open(disk: &D, marker: &Marker, options: &LogOptions) -> Result<Self, LogError> {
        match Marker::read(disk)? {
            Some(found) => found.check(marker)?,
            None => create(disk, marker, options)?,
        }
        remove_leftovers(disk)?;
        let (vote_file, vote) = vote::VoteFile::open(disk)?;
        let mut log = segment::replay(disk, options)?;
        log.index.vote = vote;
        let files = log.segments.iter().map(|s| (s.number, s.file.clone())).collect();
        let index = std::mem::take(&mut log.index);
        let (previous, purged, committed) = (index.last, index.purged, index.committed);
        let marks = SegmentHeader {
            previous,
            purged,
            committed,
            ..SegmentHeader::default()
        };
        let shared = Arc::new(Shared {
            inner: Mutex::new(Inner { index, files }),
        });
        let writer = Writer::new(disk.clone(), options.clone(), shared.clone(), log, marks, vote_file);
        let (queue, ops) = mpsc::channel(MAX_QUEUED);
        disk.spawn("raft-log", Box::pin(writer.run(ops)));
        Ok(Log {
            disk: disk.clone(),
            shared,
            queue,
        })
    }

    async fn submit(&self, op: Op) -> io::Result<()> {
        self.shared.check()?;
        let mut queue = self.queue.clone();
        queue.send(op).await.map_err(|_| io::Error::other("the log is closed"))
    }

    async fn submit_and_wait(&self, op: Op, wait: oneshot::Receiver<io::Result<()>>) -> io::Result<()> {
        self.submit(op).await?;
        wait.await
            .unwrap_or_else(|_| Err(io::Error::other("the log is closed")))
    }

    /// Makes entries readable at once and durable before `done` is called.
    pub(crate) async fn append(&self, entries: Vec<LogEntry>, done: Done) -> io::Result<()> {
        let mut ticketed = Vec::with_capacity(entries.len());
        {
            let mut shared = self.shared.lock();
            for entry in entries {
                let ticket = shared
                    .index
                    .append(entry.clone())
                    .map_err(|e| io::Error::new(io::ErrorKind::InvalidInput, format!("failed to append: {e}")))?;
                ticketed.push((entry, ticket));
            }
        }
        self.submit(Op::Append {
            entries: ticketed,
            done,
        })
        .await
    }

    pub(crate) async fn truncate_after(&self, after: Option<LogId>) -> io::Result<()> {
        if after.is_some_and(|id| id.index >= self.shared.lock().index.next()) {
            return Ok(());
        }
        self.shared
            .lock()
            .index
            .truncate(after)
            .map_err(|e| io::Error::new(io::ErrorKind::InvalidInput, format!("failed to truncate: {e}")))?;
        let (done, wait) = oneshot::channel();
        self.submit_and_wait(Op::Truncate { after, done }, wait).await
    }

    pub(crate) async fn purge(&self, upto: LogId) -> io::Result<()> {
        self.shared.lock().index.purge(upto);
        let (done, wait) = oneshot::channel();
        self.submit_and_wait(Op::Purge { upto, done }, wait).await
    }

    pub(crate) async fn save_vote(&self, vote: Vote) -> io::Result<()> {
        let (done, wait) = oneshot::channel();
        self.submit_and_wait(Op::Vote { vote, done }, wait).await
    }

    /// Rides along with the next batch: losing it only makes a restart apply a little later.
    pub(crate) async fn save_committed(&self, id: LogId) -> io::Result<()> {
        {
            let mut shared = self.shared.lock();
            shared.index.committed = shared.index.committed.max(Some(id));
        }
        self.submit(Op::Committed(id)).await
    }

    /// Writes what is queued and ends the writer. Fails when any write ever failed.
    pub(crate) async fn close(&self) -> io::Result<()> {
        let (done, wait) = oneshot::channel();
        self.submit_and_wait(Op::Close { done }, wait).await
    }

    /// True when no entry was ever appended at `index` or behind it.
    fn ends_before(&self, index: u64) -> bool {
        self.shared.lock().index.next() <= index
    }

    /// The last entry's id, or that of the last purged one.
    pub(crate) fn last(&self) -> Option<LogId> {
        self.shared.lock().index.last
    }

    /// The entries of `from..until` that exist, in order, stopping once their payloads pass `bytes`.
    pub(crate) async fn read(&self, from: u64, until: u64, bytes: usize) -> io::Result<Vec<LogEntry>> {
        let (found, files) = {
            let shared = self.shared.lock();
            let found = shared.index.lookup(from, until, bytes);
            let cached = found.iter().all(|lookup| matches!(lookup, Lookup::Cached(_)));
            (found, (!cached).then(|| shared.files.clone()))
        };
        let Some(files) = files else {
            return found
                .into_iter()
                .map(|lookup| load::<D::File>(lookup, &BTreeMap::new()))
                .collect();
        };
        let work = move || found.into_iter().map(|lookup| load(lookup, &files)).collect();
        offload(&self.disk, "raft-log-read", work).await
    }
}

pub(crate) fn load<F: DiskFile>(lookup: Lookup, files: &BTreeMap<u64, Arc<F>>) -> io::Result<LogEntry> {
    match lookup {
        Lookup::Cached(entry) => Ok(entry),
        Lookup::OnDisk(id, place) => {
            let file = files.get(&place.segment).ok_or(io::ErrorKind::NotFound)?;
            read_record(&**file, id, place)
        }
    }
}

fn read_record<F: DiskFile>(file: &F, id: LogId, place: Place) -> io::Result<LogEntry> {
    let corrupt = |what: &str| corrupt_entry(Some(place), what);
    let mut bytes = vec![0; place.len as usize];
    read_exact_at(file, &mut bytes, place.offset)?;
    match format::decode_record(&Bytes::from(bytes)) {
        Ok(Record::Entry {
            id: found,
            kind,
            payload,
        }) if found == id => codec::decode_entry(id, kind, payload).map_err(|e| corrupt(e.0).into()),
        Ok(_) => Err(corrupt("another record where an entry belongs").into()),
        Err(what) => Err(corrupt(what).into()),
    }
}

/// The error of an entry that is not what it should be. An entry without a place is in memory only.
pub(crate) fn corrupt_entry(place: Option<Place>, what: &str) -> LogError {
    Damage::Corrupt {
        file: place.map_or_else(String::new, |place| segment::segment_name(place.segment)),
        offset: place.map_or(0, |place| place.offset),
        what: what.to_string(),
    }
    .into()
}

/// The vote, and which of its copies are whole. Changes nothing.
pub(crate) fn read_vote<D: Disk>(disk: &D) -> Result<(Option<Vote>, [bool; 2]), LogError> {
    vote::VoteFile::read(disk)
}

/// Prepares an empty directory; the marker comes last, so that a crash leaves a directory that is still empty.
fn create<D: Disk>(disk: &D, marker: &Marker, options: &LogOptions) -> Result<(), LogError> {
    let names = disk.list().map_err(LogError::io("list the data directory"))?;
    if holds_history(disk, options, &names)? {
        return Err(Damage::MarkerLost.into());
    }
    for number in segment::segment_numbers(&names) {
        disk.remove(&segment::segment_name(number))
            .map_err(LogError::io("remove an empty segment"))?;
    }
    vote::VoteFile::create(disk)?;
    let header = SegmentHeader {
        number: 1,
        first_seq: 1,
        ..SegmentHeader::default()
    };
    segment::create_segment(disk, &header, options)?;
    marker.write(disk)
}

/// True when files without a marker hold anything that a crash during creation does not leave.
fn holds_history<D: Disk>(disk: &D, options: &LogOptions, names: &[String]) -> Result<bool, LogError> {
    if names.iter().any(|name| name.ends_with(crate::snapshot::SUFFIX)) {
        return Ok(true);
    }
    if names.iter().any(|name| name == vote::VOTE_FILE) && vote::VoteFile::open(disk)?.1.is_some() {
        return Ok(true);
    }
    match segment::segment_numbers(names).as_slice() {
        [] => Ok(false),
        [1] => Ok(segment::replay(disk, options)?.index.last.is_some()),
        _ => Ok(true),
    }
}

/// Removes what a crash left of files that were being made.
fn remove_leftovers<D: Disk>(disk: &D) -> Result<(), LogError> {
    for name in disk.list().map_err(LogError::io("list the data directory"))? {
        if name.ends_with(TMP_SUFFIX) {
            disk.remove(&name).map_err(LogError::io(format!("remove {name}")))?;
        }
    }
    Ok(())
}
