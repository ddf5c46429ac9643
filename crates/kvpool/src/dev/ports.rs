//! The addresses of all children. Free ones are found by binding port 0; with `--data-dir` they are remembered, because
//! coordinators know each other by address. They are held bound until just before the children start.

use std::io::ErrorKind;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

use super::DevArgs;
use super::home::Home;
use crate::config::listen;
use crate::exit::{failure, usage};

/// Ports on 127.0.0.1.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Ports {
    pub coordinators: Vec<CoordinatorPorts>,
    pub shards: Vec<ShardPorts>,
    /// Chosen by flags at each run, so not remembered.
    #[serde(skip)]
    pub proxy: ProxyPorts,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CoordinatorPorts {
    pub grpc: u16,
    pub http: u16,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShardPorts {
    pub peer: u16,
    pub resp: u16,
    pub lm: u16,
    pub http: u16,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ProxyPorts {
    pub resp: u16,
    pub lm: u16,
    pub http: u16,
}

/// `host:port` of a child's port.
pub fn at(port: u16) -> String {
    format!("127.0.0.1:{port}")
}

/// Listeners that keep the chosen ports from others.
#[derive(Default)]
pub struct Held(Vec<TcpListener>);

/// Children of a run that was killed need a moment to notice and to let go of their ports.
const PATIENCE: Duration = Duration::from_secs(3);

impl Held {
    fn free(&mut self) -> Result<u16> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).context("failed to find a free port")?;
        let port = listener.local_addr()?.port();
        self.0.push(listener);
        Ok(port)
    }

    /// Takes this very port (0 = a free one); `refused` puts a failure into words.
    async fn exactly(&mut self, port: u16, refused: impl Fn(&std::io::Error) -> anyhow::Error) -> Result<u16> {
        if port == 0 {
            return self.free();
        }
        let began = Instant::now();
        loop {
            match TcpListener::bind((Ipv4Addr::LOCALHOST, port)) {
                Ok(listener) => {
                    self.0.push(listener);
                    return Ok(port);
                }
                Err(e) if e.kind() == ErrorKind::AddrInUse && began.elapsed() < PATIENCE && !listens(port) => {
                    tokio::time::sleep(Duration::from_millis(50)).await;
                }
                Err(e) => return Err(refused(&e)),
            }
        }
    }
}

/// True when a server holds the port, rather than a connection that is about to end.
fn listens(port: u16) -> bool {
    let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
    std::net::TcpStream::connect_timeout(&address, Duration::from_millis(200)).is_ok()
}

/// Finds a port for every listener of the pool, and holds them all.
pub async fn choose(args: &DevArgs, home: &Home) -> Result<(Ports, Held)> {
    let mut held = Held::default();
    let mut ports = Ports::default();
    // First those that may be taken: the user hears of it before anything is started.
    for (flag, port, chosen) in [
        ("resp-port", args.resp_port, &mut ports.proxy.resp),
        ("lm-port", args.lm_port, &mut ports.proxy.lm),
        ("http-port", args.http_port, &mut ports.proxy.http),
    ] {
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
        if port != 0 {
            *chosen = held.exactly(port, |e| listen::refused(flag, address, e)).await?;
        }
    }
    let remembered = home.remembered_ports()?.unwrap_or_default();
    if !remembered.coordinators.is_empty() && remembered.coordinators.len() != args.coordinators {
        return Err(usage(format!(
            "--coordinators {} does not fit {}: its cluster was made with {}. Use that number or another --data-dir",
            args.coordinators,
            home.root().display(),
            remembered.coordinators.len()
        )));
    }
    for n in 0..args.coordinators {
        let old = remembered.coordinators.get(n).copied().unwrap_or_default();
        let name = format!("coordinator-{}", n + 1);
        let grpc = held.exactly(old.grpc, |e| kept(&name, old.grpc, home, e)).await?;
        let http = held.exactly(old.http, |e| kept(&name, old.http, home, e)).await?;
        ports.coordinators.push(CoordinatorPorts { grpc, http });
    }
    for n in 0..args.shards {
        let old = remembered.shards.get(n).copied().unwrap_or_default();
        let name = format!("shard-{}", n + 1);
        let mut take = [old.peer, old.resp, old.lm, old.http];
        for port in &mut take {
            *port = held.exactly(*port, |e| kept(&name, *port, home, e)).await?;
        }
        let [peer, resp, lm, http] = take;
        ports.shards.push(ShardPorts { peer, resp, lm, http });
    }
    // Last, so that none of them is one that is remembered for somebody else.
    for chosen in [&mut ports.proxy.resp, &mut ports.proxy.lm, &mut ports.proxy.http] {
        if *chosen == 0 {
            *chosen = held.free()?;
        }
    }
    Ok((ports, held))
}

/// A remembered port was taken by somebody else in the meantime.
fn kept(name: &str, port: u16, home: &Home, error: &std::io::Error) -> anyhow::Error {
    failure(format!(
        "failed to give {name} its port {port} of the last run in {}: {error}. Is another `kvpool dev` running there? Stop \
         what uses the port, or use another --data-dir",
        home.root().display()
    ))
}
