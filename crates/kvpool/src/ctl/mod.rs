//! The commands that ask, `kvpool status` and `kvpool get`, and those that change members: `drain`, `undrain`, `remove`,
//! `release`, `scale`.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::Result;
use clap::Args;
use kvpool_client::{Client, ClientConfig, ClientError};

use crate::config::tls::Tls;
use crate::config::token;
use crate::config::values::{Endpoint, Timing};
use crate::exit::{failure, unreachable};
use crate::roles::timing;

pub mod get;
pub mod members;
pub mod scale;
pub mod status;
pub mod table;
pub mod text;

/// Where to ask.
#[derive(Debug, Args)]
pub struct Target {
    /// gRPC addresses of the coordinators; one is enough, more are tried in turn
    #[arg(
        long,
        env = "KVPOOL_ENDPOINTS",
        value_delimiter = ',',
        value_name = "HOST:PORT",
        default_value = "127.0.0.1:7400"
    )]
    endpoints: Vec<Endpoint>,
    /// File with the join token of the pool (or set KVPOOL_JOIN_TOKEN)
    #[arg(long, env = "KVPOOL_JOIN_TOKEN_FILE", value_name = "FILE")]
    join_token_file: Option<PathBuf>,
    #[command(flatten)]
    tls: Tls,
    /// Longest wait for an answer, such as 500ms or 1m
    #[arg(long, env = "KVPOOL_TIMEOUT", value_name = "TIME", default_value = "5s")]
    timeout: humantime::Duration,
}

impl Target {
    /// A client of these coordinators.
    pub fn client(&self) -> Result<Client> {
        Ok(Client::new(ClientConfig {
            endpoints: self.endpoints.iter().map(|e| e.0.clone()).collect(),
            join_token: token::resolve(self.join_token_file.as_deref())?,
            trust: self.tls.trust()?,
            timing: timing(Timing::Normal),
        }))
    }

    /// Waits for an answer, but no longer than `--timeout`, and puts failures into words.
    pub async fn ask<T>(&self, call: impl Future<Output = Result<T, ClientError>>) -> Result<T> {
        match tokio::time::timeout(Duration::from(self.timeout), call).await {
            Ok(Ok(answer)) => Ok(answer),
            Ok(Err(error)) => Err(self.explain(&error)),
            Err(_) => Err(unreachable(format!(
                "no answer from {} within {} (--timeout); {}",
                self.shown(),
                self.timeout,
                "do the coordinators run, and is --endpoints (KVPOOL_ENDPOINTS) theirs?"
            ))),
        }
    }

    fn explain(&self, error: &ClientError) -> anyhow::Error {
        let shown = self.shown();
        match error {
            ClientError::Unreachable { last, .. } => unreachable(format!(
                "no coordinator answers at {shown}: {last}. Start a pool with `kvpool dev`, or name its coordinators with \
                 --endpoints or KVPOOL_ENDPOINTS"
            )),
            other => failure(format!("{other} (asked {shown})")),
        }
    }

    fn shown(&self) -> String {
        let list: Vec<&str> = self.endpoints.iter().map(|e| e.0.as_str()).collect();
        list.join(", ")
    }
}
