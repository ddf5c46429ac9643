//! A checker for linearizability: is there one order of a key's calls in which each takes effect between its call and its
//! return, and every answer is what a register would have given?
//!
//! Wing and Gong's search with Lowe's memory of states that were tried. Keys don't influence each other, so each is
//! checked alone. A call without a return (timed out, or its caller died) may have taken effect at any time after it
//! began, or never. The search is bounded: beyond [`MAX_STEPS`] the verdict is [`Verdict::Undecided`], never a guess.

use std::collections::{BTreeMap, HashSet};

/// Most steps of the search for one key.
pub const MAX_STEPS: u64 = 300_000;

/// What a key holds; `None` = it does not exist.
pub type Value = Option<u64>;

/// What a client called, and what it was told where it was told.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Call {
    /// It saw this.
    Read(Value),
    /// From now on it holds this; `None` deletes.
    Write(Value),
    /// Compare-and-set that was answered: it held `expected` and holds `new` now when it `won`, else it held something else.
    Swap {
        /// What it must hold.
        expected: Value,
        /// What it holds afterwards.
        new: Value,
        /// The answer. Without a return it has no meaning.
        won: bool,
    },
}

/// One call of a history. Times are any that order calls and returns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Operation {
    /// When it began.
    pub called: u64,
    /// When its answer was there; `None` = whether it took effect is unknown.
    pub returned: Option<u64>,
    /// What it was.
    pub call: Call,
}

/// What a check found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// An order exists.
    Linearizable,
    /// None exists. The calls that no order got past, in words.
    Broken(String),
    /// Too many orders to try.
    Undecided,
}

/// The calls of all clients, by key.
#[derive(Debug, Clone, Default)]
pub struct Histories(BTreeMap<String, Vec<Operation>>);

impl Histories {
    /// Adds a call.
    pub fn add(&mut self, key: &str, operation: Operation) {
        self.0.entry(key.to_owned()).or_default().push(operation);
    }

    /// Calls in all.
    pub fn len(&self) -> usize {
        self.0.values().map(Vec::len).sum()
    }

    /// True without a call.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Checks each key, which held what `initial` says before its first call. The first key that is not linearizable, or
    /// else the first undecided one, gives the verdict.
    pub fn check(&self, initial: impl Fn(&str) -> Value) -> Verdict {
        let mut verdict = Verdict::Linearizable;
        for (key, operations) in &self.0 {
            match check(operations, initial(key)) {
                Verdict::Broken(why) => return Verdict::Broken(format!("key {key}: {why}")),
                Verdict::Undecided => verdict = Verdict::Undecided,
                Verdict::Linearizable => {}
            }
        }
        verdict
    }
}

/// Checks the calls of one key, which held `initial` before them.
pub fn check(operations: &[Operation], initial: Value) -> Verdict {
    if let Some(operation) = from_nowhere(operations, initial) {
        return Verdict::Broken(format!("nobody ever wrote what this met: {operation:?}"));
    }
    let mut operations = relevant(operations);
    operations.sort_by_key(|op| op.called);
    Search {
        done: vec![0; operations.len().div_ceil(64)],
        must: operations.iter().filter(|op| op.returned.is_some()).count(),
        best: 0,
        stuck: String::new(),
        tried: HashSet::new(),
        operations: &operations,
    }
    .run(initial)
}

/// A call that met a value which no call gave the key. The search would find it too, but only after every order was tried.
fn from_nowhere(operations: &[Operation], initial: Value) -> Option<&Operation> {
    let given = |op: &Operation| match op.call {
        Call::Write(new) | Call::Swap { new, .. } => Some(new),
        Call::Read(_) => None,
    };
    let given: HashSet<Value> = operations.iter().filter_map(given).chain([initial]).collect();
    operations.iter().find(|op| {
        let met = match op.call {
            Call::Read(saw) => Some(saw),
            Call::Swap {
                expected, won: true, ..
            } => Some(expected),
            _ => None,
        };
        op.returned.is_some() && met.is_some_and(|met| !given.contains(&met))
    })
}

/// Without what can't matter: reads that never returned; and, where no swap was lost, writes that never returned and whose
/// value nobody met (taking effect could only spoil something).
fn relevant(operations: &[Operation]) -> Vec<Operation> {
    let lost_swap = operations
        .iter()
        .any(|op| op.returned.is_some() && matches!(op.call, Call::Swap { won: false, .. }));
    let met: HashSet<Value> = operations
        .iter()
        .filter_map(|op| match op.call {
            Call::Read(value) if op.returned.is_some() => Some(value),
            Call::Swap { expected, .. } => Some(expected),
            _ => None,
        })
        .collect();
    let matters = |op: &&Operation| match op.call {
        _ if op.returned.is_some() => true,
        Call::Read(_) => false,
        Call::Write(value) | Call::Swap { new: value, .. } => lost_swap || met.contains(&value),
    };
    operations.iter().filter(matters).copied().collect()
}

struct Search<'a> {
    operations: &'a [Operation],
    /// Which operations have taken effect.
    done: Vec<u64>,
    /// Returned operations that have not.
    must: usize,
    tried: HashSet<(Vec<u64>, Value)>,
    /// Most returned operations that an order got past, and what it could not get past.
    best: usize,
    stuck: String,
}

/// A choice that was made: to go back to.
struct Choice {
    operation: usize,
    before: Value,
}

impl Search<'_> {
    fn run(mut self, initial: Value) -> Verdict {
        let (mut value, mut from) = (initial, 0);
        let mut choices: Vec<Choice> = Vec::new();
        let total = self.must;
        let mut steps = 0;
        while self.must > 0 {
            steps += 1;
            if steps > MAX_STEPS {
                return Verdict::Undecided;
            }
            if let Some((operation, after)) = self.next(value, from) {
                self.set(operation, true);
                if self.tried.insert((self.done.clone(), after)) {
                    choices.push(Choice {
                        operation,
                        before: value,
                    });
                    (value, from) = (after, 0);
                } else {
                    self.set(operation, false);
                    from = operation + 1;
                }
                continue;
            }
            if self.stuck.is_empty() || total - self.must > self.best {
                self.best = total - self.must;
                self.stuck = self.explain(value);
            }
            let Some(last) = choices.pop() else {
                return Verdict::Broken(format!("{} of {total} calls fit, then {}", self.best, self.stuck));
            };
            self.set(last.operation, false);
            (value, from) = (last.before, last.operation + 1);
        }
        Verdict::Linearizable
    }

    fn is_done(&self, at: usize) -> bool {
        self.done[at / 64] & (1 << (at % 64)) != 0
    }

    fn set(&mut self, at: usize, done: bool) {
        self.done[at / 64] ^= 1 << (at % 64);
        if self.operations[at].returned.is_some() {
            if done { self.must -= 1 } else { self.must += 1 }
        }
    }

    /// Operations that may be the next to take effect: they began before any that has not taken effect returned.
    fn candidates(&self) -> impl Iterator<Item = usize> {
        let open = |at: &usize| !self.is_done(*at);
        let returns = |at: usize| self.operations[at].returned;
        let limit = (0..self.operations.len()).filter(open).filter_map(returns).min();
        (0..self.operations.len())
            .take_while(move |at| limit.is_none_or(|limit| self.operations[*at].called <= limit))
            .filter(open)
    }

    /// The first candidate from `from` on that fits the value, with the value afterwards.
    fn next(&self, value: Value, from: usize) -> Option<(usize, Value)> {
        let fits = |at: usize| Some((at, step(value, &self.operations[at])?));
        self.candidates().filter(|at| *at >= from).find_map(fits)
    }

    fn explain(&self, value: Value) -> String {
        let open: Vec<String> = self
            .candidates()
            .take(4)
            .map(|at| format!("{:?}", self.operations[at]))
            .collect();
        format!("the key holds {value:?} and none of these fits: {}", open.join(", "))
    }
}

/// The value after an operation, or `None` when its answer was another.
fn step(value: Value, operation: &Operation) -> Option<Value> {
    let known = operation.returned.is_some();
    match operation.call {
        Call::Read(saw) => (saw == value).then_some(value),
        Call::Write(new) => Some(new),
        Call::Swap { expected, new, won } => match (value == expected, known, won) {
            // One that was not answered and would lose takes no effect: there is nothing to try.
            (false, false, _) | (true, true, false) | (false, true, true) => None,
            (true, _, _) => Some(new),
            (false, true, false) => Some(value),
        },
    }
}

#[cfg(test)]
mod tests;
