//! The three roles of `kvpool ... run`: settings in, the library's entry point called, probes and shutdown around it.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use clap::Args;
use kvpool_client::Trust;
use kvpool_proto::JoinToken;
use metrics_exporter_prometheus::PrometheusHandle;
use rustix::process::{Resource, Rlimit};
use serde::{Deserialize, Serialize};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use crate::config::tls::Tls;
use crate::config::values::{ListenAddr, Timing};
use crate::config::{Layers, listen, token};
use crate::http::{Obstacles, Probes};
use crate::shutdown;
use crate::telemetry;

pub mod coordinator;
pub mod proxy;
pub mod shard;

/// Flags that say where the other settings come from; they can't stand in the file itself.
#[derive(Debug, Default, Args)]
pub struct Launch {
    /// TOML file with settings, under the names of the flags (`join-token-file = "..."`)
    #[arg(long, env = "KVPOOL_CONFIG", value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Stop when this process, which must be the parent, ends (set by `kvpool dev`)
    #[arg(long, hide = true, value_name = "PID")]
    pub parent_pid: Option<u32>,
}

/// Settings of every role.
#[derive(Clone, Debug, Default, Args, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Common {
    /// Address of /livez, /readyz and /metrics [default: 127.0.0.1, port 7401 (coordinator), 7423 (shard), 9400 (proxy)]
    #[arg(long, env = "KVPOOL_HTTP", value_name = "IP:PORT")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub http: Option<ListenAddr>,
    /// File with the join token, the secret that all processes of a pool share (or set KVPOOL_JOIN_TOKEN)
    #[arg(long, env = "KVPOOL_JOIN_TOKEN_FILE", value_name = "FILE")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub join_token_file: Option<PathBuf>,
    /// How patient to be: `normal`, or `relaxed` for starved machines. The same for all processes [default: normal]
    #[arg(long, env = "KVPOOL_TIMING")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub timing: Option<Timing>,
    #[command(flatten)]
    #[serde(flatten)]
    pub tls: Tls,
    /// Allow listening on other addresses than loopback, without TLS
    #[arg(long, env = "KVPOOL_INSECURE_BIND", value_name = "BOOL", num_args = 0..=1, require_equals = true,
          default_missing_value = "true")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub insecure_bind: Option<bool>,
    /// What to log, in the syntax of RUST_LOG: `info`, or `warn,kvpool_shard=debug` [default: RUST_LOG, else info]
    #[arg(long, env = "KVPOOL_LOG", value_name = "FILTER")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub log: Option<String>,
}

/// What every role has once its settings are known.
pub struct Base {
    role: &'static str,
    pub join_token: JoinToken,
    pub trust: Trust,
    pub timing: kvpool_proto::Timing,
    pub insecure_bind: bool,
    pub shutdown: CancellationToken,
    http: TcpListener,
    metrics: PrometheusHandle,
}

impl Base {
    /// Starts logs, metrics, signals and the HTTP listener of a role.
    pub async fn start(role: &'static str, launch: &Launch, common: &Common, http_port: u16) -> Result<Self> {
        telemetry::log::start(common.log.as_deref(), telemetry::log::DEFAULT)?;
        raise_fd_limit();
        let insecure_bind = common.insecure_bind.unwrap_or(false);
        let http = listen::bind("http", common.http.unwrap_or(loopback(http_port)), insecure_bind).await?;
        Ok(Base {
            role,
            join_token: token::resolve(common.join_token_file.as_deref())?,
            trust: common.tls.trust()?,
            timing: timing(common.timing.unwrap_or_default()),
            insecure_bind,
            shutdown: shutdown::token(launch.parent_pid)?,
            http,
            metrics: telemetry::metrics::install(role)?,
        })
    }

    /// Where `/metrics` is, as others see it.
    pub fn http_address(&self, host: Option<&str>) -> Result<String> {
        listen::advertised("http", &self.http, host)
    }

    /// Runs the role with its probes until it ends or is told to.
    pub async fn run(
        self,
        obstacles: impl Fn() -> Obstacles + Send + Sync + 'static,
        work: impl Future<Output = Result<()>>,
    ) -> Result<ExitCode> {
        let http = self.http.local_addr()?;
        tracing::info!(role = self.role, pid = std::process::id(), %http, version = env!("CARGO_PKG_VERSION"), "started");
        let probes = Probes::new(self.metrics, obstacles);
        tokio::spawn(crate::http::serve(self.http, probes, self.shutdown.clone()));
        shutdown::supervise(self.role, &self.shutdown, work).await
    }
}

/// The settings of one role, in all their layers.
pub fn settle<T>(command: &[&str], launch: &Launch, common: &Common, own: &T) -> Result<(Common, T)>
where
    T: Serialize + serde::de::DeserializeOwned,
{
    let layers = Layers::new(launch.config.as_deref(), command)?;
    Ok((layers.settle(common)?, layers.settle(own)?))
}

/// Each client connection is a descriptor, and the usual soft limit (1024) is for programs that call select(2).
fn raise_fd_limit() {
    let limit = rustix::process::getrlimit(Resource::Nofile);
    let raised = Rlimit {
        current: limit.maximum,
        maximum: limit.maximum,
    };
    if let Err(error) = rustix::process::setrlimit(Resource::Nofile, raised) {
        tracing::warn!(%error, current = ?limit.current, "failed to raise the limit of open files");
    }
}

/// 127.0.0.1 with this port.
pub fn loopback(port: u16) -> ListenAddr {
    ListenAddr(([127, 0, 0, 1], port).into())
}

/// The preset as the libraries know it.
pub fn timing(timing: Timing) -> kvpool_proto::Timing {
    match timing {
        Timing::Normal => kvpool_proto::Timing::Normal,
        Timing::Relaxed => kvpool_proto::Timing::Relaxed,
    }
}
