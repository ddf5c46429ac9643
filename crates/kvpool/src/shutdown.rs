//! How a process learns that it should stop: SIGTERM, Ctrl-C, SIGHUP, or (for children of `kvpool dev`) the end of the
//! parent.
//!
//! The first signal cancels the token and gives the role [`GRACE`] to finish what is in flight; a second one, or the end of
//! the grace, ends the process at once.

use std::os::unix::process::parent_id;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio_util::sync::CancellationToken;

/// How long a role may take to stop.
pub const GRACE: Duration = Duration::from_secs(5);
/// How often a child looks whether its parent lives.
const PARENT_CHECK: Duration = Duration::from_millis(250);

/// Starts to listen for signals, and returns the token they cancel.
///
/// `parent` is the pid of the `kvpool dev` that started this process. It is watched only while it really is the parent:
/// the same command line run again by hand has another one and lives on by itself.
pub fn token(parent: Option<u32>) -> Result<CancellationToken> {
    let token = CancellationToken::new();
    let mut term = signal(SignalKind::terminate()).context("failed to listen for SIGTERM")?;
    let mut int = signal(SignalKind::interrupt()).context("failed to listen for SIGINT")?;
    // Under nohup a hang-up is to be ignored; a handler would undo that.
    let mut hup = match hangup_is_ignored() {
        true => None,
        false => Some(signal(SignalKind::hangup()).context("failed to listen for SIGHUP")?),
    };
    let parent = parent.filter(|pid| parent_id() == *pid);
    let cancelled = token.clone();
    tokio::spawn(async move {
        let why = tokio::select! {
            _ = term.recv() => "SIGTERM",
            _ = int.recv() => "SIGINT",
            () = hung_up(hup.as_mut()) => "SIGHUP",
            () = orphaned(parent) => "kvpool dev is gone",
        };
        tracing::info!(why, "stopping");
        cancelled.cancel();
        tokio::select! {
            _ = term.recv() => {}
            _ = int.recv() => {}
        }
        std::process::exit(130);
    });
    Ok(token)
}

/// True when this process was started with SIGHUP ignored, as by nohup (signal 1 in `SigIgn` of proc(5)).
fn hangup_is_ignored() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    mask.is_some_and(|mask| u64::from_str_radix(mask.trim(), 16).is_ok_and(|mask| mask & 1 != 0))
}

/// Returns at a hang-up; never when it is ignored.
async fn hung_up(hup: Option<&mut Signal>) {
    match hup {
        Some(hup) => {
            hup.recv().await;
        }
        None => std::future::pending().await,
    }
}

/// Returns when `parent` is no longer the parent; never without one.
async fn orphaned(parent: Option<u32>) {
    let Some(pid) = parent else {
        return std::future::pending().await;
    };
    let mut tick = tokio::time::interval(PARENT_CHECK);
    while parent_id() == pid {
        tick.tick().await;
    }
}

/// Runs a role to its end: until `work` returns, but no longer than [`GRACE`] after the token was cancelled.
pub async fn supervise(
    role: &str,
    token: &CancellationToken,
    work: impl Future<Output = Result<()>>,
) -> Result<ExitCode> {
    let late = async {
        token.cancelled().await;
        tokio::time::sleep(GRACE).await;
    };
    tokio::select! {
        done = work => {
            done?;
            tracing::info!(role, "stopped");
            Ok(ExitCode::SUCCESS)
        }
        () = late => {
            tracing::warn!(role, grace_s = GRACE.as_secs(), "did not stop in time, ending now");
            Ok(ExitCode::from(crate::exit::FAILED))
        }
    }
}
