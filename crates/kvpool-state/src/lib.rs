//! The replicated state of a kvpool cluster: pure, deterministic, no I/O, no clock, no randomness.

mod slot;

pub use slot::{SLOTS, slot_of};
