//! What a process tells about itself: logs on standard error, metrics for `/metrics`.

pub mod log;
pub mod metrics;
pub mod process;
