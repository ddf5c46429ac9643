//! The commands that work on a coordinator's files, most of them while it does not run.

pub mod check;
