//! The fault harness of kvpool: a deterministic simulator that runs the real `kvpool-raft`, `kvpool-state` and
//! `kvpool-policy`, and checkers that judge what it did.
//!
//! Three members run on one thread with virtual time, a simulated network and simulated disks, all driven by
//! one seed; an [`oracle`] judges what they do. A seed that fails is printed, and `KVPOOL_SEED=n` replays it.
//! See `OVERVIEW.md`.

pub mod alone;
pub mod cluster;
pub mod disk;
pub mod faults;
pub mod linear;
pub mod machine;
pub mod mutation;
pub mod net;
pub mod oracle;
pub mod pool;
pub mod register;
pub mod rpc;
pub mod runtime;
pub mod scenario;
pub mod seeds;
pub mod world;
