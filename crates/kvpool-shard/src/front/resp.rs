//! A RESP connection: requests answered in order, values streamed both ways.
//!
//! Small replies collect in `out` and leave together with the next value or before the connection waits for anything,
//! so pipelines cost one write per batch and nobody waits for a reply that is ready.

use std::future::Future;
use std::io::IoSlice;
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;

use futures::poll;
use kvpool_wire::resp::{ProtocolError, ReplyWriter, RequestParser, Step, parse_integer};
use smallvec::SmallVec;
use tokio::time::Instant;
use tracing::Instrument;

use super::admin::{self, Command};
use super::conn::{Conn, End, MAX_SLICES};
use super::native::{Tracker, Verdict, verdict};
use super::set_options::{NOT_INTEGER, SetOptions, ttl_from};
use super::{Port, to_key};
use crate::ops::{Body, Condition, DropReason, Front, GetAnswer, MissReason, Op, Path, PutOutcome, PutSpec, Ttl};

/// Values up to this size are copied behind other small replies instead of being written on their own.
const INLINE_VALUE: u64 = 1024;
/// Pending replies are sent when they exceed this many bytes.
const OUT_BYTES: usize = 16 * 1024;

pub(super) async fn run(conn: Conn, port: Arc<Port>) -> End {
    let mut client = Client {
        conn,
        parser: RequestParser::new(),
        session: admin::Session::new(),
        native: Tracker::new(),
        out: Vec::new(),
        copies: None,
        port,
    };
    let end = match client.serve().await {
        Ok(()) => End::Finished,
        Err(end) => end,
    };
    // After a failed write `out` may be half sent; only these ends leave whole replies in it.
    if matches!(end, End::Refused(_) | End::UnknownSize) {
        client.conn.say(&client.out);
    }
    client.conn.close();
    end
}

struct Client {
    conn: Conn,
    parser: RequestParser,
    session: admin::Session,
    native: Tracker,
    /// Replies not yet written.
    out: Vec<u8>,
    /// Fewest copies that hold any write since the last WAIT.
    copies: Option<u8>,
    port: Arc<Port>,
}

impl Client {
    async fn serve(&mut self) -> Result<(), End> {
        loop {
            match self.next().await? {
                Step::Value { len } => self.set(len).await?,
                Step::Command => {
                    if self.command().await? == Flow::Quit {
                        return self.flush().await;
                    }
                }
                // `next` deals with these itself.
                Step::More | Step::Skip { .. } => {}
            }
            if self.out.len() > OUT_BYTES {
                self.flush().await?;
            }
        }
    }

    /// The next value or command; reads, and skips what nobody wants, until there is one.
    async fn next(&mut self) -> Result<Step, End> {
        loop {
            let mut input = self.conn.unread();
            let before = input.len();
            let step = self.parser.step(&mut input);
            let used = before - input.len();
            self.conn.consume(used);
            match step {
                Ok(Step::More) => {
                    self.flush().await?;
                    let kept = self.parser.args().kept_bytes();
                    self.conn.fill(self.parser.in_command(), kept).await?;
                }
                Ok(Step::Skip { len }) => {
                    self.flush().await?;
                    let kept = self.parser.args().kept_bytes();
                    self.conn.discard(len, true, kept).await?;
                }
                Ok(step) => {
                    self.conn.header_done();
                    return Ok(step);
                }
                Err(error) => return Err(self.refuse(error)),
            }
        }
    }

    fn refuse(&mut self, error: ProtocolError) -> End {
        if let ProtocolError::NotRequest(foreign) = error {
            self.port.log_foreign(foreign);
            let reply = foreign.reply();
            self.out.extend_from_slice(reply);
            if !reply.is_empty() {
                return End::Refused(error.label());
            }
        }
        self.reply().error(&format!("ERR {error}"));
        End::Refused(error.label())
    }

    fn reply(&mut self) -> ReplyWriter<'_> {
        ReplyWriter::new(&mut self.out, self.session.proto)
    }

    async fn flush(&mut self) -> Result<(), End> {
        if self.out.is_empty() {
            return Ok(());
        }
        self.conn.write(&mut [IoSlice::new(&self.out)]).await?;
        self.out.clear();
        self.out.shrink_to(OUT_BYTES);
        Ok(())
    }

    /// Awaits routing; replies that are ready leave first when it does not answer at once.
    async fn routed<T>(&mut self, work: impl Future<Output = T>) -> Result<T, End> {
        let mut work = pin!(work);
        if let Poll::Ready(answer) = poll!(work.as_mut()) {
            return Ok(answer);
        }
        self.flush().await?;
        Ok(work.await)
    }

    async fn set(&mut self, len: u64) -> Result<(), End> {
        self.native.saw("SET");
        if (self.conn.unread().len() as u64) < len {
            self.flush().await?;
        }
        let port = Arc::clone(&self.port);
        let op = port.router.op(Front::Resp);
        let span = port.span(&op, "SET");
        let key = to_key(self.parser.args().get(1));
        let spec = PutSpec {
            len,
            meta: None,
            ttl: None,
            condition: Condition::Always,
        };
        let sink = self
            .routed(port.router.put(&op, &key, spec).instrument(span.clone()))
            .await?;
        let sink = self.conn.receive(sink).instrument(span.clone()).await?;
        // The value's CR LF and the options, which follow it. An error here, and the block was never visible.
        while self.next().await? != Step::Command {}
        let received = Instant::now();
        let options = match SetOptions::parse(self.parser.args().iter_from(3)) {
            Ok(options) if !self.parser.args().was_skipped() => options,
            Ok(_) => return self.error(super::set_options::SYNTAX),
            Err(text) => return self.error(text),
        };
        let outcome = match sink {
            None => {
                port.metrics.stalled_uploads.increment(1);
                PutOutcome::Dropped(DropReason::Stalled)
            }
            Some(sink) => {
                let ending = sink.finish_with(options.ttl, options.condition);
                self.routed(ending.instrument(span)).await?
            }
        };
        port.log_slow(&op, received, "SET");
        self.stored(outcome);
        Ok(())
    }

    /// Answers a write. A dropped one is +OK all the same: a cache may forget, and any error line is fatal to the native
    /// client. WAIT and the counters tell.
    fn stored(&mut self, outcome: PutOutcome) {
        self.port.metrics.put(&outcome);
        let copies = match outcome {
            PutOutcome::Stored2 => 2,
            PutOutcome::Stored1 => 1,
            PutOutcome::Dropped(_) => 0,
            PutOutcome::ConditionFailed => return self.reply().null(),
        };
        self.copies = Some(self.copies.map_or(copies, |fewest| fewest.min(copies)));
        self.reply().simple("OK");
    }

    fn error(&mut self, text: &str) -> Result<(), End> {
        self.reply().error(text);
        Ok(())
    }

    async fn command(&mut self) -> Result<Flow, End> {
        let command = admin::lookup(self.parser.args().get(0));
        self.native.saw(command.map_or("", |command| command.name));
        let Some(command) = command else {
            let args = self.parser.args();
            admin::unknown(args, &mut ReplyWriter::new(&mut self.out, self.session.proto));
            return Ok(Flow::Continue);
        };
        if !command.takes(self.parser.args().len()) {
            let name = command.name.to_ascii_lowercase();
            self.error(&format!("ERR wrong number of arguments for '{name}' command"))?;
            return Ok(Flow::Continue);
        }
        match command.name {
            "GET" => self.get().await?,
            // A SET that comes here has a key too long to be stored: its value was skipped.
            "SET" => self.stored(PutOutcome::Dropped(DropReason::Size)),
            "EXISTS" => self.exists().await?,
            "DEL" | "UNLINK" => self.del().await?,
            "TTL" => self.ttl().await?,
            "EXPIRE" => self.expire().await?,
            "WAIT" => self.wait(),
            "QUIT" => {
                self.reply().simple("OK");
                return Ok(Flow::Quit);
            }
            _ => self.admin(command),
        }
        Ok(Flow::Continue)
    }

    fn admin(&mut self, command: &Command) {
        let keys = self.port.router.key_count();
        admin::answer(command, self.parser.args(), &mut self.session, keys, &mut self.out);
    }

    async fn get(&mut self) -> Result<(), End> {
        let port = Arc::clone(&self.port);
        if self.parser.args().was_skipped() {
            port.metrics.get(Some(MissReason::Absent));
            self.reply().null();
            return Ok(());
        }
        let key = to_key(self.parser.args().get(1));
        let native = self.native.is_native(&key);
        let op = port.router.op(Front::Resp);
        let answer = self
            .routed(port.router.get(&op, &key).instrument(port.span(&op, "GET")))
            .await?;
        port.log_slow(&op, op.started, "GET");
        let (hit, usual) = match &answer {
            GetAnswer::Hit { info, usual, .. } => (Some(info.len), *usual),
            GetAnswer::Miss { usual, .. } => (None, *usual),
        };
        let verdict = if native { verdict(hit, usual) } else { Verdict::Serve };
        match (verdict, answer) {
            (Verdict::Serve, GetAnswer::Hit { body, path, .. }) => {
                port.metrics.get(None);
                self.value(&op, body, path).await?;
            }
            (Verdict::Serve, GetAnswer::Miss { reason, .. }) => {
                port.metrics.get(Some(reason));
                self.reply().null();
            }
            (Verdict::SizedMiss(size), answer) => {
                port.metrics.get(Some(reason_of(&answer)));
                self.reply().sized_miss(size);
            }
            (Verdict::Close, answer) => {
                port.metrics.get(Some(reason_of(&answer)));
                return Err(End::UnknownSize);
            }
        }
        Ok(())
    }

    /// Writes a hit: pending replies, the header and the first bytes of the value in one call.
    async fn value(&mut self, op: &Op, mut body: Body, path: Path) -> Result<(), End> {
        let len = body.len();
        self.reply().bulk_header(len);
        let seconds = op.started.elapsed().as_secs_f64();
        if let Some(block) = body.as_local() {
            if len <= INLINE_VALUE {
                block.slices().for_each(|slice| self.out.extend_from_slice(slice));
                self.out.extend_from_slice(b"\r\n");
            } else {
                let runs = block.runs();
                write_runs(&mut self.conn, &self.out, runs, b"\r\n").await?;
                self.out.clear();
            }
            self.port.metrics.first_byte(path, seconds);
            return Ok(());
        }
        let mut sent = 0;
        while let Some(piece) = body.next().await.map_err(|_| End::Aborted)? {
            if sent == 0 {
                let seconds = op.started.elapsed().as_secs_f64();
                self.port.metrics.first_byte(path, seconds);
            }
            let bytes = piece.as_ref();
            sent += bytes.len() as u64;
            let trailer: &[u8] = if sent >= len { b"\r\n" } else { b"" };
            write_runs(&mut self.conn, &self.out, std::iter::once(bytes), trailer).await?;
            self.out.clear();
        }
        if sent == 0 {
            self.out.extend_from_slice(b"\r\n");
        }
        if sent == len { Ok(()) } else { Err(End::Aborted) }
    }

    async fn exists(&mut self) -> Result<(), End> {
        let port = Arc::clone(&self.port);
        let mut found = 0;
        for index in 1..self.parser.args().len() {
            let key = to_key(self.parser.args().get(index));
            let op = port.router.op(Front::Resp);
            let answer = self
                .routed(port.router.exists(&op, &key).instrument(port.span(&op, "EXISTS")))
                .await?;
            port.log_slow(&op, op.started, "EXISTS");
            let len = answer.hit.as_ref().map(|info| info.len);
            // What GET would not serve to this client does not exist for it either.
            let wrong_size =
                self.native.is_native(&key) && len.is_some() && verdict(len, answer.usual) != Verdict::Serve;
            let miss = match (len, wrong_size) {
                (Some(_), false) => None,
                (Some(_), true) => Some(MissReason::Size),
                (None, _) => Some(answer.reason.unwrap_or(MissReason::Absent)),
            };
            port.metrics.exists(miss);
            found += i64::from(miss.is_none());
        }
        self.reply().integer(found);
        Ok(())
    }

    async fn del(&mut self) -> Result<(), End> {
        let port = Arc::clone(&self.port);
        let mut removed = 0;
        for index in 1..self.parser.args().len() {
            let key = to_key(self.parser.args().get(index));
            let op = port.router.op(Front::Resp);
            removed += i64::from(
                self.routed(port.router.del(&op, &key).instrument(port.span(&op, "DEL")))
                    .await?,
            );
        }
        self.reply().integer(removed);
        Ok(())
    }

    async fn ttl(&mut self) -> Result<(), End> {
        let port = Arc::clone(&self.port);
        let key = to_key(self.parser.args().get(1));
        let op = port.router.op(Front::Resp);
        let seconds = match self
            .routed(port.router.ttl(&op, &key).instrument(port.span(&op, "TTL")))
            .await?
        {
            Ttl::NoKey => -2,
            Ttl::NoExpiry => -1,
            // Rounded to the nearest second, as Redis does.
            Ttl::Remaining(left) => i64::try_from((left.as_millis() + 500) / 1000).unwrap_or(i64::MAX),
        };
        self.reply().integer(seconds);
        Ok(())
    }

    async fn expire(&mut self) -> Result<(), End> {
        let port = Arc::clone(&self.port);
        let Some(seconds) = parse_integer(self.parser.args().get(2)) else {
            return self.error(NOT_INTEGER);
        };
        let key = to_key(self.parser.args().get(1));
        let op = port.router.op(Front::Resp);
        let done = if seconds <= 0 {
            // An expiry in the past deletes, as in Redis.
            self.routed(port.router.del(&op, &key).instrument(port.span(&op, "DEL")))
                .await?
        } else {
            match ttl_from(seconds, 1000) {
                Some(ttl) => {
                    self.routed(port.router.expire(&op, &key, ttl).instrument(port.span(&op, "EXPIRE")))
                        .await?
                }
                None => return self.error("ERR invalid expire time in 'expire' command"),
            }
        };
        self.reply().integer(i64::from(done));
        Ok(())
    }

    /// `WAIT n ms`: how many copies hold the writes since the last WAIT (the worst of them). Each write has already had
    /// its time for the second copy, so there is nothing left to wait for.
    fn wait(&mut self) {
        let valid = (1..3).all(|at| parse_integer(self.parser.args().get(at)).is_some_and(|n| n >= 0));
        if valid {
            let copies = self.copies.take().unwrap_or(0);
            self.reply().integer(i64::from(copies));
        } else {
            self.reply().error(NOT_INTEGER);
        }
    }
}

#[derive(PartialEq, Eq)]
enum Flow {
    Continue,
    Quit,
}

fn reason_of(answer: &GetAnswer) -> MissReason {
    match answer {
        GetAnswer::Hit { .. } => MissReason::Size,
        GetAnswer::Miss { reason, .. } => *reason,
    }
}

/// Writes `head`, all runs and `tail`, [`MAX_SLICES`] at a time.
pub(super) async fn write_runs<'a>(
    conn: &mut Conn,
    head: &'a [u8],
    runs: impl Iterator<Item = &'a [u8]>,
    tail: &'a [u8],
) -> Result<(), End> {
    let mut slices: SmallVec<[IoSlice<'a>; 8]> = SmallVec::new();
    slices.push(IoSlice::new(head));
    for run in runs {
        if slices.len() == MAX_SLICES {
            conn.write(&mut slices).await?;
            slices.clear();
        }
        slices.push(IoSlice::new(run));
    }
    slices.push(IoSlice::new(tail));
    conn.write(&mut slices).await
}
