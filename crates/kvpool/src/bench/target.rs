//! The servers under test: their names, addresses, process ids and keys.

use std::net::{SocketAddr, ToSocketAddrs};

use anyhow::{Context, Result, bail, ensure};
use kvpool_state::{SLOTS, slot_of};

use super::client::{Conn, Key, Protocol};
use super::cpu::Snapshot;
use super::raw::{RawKind, RawServer};

/// One server, with the connections kept to it.
pub struct Target {
    /// Its name in tables: what stands before `=`, else the URL.
    pub name: String,
    pub conns: Vec<Conn>,
    addr: SocketAddr,
    protocol: Protocol,
    pids: Vec<u32>,
    /// Slots its keys must lie in, as `(first, last)`; empty for any.
    slots: Vec<(u16, u16)>,
    /// Ends with the target.
    _raw: Option<RawServer>,
}

impl Target {
    /// Parses `[NAME=]URL` and finds what `pids` and `slots` say about it.
    pub fn parse(text: &str, pids: &[String], slots: &[String]) -> Result<Self> {
        let (name, url) = match text.split_once('=') {
            Some((name, url)) if !name.contains(':') => (name, url),
            _ => (text, text),
        };
        let (protocol, addr, raw) = match (url, url.split_once("://")) {
            ("raw", _) => raw_server(RawKind::Plain)?,
            ("raw-sum", _) => raw_server(RawKind::Sum)?,
            (_, Some(("redis" | "resp", rest))) => (Protocol::Resp, resolve(rest)?, None),
            (_, Some(("lm", rest))) => (Protocol::Lm, resolve(rest)?, None),
            _ => bail!("failed to understand {url:?}: redis://, resp:// or lm://HOST:PORT, raw or raw-sum are known"),
        };
        let own = |option: &&String| {
            let of = option.rsplit_once('=').map(|(of, _)| of);
            of == Some(name) || of == Some(url)
        };
        let mut target = Self {
            name: name.to_owned(),
            conns: Vec::new(),
            addr,
            protocol,
            pids: raw.iter().map(RawServer::pid).collect(),
            slots: Vec::new(),
            _raw: raw,
        };
        for option in pids.iter().filter(own) {
            target.pids.extend(numbers(option)?.iter().map(|&(pid, _)| pid));
        }
        for option in slots.iter().filter(own) {
            for (first, last) in numbers(option)? {
                ensure!(
                    first <= last && last < u32::from(SLOTS),
                    "failed to read {option:?}: slots are 0-16383"
                );
                target.slots.push((first as u16, last as u16));
            }
        }
        Ok(target)
    }

    /// Opens connections until there are `count`.
    pub fn connect(&mut self, count: usize) -> Result<()> {
        while self.conns.len() < count {
            self.conns.push(Conn::open(self.addr, self.protocol)?);
        }
        Ok(())
    }

    /// The keys for values of one length. They carry the target's name: two targets may be ways into one pool.
    pub fn keys(&self, len: u64, count: u32, first_number: u32) -> Vec<Key> {
        let name = |number: u32| {
            let mut tries = 0u32..;
            let name = |n: u32| format!("kvpool-bench:{}:{len}:{number}:{n}", self.name);
            let fits = |n: &u32| {
                let slot = slot_of(name(*n).as_bytes());
                self.slots.is_empty() || self.slots.iter().any(|&(first, last)| first <= slot && slot <= last)
            };
            // A slot of 16,384 is met after some tens of thousands of names: the search ends.
            name(tries.by_ref().take(4_000_000).find(fits).unwrap_or_default())
        };
        (0..count)
            .map(|number| Key {
                name: name(number),
                number: first_number + number,
            })
            .collect()
    }

    /// CPU times of the server's processes, if they are known.
    pub fn cpu(&self) -> Option<Snapshot> {
        (!self.pids.is_empty()).then(|| Snapshot::take(&self.pids))
    }
}

fn raw_server(kind: RawKind) -> Result<(Protocol, SocketAddr, Option<RawServer>)> {
    let server = RawServer::start(kind)?;
    let addr = SocketAddr::from(([127, 0, 0, 1], server.port));
    Ok((Protocol::Raw, addr, Some(server)))
}

fn resolve(host_port: &str) -> Result<SocketAddr> {
    let mut found = host_port
        .to_socket_addrs()
        .with_context(|| format!("failed to resolve {host_port:?}"))?;
    found
        .next()
        .with_context(|| format!("failed to resolve {host_port:?}: no address"))
}

/// The list after the last `=`: numbers and ranges, as pairs.
fn numbers(option: &str) -> Result<Vec<(u32, u32)>> {
    let (_, list) = option.rsplit_once('=').unwrap_or_default();
    let one = |item: &str| -> Result<(u32, u32)> {
        let (first, last) = item.split_once('-').unwrap_or((item, item));
        let parse = |text: &str| {
            text.trim()
                .parse()
                .with_context(|| format!("failed to read a number in {option:?}"))
        };
        Ok((parse(first)?, parse(last)?))
    };
    list.split(',').map(one).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_pids_and_slots_find_their_target() {
        let pids = [
            "other=1".to_owned(),
            "ours=7,8".to_owned(),
            "resp://127.0.0.1:7000=9".to_owned(),
        ];
        let slots = ["ours=0-99,16383".to_owned()];
        let target = Target::parse("ours=resp://127.0.0.1:7000", &pids, &slots).expect("well formed");
        assert_eq!((target.name.as_str(), &target.pids[..]), ("ours", &[7, 8, 9][..]));
        for key in target.keys(65536, 4, 0) {
            let slot = slot_of(key.name.as_bytes());
            assert!(slot <= 99 || slot == 16383);
        }
        for bad in ["http://127.0.0.1:1", "ours=127.0.0.1:1", "redis://127.0.0.1"] {
            assert!(Target::parse(bad, &[], &[]).is_err(), "{bad}");
        }
        assert!(Target::parse("a=lm://127.0.0.1:1", &["a=x".to_owned()], &[]).is_err());
        assert!(Target::parse("a=lm://127.0.0.1:1", &[], &["a=9-20000".to_owned()]).is_err());
    }
}
