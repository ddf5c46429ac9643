//! In-sync reports on their way into the log. Outside of the actors, so that a crashed ShardActor loses none; reports of a
//! shard merge, so the table is bounded by the shards.

use crate::actors::gate::Signal;
use crate::actors::shard::ShardMsg;
use kvpool_client::SlotSet;
use kvpool_proto::v1::InSync;
use parking_lot::Mutex;
use ractor::ActorRef;
use std::collections::BTreeMap;
use std::sync::Arc;
use tokio::sync::watch;

/// Up to which report a session has an answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Done {
    pub(crate) sequence: u64,
    pub(crate) refused: bool,
}

/// Reports that are not committed yet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Batch {
    pub(crate) incarnation: u64,
    pub(crate) pool: String,
    /// The oldest epoch of what was merged.
    pub(crate) epoch: u64,
    pub(crate) slots: SlotSet,
    /// Newest report in it.
    pub(crate) sequence: u64,
}

#[derive(Default)]
struct Entry {
    waiting: Option<Batch>,
    incarnation: u64,
    done: watch::Sender<Done>,
    actor: Option<(ActorRef<ShardMsg>, Arc<Signal>)>,
}

#[derive(Default)]
pub(crate) struct Inbox(Mutex<BTreeMap<String, Entry>>);

impl Inbox {
    /// A session begins: it is told when its reports are done. What an older incarnation reported is void.
    pub(crate) fn open(&self, shard: &str, incarnation: u64) -> watch::Receiver<Done> {
        let mut entries = self.0.lock();
        let entry = entries.entry(shard.to_owned()).or_default();
        if entry.incarnation != incarnation {
            entry.incarnation = incarnation;
            entry.waiting = None;
            entry.done.send_replace(Done::default());
        }
        entry.done.subscribe()
    }

    pub(crate) fn put(&self, shard: &str, incarnation: u64, report: &InSync) {
        let mut entries = self.0.lock();
        let Some(entry) = entries.get_mut(shard).filter(|e| e.incarnation == incarnation) else {
            return;
        };
        let mut batch = Batch {
            incarnation,
            pool: report.pool.clone(),
            epoch: report.epoch,
            slots: SlotSet::from_ranges(&report.ranges),
            sequence: report.sequence,
        };
        // A shard belongs to one pool: a report about another one is refused by the state, and takes nothing with it.
        if let Some(older) = entry.waiting.take().filter(|w| w.pool == batch.pool) {
            batch.epoch = batch.epoch.min(older.epoch);
            batch.slots.add(&older.slots);
            batch.sequence = batch.sequence.max(older.sequence);
        }
        entry.waiting = Some(batch);
        entry.wake();
    }

    /// The ShardActor begins a life; it is woken when something waits.
    pub(crate) fn serve(&self, shard: &str, actor: ActorRef<ShardMsg>, signal: Arc<Signal>) {
        let mut entries = self.0.lock();
        let entry = entries.entry(shard.to_owned()).or_default();
        entry.actor = Some((actor, signal));
        if entry.waiting.is_some() {
            entry.wake();
        }
    }

    pub(crate) fn waiting(&self, shard: &str) -> Option<Batch> {
        self.0.lock().get(shard)?.waiting.clone()
    }

    /// The batch was committed or refused; what was reported since stays. True when something is left.
    pub(crate) fn done(&self, shard: &str, batch: &Batch, refused: bool) -> bool {
        let mut entries = self.0.lock();
        let Some(entry) = entries.get_mut(shard).filter(|e| e.incarnation == batch.incarnation) else {
            return false;
        };
        match &mut entry.waiting {
            Some(waiting) if waiting.sequence > batch.sequence => waiting.slots.remove(&batch.slots),
            _ => entry.waiting = None,
        }
        entry.done.send_replace(Done {
            sequence: batch.sequence,
            refused,
        });
        entry.waiting.is_some()
    }

    /// The shard's actor was ended. The entry stays: a session of a new incarnation may have it already.
    pub(crate) fn detach(&self, shard: &str) {
        if let Some(entry) = self.0.lock().get_mut(shard) {
            entry.actor = None;
        }
    }
}

impl Entry {
    fn wake(&self) {
        if let Some((actor, signal)) = &self.actor
            && signal.raise()
        {
            // A dead actor's successor looks by itself.
            let _ = actor.cast(ShardMsg::Wake);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvpool_state::records::SlotRange;

    fn report(sequence: u64, epoch: u64, first: u32, last: u32) -> InSync {
        let ranges = vec![SlotRange {
            first,
            last,
            copies: Vec::new(),
        }];
        InSync {
            sequence,
            pool: "p".into(),
            epoch,
            ranges,
        }
    }

    #[test]
    fn reports_merge_and_survive_until_done() {
        let inbox = Inbox::default();
        let done = inbox.open("s", 7);
        inbox.put("s", 6, &report(1, 3, 0, 9));
        assert_eq!(inbox.waiting("s"), None, "an older incarnation's report");
        inbox.put("s", 7, &report(1, 3, 0, 9));
        let batch = inbox.waiting("s").unwrap();
        inbox.put("s", 7, &report(2, 4, 10, 19));
        assert!(inbox.done("s", &batch, false), "the second report is left");
        assert_eq!(
            *done.borrow(),
            Done {
                sequence: 1,
                refused: false
            }
        );
        let rest = inbox.waiting("s").unwrap();
        assert_eq!((rest.slots.len(), rest.epoch, rest.sequence), (10, 3, 2));
        assert!(!inbox.done("s", &rest, true));
        assert_eq!(
            *done.borrow(),
            Done {
                sequence: 2,
                refused: true
            }
        );
        inbox.put("s", 7, &report(3, 4, 0, 0));
        inbox.open("s", 8);
        assert_eq!(inbox.waiting("s"), None, "a new incarnation has nothing in sync");
    }
}
