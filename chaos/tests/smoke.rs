//! A thousand seeds of everything at once.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use kvpool_chaos::oracle::Counts;
use kvpool_chaos::scenario::{self, Plan};

const SEEDS: u64 = 1_000;

fn one(seed: u64) -> Counts {
    let outcome = scenario::run(seed, Plan::default());
    assert!(
        outcome.violations.is_empty(),
        "KVPOOL_SEED={seed} fails (replay: KVPOOL_SEED={seed} cargo test --release -p kvpool-chaos --test smoke):\n{}",
        outcome.violations.join("\n")
    );
    if seed.is_multiple_of(10) {
        let again = scenario::run(seed, Plan::default());
        assert_eq!(outcome.trace, again.trace, "KVPOOL_SEED={seed} is not deterministic");
    }
    outcome.counts
}

#[test]
fn a_thousand_seeds() {
    if let Some(seed) = std::env::var("KVPOOL_SEED").ok().and_then(|s| s.parse().ok()) {
        println!("{:?}", scenario::run(seed, Plan::default()));
        one(seed);
        return;
    }
    let seeds = std::env::var("KVPOOL_SEEDS")
        .ok()
        .and_then(|s| s.parse().ok())
        .unwrap_or(SEEDS);
    let (next, total) = (AtomicU64::new(0), Mutex::new(Counts::default()));
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= seeds {
                        return;
                    }
                    let counts = one(seed);
                    total.lock().unwrap_or_else(PoisonError::into_inner).add(&counts);
                }
            });
        }
    });
    let total = total.into_inner().unwrap();
    println!("{seeds} seeds: {total:?}");
    // The run must not have been empty.
    assert!(total.acknowledged > 50 * seeds && total.reads > 10 * seeds, "{total:?}");
    assert!(
        total.crashes > seeds && total.leaders > 2 * seeds && total.restored > seeds,
        "{total:?}"
    );
}
