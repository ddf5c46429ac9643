//! The handle of a running member.
//!
//! Invariants: at most `max_in_flight` proposals are in flight, and a proposal whose caller went away still
//! counts until it is decided; every wait has a bound; after a failure the status says so and nothing succeeds.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use openraft::async_runtime::{Oneshot, WatchReceiver};
use openraft::errors::{ClientWriteError, Fatal, ForwardReason, ForwardToLeader, LinearizableReadError, RaftError};
use openraft::{AsyncRuntime, BasicNode, Raft, ReadPolicy};
use tokio::sync::{Semaphore, watch};

use crate::Tokio;
use crate::apply::Machine;
use crate::config::{Config, MAX_COMMAND_BYTES, MemberId};
use crate::disk::{Disk, FileDisk};
use crate::error::{HandleError, InitializeError, ProposeError, ReadError, StartError};
use crate::log::{Log, LogStore};
use crate::machine::StateMachine;
use crate::marker::Marker;
use crate::metric_definitions as metric;
use crate::network::Network;
use crate::observe;
use crate::serve::Server;
use crate::snapshot::SnapshotStore;
use crate::status::{Leader, Role, Status};
use crate::transport::Transport;
use crate::types::{Opaque, Reply, Types};

/// A proposal that was committed and applied on this member.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Applied {
    /// Its log index.
    pub index: u64,
    /// The term of its leader.
    pub term: u64,
    /// What the state machine answered.
    pub response: Bytes,
}

/// A running member. Clones share it.
pub struct RaftNode<S: StateMachine, D: Disk = FileDisk, R: AsyncRuntime = Tokio> {
    pub(crate) inner: Arc<Inner<S, D, R>>,
}

impl<S: StateMachine, D: Disk, R: AsyncRuntime> Clone for RaftNode<S, D, R> {
    fn clone(&self) -> Self {
        RaftNode {
            inner: self.inner.clone(),
        }
    }
}

pub(crate) type Library<S, D, R> = Raft<Types<R>, Machine<S, D>>;

pub(crate) struct Inner<S: StateMachine, D: Disk, R: AsyncRuntime> {
    pub(crate) raft: Library<S, D, R>,
    log: Log<D>,
    server: Server<S, D, R>,
    status: Arc<watch::Sender<Status>>,
    applied: watch::Receiver<Option<u64>>,
    gate: Arc<Semaphore>,
    max_in_flight: usize,
    pub(crate) wait_bound: Duration,
    heartbeat: Duration,
    /// One change of the membership at a time.
    pub(crate) changes: Arc<Semaphore>,
    pub(crate) patience: Duration,
}

impl<S: StateMachine, D: Disk, R: AsyncRuntime> RaftNode<S, D, R> {
    /// Opens the member's data, rebuilds the state from snapshot and log, and joins the group if there is one.
    ///
    /// # Errors
    /// When the settings do not fit, the directory is another member's, files are damaged, or the disk fails.
    pub async fn start<T: Transport>(config: Config, disk: D, transport: T, machine: S) -> Result<Self, StartError> {
        let library = Arc::new(config.checked()?);
        let marker = Marker {
            cluster_id: config.cluster_id.clone(),
            member_id: config.member_id,
        };
        let log = Log::open(&disk, &marker, &config.log)?;
        let snapshots = SnapshotStore::open(&disk)?;
        let (applied_tx, applied) = watch::channel(None);
        let machine = Machine::new(machine, snapshots, applied_tx);
        let network = Network::new(transport, disk.clone(), &config);
        let raft: Library<S, D, R> = Raft::new(config.member_id, library, network, LogStore(log.clone()), machine)
            .await
            .map_err(|e| StartError::Raft(e.to_string()))?;
        // Until the core's first report its metrics are those of an empty member, which this one may not be.
        if log.last().is_some() {
            let reported = raft.wait(Some(config.wait_bound()));
            let reported = reported.metrics(
                |m| m.last_log_index.is_some() || m.running_state.is_err(),
                "first report",
            );
            reported.await.map_err(|e| StartError::Raft(e.to_string()))?;
        }
        let status = Arc::new(watch::Sender::new(observe::status::<R>(
            &raft.metrics().borrow_watched(),
        )));
        // The task ends when the library's core does, and is not waited for.
        drop(R::spawn(observe::run::<R>(raft.metrics(), status.clone())));
        let server = Server::new(raft.clone(), disk, &config);
        Ok(RaftNode {
            inner: Arc::new(Inner {
                raft,
                log,
                server,
                status,
                applied,
                gate: Arc::new(Semaphore::new(config.max_in_flight)),
                max_in_flight: config.max_in_flight,
                wait_bound: config.wait_bound(),
                heartbeat: config.timing.heartbeat(),
                changes: Arc::new(Semaphore::new(1)),
                patience: crate::change::patience(config.timing),
            }),
        })
    }

    /// Proposes a command and waits until it is committed and applied here.
    ///
    /// # Errors
    /// See [`ProposeError`]: all but `Unknown` and `Fatal` mean that the command was not and will not be applied.
    pub async fn propose(&self, command: Bytes) -> Result<Applied, ProposeError> {
        let started = Instant::now();
        let outcome = self.try_propose(command).await;
        self.record_in_flight();
        match &outcome {
            Ok(_) => metrics::histogram!(metric::COMMIT_SECONDS).record(started.elapsed().as_secs_f64()),
            Err(e) => metrics::counter!(metric::REFUSED_TOTAL, "reason" => e.reason()).increment(1),
        }
        outcome
    }

    fn record_in_flight(&self) {
        let free = self.inner.gate.available_permits();
        metrics::gauge!(metric::IN_FLIGHT).set(self.inner.max_in_flight.saturating_sub(free) as f64);
    }

    async fn try_propose(&self, command: Bytes) -> Result<Applied, ProposeError> {
        let inner = &*self.inner;
        if command.len() > MAX_COMMAND_BYTES {
            return Err(ProposeError::TooLarge {
                bytes: command.len(),
                limit: MAX_COMMAND_BYTES,
            });
        }
        let Ok(permit) = inner.gate.clone().try_acquire_owned() else {
            return Err(ProposeError::Overloaded {
                retry_after: inner.heartbeat,
            });
        };
        self.record_in_flight();
        let (tx, rx) = R::Oneshot::channel();
        let reply = Reply::<R, _>::new(tx, permit);
        let sent = inner.raft.client_write_ff(Opaque(command), Some(reply)).await;
        sent.map_err(|e| ProposeError::Fatal(e.to_string()))?;
        match R::timeout(inner.wait_bound, rx).await {
            Err(_) => Err(ProposeError::Unknown("no outcome in time")),
            Ok(Err(_)) => Err(ProposeError::Unknown("the member stopped")),
            Ok(Ok(Err(refused))) => Err(self.refusal(refused)),
            Ok(Ok(Ok(applied))) => Ok(Applied {
                index: applied.log_id.index,
                term: applied.log_id.leader_id.term,
                response: applied.data.0,
            }),
        }
    }

    fn refusal(&self, refused: ClientWriteError<Types<R>>) -> ProposeError {
        match refused {
            ClientWriteError::ForwardToLeader(f) if f.reason == ForwardReason::LeaseExpired => {
                ProposeError::LeaseExpired
            }
            ClientWriteError::ForwardToLeader(f) => ProposeError::NotLeader { leader: leader(f) },
            // Another leader may have committed the same entry before this one lost it.
            ClientWriteError::LogEntryDiscarded(_) => ProposeError::Unknown("the leader changed"),
            // Neither is asked for here.
            ClientWriteError::ChangeMembershipError(_) | ClientWriteError::PreconditionFailed(_) => {
                ProposeError::Unknown("the library refused")
            }
        }
    }

    /// Confirms leadership with a quorum and waits until this member has applied everything that was
    /// acknowledged before the call. Returns the index the read may be served at.
    ///
    /// # Errors
    /// See [`ReadError`].
    pub async fn linearizable_read(&self) -> Result<u64, ReadError> {
        let outcome = self.try_read().await;
        if let Err(e) = &outcome {
            metrics::counter!(metric::REFUSED_TOTAL, "reason" => e.reason()).increment(1);
        }
        outcome
    }

    async fn try_read(&self) -> Result<u64, ReadError> {
        let inner = &*self.inner;
        let confirmed = inner.raft.ensure_linearizable(ReadPolicy::ReadIndex);
        match R::timeout(inner.wait_bound, confirmed).await {
            Err(_) => Err(ReadError::NoQuorum),
            Ok(Ok(read)) => Ok(read.log_id().index),
            Ok(Err(RaftError::Fatal(e))) => Err(ReadError::Fatal(e.to_string())),
            Ok(Err(RaftError::APIError(LinearizableReadError::QuorumNotEnough(_)))) => Err(ReadError::NoQuorum),
            Ok(Err(RaftError::APIError(LinearizableReadError::ForwardToLeader(f)))) => {
                if f.reason == ForwardReason::LeaseExpired {
                    Err(ReadError::NoQuorum)
                } else {
                    Err(ReadError::NotLeader { leader: leader(f) })
                }
            }
        }
    }

    /// What this member knows now.
    pub fn status(&self) -> Status {
        self.inner.status.borrow().clone()
    }

    /// Follows [`RaftNode::status`].
    pub fn status_watch(&self) -> watch::Receiver<Status> {
        self.inner.status.subscribe()
    }

    /// The last applied index, published after each entry and before its proposer is answered.
    pub fn applied_watch(&self) -> watch::Receiver<Option<u64>> {
        self.inner.applied.clone()
    }

    /// Creates the group from members that are all empty. Called on one of them, once; returns when the
    /// membership is committed.
    ///
    /// # Errors
    /// See [`InitializeError`].
    pub async fn initialize(&self, members: BTreeMap<MemberId, String>) -> Result<(), InitializeError> {
        let id = *self.inner.raft.node_id();
        if !matches!(members.len(), 1 | 3 | 5) {
            return Err(InitializeError::Members(format!(
                "{} members, 1, 3 or 5 are allowed",
                members.len()
            )));
        }
        if !members.contains_key(&id) {
            return Err(InitializeError::Members(format!("member {id} is not among them")));
        }
        let nodes: BTreeMap<MemberId, BasicNode> =
            members.into_iter().map(|(id, addr)| (id, BasicNode { addr })).collect();
        match self.inner.raft.initialize(nodes).await {
            Ok(()) => {}
            Err(RaftError::APIError(openraft::errors::InitializeError::NotAllowed(_))) => {
                return Err(InitializeError::AlreadyInitialized);
            }
            Err(RaftError::APIError(e)) => return Err(InitializeError::Members(e.to_string())),
            Err(RaftError::Fatal(e)) => return Err(InitializeError::Fatal(e.to_string())),
        }
        let mut watch = self.status_watch();
        let committed = async move {
            watch
                .wait_for(|s| s.membership_committed || s.fatal.is_some())
                .await
                .is_ok()
        };
        match R::timeout(self.inner.wait_bound, committed).await {
            Ok(true) => match self.status().fatal {
                None => Ok(()),
                Some(fatal) => Err(InitializeError::Fatal(fatal)),
            },
            Ok(false) | Err(_) => Err(InitializeError::Unconfirmed),
        }
    }

    /// Asks member `to` to take over. Returns when it was asked; the status tells whether it did.
    ///
    /// # Errors
    /// `Fatal` when the member has stopped. Asked of a follower it does nothing.
    pub async fn transfer_leader(&self, to: MemberId) -> Result<(), ProposeError> {
        self.inner
            .raft
            .trigger()
            .transfer_leader(to)
            .await
            .map_err(|e| ProposeError::Fatal(e.to_string()))
    }

    /// Answers a message that another member's transport sent.
    ///
    /// # Errors
    /// See [`HandleError`]; the transport reports any of them as a failed call.
    pub async fn handle(&self, message: Bytes) -> Result<Bytes, HandleError> {
        self.inner.server.handle(message).await
    }

    /// Stops the member and makes what it still holds durable. The directory may be opened again afterwards.
    pub async fn shutdown(&self) {
        if let Err(e) = self.inner.raft.shutdown().await {
            tracing::error!(error = %e, "the consensus core did not stop cleanly");
        }
        if let Err(e) = self.inner.log.close().await {
            tracing::warn!(error = %e, "the log did not close cleanly");
        }
        self.inner.status.send_modify(|status| status.role = Role::Stopped);
    }
}

pub(crate) fn leader<R: AsyncRuntime>(forward: ForwardToLeader<Types<R>>) -> Option<Leader> {
    let address = forward.leader_node.map(|node| node.addr).unwrap_or_default();
    forward.leader_id.map(|id| Leader { id, address })
}

/// The text of a failure, or `None` for a member that runs or was shut down.
pub(crate) fn fatal<R: AsyncRuntime>(state: &Result<(), Fatal<Types<R>>>) -> Option<String> {
    match state {
        Ok(()) | Err(Fatal::Stopped) => None,
        Err(e) => Some(e.to_string()),
    }
}
