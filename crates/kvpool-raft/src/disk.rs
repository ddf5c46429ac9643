//! Storage as the log and the snapshots see it: a flat directory of files.
//!
//! Two implementations: [`FileDisk`] here, and the simulated disk in `chaos/` that loses what was not synced,
//! tears writes and fails. Invariant for every user: nothing counts as durable before `sync` returned, and no
//! name before `sync_dir` returned.

use std::fs::{File, OpenOptions};
use std::future::Future;
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use futures::future::BoxFuture;

/// A directory of files. Operations block; work that must not block an executor goes through [`Disk::spawn`].
pub trait Disk: Clone + Send + Sync + 'static {
    /// An open file, shared freely.
    type File: DiskFile;

    /// Creates a file for reading and writing, emptying one of that name.
    fn create(&self, name: &str) -> io::Result<Self::File>;
    /// Opens an existing file for reading and writing.
    fn open(&self, name: &str) -> io::Result<Self::File>;
    /// Renames a file, replacing one of the new name in one step.
    fn rename(&self, from: &str, to: &str) -> io::Result<()>;
    /// Removes a file; handles to it stay usable.
    fn remove(&self, name: &str) -> io::Result<()>;
    /// The names of all files, in order.
    fn list(&self) -> io::Result<Vec<String>>;
    /// Makes creations, renames and removals durable.
    fn sync_dir(&self) -> io::Result<()>;
    /// Runs work that blocks on this disk: on a thread of its own, or as a task of the simulator. The work may
    /// await nothing but channels and [`Disk::pace`].
    fn spawn(&self, name: &'static str, work: BoxFuture<'static, ()>);
    /// The time the next operation takes, where time is simulated; a real disk takes it by blocking.
    fn pace(&self) -> impl Future<Output = ()> + Send;
}

/// An open file of a [`Disk`].
pub trait DiskFile: Send + Sync + 'static {
    /// Writes all of `data` at `offset`, growing the file if needed.
    fn write_at(&self, data: &[u8], offset: u64) -> io::Result<()>;
    /// Reads up to `buf.len()` bytes; fewer only at the end of the file.
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize>;
    /// Makes the file `len` bytes long with every byte written as zero, so that later writes change no metadata.
    fn preallocate(&self, len: u64) -> io::Result<()>;
    /// Makes everything written so far durable.
    fn sync(&self) -> io::Result<()>;
    /// The length in bytes.
    fn len(&self) -> io::Result<u64>;
    /// True when the file has no bytes.
    fn is_empty(&self) -> io::Result<bool> {
        Ok(self.len()? == 0)
    }
}

/// Runs `work` through [`Disk::spawn`] and waits for its result.
pub(crate) async fn offload<D, T, F>(disk: &D, name: &'static str, work: F) -> io::Result<T>
where
    D: Disk,
    T: Send + 'static,
    F: FnOnce() -> io::Result<T> + Send + 'static,
{
    let (tx, rx) = futures::channel::oneshot::channel();
    let pacer = disk.clone();
    disk.spawn(
        name,
        Box::pin(async move {
            pacer.pace().await;
            // The waiter may be gone; then nobody wants the result.
            let _ = tx.send(work());
        }),
    );
    rx.await
        .unwrap_or_else(|_| Err(io::Error::other("the disk worker died")))
}

/// Reads exactly `buf.len()` bytes or fails with `UnexpectedEof`.
pub(crate) fn read_exact_at<F: DiskFile + ?Sized>(file: &F, buf: &mut [u8], offset: u64) -> io::Result<()> {
    let got = file.read_at(buf, offset)?;
    if got == buf.len() {
        Ok(())
    } else {
        Err(io::ErrorKind::UnexpectedEof.into())
    }
}

/// A real directory, locked for one process at a time.
#[derive(Clone)]
pub struct FileDisk {
    inner: Arc<Inner>,
}

struct Inner {
    dir: PathBuf,
    read_only: bool,
    /// Held for its advisory lock, which ends with the process however it ends.
    _lock: Option<File>,
}

const LOCK_FILE: &str = "lock";
const ZEROS: usize = 256 << 10;

impl FileDisk {
    /// Opens `dir`, creating it if needed, and locks it.
    ///
    /// # Errors
    /// `WouldBlock` when another process or handle uses the directory; otherwise what the system says.
    pub fn open(dir: impl AsRef<Path>) -> io::Result<Self> {
        let dir = dir.as_ref().to_path_buf();
        create_durable(&dir)?;
        let lock = OpenOptions::new()
            .create(true)
            .truncate(false)
            .write(true)
            .mode(0o600)
            .open(dir.join(LOCK_FILE))?;
        lock.try_lock().map_err(|e| in_use(&dir, e.into()))?;
        Ok(FileDisk {
            inner: Arc::new(Inner {
                dir,
                read_only: false,
                _lock: Some(lock),
            }),
        })
    }

    /// Opens a directory to look at it: nothing in it is created or changed, and what would change it fails.
    ///
    /// # Errors
    /// `NotFound` when there is no such directory, `WouldBlock` when a process works in it.
    pub fn open_read_only(dir: impl AsRef<Path>) -> io::Result<Self> {
        let dir = dir.as_ref().to_path_buf();
        std::fs::read_dir(&dir)?;
        let lock = match File::open(dir.join(LOCK_FILE)) {
            // Shared: two may look at once, but not while a member writes.
            Ok(lock) => {
                lock.try_lock_shared().map_err(|e| in_use(&dir, e.into()))?;
                Some(lock)
            }
            // Every member makes the file before anything else, so nobody is there.
            Err(e) if e.kind() == io::ErrorKind::NotFound => None,
            Err(e) => return Err(e),
        };
        Ok(FileDisk {
            inner: Arc::new(Inner {
                dir,
                read_only: true,
                _lock: lock,
            }),
        })
    }

    fn check_writable(&self) -> io::Result<()> {
        if self.inner.read_only {
            return Err(io::ErrorKind::ReadOnlyFilesystem.into());
        }
        Ok(())
    }

    fn path(&self, name: &str) -> PathBuf {
        self.inner.dir.join(name)
    }
}

fn in_use(dir: &Path, e: io::Error) -> io::Error {
    io::Error::new(e.kind(), format!("failed to lock {}: it is in use", dir.display()))
}

/// Creates a directory with its ancestors, each synced into its parent: otherwise a power loss could take the
/// directory with everything that was made durable inside it.
fn create_durable(dir: &Path) -> io::Result<()> {
    if dir.is_dir() {
        return Ok(());
    }
    let parent = match dir.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    create_durable(parent)?;
    match std::fs::create_dir(dir) {
        Err(e) if e.kind() != io::ErrorKind::AlreadyExists => return Err(e),
        _ => {}
    }
    File::open(parent)?.sync_all()
}

impl Disk for FileDisk {
    type File = File;

    fn create(&self, name: &str) -> io::Result<File> {
        self.check_writable()?;
        OpenOptions::new()
            .create(true)
            .truncate(true)
            .read(true)
            .write(true)
            .mode(0o600)
            .open(self.path(name))
    }

    fn open(&self, name: &str) -> io::Result<File> {
        OpenOptions::new()
            .read(true)
            .write(!self.inner.read_only)
            .open(self.path(name))
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        self.check_writable()?;
        std::fs::rename(self.path(from), self.path(to))
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        self.check_writable()?;
        std::fs::remove_file(self.path(name))
    }

    fn list(&self) -> io::Result<Vec<String>> {
        let mut names = Vec::new();
        for entry in std::fs::read_dir(&self.inner.dir)? {
            // A name that is not UTF-8 is not one of ours.
            if let Ok(name) = entry?.file_name().into_string()
                && name != LOCK_FILE
            {
                names.push(name);
            }
        }
        names.sort_unstable();
        Ok(names)
    }

    fn sync_dir(&self) -> io::Result<()> {
        File::open(&self.inner.dir)?.sync_all()
    }

    fn spawn(&self, name: &'static str, work: BoxFuture<'static, ()>) {
        let spawned = std::thread::Builder::new().name(name.to_string()).spawn(move || {
            futures::executor::block_on(work);
        });
        if let Err(e) = spawned {
            // The work is dropped; whoever waits for it sees its channel close.
            tracing::error!(worker = name, error = %e, "failed to start a disk worker");
        }
    }

    fn pace(&self) -> impl Future<Output = ()> + Send {
        std::future::ready(())
    }
}

impl DiskFile for File {
    fn write_at(&self, data: &[u8], offset: u64) -> io::Result<()> {
        self.write_all_at(data, offset)
    }

    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        let mut done = 0;
        while done < buf.len() {
            match FileExt::read_at(self, &mut buf[done..], offset + done as u64) {
                Ok(0) => break,
                Ok(n) => done += n,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
        Ok(done)
    }

    fn preallocate(&self, len: u64) -> io::Result<()> {
        let zeros = vec![0u8; ZEROS];
        let mut at = 0;
        while at < len {
            let n = (len - at).min(ZEROS as u64);
            self.write_all_at(&zeros[..n as usize], at)?;
            at += n;
        }
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        self.sync_data()
    }

    fn len(&self) -> io::Result<u64> {
        Ok(self.metadata()?.len())
    }
}
