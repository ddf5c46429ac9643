//! The embedding crate's state machine as the consensus library drives it.
//!
//! Invariants: entries are applied once each and in order; a response is sent only after the applied index was
//! published; the state is moved to a worker for a restore and never seen half restored.

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use bytes::Bytes;
use futures::{Stream, StreamExt};
use openraft::storage::{EntryResponder, RaftStateMachine};
use openraft::{AsyncRuntime, BasicNode, EntryPayload, OptionalSend, RaftSnapshotBuilder, Snapshot};
use tokio::sync::watch;

use crate::disk::{Disk, offload};
use crate::machine::{SnapshotWriter, StateMachine, StopMember};
use crate::metric_definitions as metric;
use crate::snapshot::{SnapshotFile, SnapshotStore};
use crate::types::{CommittedLeaderId, LogId, Opaque, Payload, SnapshotMeta, StoredMembership, Types};

/// A [`StateMachine`] with what the library keeps beside it.
pub(crate) struct Machine<S, D: Disk> {
    /// Absent only while a worker restores it.
    machine: Option<S>,
    applied: Option<LogId>,
    membership: StoredMembership,
    store: SnapshotStore<D>,
    watch: watch::Sender<Option<u64>>,
}

impl<S: StateMachine, D: Disk> Machine<S, D> {
    pub(crate) fn new(machine: S, store: SnapshotStore<D>, watch: watch::Sender<Option<u64>>) -> Self {
        Machine {
            machine: Some(machine),
            applied: None,
            membership: StoredMembership::default(),
            store,
            watch,
        }
    }

    fn machine(&mut self) -> io::Result<&mut S> {
        self.machine
            .as_mut()
            .ok_or_else(|| io::Error::other("the state was lost in a failed restore"))
    }

    fn apply_one(&mut self, id: LogId, payload: Payload) -> io::Result<Bytes> {
        let response = match payload {
            EntryPayload::Blank => Bytes::new(),
            EntryPayload::Normal(command) => {
                let machine = self.machine()?;
                // A panic would take the library's worker away without a word; an error stops the member cleanly.
                let apply = AssertUnwindSafe(|| machine.apply(id.index, id.leader_id.term, &command.0));
                let applied = catch_unwind(apply).unwrap_or_else(|_| Err(StopMember(format!("a panic at {id}"))));
                applied.map_err(io::Error::other)?
            }
            EntryPayload::Membership(membership) => {
                self.membership = StoredMembership::new(Some(id), membership);
                Bytes::new()
            }
        };
        self.applied = Some(id);
        self.watch.send_replace(Some(id.index));
        Ok(response)
    }
}

impl<R: AsyncRuntime, S: StateMachine, D: Disk> RaftStateMachine<Types<R>> for Machine<S, D> {
    type SnapshotData = SnapshotFile<D::File>;
    type SnapshotBuilder = Builder<D>;

    async fn applied_state(&mut self) -> Result<(Option<LogId>, StoredMembership), io::Error> {
        Ok((self.applied, self.membership.clone()))
    }

    async fn apply<Entries>(&mut self, mut entries: Entries) -> Result<(), io::Error>
    where
        Entries: Stream<Item = Result<EntryResponder<Types<R>>, io::Error>> + Unpin + OptionalSend,
    {
        while let Some(next) = entries.next().await {
            let (entry, responder) = next?;
            let started = Instant::now();
            let response = self.apply_one(entry.log_id, entry.payload)?;
            metrics::histogram!(metric::APPLY_SECONDS).record(started.elapsed().as_secs_f64());
            if let Some(responder) = responder {
                responder.send(Opaque(response));
            }
        }
        Ok(())
    }

    async fn get_snapshot_builder(&mut self) -> Self::SnapshotBuilder {
        let state = self.machine.as_ref().map(StateMachine::snapshot);
        let meta = SnapshotMeta {
            last_log_id: self.applied,
            last_membership: self.membership.clone(),
        };
        Builder {
            store: self.store.clone(),
            meta,
            state: Mutex::new(state),
        }
    }

    async fn install_snapshot(&mut self, meta: &SnapshotMeta, snapshot: Self::SnapshotData) -> Result<(), io::Error> {
        let mut machine = self
            .machine
            .take()
            .ok_or_else(|| io::Error::other("the state was lost in a failed restore"))?;
        let (store, held) = (self.store.clone(), snapshot.held(meta.clone()));
        // Durable under its name before the state shows it: a crash in between restores the same state.
        let restore = move || {
            store.adopt(&held)?;
            let mut state = held.snapshot.state();
            machine.restore(&mut state)?;
            Ok(machine)
        };
        self.machine = Some(offload(&self.store.disk, "raft-restore", restore).await?);
        self.applied = meta.last_log_id;
        self.membership = meta.last_membership.clone();
        self.watch.send_replace(meta.last_log_id.map(|id| id.index));
        Ok(())
    }

    async fn get_current_snapshot(&mut self) -> Result<Option<SnapshotOf<D>>, io::Error> {
        Ok(self.store.current().map(|held| Snapshot {
            meta: held.meta,
            snapshot: held.snapshot,
        }))
    }
}

type SnapshotOf<D> = Snapshot<CommittedLeaderId, u64, BasicNode, SnapshotFile<<D as Disk>::File>>;

/// Writes one snapshot.
pub(crate) struct Builder<D: Disk> {
    store: SnapshotStore<D>,
    meta: SnapshotMeta,
    /// Behind a lock only because the library wants builders to be shareable; there is one user.
    state: Mutex<Option<SnapshotWriter>>,
}

impl<R: AsyncRuntime, D: Disk> RaftSnapshotBuilder<Types<R>> for Builder<D> {
    type SnapshotData = SnapshotFile<D::File>;

    async fn build_snapshot(&mut self) -> Result<SnapshotOf<D>, io::Error> {
        let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        let state = state.ok_or_else(|| io::Error::other("failed to build a snapshot: there is no state"))?;
        let (store, meta) = (self.store.clone(), self.meta.clone());
        let held = offload(&self.store.disk, "raft-snapshot", move || store.build(&meta, state)).await?;
        Ok(Snapshot {
            meta: held.meta,
            snapshot: held.snapshot,
        })
    }
}
