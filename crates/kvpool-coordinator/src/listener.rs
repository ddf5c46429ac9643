//! Accepted connections: bounded in number, and each must speak HTTP/2 within a few seconds or is closed (a half-sent
//! preface holds a place for that long and no longer).

use crate::metric_definitions as m;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio::time::{Sleep, sleep};
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::server::Connected;

/// Most connections at once: shards, proxies and tools of 10,000 nodes.
const MAX_CONNECTIONS: usize = 32_768;
/// Bytes of the HTTP/2 client preface (RFC 9113 section 3.4).
const PREFACE: usize = 24;
const PREFACE_TIME: Duration = Duration::from_secs(10);

/// Accepts until the receiver is dropped.
pub(crate) fn accept(listener: TcpListener) -> ReceiverStream<io::Result<Connection>> {
    let (tx, rx) = mpsc::channel(64);
    tokio::spawn(async move {
        let places = Arc::new(Semaphore::new(MAX_CONNECTIONS));
        loop {
            // Waiting for a place leaves newcomers in the kernel's own bounded queue.
            let Ok(place) = places.clone().acquire_owned().await else {
                return;
            };
            let accepted = tokio::select! {
                accepted = listener.accept() => accepted,
                () = tx.closed() => return,
            };
            match accepted {
                Ok((stream, _)) => {
                    let _ = stream.set_nodelay(true);
                    if tx.send(Ok(Connection::new(stream, place))).await.is_err() {
                        return;
                    }
                }
                // Out of file descriptors, or the peer is gone again: a pause, not an end.
                Err(e) => {
                    metrics::counter!(m::CONNECTIONS_DROPPED, "reason" => "accept").increment(1);
                    tracing::debug!(error = %e, "failed to accept a connection");
                    sleep(Duration::from_millis(20)).await;
                }
            }
        }
    });
    ReceiverStream::new(rx)
}

/// A connection with its place.
pub(crate) struct Connection {
    stream: TcpStream,
    /// Until the preface was read.
    opening: Option<(usize, Pin<Box<Sleep>>)>,
    _place: OwnedSemaphorePermit,
}

impl Connection {
    fn new(stream: TcpStream, place: OwnedSemaphorePermit) -> Self {
        metrics::gauge!(m::CONNECTIONS).increment(1.0);
        Connection {
            stream,
            opening: Some((0, Box::pin(sleep(PREFACE_TIME)))),
            _place: place,
        }
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        metrics::gauge!(m::CONNECTIONS).decrement(1.0);
    }
}

impl Connected for Connection {
    type ConnectInfo = ();

    fn connect_info(&self) {}
}

impl AsyncRead for Connection {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        let polled = Pin::new(&mut self.stream).poll_read(cx, buf);
        let Some((read, late)) = &mut self.opening else {
            return polled;
        };
        if polled.is_pending() {
            ready!(late.as_mut().poll(cx));
            metrics::counter!(m::CONNECTIONS_DROPPED, "reason" => "preface").increment(1);
            return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
        }
        *read += buf.filled().len() - before;
        if *read >= PREFACE {
            self.opening = None;
        }
        polled
    }
}

impl AsyncWrite for Connection {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}
