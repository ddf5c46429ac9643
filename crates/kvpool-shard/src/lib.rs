//! The data plane: front ends, routing, replication and slot transfer; a shard with a store, a proxy without one.
//!
//! See `OVERVIEW.md` for the picture.

mod body;
mod clock;
pub mod front;
mod identity;
mod metric_definitions;
pub mod ops;
mod peer;
mod router;
mod routing;
mod run;
mod sink;
mod staging;
mod stats;
mod ticks;
mod transfer;
mod usual;

pub use metric_definitions::describe;
pub use run::{Health, Proxy, ProxyConfig, Shard, ShardConfig, ShardError};

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
