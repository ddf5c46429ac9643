//! Whole members on real files. One binary, because each would compile the consensus library anew.
#![allow(clippy::unwrap_used, reason = "all of it is tests")]

mod cluster;
mod common;
mod kill;
mod members;
mod messages;
mod offline;
