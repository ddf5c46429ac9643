//! The fault harness of kvpool. So far: a deterministic simulator that runs the real `kvpool-raft`.
//!
//! Three members run on one thread with virtual time, a simulated network and simulated disks, all driven by
//! one seed; an [`oracle`] judges what they do. A seed that fails is printed, and `KVPOOL_SEED=n` replays it.
//! See `OVERVIEW.md`.

pub mod alone;
pub mod cluster;
pub mod disk;
pub mod net;
pub mod oracle;
pub mod register;
pub mod runtime;
pub mod scenario;
pub mod world;
