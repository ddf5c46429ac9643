//! The consensus library's network calls as messages of a [`Transport`].
//!
//! Invariants: one attempt per call, within the library's time to live; pre-vote really asks; heartbeats, votes
//! and snapshots each have a lane of their own; a snapshot transfer that stands still is given up.

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use futures::future::{Either, select};
use openraft::errors::{NetworkError, RPCError, ReplicationClosed, StreamingError, Unreachable};
use openraft::network::RPCOption;
use openraft::raft::{
    AppendEntriesRequest, AppendEntriesResponse, SnapshotResponse, TransferLeaderRequest, TransferLeaderResponse,
    VoteRequest, VoteResponse,
};
use openraft::type_config::TypeConfigExt;
use openraft::{AsyncRuntime, BasicNode, RaftNetworkFactory, RaftNetworkV2, Snapshot};
use prost::Message;

use crate::codec::DecodeError;
use crate::config::{MemberId, SNAPSHOT_CHUNK_BYTES};
use crate::disk::{Disk, offload, read_exact_at};
use crate::metric_definitions as metric;
use crate::snapshot::SnapshotFile;
use crate::transport::{Lane, Peer, Transport, TransportError};
use crate::types::{CommittedLeaderId, Types, Vote};
use crate::wire::{Answer, Append, Ask, Ballot, Chunk, Poll, Reply, Request, SnapshotAnswer, Transfer};

/// How often a finished transfer asks whether the snapshot is installed.
const POLL_EVERY: Duration = Duration::from_millis(50);

/// Makes clients for other members.
pub(crate) struct Network<T, D> {
    inner: Arc<Inner<T, D>>,
}

impl<T, D> Clone for Network<T, D> {
    fn clone(&self) -> Self {
        Network {
            inner: self.inner.clone(),
        }
    }
}

struct Inner<T, D> {
    transport: T,
    disk: D,
    cluster_id: String,
    from: MemberId,
    /// Longest wait for one message of a snapshot, and for any progress of it.
    no_progress: Duration,
    /// Shortest time to live of an append: a slow disk must not turn each append into a retry.
    append_ttl: Duration,
    transfers: AtomicU64,
}

/// A client for one member and lane.
pub(crate) struct Client<T, D> {
    inner: Arc<Inner<T, D>>,
    peer: Peer,
    lane: Lane,
}

impl<T: Transport, D: Disk> Network<T, D> {
    pub(crate) fn new(transport: T, disk: D, config: &crate::config::Config) -> Self {
        Network {
            inner: Arc::new(Inner {
                transport,
                disk,
                cluster_id: config.cluster_id.clone(),
                from: config.member_id,
                no_progress: config.no_progress(),
                append_ttl: config.timing.election_min(),
                transfers: AtomicU64::new(0),
            }),
        }
    }

    fn client(&self, target: MemberId, node: &BasicNode, lane: Lane) -> Client<T, D> {
        Client {
            inner: self.inner.clone(),
            peer: Peer {
                id: target,
                address: node.addr.clone(),
            },
            lane,
        }
    }
}

impl<R: AsyncRuntime, T: Transport, D: Disk> RaftNetworkFactory<Types<R>> for Network<T, D> {
    type Network = Client<T, D>;

    async fn new_client(&mut self, target: MemberId, node: &BasicNode) -> Self::Network {
        self.client(target, node, Lane::Append)
    }

    async fn new_heartbeat_client(&mut self, target: MemberId, node: &BasicNode) -> Self::Network {
        self.client(target, node, Lane::Heartbeat)
    }

    async fn new_snapshot_client(&mut self, target: MemberId, node: &BasicNode) -> Self::Network {
        self.client(target, node, Lane::Snapshot)
    }
}

impl<T: Transport, D: Disk> Client<T, D> {
    async fn ask(&self, lane: Lane, ask: Ask, ttl: Duration) -> Result<Option<Answer>, TransportError> {
        let request = Request {
            cluster_id: self.inner.cluster_id.clone(),
            from: self.inner.from,
            to: self.peer.id,
            ask: Some(ask),
        };
        let bytes = Bytes::from(request.encode_to_vec());
        let reply = self
            .inner
            .transport
            .send(&self.peer, lane, bytes, ttl)
            .await
            .inspect_err(|e| {
                let cause = match e {
                    TransportError::Unreachable(_) => "unreachable",
                    TransportError::Timeout => "timeout",
                    TransportError::Failed(_) => "failed",
                };
                metrics::counter!(metric::SEND_FAILURES_TOTAL, "lane" => lane.name(), "cause" => cause).increment(1);
            })?;
        let reply = Reply::decode(reply).map_err(|_| TransportError::Failed("the reply is malformed".to_string()))?;
        Ok(reply.answer)
    }

    async fn call<R: AsyncRuntime, A>(
        &self,
        lane: Lane,
        ask: Ask,
        ttl: Duration,
        answer: impl FnOnce(Option<Answer>) -> Result<A, DecodeError>,
    ) -> Result<A, RPCError<Types<R>>> {
        let reply = self.ask(lane, ask, ttl).await.map_err(rpc_error)?;
        answer(reply).map_err(|e| RPCError::Network(NetworkError::new(&e)))
    }

    /// Sends every chunk and waits until the snapshot is installed; returns the receiver's vote.
    async fn transfer<R: AsyncRuntime>(
        &self,
        vote: Vote,
        snapshot: &SnapshotFile<D::File>,
    ) -> Result<Vote, StreamingError<Types<R>>> {
        let transfer = self.inner.transfers.fetch_add(1, Ordering::Relaxed);
        let total = snapshot.len;
        let mut offset = 0;
        let mut last_progress = Types::<R>::now();
        loop {
            let ask = if offset < total {
                let data = self.read_chunk(snapshot, offset).await?;
                Ask::Chunk(Chunk {
                    vote: Some(vote.into()),
                    transfer,
                    total,
                    offset,
                    data,
                })
            } else {
                Types::<R>::sleep(POLL_EVERY).await;
                Ask::Poll(Poll {
                    vote: Some(vote.into()),
                    transfer,
                })
            };
            let answer = self.ask(Lane::Snapshot, ask, self.inner.no_progress).await;
            match answer.map_err(|e| StreamingError::from(rpc_error::<R>(e)))? {
                Some(Answer::Snapshot(SnapshotAnswer { state: 1, need, .. })) if need <= total => {
                    if need > offset {
                        last_progress = Types::<R>::now();
                    }
                    offset = need;
                }
                Some(Answer::Snapshot(SnapshotAnswer { state: 2, .. })) => {
                    if offset < total {
                        last_progress = Types::<R>::now();
                    }
                    offset = total;
                }
                Some(Answer::Snapshot(SnapshotAnswer {
                    state: 3,
                    vote: Some(vote),
                    ..
                })) => return Ok(vote.into()),
                _ => return Err(network_error("the receiver does not take the snapshot")),
            }
            // Installing is bounded by the library's own limit for a whole transfer.
            if offset < total && Types::<R>::now() - last_progress > self.inner.no_progress {
                return Err(network_error("the snapshot transfer makes no progress"));
            }
        }
    }

    async fn read_chunk<R: AsyncRuntime>(
        &self,
        snapshot: &SnapshotFile<D::File>,
        offset: u64,
    ) -> Result<Bytes, StreamingError<Types<R>>> {
        let len = (snapshot.len - offset).min(SNAPSHOT_CHUNK_BYTES as u64) as usize;
        let file = snapshot.file.clone();
        let read = move || {
            let mut data = vec![0; len];
            read_exact_at(&*file, &mut data, offset)?;
            Ok(Bytes::from(data))
        };
        offload(&self.inner.disk, "raft-snapshot-read", read)
            .await
            .map_err(|e| NetworkError::new(&e).into())
    }
}

fn rpc_error<R: AsyncRuntime>(e: TransportError) -> RPCError<Types<R>> {
    match e {
        // Only this one makes the library back off, and nothing was sent in vain.
        TransportError::Unreachable(_) => RPCError::Unreachable(Unreachable::new(&e)),
        TransportError::Timeout | TransportError::Failed(_) => RPCError::Network(NetworkError::new(&e)),
    }
}

fn network_error<R: AsyncRuntime>(what: &str) -> StreamingError<Types<R>> {
    NetworkError::from_string(what).into()
}

const WRONG_ANSWER: DecodeError = DecodeError("an answer to another question");

impl<R: AsyncRuntime, T: Transport, D: Disk> RaftNetworkV2<Types<R>> for Client<T, D> {
    type SnapshotData = SnapshotFile<D::File>;

    async fn append_entries(
        &mut self,
        request: AppendEntriesRequest<Types<R>>,
        option: RPCOption,
    ) -> Result<AppendEntriesResponse<Types<R>>, RPCError<Types<R>>> {
        let ttl = match self.lane {
            Lane::Heartbeat => option.soft_ttl(),
            // The library does not bound the append stream by its time to live, a heartbeat's length.
            _ => option.soft_ttl().max(self.inner.append_ttl),
        };
        self.call(
            self.lane,
            Ask::Append(Append::encode(&request)),
            ttl,
            |answer| match answer {
                Some(Answer::Append(appended)) => appended.decode(),
                _ => Err(WRONG_ANSWER),
            },
        )
        .await
    }

    async fn vote(
        &mut self,
        request: VoteRequest<Types<R>>,
        option: RPCOption,
    ) -> Result<VoteResponse<Types<R>>, RPCError<Types<R>>> {
        self.ballot(Ask::Vote(Ballot::encode(&request)), option).await
    }

    async fn pre_vote(
        &mut self,
        request: VoteRequest<Types<R>>,
        option: RPCOption,
    ) -> Result<VoteResponse<Types<R>>, RPCError<Types<R>>> {
        self.ballot(Ask::PreVote(Ballot::encode(&request)), option).await
    }

    async fn full_snapshot(
        &mut self,
        vote: Vote,
        snapshot: Snapshot<CommittedLeaderId, MemberId, BasicNode, Self::SnapshotData>,
        cancel: impl Future<Output = ReplicationClosed> + Send + 'static,
        _option: RPCOption,
    ) -> Result<SnapshotResponse<Types<R>>, StreamingError<Types<R>>> {
        let transfer = std::pin::pin!(self.transfer(vote, &snapshot.snapshot));
        let cancel = std::pin::pin!(cancel);
        match select(cancel, transfer).await {
            Either::Left((closed, _)) => Err(closed.into()),
            Either::Right((done, _)) => {
                let vote = done?;
                metrics::counter!(metric::SNAPSHOTS_TOTAL, "what" => "sent").increment(1);
                Ok(SnapshotResponse::new(vote))
            }
        }
    }

    async fn transfer_leader(
        &mut self,
        request: TransferLeaderRequest<Types<R>>,
        option: RPCOption,
    ) -> Result<TransferLeaderResponse<Types<R>>, RPCError<Types<R>>> {
        self.call(
            Lane::Vote,
            Ask::Transfer(Transfer::encode(&request)),
            option.soft_ttl(),
            |answer| match answer {
                Some(Answer::Transfer(transferred)) => transferred.decode(&request),
                _ => Err(WRONG_ANSWER),
            },
        )
        .await
    }
}

impl<T: Transport, D: Disk> Client<T, D> {
    async fn ballot<R: AsyncRuntime>(
        &self,
        ask: Ask,
        option: RPCOption,
    ) -> Result<VoteResponse<Types<R>>, RPCError<Types<R>>> {
        self.call(Lane::Vote, ask, option.soft_ttl(), |answer| match answer {
            Some(Answer::Vote(voted)) => voted.decode(),
            _ => Err(WRONG_ANSWER),
        })
        .await
    }
}
