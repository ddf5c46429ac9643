//! The usual length of key prefixes, as this process knows it: from its own writes and from what owners reported.

use kvpool_store::{Usual, UsualLengths};
use kvpool_wire::key::prefix_of;
use smallvec::SmallVec;

/// The table; only keys of LMCache's forms have a prefix and are in it.
#[derive(Default)]
pub(crate) struct Lengths {
    table: UsualLengths,
}

type PrefixBytes = SmallVec<[u8; 256]>;

fn prefix_bytes(key: &[u8]) -> Option<PrefixBytes> {
    let prefix = prefix_of(key)?;
    let mut bytes = PrefixBytes::from_slice(prefix.head);
    bytes.extend_from_slice(prefix.tail);
    Some(bytes)
}

impl Lengths {
    /// A block of `len` bytes is written under `key`.
    pub(crate) fn wrote(&self, key: &[u8], len: u64, now_ms: u64) {
        if let Some(prefix) = prefix_bytes(key) {
            self.table.note_len(&prefix, len, now_ms);
        }
    }

    /// What a block under `key` should be like.
    pub(crate) fn usual(&self, key: &[u8], now_ms: u64) -> Usual {
        prefix_bytes(key).map_or(Usual::Unknown, |prefix| self.table.usual(&prefix, now_ms))
    }

    /// An owner's word, joined with our own: two lengths make a prefix mixed, whoever saw them.
    pub(crate) fn learn(&self, key: &[u8], told: Usual, now_ms: u64) -> Usual {
        let Some(prefix) = prefix_bytes(key) else {
            return Usual::Unknown;
        };
        let known = self.table.usual(&prefix, now_ms);
        match told {
            Usual::Unknown => return known,
            same if same == known => return known,
            Usual::Size(len) => self.table.note_len(&prefix, len, now_ms),
            Usual::Mixed => self.table.note_mixed(&prefix, now_ms),
        }
        self.table.usual(&prefix, now_ms)
    }
}
