//! An `lm://` connection: one request at a time, PUT without an answer, everything else answered with 36 bytes.
//!
//! The stock client reads a reply header with one `recv`, has no timeout and never reconnects. So the 36 bytes leave in
//! one write with the first bytes of the value, trouble behind the scenes is a miss (400), a refused PUT is read to its
//! end, and the connection is closed only for a header that cannot be followed.

use std::io::IoSlice;
use std::sync::Arc;

use kvpool_wire::foreign::Foreign;
use kvpool_wire::lm::{LmCommand, LmError, LmMeta, LmReply, LmRequest, REPLY_BYTES, REQUEST_BYTES};
use tokio::time::Instant;
use tracing::Instrument;

use super::conn::{Conn, End};
use super::resp::write_runs;
use super::{Port, to_key};
use crate::ops::{Body, Condition, DropReason, Front, GetAnswer, MissReason, Op, Path, PutOutcome, PutSpec};

pub(super) async fn run(conn: Conn, port: Arc<Port>) -> End {
    let mut client = Client { conn, port };
    loop {
        if let Err(end) = client.request().await {
            client.conn.close();
            return end;
        }
    }
}

struct Client {
    conn: Conn,
    port: Arc<Port>,
}

impl Client {
    async fn request(&mut self) -> Result<(), End> {
        let header = self.header().await?;
        let request = match LmRequest::decode(&header) {
            Ok(request) => request,
            Err(error) => return Err(self.refuse(error)),
        };
        let refused = refusal(&request);
        if let Some(reason) = refused {
            self.port.metrics.refused(reason);
        }
        match request.command {
            LmCommand::Put if refused.is_some() => self.conn.discard(u64::from(request.length), false, 0).await,
            LmCommand::Put => self.put(&request).await,
            LmCommand::Health => self.answer(&LmReply::OK).await,
            // LMCache's own server never answers LIST, which leaves its client waiting (fault O25).
            LmCommand::List => self.answer(&LmReply::FAIL).await,
            LmCommand::Get | LmCommand::Exist if refused.is_some() => self.answer(&LmReply::FAIL).await,
            LmCommand::Get => self.get(&request).await,
            LmCommand::Exist => self.exist(&request).await,
        }
    }

    /// Reads a whole header. A foreign protocol shows in the first four bytes and is not waited for.
    async fn header(&mut self) -> Result<[u8; REQUEST_BYTES], End> {
        loop {
            let unread = self.conn.unread();
            // Before anything is consumed, so that `refuse` sees how the stream begins.
            if let Some(code) = unread.first_chunk::<4>()
                && let Err(error) = LmCommand::from_code(i32::from_le_bytes(*code))
            {
                return Err(self.refuse(error));
            }
            if let Some(header) = unread.first_chunk::<REQUEST_BYTES>() {
                let header = *header;
                self.conn.consume(REQUEST_BYTES);
                self.conn.header_done();
                return Ok(header);
            }
            let begun = unread.len();
            self.conn.fill(begun > 0, begun).await?;
        }
    }

    fn refuse(&self, error: LmError) -> End {
        match error {
            LmError::UnknownCommand(_) => {
                let foreign = Foreign::of(self.conn.unread());
                self.port.log_foreign(foreign);
                match foreign.reply() {
                    b"" => self.conn.say(&LmReply::FAIL.encode()),
                    reply => self.conn.say(reply),
                }
                End::Refused(foreign.label())
            }
            LmError::NegativeLength(_) => End::Refused("negative_length"),
            LmError::TooLong(_) => End::Refused("too_long"),
        }
    }

    async fn answer(&mut self, reply: &LmReply) -> Result<(), End> {
        self.conn.write(&mut [IoSlice::new(&reply.encode())]).await
    }

    async fn put(&mut self, request: &LmRequest<'_>) -> Result<(), End> {
        let op = self.port.router.op(Front::Lm);
        let span = self.port.span(&op, "PUT");
        let spec = PutSpec {
            len: u64::from(request.length),
            meta: Some(request.meta),
            ttl: None,
            condition: Condition::Always,
        };
        let sink = self
            .port
            .router
            .put(&op, &to_key(request.key), spec)
            .instrument(span.clone())
            .await;
        let sink = self.conn.receive(sink).instrument(span.clone()).await?;
        let received = Instant::now();
        let outcome = match sink {
            Some(sink) => sink.finish().instrument(span).await,
            None => {
                self.port.metrics.stalled_uploads.increment(1);
                PutOutcome::Dropped(DropReason::Stalled)
            }
        };
        self.port.metrics.put(&outcome);
        self.port.log_slow(&op, received, "PUT");
        Ok(())
    }

    async fn get(&mut self, request: &LmRequest<'_>) -> Result<(), End> {
        let op = self.port.router.op(Front::Lm);
        let answer = self
            .port
            .router
            .get(&op, &to_key(request.key))
            .instrument(self.port.span(&op, "GET"))
            .await;
        self.port.log_slow(&op, op.started, "GET");
        let reason = match answer {
            GetAnswer::Hit { info, body, path, .. } => {
                if let (Some(meta), Ok(length)) = (info.meta, u32::try_from(info.len)) {
                    self.port.metrics.get(None);
                    return self.value(&op, meta, length, body, path).await;
                }
                // Stored by RESP: no shape, no dtype, nothing an lm:// client could use.
                MissReason::Absent
            }
            GetAnswer::Miss { reason, .. } => reason,
        };
        self.port.metrics.get(Some(reason));
        self.answer(&LmReply::FAIL).await
    }

    async fn value(&mut self, op: &Op, meta: LmMeta, length: u32, mut body: Body, path: Path) -> Result<(), End> {
        let header: [u8; REPLY_BYTES] = LmReply { ok: true, length, meta }.encode();
        let seconds = op.started.elapsed().as_secs_f64();
        if let Some(block) = body.as_local() {
            write_runs(&mut self.conn, &header, block.runs(), b"").await?;
            self.port.metrics.first_byte(path, seconds);
            return Ok(());
        }
        let mut sent = 0;
        while let Some(piece) = body.next().await.map_err(|_| End::Aborted)? {
            let head: &[u8] = if sent == 0 { &header } else { b"" };
            if sent == 0 {
                let seconds = op.started.elapsed().as_secs_f64();
                self.port.metrics.first_byte(path, seconds);
            }
            let bytes = piece.as_ref();
            sent += bytes.len() as u64;
            write_runs(&mut self.conn, head, std::iter::once(bytes), b"").await?;
        }
        if sent == 0 {
            self.conn.write(&mut [IoSlice::new(&header)]).await?;
        }
        if sent == u64::from(length) {
            Ok(())
        } else {
            Err(End::Aborted)
        }
    }

    async fn exist(&mut self, request: &LmRequest<'_>) -> Result<(), End> {
        let op = self.port.router.op(Front::Lm);
        let answer = self
            .port
            .router
            .exists(&op, &to_key(request.key))
            .instrument(self.port.span(&op, "EXIST"))
            .await;
        self.port.log_slow(&op, op.started, "EXIST");
        let usable = answer.hit.is_some_and(|info| info.meta.is_some());
        let miss = (!usable).then(|| answer.reason.unwrap_or(MissReason::Absent));
        self.port.metrics.exists(miss);
        self.answer(if usable { &LmReply::OK } else { &LmReply::FAIL }).await
    }
}

/// Why a request that can be followed is refused all the same (fault O23), by the word it is counted under.
fn refusal(request: &LmRequest<'_>) -> Option<&'static str> {
    if request.key.is_empty() || std::str::from_utf8(request.key).is_err() {
        return (request.command != LmCommand::Health).then_some("key");
    }
    (!request.meta.is_known()).then_some("meta")
}
