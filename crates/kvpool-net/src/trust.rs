//! Plain or mutual TLS, and the settings of every gRPC connection.

use crate::names::Role;
use kvpool_proto::{Timing, limits};
use std::fmt;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tonic::transport::{Certificate, ClientTlsConfig, Endpoint, Identity, Server, ServerTlsConfig};

/// Longest PEM file that is read, in bytes.
const MAX_PEM_BYTES: u64 = 1 << 20;
/// A handshake that is not done by then is given up.
const HANDSHAKE: Duration = Duration::from_secs(10);

/// Why a door can't be made.
#[derive(Debug, thiserror::Error)]
pub enum TrustError {
    #[error("failed to read {what} {path}: {source}")]
    Read {
        what: &'static str,
        path: PathBuf,
        source: std::io::Error,
    },
    #[error("failed to read {what} {path}: it is larger than {MAX_PEM_BYTES} bytes")]
    TooLarge { what: &'static str, path: PathBuf },
    #[error("failed to use {what} {path}: it holds no PEM block of that kind")]
    NotPem { what: &'static str, path: PathBuf },
    #[error("failed to use the certificate {cert} with its key: {why}")]
    Unusable { cert: PathBuf, why: String },
    #[error("failed to name a certificate {0:?}: a name is `*` or 1 to 63 letters, digits, `-` or `_`")]
    Name(String),
}

/// Three PEM files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsFiles {
    /// Certificates of the CA that callers and members are checked against.
    pub ca: PathBuf,
    /// This process' certificate, followed by any between it and the CA.
    pub cert: PathBuf,
    /// Its private key.
    pub key: PathBuf,
}

/// How connections are secured.
#[derive(Clone, Default)]
pub enum Trust {
    /// No TLS.
    #[default]
    Plain,
    /// Mutual TLS.
    Mutual(Arc<Mutual>),
}

/// The two sides of mutual TLS.
pub struct Mutual {
    server: ServerTlsConfig,
    client: ClientTlsConfig,
}

impl fmt::Debug for Trust {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Trust::Plain => "plain",
            Trust::Mutual(_) => "mutual TLS",
        })
    }
}

impl Trust {
    /// Reads and checks the files.
    ///
    /// # Errors
    /// [`TrustError`] with the file that can't be used.
    pub fn load(files: &TlsFiles) -> Result<Trust, TrustError> {
        let ca = Certificate::from_pem(pem("the CA certificate", &files.ca, "CERTIFICATE")?);
        let cert = pem("the certificate", &files.cert, "CERTIFICATE")?;
        let key = pem("the private key", &files.key, "PRIVATE KEY")?;
        let identity = Identity::from_pem(cert, key);
        let server = ServerTlsConfig::new()
            .identity(identity.clone())
            .client_ca_root(ca.clone())
            .timeout(HANDSHAKE);
        let client = ClientTlsConfig::new()
            .identity(identity)
            .ca_certificate(ca)
            .domain_name(Role::Member.domain())
            .timeout(HANDSHAKE);
        let unusable = |e: tonic::transport::Error| TrustError::Unusable {
            cert: files.cert.clone(),
            why: words(&e),
        };
        // Both are built here once: a key that does not fit its certificate must not wait for the first connection.
        Server::builder().tls_config(server.clone()).map_err(unusable)?;
        Endpoint::from_static("https://member.kvpool")
            .tls_config(client.clone())
            .map_err(unusable)?;
        Ok(Trust::Mutual(Arc::new(Mutual { server, client })))
    }

    /// True with TLS.
    #[must_use]
    pub fn is_secure(&self) -> bool {
        matches!(self, Trust::Mutual(_))
    }

    /// A server's builder that lets in whom this trusts.
    ///
    /// # Errors
    /// A sentence; not after [`Trust::load`] has checked the files.
    pub fn server(&self) -> Result<Server, String> {
        let server = Server::builder()
            .http2_keepalive_interval(Some(limits::KEEPALIVE_INTERVAL))
            .http2_keepalive_timeout(Some(limits::KEEPALIVE_TIMEOUT));
        match self {
            Trust::Plain => Ok(server),
            Trust::Mutual(mutual) => server.tls_config(mutual.server.clone()).map_err(|e| words(&e)),
        }
    }

    /// Settings of every connection to a member: keepalive also when idle, bounded connecting. The name is looked up again with
    /// every new connection.
    ///
    /// # Errors
    /// A sentence when the address is not `host:port`.
    pub fn endpoint(&self, address: &str, timing: Timing) -> Result<Endpoint, String> {
        let scheme = if self.is_secure() { "https" } else { "http" };
        let endpoint = Endpoint::from_shared(format!("{scheme}://{address}"))
            .map_err(|e| format!("failed to read the address {address:?}: {e}"))?;
        let endpoint = endpoint
            .connect_timeout(timing.attempt() / 2)
            .tcp_nodelay(true)
            .http2_keep_alive_interval(limits::KEEPALIVE_INTERVAL)
            .keep_alive_timeout(limits::KEEPALIVE_TIMEOUT)
            .keep_alive_while_idle(true);
        match self {
            Trust::Plain => Ok(endpoint),
            Trust::Mutual(mutual) => endpoint.tls_config(mutual.client.clone()).map_err(|e| words(&e)),
        }
    }
}

/// An error with everything beneath it: tonic's own says "transport error" only.
fn words(error: &dyn std::error::Error) -> String {
    let mut said = error.to_string();
    let mut below = error.source();
    while let Some(cause) = below {
        said = format!("{said}: {cause}");
        below = cause.source();
    }
    said
}

/// A bounded file with at least one PEM block whose label ends in `kind`.
fn pem(what: &'static str, path: &Path, kind: &str) -> Result<Vec<u8>, TrustError> {
    let read = |source| TrustError::Read {
        what,
        path: path.to_owned(),
        source,
    };
    let file = std::fs::File::open(path).map_err(read)?;
    let mut bytes = Vec::new();
    file.take(MAX_PEM_BYTES + 1).read_to_end(&mut bytes).map_err(read)?;
    if bytes.len() as u64 > MAX_PEM_BYTES {
        return Err(TrustError::TooLarge {
            what,
            path: path.to_owned(),
        });
    }
    let label = |line: &[u8]| {
        line.starts_with(b"-----BEGIN ") && line.trim_ascii_end().ends_with(format!("{kind}-----").as_bytes())
    };
    if !bytes.split(|b| *b == b'\n').any(label) {
        return Err(TrustError::NotPem {
            what,
            path: path.to_owned(),
        });
    }
    Ok(bytes)
}
