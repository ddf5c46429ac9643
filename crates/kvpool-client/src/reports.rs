//! In-sync reports that the leader has not confirmed. Reports of a pool merge, so the memory is bounded whatever comes.

use crate::slots::SlotSet;
use kvpool_proto::v1::InSync;
use kvpool_state::records::SlotRange;
use std::collections::BTreeMap;

/// Reports for pools beyond this are dropped: a shard belongs to one.
const MAX_POOLS: usize = 8;

#[derive(Clone)]
struct Report {
    /// The oldest epoch of what was merged: the leader refuses by it, so the oldest is the safe one.
    epoch: u64,
    slots: SlotSet,
}

impl Report {
    fn merge(&mut self, other: &Report) {
        self.epoch = self.epoch.min(other.epoch);
        self.slots.add(&other.slots);
    }
}

/// What is to be sent, and the one report that is under way.
#[derive(Default)]
pub(crate) struct Reports {
    waiting: BTreeMap<String, Report>,
    under_way: Option<(u64, String, Report)>,
    sequence: u64,
}

impl Reports {
    pub(crate) fn add(&mut self, pool: String, epoch: u64, ranges: &[SlotRange]) {
        let report = Report {
            epoch,
            slots: SlotSet::from_ranges(ranges),
        };
        if !report.slots.is_empty() {
            self.put(pool, &report);
        }
    }

    fn put(&mut self, pool: String, report: &Report) {
        let room = self.waiting.len() < MAX_POOLS;
        match self.waiting.get_mut(&pool) {
            Some(waiting) => waiting.merge(report),
            None if room => {
                self.waiting.insert(pool, report.clone());
            }
            None => tracing::warn!(%pool, "dropped an in-sync report: too many pools"),
        }
    }

    /// The next report to send; one is under way at a time.
    pub(crate) fn next(&mut self) -> Option<InSync> {
        if self.under_way.is_some() {
            return None;
        }
        let (pool, report) = self.waiting.pop_first()?;
        self.sequence += 1;
        let message = InSync {
            sequence: self.sequence,
            pool: pool.clone(),
            epoch: report.epoch,
            ranges: report.slots.to_ranges(),
        };
        self.under_way = Some((self.sequence, pool, report));
        Some(message)
    }

    /// The leader has committed or refused everything up to `sequence`.
    pub(crate) fn done(&mut self, sequence: u64) {
        if self.under_way.as_ref().is_some_and(|(s, _, _)| *s <= sequence) {
            self.under_way = None;
        }
    }

    /// The session broke: what was under way is sent again.
    pub(crate) fn broken(&mut self) {
        if let Some((_, pool, report)) = self.under_way.take() {
            self.put(pool, &report);
        }
    }

    /// A new incarnation has nothing in sync.
    pub(crate) fn clear(&mut self) {
        self.waiting.clear();
        self.under_way = None;
    }

    pub(crate) fn depth(&self) -> u32 {
        let under_way = self.under_way.as_ref().map_or(0, |(_, _, r)| r.slots.len());
        under_way + self.waiting.values().map(|r| r.slots.len()).sum::<u32>()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(first: u32, last: u32) -> [SlotRange; 1] {
        [SlotRange {
            first,
            last,
            copies: Vec::new(),
        }]
    }

    #[test]
    fn reports_merge_under_the_oldest_epoch_and_survive_a_break() {
        let mut reports = Reports::default();
        reports.add("p".into(), 7, &range(0, 9));
        let first = reports.next().unwrap();
        assert_eq!(
            (first.sequence, first.epoch, first.ranges),
            (1, 7, range(0, 9).to_vec())
        );
        reports.add("p".into(), 9, &range(10, 19));
        assert_eq!(reports.next(), None, "one at a time");
        reports.broken();
        let second = reports.next().unwrap();
        assert_eq!(
            (second.sequence, second.epoch, second.ranges),
            (2, 7, range(0, 19).to_vec())
        );
        reports.done(1);
        assert_eq!(reports.depth(), 20, "an answer to the older report is not one to this");
        reports.done(2);
        assert_eq!(reports.depth(), 0);
    }
}
