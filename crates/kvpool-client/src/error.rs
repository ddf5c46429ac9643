//! Errors of the client. Refusals keep the word of the member that refused.

use kvpool_proto::meta::Refused;

/// Why a call failed for good.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ClientError {
    /// No member could be reached.
    #[error("failed to reach a coordinator ({endpoints}): {last}")]
    Unreachable { endpoints: String, last: String },
    /// Members answered, but a quorum of them is out of contact (`no_quorum`). Nothing was changed.
    #[error("failed to get an answer: no_quorum: {0}")]
    NoQuorum(String),
    /// The call made no progress within its time. A write may or may not have happened.
    #[error("failed to get an answer within {seconds} s: {last}")]
    Deadline { seconds: u64, last: String },
    /// A member refused, and another one would too.
    #[error("failed: {}: {}", .0.reason.word(), .0.message)]
    Refused(Box<Refused>),
    /// The answer was not what the protocol says.
    #[error("failed to understand the answer: {0}")]
    Protocol(String),
}

impl ClientError {
    /// The reason as metrics and logs spell it.
    #[must_use]
    pub fn word(&self) -> &'static str {
        match self {
            ClientError::Unreachable { .. } => "unreachable",
            ClientError::NoQuorum(_) => "no_quorum",
            ClientError::Deadline { .. } => "deadline",
            ClientError::Refused(refused) => refused.reason.word(),
            ClientError::Protocol(_) => "protocol",
        }
    }
}
