//! A write under way: memory to read a socket into, then one `commit`.
//!
//! Invariant: nothing of a write is visible before `commit`; dropped without it, it never was, and its bytes return.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::arena::FillToken;
use crate::block::{ABORTED, Block, BlockTail, COMMITTED, FILLING, NEVER};
use crate::error::Refused;
use crate::stats::add;
use crate::store::{Condition, Inner};

/// What a commit did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Committed {
    /// The block is published.
    Stored {
        /// It took the place of another one.
        replaced: bool,
    },
    /// A newer write or removal of the key was there: as if this write had come first and been overwritten.
    Superseded,
}

/// Fills one reserved block. `Send`; owned by the task that reads the socket.
pub struct BlockWriter {
    pub(crate) store: Arc<Inner>,
    pub(crate) block: Arc<Block>,
    pub(crate) token: FillToken,
    pub(crate) condition: Condition,
    pub(crate) only_if_newer: bool,
}

impl BlockWriter {
    /// Bytes of the whole value.
    #[must_use]
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> u64 {
        self.block.len()
    }

    /// The write this is.
    #[must_use]
    pub fn write_id(&self) -> u64 {
        self.block.write_id
    }

    /// Bytes filled so far.
    #[must_use]
    pub fn filled(&self) -> u64 {
        self.block.memory.filled()
    }

    /// Bytes still missing.
    #[must_use]
    pub fn remaining(&self) -> u64 {
        self.len() - self.filled()
    }

    /// Contiguous memory for the next bytes: the rest of the current piece (at most [`crate::PIECE_BYTES`]), empty
    /// when the block is full. What is written here counts only after `advance`.
    pub fn spare(&mut self) -> &mut [u8] {
        self.block.memory.spare(&mut self.token)
    }

    /// The next `n` bytes of `spare` are final; sums them while they are in the CPU's cache. More than `spare` holds
    /// counts as all of it.
    pub fn advance(&mut self, n: usize) {
        self.block.memory.advance(&mut self.token, n, None);
    }

    /// As `advance`, for bytes whose CRC32C the caller has just verified: they are not summed again.
    pub fn advance_with_crc(&mut self, n: usize, crc: u32) {
        self.block.memory.advance(&mut self.token, n, Some(crc));
    }

    /// Copies bytes that were read elsewhere (the rest of a header buffer); returns how many were taken.
    pub fn fill_from(&mut self, mut bytes: &[u8]) -> usize {
        let mut taken = 0;
        while !bytes.is_empty() {
            let spare = self.spare();
            let n = spare.len().min(bytes.len());
            if n == 0 {
                break;
            }
            spare[..n].copy_from_slice(&bytes[..n]);
            self.advance(n);
            bytes = &bytes[n..];
            taken += n;
        }
        taken
    }

    /// A handle that reads what is already filled, for replication while the rest arrives.
    #[must_use]
    pub fn tail(&self) -> BlockTail {
        BlockTail(Arc::clone(&self.block))
    }

    /// Sets what a protocol says only after the body: when the block expires, and when the write may happen (checked at
    /// `commit`).
    pub fn set_terms(&mut self, expires_at_ms: Option<u64>, condition: Condition) {
        let at = expires_at_ms.unwrap_or(NEVER);
        self.block.expires_at.store(at, Ordering::Relaxed);
        self.condition = condition;
    }

    /// Publishes the block. Conditions are checked again: of two `IfAbsent` writers one wins.
    ///
    /// # Errors
    /// `Incomplete` before the last byte; `Exists` or `NotFound` by the condition. The write is then gone.
    pub fn commit(self, now_ms: u64) -> Result<Committed, Refused> {
        let missing = self.remaining();
        if missing > 0 {
            return Err(Refused::Incomplete { missing });
        }
        let outcome = self
            .store
            .publish(&self.block, self.condition, self.only_if_newer, now_ms)?;
        self.block.state.store(COMMITTED, Ordering::Release);
        Ok(outcome)
    }
}

impl Drop for BlockWriter {
    fn drop(&mut self) {
        let memory = &self.block.memory;
        memory.arena().landed(memory.cost());
        if self.block.state.load(Ordering::Relaxed) == FILLING {
            self.block.state.store(ABORTED, Ordering::Release);
            add(&self.store.counters.aborted);
        }
    }
}
