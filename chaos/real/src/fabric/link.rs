//! One direction of one connection: reads, holds back as the rules say, writes.
//!
//! Invariants: bytes keep their order and none is lost or made up; while the direction is cut nothing at all reaches the
//! other side, not even the end of the connection; at most [`QUEUE`] pieces wait.

use super::rules::{Condition, Rules};
use crate::dice::Dice;
use bytes::{Bytes, BytesMut};
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{ReadHalf, WriteHalf};
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, sleep_until};

/// Largest piece, in bytes.
const PIECE: usize = 64 << 10;
/// Pieces in flight per direction: the sender's window.
const QUEUE: usize = 64;
/// Linux sends a lost packet again after 200 ms at the least; a second loss doubles it.
const RETRANSMIT: Duration = Duration::from_millis(200);
const RETRANSMIT_SPREAD: Duration = Duration::from_millis(250);

/// Which direction this is, and what applies to it.
pub struct Direction {
    pub from: String,
    pub to: String,
    pub rules: watch::Receiver<Rules>,
    pub dice: Dice,
}

impl Direction {
    fn condition(&self) -> Condition {
        self.rules.borrow().get(&self.from, &self.to)
    }
}

enum Item {
    Bytes(Bytes),
    End,
    /// The sender's side broke.
    Broken,
}

/// How a direction came to its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    Finished,
    Broken,
}

/// Carries one direction until its end.
pub async fn carry(reader: ReadHalf<'_>, writer: WriteHalf<'_>, direction: Direction) -> Ended {
    let (tx, rx) = mpsc::channel(QUEUE);
    let out = Outlet {
        from: direction.from.clone(),
        to: direction.to.clone(),
        rules: direction.rules.clone(),
    };
    let (ended, ()) = tokio::join!(out.write(writer, rx), read(reader, tx, direction));
    ended
}

async fn read(mut reader: ReadHalf<'_>, tx: mpsc::Sender<(Instant, Item)>, mut direction: Direction) {
    let mut buffer = BytesMut::new();
    let mut clock = Clock::default();
    loop {
        buffer.reserve(PIECE);
        let item = match reader.read_buf(&mut buffer).await {
            Ok(0) => Item::End,
            Ok(_) => Item::Bytes(buffer.split().freeze()),
            Err(_) => Item::Broken,
        };
        let length = match &item {
            Item::Bytes(bytes) => bytes.len() as u64,
            _ => 0,
        };
        let condition = direction.condition();
        let mut due = clock.due(Instant::now(), length, &condition, &mut direction.dice);
        let last = !matches!(item, Item::Bytes(_));
        if last {
            due += condition.slow_close;
        }
        // The writing side is gone when its peer broke; that news travels in the other direction.
        if tx.send((due, item)).await.is_err() || last {
            return;
        }
    }
}

/// When the pieces of one direction arrive.
#[derive(Debug, Default)]
struct Clock {
    line_free: Option<Instant>,
    last: Option<Instant>,
}

impl Clock {
    fn due(&mut self, now: Instant, length: u64, condition: &Condition, dice: &mut Dice) -> Instant {
        let mut wait = condition.delay + dice.up_to(condition.jitter);
        if condition.loss_percent > 0 && dice.percent(condition.loss_percent) {
            wait += RETRANSMIT + dice.up_to(RETRANSMIT_SPREAD);
        }
        let mut sent = now;
        if let Some(micros) = length.saturating_mul(1_000_000).checked_div(condition.rate) {
            sent = self.line_free.map_or(now, |free| free.max(now)) + Duration::from_micros(micros);
            self.line_free = Some(sent);
        }
        let due = sent + wait;
        let due = self.last.map_or(due, |last| last.max(due));
        self.last = Some(due);
        due
    }
}

struct Outlet {
    from: String,
    to: String,
    rules: watch::Receiver<Rules>,
}

impl Outlet {
    async fn write(mut self, mut writer: WriteHalf<'_>, mut rx: mpsc::Receiver<(Instant, Item)>) -> Ended {
        while let Some((due, item)) = rx.recv().await {
            sleep_until(due).await;
            if self.rules.wait_for(|r| !r.get(&self.from, &self.to).cut).await.is_err() {
                return Ended::Broken;
            }
            match item {
                Item::Bytes(bytes) => {
                    if writer.write_all(&bytes).await.is_err() {
                        return Ended::Finished;
                    }
                }
                Item::End => {
                    let _ = writer.shutdown().await;
                    return Ended::Finished;
                }
                Item::Broken => return Ended::Broken,
            }
        }
        Ended::Finished
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_arrive_in_order_and_not_before_their_time() {
        for seed in 0..200 {
            let mut dice = Dice::new(seed);
            let condition = Condition {
                delay: Duration::from_millis(dice.below(50)),
                jitter: Duration::from_millis(dice.below(50)),
                loss_percent: dice.below(50),
                rate: dice.below(3) * 1_000_000,
                ..Condition::default()
            };
            let start = Instant::now();
            let (mut clock, mut last, mut bytes) = (Clock::default(), start, 0_u64);
            for n in 0..200 {
                let now = start + Duration::from_millis(n);
                let length = dice.below(PIECE as u64);
                bytes += length;
                let due = clock.due(now, length, &condition, &mut dice);
                assert!(due >= last && due >= now + condition.delay, "seed {seed}");
                if let Some(least) = (bytes * 1_000_000).checked_div(condition.rate) {
                    let least = Duration::from_micros(least);
                    assert!(
                        due + Duration::from_millis(1) >= start + least,
                        "seed {seed}: over the rate"
                    );
                }
                last = due;
            }
        }
    }
}
