//! A watch as a member serves it and a client follows it, across members, broken streams and restarts.
//!
//! The pages are the feed's and the rules of following are its cursor's; only the loop around them is the simulator's.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures::channel::mpsc;
use futures::{SinkExt, StreamExt};
use kvpool_raft::AsyncRuntime;
use kvpool_state::feed::{Cursor, Page};
use kvpool_state::records::{Event, Record, SlotMap};

use crate::cluster::Cluster;
use crate::faults::any_member;
use crate::mutation::Mutation;
use crate::pool::leader::POOL;
use crate::pool::replica::{Pools, View};
use crate::rpc;
use crate::runtime::Sim;
use crate::world::{self, Place};

/// Events in one batch; a revision is never cut.
const PAGE: usize = 4;
/// A stream that is silent for this long is given up.
const SILENCE: Duration = Duration::from_millis(1_500);
/// How often a member looks for news, and says so when there is none.
const POLL: Duration = Duration::from_millis(40);

/// What a member sends.
#[derive(Debug, Clone)]
pub enum Batch {
    /// All events above the position, up to `revision`.
    Changes {
        /// Up to here.
        revision: u64,
        /// In order.
        events: Vec<Event>,
    },
    /// Everything as of `revision`.
    Relist {
        /// As of here.
        revision: u64,
        /// In the order of a list.
        records: Vec<Record>,
    },
    /// Nothing happened up to here.
    Progress(u64),
}

/// A member's side of one watch.
async fn serve(view: View, mutation: Option<Mutation>, from: u64, mut out: mpsc::Sender<Batch>) {
    let mut position = from;
    let mut relist = from == 0;
    if mutation == Some(Mutation::ResumeAtNewest) && from > 0 {
        position = view.read(kvpool_state::State::revision).max(from);
    }
    loop {
        let page = view.page(position, relist, PAGE);
        let (revision, batch) = match page {
            // Before the first entry there is nothing to list.
            Page::Relist { revision: 0, .. } => (0, None),
            Page::Relist { revision, mut records } => {
                relist = false;
                if mutation == Some(Mutation::ShortRelist) && world::chance(200) {
                    records.pop();
                }
                (revision, Some(Batch::Relist { revision, records }))
            }
            Page::Events { revision, events } if events.is_empty() => (revision, Some(Batch::Progress(revision))),
            Page::Events { revision, events } => {
                let mut events: Vec<Event> = events.iter().map(|e| Event::clone(e)).collect();
                if mutation == Some(Mutation::DropAnEvent) && world::chance(20) {
                    events.pop();
                }
                if mutation == Some(Mutation::SwapEvents) && world::chance(100) {
                    events.reverse();
                }
                (revision, Some(Batch::Changes { revision, events }))
            }
        };
        let idle = matches!(batch, Some(Batch::Progress(_)) | None);
        if let Some(batch) = batch {
            let twice = (mutation == Some(Mutation::DoubleABatch) && world::chance(50)).then(|| batch.clone());
            for batch in std::iter::once(batch).chain(twice) {
                if out.send(batch).await.is_err() {
                    return;
                }
            }
        }
        position = revision.max(position);
        if idle {
            world::sleep(POLL).await;
        }
    }
}

/// The newest slot map that a watcher has seen.
#[derive(Clone, Default)]
pub struct Mirror(Arc<Mutex<Option<Arc<SlotMap>>>>);

impl Mirror {
    /// The map.
    pub fn get(&self) -> Option<Arc<SlotMap>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn take<'a>(&self, records: impl Iterator<Item = &'a Record>) {
        for record in records {
            if let Record::Slots(map) = record
                && map.pool == POOL
            {
                *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(Arc::new(map.clone()));
            }
        }
    }
}

/// A client that follows a watch for ever.
pub struct Watcher {
    /// Its name in violations.
    pub name: String,
    /// Where it runs.
    pub place: Place,
    /// What it has seen.
    pub mirror: Mirror,
}

impl Watcher {
    /// Follows whichever member answers.
    pub async fn run(self, cluster: Cluster<Pools>) {
        let mut cursor = Cursor::at(0);
        loop {
            self.follow(&cluster, &mut cursor).await;
            world::sleep(Duration::from_millis(10 + world::random(100))).await;
        }
    }

    /// One stream, until it ends.
    async fn follow(&self, cluster: &Cluster<Pools>, cursor: &mut Cursor) {
        let (from, mutation) = (cursor.position(), cluster.mutation);
        let open = rpc::call(cluster, self.place, any_member(), SILENCE, move |_, view| async move {
            let (tx, rx) = rpc::stream();
            world::spawn(serve(view, mutation, from, tx));
            rx
        });
        let Some(mut stream) = open.await else { return };
        cluster.oracle.count("a watch was opened");
        if from > 0 {
            cluster.oracle.count("a watch was resumed");
        }
        while let Ok(Some(batch)) = Sim::timeout(SILENCE, stream.next()).await {
            self.take(cluster, cursor, &batch);
        }
    }

    fn take(&self, cluster: &Cluster<Pools>, cursor: &mut Cursor, batch: &Batch) {
        let rules = &cluster.model.rules;
        let before = cursor.position();
        // A client without a cursor takes whatever comes.
        let blind = cluster.mutation == Some(Mutation::DoubleABatch);
        match batch {
            Batch::Changes { revision, events } if blind || cursor.takes_changes(*revision) => {
                rules.watched_changes(&self.name, before, *revision, events);
                self.mirror.take(events.iter().filter_map(|e| e.record.as_ref()));
                cursor.advance(*revision);
            }
            Batch::Relist { revision, records } if blind || cursor.takes_relist(*revision) => {
                if before > 0 {
                    cluster.oracle.count("a watch was relisted");
                }
                rules.watched_relist(&self.name, *revision, records);
                rules.position(&self.name, before, *revision);
                self.mirror.take(records.iter());
                cursor.advance(*revision);
            }
            Batch::Progress(revision) => {
                if *revision > before {
                    // It must not run ahead of events that are due.
                    rules.watched_changes(&self.name, before, *revision, &[]);
                }
                cursor.advance(*revision);
            }
            Batch::Changes { .. } | Batch::Relist { .. } => {}
        }
    }
}
