//! The few RESP2 words a client needs, over one connection.

use anyhow::{Context, Result, bail, ensure};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;

/// Longest body that is believed, in bytes.
const MAX_BODY: usize = 64 << 20;
const MAX_LINE: u64 = 4096;

/// One connection.
pub struct Resp(BufReader<TcpStream>);

/// What the server said.
#[derive(Debug, PartialEq, Eq)]
pub enum Reply {
    /// `+...`
    Line(String),
    /// `-...`
    Error(String),
    /// `:...`
    Number(i64),
    /// `$...`; `None` = nil.
    Body(Option<Vec<u8>>),
}

impl Resp {
    /// # Errors
    /// No connection.
    pub async fn connect(address: &str) -> Result<Self> {
        let stream = TcpStream::connect(address)
            .await
            .with_context(|| format!("failed to connect to {address}"))?;
        stream.set_nodelay(true)?;
        let mut open = Resp(BufReader::new(stream));
        // A client that never says more than GET and SET is taken for LMCache's native one, which is told of a miss in a
        // way of its own (docs/lmcache.md).
        match open.call(&[b"PING"]).await? {
            Reply::Line(pong) if pong == "PONG" => Ok(open),
            other => bail!("PING answered {other:?}"),
        }
    }

    /// Sends one command and reads its reply.
    ///
    /// # Errors
    /// The connection is of no use any more.
    pub async fn call(&mut self, words: &[&[u8]]) -> Result<Reply> {
        let mut head = format!("*{}\r\n", words.len()).into_bytes();
        for word in words {
            head.extend_from_slice(format!("${}\r\n", word.len()).as_bytes());
            head.extend_from_slice(word);
            head.extend_from_slice(b"\r\n");
        }
        self.0
            .write_all(&head)
            .await
            .context("the connection broke while sending")?;
        self.reply().await
    }

    async fn reply(&mut self) -> Result<Reply> {
        let mut line = Vec::new();
        (&mut self.0)
            .take(MAX_LINE)
            .read_until(b'\n', &mut line)
            .await
            .context("the connection broke")?;
        ensure!(!line.is_empty(), "the connection was closed");
        let text = String::from_utf8_lossy(&line);
        let text = text.strip_suffix("\r\n").context("a reply line without an end")?;
        let rest = text.get(1..).unwrap_or_default().to_owned();
        Ok(match text.as_bytes().first() {
            Some(b'+') => Reply::Line(rest),
            Some(b'-') => Reply::Error(rest),
            Some(b':') => Reply::Number(rest.parse().context("a number that is none")?),
            Some(b'$') if rest == "-1" => Reply::Body(None),
            Some(b'$') => Reply::Body(Some(self.body(rest.parse().context("a length that is none")?).await?)),
            _ => bail!("a reply that begins with {:?}", text.chars().next()),
        })
    }

    async fn body(&mut self, length: usize) -> Result<Vec<u8>> {
        ensure!(length <= MAX_BODY, "a body of {length} bytes");
        let mut body = vec![0; length + 2];
        self.0
            .read_exact(&mut body)
            .await
            .context("the connection broke in mid-body")?;
        ensure!(body.ends_with(b"\r\n"), "a body without an end");
        body.truncate(length);
        Ok(body)
    }
}
