//! The store's half of the faults users report, by their numbers in the project's fault list.

mod common;

use std::sync::atomic::{AtomicBool, Ordering};

use common::{check, check_empty, check_limit, fill_writer, get, put};
use kvpool_store::{Committed, Condition, Existence, Lookup, Miss, PIECE_BYTES, PutSpec, Refused, Store, TailState};

const MIB: u64 = 1 << 20;

fn store(mib: u64) -> Store {
    Store::new(mib * MIB).expect("a mapping of this size")
}

fn spec(len: u64, write_id: u64) -> PutSpec<'static> {
    PutSpec {
        len,
        write_id,
        ..PutSpec::default()
    }
}

#[test]
fn o04_a_lease_keeps_a_block_until_it_ends_and_a_miss_is_clean() {
    let store = store(64);
    for i in 0..8u64 {
        put(&store, &i.to_be_bytes(), MIB, i).expect("room");
        let found = store.exists(&i.to_be_bytes(), 0, Some(1000));
        assert_eq!(
            found,
            Existence::Present {
                len: MIB,
                write_id: i,
                leased: true
            }
        );
    }
    for i in 100..300u64 {
        put(&store, &i.to_be_bytes(), MIB, i).expect("unleased blocks make room");
    }
    for i in 0..8u64 {
        check(&get(&store, &i.to_be_bytes()).expect("leased"), i, MIB);
    }
    for i in 300..700u64 {
        let mut writer = store
            .reserve(&i.to_be_bytes(), spec(MIB, i), 2000)
            .expect("leases are over");
        fill_writer(&mut writer, i, usize::MAX);
        writer.commit(2000).expect("complete");
        // Blocks in use compete with the ones that had a lease.
        assert!(matches!(store.get(&i.to_be_bytes(), 2000), Lookup::Hit(_)));
    }
    let missed = (0..8u64).filter(|i| matches!(store.get(&i.to_be_bytes(), 2000), Lookup::Miss(Miss::Evicted)));
    assert_eq!(missed.count(), 8);
}

#[test]
fn o07_readers_beyond_memory_see_whole_blocks_or_none() {
    let store = store(16);
    std::thread::scope(|scope| {
        for reader in 0..8u64 {
            let store = &store;
            scope.spawn(move || {
                for round in 0..40u64 {
                    let id = (reader * 7 + round) % 24;
                    match get(store, &id.to_be_bytes()) {
                        Some(block) => check(&block, id, MIB + id),
                        None => match put(store, &id.to_be_bytes(), MIB + id, id) {
                            Ok(_) | Err(Refused::Shed) => {}
                            Err(other) => panic!("{other}"),
                        },
                    }
                }
            });
        }
    });
    check_limit(&store);
    store.clear();
    check_empty(&store);
}

#[test]
fn o08_a_torn_write_was_never_there_and_gives_its_bytes_back() {
    let store = store(256);
    let before = store.stats().memory;
    let mut writer = store.reserve(b"k", spec(64 * MIB, 1), 0).expect("room");
    let tail = writer.tail();
    while writer.filled() < 10 * MIB {
        let n = writer.spare().len();
        writer.advance(n);
    }
    assert!(store.stats().memory.in_flight >= 64 * MIB);
    assert_eq!(store.exists(b"k", 0, None), Existence::Miss(Miss::Absent));
    drop(writer);
    assert_eq!(tail.state(), TailState::Aborted);
    drop(tail);
    let after = store.stats().memory;
    assert_eq!((after.arena_used, after.in_flight), (before.arena_used, 0));
    assert!(get(&store, b"k").is_none());
    put(&store, b"k", 64 * MIB, 2).expect("the key is free to be written");
    check(&get(&store, b"k").expect("stored"), 2, 64 * MIB);
}

#[test]
fn o08_a_commit_before_the_last_byte_is_refused() {
    let store = store(8);
    let mut writer = store.reserve(b"k", spec(1000, 1), 0).expect("room");
    writer.fill_from(&[0; 999]);
    assert_eq!(writer.commit(0), Err(Refused::Incomplete { missing: 1 }));
    assert!(get(&store, b"k").is_none());
    check_empty(&store);
}

#[test]
fn o09_of_two_writers_a_reader_sees_one_or_none() {
    const LEN: u64 = 8 * MIB;
    let store = store(128);
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let writers: Vec<_> = [0xAAu8, 0xBB]
            .map(|fill| {
                let store = &store;
                scope.spawn(move || {
                    for round in 0..60 {
                        let mut writer = match store.reserve(b"k", spec(LEN, round), 0) {
                            Ok(writer) => writer,
                            Err(Refused::Shed) => continue,
                            Err(other) => panic!("{other}"),
                        };
                        while writer.remaining() > 0 {
                            let spare = writer.spare();
                            spare.fill(fill);
                            let n = spare.len();
                            writer.advance(n);
                        }
                        writer.commit(0).expect("complete");
                    }
                })
            })
            .into_iter()
            .collect();
        let reader = scope.spawn(|| {
            let mut seen = 0;
            while !stop.load(Ordering::Relaxed) || seen == 0 {
                let Some(block) = get(&store, b"k") else {
                    continue;
                };
                seen += 1;
                let first = block.slices().next().expect("not empty")[0];
                assert!(first == 0xAA || first == 0xBB);
                assert!(block.slices().all(|slice| slice.iter().all(|&b| b == first)));
                assert!(block.verify());
            }
        });
        for writer in writers {
            writer.join().expect("writers do not panic");
        }
        stop.store(true, Ordering::Relaxed);
        reader.join().expect("no mixed bytes");
    });
    assert_eq!(store.len(), 1);
    store.clear();
    check_empty(&store);
}

#[test]
fn o09_of_two_conditional_writers_one_wins() {
    let store = store(8);
    let nx = PutSpec {
        condition: Condition::IfAbsent,
        ..spec(10, 1)
    };
    let mut first = store.reserve(b"k", nx, 0).expect("absent");
    let mut second = store.reserve(b"k", nx, 0).expect("still absent");
    fill_writer(&mut first, 1, 10);
    fill_writer(&mut second, 2, 10);
    assert_eq!(second.commit(0), Ok(Committed::Stored { replaced: false }));
    assert_eq!(first.commit(0), Err(Refused::Exists));
    assert!(matches!(store.reserve(b"k", nx, 0), Err(Refused::Exists)));
    check(&get(&store, b"k").expect("stored"), 2, 10);
    let xx = PutSpec {
        condition: Condition::IfPresent,
        ..spec(10, 1)
    };
    assert!(matches!(store.reserve(b"other", xx, 0), Err(Refused::NotFound)));
}

#[test]
fn terms_may_come_after_the_value() {
    let store = store(8);
    put(&store, b"there", 10, 1).expect("room");
    for (key, condition, outcome) in [
        (
            &b"new"[..],
            Condition::IfAbsent,
            Ok(Committed::Stored { replaced: false }),
        ),
        (b"there", Condition::IfAbsent, Err(Refused::Exists)),
        (b"gone", Condition::IfPresent, Err(Refused::NotFound)),
    ] {
        let mut writer = store.reserve(key, spec(10, 2), 0).expect("no condition yet");
        fill_writer(&mut writer, 2, 10);
        writer.set_terms(Some(50), condition);
        assert_eq!(writer.commit(0), outcome);
    }
    assert_eq!(store.ttl(b"new", 20), Some(Some(30)));
    assert!(matches!(store.get(b"new", 50), Lookup::Miss(Miss::Expired)));
    assert_eq!(store.ttl(b"there", 0), Some(None));
}

#[test]
fn writes_and_removals_that_arrive_late_are_superseded() {
    let store = store(8);
    let write = |id: u64| {
        let newer = PutSpec {
            only_if_newer: true,
            ..spec(100, id)
        };
        let mut writer = store.reserve(b"k", newer, 0).expect("room");
        fill_writer(&mut writer, id, 100);
        writer.commit(0).expect("complete")
    };
    assert_eq!(write(5), Committed::Stored { replaced: false });
    assert_eq!(write(4), Committed::Superseded);
    assert!(!store.remove(b"k", Some(4), 0), "an older removal leaves a newer block");
    check(&get(&store, b"k").expect("still there"), 5, 100);
    assert!(store.remove(b"k", Some(9), 0));
    assert_eq!(write(8), Committed::Superseded);
    assert_eq!(write(9), Committed::Superseded);
    assert!(get(&store, b"k").is_none());
    assert_eq!(write(10), Committed::Stored { replaced: false });
    assert_eq!(store.stats().counts.superseded, 3);
}

#[test]
fn o10_boundary_lengths_come_back_exact() {
    let store = store(128);
    let lengths = [
        0, 1, 255, 256, 257, 4095, 4096, 4097, 131_072, 131_073, 262_143, 262_144, 262_145,
    ];
    let lengths: Vec<u64> = lengths.into_iter().chain([16 * MIB - 1, 16 * MIB]).collect();
    for &len in &lengths {
        put(&store, &len.to_be_bytes(), len, len).expect("room");
    }
    for &len in lengths.iter().rev() {
        let block = get(&store, &len.to_be_bytes()).expect("stored");
        check(&block, len, len);
        assert_eq!(block.piece_count() as u64, len.div_ceil(PIECE_BYTES as u64));
        assert!(block.slices().all(|slice| slice.len() <= PIECE_BYTES));
    }
    store.clear();
    check_empty(&store);
}

#[test]
fn o19_ten_times_the_capacity_leaves_the_last_ones_readable() {
    const LEN: u64 = 4 * MIB;
    let store = store(64);
    for i in 0..160u64 {
        put(&store, &i.to_be_bytes(), LEN, i).expect("old blocks make room");
        check_limit(&store);
    }
    let kept = (0..160u64)
        .rev()
        .take_while(|i| get(&store, &i.to_be_bytes()).is_some());
    let kept = kept.count();
    assert!(
        kept >= 14,
        "only the last {kept} blocks of 4 MiB are readable in 64 MiB"
    );
    for i in 160 - kept as u64..160 {
        check(&get(&store, &i.to_be_bytes()).expect("readable"), i, LEN);
    }
    let counts = store.stats().counts;
    assert_eq!(counts.evicted_small + counts.evicted_main, 160 - kept as u64);
}

#[test]
fn o20_leases_never_make_a_refusal_permanent() {
    let store = store(32);
    let mut random = 0x1234_5678_9ABC_DEF1u64;
    let mut next = move || {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        random
    };
    let mut write = |id: u64, now: u64| -> bool {
        let sizes = [500, 30_000, 70_000, 262_144, 300_000, MIB, 3 * MIB];
        let len = sizes[next() as usize % sizes.len()];
        match store.reserve(&id.to_be_bytes(), spec(len, id), now) {
            Ok(mut writer) => {
                // The bytes are not the point here.
                while writer.remaining() > 0 {
                    let n = writer.spare().len();
                    writer.advance(n);
                }
                writer.commit(now).expect("complete");
                true
            }
            Err(Refused::Shed) => false,
            Err(other) => panic!("{other}"),
        }
    };
    for id in 0..200 {
        write(id, 0);
    }
    let (mut stored, mut refused) = (0, 0);
    for id in 200..10_200 {
        // A fifth of the keys is under lease at any time, as far as the budget goes.
        if id % 5 == 0 {
            let _ = store.exists(&(id - 1u64).to_be_bytes(), id, Some(600));
        }
        if write(id, id) {
            stored += 1
        } else {
            refused += 1
        }
        assert!(store.stats().leased <= 8 * MIB);
    }
    check_limit(&store);
    assert_eq!(refused, 0, "unleased blocks were there to go ({stored} stored)");
    assert!(store.stats().counts.leases_refused > 0, "the budget was reached");
    assert!((20_000..20_100).all(|id| write(id, id + 1000)));
}

#[test]
fn o20_when_all_is_held_a_put_is_refused_with_a_count_and_taken_later() {
    let store = store(8);
    let blocks: Vec<_> = (0..4u64)
        .map(|i| {
            put(&store, &i.to_be_bytes(), 3 * MIB / 2, i).expect("room");
            get(&store, &i.to_be_bytes()).expect("stored")
        })
        .collect();
    assert!(matches!(store.reserve(b"k", spec(2 * MIB, 9), 0), Err(Refused::Shed)));
    assert_eq!(store.stats().counts.refused_all_held, 1);
    for (i, block) in blocks.iter().enumerate() {
        check(block, i as u64, 3 * MIB / 2);
    }
    drop(blocks);
    put(&store, b"k", 2 * MIB, 9).expect("readers are gone");
}

#[test]
fn o23_a_length_out_of_bounds_takes_no_memory() {
    let store = store(8);
    for len in [4 * MIB + 1, 512 * MIB, u64::MAX / 2, u64::MAX] {
        let refused = store.reserve(b"k", spec(len, 1), 0).err();
        assert_eq!(refused, Some(Refused::Size { len, max: 4 * MIB }));
    }
    let long = vec![b'k'; kvpool_store::MAX_KEY_BYTES + 1];
    assert!(matches!(
        store.reserve(&long, spec(1, 1), 0),
        Err(Refused::KeyTooLong { .. })
    ));
    let meta = PutSpec {
        meta: &[0; kvpool_store::MAX_META_BYTES + 1],
        ..spec(1, 1)
    };
    assert!(matches!(store.reserve(b"k", meta, 0), Err(Refused::MetaTooLong { .. })));
    assert_eq!(store.stats().memory.resident, 0);
    check_empty(&store);
}

#[test]
fn bytes_in_flight_never_change() {
    let store = store(16);
    put(&store, b"k", 3 * MIB, 1).expect("room");
    let held = get(&store, b"k").expect("stored");
    let piece = held.piece(2).expect("complete");
    put(&store, b"k", 3 * MIB, 2).expect("overwritten");
    check(&held, 1, 3 * MIB);
    store.remove(b"k", None, 0);
    for i in 0..100u64 {
        put(&store, &i.to_be_bytes(), MIB, i).expect("room");
    }
    check(&held, 1, 3 * MIB);
    drop(held);
    for i in 0..100u64 {
        put(&store, &i.to_be_bytes(), MIB, i).expect("room");
    }
    let start = 2 * PIECE_BYTES as u64;
    assert!(
        piece
            .as_ref()
            .iter()
            .enumerate()
            .all(|(i, &b)| b == common::byte(1, start + i as u64))
    );
}

#[test]
fn many_small_blocks_do_not_keep_big_ones_out() {
    let store = store(16);
    for round in 0..3u64 {
        for i in 0..40_000u64 {
            put(&store, &(round << 32 | i).to_be_bytes(), 300 + i % 700, i).expect("small blocks make room");
        }
        check_limit(&store);
        for i in 0..12u64 {
            put(&store, &(round << 32 | 1 << 31 | i).to_be_bytes(), MIB, i)
                .expect("small blocks make room for big ones");
        }
        check_limit(&store);
    }
    store.clear();
    check_empty(&store);
}

#[test]
fn a_block_in_use_survives_a_scan() {
    let store = store(32);
    put(&store, b"hot", MIB, 1).expect("room");
    for i in 0..500u64 {
        put(&store, &i.to_be_bytes(), MIB / 2, i).expect("room");
        if i % 10 == 0 {
            assert!(get(&store, b"hot").is_some(), "lost after {i} blocks of a scan");
        }
    }
}

#[test]
fn a_replicator_reads_behind_the_writer() {
    const LEN: u64 = 12 * MIB + 77;
    let store = store(64);
    let mut writer = store.reserve(b"k", spec(LEN, 3), 0).expect("room");
    let tail = writer.tail();
    std::thread::scope(|scope| {
        let replicator = scope.spawn(move || {
            for index in 0..tail.piece_count() {
                let piece = loop {
                    if let Some(piece) = tail.piece(index) {
                        break piece;
                    }
                    std::thread::yield_now();
                };
                let start = (index * PIECE_BYTES) as u64;
                assert_eq!(crc32c::crc32c(piece.as_ref()), piece.crc());
                let same = |(i, &b): (usize, &u8)| b == common::byte(3, start + i as u64);
                assert!(piece.as_ref().iter().enumerate().all(same));
            }
        });
        fill_writer(&mut writer, 3, 10_000);
        replicator.join().expect("every piece was right when it was seen");
    });
    writer.commit(0).expect("complete");
}

#[test]
fn concurrent_use_keeps_values_whole_and_the_ledger_exact() {
    let store = store(24);
    std::thread::scope(|scope| {
        for worker in 0..6u64 {
            let store = &store;
            scope.spawn(move || {
                let mut random = 0x9E37_79B9_7F4A_7C15u64.wrapping_mul(worker + 1);
                for round in 0..400u64 {
                    random ^= random << 13;
                    random ^= random >> 7;
                    random ^= random << 17;
                    let key = (random >> 8) % 64;
                    let name = key.to_be_bytes();
                    let len = (key * 40_503) % (2 * MIB);
                    match random % 8 {
                        0..=2 => match put(store, &name, len, key) {
                            Ok(_) | Err(Refused::Shed) => {}
                            Err(other) => panic!("{other}"),
                        },
                        3..=5 => {
                            if let Some(block) = get(store, &name) {
                                check(&block, key, len);
                            }
                        }
                        6 => {
                            let _ = store.exists(&name, round, Some(20));
                        }
                        _ => {
                            store.remove(&name, None, round);
                        }
                    }
                    store.prefault_step(1 << 18);
                    check_limit(store);
                }
            });
        }
    });
    store.clear();
    check_empty(&store);
}
