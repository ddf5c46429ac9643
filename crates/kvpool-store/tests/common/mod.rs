//! Stamped values: every byte follows from the stamp and its offset, so any mix of two values is seen.
#![allow(dead_code)] // each test binary uses its own part

use kvpool_store::{BlockRef, BlockWriter, Committed, Lookup, PutSpec, Refused, Store};

/// The byte at `at` of the value with this stamp.
pub fn byte(stamp: u64, at: u64) -> u8 {
    let word = (stamp ^ (at / 8)).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    (word >> (8 * (at % 8))) as u8
}

/// Fills a slice that starts at offset `at` of the value.
pub fn fill(slice: &mut [u8], stamp: u64, at: u64) {
    for (i, b) in slice.iter_mut().enumerate() {
        *b = byte(stamp, at + i as u64);
    }
}

/// Fills the writer in steps of at most `step` bytes.
pub fn fill_writer(writer: &mut BlockWriter, stamp: u64, step: usize) {
    while writer.remaining() > 0 {
        let at = writer.filled();
        let spare = writer.spare();
        let n = spare.len().min(step);
        fill(&mut spare[..n], stamp, at);
        writer.advance(n);
    }
}

/// Stores a stamped value.
pub fn put(store: &Store, key: &[u8], len: u64, stamp: u64) -> Result<Committed, Refused> {
    let spec = PutSpec {
        len,
        write_id: stamp,
        ..PutSpec::default()
    };
    let mut writer = store.reserve(key, spec, 0)?;
    fill_writer(&mut writer, stamp, usize::MAX);
    writer.commit(0)
}

/// Panics unless the block is exactly the stamped value and its sums are right.
pub fn check(block: &BlockRef, stamp: u64, len: u64) {
    assert_eq!(block.len(), len);
    let mut at = 0;
    for slice in block.slices() {
        for (i, &b) in slice.iter().enumerate() {
            assert_eq!(b, byte(stamp, at + i as u64), "stamp {stamp} offset {at}+{i}");
        }
        at += slice.len() as u64;
    }
    assert_eq!(at, len);
    assert_eq!(block.runs().map(<[u8]>::len).sum::<usize>() as u64, len);
    assert!(block.verify(), "a piece's sum is wrong");
}

/// The block, if it is there.
pub fn get(store: &Store, key: &[u8]) -> Option<BlockRef> {
    match store.get(key, 0) {
        Lookup::Hit(block) => Some(block),
        Lookup::Miss(_) => None,
    }
}

/// Panics if the ledger breaks its promise.
pub fn check_limit(store: &Store) {
    let m = store.stats().memory;
    assert!(m.arena_used + m.metadata + m.fixed <= m.limit, "{m:?}");
    assert!(m.resident + m.metadata + m.fixed <= m.limit, "{m:?}");
    assert!(m.in_flight <= m.limit / 4 * 3, "{m:?}");
}

/// Panics unless nothing is charged any more.
pub fn check_empty(store: &Store) {
    let stats = store.stats();
    let m = stats.memory;
    assert_eq!((m.arena_used, m.metadata, m.in_flight), (0, 0, 0), "{m:?}");
    assert_eq!((stats.leased, stats.small, stats.main), (0, 0, 0));
    assert!(stats.classes.iter().all(|c| c.carved == 0 && c.used == 0));
}
