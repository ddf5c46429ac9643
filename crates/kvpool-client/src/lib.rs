//! Rust client of the coordinator: tries members, follows leader hints, retries with back-off; a watch that resumes by
//! revision; the session that every shard keeps with the leader.
//!
//! Invariants: a retried write keeps its request id (R2); a watch loses and doubles nothing; a slot map never goes back
//! (R4); a session is never adopted from an older term (R1); every queue, retry and wait has a bound (R12).

mod backoff;
mod channel;
mod client;
mod error;
pub mod metric_definitions;
mod reports;
mod session;
mod slot_map;
mod slots;
mod watch;

pub use backoff::Backoff;
pub use client::{Client, ClientConfig, Listed};
pub use error::ClientError;
pub use kvpool_net::Trust;
pub use kvpool_proto::v1::{Condition, Kind, MemberStatus, PeerReport, PoolStatus, ShardStatus, StatusReply};
pub use kvpool_proto::{JoinToken, Timing, TokenError};
pub use session::{MAX_PEER_REPORTS, SessionState, ShardHello, ShardSession, ShardSummary};
pub use slot_map::follow_slot_map;
pub use slots::SlotSet;
pub use watch::{WatchFilter, WatchItem, WatchStream};

#[cfg(test)]
mod tests;
