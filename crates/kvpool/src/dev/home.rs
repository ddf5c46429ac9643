//! The directory of a `kvpool dev`: a subdirectory per child with its data and its log, the join token, and the addresses
//! that must stay the same over restarts.
//!
//! ```text
//! DIR/dev.json  DIR/join-token  DIR/coordinator-1/{coordinator-1.log,data/}  DIR/shard-1/shard-1.log  DIR/proxy/proxy.log
//! ```

use std::fs::OpenOptions;
use std::io::{ErrorKind, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use kvpool_proto::JoinToken;
use serde_json::Value;

use super::ports::Ports;
use crate::config::token;
use crate::exit::failure;

/// A log that has grown beyond this many bytes is set aside (as `NAME.log.1`) at the next start.
const LOG_KEEP: u64 = 16 << 20;

/// See the module.
pub struct Home {
    root: PathBuf,
    pub join_token: JoinToken,
    /// Removed when dropped.
    temporary: Option<tempfile::TempDir>,
}

impl Home {
    /// Opens `dir`, creating what is missing, or makes a temporary directory.
    pub fn open(dir: Option<&Path>) -> Result<Self> {
        let (root, temporary) = match dir {
            Some(dir) => {
                std::fs::create_dir_all(dir)
                    .with_context(|| format!("failed to create --data-dir {}", dir.display()))?;
                let root = dir
                    .canonicalize()
                    .with_context(|| format!("failed to open --data-dir {}", dir.display()))?;
                (root, None)
            }
            None => {
                let made = tempfile::Builder::new().prefix("kvpool-dev-").tempdir();
                let made = made.context("failed to make a temporary directory; name one with --data-dir")?;
                (made.path().to_owned(), Some(made))
            }
        };
        let join_token = remembered_token(&root.join("join-token"))?;
        Ok(Home {
            root,
            join_token,
            temporary,
        })
    }

    /// Leaves a temporary directory behind, for somebody who wants to read its logs.
    pub fn keep(self) {
        if let Some(temporary) = self.temporary {
            let _ = temporary.keep();
        }
    }

    /// True when nothing is kept at the end.
    pub fn is_temporary(&self) -> bool {
        self.temporary.is_some()
    }

    pub fn root(&self) -> &Path {
        &self.root
    }

    pub fn token_file(&self) -> PathBuf {
        self.root.join("join-token")
    }

    /// The directory of a child.
    pub fn dir(&self, name: &str) -> PathBuf {
        self.root.join(name)
    }

    /// The log of a child.
    pub fn log(&self, name: &str) -> PathBuf {
        self.dir(name).join(format!("{name}.log"))
    }

    fn ports_file(&self) -> PathBuf {
        self.root.join("dev.json")
    }

    /// The addresses of the last run in this directory.
    pub fn remembered_ports(&self) -> Result<Option<Ports>> {
        let path = self.ports_file();
        let text = match std::fs::read_to_string(&path) {
            Ok(text) => text,
            Err(e) if e.kind() == ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(failure(format!("failed to read {}: {e}", path.display()))),
        };
        serde_json::from_str(&text).map(Some).map_err(|e| {
            failure(format!(
                "failed to read {}: {e}; it was not written by this version of kvpool dev",
                path.display()
            ))
        })
    }

    /// Keeps the addresses for the next run, and sets aside logs that have grown large.
    pub fn remember_ports(&self, ports: &Ports, children: &[String]) -> Result<()> {
        let text = serde_json::to_string_pretty(ports).context("failed to write addresses as JSON")?;
        write_atomically(&self.ports_file(), &text)?;
        for name in children {
            let log = self.log(name);
            if std::fs::metadata(&log).is_ok_and(|m| m.len() > LOG_KEEP) {
                std::fs::rename(&log, log.with_extension("log.1"))
                    .with_context(|| format!("failed to set {} aside", log.display()))?;
            }
        }
        Ok(())
    }
}

/// The token of an earlier run, or a new one that only this user can read.
fn remembered_token(path: &Path) -> Result<JoinToken> {
    if path.exists() {
        return token::resolve(Some(path));
    }
    let new = token::generate();
    let mut file = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path)
        .with_context(|| format!("failed to create {}", path.display()))?;
    writeln!(file, "{new}").with_context(|| format!("failed to write {}", path.display()))?;
    token::resolve(Some(path))
}

/// Readers see the old file, or none, or the whole new one.
fn write_atomically(path: &Path, text: &str) -> Result<()> {
    let named = || format!("failed to write {}", path.display());
    let dir = path
        .parent()
        .filter(|dir| !dir.as_os_str().is_empty())
        .unwrap_or(Path::new("."));
    let mut file = tempfile::NamedTempFile::new_in(dir).with_context(named)?;
    file.write_all(text.as_bytes()).with_context(named)?;
    file.persist(path).with_context(named)?;
    Ok(())
}

/// Writes the file that says that all is ready.
pub fn write_ready_file(path: &Path, json: &Value) -> Result<()> {
    write_atomically(path, &format!("{json:#}\n")).context("--ready-file")
}

/// A file of an earlier run must not say "ready" while this one starts, nor stay behind.
pub fn remove_ready_file(path: &Path) -> Result<()> {
    match std::fs::remove_file(path) {
        Err(e) if e.kind() != ErrorKind::NotFound => Err(failure(format!(
            "failed to remove the old --ready-file {}: {e}",
            path.display()
        ))),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn token_and_ports_survive_and_are_private() {
        let dir = tempfile::tempdir().unwrap();
        let first = Home::open(Some(dir.path())).unwrap();
        assert!(first.remembered_ports().unwrap().is_none());
        first
            .remember_ports(&Ports::default(), &["shard-1".to_owned()])
            .unwrap();
        let second = Home::open(Some(dir.path())).unwrap();
        assert!(first.join_token.equals(second.join_token.reveal().as_bytes()));
        assert_eq!(second.remembered_ports().unwrap(), Some(Ports::default()));
        let mode = std::fs::metadata(second.token_file()).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
    }

    #[test]
    fn a_temporary_home_is_removed() {
        let home = Home::open(None).unwrap();
        let root = home.root().to_owned();
        assert!(home.is_temporary() && root.exists());
        drop(home);
        assert!(!root.exists());
    }

    #[test]
    fn ready_files_are_replaced_and_removed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("ready.json");
        std::fs::write(&path, "old").unwrap();
        remove_ready_file(&path).unwrap();
        remove_ready_file(&path).unwrap();
        write_ready_file(&path, &serde_json::json!({"proxy": {}})).unwrap();
        assert!(std::fs::read_to_string(&path).unwrap().contains("proxy"));
    }
}
