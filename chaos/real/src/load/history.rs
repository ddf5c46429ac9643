//! Judges what metadata clients and watchers saw: linearizable, nothing acknowledged lost, watches without gaps.
//!
//! Every answer of the coordinator carries its revision, the place in the log that it is of. So nothing has to be searched:
//! the order by revision is the only candidate for a linearization, and it is one exactly when (1) an operation that began
//! after another one had ended has no lower revision (a write: a higher one), (2) every read shows the value that the log
//! holds at its revision, (3) every acknowledged write is in the log at its revision, (4) every change in the log is
//! an acknowledged write or one with an unknown result, and each of those at most once.

use std::collections::{BTreeMap, BTreeSet};

/// One operation of a client; times in microseconds of one clock.
#[derive(Clone, Debug)]
pub struct Op {
    pub start: u64,
    pub end: u64,
    pub key: u32,
    pub what: What,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum What {
    Write {
        value: u64,
        revision: u64,
    },
    /// May have happened, may happen yet, may never happen.
    UnknownWrite {
        value: u64,
    },
    Read {
        value: Option<u64>,
        revision: u64,
    },
}

impl Op {
    fn revision(&self) -> Option<u64> {
        match self.what {
            What::Write { revision, .. } | What::Read { revision, .. } => Some(revision),
            What::UnknownWrite { .. } => None,
        }
    }
}

/// The log as watchers saw it.
#[derive(Clone, Debug, Default)]
pub struct Log {
    /// Changes by key and revision.
    changes: BTreeMap<u32, BTreeMap<u64, u64>>,
    /// Values known from lists, by key and revision of the list.
    listed: BTreeMap<u32, BTreeMap<u64, Option<u64>>>,
    /// Revisions (from, to]: every change in there was seen.
    covered: Vec<(u64, u64)>,
}

impl Log {
    /// A change that a watcher was given.
    ///
    /// # Errors
    /// Another watcher was given another one for the same revision.
    pub fn change(&mut self, key: u32, revision: u64, value: u64) -> Result<(), String> {
        match self.changes.entry(key).or_default().insert(revision, value) {
            Some(other) if other != value => Err(format!(
                "watchers were given {other} and {value} for key {key} at revision {revision}"
            )),
            _ => Ok(()),
        }
    }

    /// A value from a list; `None` = it is not there.
    pub fn listed(&mut self, key: u32, revision: u64, value: Option<u64>) {
        self.listed.entry(key).or_default().insert(revision, value);
    }

    /// One watcher saw everything in (from, to]; `seen` holds the (revision, key) pairs it was given, over its whole life.
    pub fn cover(&mut self, from: u64, to: u64) {
        if from < to {
            self.covered.push((from, to));
        }
    }

    /// What this watcher missed of what others saw in a range that it covered.
    #[must_use]
    pub fn missed(&self, ranges: &[(u64, u64)], seen: &BTreeSet<(u64, u32)>) -> Vec<String> {
        let all = self
            .changes
            .iter()
            .flat_map(|(key, changes)| changes.keys().map(move |revision| (*revision, *key)));
        all.filter(|(revision, _)| ranges.iter().any(|(from, to)| from < revision && revision <= to))
            .filter(|change| !seen.contains(change))
            .map(|(revision, key)| {
                format!("the change of key {key} at revision {revision} was not handed to a watcher")
            })
            .collect()
    }

    /// The value at a revision; the outer `None`: nobody saw enough to know.
    fn at(&self, key: u32, revision: u64) -> Option<Option<u64>> {
        let changed = self
            .changes
            .get(&key)
            .and_then(|known| known.range(..=revision).next_back());
        let listed = self
            .listed
            .get(&key)
            .and_then(|known| known.range(..=revision).next_back());
        let changed = changed.map(|(at, value)| (*at, Some(*value)));
        let listed = listed.map(|(at, value)| (*at, *value));
        let (from, value) = changed
            .into_iter()
            .chain(listed)
            .max_by_key(|(at, _)| *at)
            .unwrap_or_default();
        self.covers(from, revision).then_some(value)
    }

    fn covers(&self, mut from: u64, to: u64) -> bool {
        while from < to {
            let next = self
                .covered
                .iter()
                .filter(|(a, b)| *a <= from && from < *b)
                .map(|(_, b)| *b)
                .max();
            match next {
                Some(next) => from = next,
                None => return false,
            }
        }
        true
    }

    /// Joins what was covered; call it before judging.
    pub fn tidy(&mut self) {
        self.covered.sort_unstable();
        let mut joined: Vec<(u64, u64)> = Vec::new();
        for (from, to) in self.covered.drain(..) {
            match joined.last_mut() {
                Some(last) if from <= last.1 => last.1 = last.1.max(to),
                _ => joined.push((from, to)),
            }
        }
        self.covered = joined;
    }

    /// True when a watcher was given this change.
    #[must_use]
    pub fn has(&self, key: u32, revision: u64) -> bool {
        self.changes
            .get(&key)
            .is_some_and(|changes| changes.contains_key(&revision))
    }

    #[must_use]
    pub fn change_count(&self) -> usize {
        self.changes.values().map(BTreeMap::len).sum()
    }
}

/// What came out.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Verdict {
    pub violations: Vec<String>,
    /// Operations whose value could be compared with the log, and those where no watcher saw enough.
    pub compared: usize,
    pub not_compared: usize,
}

/// Judges a history against the log.
#[must_use]
pub fn check(ops: &[Op], log: &Log) -> Verdict {
    let mut verdict = Verdict::default();
    real_time(ops, &mut verdict);
    values(ops, log, &mut verdict);
    origins(ops, log, &mut verdict);
    verdict
}

fn real_time(ops: &[Op], verdict: &mut Verdict) {
    let mut starts: Vec<&Op> = ops.iter().filter(|op| op.revision().is_some()).collect();
    let mut ends = starts.clone();
    starts.sort_by_key(|op| op.start);
    ends.sort_by_key(|op| op.end);
    let mut ends = ends.into_iter().peekable();
    let mut highest = 0;
    for op in starts {
        while let Some(ended) = ends.next_if(|ended| ended.end < op.start) {
            highest = highest.max(ended.revision().unwrap_or(0));
        }
        let revision = op.revision().unwrap_or(0);
        let old = match op.what {
            What::Write { .. } => revision <= highest,
            _ => revision < highest,
        };
        if old {
            let text = format!("R2: {op:?} began after an operation of revision {highest} had ended");
            verdict.violations.push(text);
        }
    }
}

fn values(ops: &[Op], log: &Log, verdict: &mut Verdict) {
    let mut written = BTreeMap::new();
    for op in ops {
        let (expected, revision) = match op.what {
            What::Write { value, revision } => {
                if let Some(other) = written.insert(revision, op) {
                    verdict
                        .violations
                        .push(format!("R2: {op:?} and {other:?} have one revision"));
                }
                (Some(value), revision)
            }
            What::Read { value, revision } => (value, revision),
            What::UnknownWrite { .. } => continue,
        };
        match log.at(op.key, revision) {
            None => verdict.not_compared += 1,
            Some(found) => {
                verdict.compared += 1;
                if found != expected {
                    verdict
                        .violations
                        .push(format!("R2/R3: {op:?}, but the log has {found:?}"));
                }
            }
        }
    }
}

fn origins(ops: &[Op], log: &Log, verdict: &mut Verdict) {
    let mut acknowledged = BTreeMap::new();
    let mut unknown: BTreeMap<(u32, u64), usize> = BTreeMap::new();
    for op in ops {
        match op.what {
            What::Write { value, revision } => {
                acknowledged.insert(revision, (op.key, value));
            }
            What::UnknownWrite { value } => *unknown.entry((op.key, value)).or_default() += 1,
            What::Read { .. } => {}
        }
    }
    for (key, changes) in &log.changes {
        for (revision, value) in changes {
            if acknowledged.get(revision) == Some(&(*key, *value)) {
                continue;
            }
            match unknown.get_mut(&(*key, *value)) {
                Some(left) if *left > 0 => *left -= 1,
                _ => {
                    let text =
                        format!("R2: key {key} became {value} at revision {revision}, which nobody (more) asked for");
                    verdict.violations.push(text);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests;
