//! The oracle can fail: each way of breaking the system on purpose is noticed within a few seeds.

use kvpool_chaos::cluster::Sabotage;
use kvpool_chaos::scenario::{self, Plan};

/// Runs seeds until one is noticed by a violation that contains one of `words`.
fn noticed(sabotage: Sabotage, words: &[&str], seeds: u64) {
    let mut other = Vec::new();
    for seed in 0..seeds {
        let outcome = scenario::run(
            seed,
            Plan {
                sabotage,
                ..Plan::default()
            },
        );
        if outcome
            .violations
            .iter()
            .any(|v| words.iter().any(|word| v.contains(word)))
        {
            return;
        }
        other.extend(outcome.violations);
    }
    panic!("{sabotage:?} went unnoticed in {seeds} seeds; other violations: {other:?}");
}

#[test]
fn a_disk_that_lies_about_syncs_is_noticed() {
    noticed(
        Sabotage {
            lying_disks: true,
            ..Sabotage::default()
        },
        &["lost", "another applied", "does not start"],
        20,
    );
}

#[test]
fn granting_every_pre_vote_is_noticed() {
    noticed(
        Sabotage {
            grant_pre_votes: true,
            ..Sabotage::default()
        },
        &["raised its term"],
        30,
    );
}

#[test]
fn forgetting_votes_on_restart_is_noticed() {
    noticed(
        Sabotage {
            forget_votes: true,
            ..Sabotage::default()
        },
        &["both led term"],
        60,
    );
}

#[test]
fn reads_without_a_quorum_are_noticed() {
    noticed(
        Sabotage {
            reads_anywhere: true,
            ..Sabotage::default()
        },
        &["showed the state up to"],
        30,
    );
}
