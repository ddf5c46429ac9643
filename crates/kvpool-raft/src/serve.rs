//! Answers messages of other members.
//!
//! Invariants: nothing in a message is trusted before cluster, receiver and form were checked; a snapshot is
//! installed by one task at a time while its sender polls.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use openraft::async_runtime::WatchReceiver;
use openraft::errors::{Fatal, RaftError};
use openraft::{AsyncRuntime, Snapshot};
use prost::Message;

use crate::codec::DecodeError;
use crate::config::{Config, MAX_MESSAGE_BYTES, MemberId};
use crate::disk::Disk;
use crate::error::HandleError;
use crate::machine::StateMachine;
use crate::metric_definitions as metric;
use crate::node::Library;
use crate::snapshot::{Receiver, Step, TransferId};
use crate::types::{Types, Vote};
use crate::wire::{Answer, Appended, Ask, Chunk, PbVote, Reply, Request, SnapshotAnswer, Transferred, Voted};

/// A received snapshot on its way into the state.
enum Install {
    Working,
    Done(Vote),
    Failed,
}

/// See the module.
pub(crate) struct Server<S: StateMachine, D: Disk, R: AsyncRuntime> {
    raft: Library<S, D, R>,
    cluster_id: String,
    member_id: MemberId,
    receiver: Receiver<D>,
    install: Arc<Mutex<Option<(TransferId, Install)>>>,
}

fn fatal<R: AsyncRuntime>(e: Fatal<Types<R>>) -> HandleError {
    HandleError::Fatal(e.to_string())
}

fn raft_error<R: AsyncRuntime>(e: RaftError<Types<R>>) -> HandleError {
    match e {
        RaftError::Fatal(e) => fatal(e),
        RaftError::APIError(never) => match never {},
    }
}

fn malformed(e: DecodeError) -> HandleError {
    HandleError::Malformed(e.0)
}

fn need(bytes: u64) -> SnapshotAnswer {
    SnapshotAnswer {
        state: 1,
        need: bytes,
        vote: None,
    }
}

const WORKING: SnapshotAnswer = SnapshotAnswer {
    state: 2,
    need: 0,
    vote: None,
};
const UNKNOWN: SnapshotAnswer = SnapshotAnswer {
    state: 4,
    need: 0,
    vote: None,
};

fn done(vote: Vote) -> SnapshotAnswer {
    SnapshotAnswer {
        state: 3,
        need: 0,
        vote: Some(vote.into()),
    }
}

impl<S: StateMachine, D: Disk, R: AsyncRuntime> Server<S, D, R> {
    pub(crate) fn new(raft: Library<S, D, R>, disk: D, config: &Config) -> Self {
        Server {
            raft,
            cluster_id: config.cluster_id.clone(),
            member_id: config.member_id,
            receiver: Receiver::new(disk, config.max_snapshot_bytes),
            install: Arc::new(Mutex::new(None)),
        }
    }

    pub(crate) async fn handle(&self, message: Bytes) -> Result<Bytes, HandleError> {
        if message.len() > MAX_MESSAGE_BYTES {
            return Err(HandleError::Malformed("a message that is too large"));
        }
        let request = Request::decode(message).map_err(|_| HandleError::Malformed("a request"))?;
        if request.cluster_id != self.cluster_id || request.to != self.member_id {
            return Err(HandleError::Misdirected {
                to: request.to,
                cluster: request.cluster_id,
            });
        }
        let ask = request
            .ask
            .ok_or(HandleError::Malformed("a request without a question"))?;
        let answer = self.answer(ask).await?;
        Ok(Reply { answer: Some(answer) }.encode_to_vec().into())
    }

    async fn answer(&self, ask: Ask) -> Result<Answer, HandleError> {
        Ok(match ask {
            Ask::Append(append) => {
                let request = append.decode::<R>().map_err(malformed)?;
                Answer::Append(Appended::encode(
                    self.raft.append_entries(request).await.map_err(raft_error)?,
                ))
            }
            Ask::Vote(ballot) => {
                let request = ballot.decode::<R>().map_err(malformed)?;
                Answer::Vote(Voted::encode(self.raft.vote(request).await.map_err(raft_error)?))
            }
            Ask::PreVote(ballot) => {
                let request = ballot.decode::<R>().map_err(malformed)?;
                Answer::Vote(Voted::encode(self.raft.pre_vote(request).await.map_err(raft_error)?))
            }
            Ask::Transfer(transfer) => {
                let request = transfer.decode::<R>().map_err(malformed)?;
                let outcome = self.raft.handle_transfer_leader(request).await.map_err(fatal)?;
                Answer::Transfer(Transferred::encode(&outcome))
            }
            Ask::Chunk(chunk) => Answer::Snapshot(self.chunk(chunk).await?),
            Ask::Poll(poll) => {
                let vote = leader_vote(poll.vote)?;
                Answer::Snapshot(self.installed((vote.leader_id.term, poll.transfer)).unwrap_or(UNKNOWN))
            }
        })
    }

    fn lock_install(&self) -> MutexGuard<'_, Option<(TransferId, Install)>> {
        self.install.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn installed(&self, id: TransferId) -> Option<SnapshotAnswer> {
        match self.lock_install().as_ref() {
            Some((known, install)) if *known == id => Some(match install {
                Install::Working => WORKING,
                Install::Done(vote) => done(*vote),
                Install::Failed => UNKNOWN,
            }),
            _ => None,
        }
    }

    async fn chunk(&self, chunk: Chunk) -> Result<SnapshotAnswer, HandleError> {
        let vote = leader_vote(chunk.vote)?;
        let known = self.raft.metrics().borrow_watched().vote;
        if known > vote {
            return Ok(done(known));
        }
        let id = (vote.leader_id.term, chunk.transfer);
        if let Some(answer) = self.installed(id) {
            return Ok(answer);
        }
        if matches!(self.lock_install().as_ref(), Some((_, Install::Working))) {
            return Err(HandleError::Snapshot("another one is being installed".to_string()));
        }
        let taken = self.receiver.chunk(id, chunk.total, chunk.offset, chunk.data).await;
        match taken.map_err(|e| HandleError::Snapshot(e.to_string()))? {
            Step::Need(bytes) => Ok(need(bytes)),
            Step::Whole { meta, snapshot } => {
                if meta
                    .last_log_id
                    .is_none_or(|last| last.leader_id.term > vote.leader_id.term)
                {
                    return Err(HandleError::Snapshot(
                        "its last entry is not of its leader's past".to_string(),
                    ));
                }
                metrics::counter!(metric::SNAPSHOTS_TOTAL, "what" => "received").increment(1);
                *self.lock_install() = Some((id, Install::Working));
                let (raft, install) = (self.raft.clone(), self.install.clone());
                drop(R::spawn(async move {
                    let outcome = match raft.install_full_snapshot(vote, Snapshot { meta, snapshot }).await {
                        Ok(response) => Install::Done(response.vote),
                        Err(e) => {
                            tracing::error!(error = %e, "failed to install a snapshot");
                            Install::Failed
                        }
                    };
                    *install.lock().unwrap_or_else(PoisonError::into_inner) = Some((id, outcome));
                }));
                Ok(WORKING)
            }
        }
    }
}

/// A snapshot is only taken from a leader.
fn leader_vote(vote: Option<PbVote>) -> Result<Vote, HandleError> {
    match vote.map(Vote::from) {
        Some(vote) if vote.committed => Ok(vote),
        _ => Err(HandleError::Malformed("a snapshot without a leader's vote")),
    }
}
