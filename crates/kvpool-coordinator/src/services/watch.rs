//! Watches: each is a position in the ring and a short queue. A slow reader is not waited for: its position falls behind
//! the ring, and it relists.

use crate::core::Core;
use crate::metric_definitions as m;
use crate::services::cluster::kind_of;
use kvpool_proto::limits::PROGRESS_INTERVAL;
use kvpool_proto::meta::{Reason, Refused};
use kvpool_proto::v1::watch_reply::What;
use kvpool_proto::v1::{Changes, Kind, Progress, Relist, WatchReply, WatchRequest};
use kvpool_state::feed::Page;
use kvpool_state::records::{Event, Record};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio::time::timeout;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Status;

/// Most watches on a member.
const MAX_WATCHES: usize = 32_768;
/// Messages on their way to one reader.
const QUEUE: usize = 2;
/// Events in one message; a revision is never cut.
const PAGE: usize = 64;
/// Most kinds that a request may name.
const MAX_KINDS: usize = 16;
/// How long a reader may leave a message unread.
const STALLED: Duration = Duration::from_secs(60);

pub(super) struct Watches {
    core: Arc<Core>,
    permits: Arc<Semaphore>,
}

struct Filter {
    kinds: BTreeSet<Kind>,
    pool: String,
}

impl Filter {
    fn new(request: &WatchRequest) -> Result<Self, Refused> {
        if request.kinds.len() > MAX_KINDS {
            return Err(Refused::new(Reason::Invalid, "too many kinds"));
        }
        let kind = |k: &i32| Kind::try_from(*k).map_err(|_| Refused::new(Reason::Invalid, "the kind is unknown"));
        let kinds = request.kinds.iter().map(kind).collect::<Result<_, _>>()?;
        Ok(Filter {
            kinds,
            pool: request.pool.clone(),
        })
    }

    fn takes(&self, record: &Record) -> bool {
        let pool = match record {
            Record::Shard(shard) => Some(&shard.pool),
            Record::Pool(pool) => Some(&pool.name),
            Record::Slots(map) => Some(&map.pool),
            Record::Cluster(_) | Record::Node(_) | Record::Member(_) => None,
        };
        let of_pool = self.pool.is_empty() || pool.is_none_or(|p| *p == self.pool);
        of_pool && (self.kinds.is_empty() || self.kinds.contains(&kind_of(record)))
    }
}

impl Watches {
    pub(super) fn new(core: Arc<Core>) -> Self {
        Watches {
            core,
            permits: Arc::new(Semaphore::new(MAX_WATCHES)),
        }
    }

    pub(super) fn start(&self, request: WatchRequest) -> Result<ReceiverStream<Result<WatchReply, Status>>, Refused> {
        self.core.raft()?;
        let filter = Filter::new(&request)?;
        let full = |_| {
            let refused = Refused::new(Reason::Overload, "too many watches");
            refused.with_retry_after(Duration::from_secs(1))
        };
        let permit = self.permits.clone().try_acquire_owned().map_err(full)?;
        let (tx, rx) = mpsc::channel(QUEUE);
        let position = request.from_revision;
        let watch = Watch {
            core: self.core.clone(),
            filter,
            position,
            relist: position == 0,
            tx,
            _open: Open::new(permit),
        };
        tokio::spawn(watch.run());
        Ok(ReceiverStream::new(rx))
    }
}

struct Open(#[allow(dead_code, reason = "held for its drop")] OwnedSemaphorePermit);

impl Open {
    fn new(permit: OwnedSemaphorePermit) -> Self {
        metrics::gauge!(m::WATCHERS).increment(1.0);
        Open(permit)
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        metrics::gauge!(m::WATCHERS).decrement(1.0);
    }
}

struct Watch {
    core: Arc<Core>,
    filter: Filter,
    position: u64,
    relist: bool,
    tx: mpsc::Sender<Result<WatchReply, Status>>,
    _open: Open,
}

/// The reader is gone or stalled.
struct Gone;

impl Watch {
    async fn run(mut self) {
        let mut revision = self.core.replica.revision();
        loop {
            revision.borrow_and_update();
            if self.catch_up().await.is_err() {
                return;
            }
            tokio::select! {
                () = self.tx.closed() => return,
                changed = timeout(PROGRESS_INTERVAL, revision.changed()) => match changed {
                    Ok(Ok(())) => {}
                    Ok(Err(_)) => return,
                    Err(_) => {
                        let status = self.core.status();
                        if status.fatal.is_some() || !self.core.contacts.quorum(&status) {
                            let _ = self.tx.try_send(Err(self.core.no_leader().into()));
                            return;
                        }
                        let progress = Progress { revision: self.position };
                        if self.send(What::Progress(progress)).await.is_err() {
                            return;
                        }
                    }
                },
            }
        }
    }

    /// Everything up to the newest revision.
    async fn catch_up(&mut self) -> Result<(), Gone> {
        loop {
            match self.core.replica.page(self.position, self.relist, PAGE) {
                Page::Relist { records, revision } => {
                    // Before the cluster's first entry there is nothing to list.
                    if revision == 0 {
                        return Ok(());
                    }
                    if !self.relist {
                        metrics::counter!(m::RELISTS).increment(1);
                    }
                    let records = records.into_iter().filter(|r| self.filter.takes(r));
                    let records = records
                        .map(|r| Event {
                            revision,
                            record: Some(r),
                        })
                        .collect();
                    self.send(What::Relist(Relist { revision, records })).await?;
                    self.position = revision;
                    self.relist = false;
                }
                Page::Events { events, revision } => {
                    let last = events.is_empty();
                    let taken = events
                        .iter()
                        .filter(|e| e.record.as_ref().is_some_and(|r| self.filter.takes(r)));
                    let events: Vec<Event> = taken.map(|e| Event::clone(e)).collect();
                    if !events.is_empty() {
                        self.send(What::Changes(Changes { revision, events })).await?;
                    }
                    self.position = revision;
                    if last {
                        return Ok(());
                    }
                }
            }
        }
    }

    async fn send(&self, what: What) -> Result<(), Gone> {
        let reply = WatchReply { what: Some(what) };
        match timeout(STALLED, self.tx.send(Ok(reply))).await {
            Ok(Ok(())) => Ok(()),
            _ => Err(Gone),
        }
    }
}
