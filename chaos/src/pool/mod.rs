//! The control plane in the simulator: the real `kvpool-state` as what members keep, the real `kvpool-policy` in the
//! leader's hands, and simulated shards, watchers and clients around them.
//!
//! ```text
//!  clients ── configure pools, read ──┐          ┌── watchers: mirror the records
//!                                     ▼          ▼
//!  shards ── hello, heartbeat, ──▶ leader ── apply ──▶ replica × 3 ──▶ rules (what must never be seen)
//!            in-sync reports       detector, placement
//! ```
//!
//! The shells here (`leader`, `shard`, `watcher`, `client`) stand for the product's actors and tasks, which need a real
//! runtime; whatever they decide is decided by the product's pure functions.

pub mod client;
pub mod leader;
pub mod replica;
pub mod rules;
pub mod scenario;
pub mod shard;
pub mod watcher;
