//! The log as the consensus library asks for it.

use std::fmt::Debug;
use std::io;
use std::ops::{Bound, RangeBounds};

use futures::Stream;
use openraft::storage::{IOFlushed, RaftLogStorage};
use openraft::{AsyncRuntime, LogState, OptionalSend, RaftLogReader};

use super::Log;
use crate::config::APPEND_BYTES;
use crate::disk::Disk;
use crate::types::{LogEntry, LogId, Types, Vote};

/// A [`Log`] for the library.
pub(crate) struct LogStore<D: Disk>(pub Log<D>);

/// Reads the log for replication and apply.
pub(crate) struct LogReader<D: Disk>(Log<D>);

fn bounds(range: &impl RangeBounds<u64>) -> (u64, u64) {
    let from = match range.start_bound() {
        Bound::Included(i) => *i,
        Bound::Excluded(i) => i.saturating_add(1),
        Bound::Unbounded => 0,
    };
    let until = match range.end_bound() {
        Bound::Included(i) => i.saturating_add(1),
        Bound::Excluded(i) => *i,
        Bound::Unbounded => u64::MAX,
    };
    (from, until)
}

impl<R: AsyncRuntime, D: Disk> RaftLogStorage<Types<R>> for LogStore<D> {
    type LogReader = LogReader<D>;

    async fn get_log_state(&mut self) -> Result<LogState<Types<R>>, io::Error> {
        let shared = self.0.shared.lock();
        Ok(LogState {
            last_purged_log_id: shared.index.purged,
            last_log_id: shared.index.last,
        })
    }

    async fn get_log_reader(&mut self) -> Self::LogReader {
        LogReader(self.0.clone())
    }

    async fn save_vote(&mut self, vote: &Vote) -> Result<(), io::Error> {
        self.0.save_vote(*vote).await
    }

    async fn save_committed(&mut self, committed: Option<LogId>) -> Result<(), io::Error> {
        match committed {
            Some(id) => self.0.save_committed(id).await,
            None => Ok(()),
        }
    }

    async fn read_committed(&mut self) -> Result<Option<LogId>, io::Error> {
        Ok(self.0.shared.lock().index.committed)
    }

    async fn append<I>(&mut self, entries: I, callback: IOFlushed<Types<R>>) -> Result<(), io::Error>
    where
        I: IntoIterator<Item = LogEntry> + OptionalSend,
        I::IntoIter: OptionalSend,
    {
        let entries = entries.into_iter().collect();
        self.0
            .append(entries, Box::new(move |result| callback.io_completed(result)))
            .await
    }

    async fn truncate_after(&mut self, last_log_id: Option<LogId>) -> Result<(), io::Error> {
        self.0.truncate_after(last_log_id).await
    }

    async fn purge(&mut self, log_id: LogId) -> Result<(), io::Error> {
        self.0.purge(log_id).await
    }
}

impl<R: AsyncRuntime, D: Disk> RaftLogReader<Types<R>> for LogReader<D> {
    async fn try_get_log_entries<RB: RangeBounds<u64> + Clone + Debug + OptionalSend>(
        &mut self,
        range: RB,
    ) -> Result<Vec<LogEntry>, io::Error> {
        let (from, until) = bounds(&range);
        self.0.read(from, until, usize::MAX).await
    }

    async fn limited_get_log_entries(&mut self, start: u64, end: u64) -> Result<Vec<LogEntry>, io::Error> {
        let entries = self.0.read(start, end, APPEND_BYTES).await?;
        // When the start was purged meanwhile nothing may be sent: the library takes it for a heartbeat, but
        // would send what follows as if it were the start.
        Ok(if entries.first().is_some_and(|first| first.log_id.index == start) {
            entries
        } else {
            Vec::new()
        })
    }

    async fn read_vote(&mut self) -> Result<Option<Vote>, io::Error> {
        Ok(self.0.shared.lock().index.vote)
    }

    /// In pieces, so that applying a long log does not load it at once.
    async fn entries_stream<RB>(&mut self, range: RB) -> impl Stream<Item = Result<LogEntry, io::Error>> + OptionalSend
    where
        RB: RangeBounds<u64> + Clone + Debug + OptionalSend,
    {
        let (from, until) = bounds(&range);
        let log = self.0.clone();
        let pieces = futures::stream::unfold((log, from), move |(log, from)| async move {
            if from >= until {
                return None;
            }
            match log.read(from, until, APPEND_BYTES).await {
                Ok(entries) if entries.is_empty() && log.ends_before(from) => None,
                // Skipping entries would be worse than stopping (openraft issue 2116 has this shape).
                Ok(entries) if entries.first().is_none_or(|first| first.log_id.index != from) => {
                    let what = format!("failed to apply: entry {from} is not in the log");
                    Some((vec![Err(io::Error::new(io::ErrorKind::NotFound, what))], (log, until)))
                }
                Ok(entries) => {
                    let next = from + entries.len() as u64;
                    Some((entries.into_iter().map(Ok).collect(), (log, next)))
                }
                Err(e) => Some((vec![Err(e)], (log, until))),
            }
        });
        Box::pin(futures::StreamExt::flat_map(pieces, |entries: Vec<_>| {
            futures::stream::iter(entries)
        }))
    }
}
