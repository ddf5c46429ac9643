//! Clients of the data plane: they write blocks, read their own and others', and check every byte.
//!
//! Promised while at most one shard is hurt (DESIGN section 7): no error, no closed connection, no hang; a read is the
//! bytes of a complete write of that key or a miss. Each breach is a violation.

use super::content;
use super::resp::{Reply, Resp};
use crate::dice::Dice;
use crate::record::Record;
use anyhow::{Result, bail};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;

/// Keys of one client. Small enough to be read again before they are evicted.
const KEYS_PER_CLIENT: u64 = 60;
/// An answer later than this is a hang.
const HANG: Duration = Duration::from_secs(20);
/// Pause between operations: the load shall show faults, not fill the machine.
const PAUSE: Duration = Duration::from_millis(8);

/// One client of one proxy.
pub struct BlockClient {
    pub number: u64,
    pub clients: u64,
    pub address: String,
    pub record: Arc<Record>,
    pub dice: Dice,
    pub stop: CancellationToken,
}

impl BlockClient {
    /// Works until it is told to stop.
    pub async fn run(mut self) {
        let mut versions = vec![0_u64; usize::try_from(KEYS_PER_CLIENT).unwrap_or(0)];
        let mut connection: Option<Resp> = None;
        while !self.stop.is_cancelled() {
            let mut open = match connection.take() {
                Some(open) => open,
                None => match Resp::connect(&self.address).await {
                    Ok(open) => open,
                    Err(error) => {
                        self.record
                            .violation(format!("block client {}: {error:#}", self.number));
                        sleep(Duration::from_millis(500)).await;
                        continue;
                    }
                },
            };
            let what = self.dice.below(100);
            let own = self.dice.below(KEYS_PER_CLIENT);
            let key = match what {
                0..=34 => self.key(self.number, own),
                _ => {
                    let other = self.dice.below(self.clients);
                    self.key(other, own)
                }
            };
            let began = Instant::now();
            let done = timeout(HANG, async {
                match what {
                    0..=34 => {
                        let version = versions.get_mut(usize::try_from(own).unwrap_or(0));
                        let next = version.map_or(1, |v| {
                            *v += 1;
                            *v
                        });
                        self.set(&mut open, key, next).await
                    }
                    35..=89 => self.get(&mut open, key).await,
                    _ => self.exists(&mut open, key).await,
                }
            });
            match done.await {
                Ok(Ok(())) => connection = Some(open),
                Ok(Err(error)) => {
                    let text = format!(
                        "block client {}: key {key:#x}: {error:#} after {:?}",
                        self.number,
                        began.elapsed()
                    );
                    self.record.violation(text);
                }
                Err(_) => {
                    let text = format!("block client {}: key {key:#x}: no answer within {HANG:?}", self.number);
                    self.record.violation(text);
                }
            }
            let longest = if what < 35 {
                &self.record.sets
            } else {
                &self.record.gets
            };
            longest.add(began.elapsed());
            tokio::select! {
                () = sleep(PAUSE) => {}
                () = self.stop.cancelled() => {}
            }
        }
    }

    fn key(&self, client: u64, n: u64) -> u64 {
        (client + 1) << 32 | n
    }

    async fn set(&self, connection: &mut Resp, key: u64, version: u64) -> Result<()> {
        let body = content::fill(key, version);
        match connection.call(&[b"SET", name(key).as_bytes(), &body]).await? {
            Reply::Line(ok) if ok == "OK" => self.record.sets_stored.add(),
            other => bail!("SET answered {other:?}"),
        }
        Ok(())
    }

    async fn get(&self, connection: &mut Resp, key: u64) -> Result<()> {
        match connection.call(&[b"GET", name(key).as_bytes()]).await? {
            Reply::Body(None) => self.record.get_misses.add(),
            Reply::Body(Some(body)) => match content::check(key, &body) {
                Ok(_) => self.record.get_hits.add(),
                Err(wrong) => bail!("R5: GET returned {wrong}"),
            },
            Reply::Error(text) => bail!("GET answered an error: {text}"),
            other => bail!("GET answered {other:?}"),
        }
        Ok(())
    }

    async fn exists(&self, connection: &mut Resp, key: u64) -> Result<()> {
        match connection.call(&[b"EXISTS", name(key).as_bytes()]).await? {
            Reply::Number(0 | 1) => Ok(()),
            other => bail!("EXISTS answered {other:?}"),
        }
    }
}

/// Keys as LMCache writes them: model, world size, worker, chunk hash, dtype.
fn name(key: u64) -> String {
    format!("chaos/model@1@0@{:016x}@bfloat16", crate::dice::mix(key))
}
