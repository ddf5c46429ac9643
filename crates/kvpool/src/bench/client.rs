//! Thin blocking clients, one per protocol: one vectored write per request, as few reads as the socket allows, values
//! straight into the caller's buffer.

use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use kvpool_wire::lm;

use super::raw;

/// A server that is silent this long fails the run instead of hanging it.
const PATIENCE: Duration = Duration::from_secs(20);

/// What is spoken on a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protocol {
    Resp,
    Lm,
    Raw,
}

/// A key of the run: its name on the wire and its number for the raw server.
#[derive(Clone, Debug)]
pub struct Key {
    pub name: String,
    pub number: u32,
}

/// One connection.
pub struct Conn {
    stream: TcpStream,
    protocol: Protocol,
    /// Header and, for RESP, trailer of what is sent or read.
    scratch: Vec<u8>,
}

impl Conn {
    pub fn open(addr: SocketAddr, protocol: Protocol) -> Result<Self> {
        let stream =
            TcpStream::connect_timeout(&addr, PATIENCE).with_context(|| format!("failed to connect to {addr}"))?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        Ok(Self {
            stream,
            protocol,
            scratch: Vec::new(),
        })
    }

    /// Stores a value. `lm://` has no answer, so an EXIST on the same connection is the barrier, and part of the cost.
    pub fn put(&mut self, key: &Key, body: &[u8]) -> Result<()> {
        match self.protocol {
            Protocol::Resp => {
                self.scratch.clear();
                let (name, len) = (&key.name, body.len());
                write!(
                    self.scratch,
                    "*3\r\n$3\r\nSET\r\n${}\r\n{name}\r\n${len}\r\n",
                    name.len()
                )?;
                self.send(body, b"\r\n")?;
                let mut reply = [0; 5];
                self.stream.read_exact(&mut reply)?;
                ensure!(
                    &reply == b"+OK\r\n",
                    "SET was answered with {:?}",
                    String::from_utf8_lossy(&reply)
                );
            }
            Protocol::Lm => {
                self.lm_header(lm::LmCommand::Put, key, body.len())?;
                self.send(body, b"")?;
                // Whether the server kept the value is the later read's business.
                self.exists(key)?;
            }
            Protocol::Raw => {
                self.raw_header(1, key, body.len());
                self.send(body, b"")?;
                ensure!(
                    self.raw_reply()? == body.len() as u64,
                    "the raw server answered out of step"
                );
            }
        }
        Ok(())
    }

    /// Reads a value of exactly `body.len()` bytes (ten or more: a RESP miss must not be longer than the header); false
    /// for a miss.
    pub fn get(&mut self, key: &Key, body: &mut [u8]) -> Result<bool> {
        let len = body.len();
        match self.protocol {
            Protocol::Resp => {
                self.resp_command("GET", key)?;
                let expect = format!("${len}\r\n");
                let miss = |head: &[u8]| match head {
                    [b'-', ..] => bail!("GET was answered with {:?}", String::from_utf8_lossy(head)),
                    [b'$', b'-', b'1', b'\r', b'\n'] | [b'_', b'\r', b'\n'] => Ok(true),
                    _ => Ok(false),
                };
                if !self.receive(expect.len(), body, 2, miss)? {
                    return Ok(false);
                }
                let head = &self.scratch[..expect.len()];
                ensure!(
                    head == expect.as_bytes(),
                    "GET promised {:?}",
                    String::from_utf8_lossy(head)
                );
                ensure!(self.scratch.ends_with(b"\r\n"), "GET's value has no end");
            }
            Protocol::Lm => {
                self.lm_header(lm::LmCommand::Get, key, 0)?;
                self.send(&[], b"")?;
                let miss = |head: &[u8]| match head.try_into().map(lm::LmReply::decode) {
                    Ok(Some(reply)) if reply.ok => {
                        ensure!(reply.length as usize == len, "GET promised {} bytes", reply.length);
                        Ok(false)
                    }
                    Ok(Some(_)) => Ok(true),
                    Ok(None) => bail!("GET was answered with an unknown code"),
                    Err(_) => Ok(false),
                };
                return self.receive(lm::REPLY_BYTES, body, 0, miss);
            }
            Protocol::Raw => {
                self.raw_header(2, key, 0);
                self.send(&[], b"")?;
                let miss = |head: &[u8]| match head.try_into().map(u64::from_le_bytes) {
                    Ok(raw::MISS) => Ok(true),
                    Ok(found) if found != len as u64 => bail!("the raw server promised {found} bytes"),
                    _ => Ok(false),
                };
                return self.receive(8, body, 0, miss);
            }
        }
        Ok(true)
    }

    /// Asks for a key.
    pub fn exists(&mut self, key: &Key) -> Result<bool> {
        match self.protocol {
            Protocol::Resp => {
                self.resp_command("EXISTS", key)?;
                let mut reply = [0; 4];
                self.stream.read_exact(&mut reply)?;
                match &reply {
                    b":1\r\n" => Ok(true),
                    b":0\r\n" => Ok(false),
                    other => bail!("EXISTS was answered with {:?}", String::from_utf8_lossy(other)),
                }
            }
            Protocol::Lm => {
                self.lm_header(lm::LmCommand::Exist, key, 0)?;
                self.send(&[], b"")?;
                let mut reply = [0; lm::REPLY_BYTES];
                self.stream.read_exact(&mut reply)?;
                Ok(lm::LmReply::decode(&reply)
                    .context("EXIST was answered with an unknown code")?
                    .ok)
            }
            Protocol::Raw => {
                self.raw_header(3, key, 0);
                self.send(&[], b"")?;
                Ok(self.raw_reply()? != raw::MISS)
            }
        }
    }

    fn resp_command(&mut self, command: &str, key: &Key) -> Result<()> {
        self.scratch.clear();
        let name = &key.name;
        write!(
            self.scratch,
            "*2\r\n${}\r\n{command}\r\n${}\r\n{name}\r\n",
            command.len(),
            name.len()
        )?;
        self.send(&[], b"")
    }

    fn lm_header(&mut self, command: lm::LmCommand, key: &Key, len: usize) -> Result<()> {
        // A shape of uint8 whose product is the length, as a real client would send.
        let put = command == lm::LmCommand::Put;
        let meta = match put {
            true => lm::LmMeta {
                fmt: 4,
                dtype: 6,
                shape: [i32::try_from(len)?, 0, 0, 0],
            },
            false => lm::LmMeta {
                fmt: 1,
                dtype: 2,
                shape: [0; 4],
            },
        };
        let request = lm::LmRequest {
            command,
            length: u32::try_from(len)?,
            meta,
            key: key.name.as_bytes(),
        };
        self.scratch.clear();
        self.scratch.extend_from_slice(&request.encode());
        Ok(())
    }

    fn raw_header(&mut self, op: u8, key: &Key, len: usize) {
        self.scratch.clear();
        self.scratch
            .extend_from_slice(&raw::request(op, key.number, len as u64));
    }

    fn raw_reply(&mut self) -> Result<u64> {
        let mut reply = [0; 8];
        self.stream.read_exact(&mut reply)?;
        Ok(u64::from_le_bytes(reply))
    }

    /// Sends scratch, body and trailer.
    fn send(&mut self, body: &[u8], trailer: &[u8]) -> Result<()> {
        let mut slices = [IoSlice::new(&self.scratch), IoSlice::new(body), IoSlice::new(trailer)];
        raw::write_all_vectored(&mut self.stream, &mut slices).context("failed to send")
    }

    /// Reads a header of `head` bytes, the body and `tail` bytes, in one vectored read where possible. Header and tail
    /// end up in scratch. `miss` looks at what is there of the header: false is returned as soon as it says so.
    fn receive(
        &mut self,
        head: usize,
        body: &mut [u8],
        tail: usize,
        miss: impl Fn(&[u8]) -> Result<bool>,
    ) -> Result<bool> {
        self.scratch.clear();
        self.scratch.resize(head + tail, 0);
        let (all, mut got) = (head + body.len() + tail, 0);
        while got < all {
            let (first, last) = self.scratch.split_at_mut(head);
            let mut slices = [
                IoSliceMut::new(&mut first[got.min(head)..]),
                IoSliceMut::new(&mut body[got.saturating_sub(head).min(all - head - tail)..]),
                IoSliceMut::new(&mut last[got.saturating_sub(all - tail)..]),
            ];
            let skip = slices.iter().take_while(|slice| slice.is_empty()).count();
            let n = match self.stream.read_vectored(&mut slices[skip..]) {
                Ok(0) => bail!("the server closed the connection"),
                Ok(n) => n,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
                Err(e) => return Err(e).context("failed to receive"),
            };
            let before = got;
            got += n;
            if before < head && miss(&self.scratch[..got.min(head)])? {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

#[cfg(test)]
mod tests;
