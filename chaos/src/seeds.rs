//! Many seeds of one scenario: in parallel, each tenth twice, with what they covered.
//!
//! `KVPOOL_SEED=n` runs that seed alone, `KVPOOL_SEEDS=n` that many, `KVPOOL_BASE_SEED=n` from that one on.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use crate::oracle::Counts;
use crate::scenario::Outcome;

/// Seeds that run at once.
const THREADS: usize = 2;

/// What seeds showed together.
#[derive(Debug, Clone, Default)]
pub struct Total {
    /// How many ran.
    pub seeds: u64,
    /// What happened to the log.
    pub counts: Counts,
    /// Faults and events.
    pub coverage: BTreeMap<&'static str, u64>,
}

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}

/// How many seeds to run: what the environment says, or `usual`.
pub fn how_many(usual: u64) -> u64 {
    number("KVPOOL_SEEDS").unwrap_or(usual)
}

/// Runs one seed and panics when it violates something or, each tenth, is not deterministic.
fn one(scenario: &str, run: &(dyn Fn(u64) -> Outcome + Sync), seed: u64) -> Outcome {
    let outcome = run(seed);
    let replay = format!("KVPOOL_SEED={seed} cargo test --release -p kvpool-chaos --test smoke {scenario}");
    assert!(
        outcome.violations.is_empty(),
        "seed {seed} of {scenario} fails; replay: {replay}\n{}",
        outcome.violations.join("\n")
    );
    if seed.is_multiple_of(10) {
        let again = run(seed);
        assert_eq!(
            outcome.trace, again.trace,
            "seed {seed} of {scenario} is not deterministic; replay: {replay}"
        );
    }
    outcome
}

/// Runs `usual` seeds, or what the environment says, and prints what they covered.
///
/// # Panics
/// When a seed fails.
pub fn run(scenario: &str, usual: u64, run: impl Fn(u64) -> Outcome + Sync) -> Total {
    if let Some(seed) = number("KVPOOL_SEED") {
        println!("{scenario}, seed {seed}: {:#?}", run(seed));
        one(scenario, &run, seed);
        return Total::default();
    }
    let (base, seeds) = (number("KVPOOL_BASE_SEED").unwrap_or(0), how_many(usual));
    println!("{scenario}: {seeds} seeds from base seed {base}");
    let started = Instant::now();
    let (next, total) = (AtomicU64::new(0), Mutex::new(Total::default()));
    std::thread::scope(|scope| {
        for _ in 0..THREADS {
            scope.spawn(|| {
                loop {
                    let at = next.fetch_add(1, Ordering::Relaxed);
                    if at >= seeds {
                        return;
                    }
                    let outcome = one(scenario, &run, base.wrapping_add(at));
                    let mut total = total.lock().unwrap_or_else(PoisonError::into_inner);
                    total.seeds += 1;
                    total.counts.add(&outcome.counts);
                    for (what, times) in outcome.coverage {
                        *total.coverage.entry(what).or_default() += times;
                    }
                }
            });
        }
    });
    let total = total.into_inner().unwrap_or_else(PoisonError::into_inner);
    println!("{}", total.words(scenario, started.elapsed().as_secs_f64()));
    total
}

impl Total {
    /// A report: a line for the log, a line per fault and event.
    fn words(&self, scenario: &str, seconds: f64) -> String {
        let rate = self.seeds as f64 / seconds.max(0.001);
        let mut out = format!(
            "{scenario}: {} seeds in {seconds:.1} s, {rate:.1} seeds/s; {:?}",
            self.seeds, self.counts
        );
        for (what, times) in &self.coverage {
            // Writing to a string does not fail.
            let _ = write!(out, "\n  {times:>8}  {what}");
        }
        out
    }
}
