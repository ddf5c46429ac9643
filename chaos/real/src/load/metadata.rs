//! Clients of the control plane: they write and read registers, and keep a history that is judged at the end.
//!
//! A register is the factor of a pool without shards; it is written by `ConfigurePool` and read by `List`.

use super::history::{Op, What};
use crate::dice::Dice;
use crate::record::Record;
use anyhow::{Result, ensure};
use kvpool_client::{Client, Kind};
use kvpool_state::MAX_FACTOR;
use kvpool_state::records::Record as Row;
use parking_lot::Mutex;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;

/// Names of the registers' pools begin so.
pub const POOL_PREFIX: &str = "chaos-";
/// Registers; few, so that clients meet.
const KEYS: u32 = 3;
/// A register that is written once, when all clients have stopped: who has seen it has seen everything.
pub const LAST_KEY: u32 = KEYS;
/// Operations kept at most (72 bytes each); a run that reaches it stops writing rather than forget.
const MAX_OPS: usize = 3_000_000;
const PAUSE: Duration = Duration::from_millis(25);
/// A call ends within its own bound, answer or not; this much later it hangs.
const HANG: Duration = Duration::from_secs(10);

/// The number of a register from its pool's name.
#[must_use]
pub fn key(pool: &str) -> Option<u32> {
    pool.strip_prefix(POOL_PREFIX)?.parse().ok()
}

/// Writes the last register; the revision of that.
///
/// # Errors
/// The write failed.
pub async fn write_last(client: &Client, record: &Record, history: &Mutex<Vec<Op>>) -> Result<u64> {
    let start = record.micros();
    let answer = client.configure_pool(&format!("{POOL_PREFIX}{LAST_KEY}"), 1).await?;
    ensure!(answer.refusal == 0, "the last write was refused: {}", answer.message);
    let what = What::Write {
        value: 1,
        revision: answer.revision,
    };
    history.lock().push(Op {
        start,
        end: record.micros(),
        key: LAST_KEY,
        what,
    });
    Ok(answer.revision)
}

/// One client.
pub struct MetadataClient {
    pub client: Client,
    pub record: Arc<Record>,
    pub history: Arc<Mutex<Vec<Op>>>,
    pub dice: Dice,
    pub stop: CancellationToken,
}

impl MetadataClient {
    /// Works until it is told to stop; an operation under way is finished first.
    pub async fn run(mut self) {
        let bound = self.client.timing().call() + HANG;
        while !self.stop.is_cancelled() && self.history.lock().len() < MAX_OPS {
            let began = Instant::now();
            if self.dice.percent(60) {
                self.write().await;
            } else {
                self.read().await;
            }
            if began.elapsed() > bound {
                let text = format!(
                    "a call on control state took {:?}, at most {bound:?} is promised",
                    began.elapsed()
                );
                self.record.violation(text);
            }
            tokio::select! {
                () = sleep(PAUSE) => {}
                () = self.stop.cancelled() => {}
            }
        }
    }

    async fn write(&mut self) {
        let key = u32::try_from(self.dice.below(u64::from(KEYS))).unwrap_or(0);
        let value = 1 + self.dice.below(u64::from(MAX_FACTOR));
        let start = self.record.micros();
        let factor = u32::try_from(value).unwrap_or(1);
        let result = self.client.configure_pool(&format!("{POOL_PREFIX}{key}"), factor).await;
        let end = self.record.micros();
        let what = match result {
            Ok(answer) if answer.refusal == 0 => {
                self.record.writes.success();
                What::Write {
                    value,
                    revision: answer.revision,
                }
            }
            Ok(answer) => {
                self.record
                    .violation(format!("a write was refused: {} {}", answer.refusal, answer.message));
                return;
            }
            Err(_) => {
                self.record.unknown_writes.add();
                What::UnknownWrite { value }
            }
        };
        self.history.lock().push(Op { start, end, key, what });
    }

    async fn read(&mut self) {
        let start = self.record.micros();
        let Ok(listed) = self.client.list(Kind::Pool).await else {
            return;
        };
        let end = self.record.micros();
        let mut history = self.history.lock();
        for key in 0..KEYS {
            let value = listed.records.iter().find_map(|row| match row {
                Row::Pool(pool) if self::key(&pool.name) == Some(key) => Some(u64::from(pool.factor)),
                _ => None,
            });
            history.push(Op {
                start,
                end,
                key,
                what: What::Read {
                    value,
                    revision: listed.revision,
                },
            });
        }
    }
}
