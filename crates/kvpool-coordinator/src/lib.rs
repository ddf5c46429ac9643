//! The coordinator: a member of the Raft group with the leader's actors and the gRPC services.
//!
//! Invariants: at most one leader acts (R1: effects carry their term, sessions end with the leadership they began in); reads
//! are linearizable and retried writes are told from new ones (R2); nothing outside of the replicated state is trusted after
//! a leader change (R10); heartbeats never reach the log (R11); every queue is bounded (R12). See `OVERVIEW.md`.

mod actors;
mod boot;
mod config;
mod contacts;
mod core;
mod join;
mod listener;
pub mod metric_definitions;
pub mod offline;
mod replica;
mod run;
mod server;
mod services;
mod status;
mod transport;

pub use config::{CoordinatorConfig, CoordinatorError};
pub use kvpool_proto::{JoinToken, Timing};
pub use run::{Coordinator, CoordinatorHandle};

#[cfg(test)]
mod tests;
