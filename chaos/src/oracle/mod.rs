//! The oracle: watches members and clients from outside and knows what must never be seen.
//!
//! One invariant, one file:
//! - [`leaders`]: one leader per term
//! - [`prefix`]: what members applied is the same history, as far as each has come
//! - [`durable`]: what was acknowledged is there for good, what was refused never appears
//! - [`real_time`]: reads and writes take effect between call and return
//! - [`isolation`]: a member that is cut off raises no term

pub mod durable;
pub mod isolation;
pub mod leaders;
pub mod prefix;
pub mod real_time;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kvpool_raft::{MemberId, Status};

use crate::register::{History, Operation};
use crate::world;

/// Counts of what happened, to show that a run was not empty.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Counts {
    /// Writes acknowledged.
    pub acknowledged: u64,
    /// Writes refused.
    pub refused: u64,
    /// Writes whose outcome is unknown.
    pub unknown: u64,
    /// Linearizable reads served.
    pub reads: u64,
    /// Leaders seen.
    pub leaders: u64,
    /// States restored from a snapshot.
    pub restored: u64,
    /// Crashes of a member.
    pub crashes: u64,
}

impl Counts {
    /// Adds another run's.
    pub fn add(&mut self, other: &Counts) {
        self.acknowledged += other.acknowledged;
        self.refused += other.refused;
        self.unknown += other.unknown;
        self.reads += other.reads;
        self.leaders += other.leaders;
        self.restored += other.restored;
        self.crashes += other.crashes;
    }
}

#[derive(Default)]
struct Book {
    violations: Vec<String>,
    leaders: leaders::Leaders,
    prefix: prefix::Prefix,
    durable: durable::Durable,
    real_time: real_time::RealTime,
    isolation: isolation::Isolation,
    counts: Counts,
    coverage: BTreeMap<&'static str, u64>,
}

impl Book {
    fn check(&mut self, outcome: Result<(), String>) {
        if let Err(what) = outcome
            && self.violations.len() < 20
        {
            self.violations
                .push(format!("at {} ms: {what}", world::now() / 1_000_000));
        }
    }
}

/// See the module. Clones share it.
#[derive(Clone, Default)]
pub struct Oracle(Arc<Mutex<Book>>);

impl Oracle {
    fn lock(&self) -> MutexGuard<'_, Book> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes something that must not be.
    pub fn violation(&self, what: String) {
        self.lock().check(Err(what));
    }

    /// Counts a fault or an interesting event.
    pub fn count(&self, what: &'static str) {
        *self.lock().coverage.entry(what).or_default() += 1;
    }

    /// How often each was counted.
    pub fn coverage(&self) -> BTreeMap<&'static str, u64> {
        self.lock().coverage.clone()
    }

    /// A member's status changed.
    pub fn status(&self, status: &Status) {
        let book = &mut *self.lock();
        if status.is_leader() {
            let outcome = book.leaders.leads(status.term, status.member_id);
            book.counts.leaders = book.leaders.len();
            book.check(outcome);
        }
    }

    /// A member applied an operation.
    pub fn applied(&self, member: MemberId, index: u64, term: u64, operation: Operation) {
        let book = &mut *self.lock();
        let mut outcome = book.prefix.applied(member, index, term, operation);
        if outcome.is_ok() {
            outcome = book.durable.applied(operation);
        }
        book.check(outcome);
        world::note(index ^ operation.rotate_left(32));
    }

    /// A member replaced its state by a snapshot.
    pub fn restored(&self, member: MemberId, applied: &[(u64, Operation)]) {
        let book = &mut *self.lock();
        book.counts.restored += 1;
        let outcome = book.prefix.is_prefix(member, applied);
        book.check(outcome);
    }

    /// A call begins; the mark goes into its end.
    pub fn begin(&self) -> real_time::Mark {
        self.lock().real_time.begin()
    }

    /// A write was acknowledged by a member.
    pub fn acknowledged(&self, mark: real_time::Mark, member: MemberId, term: u64, index: u64, operation: Operation) {
        let book = &mut *self.lock();
        book.counts.acknowledged += 1;
        let outcomes = [
            book.leaders.leads(term, member),
            book.durable.acknowledged(operation, index, &book.prefix),
            book.real_time.wrote(mark, index),
        ];
        for outcome in outcomes {
            book.check(outcome);
        }
    }

    /// A write was refused for certain.
    pub fn refused(&self, operation: Operation) {
        let book = &mut *self.lock();
        book.counts.refused += 1;
        let outcome = book.durable.refused(operation, &book.prefix);
        book.check(outcome);
    }

    /// A write's outcome is not known.
    pub fn unknown(&self) {
        self.lock().counts.unknown += 1;
    }

    /// A linearizable read saw this.
    pub fn read(&self, mark: real_time::Mark, member: MemberId, read_index: u64, seen: &History) {
        let book = &mut *self.lock();
        book.counts.reads += 1;
        let last = seen.applied.last().map_or(0, |(index, _)| *index);
        let outcomes = [
            book.prefix.is_prefix(member, &seen.applied),
            book.real_time.read(mark, last.max(read_index), last, &book.prefix),
        ];
        for outcome in outcomes {
            book.check(outcome);
        }
    }

    /// A linearizable read, or a new leader, saw the state as of `revision`.
    pub fn looked(&self, mark: real_time::Mark, revision: u64) {
        let book = &mut *self.lock();
        book.counts.reads += 1;
        let outcome = book.real_time.read(mark, revision, revision, &book.prefix);
        book.check(outcome);
    }

    /// A member replaced its state by a snapshot that others judge.
    pub fn restored_state(&self) {
        self.lock().counts.restored += 1;
    }

    /// A member was cut off and is in this term; or, the second time, still is.
    pub fn cut_off(&self, member: MemberId, life: u64, term: u64) {
        let book = &mut *self.lock();
        let outcome = book.isolation.seen(member, life, term);
        book.check(outcome);
    }

    /// A member is connected again.
    pub fn reconnected(&self, member: MemberId) {
        self.lock().isolation.over(member);
    }

    /// A member crashed.
    pub fn crashed(&self) {
        self.lock().counts.crashes += 1;
    }

    /// Everything is healed and at rest: this is what a member holds.
    pub fn at_rest(&self, member: MemberId, holds: &History) {
        let book = &mut *self.lock();
        let outcomes = [
            book.prefix.is_all(member, &holds.applied),
            book.durable.holds_all(member, &holds.applied),
        ];
        for outcome in outcomes {
            book.check(outcome);
        }
    }

    /// What was found.
    pub fn verdict(&self) -> (Vec<String>, Counts) {
        let book = self.lock();
        (book.violations.clone(), book.counts)
    }
}
