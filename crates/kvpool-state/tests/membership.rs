//! What draining, removing, losing and returning do to a shard and to the lists.

#![allow(clippy::unwrap_used)] // tests

mod common;

use common::{Driver, drain, drained, every_slot, in_sync, lost, plan, range, register, remove};
use kvpool_state::command::ReleaseBrake;
use kvpool_state::records::{Record, ShardRecord, ShardState};
use kvpool_state::{Command, DOWNS_WINDOW_MS, MAX_RELEASE_MS, Refusal};

fn shard<'a>(driver: &'a Driver, id: &str) -> &'a ShardRecord {
    driver.state.shard(id).unwrap()
}

/// Two shards, both in-sync in every slot, `s1` first.
fn pair() -> (Driver, Vec<u64>, Vec<u32>) {
    let mut driver = Driver::created();
    let incarnations = driver.shards(2);
    let numbers: Vec<u32> = driver.state.shards().map(|s| s.number).collect();
    driver.ok(&plan("main", driver.epoch(), vec![range(0, 16383, &numbers)]));
    for (id, incarnation) in ["s1", "s2"].into_iter().zip(&incarnations) {
        driver.ok(&in_sync("main", id, *incarnation, driver.epoch(), every_slot()));
    }
    (driver, incarnations, numbers)
}

#[test]
fn a_shard_leaves_step_by_step_and_is_forgotten() {
    let (mut driver, incarnations, n) = pair();
    assert_eq!(driver.refused(&remove("s1")), Refusal::NotDrained, "it is Up");
    driver.ok(&drain("s1", true));
    assert_eq!(shard(&driver, "s1").state(), ShardState::Draining);
    assert!(
        driver
            .state
            .slot_map("main")
            .unwrap()
            .shards
            .iter()
            .any(|s| s.id == "s1")
    );
    assert_eq!(driver.refused(&drained("s1", incarnations[0])), Refusal::NotDrained);
    assert_eq!(driver.refused(&remove("s1")), Refusal::NotDrained);
    // It keeps its place until the plan takes it, and gets no new one.
    driver.ok(&plan(
        "main",
        driver.epoch(),
        vec![range(0, 99, &[n[1]]), range(100, 199, &[n[1], n[0]])],
    ));
    let again = plan("main", driver.epoch(), vec![range(0, 0, &[n[1], n[0]])]);
    assert_eq!(driver.refused(&again), Refusal::Invalid);
    driver.ok(&plan("main", driver.epoch(), vec![range(0, 16383, &[n[1]])]));
    assert_eq!(
        driver.refused(&drained("s1", incarnations[0] - 1)),
        Refusal::StaleIncarnation
    );
    driver.ok(&drained("s1", incarnations[0]));
    assert_eq!(shard(&driver, "s1").state(), ShardState::Drained);
    let epoch = driver.epoch();
    driver.ok(&drained("s1", incarnations[0]));
    driver.ok(&drain("s1", true));
    assert_eq!(driver.epoch(), epoch, "twice is once");
    let applied = driver.ok(&remove("s1"));
    let Some(Record::Shard(last)) = &applied.events[0].record else {
        panic!("{:?}", applied.events)
    };
    assert_eq!((last.id.as_str(), last.state()), ("s1", ShardState::Removed));
    assert!(driver.state.shard("s1").is_none() && driver.epoch() > epoch);
    assert_eq!(driver.refused(&remove("s1")), Refusal::UnknownShard);
    assert_eq!(driver.refused(&lost("s1", incarnations[0])), Refusal::UnknownShard);
    // It may come again, as somebody new.
    let back = driver.ok(&register("s1", "main", "n1", "boot-2")).response.incarnation;
    assert!(back > incarnations[0] && shard(&driver, "s1").number > n[1]);
    assert_eq!(shard(&driver, "s1").state(), ShardState::Up);
}

#[test]
fn out_outlives_the_process_until_it_is_taken_back() {
    let (mut driver, incarnations, _) = pair();
    driver.ok(&drain("s2", true));
    driver.ok(&lost("s2", incarnations[1]));
    assert_eq!(shard(&driver, "s2").state(), ShardState::Down);
    assert_eq!(driver.refused(&drained("s2", incarnations[1])), Refusal::NotDrained);
    driver.ok(&register("s2", "main", "n2", "boot-2"));
    assert_eq!(shard(&driver, "s2").state(), ShardState::Drained, "empty, and out");
    driver.ok(&drain("s2", false));
    assert_eq!(shard(&driver, "s2").state(), ShardState::Up);
    // Taken back while Down: it stays Down, and returns as one of the others.
    driver.ok(&drain("s1", true));
    driver.ok(&lost("s1", incarnations[0]));
    driver.ok(&drain("s1", false));
    assert_eq!(shard(&driver, "s1").state(), ShardState::Down);
    driver.ok(&register("s1", "main", "n1", "boot-2"));
    assert_eq!(shard(&driver, "s1").state(), ShardState::Up);
    assert_eq!(driver.refused(&drain("nobody", true)), Refusal::UnknownShard);
}

#[test]
fn times_down_are_counted_within_the_window() {
    let mut driver = Driver::created();
    let mut fall = |pass_ms: u64| {
        driver.now_ms += pass_ms;
        let incarnation = driver.ok(&register("s1", "main", "n1", "boot")).response.incarnation;
        driver.ok(&lost("s1", incarnation));
        shard(&driver, "s1").downs
    };
    assert_eq!([fall(0), fall(1_000), fall(DOWNS_WINDOW_MS)], [1, 2, 3]);
    assert_eq!([fall(DOWNS_WINDOW_MS + 1), fall(1)], [1, 2], "a quiet time is forgiven");
}

#[test]
fn the_brake_is_released_for_a_bounded_time() {
    let mut driver = Driver::created();
    let release = |pool: &str, for_ms| {
        Command::ReleaseBrake(ReleaseBrake {
            pool: pool.into(),
            for_ms,
        })
    };
    let epoch = driver.epoch();
    driver.ok(&release("main", u64::MAX));
    let until = driver.state.pool("main").unwrap().brake_released_until_ms;
    assert_eq!(until, driver.now_ms + MAX_RELEASE_MS);
    driver.ok(&release("main", 0));
    assert_eq!(
        driver.state.pool("main").unwrap().brake_released_until_ms,
        driver.now_ms
    );
    assert_eq!(driver.epoch(), epoch, "no list changes");
    assert_eq!(driver.refused(&release("nowhere", 1)), Refusal::UnknownPool);
}
