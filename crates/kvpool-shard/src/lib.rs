//! The data plane: front ends, routing, replication and slot transfer; a shard with a store, a proxy without one.
//!
//! See `OVERVIEW.md` for the picture.

mod body;
mod clock;
pub mod front;
pub mod ops;
mod router;
mod sink;
mod usual;
