//! The usual length of a key prefix: what a native client expects of a block it has not seen.
//!
//! A stock native RESP client reads exactly the size header it expects, so a miss must be padded to the prefix's usual
//! length. The usual length is the one noted last; a prefix that saw two lengths within an hour is `Mixed`, and no
//! guess is made. Bounded: the prefix noted longest ago goes first.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use parking_lot::Mutex;

/// Prefixes remembered.
const MAX_PREFIXES: usize = 4096;
/// Longest prefix remembered, in bytes.
const MAX_PREFIX_BYTES: usize = 1024;
/// Two lengths this close together make a prefix mixed, in milliseconds.
const MIXED_WINDOW_MS: u64 = 3_600_000;

/// What is known of a prefix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Usual {
    /// Nothing.
    Unknown,
    /// Blocks have this many bytes.
    Size(u64),
    /// Two lengths were seen within an hour.
    Mixed,
}

struct Entry {
    len: u64,
    seen_ms: u64,
    /// When another length than `len` was last noted.
    other_seen_ms: Option<u64>,
    stamp: u64,
}

#[derive(Default)]
struct Table {
    by_prefix: HashMap<Arc<[u8]>, Entry>,
    by_stamp: BTreeMap<u64, Arc<[u8]>>,
    stamp: u64,
}

/// The table. Owners feed it from writes, front ends from replies.
#[derive(Default)]
pub struct UsualLengths {
    table: Mutex<Table>,
}

impl UsualLengths {
    /// An empty table.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// A block of `len` bytes was stored (or reported by its owner) under `prefix`.
    pub fn note_len(&self, prefix: &[u8], len: u64, now_ms: u64) {
        self.note(
            prefix,
            |entry| {
                if entry.len != len {
                    entry.other_seen_ms = Some(entry.seen_ms);
                    entry.len = len;
                }
                entry.seen_ms = now_ms.max(entry.seen_ms);
            },
            || Entry {
                len,
                seen_ms: now_ms,
                other_seen_ms: None,
                stamp: 0,
            },
        );
    }

    /// An owner reported the prefix as mixed.
    pub fn note_mixed(&self, prefix: &[u8], now_ms: u64) {
        self.note(
            prefix,
            |entry| entry.other_seen_ms = Some(now_ms),
            || Entry {
                len: 0,
                seen_ms: now_ms,
                other_seen_ms: Some(now_ms),
                stamp: 0,
            },
        );
    }

    fn note(&self, prefix: &[u8], update: impl FnOnce(&mut Entry), fresh: impl FnOnce() -> Entry) {
        if prefix.len() > MAX_PREFIX_BYTES {
            return;
        }
        let table = &mut *self.table.lock();
        table.stamp += 1;
        let stamp = table.stamp;
        if let Some(entry) = table.by_prefix.get_mut(prefix) {
            update(entry);
            if let Some(name) = table.by_stamp.remove(&entry.stamp) {
                table.by_stamp.insert(stamp, name);
            }
            entry.stamp = stamp;
            return;
        }
        if table.by_prefix.len() >= MAX_PREFIXES
            && let Some((_, oldest)) = table.by_stamp.pop_first()
        {
            table.by_prefix.remove(&oldest);
        }
        let name: Arc<[u8]> = prefix.into();
        let entry = Entry { stamp, ..fresh() };
        table.by_stamp.insert(stamp, Arc::clone(&name));
        table.by_prefix.insert(name, entry);
    }

    /// What a block under `prefix` should be like.
    #[must_use]
    pub fn usual(&self, prefix: &[u8], now_ms: u64) -> Usual {
        let table = self.table.lock();
        let Some(entry) = table.by_prefix.get(prefix) else {
            return Usual::Unknown;
        };
        match entry.other_seen_ms {
            Some(other) if now_ms.saturating_sub(other) < MIXED_WINDOW_MS => Usual::Mixed,
            // Only a report of "mixed" was ever heard, and it is old.
            _ if entry.len == 0 => Usual::Unknown,
            _ => Usual::Size(entry.len),
        }
    }

    /// Prefixes remembered now.
    #[must_use]
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> usize {
        self.table.lock().by_prefix.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOUR: u64 = MIXED_WINDOW_MS;

    #[test]
    fn the_last_length_counts() {
        let usual = UsualLengths::new();
        assert_eq!(usual.usual(b"m@", 0), Usual::Unknown);
        usual.note_len(b"m@", 100, 0);
        assert_eq!(usual.usual(b"m@", 5 * HOUR), Usual::Size(100));
        usual.note_len(b"m@", 200, 2 * HOUR);
        assert_eq!(usual.usual(b"m@", 2 * HOUR), Usual::Size(200));
    }

    #[test]
    fn two_lengths_within_an_hour_are_mixed_until_the_other_is_an_hour_old() {
        let usual = UsualLengths::new();
        usual.note_len(b"m@", 100, 10);
        usual.note_len(b"m@", 200, 20);
        usual.note_len(b"m@", 200, HOUR);
        assert_eq!(usual.usual(b"m@", HOUR), Usual::Mixed);
        assert_eq!(usual.usual(b"m@", HOUR + 10), Usual::Size(200));
        usual.note_len(b"m@", 100, HOUR + 20);
        assert_eq!(usual.usual(b"m@", HOUR + 20), Usual::Mixed);
    }

    #[test]
    fn a_report_of_mixed_is_believed_for_an_hour() {
        let usual = UsualLengths::new();
        usual.note_mixed(b"m@", 0);
        assert_eq!(usual.usual(b"m@", HOUR - 1), Usual::Mixed);
        assert_eq!(usual.usual(b"m@", HOUR), Usual::Unknown);
    }

    #[test]
    fn it_is_bounded_and_the_longest_unheard_goes_first() {
        let usual = UsualLengths::new();
        for i in 0..MAX_PREFIXES {
            usual.note_len(&i.to_be_bytes(), 1, 0);
        }
        usual.note_len(&0usize.to_be_bytes(), 1, 1);
        usual.note_len(b"one more", 1, 2);
        assert_eq!(usual.len(), MAX_PREFIXES);
        assert_eq!(usual.usual(&0usize.to_be_bytes(), 2), Usual::Size(1));
        assert_eq!(usual.usual(&1usize.to_be_bytes(), 2), Usual::Unknown);
        usual.note_len(&[0; MAX_PREFIX_BYTES + 1], 1, 3);
        assert_eq!(usual.len(), MAX_PREFIXES);
    }
}
