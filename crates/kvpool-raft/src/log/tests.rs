//! The log on real files: the library's own suite, cuts at every byte, flips of every bit, and a model.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use bytes::Bytes;
use futures::channel::oneshot;
use futures::executor::block_on;
use openraft::testing::log::{StoreBuilder, Suite};
use openraft::vote::RaftLeaderId;
use openraft::{EntryPayload, StorageError};
use tempfile::TempDir;

use super::*;
use crate::Tokio;
use crate::apply::Machine;
use crate::disk::FileDisk;
use crate::machine::{SnapshotWriter, StateMachine, StopMember};
use crate::snapshot::SnapshotStore;
use crate::types::{LeaderId, Opaque, Types};

const MARKER: fn() -> Marker = || Marker {
    cluster_id: "test".to_string(),
    member_id: 1,
};

fn options() -> LogOptions {
    LogOptions {
        segment_bytes: 4096,
        batch_bytes: 1024,
        cache_bytes: 1024,
    }
}

fn open(dir: &Path) -> Result<Log<FileDisk>, LogError> {
    // A closed log's writer thread may hold the lock a moment longer.
    let disk = loop {
        match FileDisk::open(dir) {
            Ok(disk) => break disk,
            Err(_) => std::thread::yield_now(),
        }
    };
    Log::open(&disk, &MARKER(), &options())
}

fn id(term: u64, index: u64) -> LogId {
    LogId::new_term_index(term, index)
}

fn entry(term: u64, index: u64, payload: &[u8]) -> LogEntry {
    LogEntry {
        log_id: id(term, index),
        payload: EntryPayload::Normal(Opaque(Bytes::copy_from_slice(payload))),
    }
}

/// A payload without zeros, so that no sector of it looks unwritten.
fn text(index: u64, len: usize) -> Vec<u8> {
    (0..len).map(|i| b'a' + ((index as usize + i) % 26) as u8).collect()
}

fn append(log: &Log<FileDisk>, entries: Vec<LogEntry>) -> io::Result<()> {
    let (tx, rx) = oneshot::channel();
    block_on(log.append(entries, Box::new(move |result| drop(tx.send(result)))))?;
    block_on(rx).unwrap()
}

fn all(log: &Log<FileDisk>) -> Vec<LogEntry> {
    block_on(log.read(0, u64::MAX, usize::MAX)).unwrap()
}

fn last(log: &Log<FileDisk>) -> Option<LogId> {
    log.shared.lock().index.last
}

fn close(log: Log<FileDisk>) {
    block_on(log.close()).unwrap();
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for file in fs::read_dir(from).unwrap() {
        let file = file.unwrap();
        fs::copy(file.path(), to.join(file.file_name())).unwrap();
    }
}

fn segment(dir: &Path, number: u64) -> PathBuf {
    dir.join(segment::segment_name(number))
}

fn written_end(bytes: &[u8]) -> usize {
    bytes.iter().rposition(|b| *b != 0).unwrap() + 1
}

struct Counter(u64);

impl StateMachine for Counter {
    fn apply(&mut self, _: u64, _: u64, _: &[u8]) -> Result<Bytes, StopMember> {
        self.0 += 1;
        Ok(Bytes::new())
    }
    fn snapshot(&self) -> SnapshotWriter {
        let n = self.0;
        Box::new(move |out| out.write_all(&n.to_le_bytes()))
    }
    fn restore(&mut self, from: &mut dyn io::Read) -> io::Result<()> {
        let mut bytes = [0; 8];
        from.read_exact(&mut bytes)?;
        self.0 = u64::from_le_bytes(bytes);
        Ok(())
    }
}

struct Builder;
type C = Types<Tokio>;

impl StoreBuilder<C, LogStore<FileDisk>, Machine<Counter, FileDisk>, TempDir> for Builder {
    async fn build(&self) -> Result<(TempDir, LogStore<FileDisk>, Machine<Counter, FileDisk>), StorageError<C>> {
        let dir = tempfile::tempdir().unwrap();
        let disk = FileDisk::open(dir.path()).unwrap();
        let log = Log::open(&disk, &MARKER(), &options()).unwrap();
        log.shared.lock().index.any_start = true;
        let snapshots = SnapshotStore::open(&disk).unwrap();
        let machine = Machine::new(Counter(0), snapshots, tokio::sync::watch::Sender::new(None));
        Ok((dir, LogStore(log), machine))
    }
}

#[test]
fn the_librarys_suite_passes() {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    runtime.block_on(Suite::test_all(Builder)).unwrap();
}

#[test]
fn gaps_and_falling_terms_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let log = open(dir.path()).unwrap();
    append(&log, vec![entry(2, 0, b"a"), entry(2, 1, b"b")]).unwrap();
    assert!(append(&log, vec![entry(2, 3, b"d")]).is_err());
    assert!(append(&log, vec![entry(1, 2, b"c")]).is_err());
    assert!(append(&log, vec![entry(2, 1, b"b")]).is_err());
    assert_eq!(last(&log), Some(id(2, 1)));
    append(&log, vec![entry(3, 2, b"c")]).unwrap();
    close(log);
}

#[test]
fn a_log_cut_at_any_byte_of_its_last_batch_loses_just_that_batch() {
    let dir = tempfile::tempdir().unwrap();
    let log = open(dir.path()).unwrap();
    for i in 0..3 {
        append(&log, vec![entry(1, i, &text(i, 120))]).unwrap();
    }
    close(log);
    let before = written_end(&fs::read(segment(dir.path(), 1)).unwrap());
    let log = open(dir.path()).unwrap();
    append(&log, (3..6).map(|i| entry(1, i, &text(i, 100 + i as usize))).collect()).unwrap();
    close(log);
    let whole = fs::read(segment(dir.path(), 1)).unwrap();
    let end = written_end(&whole);
    for cut in before..end {
        for shorten in [false, true] {
            let hurt = tempfile::tempdir().unwrap();
            copy(dir.path(), hurt.path());
            let mut bytes = whole.clone();
            bytes[cut..].fill(0);
            bytes.truncate(if shorten { cut } else { bytes.len() });
            fs::write(segment(hurt.path(), 1), bytes).unwrap();
            let log = open(hurt.path()).unwrap_or_else(|e| panic!("cut at {cut}: {e}"));
            assert_eq!(last(&log), Some(id(1, 2)), "cut at {cut}");
            append(&log, vec![entry(2, 3, b"new")]).unwrap();
            close(log);
            let log = open(hurt.path()).unwrap();
            assert_eq!((last(&log), all(&log).len()), (Some(id(2, 3)), 4));
            close(log);
        }
    }
}

#[test]
fn a_batch_that_misses_a_sector_is_cut() {
    let dir = tempfile::tempdir().unwrap();
    let log = open(dir.path()).unwrap();
    append(&log, vec![entry(1, 0, &text(0, 60))]).unwrap();
    append(&log, vec![entry(1, 1, &text(1, 2000))]).unwrap();
    close(log);
    let whole = fs::read(segment(dir.path(), 1)).unwrap();
    let start = whole.len().min(128 + 32 + 28 + 60 + 1);
    for sector in start.div_ceil(512)..written_end(&whole).div_ceil(512) {
        let hurt = tempfile::tempdir().unwrap();
        copy(dir.path(), hurt.path());
        let mut bytes = whole.clone();
        bytes[sector * 512..(sector + 1) * 512].fill(0);
        fs::write(segment(hurt.path(), 1), bytes).unwrap();
        let log = open(hurt.path()).unwrap();
        assert_eq!(last(&log), Some(id(1, 0)), "sector {sector}");
        close(log);
    }
}

#[test]
fn a_flip_of_any_bit_stops_the_member_and_names_the_place() {
    let dir = tempfile::tempdir().unwrap();
    let log = open(dir.path()).unwrap();
    for i in 0..4 {
        append(
            &log,
            vec![entry(1, 2 * i, &text(i, 90)), entry(1, 2 * i + 1, &text(i, 50))],
        )
        .unwrap();
    }
    close(log);
    let name = segment::segment_name(1);
    let whole = fs::read(dir.path().join(&name)).unwrap();
    for at in 0..written_end(&whole) {
        let mut bytes = whole.clone();
        bytes[at] ^= 1 << (at % 8);
        fs::write(dir.path().join(&name), bytes).unwrap();
        match open(dir.path()) {
            Err(LogError::Damage(Damage::Corrupt { file, offset, .. })) => {
                assert_eq!(file, name);
                assert!(offset <= at as u64, "flip at {at} reported at {offset}");
            }
            other => panic!("flip at {at}: {:?}", other.err()),
        }
    }
    fs::write(dir.path().join(&name), &whole).unwrap();
    assert_eq!(all(&open(dir.path()).unwrap()).len(), 8);
}

#[test]
fn damage_in_an_older_segment_or_its_absence_stops_the_member() {
    let dir = tempfile::tempdir().unwrap();
    let log = open(dir.path()).unwrap();
    for i in 0..60 {
        append(&log, vec![entry(1, i, &text(i, 200))]).unwrap();
    }
    close(log);
    let first = fs::read(segment(dir.path(), 1)).unwrap();
    for cut in [200, 1000, written_end(&first) - 1] {
        let mut bytes = first.clone();
        bytes[cut..].fill(0);
        fs::write(segment(dir.path(), 1), bytes).unwrap();
        assert!(
            matches!(open(dir.path()), Err(LogError::Damage(Damage::Corrupt { .. }))),
            "cut at {cut}"
        );
    }
    fs::write(segment(dir.path(), 1), first).unwrap();
    assert!(open(dir.path()).is_ok());
    let second = fs::read(segment(dir.path(), 2)).unwrap();
    fs::remove_file(segment(dir.path(), 2)).unwrap();
    assert!(matches!(open(dir.path()), Err(LogError::Damage(Damage::Missing(_)))));
    fs::write(segment(dir.path(), 2), second).unwrap();
    fs::remove_file(segment(dir.path(), 1)).unwrap();
    assert!(matches!(open(dir.path()), Err(LogError::Damage(Damage::Missing(_)))));
}

#[test]
fn truncated_entries_never_come_back() {
    let dir = tempfile::tempdir().unwrap();
    let log = open(dir.path()).unwrap();
    append(&log, (0..8).map(|i| entry(3, i, &text(i, 40))).collect()).unwrap();
    block_on(log.truncate_after(Some(id(3, 4)))).unwrap();
    // Lower than the terms that were cut off: an old leader's entries that a new leader passes on.
    append(&log, vec![entry(3, 5, &text(9, 40))]).unwrap();
    close(log);
    let log = open(dir.path()).unwrap();
    assert_eq!(last(&log), Some(id(3, 5)));
    assert_eq!(all(&log)[5], entry(3, 5, &text(9, 40)));
    assert!(
        block_on(log.truncate_after(Some(id(2, 3)))).is_err(),
        "another entry is there"
    );
    block_on(log.truncate_after(Some(id(3, 9)))).unwrap();
    assert_eq!(last(&log), Some(id(3, 5)), "nothing lies after that");
    block_on(log.truncate_after(None)).unwrap();
    append(&log, vec![entry(1, 0, b"x")]).unwrap();
    close(log);
    let log = open(dir.path()).unwrap();
    assert_eq!(all(&log), vec![entry(1, 0, b"x")]);
    close(log);
}

#[test]
fn purged_segments_are_deleted_and_the_rest_is_read_from_disk() {
    let dir = tempfile::tempdir().unwrap();
    let log = open(dir.path()).unwrap();
    for i in 0..100 {
        append(&log, vec![entry(1, i, &text(i, 150))]).unwrap();
    }
    let segments = || {
        fs::read_dir(dir.path())
            .unwrap()
            .filter(|f| f.as_ref().unwrap().path().extension().is_some_and(|e| e == "seg"))
            .count()
    };
    let before = segments();
    assert!(log.shared.lock().index.cache_bytes() <= 1024, "the cache is bounded");
    block_on(log.save_committed(id(1, 90))).unwrap();
    block_on(log.purge(id(1, 80))).unwrap();
    let read = all(&log);
    assert_eq!((read.len(), read[0].clone()), (19, entry(1, 81, &text(81, 150))));
    let some = block_on(log.read(85, 95, 500)).unwrap();
    assert_eq!(some.iter().map(|e| e.log_id.index).collect::<Vec<_>>(), [85, 86]);
    assert_eq!(block_on(log.read(85, 95, 1)).unwrap().len(), 1, "never nothing");
    close(log);
    assert!(segments() < before - 2);
    let log = open(dir.path()).unwrap();
    let marks = log.shared.lock();
    assert_eq!(
        (marks.index.purged, marks.index.committed),
        (Some(id(1, 80)), Some(id(1, 90)))
    );
    drop(marks);
    assert_eq!(all(&log).len(), 19);
    // A snapshot came in that is ahead of the log.
    block_on(log.purge(id(4, 500))).unwrap();
    assert_eq!(last(&log), Some(id(4, 500)));
    append(&log, vec![entry(5, 501, b"next")]).unwrap();
    close(log);
    let log = open(dir.path()).unwrap();
    assert_eq!(all(&log), vec![entry(5, 501, b"next")]);
    close(log);
}

#[test]
fn a_flip_under_a_running_member_is_noticed_on_reading() {
    let dir = tempfile::tempdir().unwrap();
    let log = open(dir.path()).unwrap();
    for i in 0..12 {
        append(&log, vec![entry(1, i, &text(i, 200))]).unwrap();
    }
    let path = segment(dir.path(), 1);
    let mut bytes = fs::read(&path).unwrap();
    bytes[300] ^= 4;
    fs::write(&path, bytes).unwrap();
    let e = block_on(log.read(0, 3, usize::MAX)).unwrap_err().to_string();
    assert!(e.contains(".seg") && e.contains("checksum"), "{e}");
    close(log);
}

#[test]
fn the_vote_survives_any_one_damaged_copy() {
    let dir = tempfile::tempdir().unwrap();
    let vote = |term, node| Vote {
        leader_id: LeaderId::new(term, node),
        committed: term % 2 == 0,
    };
    let log = open(dir.path()).unwrap();
    assert_eq!(log.shared.lock().index.vote, None);
    for term in 1..=4 {
        block_on(log.save_vote(vote(term, term + 10))).unwrap();
    }
    close(log);
    let path = dir.path().join("vote");
    let whole = fs::read(&path).unwrap();
    for at in (0..64).chain(4096..4160) {
        let mut bytes = whole.clone();
        bytes[at] ^= 1 << (at % 8);
        fs::write(&path, &bytes).unwrap();
        let log = open(dir.path()).unwrap();
        assert_eq!(log.shared.lock().index.vote, Some(vote(4, 14)), "flip at {at}");
        close(log);
        assert_eq!(fs::read(&path).unwrap(), whole, "the other copy was mended");
    }
    let mut bytes = whole.clone();
    bytes[20] ^= 1;
    bytes[4120] ^= 1;
    fs::write(&path, bytes).unwrap();
    assert!(matches!(
        open(dir.path()),
        Err(LogError::Damage(Damage::Corrupt { .. }))
    ));
    fs::remove_file(&path).unwrap();
    assert!(matches!(open(dir.path()), Err(LogError::Damage(Damage::Missing(_)))));
}

#[test]
fn a_damaged_or_lost_marker_is_noticed() {
    let dir = tempfile::tempdir().unwrap();
    let log = open(dir.path()).unwrap();
    append(&log, vec![entry(1, 0, b"x")]).unwrap();
    close(log);
    let path = dir.path().join("marker");
    let whole = fs::read(&path).unwrap();
    for at in 0..whole.len() {
        let mut bytes = whole.clone();
        bytes[at] ^= 1 << (at % 7);
        fs::write(&path, bytes).unwrap();
        assert!(
            matches!(open(dir.path()), Err(LogError::Damage(Damage::Corrupt { .. }))),
            "flip at {at}"
        );
        fs::write(&path, &whole[..at]).unwrap();
        assert!(
            matches!(open(dir.path()), Err(LogError::Damage(Damage::Corrupt { .. }))),
            "cut at {at}"
        );
    }
    fs::remove_file(&path).unwrap();
    assert!(matches!(open(dir.path()), Err(LogError::Damage(Damage::MarkerLost))));
}

/// Random operations against a plain map, reopening at random.
#[test]
fn the_log_agrees_with_a_model() {
    let seed = std::env::var("KVPOOL_SEED").ok().map_or(7, |s| s.parse().unwrap());
    println!("KVPOOL_SEED={seed}");
    let mut state: u64 = seed;
    let mut random = move |n: u64| {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % n
    };
    let dir = tempfile::tempdir().unwrap();
    let mut log = open(dir.path()).unwrap();
    let mut model: BTreeMap<u64, LogEntry> = BTreeMap::new();
    let mut purged: Option<LogId> = None;
    let mut term = 1;
    for step in 0..1500 {
        let next = model
            .last_key_value()
            .map(|(i, _)| *i)
            .max(purged.map(|p| p.index))
            .map_or(0, |i| i + 1);
        match random(20) {
            0..12 => {
                let batch: Vec<_> = (0..1 + random(6))
                    .map(|i| {
                        entry(
                            term,
                            next + i,
                            &text(step, random(if step % 50 == 0 { 3000 } else { 200 }) as usize),
                        )
                    })
                    .collect();
                model.extend(batch.iter().map(|e| (e.log_id.index, e.clone())));
                append(&log, batch).unwrap();
            }
            12..14 => {
                let keep = random(next + 1).max(purged.map_or(0, |p| p.index + 1));
                let after = keep
                    .checked_sub(1)
                    .and_then(|i| model.get(&i).map(|e| e.log_id).or(purged.filter(|p| p.index == i)));
                if after.is_some() || purged.is_none() && keep == 0 {
                    model.split_off(&keep);
                    block_on(log.truncate_after(after)).unwrap();
                    term += 1;
                }
            }
            14..16 => {
                if let Some((_, e)) = model.iter().nth(random(40) as usize) {
                    let upto = e.log_id;
                    model = model.split_off(&(upto.index + 1));
                    purged = Some(upto);
                    block_on(log.purge(upto)).unwrap();
                }
            }
            16 => {
                if let Some((_, e)) = model.last_key_value() {
                    block_on(log.save_committed(e.log_id)).unwrap();
                }
            }
            17 => {
                close(log);
                log = open(dir.path()).unwrap();
            }
            _ => assert_eq!(all(&log), model.values().cloned().collect::<Vec<_>>(), "step {step}"),
        }
        let now = log.shared.lock().index.purged;
        assert_eq!(now, purged, "step {step}");
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

/// Bytes of format version 1, made by an independent program. They must never change.
#[test]
fn the_format_is_what_it_was() {
    let mut batch = format::BatchBuilder::new();
    batch.entry(&entry(3, 7, b"hello"));
    batch.truncate(Some(id(3, 7)));
    batch.committed(id(3, 6));
    let batch = batch.finish(9);
    let expected = "c84f6fbb590000000900000000000000030000000000000000000000000000a5050000004986e3b70300000000000000 \
         07000000000000000200000068656c6c6f0000000084690ea20300000000000000070000000000000010000000000000 \
         00359e182c03000000000000000600000000000000120000005a";
    assert_eq!(hex(&batch), expected.replace(' ', ""));
    let header = SegmentHeader {
        number: 4,
        first_seq: 9,
        previous: Some(id(3, 6)),
        purged: None,
        committed: Some(id(2, 5)),
    };
    let expected = "4b56524c4f47000104000000000000000900000000000000010300000000000000060000000000000000000000000000 \
         000000000000000000000102000000000000000500000000000000000000000000000000000000000000000000000000 \
         000000000000000000000000000000000000000000000000000000002230a6d1";
    assert_eq!(hex(&header.encode()), expected.replace(' ', ""));
    assert_eq!(SegmentHeader::decode(&header.encode()), Some(header));
    let dir = tempfile::tempdir().unwrap();
    let log = open(dir.path()).unwrap();
    for term in [1, 1, 1, 2] {
        block_on(log.save_vote(Vote {
            leader_id: LeaderId::new(term, 2),
            committed: false,
        }))
        .unwrap();
    }
    block_on(log.save_vote(Vote {
        leader_id: LeaderId::new(3, 2),
        committed: true,
    }))
    .unwrap();
    close(log);
    let expected = "4b5652564f54450105000000000000000101000000000000030000000000000002000000000000000000000000000000 \
         000000000000000000000000df2d4afc";
    let expected = expected.replace(' ', "");
    let file = fs::read(dir.path().join("vote")).unwrap();
    assert_eq!((hex(&file[..64]), hex(&file[4096..4160])), (expected.clone(), expected));
    let marker = fs::read_to_string(dir.path().join("marker")).unwrap();
    assert_eq!(marker, "kvpool-raft 1\ncluster test\nmember 1\ncrc32c 9edc5fb5\n");
}
