//! The one writer of the log: drains what is queued into a batch, writes it, syncs once, then reports.
//!
//! Invariants: operations take effect in the order they were queued; nothing is reported before its sync; after
//! the first failure nothing is written any more, for a failed sync says nothing about what reached the disk.

use std::io;
use std::sync::Arc;
use std::time::Instant;

use futures::StreamExt;
use futures::channel::{mpsc, oneshot};

use super::LogOptions;
use super::format::{BATCH_HEADER, BatchBuilder, SEGMENT_HEADER, SegmentHeader};
use super::index::Place;
use super::segment::{Replayed, Segment, create_segment, segment_name};
use super::vote::VoteFile;
use super::{Done, Shared};
use crate::disk::{Disk, DiskFile};
use crate::error::LogError;
use crate::metric_definitions as metric;
use crate::types::{LogEntry, LogId, Vote};

/// Most operations waiting for the writer; whoever queues another one waits.
pub(crate) const MAX_QUEUED: usize = 1_024;

/// Something the writer must make durable.
pub(crate) enum Op {
    /// Entries that are already readable, with their tickets.
    Append { entries: Vec<(LogEntry, u64)>, done: Done },
    /// Everything after the id is void.
    Truncate {
        after: Option<LogId>,
        done: oneshot::Sender<io::Result<()>>,
    },
    /// Everything up to the id may be deleted.
    Purge {
        upto: LogId,
        done: oneshot::Sender<io::Result<()>>,
    },
    /// Rides along with the next batch.
    Committed(LogId),
    /// Synced alone.
    Vote {
        vote: Vote,
        done: oneshot::Sender<io::Result<()>>,
    },
    /// Writes what is left and ends the writer.
    Close { done: oneshot::Sender<io::Result<()>> },
}

/// What waits for the sync of the batch being built.
enum Waiter {
    Append(Done),
    Op(oneshot::Sender<io::Result<()>>),
}

/// An entry of the batch being built.
struct PlacedEntry {
    index: u64,
    ticket: u64,
    /// Offset in the batch.
    offset: usize,
    len: usize,
}

pub(crate) struct Writer<D: Disk> {
    disk: D,
    options: LogOptions,
    shared: Arc<Shared<D::File>>,
    segments: std::collections::VecDeque<Segment<D::File>>,
    vote_file: VoteFile<D::File>,
    at: u64,
    seq: u64,
    batch: BatchBuilder,
    placed: Vec<PlacedEntry>,
    waiters: Vec<Waiter>,
    committed: Option<LogId>,
    /// The log's marks as of the last record in the batch.
    marks: SegmentHeader,
    /// The same without the batch: what the header of a new segment says.
    durable_marks: SegmentHeader,
    purged_to: Option<LogId>,
}

impl<D: Disk> Writer<D> {
    pub(crate) fn new(
        disk: D,
        options: LogOptions,
        shared: Arc<Shared<D::File>>,
        log: Replayed<D::File>,
        marks: SegmentHeader,
        vote_file: VoteFile<D::File>,
    ) -> Self {
        Writer {
            disk,
            options,
            shared,
            segments: log.segments,
            vote_file,
            at: log.at,
            seq: log.seq,
            batch: BatchBuilder::new(),
            placed: Vec::new(),
            waiters: Vec::new(),
            committed: None,
            marks,
            durable_marks: marks,
            purged_to: None,
        }
    }

    /// Runs until the queue closes or `Close` arrives.
    pub(crate) async fn run(mut self, mut queue: mpsc::Receiver<Op>) {
        while let Some(op) = queue.next().await {
            let mut next = Some(op);
            while let Some(op) = next {
                if let Op::Close { done } = op {
                    if let Some(id) = self.committed.take() {
                        self.batch.committed(id);
                    }
                    self.flush().await;
                    let _ = done.send(self.shared.check());
                    return;
                }
                self.take(op).await;
                next = if self.batch.len() < self.options.batch_bytes {
                    queue.try_recv().ok()
                } else {
                    None
                };
            }
            self.flush().await;
        }
    }

    async fn take(&mut self, op: Op) {
        match op {
            Op::Append { entries, done } => {
                for (entry, ticket) in entries {
                    let (offset, len) = self.batch.entry(&entry);
                    self.placed.push(PlacedEntry {
                        index: entry.log_id.index,
                        ticket,
                        offset,
                        len,
                    });
                    self.marks.previous = Some(entry.log_id);
                    // One batch must fit a segment, so a long append becomes several. Its waiter is only told
                    // after the last.
                    if self.batch.len() >= self.options.batch_bytes {
                        self.flush_part().await;
                    }
                }
                self.waiters.push(Waiter::Append(done));
            }
            Op::Truncate { after, done } => {
                self.batch.truncate(after);
                self.marks.previous = after;
                self.marks.committed = self.marks.committed.min(after);
                // A mark that still waits must not be written behind the truncation of what it covers.
                self.committed = self.committed.min(after);
                self.waiters.push(Waiter::Op(done));
            }
            Op::Purge { upto, done } => {
                self.batch.purged(upto);
                self.marks.purged = self.marks.purged.max(Some(upto));
                if self.marks.previous.is_none_or(|last| last.index <= upto.index) {
                    self.marks.previous = Some(upto);
                }
                self.purged_to = self.marks.purged;
                self.waiters.push(Waiter::Op(done));
            }
            Op::Committed(id) => self.committed = self.committed.max(Some(id)),
            Op::Vote { vote, done } => {
                self.flush().await;
                let saved = self.save_vote(vote).await;
                let _ = done.send(saved);
            }
            // Handled by `run`.
            Op::Close { .. } => {}
        }
    }

    async fn save_vote(&mut self, vote: Vote) -> io::Result<()> {
        self.shared.check()?;
        self.disk.pace().await;
        let saved = self.vote_file.save(vote).map_err(|e| self.fail(e));
        if saved.is_ok() {
            self.shared.lock().index.vote = Some(vote);
        }
        saved
    }

    /// Writes the batch and tells everyone who waits for it.
    async fn flush(&mut self) {
        if self.batch.is_empty() && self.waiters.is_empty() {
            return;
        }
        if let Some(id) = self.committed.take() {
            self.batch.committed(id);
            self.marks.committed = self.marks.committed.max(Some(id));
        }
        self.flush_part().await;
        for waiter in std::mem::take(&mut self.waiters) {
            let result = self.shared.check();
            match waiter {
                Waiter::Append(done) => done(result),
                // The caller may be gone.
                Waiter::Op(done) => drop(done.send(result)),
            }
        }
        if let Some(upto) = self.purged_to.take()
            && self.shared.check().is_ok()
            && let Err(e) = self.delete_purged(upto)
        {
            let _ = self.fail(e);
        }
    }

    /// Writes the batch, if any. A failure is kept in `shared`.
    async fn flush_part(&mut self) {
        if self.batch.is_empty() {
            return;
        }
        let batch = std::mem::replace(&mut self.batch, BatchBuilder::new());
        let placed = std::mem::take(&mut self.placed);
        if self.shared.check().is_err() {
            return;
        }
        match self.write(batch).await {
            Ok((segment, at)) => self.note_written(segment, at, &placed),
            Err(e) => {
                let _ = self.fail(e);
            }
        }
    }

    fn note_written(&mut self, segment: u64, at: u64, placed: &[PlacedEntry]) {
        let mut shared = self.shared.lock();
        for entry in placed {
            let place = Place {
                segment,
                offset: at + entry.offset as u64,
                len: entry.len as u32,
            };
            shared.index.written(entry.index, entry.ticket, place);
        }
        shared.index.shrink_cache();
        drop(shared);
        let max = placed.iter().map(|entry| entry.index).max();
        if let Some(active) = self.segments.back_mut() {
            active.max_index = active.max_index.max(max);
        }
    }

    /// Writes and syncs one batch; returns its segment and offset.
    async fn write(&mut self, batch: BatchBuilder) -> Result<(u64, u64), LogError> {
        let bytes = batch.finish(self.seq);
        if self.at + bytes.len() as u64 > self.options.segment_bytes {
            self.roll(bytes.len())?;
        }
        self.disk.pace().await;
        let active = self
            .segments
            .back()
            .ok_or_else(|| LogError::io("find a segment")(io::ErrorKind::NotFound.into()))?;
        let (file, number, at) = (active.file.clone(), active.number, self.at);
        let started = Instant::now();
        file.write_at(&bytes, at)
            .map_err(LogError::io(format!("write {}", segment_name(number))))?;
        self.disk.pace().await;
        file.sync()
            .map_err(LogError::io(format!("sync {}", segment_name(number))))?;
        metrics::histogram!(metric::FSYNC_SECONDS).record(started.elapsed().as_secs_f64());
        metrics::counter!(metric::LOG_BYTES_TOTAL).increment(bytes.len() as u64);
        self.at += bytes.len() as u64;
        self.seq += 1;
        self.durable_marks = self.marks;
        Ok((number, at))
    }

    /// Starts a new segment that has room for `batch` bytes.
    fn roll(&mut self, batch: usize) -> Result<(), LogError> {
        let number = self.segments.back().map_or(1, |segment| segment.number + 1);
        // The header tells the log before the segment's first record: without the batch that is to go there.
        let header = SegmentHeader {
            number,
            first_seq: self.seq,
            ..self.durable_marks
        };
        let mut options = self.options.clone();
        options.segment_bytes = options.segment_bytes.max((SEGMENT_HEADER + batch) as u64);
        let segment = create_segment(&self.disk, &header, &options)?;
        self.shared.lock().files.insert(number, segment.file.clone());
        self.segments.push_back(segment);
        self.at = SEGMENT_HEADER as u64;
        Ok(())
    }

    /// Deletes the segments whose every entry is purged, oldest first, never the one in use.
    fn delete_purged(&mut self, upto: LogId) -> Result<(), LogError> {
        while self.segments.len() > 1 && self.segments[0].max_index.is_none_or(|max| max <= upto.index) {
            let Some(segment) = self.segments.pop_front() else {
                break;
            };
            let name = segment_name(segment.number);
            self.shared.lock().files.remove(&segment.number);
            self.disk
                .remove(&name)
                .map_err(LogError::io(format!("remove {name}")))?;
            self.disk.sync_dir().map_err(LogError::io("sync the data directory"))?;
        }
        Ok(())
    }

    fn fail(&self, e: LogError) -> io::Error {
        tracing::error!(error = %e, "the log failed; this member stops");
        let e = io::Error::from(e);
        self.shared.lock().index.failed.get_or_insert_with(|| e.to_string());
        e
    }
}

const _: () = assert!(SEGMENT_HEADER >= BATCH_HEADER);
