//! What clients do while the pool is hurt, and how their answers are judged.

pub mod blocks;
pub mod content;
pub mod history;
pub mod lmcache;
pub mod metadata;
pub mod resp;
pub mod watchers;
pub mod writer;
