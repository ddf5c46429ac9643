//! Bytes of a peer connection: envelopes and frames over a socket, every wait bounded.
//!
//! A small input buffer holds heads; bulk is read straight into its destination, and the head that follows it comes with
//! the same call. Reading an envelope is cancel-safe: what was read stays in the buffer.

use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::time::Duration;

use kvpool_wire::peer::{self, ENVELOPE_BYTES, FRAME_HEAD_BYTES, FrameHead, PeerError};
use socket2::{SockRef, TcpKeepalive};
use tokio::io::Interest;
use tokio::net::TcpStream;
use tokio::time::Instant;

use crate::ticks::until;

/// Size of the input buffer in bytes; most heads fit.
const BUFFER_BYTES: usize = 4096;

/// How long a wait may take.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Patience {
    /// Until then, whatever arrives.
    Until(Instant),
    /// So long without progress.
    Stall(Duration),
    /// As long as it takes (the next request of an idle connection; the kernel's keepalive ends dead ones).
    Forever,
}

/// Why a connection is of no more use.
#[derive(Debug, thiserror::Error)]
pub(crate) enum WireError {
    #[error("failed to talk to a peer: {0}")]
    Io(#[from] io::Error),
    #[error("failed to talk to a peer: it closed the connection")]
    Closed,
    #[error("failed to talk to a peer: no answer in time")]
    Deadline,
    #[error(transparent)]
    Protocol(#[from] PeerError),
}

pub(crate) struct Wire {
    stream: TcpStream,
    buffer: Box<[u8]>,
    start: usize,
    end: usize,
    /// Body of the last envelope.
    body: Vec<u8>,
    /// Heads being written; kept for its memory.
    pub(crate) out: Vec<u8>,
}

impl Wire {
    pub(crate) fn new(stream: TcpStream) -> Self {
        let keepalive = TcpKeepalive::new()
            .with_time(Duration::from_secs(30))
            .with_interval(Duration::from_secs(10))
            .with_retries(3);
        let socket = SockRef::from(&stream);
        if let Err(error) = socket
            .set_tcp_nodelay(true)
            .and_then(|()| socket.set_tcp_keepalive(&keepalive))
        {
            tracing::debug!(%error, "failed to set socket options");
        }
        Wire {
            stream,
            buffer: vec![0; BUFFER_BYTES].into_boxed_slice(),
            start: 0,
            end: 0,
            body: Vec::new(),
            out: Vec::new(),
        }
    }

    /// An idle connection is still good: nothing to read, not even its end.
    pub(crate) fn is_quiet(&self) -> bool {
        let mut byte = [0; 1];
        self.start == self.end
            && matches!(self.stream.try_read(&mut byte), Err(error) if error.kind() == io::ErrorKind::WouldBlock)
    }

    fn buffered(&self) -> &[u8] {
        &self.buffer[self.start..self.end]
    }

    fn consume(&mut self, n: usize) {
        self.start = (self.start + n).min(self.end);
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        }
    }

    /// Reads until at least `n` bytes (at most the buffer's size) are buffered.
    async fn fill(&mut self, n: usize, patience: Patience) -> Result<(), WireError> {
        if self.start + n > self.buffer.len() {
            self.buffer.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        while self.end - self.start < n {
            let got = read(
                &self.stream,
                &mut [IoSliceMut::new(&mut self.buffer[self.end..])],
                patience,
            )
            .await?;
            self.end += got;
        }
        Ok(())
    }

    /// Waits until a request begins; `false` when the peer closed instead.
    pub(crate) async fn begins(&mut self) -> Result<bool, WireError> {
        match self.fill(1, Patience::Forever).await {
            Ok(()) => Ok(true),
            Err(WireError::Closed) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// The next `N` bytes, not consumed.
    pub(crate) async fn peek<const N: usize>(&mut self, patience: Patience) -> Result<[u8; N], WireError> {
        self.fill(N, patience).await?;
        Ok(*self.buffered().first_chunk().unwrap_or(&[0; N]))
    }

    /// Consumes bytes that were peeked at.
    pub(crate) fn skip(&mut self, n: usize) {
        self.consume(n);
    }

    /// Everything buffered; for guessing at a foreign protocol.
    pub(crate) fn first_bytes(&self) -> &[u8] {
        self.buffered()
    }

    /// Reads an envelope and verifies it; [`Self::body`] has its content then. Cancel-safe when it fits the buffer.
    pub(crate) async fn envelope(&mut self, patience: Patience) -> Result<(), WireError> {
        let front = self.peek::<ENVELOPE_BYTES>(patience).await?;
        let (len, crc) = peer::envelope(&front)?;
        self.body.clear();
        if ENVELOPE_BYTES + len <= self.buffer.len() {
            self.fill(ENVELOPE_BYTES + len, patience).await?;
            let from = self.start + ENVELOPE_BYTES;
            self.body.extend_from_slice(&self.buffer[from..from + len]);
            self.consume(ENVELOPE_BYTES + len);
        } else {
            self.consume(ENVELOPE_BYTES);
            let mut body = std::mem::take(&mut self.body);
            body.resize(len, 0);
            let read = self.read_into(&mut body, false, patience).await;
            self.body = body;
            read?;
        }
        peer::verify(&self.body, crc)?;
        Ok(())
    }

    /// Content of the last envelope.
    pub(crate) fn body(&self) -> &[u8] {
        &self.body
    }

    /// Head of the next frame.
    pub(crate) async fn frame_head(&mut self, patience: Patience) -> Result<FrameHead, WireError> {
        let head = self.peek::<FRAME_HEAD_BYTES>(patience).await?;
        let head = FrameHead::decode(&head)?;
        self.consume(FRAME_HEAD_BYTES);
        Ok(head)
    }

    /// Fills `into`; with `ahead`, what follows may be buffered by the same calls.
    pub(crate) async fn read_into(
        &mut self,
        into: &mut [u8],
        ahead: bool,
        patience: Patience,
    ) -> Result<(), WireError> {
        let n = self.buffered().len().min(into.len());
        into[..n].copy_from_slice(&self.buffer[self.start..self.start + n]);
        self.consume(n);
        let mut filled = n;
        while filled < into.len() {
            // The buffer is empty here, so all of it can take what follows.
            let spare: &mut [u8] = if ahead { &mut self.buffer } else { &mut [] };
            let want = into.len() - filled;
            let mut slices = [IoSliceMut::new(&mut into[filled..]), IoSliceMut::new(spare)];
            let got = read(&self.stream, &mut slices, patience).await?;
            filled += got.min(want);
            (self.start, self.end) = (0, got.saturating_sub(want));
        }
        Ok(())
    }

    /// Fills `into` with a frame's content and verifies it.
    pub(crate) async fn frame_content(
        &mut self,
        into: &mut [u8],
        crc: u32,
        patience: Patience,
    ) -> Result<(), WireError> {
        self.read_into(into, true, patience).await?;
        if crc32c::crc32c(into) == crc {
            Ok(())
        } else {
            Err(PeerError::Checksum.into())
        }
    }

    /// Writes all slices.
    pub(crate) async fn write(&mut self, mut slices: &mut [IoSlice<'_>], patience: Patience) -> Result<(), WireError> {
        IoSlice::advance_slices(&mut slices, 0);
        while !slices.is_empty() {
            match try_write(&self.stream, slices) {
                Ok(0) => return Err(WireError::Closed),
                Ok(n) => IoSlice::advance_slices(&mut slices, n),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    wait(self.stream.writable(), patience).await?;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    /// Writes what `out` holds.
    pub(crate) async fn flush(&mut self, patience: Patience) -> Result<(), WireError> {
        let out = std::mem::take(&mut self.out);
        let written = self.write(&mut [IoSlice::new(&out)], patience).await;
        self.out = out;
        self.out.clear();
        self.out.shrink_to(BUFFER_BYTES);
        written
    }

    /// A last word to somebody who is about to be closed: sent if the socket takes it at once. Input that nobody read
    /// would make the kernel send a reset that overtakes it, so some of it is read off first.
    pub(crate) fn say_and_close(self, bytes: &[u8]) {
        let mut scratch = [0; BUFFER_BYTES];
        for _ in 0..16 {
            match self.stream.try_read(&mut scratch) {
                Ok(n) if n > 0 => {}
                _ => break,
            }
        }
        // Whether it arrives changes nothing: the connection ends either way.
        let _ = self.stream.try_write(bytes);
    }
}

/// Reads into `slices`, waiting for input when there is none.
async fn read(stream: &TcpStream, slices: &mut [IoSliceMut<'_>], patience: Patience) -> Result<usize, WireError> {
    loop {
        tokio::task::coop::consume_budget().await;
        match try_read(stream, slices) {
            Ok(0) => return Err(WireError::Closed),
            Ok(n) => return Ok(n),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => wait(stream.readable(), patience).await?,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error.into()),
        }
    }
}

async fn wait(ready: impl Future<Output = io::Result<()>>, patience: Patience) -> Result<(), WireError> {
    let deadline = match patience {
        Patience::Until(deadline) => deadline,
        Patience::Stall(longest) => Instant::now() + longest,
        Patience::Forever => return Ok(ready.await?),
    };
    match until(deadline, ready).await {
        Some(ready) => Ok(ready?),
        None => Err(WireError::Deadline),
    }
}

/// `readv` that knows a short read means an empty socket, which spares the call that would only learn `EAGAIN`.
fn try_read(stream: &TcpStream, slices: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
    let capacity: usize = slices.iter().map(|slice| slice.len()).sum();
    let mut short = None;
    let result = stream.try_io(Interest::READABLE, || {
        let n = (&*SockRef::from(stream)).read_vectored(slices)?;
        if n > 0 && n < capacity {
            short = Some(n);
            return Err(io::ErrorKind::WouldBlock.into());
        }
        Ok(n)
    });
    short.map_or(result, Ok)
}

/// `writev` with the same economy: a short write means a full socket buffer.
fn try_write(stream: &TcpStream, slices: &[IoSlice<'_>]) -> io::Result<usize> {
    let wanted: usize = slices.iter().map(|slice| slice.len()).sum();
    let mut short = None;
    let result = stream.try_io(Interest::WRITABLE, || {
        let n = (&*SockRef::from(stream)).write_vectored(slices)?;
        if n > 0 && n < wanted {
            short = Some(n);
            return Err(io::ErrorKind::WouldBlock.into());
        }
        Ok(n)
    });
    short.map_or(result, Ok)
}
