//! The real LMCache client, in a process of its own (`tests/peers/lmcache_worker.py`): it reads blocks it has stored and
//! writes others, compares all bytes, and its libraries do what they do in an engine.
//!
//! A miss is allowed here, other bytes, an error and a call that does not come back are not.

use crate::record::Record;
use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};
use tokio::time::timeout;

/// Importing LMCache takes 10 to 45 s on a busy machine.
const READY: Duration = Duration::from_secs(240);
/// The worker gives a call up after 20 s by itself.
const ANSWER: Duration = Duration::from_secs(90);
/// 1 MiB: one of the shapes that the worker knows.
const BLOCK_BYTES: u64 = 1 << 20;
const BLOCKS: u64 = 8;

/// Where the worker is.
#[derive(Clone, Debug)]
pub struct Installed {
    /// Python of the environment that `tests/setup.sh` makes.
    pub python: PathBuf,
    pub worker: PathBuf,
}

impl Installed {
    /// # Errors
    /// The worker is not there.
    pub fn new(python: &Path) -> Result<Self> {
        let worker = PathBuf::from("tests/peers/lmcache_worker.py");
        ensure!(
            worker.is_file(),
            "failed to find {}: run this in the root of the checkout",
            worker.display()
        );
        Ok(Installed {
            python: python.to_owned(),
            worker,
        })
    }
}

/// A client process with one connection, reading and writing steadily.
pub struct LmCache {
    name: String,
    child: Child,
    stdin: ChildStdin,
    lines: Lines<BufReader<ChildStdout>>,
    record: Arc<Record>,
}

impl LmCache {
    /// Starts a client and lets it store its blocks; `scheme` is LMCache's (`redis`, `resp`).
    ///
    /// # Errors
    /// It can't be started, or storing failed.
    pub async fn start(installed: &Installed, scheme: &str, address: &str, record: &Arc<Record>) -> Result<Self> {
        let mut child = Command::new(std::env::current_exe()?)
            .arg("guard")
            .arg(std::process::id().to_string())
            .arg(&installed.python)
            .arg(&installed.worker)
            .env("PYTHONHASHSEED", "0")
            .env("OMP_NUM_THREADS", "1")
            .env("TOKENIZERS_PARALLELISM", "false")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .kill_on_drop(true)
            .spawn()
            .context("failed to start LMCache's client")?;
        let stdin = child.stdin.take().context("no stdin")?;
        let lines = BufReader::new(child.stdout.take().context("no stdout")?).lines();
        let name = format!("LMCache {scheme}://");
        let mut client = LmCache {
            name,
            child,
            stdin,
            lines,
            record: record.clone(),
        };
        client.reply(READY).await?;
        let (host, port) = address.rsplit_once(':').context("an address without a port")?;
        let port: u16 = port.parse()?;
        let model = format!("chaos/{scheme}");
        let open = json!({"op": "open", "conn": "c", "scheme": scheme, "host": host, "port": port, "size": BLOCK_BYTES,
            "model": model, "workers": 2});
        client.call(open).await?;
        let (shared, own): (Vec<u64>, Vec<u64>) = ((0..BLOCKS).collect(), (BLOCKS..2 * BLOCKS).collect());
        let all: Vec<u64> = (0..2 * BLOCKS).collect();
        client.call(json!({"op": "put", "conn": "c", "keys": all})).await?;
        client
            .call(json!({"op": "steady", "conn": "c", "shared": shared, "own": own}))
            .await?;
        record.note(format!("{} reads and writes", client.name));
        Ok(client)
    }

    /// Ends it and judges what it met.
    pub async fn finish(mut self) {
        match self.call(json!({"op": "steady_end", "conn": "c"})).await {
            Ok(report) => self.judge(&report),
            Err(error) => self.record.violation(format!("{}: {error:#}", self.name)),
        }
        let _ = self.child.kill().await;
    }

    fn judge(&self, report: &Value) {
        let worst = |op: &str| (report["worst"][op].as_f64().unwrap_or(0.0) * 1000.0).round();
        self.record.note(format!(
            "{}: {} rounds, {} hits; longest get {} ms, put {} ms, exists {} ms",
            self.name,
            report["rounds"],
            report["hits"],
            worst("get"),
            worst("put"),
            worst("exists")
        ));
        let problems = report["problems"]
            .as_array()
            .into_iter()
            .flatten()
            .filter_map(Value::as_str);
        let (misses, wrong): (Vec<&str>, Vec<&str>) =
            problems.partition(|text| text.ends_with(": miss") || text.ends_with("says no"));
        if !misses.is_empty() {
            self.record.note(format!(
                "{}: {} misses or more, such as {}",
                self.name,
                misses.len(),
                misses[0]
            ));
        }
        for text in wrong {
            self.record.violation(format!("{}: {text}", self.name));
        }
        if report["rounds"].as_u64().unwrap_or(0) == 0 || report["alive"] != json!(false) {
            self.record
                .violation(format!("{}: did nothing, or did not come back: {report}", self.name));
        }
    }

    async fn call(&mut self, request: Value) -> Result<Value> {
        let what = request["op"].as_str().unwrap_or_default().to_owned();
        self.stdin.write_all(format!("{request}\n").as_bytes()).await?;
        let reply = self
            .reply(ANSWER)
            .await
            .with_context(|| format!("{what}, the client library"))?;
        ensure!(reply.get("error").is_none(), "{what}: {}", reply["error"]);
        Ok(reply)
    }

    async fn reply(&mut self, within: Duration) -> Result<Value> {
        let line = timeout(within, self.lines.next_line()).await;
        let line = line.with_context(|| format!("no answer within {within:?}"))??;
        serde_json::from_str(&line.context("the client process has ended")?).context("the answer is no JSON")
    }
}
