//! The thinnest blocking request/response server: what loopback itself costs. One thread per connection, one recycled
//! buffer per key, no index to speak of. It runs as a child process (this binary again), so that its CPU time is its own.
//!
//! Request: op (1 put, 2 get, 3 exists), 3 bytes of padding, key number (u32), length (u64), all little-endian; a put's
//! body follows. Reply: a u64: the length, or [`MISS`]; a get's body follows.

use std::collections::HashMap;
use std::io::{self, IoSlice, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Context, Result};

/// Bytes of a request header.
pub const REQUEST_BYTES: usize = 16;
/// The length that says "not here".
pub const MISS: u64 = u64::MAX;
/// Longest value taken, in bytes, and most keys.
const MAX_BYTES: u64 = 64 << 20;
const MAX_KEYS: u32 = 1024;
/// Bytes summed at a time, while they are in the cache.
const SUM_STEP: usize = 256 * 1024;

/// What the server does besides moving bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum RawKind {
    /// Nothing.
    Plain,
    /// Sums what is put (CRC32C), as a store with checksums must.
    Sum,
}

/// Encodes a request header.
pub fn request(op: u8, key: u32, len: u64) -> [u8; REQUEST_BYTES] {
    let mut header = [0; REQUEST_BYTES];
    header[0] = op;
    header[4..8].copy_from_slice(&key.to_le_bytes());
    header[8..].copy_from_slice(&len.to_le_bytes());
    header
}

type Slots = Arc<Mutex<HashMap<u32, Arc<Mutex<Vec<u8>>>>>>;

/// Serves until standard input ends (the parent is gone or done). Prints the port it took.
pub fn serve(kind: RawKind) -> Result<()> {
    let listener = TcpListener::bind("127.0.0.1:0").context("failed to bind the raw server")?;
    println!("{}", listener.local_addr()?.port());
    let slots = Slots::default();
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let slots = Arc::clone(&slots);
            std::thread::spawn(move || serve_one(stream, &slots, kind));
        }
    });
    io::copy(&mut io::stdin(), &mut io::sink())?;
    Ok(())
}

fn serve_one(mut stream: TcpStream, slots: &Slots, kind: RawKind) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let mut header = [0; REQUEST_BYTES];
    loop {
        stream.read_exact(&mut header)?;
        let op = header[0];
        let key = u32::from_le_bytes(header[4..8].try_into().unwrap_or_default());
        let len = u64::from_le_bytes(header[8..].try_into().unwrap_or_default());
        if len > MAX_BYTES || key >= MAX_KEYS {
            return Ok(());
        }
        let slot = {
            let mut slots = slots.lock().unwrap_or_else(PoisonError::into_inner);
            Arc::clone(slots.entry(key).or_default())
        };
        let mut value = slot.lock().unwrap_or_else(PoisonError::into_inner);
        if op == 1 {
            value.resize(len as usize, 0);
            match kind {
                RawKind::Plain => stream.read_exact(&mut value)?,
                RawKind::Sum => read_and_sum(&mut stream, &mut value)?,
            }
            stream.write_all(&len.to_le_bytes())?;
            continue;
        }
        let found = if value.is_empty() { MISS } else { value.len() as u64 };
        let head = found.to_le_bytes();
        let body: &[u8] = if op == 2 { &value } else { &[] };
        write_all_vectored(&mut stream, &mut [IoSlice::new(&head), IoSlice::new(body)])?;
    }
}

fn read_and_sum(stream: &mut TcpStream, value: &mut [u8]) -> io::Result<()> {
    let mut sum = 0;
    for piece in value.chunks_mut(SUM_STEP) {
        stream.read_exact(piece)?;
        sum = crc32c::crc32c_append(sum, piece);
    }
    std::hint::black_box(sum);
    Ok(())
}

/// Writes all slices with as few calls as the socket allows.
pub fn write_all_vectored(stream: &mut TcpStream, mut slices: &mut [IoSlice<'_>]) -> io::Result<()> {
    IoSlice::advance_slices(&mut slices, 0);
    while !slices.is_empty() {
        match stream.write_vectored(slices) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(n) => IoSlice::advance_slices(&mut slices, n),
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

/// A raw server in a child process; ends when dropped.
pub struct RawServer {
    child: Child,
    /// Where it listens on loopback.
    pub port: u16,
}

impl RawServer {
    /// Starts this binary again as a raw server.
    pub fn start(kind: RawKind) -> Result<Self> {
        let name = match kind {
            RawKind::Plain => "plain",
            RawKind::Sum => "sum",
        };
        let mut child = Command::new(std::env::current_exe()?)
            .args(["bench", "--serve-raw", name])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .context("failed to start the raw server")?;
        let mut line = String::new();
        let out = child.stdout.take().context("failed to read from the raw server")?;
        io::BufRead::read_line(&mut io::BufReader::new(out), &mut line)?;
        let port = line.trim().parse().context("failed to learn the raw server's port")?;
        Ok(Self { child, port })
    }

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }
}

impl Drop for RawServer {
    fn drop(&mut self) {
        // Its standard input closes with the child handle; killing makes sure and reaps it.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
