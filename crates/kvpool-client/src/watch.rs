//! The watch: one task that keeps a stream open over whichever member serves it, and hands batches on in order.
//!
//! Invariant: every batch is the whole of its revisions, so the position after it is a point to resume from; a batch at or
//! below the position is not handed on. So nothing is lost or doubled across members.

use crate::backoff::Backoff;
use crate::client::Client;
use crate::metric_definitions as m;
use futures::Stream;
use kvpool_proto::limits;
use kvpool_proto::meta::Refused;
use kvpool_proto::v1::{Kind, WatchReply, WatchRequest, watch_reply::What};
use kvpool_state::feed::Cursor;
use kvpool_state::records::{Event, Record};
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};
use tonic::Status;

/// Batches that wait for the reader; the stream is not read on when they do.
const QUEUE: usize = 16;

/// What to watch.
#[derive(Clone, Debug, Default)]
pub struct WatchFilter {
    /// Empty = every kind.
    pub kinds: Vec<Kind>,
    /// Only records of this pool; empty = all.
    pub pool: String,
}

/// What a watch yields.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WatchItem {
    /// All matching changes of the revisions since the item before, up to `revision`.
    Changes { revision: u64, events: Vec<Event> },
    /// The watch began, or fell too far behind: this is everything as of `revision`; what is not here does not exist.
    Relisted { revision: u64, records: Vec<Record> },
}

/// An endless stream of changes. Dropping it ends the watch.
pub struct WatchStream {
    items: mpsc::Receiver<WatchItem>,
    task: JoinHandle<()>,
}

impl WatchStream {
    pub(crate) fn start(client: Client, filter: WatchFilter, from_revision: u64) -> Self {
        let (tx, items) = mpsc::channel(QUEUE);
        let watcher = Watcher {
            client,
            filter,
            cursor: Cursor::at(from_revision),
            tx,
        };
        WatchStream {
            items,
            task: tokio::spawn(watcher.run()),
        }
    }

    /// The next item; `None` only when the runtime shuts down.
    pub async fn next(&mut self) -> Option<WatchItem> {
        self.items.recv().await
    }
}

impl Stream for WatchStream {
    type Item = WatchItem;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<WatchItem>> {
        self.items.poll_recv(cx)
    }
}

impl Drop for WatchStream {
    fn drop(&mut self) {
        self.task.abort();
    }
}

struct Watcher {
    client: Client,
    filter: WatchFilter,
    cursor: Cursor,
    tx: mpsc::Sender<WatchItem>,
}

/// Why one stream ended.
enum End {
    /// The reader is gone.
    Dropped,
    Failed(&'static str, String),
}

impl Watcher {
    async fn run(mut self) {
        let mut backoff = Backoff::new(Duration::from_millis(50), self.client.timing().heartbeat());
        // Watchers start at different members.
        let mut turn: usize = rand::random_range(0..1024);
        loop {
            let before = self.cursor;
            let endpoints = self.client.endpoints();
            let address = endpoints
                .get(turn % endpoints.len().max(1))
                .cloned()
                .unwrap_or_default();
            match self.serve(&address).await {
                End::Dropped => return,
                End::Failed(reason, message) => {
                    metrics::counter!(m::WATCH_RESTARTS, "reason" => reason).increment(1);
                    tracing::debug!(%address, reason, message, "the watch goes on with another member");
                }
            }
            if self.cursor != before {
                backoff.reset();
            }
            turn += 1;
            tokio::select! {
                () = sleep(backoff.next_wait()) => {}
                () = self.tx.closed() => return,
            }
        }
    }

    async fn serve(&mut self, address: &str) -> End {
        let mut cluster = match self.client.cluster(address) {
            Ok(cluster) => cluster,
            Err(e) => return End::Failed("address", e),
        };
        let request = WatchRequest {
            kinds: self.filter.kinds.iter().map(|k| i32::from(*k)).collect(),
            pool: self.filter.pool.clone(),
            from_revision: self.cursor.position(),
        };
        let opened = timeout(self.client.timing().attempt(), cluster.watch(request)).await;
        let mut stream = match opened {
            Ok(Ok(reply)) => reply.into_inner(),
            Ok(Err(status)) => return self.ended(address, &status),
            Err(_) => return self.ended(address, &Status::unavailable("no answer in time")),
        };
        // A member that is frozen keeps its connections: silence ends the stream (fault O39).
        let silence = limits::PROGRESS_INTERVAL * 2 + self.client.timing().attempt();
        loop {
            let reply = tokio::select! {
                reply = timeout(silence, stream.message()) => reply,
                () = self.tx.closed() => return End::Dropped,
            };
            match reply {
                Ok(Ok(Some(reply))) => {
                    if self.hand_on(reply).await.is_err() {
                        return End::Dropped;
                    }
                }
                Ok(Ok(None)) => return End::Failed("ended", "the member ended the watch".into()),
                Ok(Err(status)) => return self.ended(address, &status),
                Err(_) => return self.ended(address, &Status::unavailable("the watch fell silent")),
            }
        }
    }

    fn ended(&self, address: &str, status: &Status) -> End {
        let refused = Refused::from_status(status);
        if refused.is_none() {
            self.client.forget(address);
        }
        End::Failed(
            refused.map_or("unreachable", |r| r.reason.word()),
            status.message().to_owned(),
        )
    }

    async fn hand_on(&mut self, reply: WatchReply) -> Result<(), mpsc::error::SendError<WatchItem>> {
        match reply.what {
            Some(What::Changes(changes)) if self.cursor.takes_changes(changes.revision) => {
                let revision = changes.revision;
                self.tx
                    .send(WatchItem::Changes {
                        revision,
                        events: changes.events,
                    })
                    .await?;
                self.cursor.advance(revision);
            }
            Some(What::Relist(list)) if self.cursor.takes_relist(list.revision) => {
                let records = list.records.into_iter().filter_map(|e| e.record).collect();
                self.tx
                    .send(WatchItem::Relisted {
                        revision: list.revision,
                        records,
                    })
                    .await?;
                self.cursor.advance(list.revision);
            }
            Some(What::Progress(progress)) => self.cursor.advance(progress.revision),
            _ => {}
        }
        #[allow(clippy::cast_precision_loss)]
        metrics::gauge!(m::REVISION).set(self.cursor.position() as f64);
        Ok(())
    }
}
