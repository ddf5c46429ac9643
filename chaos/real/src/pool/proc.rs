//! One process of the pool: its command line, its life, and signals to it and to nobody else.

use anyhow::{Context, Result, ensure};
use parking_lot::Mutex;
use rustix::process::{Pid, Signal, kill_process};
use std::fs::OpenOptions;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;
use tokio::time::{Instant, sleep};

/// How long the kernel may take to end a process that was sent SIGKILL.
const GONE_WITHIN: Duration = Duration::from_secs(20);
const LOOK: Duration = Duration::from_millis(5);

/// A process that can be started again.
pub struct Proc {
    program: PathBuf,
    args: Vec<String>,
    log: PathBuf,
    child: Mutex<Option<Child>>,
}

impl Proc {
    #[must_use]
    pub fn new(program: PathBuf, args: Vec<String>, log: PathBuf) -> Self {
        Proc {
            program,
            args,
            log,
            child: Mutex::new(None),
        }
    }

    pub fn log(&self) -> &Path {
        &self.log
    }

    /// Starts it, and gives its pid. It is told whose child it is, and ends with that process.
    ///
    /// # Errors
    /// It runs already, or can't be started.
    pub fn start(&self) -> Result<u32> {
        let mut child = self.child.lock();
        ensure!(child.is_none(), "failed to start {}: it runs", self.log.display());
        let log = OpenOptions::new().create(true).append(true).open(&self.log);
        let log = log.with_context(|| format!("failed to open {}", self.log.display()))?;
        let own = std::env::current_exe().context("failed to find this program")?;
        let started = Command::new(own)
            .arg("guard")
            .arg(std::process::id().to_string())
            .arg(&self.program)
            .args(&self.args)
            // Settings of whoever runs the harness are not the pool's.
            .env_clear()
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .spawn()
            .with_context(|| format!("failed to start {}", self.program.display()))?;
        let pid = started.id();
        *child = Some(started);
        Ok(pid)
    }

    /// True while it runs (also when it is frozen).
    pub fn alive(&self) -> bool {
        let mut child = self.child.lock();
        match child.as_mut().map(Child::try_wait) {
            Some(Ok(None)) => true,
            Some(_) => {
                *child = None;
                false
            }
            None => false,
        }
    }

    pub fn pid(&self) -> Option<u32> {
        self.child.lock().as_ref().map(Child::id)
    }

    /// Sends a signal; false when it does not run. A child that is not reaped keeps its pid, so nobody else can be hit.
    pub fn signal(&self, signal: Signal) -> bool {
        if !self.alive() {
            return false;
        }
        let pid = self
            .pid()
            .and_then(|pid| i32::try_from(pid).ok())
            .and_then(Pid::from_raw);
        pid.is_some_and(|pid| kill_process(pid, signal).is_ok())
    }

    /// Waits until it has ended.
    ///
    /// # Errors
    /// It has not after `within`.
    pub async fn gone(&self, within: Duration) -> Result<()> {
        let deadline = Instant::now() + within;
        while self.alive() {
            ensure!(
                Instant::now() < deadline,
                "{} did not end within {within:?}",
                self.log.display()
            );
            sleep(LOOK).await;
        }
        Ok(())
    }

    /// SIGKILL, and waits until it is gone.
    ///
    /// # Errors
    /// It is still there.
    pub async fn kill(&self) -> Result<()> {
        self.signal(Signal::KILL);
        self.gone(GONE_WITHIN).await
    }

    /// The part of its log that says that it panicked.
    #[must_use]
    pub fn panic(&self) -> Option<String> {
        let text = std::fs::read(&self.log).ok()?;
        let text = String::from_utf8_lossy(&text);
        let at = text.find("panicked at")?;
        let start = text[..at].rfind('\n').map_or(0, |n| n + 1);
        Some(text[start..].chars().take(500).collect())
    }
}

impl Drop for Proc {
    fn drop(&mut self) {
        self.signal(Signal::KILL);
        if let Some(child) = self.child.lock().as_mut() {
            let _ = child.wait();
        }
    }
}

/// What `guard PARENT PROGRAM ARGS` does: becomes the program, and dies with the harness even when frozen.
///
/// # Errors
/// Only ever returns when the program could not be run.
pub fn guard(parent: u32, program: &str, args: &[String]) -> Result<()> {
    use std::os::unix::process::{CommandExt, parent_id};
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
    ensure!(parent_id() == parent, "the harness is gone");
    Err(Command::new(program).args(args).exec()).with_context(|| format!("failed to run {program}"))
}
