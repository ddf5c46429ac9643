//! Numbers the shell publishes: counters since the start and a snapshot of bytes.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::arena::{ClassBytes, MemoryBytes};

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        #[derive(Default)]
        pub(crate) struct Counters { $(pub(crate) $name: AtomicU64,)* }

        /// Counts since the store was made.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct Counts { $($(#[$doc])* pub $name: u64,)* }

        impl Counters {
            pub(crate) fn read(&self) -> Counts {
                Counts { $($name: self.$name.load(Ordering::Relaxed),)* }
            }
        }
    };
}

counters! {
    /// Blocks published.
    stored,
    /// Commits that took the place of a block.
    replaced,
    /// Commits dropped because a newer write (or removal) of the key was there.
    superseded,
    /// Blocks evicted from the probation queue.
    evicted_small,
    /// Blocks evicted from the main queue.
    evicted_main,
    /// Blocks dropped because their time was over.
    expired,
    /// Blocks removed by key.
    removed,
    /// Blocks dropped with their slot or by `clear`.
    dropped,
    /// Leases taken or renewed.
    leases_taken,
    /// Leases refused because the budget was used up.
    leases_refused,
    /// Writes refused for their size, key or metadata.
    refused_size,
    /// Writes refused because no room could be made.
    refused_shed,
    /// Writes refused because everything evictable was leased or being read.
    refused_all_held,
    /// Writers dropped before commit.
    aborted,
}

pub(crate) fn add(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}

/// A snapshot; the parts are taken one after another.
#[derive(Clone, Debug, Default)]
pub struct Stats {
    /// Bytes of the arena and around it.
    pub memory: MemoryBytes,
    /// Use of the tail classes, smallest first.
    pub classes: Vec<ClassBytes>,
    /// Bytes of leased blocks.
    pub leased: u64,
    /// Blocks published.
    pub blocks: u64,
    /// Bytes of blocks in the probation queue.
    pub small: u64,
    /// Bytes of blocks in the main queue.
    pub main: u64,
    /// Counters.
    pub counts: Counts,
}
