//! The three files of mutual TLS. All of them, or none.

use std::path::PathBuf;

use anyhow::Result;
use clap::Args;
use kvpool_net::{TlsFiles, Trust};
use serde::{Deserialize, Serialize};

use crate::exit::usage;

/// Mutual TLS for gRPC: between coordinators, and from shards, proxies and the command line to them.
#[derive(Clone, Debug, Default, Args, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Tls {
    /// PEM file with the CA that all processes of the pool are checked against; with --tls-cert and --tls-key turns on
    /// mutual TLS for gRPC (`kvpool cert` makes all three)
    #[arg(long, env = "KVPOOL_TLS_CA", value_name = "FILE")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tls_ca: Option<PathBuf>,
    /// PEM file with this process' certificate
    #[arg(long, env = "KVPOOL_TLS_CERT", value_name = "FILE")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tls_cert: Option<PathBuf>,
    /// PEM file with its private key
    #[arg(long, env = "KVPOOL_TLS_KEY", value_name = "FILE")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tls_key: Option<PathBuf>,
}

impl Tls {
    /// What the files say.
    ///
    /// # Errors
    /// Some of the three are missing, or can't be used; names the setting and the fix.
    pub fn trust(&self) -> Result<Trust> {
        let files = [("ca", &self.tls_ca), ("cert", &self.tls_cert), ("key", &self.tls_key)];
        let missing: Vec<String> = files
            .iter()
            .filter(|(_, file)| file.is_none())
            .map(|(name, _)| format!("--tls-{name}"))
            .collect();
        let (Some(ca), Some(cert), Some(key)) = (&self.tls_ca, &self.tls_cert, &self.tls_key) else {
            if missing.len() == files.len() {
                return Ok(Trust::Plain);
            }
            let missing = missing.join(" and ");
            return Err(usage(format!(
                "{missing} is missing: TLS needs --tls-ca, --tls-cert and --tls-key together, or none of them"
            )));
        };
        let files = TlsFiles {
            ca: ca.clone(),
            cert: cert.clone(),
            key: key.clone(),
        };
        Trust::load(&files).map_err(|e| {
            usage(format!(
                "{e}. The files are those of --tls-ca, --tls-cert and --tls-key"
            ))
        })
    }
}
