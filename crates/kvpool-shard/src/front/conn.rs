//! One client connection: a small read buffer, bodies straight into the store, vectored writes, and every time bound.
//!
//! Invariants: at most [`HEAD_BYTES`] of input are held besides what the codec keeps; a reply body is written from the
//! block's own memory; a client that neither reads nor finishes a header is given up after a bounded time, while one
//! that is merely idle, or stops in mid-upload, is kept (the upload's memory is not).

use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use socket2::SockRef;
use tokio::io::Interest;
use tokio::net::TcpStream;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, timeout, timeout_at};
use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};

use super::FrontLimits;
use crate::ops::PutSink;

/// Size of the read buffer in bytes, allocated with the first request.
const HEAD_BYTES: usize = 4096;
/// The most slices handed to one `writev`: 64 pieces of 256 KiB are more than any socket buffer takes.
pub(super) const MAX_SLICES: usize = 64;
/// A half-sent header without a slot gets this long, and may keep this many bytes.
const IMPATIENT: Duration = Duration::from_secs(1);
const IMPATIENT_BYTES: usize = 4096;

/// Why a connection ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum End {
    /// The client closed, or the socket broke.
    Gone,
    /// QUIT, or the process is stopping.
    Finished,
    /// A header was not completed in time.
    HalfHeader,
    /// The client did not read its reply in time.
    SlowReader,
    /// Input that cannot be followed, by the reason it is counted under.
    Refused(&'static str),
    /// A native client's miss whose size nobody knows.
    UnknownSize,
    /// Both copies failed in mid-body.
    Aborted,
}

/// What a connection shares with the others of its port.
pub(super) struct Shared {
    pub(super) limits: FrontLimits,
    /// Half-sent headers that are waited for with patience.
    pub(super) half_sent: Arc<Semaphore>,
}

/// A half-sent header being waited for.
struct Half {
    deadline: Instant,
    patient: bool,
    _slot: Option<OwnedSemaphorePermit>,
}

pub(super) struct Conn {
    stream: TcpStream,
    head: Box<[u8]>,
    start: usize,
    end: usize,
    shared: Arc<Shared>,
    half: Option<Half>,
    stop: Pin<Box<WaitForCancellationFutureOwned>>,
}

impl Conn {
    pub(super) fn new(stream: TcpStream, shared: Arc<Shared>, stop: CancellationToken) -> Self {
        Conn {
            stream,
            head: Box::default(),
            start: 0,
            end: 0,
            shared,
            half: None,
            stop: Box::pin(stop.cancelled_owned()),
        }
    }

    /// Input that was read and not yet consumed.
    pub(super) fn unread(&self) -> &[u8] {
        &self.head[self.start..self.end]
    }

    /// Marks `n` bytes of [`Self::unread`] as used.
    pub(super) fn consume(&mut self, n: usize) {
        self.start = (self.start + n).min(self.end);
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        }
    }

    /// The request in hand is complete: its header is no longer awaited.
    pub(super) fn header_done(&mut self) {
        self.half = None;
    }

    /// Reads more input for a header. `begun` says whether part of one is already there, with `kept` bytes of it held
    /// elsewhere; without, the client is idle and may stay so for ever.
    pub(super) async fn fill(&mut self, begun: bool, kept: usize) -> Result<(), End> {
        if self.head.is_empty() {
            self.wait_for_header(begun, kept).await?;
            self.head = vec![0; HEAD_BYTES].into_boxed_slice();
        }
        if self.start > 0 {
            self.head.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        loop {
            let spare = &mut self.head[self.end..];
            match try_read(&self.stream, &mut [IoSliceMut::new(spare)]) {
                Ok(0) => return Err(End::Gone),
                Ok(n) => {
                    self.end += n;
                    return Ok(());
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    self.wait_for_header(begun, kept).await?;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => return Err(End::Gone),
            }
        }
    }

    async fn wait_for_header(&mut self, begun: bool, kept: usize) -> Result<(), End> {
        let Self {
            stream,
            stop,
            half,
            shared,
            ..
        } = self;
        if !begun {
            return tokio::select! {
                biased;
                ready = stream.readable() => ready.map_err(|_| End::Gone),
                () = stop => Err(End::Finished),
            };
        }
        let half = half.get_or_insert_with(|| {
            let slot = Arc::clone(&shared.half_sent).try_acquire_owned().ok();
            let patience = match slot {
                Some(_) => shared.limits.header_timeout,
                None => IMPATIENT.min(shared.limits.header_timeout),
            };
            Half {
                deadline: Instant::now() + patience,
                patient: slot.is_some(),
                _slot: slot,
            }
        });
        if !half.patient && kept > IMPATIENT_BYTES {
            return Err(End::HalfHeader);
        }
        match timeout_at(half.deadline, stream.readable()).await {
            Ok(ready) => ready.map_err(|_| End::Gone),
            Err(_) => Err(End::HalfHeader),
        }
    }

    /// Moves the whole value into `sink`. When the client stops in mid-body for too long, the sink is dropped, which
    /// frees its memory, and the rest is awaited and thrown away: `Ok(None)`.
    pub(super) async fn receive(&mut self, mut sink: PutSink) -> Result<Option<PutSink>, End> {
        while sink.remaining() > 0 && self.start < self.end {
            let unread = &self.head[self.start..self.end];
            let spare = sink.spare();
            let n = spare.len().min(unread.len());
            spare[..n].copy_from_slice(&unread[..n]);
            self.consume(n);
            sink.advance(n).await;
        }
        while sink.remaining() > 0 {
            let remaining = sink.remaining();
            match self.read_body(sink.spare(), remaining).await? {
                Some(n) => sink.advance(n).await,
                None => {
                    drop(sink);
                    self.discard(remaining, false, 0).await?;
                    return Ok(None);
                }
            }
        }
        Ok(Some(sink))
    }

    /// Reads body bytes into `spare`; what follows the body goes into the read buffer (empty by now) in the same call.
    /// `None` when nothing came for the stall time.
    async fn read_body(&mut self, spare: &mut [u8], remaining: u64) -> Result<Option<usize>, End> {
        let take = usize::try_from(remaining).map_or(spare.len(), |left| left.min(spare.len()));
        let spare = &mut spare[..take];
        let last = take as u64 == remaining;
        loop {
            tokio::task::coop::consume_budget().await;
            let tail = if last { &mut self.head[..] } else { &mut [] };
            let mut slices = [IoSliceMut::new(spare), IoSliceMut::new(tail)];
            match try_read(&self.stream, &mut slices) {
                Ok(0) => return Err(End::Gone),
                Ok(n) => {
                    let body = n.min(take);
                    (self.start, self.end) = (0, n - body);
                    return Ok(Some(body));
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    let stall = self.shared.limits.body_stall;
                    match timeout(stall, self.stream.readable()).await {
                        Ok(ready) => ready.map_err(|_| End::Gone)?,
                        Err(_) => return Ok(None),
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => return Err(End::Gone),
            }
        }
    }

    /// Throws away `len` bytes of input, however long they take to come; `begun` and `kept` as for [`Self::fill`], with
    /// its time bound when a header is incomplete meanwhile.
    pub(super) async fn discard(&mut self, mut len: u64, begun: bool, kept: usize) -> Result<(), End> {
        while len > 0 {
            if self.start == self.end {
                tokio::task::coop::consume_budget().await;
                self.fill(begun, kept).await?;
            }
            let n = (self.end - self.start).min(usize::try_from(len).unwrap_or(usize::MAX));
            self.consume(n);
            len -= n as u64;
        }
        Ok(())
    }

    /// Writes all slices, in order, in as few calls as the socket allows.
    pub(super) async fn write(&mut self, mut slices: &mut [IoSlice<'_>]) -> Result<(), End> {
        // Drops empty slices in front; the loop's condition is then "something is left".
        IoSlice::advance_slices(&mut slices, 0);
        while !slices.is_empty() {
            match try_write(&self.stream, slices) {
                Ok(0) => return Err(End::Gone),
                Ok(n) => IoSlice::advance_slices(&mut slices, n),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    let stall = self.shared.limits.write_stall;
                    match timeout(stall, self.stream.writable()).await {
                        Ok(ready) => ready.map_err(|_| End::Gone)?,
                        Err(_) => return Err(End::SlowReader),
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => return Err(End::Gone),
            }
        }
        Ok(())
    }

    /// A last word to a client that is about to be closed: sent if the socket takes it at once.
    pub(super) fn say(&self, bytes: &[u8]) {
        // Whether it arrives changes nothing: the connection ends either way.
        let _ = self.stream.try_write(bytes);
    }

    /// Ends the connection so that the last word arrives: input that nobody read makes the kernel send RST, which can
    /// overtake data, so what has come is read off first. Bounded.
    pub(super) fn close(self) {
        let mut scratch = [0; HEAD_BYTES];
        for _ in 0..16 {
            match self.stream.try_read(&mut scratch) {
                Ok(n) if n > 0 => {}
                _ => break,
            }
        }
    }
}

/// `readv` that knows a short read means an empty socket, which spares the call that would only learn `EAGAIN`.
fn try_read(stream: &TcpStream, slices: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
    let capacity: usize = slices.iter().map(|slice| slice.len()).sum();
    let mut short = None;
    let result = stream.try_io(Interest::READABLE, || {
        let n = (&*SockRef::from(stream)).read_vectored(slices)?;
        if n > 0 && n < capacity {
            // Clears the readiness seen before the read; bytes that came since raise it again.
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
