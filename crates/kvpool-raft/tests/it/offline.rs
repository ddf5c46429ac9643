//! Looking at a directory that nobody works in: all of it is seen, all damage is found, nothing is changed.
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use bytes::Bytes;
use kvpool_raft::{Damage, FileDisk, Inspection, LogError, inspect};

use crate::common::{Direct, Journal, Node, small};

/// A member alone that has written `writes` entries and snapshots, and is stopped.
async fn filled(dir: &Path, writes: u32) {
    let disk = FileDisk::open(dir).unwrap();
    let mut config = small(1);
    config.snapshot_every = 200;
    // So that entries are purged too.
    (config.max_in_flight, config.keep_applied) = (8, 80);
    let node = Node::start(config, disk, Direct::default(), Journal::default())
        .await
        .unwrap();
    node.initialize([(1, "member-1:7400".to_string())].into())
        .await
        .unwrap();
    node.status_watch().wait_for(|s| s.is_leader()).await.unwrap();
    for i in 0..writes {
        node.propose(Bytes::from(format!("command {i} {}", "x".repeat(i as usize % 90))))
            .await
            .unwrap();
    }
    let mut watch = node.status_watch();
    watch
        .wait_for(|s| s.snapshot >= Some(u64::from(writes) - 250))
        .await
        .unwrap();
    node.shutdown().await;
    drop(node);
    // Library tasks may hold the directory for a moment longer.
    while FileDisk::open(dir).is_err() {
        tokio::time::sleep(std::time::Duration::from_millis(5)).await;
    }
}

fn look(dir: &Path) -> (Inspection, Journal) {
    let mut journal = Journal::default();
    let disk = FileDisk::open_read_only(dir).unwrap();
    let seen = inspect(&disk, &mut journal, |_| Ok(()));
    (seen, journal)
}

fn contents(dir: &Path) -> BTreeMap<String, Vec<u8>> {
    let files = fs::read_dir(dir).unwrap().map(|f| f.unwrap());
    files
        .map(|f| (f.file_name().into_string().unwrap(), fs::read(f.path()).unwrap()))
        .collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn everything_is_seen_and_nothing_is_changed() {
    let dir = tempfile::tempdir().unwrap();
    filled(dir.path(), 900).await;
    let before = contents(dir.path());
    let (seen, journal) = look(dir.path());
    assert!(seen.faults.is_empty(), "{:?}", seen.faults);
    assert_eq!(journal.len(), 900);
    let log = seen.log.unwrap();
    assert_eq!(log.last, seen.applied);
    assert!(log.purged.is_some() && log.purged < log.committed, "{log:?}");
    assert!(seen.snapshot.unwrap().last >= log.purged);
    assert_eq!(seen.members, [(1, "member-1:7400".to_string())]);
    assert_eq!(seen.vote.unwrap().copies, 2);
    assert_eq!(seen.marker.unwrap().member_id, 1);
    assert_eq!(contents(dir.path()), before);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_directory_in_use_is_refused_and_a_missing_one_is_not_made() {
    let dir = tempfile::tempdir().unwrap();
    let disk = FileDisk::open(dir.path()).unwrap();
    let refused = FileDisk::open_read_only(dir.path()).err().unwrap();
    assert!(refused.to_string().contains("in use"), "{refused}");
    drop(disk);
    let looking = FileDisk::open_read_only(dir.path()).unwrap();
    assert!(FileDisk::open(dir.path()).is_err(), "a look keeps members out");
    assert!(FileDisk::open_read_only(dir.path()).is_ok());
    drop(looking);
    let missing = dir.path().join("missing");
    assert!(FileDisk::open_read_only(&missing).is_err() && !missing.exists());
}

/// Flips one byte at a time, in every file, at the head, the tail and many places between.
#[tokio::test(flavor = "multi_thread")]
async fn damage_at_any_position_is_found_and_named() {
    let dir = tempfile::tempdir().unwrap();
    filled(dir.path(), 700).await;
    let whole = contents(dir.path());
    let mut hits = 0;
    for (name, bytes) in whole.iter().filter(|(name, _)| *name != "lock") {
        let written = bytes.iter().rposition(|b| *b != 0).unwrap() + 1;
        let places = (0..written.min(200))
            .chain((0..written).step_by(written / 60 + 1))
            .chain(written.saturating_sub(40)..written);
        for at in places {
            let mut hurt = bytes.clone();
            hurt[at] ^= 1 << (at % 7);
            fs::write(dir.path().join(name), &hurt).unwrap();
            let (seen, _) = look(dir.path());
            let found = seen.faults.first();
            match found {
                // Zeros between the two copies mean nothing, and one whole copy is enough.
                None if name == "vote" => assert_eq!(
                    seen.vote.unwrap().copies,
                    if bytes[at] == 0 && !(0..64).contains(&(at % 4096)) {
                        2
                    } else {
                        1
                    }
                ),
                Some(LogError::Damage(Damage::Corrupt { file, offset, .. })) => {
                    assert_eq!(file, name, "byte {at}");
                    // A checksum over a whole file only tells that something before it is wrong.
                    assert!(
                        name.ends_with(".snap") || *offset <= at as u64,
                        "{name} byte {at}: said {offset}"
                    );
                }
                other => panic!("{name} byte {at}: {other:?}"),
            }
            hits += 1;
        }
        fs::write(dir.path().join(name), bytes).unwrap();
    }
    assert!(hits > 600, "{hits}");
    assert!(look(dir.path()).0.faults.is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn lost_files_and_entries_that_cannot_be_read_are_named() {
    let dir = tempfile::tempdir().unwrap();
    filled(dir.path(), 700).await;
    // One that is still in the log although the snapshot holds it.
    let purged = look(dir.path()).0.log.unwrap().purged.unwrap().index;
    let bad = format!("command {} ", purged + 5);
    let mut journal = Journal::default();
    let disk = FileDisk::open_read_only(dir.path()).unwrap();
    let decodes = |command: &[u8]| match command.starts_with(bad.as_bytes()) {
        true => Err("unknown kind".to_string()),
        false => Ok(()),
    };
    let seen = inspect(&disk, &mut journal, decodes);
    let text = seen
        .faults
        .iter()
        .map(ToString::to_string)
        .collect::<Vec<_>>()
        .join("; ");
    assert!(
        text.contains(".seg at offset") && text.contains("unknown kind"),
        "{text}"
    );
    drop(disk);
    for (name, bytes) in contents(dir.path()) {
        if name == "lock" {
            continue;
        }
        fs::remove_file(dir.path().join(&name)).unwrap();
        let (seen, _) = look(dir.path());
        assert!(!seen.faults.is_empty(), "{name} is gone and nobody says so");
        fs::write(dir.path().join(&name), bytes).unwrap();
    }
    assert!(look(dir.path()).0.faults.is_empty());
    let empty = tempfile::tempdir().unwrap();
    assert!(!look(empty.path()).0.faults.is_empty());
}
