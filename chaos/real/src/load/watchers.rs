//! Watchers: they follow pools and slot maps, let go and come back where they were, and check order, loss and doubles.

use super::history::Log;
use super::metadata;
use crate::dice::Dice;
use crate::record::Record;
use kvpool_client::{Client, Kind, WatchFilter, WatchItem};
use kvpool_state::records::{Event, Record as Row};
use parking_lot::Mutex;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;
use tokio::time::{Instant, sleep_until};
use tokio_util::sync::CancellationToken;

/// A watch is let go after up to this long.
const HOLD: Duration = Duration::from_secs(8);

/// One watcher.
pub struct Watcher {
    pub number: u64,
    pub client: Client,
    pub record: Arc<Record>,
    pub log: Arc<Mutex<Log>>,
    pub dice: Dice,
    pub stop: CancellationToken,
}

/// What a watcher saw.
#[derive(Default)]
pub struct Seen {
    position: u64,
    /// Revisions (from, to] without a relist in between.
    pub ranges: Vec<(u64, u64)>,
    pub changes: BTreeSet<(u64, u32)>,
    epochs: BTreeMap<String, u64>,
    pub resumed: u64,
    pub relisted: u64,
}

impl Watcher {
    /// Watches until it is told to stop.
    pub async fn run(mut self) -> Seen {
        let mut seen = Seen::default();
        while !self.stop.is_cancelled() {
            let filter = WatchFilter {
                kinds: vec![Kind::Pool, Kind::SlotMap],
                ..WatchFilter::default()
            };
            let mut stream = self.client.watch(filter, seen.position);
            let until = Instant::now() + Duration::from_millis(500) + self.dice.up_to(HOLD);
            loop {
                tokio::select! {
                    item = stream.next() => match item {
                        Some(item) => self.take(item, &mut seen),
                        None => break,
                    },
                    () = sleep_until(until) => break,
                    () = self.stop.cancelled() => break,
                }
            }
            seen.resumed += 1;
        }
        let mut log = self.log.lock();
        for (from, to) in &seen.ranges {
            log.cover(*from, *to);
        }
        seen
    }

    fn take(&self, item: WatchItem, seen: &mut Seen) {
        let wrong = |text: String| self.record.violation(format!("watcher {}: {text}", self.number));
        match item {
            WatchItem::Changes { revision, events } => {
                if revision <= seen.position {
                    wrong(format!("changes of revision {revision} after {}", seen.position));
                }
                let mut last = seen.position + 1;
                for event in events {
                    if event.revision < last || event.revision > revision {
                        wrong(format!(
                            "an event of revision {} between {last} and {revision}",
                            event.revision
                        ));
                    }
                    last = event.revision;
                    self.event(event, seen);
                }
                if let Some(range) = seen.ranges.last_mut() {
                    range.1 = revision;
                }
                seen.position = revision;
            }
            WatchItem::Relisted { revision, records } => {
                if revision < seen.position {
                    wrong(format!("a list of revision {revision} after {}", seen.position));
                }
                let mut values = BTreeMap::new();
                for row in records {
                    match row {
                        Row::Pool(pool) => {
                            values.extend(metadata::key(&pool.name).map(|key| (key, u64::from(pool.factor))));
                        }
                        Row::Slots(map) => {
                            let last = seen.epochs.insert(map.pool.clone(), map.epoch).unwrap_or(0);
                            if map.epoch < last {
                                wrong(format!(
                                    "R4: a list has epoch {} of pool {} after {last}",
                                    map.epoch, map.pool
                                ));
                            }
                        }
                        _ => {}
                    }
                }
                let mut log = self.log.lock();
                for key in 0..=metadata::LAST_KEY {
                    log.listed(key, revision, values.get(&key).copied());
                }
                seen.ranges.push((revision, revision));
                seen.position = revision;
                seen.relisted += 1;
            }
        }
    }

    fn event(&self, event: Event, seen: &mut Seen) {
        let wrong = |text: String| self.record.violation(format!("watcher {}: {text}", self.number));
        match event.record {
            Some(Row::Pool(pool)) => {
                let Some(key) = metadata::key(&pool.name) else { return };
                if !seen.changes.insert((event.revision, key)) {
                    wrong(format!(
                        "the change of {} at revision {} came twice",
                        pool.name, event.revision
                    ));
                }
                if let Err(text) = self.log.lock().change(key, event.revision, u64::from(pool.factor)) {
                    wrong(text);
                }
            }
            Some(Row::Slots(map)) => {
                let last = seen.epochs.insert(map.pool.clone(), map.epoch).unwrap_or(0);
                if map.epoch <= last {
                    wrong(format!("R4: epoch {} of pool {} after {last}", map.epoch, map.pool));
                }
            }
            _ => {}
        }
    }
}
