//! Messages between members. Protobuf with tags given by hand; the transport sees bytes.
//!
//! Invariant: every request names the cluster, its sender and its receiver.

use bytes::Bytes;
use openraft::AsyncRuntime;
use openraft::raft::{
    AppendEntriesRequest, AppendEntriesResponse, TransferLeaderError, TransferLeaderRequest, VoteRequest, VoteResponse,
};
use openraft::vote::RaftLeaderId;
use prost::Message;

use crate::codec::{self, DecodeError, Kind, PbId};
use crate::types::{LeaderId, LogEntry, LogId, Types, Vote};

/// A request to another member.
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct Request {
    /// The cluster it belongs to.
    #[prost(string, tag = "1")]
    pub cluster_id: String,
    /// The member that sent it.
    #[prost(uint64, tag = "2")]
    pub from: u64,
    /// The member it is for.
    #[prost(uint64, tag = "3")]
    pub to: u64,
    /// What is asked.
    #[prost(oneof = "Ask", tags = "4, 5, 6, 7, 8, 9")]
    pub ask: Option<Ask>,
}

/// What a request asks.
#[derive(Clone, PartialEq, prost::Oneof)]
pub(crate) enum Ask {
    /// Append entries, or a heartbeat without any.
    #[prost(message, tag = "4")]
    Append(Append),
    /// Vote for the sender.
    #[prost(message, tag = "5")]
    Vote(Ballot),
    /// Would you vote for the sender?
    #[prost(message, tag = "6")]
    PreVote(Ballot),
    /// Become the leader.
    #[prost(message, tag = "7")]
    Transfer(Transfer),
    /// A piece of a snapshot.
    #[prost(message, tag = "8")]
    Chunk(Chunk),
    /// Is the snapshot installed?
    #[prost(message, tag = "9")]
    Poll(Poll),
}

/// A vote: for whom, in which term, and whether a quorum granted it.
#[derive(Clone, Copy, PartialEq, prost::Message)]
pub(crate) struct PbVote {
    /// The term.
    #[prost(uint64, tag = "1")]
    pub term: u64,
    /// The candidate.
    #[prost(uint64, tag = "2")]
    pub node: u64,
    /// True for a leader's vote.
    #[prost(bool, tag = "3")]
    pub committed: bool,
}

/// One log entry.
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct PbEntry {
    /// The leader's term.
    #[prost(uint64, tag = "1")]
    pub term: u64,
    /// The index.
    #[prost(uint64, tag = "2")]
    pub index: u64,
    /// 1 blank, 2 command, 3 membership.
    #[prost(uint32, tag = "3")]
    pub kind: u32,
    /// The payload.
    #[prost(bytes = "bytes", tag = "4")]
    pub payload: Bytes,
}

/// Entries to append after `previous`.
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct Append {
    /// The leader's vote.
    #[prost(message, optional, tag = "1")]
    pub vote: Option<PbVote>,
    /// The entry before the first.
    #[prost(message, optional, tag = "2")]
    pub previous: Option<PbId>,
    /// What the leader knows to be committed.
    #[prost(message, optional, tag = "3")]
    pub committed: Option<PbId>,
    /// The entries.
    #[prost(message, repeated, tag = "4")]
    pub entries: Vec<PbEntry>,
}

/// A request for a vote or a pre-vote.
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct Ballot {
    /// The candidate's vote.
    #[prost(message, optional, tag = "1")]
    pub vote: Option<PbVote>,
    /// The candidate's last entry.
    #[prost(message, optional, tag = "2")]
    pub last: Option<PbId>,
    /// The old leader asked the candidate to take over.
    #[prost(bool, tag = "3")]
    pub transfer: bool,
}

/// Leadership offered.
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct Transfer {
    /// The leader's vote.
    #[prost(message, optional, tag = "1")]
    pub vote: Option<PbVote>,
    /// The member to take over.
    #[prost(uint64, tag = "2")]
    pub to: u64,
    /// The leader's last entry.
    #[prost(message, optional, tag = "3")]
    pub last: Option<PbId>,
}

/// A piece of a snapshot file.
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct Chunk {
    /// The leader's vote.
    #[prost(message, optional, tag = "1")]
    pub vote: Option<PbVote>,
    /// The leader's number for this transfer.
    #[prost(uint64, tag = "2")]
    pub transfer: u64,
    /// Bytes of the file.
    #[prost(uint64, tag = "3")]
    pub total: u64,
    /// Where the piece belongs.
    #[prost(uint64, tag = "4")]
    pub offset: u64,
    /// The piece.
    #[prost(bytes = "bytes", tag = "5")]
    pub data: Bytes,
}

/// Asks how the installation of a whole snapshot goes.
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct Poll {
    /// The leader's vote.
    #[prost(message, optional, tag = "1")]
    pub vote: Option<PbVote>,
    /// The leader's number for this transfer.
    #[prost(uint64, tag = "2")]
    pub transfer: u64,
}

/// The reply to a request.
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct Reply {
    /// What is answered.
    #[prost(oneof = "Answer", tags = "1, 2, 3, 4")]
    pub answer: Option<Answer>,
}

/// What a reply answers.
#[derive(Clone, PartialEq, prost::Oneof)]
pub(crate) enum Answer {
    /// To `Append`.
    #[prost(message, tag = "1")]
    Append(Appended),
    /// To `Vote` and `PreVote`.
    #[prost(message, tag = "2")]
    Vote(Voted),
    /// To `Transfer`.
    #[prost(message, tag = "3")]
    Transfer(Transferred),
    /// To `Chunk` and `Poll`.
    #[prost(message, tag = "4")]
    Snapshot(SnapshotAnswer),
}

/// The outcome of an append.
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct Appended {
    /// 1 all, 2 up to `upto`, 3 the entry before the first is another, 4 a higher vote is known.
    #[prost(uint32, tag = "1")]
    pub outcome: u32,
    /// With 2: the last entry taken.
    #[prost(message, optional, tag = "2")]
    pub upto: Option<PbId>,
    /// With 4: that vote.
    #[prost(message, optional, tag = "3")]
    pub vote: Option<PbVote>,
}

/// The outcome of a ballot.
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct Voted {
    /// The vote of the member that answers.
    #[prost(message, optional, tag = "1")]
    pub vote: Option<PbVote>,
    /// Granted?
    #[prost(bool, tag = "2")]
    pub granted: bool,
    /// Its last entry.
    #[prost(message, optional, tag = "3")]
    pub last: Option<PbId>,
}

/// The outcome of an offered leadership.
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct Transferred {
    /// 1 taken, 2 the vote changed, 3 the log is not on disk yet.
    #[prost(uint32, tag = "1")]
    pub outcome: u32,
    /// With 2: the vote here.
    #[prost(message, optional, tag = "2")]
    pub vote: Option<PbVote>,
    /// With 3: the last entry on disk here.
    #[prost(message, optional, tag = "3")]
    pub last: Option<PbId>,
}

/// How a snapshot transfer stands.
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct SnapshotAnswer {
    /// 1 send from `need`, 2 being installed, 3 done with `vote`, 4 unknown transfer.
    #[prost(uint32, tag = "1")]
    pub state: u32,
    /// With 1: bytes there.
    #[prost(uint64, tag = "2")]
    pub need: u64,
    /// With 3: the vote here.
    #[prost(message, optional, tag = "3")]
    pub vote: Option<PbVote>,
}

impl From<Vote> for PbVote {
    fn from(vote: Vote) -> Self {
        PbVote {
            term: vote.leader_id.term,
            node: vote.leader_id.voted_for,
            committed: vote.committed,
        }
    }
}

impl From<PbVote> for Vote {
    fn from(vote: PbVote) -> Self {
        Vote {
            leader_id: LeaderId::new(vote.term, vote.node),
            committed: vote.committed,
        }
    }
}

fn vote(vote: Option<PbVote>) -> Result<Vote, DecodeError> {
    vote.map(Vote::from).ok_or(DecodeError("a message without a vote"))
}

impl Append {
    pub(crate) fn encode<R: AsyncRuntime>(request: &AppendEntriesRequest<Types<R>>) -> Self {
        let entry = |entry: &LogEntry| {
            let (kind, payload) = codec::encode_payload(entry);
            let LogId { leader_id, index } = entry.log_id;
            PbEntry {
                term: leader_id.term,
                index,
                kind: kind as u32,
                payload,
            }
        };
        Append {
            vote: Some(request.vote.into()),
            previous: request.prev_log_id.map(PbId::from),
            committed: request.leader_commit.map(PbId::from),
            entries: request.entries.iter().map(entry).collect(),
        }
    }

    pub(crate) fn decode<R: AsyncRuntime>(self) -> Result<AppendEntriesRequest<Types<R>>, DecodeError> {
        let mut next = self.previous.map_or(0, |id| id.index.saturating_add(1));
        let mut entries = Vec::with_capacity(self.entries.len());
        for entry in self.entries {
            // The library trusts its own messages; what comes from outside must not make a hole in the log.
            if entry.index != next {
                return Err(DecodeError("entries that are not consecutive"));
            }
            next = next.saturating_add(1);
            let kind = u8::try_from(entry.kind)
                .ok()
                .and_then(Kind::from_u8)
                .ok_or(DecodeError("an entry's kind"))?;
            entries.push(codec::decode_entry(
                LogId::new_term_index(entry.term, entry.index),
                kind,
                entry.payload,
            )?);
        }
        Ok(AppendEntriesRequest {
            vote: vote(self.vote)?,
            prev_log_id: self.previous.map(LogId::from),
            leader_commit: self.committed.map(LogId::from),
            entries,
        })
    }
}

impl Appended {
    pub(crate) fn encode<R: AsyncRuntime>(response: AppendEntriesResponse<Types<R>>) -> Self {
        let (outcome, upto, vote) = match response {
            AppendEntriesResponse::Success => (1, None, None),
            AppendEntriesResponse::PartialSuccess(upto) => (2, upto, None),
            AppendEntriesResponse::Conflict => (3, None, None),
            AppendEntriesResponse::HigherVote(vote) => (4, None, Some(vote)),
        };
        Appended {
            outcome,
            upto: upto.map(PbId::from),
            vote: vote.map(PbVote::from),
        }
    }

    pub(crate) fn decode<R: AsyncRuntime>(self) -> Result<AppendEntriesResponse<Types<R>>, DecodeError> {
        Ok(match self.outcome {
            1 => AppendEntriesResponse::Success,
            2 => AppendEntriesResponse::PartialSuccess(self.upto.map(LogId::from)),
            3 => AppendEntriesResponse::Conflict,
            4 => AppendEntriesResponse::HigherVote(vote(self.vote)?),
            _ => return Err(DecodeError("the outcome of an append")),
        })
    }
}

impl Ballot {
    pub(crate) fn encode<R: AsyncRuntime>(request: &VoteRequest<Types<R>>) -> Self {
        Ballot {
            vote: Some(request.vote.into()),
            last: request.last_log_id.map(PbId::from),
            transfer: request.leadership_transfer,
        }
    }

    pub(crate) fn decode<R: AsyncRuntime>(self) -> Result<VoteRequest<Types<R>>, DecodeError> {
        let mut request = VoteRequest::new(vote(self.vote)?, self.last.map(LogId::from));
        request.leadership_transfer = self.transfer;
        Ok(request)
    }
}

impl Voted {
    pub(crate) fn encode<R: AsyncRuntime>(response: VoteResponse<Types<R>>) -> Self {
        Voted {
            vote: Some(response.vote.into()),
            granted: response.vote_granted,
            last: response.last_log_id.map(PbId::from),
        }
    }

    pub(crate) fn decode<R: AsyncRuntime>(self) -> Result<VoteResponse<Types<R>>, DecodeError> {
        Ok(VoteResponse::new(
            vote(self.vote)?,
            self.last.map(LogId::from),
            self.granted,
        ))
    }
}

impl Transfer {
    pub(crate) fn encode<R: AsyncRuntime>(request: &TransferLeaderRequest<Types<R>>) -> Self {
        Transfer {
            vote: Some((*request.from_leader()).into()),
            to: *request.to_node_id(),
            last: request.last_log_id().copied().map(PbId::from),
        }
    }

    pub(crate) fn decode<R: AsyncRuntime>(self) -> Result<TransferLeaderRequest<Types<R>>, DecodeError> {
        Ok(TransferLeaderRequest::new(
            vote(self.vote)?,
            self.to,
            self.last.map(LogId::from),
        ))
    }
}

impl Transferred {
    pub(crate) fn encode<R: AsyncRuntime>(response: &Result<(), TransferLeaderError<Types<R>>>) -> Self {
        match response {
            Ok(()) => Transferred {
                outcome: 1,
                vote: None,
                last: None,
            },
            Err(TransferLeaderError::VoteChanged { actual, .. }) => Transferred {
                outcome: 2,
                vote: Some((*actual).into()),
                last: None,
            },
            Err(TransferLeaderError::LogNotFlushed { actual, .. }) => Transferred {
                outcome: 3,
                vote: None,
                last: actual.map(PbId::from),
            },
        }
    }

    pub(crate) fn decode<R: AsyncRuntime>(
        self,
        asked: &TransferLeaderRequest<Types<R>>,
    ) -> Result<Result<(), TransferLeaderError<Types<R>>>, DecodeError> {
        Ok(match self.outcome {
            1 => Ok(()),
            2 => {
                let actual = vote(self.vote)?;
                Err(TransferLeaderError::VoteChanged {
                    expected: *asked.from_leader(),
                    actual,
                })
            }
            3 => {
                let (expected, actual) = (asked.last_log_id().copied(), self.last.map(LogId::from));
                Err(TransferLeaderError::LogNotFlushed { expected, actual })
            }
            _ => return Err(DecodeError("the outcome of a transfer")),
        })
    }
}

/// See [`crate::testing`].
pub(crate) fn grant_pre_vote(message: &Bytes) -> Option<Bytes> {
    match Request::decode(message.clone()).ok()?.ask? {
        Ask::PreVote(ballot) => {
            let voted = Voted {
                vote: ballot.vote,
                granted: true,
                last: None,
            };
            Some(
                Reply {
                    answer: Some(Answer::Vote(voted)),
                }
                .encode_to_vec()
                .into(),
            )
        }
        _ => None,
    }
}
