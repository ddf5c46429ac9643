//! Pure decisions of kvpool: time and everything observed are arguments. No I/O, no clock, no randomness, no HashMap, no
//! floats; nothing here panics on any input. Actors of the coordinator are shells around these functions.

pub mod failure;
pub mod group;
pub mod membership;
pub mod placement;
