//! A simulated disk: it forgets what was not synced, tears what was being written, and fails on demand.
//!
//! Invariants. A crash keeps everything that was synced. Of the rest it keeps any subset of the sectors that
//! were written, may tear inside the last one it keeps, and keeps any prefix of the name changes. Tests may make it lie
//! about syncs or forget votes, to show that the oracle notices.

use std::collections::{BTreeMap, BTreeSet};
use std::future::Future;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures::future::BoxFuture;
use kvpool_raft::{Disk, DiskFile};

use crate::world;

const SECTOR: usize = 512;

#[derive(Default, Clone)]
struct Inode {
    /// What a crash keeps for certain.
    durable: Vec<u8>,
    /// What reads see.
    current: Vec<u8>,
    /// Sectors in which they differ.
    dirty: BTreeSet<usize>,
}

#[derive(Clone)]
enum NameChange {
    Link(String, u64),
    Unlink(String),
    Rename(String, String),
}

/// What may go wrong on a disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Faults {
    /// Operations until the power goes, counted from now.
    pub crash_after: Option<u64>,
    /// Operations until one fails with EIO.
    pub fail_after: Option<u64>,
    /// Bytes the disk holds; beyond them writes fail with ENOSPC.
    pub capacity: Option<u64>,
    /// Syncs return without having done anything.
    pub lying: bool,
    /// Every turn of its writer takes up to this many milliseconds more.
    pub slow: u64,
}

#[derive(Default)]
struct State {
    inodes: BTreeMap<u64, Inode>,
    names: BTreeMap<String, u64>,
    durable_names: BTreeMap<String, u64>,
    changes: Vec<NameChange>,
    next_inode: u64,
    faults: Faults,
    operations: u64,
    /// The power is off: everything fails until [`SimDisk::power_on`].
    off: bool,
    /// The vote file as it was first synced, before any vote.
    no_vote: Option<Vec<u8>>,
    /// The disk failed an operation on purpose.
    failed: bool,
    /// The disk was full at some time since the last start.
    full: bool,
}

/// One member's disk; it outlives the member's processes.
#[derive(Clone, Default)]
pub struct SimDisk {
    state: Arc<Mutex<State>>,
}

/// An open file.
pub struct SimFile {
    disk: SimDisk,
    inode: u64,
}

fn apply(names: &mut BTreeMap<String, u64>, change: &NameChange) {
    match change {
        NameChange::Link(name, inode) => {
            names.insert(name.clone(), *inode);
        }
        NameChange::Unlink(name) => {
            names.remove(name);
        }
        NameChange::Rename(from, to) => {
            if let Some(inode) = names.remove(from) {
                names.insert(to.clone(), inode);
            }
        }
    }
}

impl State {
    /// Counts an operation; fails when the power is off or goes, or when it is this one's turn to fail.
    fn begin(&mut self) -> io::Result<()> {
        if self.off {
            return Err(io::Error::other("the power is off"));
        }
        self.operations += 1;
        let due = |left: &mut Option<u64>| match left {
            Some(0) => {
                *left = None;
                true
            }
            Some(n) => {
                *n -= 1;
                false
            }
            None => false,
        };
        if due(&mut self.faults.crash_after) {
            self.off = true;
            return Err(io::Error::other("the power went off"));
        }
        if due(&mut self.faults.fail_after) {
            self.failed = true;
            return Err(io::Error::other("input/output error (simulated)"));
        }
        Ok(())
    }

    fn used(&self) -> u64 {
        self.inodes.values().map(|inode| inode.current.len() as u64).sum()
    }

    fn change(&mut self, change: NameChange) {
        apply(&mut self.names, &change);
        self.changes.push(change);
    }
}

impl SimDisk {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sets what goes wrong from now on.
    pub fn set_faults(&self, faults: Faults) {
        self.lock().faults = faults;
    }

    /// True when the power went off by itself.
    pub fn is_off(&self) -> bool {
        self.lock().off
    }

    /// True when an operation was made to fail since the last start.
    pub fn has_failed(&self) -> bool {
        self.lock().failed
    }

    /// True when the disk was full at some time since the last start.
    pub fn was_full(&self) -> bool {
        self.lock().full
    }

    /// Bytes its files hold.
    pub fn used(&self) -> u64 {
        self.lock().used()
    }

    /// Operations so far.
    pub fn operations(&self) -> u64 {
        self.lock().operations
    }

    /// Takes the power away: afterwards the disk holds what a real one might.
    pub fn crash(&self) {
        let mut state = self.lock();
        state.off = true;
        let changes = std::mem::take(&mut state.changes);
        let kept = world::random(changes.len() as u64 + 1) as usize;
        let mut names = std::mem::take(&mut state.durable_names);
        for change in &changes[..kept] {
            apply(&mut names, change);
        }
        for inode in state.inodes.values_mut() {
            let dirty = std::mem::take(&mut inode.dirty);
            // Often all or nothing of a file reaches the disk; sometimes any part.
            let mode = world::random(3);
            for sector in dirty {
                let keep = match mode {
                    0 => false,
                    1 => true,
                    _ => world::chance(500),
                };
                if keep && mode == 2 && world::chance(100) {
                    // A write cut short in mid-sector: nothing behind it made it.
                    inode.persist(sector, world::random(SECTOR as u64) as usize);
                    break;
                }
                if keep {
                    inode.persist(sector, SECTOR);
                }
            }
            inode.current = inode.durable.clone();
        }
        let live: BTreeSet<u64> = names.values().copied().collect();
        state.inodes.retain(|id, _| live.contains(id));
        state.names = names.clone();
        state.durable_names = names;
    }

    /// Gives the power back.
    pub fn power_on(&self) {
        let mut state = self.lock();
        state.off = false;
        state.failed = false;
        state.full = false;
    }

    /// Makes the vote file what it was before the first vote, as if votes were kept in memory.
    pub fn forget_votes(&self) {
        let mut state = self.lock();
        let state = &mut *state;
        if let (Some(inode), Some(bytes)) = (state.names.get("vote"), state.no_vote.clone())
            && let Some(inode) = state.inodes.get_mut(inode)
        {
            inode.durable = bytes.clone();
            inode.current = bytes;
            inode.dirty.clear();
        }
    }

    /// Loses the last entries of the log, as if they had never been written.
    pub fn lose_tail(&self) {
        const BYTES: usize = 700;
        const HEADER: usize = 128;
        let mut state = self.lock();
        let state = &mut *state;
        let newest = state.names.iter().rfind(|(name, _)| name.ends_with(".seg"));
        if let Some(inode) = newest.and_then(|(_, inode)| state.inodes.get_mut(inode)) {
            let end = inode.durable.iter().rposition(|byte| *byte != 0).map_or(0, |at| at + 1);
            // The segment's header stays.
            let from = end.saturating_sub(BYTES).max(HEADER.min(end));
            inode.durable[from..end].fill(0);
            inode.current = inode.durable.clone();
            inode.dirty.clear();
        }
    }

    /// Forgets everything, as a new disk does.
    pub fn wipe(&self) {
        *self.lock() = State::default();
    }

    /// A file's bytes as reads see them.
    pub fn contents(&self, name: &str) -> Option<Vec<u8>> {
        let state = self.lock();
        Some(state.inodes.get(state.names.get(name)?)?.current.clone())
    }
}

impl Inode {
    /// Makes the first `bytes` of a sector durable.
    fn persist(&mut self, sector: usize, bytes: usize) {
        let start = sector * SECTOR;
        let end = (start + bytes).min(self.current.len());
        if start < end {
            if self.durable.len() < end {
                self.durable.resize(end, 0);
            }
            self.durable[start..end].copy_from_slice(&self.current[start..end]);
        }
    }

    fn write(&mut self, data: &[u8], offset: usize) {
        let end = offset + data.len();
        if self.current.len() < end {
            self.current.resize(end, 0);
        }
        self.current[offset..end].copy_from_slice(data);
        if !data.is_empty() {
            self.dirty.extend(offset / SECTOR..=(end - 1) / SECTOR);
        }
    }
}

impl Disk for SimDisk {
    type File = SimFile;

    fn create(&self, name: &str) -> io::Result<SimFile> {
        let mut state = self.lock();
        state.begin()?;
        let inode = state.next_inode;
        state.next_inode += 1;
        state.inodes.insert(inode, Inode::default());
        state.change(NameChange::Link(name.to_string(), inode));
        Ok(SimFile {
            disk: self.clone(),
            inode,
        })
    }

    fn open(&self, name: &str) -> io::Result<SimFile> {
        let mut state = self.lock();
        state.begin()?;
        let inode = *state.names.get(name).ok_or(io::ErrorKind::NotFound)?;
        Ok(SimFile {
            disk: self.clone(),
            inode,
        })
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        let mut state = self.lock();
        state.begin()?;
        if !state.names.contains_key(from) {
            return Err(io::ErrorKind::NotFound.into());
        }
        state.change(NameChange::Rename(from.to_string(), to.to_string()));
        Ok(())
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        let mut state = self.lock();
        state.begin()?;
        if !state.names.contains_key(name) {
            return Err(io::ErrorKind::NotFound.into());
        }
        state.change(NameChange::Unlink(name.to_string()));
        Ok(())
    }

    fn list(&self) -> io::Result<Vec<String>> {
        let mut state = self.lock();
        state.begin()?;
        Ok(state.names.keys().cloned().collect())
    }

    fn sync_dir(&self) -> io::Result<()> {
        let mut state = self.lock();
        state.begin()?;
        if !state.faults.lying {
            state.durable_names = state.names.clone();
            state.changes.clear();
        }
        Ok(())
    }

    fn spawn(&self, _name: &'static str, work: BoxFuture<'static, ()>) {
        world::spawn(work);
    }

    fn pace(&self) -> impl Future<Output = ()> + Send {
        // Mostly fast, now and then a long stall.
        let slow = self.lock().faults.slow;
        let micros = if slow > 0 {
            world::random(slow * 1_000)
        } else if world::chance(20) {
            20_000 + world::random(60_000)
        } else {
            50 + world::random(1_500)
        };
        world::sleep(Duration::from_micros(micros))
    }
}

impl SimFile {
    fn with<T>(&self, f: impl FnOnce(&mut State, u64) -> io::Result<T>) -> io::Result<T> {
        let mut state = self.disk.lock();
        state.begin()?;
        f(&mut state, self.inode)
    }
}

fn gone() -> io::Error {
    // A handle from before a crash.
    io::Error::other("the file handle is from another life")
}

impl DiskFile for SimFile {
    fn write_at(&self, data: &[u8], offset: u64) -> io::Result<()> {
        self.with(|state, inode| {
            let grows = state.inodes.get(&inode).map_or(0, |i| {
                (offset + data.len() as u64).saturating_sub(i.current.len() as u64)
            });
            if state
                .faults
                .capacity
                .is_some_and(|capacity| state.used() + grows > capacity)
            {
                state.full = true;
                return Err(io::ErrorKind::StorageFull.into());
            }
            state
                .inodes
                .get_mut(&inode)
                .ok_or_else(gone)?
                .write(data, offset as usize);
            Ok(())
        })
    }

    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        self.with(|state, inode| {
            let bytes = &state.inodes.get(&inode).ok_or_else(gone)?.current;
            let from = (offset as usize).min(bytes.len());
            let n = buf.len().min(bytes.len() - from);
            buf[..n].copy_from_slice(&bytes[from..from + n]);
            Ok(n)
        })
    }

    fn preallocate(&self, len: u64) -> io::Result<()> {
        self.write_at(&vec![0; len as usize], 0)
    }

    fn sync(&self) -> io::Result<()> {
        self.with(|state, inode| {
            if state.faults.lying {
                return Ok(());
            }
            let is_vote = state.names.get("vote.tmp") == Some(&inode);
            let file = state.inodes.get_mut(&inode).ok_or_else(gone)?;
            for sector in std::mem::take(&mut file.dirty) {
                file.persist(sector, SECTOR);
            }
            if is_vote && state.no_vote.is_none() {
                state.no_vote = Some(file.durable.clone());
            }
            Ok(())
        })
    }

    fn len(&self) -> io::Result<u64> {
        self.with(|state, inode| Ok(state.inodes.get(&inode).ok_or_else(gone)?.current.len() as u64))
    }
}
