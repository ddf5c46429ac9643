//! The replicated state of a kvpool cluster: pure, deterministic, no I/O, no clock, no randomness, no HashMap, no floats.
//! Nothing here panics on any input.

pub mod command;
pub mod feed;
mod frames;
mod group;
mod membership;
pub mod records;
mod ring;
mod slot;
mod snapshot;
mod state;
pub mod table;

pub use command::{Command, DecodeError, Refusal, Response};
pub use membership::{DOWNS_WINDOW_MS, MAX_RELEASE_MS};
pub use slot::{SLOTS, slot_of};
pub use state::{Applied, State};
pub use table::{MAX_FACTOR, SlotTable};
