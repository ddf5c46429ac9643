//! One child process: how it is started, watched and stopped.
//!
//! Signals are sent only by the task that also reaps the child, so a pid that the system has given to somebody else is
//! never signalled.

use std::fs::OpenOptions;
use std::os::unix::fs::OpenOptionsExt;
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use anyhow::{Context, Result};
use rustix::process::{Pid, Signal, kill_process};
use tokio::process::{Child as Process, Command};
use tokio_util::sync::CancellationToken;

use super::home::Home;
use super::plan::Spec;
use crate::config::token;

/// A child that was started.
pub struct Child {
    pub pid: u32,
}

/// A child that has ended.
pub struct Ended {
    pub name: String,
    pub status: Option<ExitStatus>,
    /// It did not stop when asked.
    pub killed: bool,
}

/// Starts a role with its output in its log file.
pub fn spawn(spec: &Spec, home: &Home) -> Result<(Child, Process)> {
    let dir = home.dir(&spec.name);
    std::fs::create_dir_all(&dir).with_context(|| format!("failed to create {}", dir.display()))?;
    let path = home.log(&spec.name);
    let log = OpenOptions::new()
        .create(true)
        .append(true)
        .mode(0o600)
        .open(&path)
        .with_context(|| format!("failed to open {}", path.display()))?;
    let exe = std::env::current_exe().context("failed to find the path of this program")?;
    let mut command = Command::new(exe);
    // The role is told everything by its flags: variables meant for `kvpool dev` or for other commands must not reach it.
    for (name, _) in std::env::vars_os().filter(|(name, _)| name.to_string_lossy().starts_with("KVPOOL_")) {
        command.env_remove(name);
    }
    let process = command
        .args(&spec.args)
        .env(token::VARIABLE, home.join_token.reveal())
        .current_dir(&dir)
        .stdin(Stdio::null())
        .stdout(log.try_clone().context("failed to share the log file")?)
        .stderr(log)
        // A group of its own: Ctrl-C reaches only the parent, which then stops the children.
        .process_group(0)
        .kill_on_drop(true)
        .spawn()
        .with_context(|| format!("failed to start {}", spec.name))?;
    let pid = process
        .id()
        .context("failed to learn the pid of a child that just started")?;
    Ok((Child { pid }, process))
}

/// Waits for the end of a child. When `stop` is cancelled it is asked to end, and killed after `grace`.
pub async fn wait(name: String, mut process: Process, stop: CancellationToken, grace: Duration) -> Ended {
    tokio::select! {
        status = process.wait() => return Ended { name, status: status.ok(), killed: false },
        () = stop.cancelled() => {}
    }
    if let Some(pid) = process
        .id()
        .and_then(|id| i32::try_from(id).ok())
        .and_then(Pid::from_raw)
    {
        // Both may fail only when it has just ended by itself. A stopped (SIGSTOP) child must run to see the request.
        let _ = kill_process(pid, Signal::TERM);
        let _ = kill_process(pid, Signal::CONT);
    }
    match tokio::time::timeout(grace, process.wait()).await {
        Ok(status) => Ended {
            name,
            status: status.ok(),
            killed: false,
        },
        Err(_) => {
            let _ = process.start_kill();
            Ended {
                name,
                status: process.wait().await.ok(),
                killed: true,
            }
        }
    }
}
