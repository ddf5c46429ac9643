//! Many seeds of everything at once: of the register, which tests the log hardest, and of the control plane.

use kvpool_chaos::pool;
use kvpool_chaos::scenario::{self, Plan};
use kvpool_chaos::seeds;

#[test]
fn register() {
    let total = seeds::run("register", 300, |seed| scenario::run(seed, Plan::default()));
    let (seeds, counts) = (total.seeds, total.counts);
    // The run must not have been empty.
    assert!(
        counts.acknowledged >= 50 * seeds && counts.reads >= 10 * seeds,
        "{counts:?}"
    );
    assert!(
        counts.crashes >= seeds && counts.leaders >= 2 * seeds && counts.restored >= seeds / 2,
        "{counts:?}"
    );
}

#[test]
fn control() {
    let total = seeds::run("control", 40, |seed| pool::scenario::run(seed, None));
    let (seeds, counts) = (total.seeds, total.counts);
    assert!(
        counts.acknowledged >= 10 * seeds && counts.reads >= 10 * seeds,
        "{counts:?}"
    );
    assert!(counts.crashes >= seeds && counts.leaders >= 2 * seeds, "{counts:?}");
    for (event, least) in [
        ("a shard got an incarnation", 4 * seeds),
        ("a watch was resumed", seeds),
        ("command: slots in-sync", 4 * seeds),
        ("command: shard down", seeds / 10),
        ("a write was tried again", seeds),
        ("a history was found linearizable", seeds - seeds / 20),
    ] {
        let times = total.coverage.get(event).copied().unwrap_or(0);
        assert!(times >= least, "{event}: {times} times in {seeds} seeds");
    }
}
