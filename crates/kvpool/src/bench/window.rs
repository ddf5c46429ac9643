//! One timed window: some connections of one server run one kind of operation on their own keys.
//!
//! Time and client CPU are taken around each operation, so that checking and stamping values between them costs every
//! server the same and counts for none.

use std::fmt;
use std::sync::Barrier;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow, ensure};

use super::client::{Conn, Key};
use super::cpu;
use super::pattern::{Lane, stamp_of};
use super::target::Target;

/// What a window does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, clap::ValueEnum)]
pub enum Op {
    Put,
    Get,
    Exists,
    /// Three reads to one write.
    Mixed,
}

impl fmt::Display for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = match self {
            Self::Put => "put",
            Self::Get => "get",
            Self::Exists => "exists",
            Self::Mixed => "mixed",
        };
        f.pad(name)
    }
}

/// One cell of the result table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Cell {
    pub op: Op,
    /// Bytes of a value.
    pub size: u64,
    pub conns: usize,
}

/// The keys of one server and size, with the version each was last written in.
pub struct KeySet {
    pub keys: Vec<Key>,
    versions: Vec<AtomicU64>,
}

impl KeySet {
    pub fn new(keys: Vec<Key>) -> Self {
        let versions = keys.iter().map(|_| AtomicU64::new(0)).collect();
        Self { keys, versions }
    }

    /// The version written last.
    fn version(&self, index: usize) -> u64 {
        self.versions[index].load(Ordering::Relaxed)
    }

    /// Which version the value just read is, by its first stamp. A server may answer a write it drops with OK (kvpool
    /// does, under pressure), so an earlier one is no lie; a version never written is.
    fn version_read(&self, index: usize, size: u64, lane: &Lane) -> Option<u64> {
        let (number, found) = (self.keys[index].number, lane.first_stamp());
        (1..=self.version(index))
            .rev()
            .find(|&version| stamp_of(number, size, version) == found)
    }
}

/// What a window measured.
#[derive(Clone, Debug, Default)]
pub struct Sample {
    pub bytes: u64,
    pub ops: u64,
    /// Units per second: bytes, or operations for `exists`. The sum over the connections.
    pub rate: f64,
    pub client_cpu_ns: u64,
    /// Unknown without the server's pids.
    pub server_cpu_ns: Option<u64>,
    /// Latency of each operation, in nanoseconds.
    pub latencies: Vec<u64>,
    /// Reads of keys that the server had dropped.
    pub misses: u64,
    /// Reads that found the whole value of an earlier write: the server had dropped a later one.
    pub stale: u64,
}

impl Sample {
    /// Takes in the next part of the same cell and round.
    pub fn merge(&mut self, part: Sample) {
        let rate = |sample: &Sample| sample.units() / sample.rate.max(f64::MIN_POSITIVE);
        let seconds = if self.ops == 0 { 0.0 } else { rate(self) } + rate(&part);
        self.server_cpu_ns = match (self.ops, self.server_cpu_ns, part.server_cpu_ns) {
            (0, _, new) => new,
            (_, Some(old), Some(new)) => Some(old + new),
            _ => None,
        };
        self.bytes += part.bytes;
        self.ops += part.ops;
        self.client_cpu_ns += part.client_cpu_ns;
        self.misses += part.misses;
        self.stale += part.stale;
        self.latencies.extend(part.latencies);
        self.rate = self.units() / seconds;
    }

    /// Bytes, or operations for `exists`.
    pub fn units(&self) -> f64 {
        match self.bytes {
            0 => self.ops as f64,
            bytes => bytes as f64,
        }
    }
}

/// Writes every key once and compares every byte: after it, all windows start alike.
pub fn populate(target: &mut Target, set: &KeySet, size: u64, lane: &mut Lane) -> Result<()> {
    target.connect(1)?;
    let conn = &mut target.conns[0];
    for index in 0..set.keys.len() {
        put_one(conn, set, index, size, lane)?;
    }
    verify(target, set, size, lane).map(|_| ())
}

/// Reads every key once and compares every byte; returns how many were gone and how many stale (both are written again).
pub fn verify(target: &mut Target, set: &KeySet, size: u64, lane: &mut Lane) -> Result<(u64, u64)> {
    let conn = &mut target.conns[0];
    let (mut misses, mut stale) = (0, 0);
    for (index, key) in set.keys.iter().enumerate() {
        let there = conn.get(key, &mut lane.target[..size as usize])?;
        if there {
            let version = set.version_read(index, size, lane);
            let whole =
                version.is_some_and(|version| lane.all_match(stamp_of(key.number, size, version), size as usize));
            ensure!(whole, "{}: wrong bytes under {:?}", target.name, key.name);
            if version == Some(set.version(index)) {
                continue;
            }
        }
        stale += u64::from(there);
        misses += u64::from(!there);
        put_one(conn, set, index, size, lane)?;
    }
    Ok((misses, stale))
}

/// Runs one window of `ops` operations.
pub fn run(target: &mut Target, set: &KeySet, cell: Cell, ops: u64, lanes: &mut [Lane]) -> Result<Sample> {
    target.connect(cell.conns)?;
    let before = target.cpu();
    let barrier = Barrier::new(cell.conns);
    let parts: Vec<Result<Part>> = std::thread::scope(|scope| {
        let threads: Vec<_> = (target.conns.iter_mut().zip(lanes).take(cell.conns).enumerate())
            .map(|(turn, (conn, lane))| {
                let barrier = &barrier;
                scope.spawn(move || {
                    barrier.wait();
                    one_thread(conn, set, cell, ops / cell.conns as u64, turn, lane)
                })
            })
            .collect();
        let join = |thread: std::thread::ScopedJoinHandle<'_, Result<Part>>| {
            thread
                .join()
                .unwrap_or_else(|_| Err(anyhow!("a client thread panicked")))
        };
        threads.into_iter().map(join).collect()
    });
    // The last reply is out before the server's thread has gone to sleep and is accounted for.
    std::thread::sleep(Duration::from_millis(2));
    let server_cpu_ns = before.and_then(|before| Some(target.cpu()?.since(&before)));
    let mut sample = Sample {
        server_cpu_ns,
        ..Sample::default()
    };
    for part in parts {
        let part = part.map_err(|e| e.context(format!("{} failed in a window of {}", target.name, cell.op)))?;
        let busy: u64 = part.latencies.iter().sum();
        let units = if cell.op == Op::Exists {
            part.latencies.len() as u64
        } else {
            part.bytes
        };
        sample.rate += units as f64 * 1e9 / busy.max(1) as f64;
        sample.bytes += part.bytes;
        sample.ops += part.latencies.len() as u64;
        sample.client_cpu_ns += part.cpu_ns;
        sample.misses += part.misses;
        sample.stale += part.stale;
        sample.latencies.extend(part.latencies);
    }
    Ok(sample)
}

#[derive(Default)]
struct Part {
    bytes: u64,
    cpu_ns: u64,
    latencies: Vec<u64>,
    misses: u64,
    stale: u64,
}

/// The share of one connection: its keys are those whose index has its turn as remainder.
fn one_thread(conn: &mut Conn, set: &KeySet, cell: Cell, ops: u64, turn: usize, lane: &mut Lane) -> Result<Part> {
    let mut part = Part::default();
    let mine: Vec<usize> = (turn..set.keys.len()).step_by(cell.conns).collect();
    let len = cell.size as usize;
    for n in 0..ops.max(1) as usize {
        let index = mine[n % mine.len()];
        let key = &set.keys[index];
        let write = cell.op == Op::Put || (cell.op == Op::Mixed && n % 4 == 0);
        if write {
            let version = set.versions[index].fetch_add(1, Ordering::Relaxed) + 1;
            lane.stamp(stamp_of(key.number, cell.size, version), len);
        }
        let (wall, cpu) = (Instant::now(), cpu::of_this_thread());
        let there = match (cell.op, write) {
            (Op::Exists, _) => conn.exists(key)?,
            (_, true) => conn.put(key, &lane.source[..len]).map(|()| true)?,
            (_, false) => conn.get(key, &mut lane.target[..len])?,
        };
        part.cpu_ns += cpu::of_this_thread() - cpu;
        part.latencies.push(wall.elapsed().as_nanos() as u64);
        if !there {
            part.misses += 1;
            if cell.op != Op::Exists {
                put_one(conn, set, index, cell.size, lane)?;
            }
            continue;
        }
        if cell.op == Op::Exists {
            continue;
        }
        part.bytes += cell.size;
        if !write {
            let version = set.version_read(index, cell.size, lane);
            let whole = version.is_some_and(|version| lane.stamps_match(stamp_of(key.number, cell.size, version), len));
            ensure!(whole, "wrong bytes under {:?}", key.name);
            part.stale += u64::from(version != Some(set.version(index)));
        }
    }
    Ok(part)
}

fn put_one(conn: &mut Conn, set: &KeySet, index: usize, size: u64, lane: &mut Lane) -> Result<()> {
    let version = set.versions[index].fetch_add(1, Ordering::Relaxed) + 1;
    lane.stamp(stamp_of(set.keys[index].number, size, version), size as usize);
    conn.put(&set.keys[index], &lane.source[..size as usize])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_a_cell_add_up() {
        let part = |bytes, rate| Sample {
            bytes,
            ops: 1,
            rate,
            server_cpu_ns: Some(5),
            ..Sample::default()
        };
        let mut all = Sample::default();
        all.merge(part(100, 10.0));
        all.merge(part(300, 30.0));
        // 400 bytes in 10 + 10 seconds.
        assert!((all.rate - 20.0).abs() < 1e-9);
        assert_eq!((all.bytes, all.ops, all.server_cpu_ns), (400, 2, Some(10)));
        all.merge(Sample {
            ops: 1,
            server_cpu_ns: None,
            ..part(1, 1.0)
        });
        assert_eq!(all.server_cpu_ns, None);
    }
}
