//! The one place that opens listening sockets: loopback unless `--insecure-bind` was said, and an error that names the
//! setting and the fix.

use std::io;
use std::net::SocketAddr;

use anyhow::Result;
use tokio::net::TcpListener;

use super::values::ListenAddr;
use crate::exit::{failure, usage};

/// Opens a listener for the setting `flag`.
///
/// # Errors
/// The address is not a loopback one and `insecure_bind` is false, or the system refuses it.
pub async fn bind(flag: &str, address: ListenAddr, insecure_bind: bool) -> Result<TcpListener> {
    allowed(flag, address.0, insecure_bind)?;
    TcpListener::bind(address.0)
        .await
        .map_err(|e| refused(flag, address.0, &e))
}

/// Refuses addresses that others can reach. `insecure_bind` is also true for a listener with TLS.
fn allowed(flag: &str, address: SocketAddr, insecure_bind: bool) -> Result<()> {
    if address.ip().is_loopback() || insecure_bind {
        return Ok(());
    }
    Err(usage(format!(
        "failed to listen on {address} (--{flag}): it is not a loopback address and this port has no TLS. Use \
         127.0.0.1:{}, or say --insecure-bind if the network is trusted",
        address.port()
    )))
}

/// Words for a failed bind.
pub fn refused(flag: &str, address: SocketAddr, error: &io::Error) -> anyhow::Error {
    let fix = match error.kind() {
        io::ErrorKind::AddrInUse => "the port is taken; stop what uses it or choose another",
        io::ErrorKind::PermissionDenied => "not permitted; ports below 1024 need privileges, choose a higher one",
        io::ErrorKind::AddrNotAvailable => "this machine has no such address",
        _ => "choose another address",
    };
    failure(format!("failed to listen on {address} (--{flag}): {fix} ({error})"))
}

/// The address others reach a listener at: `host` where one is given, else the one it is bound to.
///
/// # Errors
/// It is bound to all addresses (`0.0.0.0`) and no host is given.
pub fn advertised(flag: &str, listener: &TcpListener, host: Option<&str>) -> Result<String> {
    let bound = listener.local_addr()?;
    match host {
        Some(host) => Ok(format!("{host}:{}", bound.port())),
        None if bound.ip().is_unspecified() => Err(usage(format!(
            "--{flag} {bound} is every address of this machine: say with --advertise-host which one others connect to"
        ))),
        None => Ok(bound.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn only_loopback_unless_told_otherwise() {
        let any: ListenAddr = "0.0.0.0:0".parse().unwrap();
        let error = bind("resp", any, false).await.unwrap_err().to_string();
        assert!(error.contains("--resp") && error.contains("--insecure-bind"), "{error}");
        let listener = bind("resp", any, true).await.unwrap();
        let error = advertised("resp", &listener, None).unwrap_err().to_string();
        assert!(error.contains("--advertise-host"), "{error}");
        let port = listener.local_addr().unwrap().port();
        assert_eq!(
            advertised("resp", &listener, Some("host-7")).unwrap(),
            format!("host-7:{port}")
        );
    }

    #[tokio::test]
    async fn a_taken_port_names_the_setting() {
        let first = bind("lm", "127.0.0.1:0".parse().unwrap(), false).await.unwrap();
        let taken = ListenAddr(first.local_addr().unwrap());
        let error = bind("lm", taken, false).await.unwrap_err().to_string();
        assert!(error.contains("--lm") && error.contains("taken"), "{error}");
    }
}
