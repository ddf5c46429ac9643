//! Logs go to standard error: text for people on a terminal, one JSON object per line otherwise. Secrets and block bytes
//! are never logged.

use std::io::IsTerminal;

use anyhow::Result;
use tracing_subscriber::EnvFilter;

use crate::exit::usage;

/// What is logged when neither `--log`, `KVPOOL_LOG` nor `RUST_LOG` says otherwise. What matters of openraft, kvpool-raft says.
pub const DEFAULT: &str = "info,openraft=warn";

/// Starts logging. `filter` is `--log`, in the syntax of `RUST_LOG`: `info`, or `warn,kvpool_shard=debug`.
pub fn start(filter: Option<&str>, default: &str) -> Result<()> {
    let from_environment = std::env::var("RUST_LOG").ok().filter(|text| !text.is_empty());
    let text = filter.map(str::to_owned).or(from_environment);
    let text = text.as_deref().unwrap_or(default);
    let filter = EnvFilter::try_new(text).map_err(|e| {
        usage(format!(
            "failed to read the log filter `{text}` (--log, RUST_LOG): {e}; try `info` or `warn,kvpool=debug`"
        ))
    })?;
    let lines = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr);
    let started = if std::io::stderr().is_terminal() {
        lines.with_target(false).try_init()
    } else {
        lines
            .json()
            .flatten_event(true)
            .with_current_span(true)
            .with_span_list(false)
            .try_init()
    };
    started.map_err(|e| crate::exit::failure(format!("failed to start logging: {e}")))
}
