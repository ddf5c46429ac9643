//! Snapshots, purges and slow followers at the highest rate: the shape of openraft issue 2116, in which a queued
//! apply finds its entries purged and the member dies. Our answer is that far more applied entries are kept than
//! can be waiting; here nobody may panic.

use std::time::Duration;

use kvpool_chaos::cluster;
use kvpool_chaos::faults::Menu;
use kvpool_chaos::oracle::Counts;
use kvpool_chaos::scenario::{self, Plan};
use kvpool_raft::{Config, MemberId};

fn stormy(id: MemberId) -> Config {
    let mut config = cluster::config(id);
    config.snapshot_every = 5;
    config.keep_applied = 40;
    config
}

#[test]
fn snapshots_at_every_turn_kill_nobody() {
    let mut total = Counts::default();
    for seed in 0..25 {
        let plan = Plan {
            menu: Menu {
                crashes: false,
                disk_errors: false,
            },
            config: stormy,
            pause: Duration::from_millis(4),
            ..Plan::default()
        };
        let outcome = scenario::run(seed, plan);
        assert!(
            outcome.violations.is_empty(),
            "seed {seed}: {}",
            outcome.violations.join("\n")
        );
        total.add(&outcome.counts);
    }
    println!("{total:?}");
    assert!(total.acknowledged > 5_000 && total.restored > 10, "{total:?}");
}
