//! The checks can fail: each seeded bug is noticed within a few seeds. A bug that survives fails this test.

use kvpool_chaos::mutation::Mutation;
use kvpool_chaos::pool;
use kvpool_chaos::scenario::{self, Outcome, Plan};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

/// Seeds that a bug may survive.
const SEEDS: u64 = 80;

fn run(seed: u64, mutation: Mutation) -> Outcome {
    if mutation.is_of_the_log() {
        let plan = Plan {
            mutation: Some(mutation),
            ..Plan::default()
        };
        scenario::run(seed, plan)
    } else {
        pool::scenario::run(seed, Some(mutation))
    }
}

/// The first seed that notices, and what it says.
fn noticed(mutation: Mutation) -> Option<(u64, String)> {
    (0..SEEDS).find_map(|seed| Some((seed, run(seed, mutation).violations.into_iter().next()?)))
}

#[test]
fn every_seeded_bug_is_noticed() {
    let wanted = std::env::var("KVPOOL_MUTATION").ok();
    let all: Vec<Mutation> = Mutation::ALL
        .iter()
        .copied()
        .filter(|m| wanted.as_ref().is_none_or(|w| *w == format!("{m:?}")))
        .collect();
    assert!(wanted.is_some() || all.len() >= 20, "only {} bugs", all.len());
    let (next, survived) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while let Some(mutation) = all.get(next.fetch_add(1, Ordering::Relaxed)) {
                    match noticed(*mutation) {
                        Some((seed, what)) => println!("{mutation:?}: noticed by seed {seed}: {what}"),
                        None => survived
                            .lock()
                            .unwrap_or_else(PoisonError::into_inner)
                            .push(format!("{mutation:?}: {}", mutation.words())),
                    }
                }
            });
        }
    });
    let survived = survived.into_inner().unwrap();
    println!("{} of {} bugs noticed", all.len() - survived.len(), all.len());
    assert!(
        survived.is_empty(),
        "these bugs survived {SEEDS} seeds:\n{}",
        survived.join("\n")
    );
}
