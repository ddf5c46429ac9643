//! A look at a data directory that nobody works in: what is there, and what is wrong with it.
//!
//! Invariants: nothing is written; every byte that a start would trust is read and checked, and every entry is
//! given to the state machine; damage in one file does not hide what the others hold.

use std::io::{self, Read};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use openraft::EntryPayload;

use crate::config::MemberId;
use crate::disk::{Disk, DiskFile};
use crate::error::{Damage, LogError};
use crate::log::{self, LogOptions, Replayed, TMP_SUFFIX};
use crate::machine::StateMachine;
use crate::marker::Marker;
use crate::snapshot::{self, Held};
use crate::types::{LogId, Membership, Vote};

/// Entries read at once.
const READ_BYTES: usize = 4 << 20;

/// A place in the log: the term of an entry's leader, and its index.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Position {
    /// The term.
    pub term: u64,
    /// The index; the first entry has 0.
    pub index: u64,
}

impl From<LogId> for Position {
    fn from(id: LogId) -> Self {
        Position {
            term: id.leader_id.term,
            index: id.index,
        }
    }
}

/// The newest vote.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct VoteSeen {
    /// The term of the vote, if one was ever given, and whom it is for.
    pub vote: Option<(u64, MemberId)>,
    /// Copies that can be read, of two.
    pub copies: usize,
}

/// The log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LogSeen {
    /// Segment files.
    pub segments: usize,
    /// The last entry.
    pub last: Option<Position>,
    /// The last entry known to be committed. Later ones may have been committed too.
    pub committed: Option<Position>,
    /// The last entry that was removed because a snapshot holds it.
    pub purged: Option<Position>,
    /// Bytes of a torn last batch, which a start cuts off: it was never acknowledged.
    pub torn_bytes: u64,
}

/// The newest snapshot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SnapshotSeen {
    /// File name.
    pub file: String,
    /// The last entry in it.
    pub last: Option<Position>,
    /// Bytes of the file.
    pub bytes: u64,
}

/// What a data directory holds. An absent part was damaged or is not there; `faults` says which.
#[derive(Debug, Default)]
pub struct Inspection {
    /// Whose directory it is.
    pub marker: Option<Marker>,
    /// The vote.
    pub vote: Option<VoteSeen>,
    /// The log.
    pub log: Option<LogSeen>,
    /// The newest snapshot.
    pub snapshot: Option<SnapshotSeen>,
    /// The last entry that the state machine was given. `None` as well when the state could not be rebuilt at all.
    pub applied: Option<Position>,
    /// The members and their addresses, as of that entry.
    pub members: Vec<(MemberId, String)>,
    /// Bytes of all files.
    pub bytes: u64,
    /// Files that a crash left half made; a start removes them.
    pub leftovers: Vec<String>,
    /// Everything that keeps a member from starting here.
    pub faults: Vec<LogError>,
}

impl Inspection {
    fn keep<T>(&mut self, found: Result<T, LogError>) -> Option<T> {
        found.map_err(|e| self.faults.push(e)).ok()
    }
}

/// Reads everything in the directory and rebuilds the state in `machine`, to the last entry that is there, whether
/// it is known to be committed or not. `decodes` judges a command that is not applied because the snapshot holds it.
pub fn inspect<D: Disk, S: StateMachine>(
    disk: &D,
    machine: &mut S,
    decodes: impl Fn(&[u8]) -> Result<(), String>,
) -> Inspection {
    let mut seen = Inspection::default();
    if let Some(names) = list(disk, &mut seen)
        && names.is_empty()
    {
        seen.faults.push(Damage::Missing("any file".to_string()).into());
        return seen;
    }
    match Marker::read(disk) {
        Ok(Some(marker)) => seen.marker = Some(marker),
        Ok(None) => seen.faults.push(Damage::MarkerLost.into()),
        Err(e) => seen.faults.push(e),
    }
    let vote = seen.keep(log::read_vote(disk));
    seen.vote = vote.map(|(vote, copies)| vote_seen(vote, copies));
    let held = seen.keep(snapshot::newest(disk)).and_then(|(held, _)| held);
    seen.snapshot = held.as_ref().map(|held| SnapshotSeen {
        file: held.snapshot.name.clone(),
        last: held.meta.last_log_id.map(Position::from),
        bytes: held.snapshot.len,
    });
    let log = seen.keep(log::scan(disk, &LogOptions::default()));
    seen.log = log.as_ref().map(log_seen);
    if let Some(log) = log {
        let mut rebuild = Rebuild {
            machine,
            applied: None,
            members: Membership::default(),
        };
        let rebuilt = rebuild.run(held.as_ref(), &log, decodes);
        seen.applied = rebuild.applied.map(Position::from);
        seen.members = rebuild
            .members
            .nodes()
            .map(|(id, node)| (*id, node.addr.clone()))
            .collect();
        seen.keep(rebuilt);
    }
    seen
}

fn list<D: Disk>(disk: &D, seen: &mut Inspection) -> Option<Vec<String>> {
    let names = seen.keep(disk.list().map_err(LogError::io("list the data directory")))?;
    for name in &names {
        let len = disk.open(name).and_then(|file| file.len());
        seen.bytes += len.unwrap_or(0);
    }
    seen.leftovers = names
        .iter()
        .filter(|name| name.ends_with(TMP_SUFFIX))
        .cloned()
        .collect();
    Some(names)
}

fn vote_seen(vote: Option<Vote>, copies: [bool; 2]) -> VoteSeen {
    VoteSeen {
        vote: vote.map(|vote| (vote.leader_id.term, vote.leader_id.voted_for)),
        copies: copies.iter().filter(|whole| **whole).count(),
    }
}

fn log_seen<F>(log: &Replayed<F>) -> LogSeen {
    LogSeen {
        segments: log.segments.len(),
        last: log.index.last.map(Position::from),
        committed: log.index.committed.map(Position::from),
        purged: log.index.purged.map(Position::from),
        torn_bytes: log.torn.map_or(0, |(from, to)| to - from),
    }
}

/// The state on its way from snapshot and log.
struct Rebuild<'a, S> {
    machine: &'a mut S,
    applied: Option<LogId>,
    members: Membership,
}

impl<S: StateMachine> Rebuild<'_, S> {
    fn run<F: DiskFile>(
        &mut self,
        held: Option<&Held<F>>,
        log: &Replayed<F>,
        decodes: impl Fn(&[u8]) -> Result<(), String>,
    ) -> Result<(), LogError> {
        if let Some(held) = held {
            self.restore(held)?;
        }
        if log.index.purged > self.applied {
            let upto = log.index.purged.map_or(0, |id| id.index);
            return Err(Damage::Missing(format!("a snapshot of the entries up to {upto}")).into());
        }
        let files = log.segments.iter().map(|s| (s.number, Arc::clone(&s.file))).collect();
        let mut from = log.index.purged.map_or(0, |id| id.index + 1);
        while from < log.index.next() {
            let found = log.index.lookup(from, log.index.next(), READ_BYTES);
            let read = found.len() as u64;
            for lookup in found {
                let place = lookup.place();
                let entry = log::load(lookup, &files).map_err(LogError::io(format!("read entry {from}")))?;
                let id = entry.log_id;
                let done = self.take(id, entry.payload, &decodes);
                done.map_err(|what| log::corrupt_entry(place, &format!("entry {}: {what}", id.index)))?;
            }
            if read == 0 {
                return Err(Damage::Missing(format!("entry {from}")).into());
            }
            from += read;
        }
        Ok(())
    }

    fn restore<F: DiskFile>(&mut self, held: &Held<F>) -> Result<(), LogError> {
        let machine = &mut *self.machine;
        let mut state = held.snapshot.state();
        let restored = catch_unwind(AssertUnwindSafe(|| {
            machine.restore(&mut state)?;
            match state.read(&mut [0])? {
                0 => Ok(()),
                _ => Err(io::Error::other("bytes follow the state")),
            }
        }));
        restored
            .unwrap_or_else(|_| Err(io::Error::other("a panic")))
            .map_err(|e| Damage::Corrupt {
                file: held.snapshot.name.clone(),
                offset: held.snapshot.body_at(),
                what: format!("the state in it cannot be read: {e}"),
            })?;
        self.applied = held.meta.last_log_id;
        self.members = held.meta.last_membership.membership().clone();
        Ok(())
    }

    fn take(
        &mut self,
        id: LogId,
        payload: crate::types::Payload,
        decodes: impl Fn(&[u8]) -> Result<(), String>,
    ) -> Result<(), String> {
        if self.applied.is_some_and(|applied| id.index <= applied.index) {
            return match payload {
                EntryPayload::Normal(command) => decodes(&command.0),
                EntryPayload::Blank | EntryPayload::Membership(_) => Ok(()),
            };
        }
        match payload {
            EntryPayload::Blank => {}
            EntryPayload::Normal(command) => {
                let machine = &mut *self.machine;
                let apply = AssertUnwindSafe(|| machine.apply(id.index, id.leader_id.term, &command.0));
                catch_unwind(apply)
                    .map_err(|_| "a panic".to_string())?
                    .map_err(|e| e.to_string())?;
            }
            EntryPayload::Membership(members) => self.members = members,
        }
        self.applied = Some(id);
        Ok(())
    }
}
