//! Snapshots as files.
//!
//! ```text
//! file = "KVRSNAP\x01" | header_len:4 | header (protobuf: last id, membership) | state | blake3 of all before:32
//! ```
//!
//! Invariants: a snapshot has its name only when it is whole and durable (temporary file, sync, rename, sync of
//! the directory); its checksum is verified before a byte of it is used; only the newest is kept.

mod receive;

use std::io::{self, Read, Write};
use std::sync::{Arc, Mutex, MutexGuard};

use bytes::Bytes;
use prost::Message;

pub(crate) use receive::{Receiver, Step, TransferId};

use crate::codec::{self, PbSnapshotMeta};
use crate::disk::{Disk, DiskFile, read_exact_at};
use crate::error::{Damage, LogError};
use crate::log::TMP_SUFFIX;
use crate::machine::SnapshotWriter;
use crate::metric_definitions as metric;
use crate::types::SnapshotMeta;

pub(crate) const SUFFIX: &str = ".snap";
const MAGIC: &[u8; 8] = b"KVRSNAP\x01";
/// The last byte of the magic; the checksum ends the file in every format.
const FORMAT: u8 = MAGIC[7];
const HASH_BYTES: u64 = 32;
/// A header holds one membership; more than this is damage.
const MAX_HEADER_BYTES: u64 = 1 << 20;
const BUFFER: usize = 256 << 10;

/// An open, whole snapshot. Clones share the file, which stays readable after it was replaced.
pub(crate) struct SnapshotFile<F> {
    pub name: String,
    pub file: Arc<F>,
    /// Bytes of the file.
    pub len: u64,
    /// Where the state begins.
    body_at: u64,
}

impl<F> Clone for SnapshotFile<F> {
    fn clone(&self) -> Self {
        SnapshotFile {
            name: self.name.clone(),
            file: self.file.clone(),
            len: self.len,
            body_at: self.body_at,
        }
    }
}

impl<F: DiskFile> SnapshotFile<F> {
    /// Checks the whole file against its trailer.
    pub(crate) fn verify(file: Arc<F>, name: &str) -> Result<(Self, SnapshotMeta), LogError> {
        let corrupt = |offset: u64, what: &str| Damage::Corrupt {
            file: name.to_string(),
            offset,
            what: what.to_string(),
        };
        let read = || LogError::io(format!("read {name}"));
        let len = file.len().map_err(read())?;
        let head = MAGIC.len() as u64 + 4;
        if len < head + HASH_BYTES {
            return Err(corrupt(len, "the snapshot is cut short").into());
        }
        let body = len - HASH_BYTES;
        let mut hasher = blake3::Hasher::new();
        let mut buffer = vec![0; BUFFER];
        let mut at = 0;
        while at < body {
            let n = (body - at).min(BUFFER as u64) as usize;
            read_exact_at(&*file, &mut buffer[..n], at).map_err(read())?;
            hasher.update(&buffer[..n]);
            at += n as u64;
        }
        let mut trailer = [0; HASH_BYTES as usize];
        read_exact_at(&*file, &mut trailer, body).map_err(read())?;
        if hasher.finalize() != trailer {
            return Err(corrupt(body, "the checksum of the snapshot is wrong").into());
        }
        let mut fixed = [0; 12];
        read_exact_at(&*file, &mut fixed, 0).map_err(read())?;
        if fixed[..7] == MAGIC[..7] && fixed[7] > FORMAT {
            return Err(Damage::TooNew {
                file: name.to_string(),
                found: fixed[7].into(),
                known: FORMAT.into(),
            }
            .into());
        }
        let header = u64::from(u32::from_le_bytes([fixed[8], fixed[9], fixed[10], fixed[11]]));
        if &fixed[..8] != MAGIC || header > MAX_HEADER_BYTES || head + header > body {
            return Err(corrupt(0, "it is not a snapshot").into());
        }
        let mut bytes = vec![0; header as usize];
        read_exact_at(&*file, &mut bytes, head).map_err(read())?;
        let meta = PbSnapshotMeta::decode(Bytes::from(bytes))
            .map_err(|_| codec::DecodeError("a snapshot header"))
            .and_then(codec::decode_meta)
            .map_err(|e| corrupt(head, e.0))?;
        let snapshot = SnapshotFile {
            name: name.to_string(),
            file,
            len,
            body_at: head + header,
        };
        Ok((snapshot, meta))
    }

    /// Offset of the state in the file.
    pub(crate) fn body_at(&self) -> u64 {
        self.body_at
    }

    /// Reads the state. The snapshot must have been verified, which every `SnapshotFile` is.
    pub(crate) fn state(&self) -> io::BufReader<StateReader<F>> {
        let reader = StateReader {
            file: self.file.clone(),
            at: self.body_at,
            end: self.len - HASH_BYTES,
        };
        io::BufReader::with_capacity(BUFFER, reader)
    }
}

/// Reads the state's bytes out of a snapshot.
pub(crate) struct StateReader<F> {
    file: Arc<F>,
    at: u64,
    end: u64,
}

impl<F: DiskFile> Read for StateReader<F> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let n = (self.end - self.at).min(buf.len() as u64) as usize;
        let got = self.file.read_at(&mut buf[..n], self.at)?;
        self.at += got as u64;
        Ok(got)
    }
}

/// Writes and hashes in one go.
struct HashingWriter<'a, F> {
    file: &'a F,
    at: u64,
    hasher: blake3::Hasher,
}

impl<F: DiskFile> Write for HashingWriter<'_, F> {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        self.file.write_at(buf, self.at)?;
        self.hasher.update(buf);
        self.at += buf.len() as u64;
        Ok(buf.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// A snapshot with what its header says.
pub(crate) struct Held<F> {
    pub meta: SnapshotMeta,
    pub snapshot: SnapshotFile<F>,
}

impl<F> Clone for Held<F> {
    fn clone(&self) -> Self {
        Held {
            meta: self.meta.clone(),
            snapshot: self.snapshot.clone(),
        }
    }
}

/// The newest snapshot of a member and the directory it lies in. Clones share it.
pub(crate) struct SnapshotStore<D: Disk> {
    pub disk: D,
    current: Arc<Mutex<Option<Held<D::File>>>>,
}

impl<D: Disk> Clone for SnapshotStore<D> {
    fn clone(&self) -> Self {
        SnapshotStore {
            disk: self.disk.clone(),
            current: self.current.clone(),
        }
    }
}

fn file_name(meta: &SnapshotMeta) -> String {
    match meta.last_log_id {
        Some(id) => format!("{:020}-{:020}{SUFFIX}", id.index, id.leader_id.term),
        // Orders before every digit.
        None => format!("-empty{SUFFIX}"),
    }
}

type Newest<D> = Option<Held<<D as Disk>::File>>;

/// The newest snapshot, verified, and the names of older ones. Changes nothing.
pub(crate) fn newest<D: Disk>(disk: &D) -> Result<(Newest<D>, Vec<String>), LogError> {
    let mut names = disk.list().map_err(LogError::io("list the data directory"))?;
    names.retain(|name| name.ends_with(SUFFIX));
    // Names order by index, then term.
    let Some(newest) = names.pop() else {
        return Ok((None, names));
    };
    let file = disk.open(&newest).map_err(LogError::io(format!("open {newest}")))?;
    let (snapshot, meta) = SnapshotFile::verify(Arc::new(file), &newest)?;
    Ok((Some(Held { meta, snapshot }), names))
}

impl<D: Disk> SnapshotStore<D> {
    /// Opens the newest snapshot and removes older ones.
    pub(crate) fn open(disk: &D) -> Result<Self, LogError> {
        let (held, older) = newest(disk)?;
        for name in older {
            disk.remove(&name).map_err(LogError::io(format!("remove {name}")))?;
        }
        Ok(SnapshotStore {
            disk: disk.clone(),
            current: Arc::new(Mutex::new(held)),
        })
    }

    fn lock(&self) -> MutexGuard<'_, Option<Held<D::File>>> {
        self.current.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// The newest snapshot.
    pub(crate) fn current(&self) -> Option<Held<D::File>> {
        self.lock().clone()
    }

    /// Writes a snapshot of `state` at `meta` and makes it the newest. Blocks.
    pub(crate) fn build(&self, meta: &SnapshotMeta, state: SnapshotWriter) -> io::Result<Held<D::File>> {
        let name = file_name(meta);
        let tmp = format!("build-{name}{TMP_SUFFIX}");
        let file = self.disk.create(&tmp)?;
        let header = codec::encode_meta(meta).encode_to_vec();
        let mut out = io::BufWriter::with_capacity(
            BUFFER,
            HashingWriter {
                file: &file,
                at: 0,
                hasher: blake3::Hasher::new(),
            },
        );
        out.write_all(MAGIC)?;
        out.write_all(&(header.len() as u32).to_le_bytes())?;
        out.write_all(&header)?;
        state(&mut out)?;
        let out = out.into_inner().map_err(io::IntoInnerError::into_error)?;
        let (end, hash) = (out.at, out.hasher.finalize());
        file.write_at(hash.as_bytes(), end)?;
        file.sync()?;
        metrics::counter!(metric::SNAPSHOTS_TOTAL, "what" => "built").increment(1);
        let body_at = MAGIC.len() as u64 + 4 + header.len() as u64;
        let snapshot = SnapshotFile {
            name,
            file: Arc::new(file),
            len: end + HASH_BYTES,
            body_at,
        };
        let held = Held {
            meta: meta.clone(),
            snapshot,
        };
        self.keep(&tmp, held.clone())?;
        Ok(held)
    }

    /// Makes a snapshot that is to be installed this member's own. It is its newest already after a restart, a
    /// received temporary file otherwise; one that lies elsewhere is copied. Blocks.
    pub(crate) fn adopt(&self, held: &Held<D::File>) -> io::Result<()> {
        let from = &held.snapshot;
        if from.name.ends_with(TMP_SUFFIX) {
            return self.keep(&from.name, held.clone());
        }
        if self
            .current()
            .is_some_and(|c| c.meta.last_log_id >= held.meta.last_log_id)
        {
            return Ok(());
        }
        let tmp = format!("copy-{}{TMP_SUFFIX}", from.name);
        let file = self.disk.create(&tmp)?;
        let mut buffer = vec![0; BUFFER];
        let mut at = 0;
        while at < from.len {
            let n = (from.len - at).min(BUFFER as u64) as usize;
            read_exact_at(&*from.file, &mut buffer[..n], at)?;
            file.write_at(&buffer[..n], at)?;
            at += n as u64;
        }
        file.sync()?;
        let mut copy = held.clone();
        copy.snapshot.file = Arc::new(file);
        self.keep(&tmp, copy)
    }

    /// Gives a whole, synced temporary file its name, unless a newer snapshot came in meanwhile. Blocks.
    pub(crate) fn keep(&self, tmp: &str, mut held: Held<D::File>) -> io::Result<()> {
        let name = file_name(&held.meta);
        let mut current = self.lock();
        if current
            .as_ref()
            .is_some_and(|c| c.meta.last_log_id >= held.meta.last_log_id)
        {
            return self.disk.remove(tmp);
        }
        self.disk.rename(tmp, &name)?;
        self.disk.sync_dir()?;
        held.snapshot.name = name;
        metrics::gauge!(metric::SNAPSHOT_BYTES).set(held.snapshot.len as f64);
        let old = current.replace(held);
        if let Some(old) = old {
            // Not synced: the next open removes an old one that comes back.
            self.disk.remove(&old.snapshot.name)?;
        }
        Ok(())
    }
}
