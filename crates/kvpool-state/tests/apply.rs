//! What single commands do: promotion, registration, request ids, bounds.

#![allow(clippy::unwrap_used)] // tests

mod common;

use common::{Driver, create, down, every_slot, in_sync, plan, range, register};
use kvpool_state::command::ConfigurePool;
use kvpool_state::records::RequestId;
use kvpool_state::{Command, Refusal, State};

/// Shards are numbered from `first` on in these tests.
fn numbers(driver: &Driver) -> Vec<u32> {
    driver.state.shards().map(|s| s.number).collect()
}

fn request(created_at_ms: u64, sequence: u64) -> RequestId {
    RequestId {
        created_at_ms,
        client: 7,
        sequence,
    }
}

#[test]
fn in_sync_copies_are_promoted_first_when_a_shard_goes_down() {
    let mut driver = Driver::created();
    let incarnations = driver.shards(4);
    let n = numbers(&driver);
    driver.ok(&plan(
        "main",
        driver.epoch(),
        vec![range(5, 9, &[n[0], n[1], n[2], n[3]])],
    ));
    driver.ok(&in_sync("main", "s1", incarnations[0], driver.epoch(), every_slot()));
    driver.ok(&in_sync("main", "s3", incarnations[2], driver.epoch(), every_slot()));
    let before = driver.epoch();
    let applied = driver.ok(&down("s1", incarnations[0]));
    assert_eq!(driver.list(5), [(n[2], true), (n[1], false), (n[3], false)]);
    assert!(driver.epoch() > before);
    assert_eq!(applied.events.len(), 2, "the shard and the slot map");
    driver.ok(&down("s3", incarnations[2]));
    assert_eq!(
        driver.list(9),
        [(n[1], false), (n[3], false)],
        "without an in-sync copy the first in line"
    );
}

#[test]
fn a_shard_that_registers_again_stands_in_no_list_and_old_incarnations_do_nothing() {
    let mut driver = Driver::created();
    let old = driver.shards(2);
    let n = numbers(&driver);
    driver.ok(&plan("main", driver.epoch(), vec![range(0, 16383, &[n[0], n[1]])]));
    driver.ok(&in_sync("main", "s1", old[0], driver.epoch(), every_slot()));
    let new = driver.ok(&register("s1", "main", "n1", "boot-2")).response.incarnation;
    assert!(new > old[0]);
    assert_eq!(numbers(&driver), n, "the number is the shard's, not the process's");
    assert_eq!(driver.list(77), [(n[1], false)]);
    assert_eq!(
        driver.refused(&in_sync("main", "s1", old[0], driver.epoch(), every_slot())),
        Refusal::StaleIncarnation
    );
    assert_eq!(driver.refused(&down("s1", old[0])), Refusal::StaleIncarnation);
    let map = driver.state.slot_map("main").unwrap();
    assert!(map.shards.iter().any(|s| s.id == "s1" && s.incarnation == new));
}

#[test]
fn a_shard_that_is_down_reports_nothing_and_gets_no_slots() {
    let mut driver = Driver::created();
    let incarnations = driver.shards(2);
    let n = numbers(&driver);
    driver.ok(&down("s2", incarnations[1]));
    let epoch = driver.epoch();
    assert_eq!(
        driver.refused(&in_sync("main", "s2", incarnations[1], epoch, every_slot())),
        Refusal::StaleIncarnation
    );
    assert_eq!(
        driver.refused(&plan("main", epoch, vec![range(0, 0, &[n[1]])])),
        Refusal::UnknownShard
    );
    driver.ok(&down("s2", incarnations[1]));
    assert_eq!(driver.epoch(), epoch, "down twice is down");
}

#[test]
fn a_report_from_before_a_drop_completes_nothing() {
    let mut driver = Driver::created();
    let incarnations = driver.shards(2);
    let n = numbers(&driver);
    driver.ok(&plan("main", driver.epoch(), vec![range(0, 9, &[n[0], n[1]])]));
    driver.ok(&in_sync("main", "s1", incarnations[0], driver.epoch(), every_slot()));
    let seen = driver.epoch();
    driver.ok(&plan("main", driver.epoch(), vec![range(0, 9, &[n[0]])]));
    driver.ok(&plan("main", driver.epoch(), vec![range(0, 9, &[n[0], n[1]])]));
    assert_eq!(
        driver.refused(&in_sync("main", "s2", incarnations[1], seen, every_slot())),
        Refusal::StaleEpoch
    );
    assert_eq!(driver.list(3), [(n[0], true), (n[1], false)]);
    driver.ok(&in_sync("main", "s2", incarnations[1], driver.epoch(), every_slot()));
    assert_eq!(driver.list(3), [(n[0], true), (n[1], true)]);
}

#[test]
fn a_plan_is_refused_when_stale_or_harmful() {
    let mut driver = Driver::created();
    let incarnations = driver.shards(2);
    let n = numbers(&driver);
    let epoch = driver.epoch();
    driver.ok(&plan("main", epoch, vec![range(0, 9, &[n[0]])]));
    assert_eq!(
        driver.refused(&plan("main", epoch, vec![range(0, 9, &[n[1]])])),
        Refusal::StaleEpoch
    );
    driver.ok(&in_sync("main", "s1", incarnations[0], driver.epoch(), every_slot()));
    let epoch = driver.epoch();
    assert_eq!(
        driver.refused(&plan("main", epoch, vec![range(9, 9, &[n[1]])])),
        Refusal::Invalid
    );
    assert_eq!(
        driver.refused(&plan("main", epoch, vec![range(9, 9, &[n[0], n[0]])])),
        Refusal::Invalid
    );
    assert_eq!(
        driver.refused(&plan("main", epoch, vec![range(9, 8, &[n[0]])])),
        Refusal::Invalid
    );
    assert_eq!(
        driver.refused(&plan("main", epoch, vec![range(0, 16384, &[n[0]])])),
        Refusal::Invalid
    );
    let overlapping = vec![range(0, 5, &[n[0]]), range(5, 6, &[n[0]])];
    assert_eq!(driver.refused(&plan("main", epoch, overlapping)), Refusal::Invalid);
    assert_eq!(driver.refused(&plan("other", epoch, vec![])), Refusal::UnknownPool);
    assert_eq!(driver.refused(&create()), Refusal::AlreadyCreated);
}

#[test]
fn a_plan_makes_no_copy_in_sync() {
    let mut driver = Driver::created();
    driver.shards(1);
    let n = numbers(&driver);
    let mut lie = range(0, 0, &[n[0]]);
    lie.copies[0].in_sync = true;
    driver.ok(&plan("main", driver.epoch(), vec![lie]));
    assert_eq!(driver.list(0), [(n[0], false)]);
}

#[test]
fn a_repeated_request_returns_the_recorded_answer_and_changes_nothing() {
    let mut driver = Driver::created();
    let id = Some(request(driver.now_ms, 1));
    let first = driver.apply(&register("s1", "main", "n1", "boot"), id.clone());
    let again = driver.apply(&register("s1", "main", "n1", "boot"), id.clone());
    assert_eq!(first.response, again.response);
    assert!(again.events.is_empty());
    // Even another command under the same id: the id is the identity.
    let other = driver.apply(&down("s1", first.response.incarnation), id);
    assert_eq!(other.response, first.response);
    assert_eq!(
        driver.state.shard("s1").unwrap().incarnation,
        first.response.incarnation
    );
}

#[test]
fn request_ids_outside_the_window_are_refused_by_name() {
    let mut driver = Driver::created();
    let early = request(driver.now_ms, 1);
    driver.apply(&register("s1", "main", "n1", "boot"), Some(early.clone()));
    driver.now_ms += 20 * 60 * 1000;
    let late = driver.apply(&register("s1", "main", "n1", "boot"), Some(early));
    assert_eq!(late.response.refusal(), Refusal::RequestExpired);
    assert!(late.events.is_empty());
    let future = request(driver.now_ms + 11 * 60 * 1000, 1);
    let future = driver.apply(&register("s1", "main", "n1", "boot"), Some(future));
    assert_eq!(future.response.refusal(), Refusal::Invalid);
    // A refused id isn't remembered: the same one is served when its time comes.
    driver.now_ms += 11 * 60 * 1000;
    let served = driver.apply(&register("s1", "main", "n1", "boot"), Some(request(driver.now_ms, 1)));
    assert_eq!(served.response.refusal(), Refusal::None);
}

#[test]
fn tables_stay_bounded_and_what_is_forgotten_is_refused() {
    let mut driver = Driver::created();
    let first = request(driver.now_ms, 0);
    for sequence in 0..20_000 {
        let factor = 1 + u32::try_from(sequence % 2).unwrap();
        driver.now_ms += 1;
        let id = request(driver.now_ms - 1, sequence);
        driver.apply(
            &Command::ConfigurePool(ConfigurePool {
                pool: "main".into(),
                factor,
            }),
            Some(id),
        );
    }
    let items = driver.state.snapshot_items().count();
    assert!(items <= 16_384 + 1_024 + 4, "{items} items");
    let again = driver.apply(
        &Command::ConfigurePool(ConfigurePool {
            pool: "main".into(),
            factor: 3,
        }),
        Some(first),
    );
    assert_eq!(again.response.refusal(), Refusal::RequestExpired);
    let mut refusal = Refusal::None;
    for n in 0..100 {
        let command = Command::ConfigurePool(ConfigurePool {
            pool: format!("p{n}"),
            factor: 1,
        });
        refusal = driver.apply(&command, None).response.refusal();
    }
    assert_eq!(refusal, Refusal::Full);
    assert_eq!(driver.state.pools().count(), 64);
}

#[test]
fn long_words_from_outside_are_not_kept() {
    let mut driver = Driver::created();
    let long = "x".repeat(1 << 20);
    for command in [
        register(&long, "main", "n", "b"),
        register("s", &long, "n", "b"),
        register("s", "main", &long, "b"),
        down(&long, 1),
        plan(&long, 1, vec![]),
        in_sync(&long, "s", 1, 1, vec![]),
        in_sync("main", &long, 1, 1, vec![]),
    ] {
        let applied = driver.apply(&command, Some(request(driver.now_ms, driver.index)));
        assert_ne!(applied.response.refusal(), Refusal::None);
        assert!(
            applied.response.message.len() <= 1024,
            "{} bytes",
            applied.response.message.len()
        );
    }
    let size: usize = driver.state.snapshot_items().map(|i| i.len()).sum();
    assert!(size < 64 << 10, "a snapshot of {size} bytes");
}

#[test]
fn before_creation_only_creation_is_obeyed() {
    let mut driver = Driver {
        now_ms: 5,
        ..Driver::default()
    };
    assert_eq!(driver.refused(&register("s1", "main", "n1", "b")), Refusal::NotCreated);
    driver.ok(&create());
    assert_eq!(driver.state.cluster().unwrap().cluster_generation, 1);
    assert_eq!(driver.state.pool("main").unwrap().factor, 2);
}

#[test]
fn entries_that_cannot_be_read_stop_the_member_and_change_nothing() {
    let mut driver = Driver::created();
    let before = driver.state.clone();
    let mut future = kvpool_state::command::Envelope {
        format: 9,
        min_reader: 9,
        kind: 1,
        ..Default::default()
    };
    let encode = |e: &kvpool_state::command::Envelope| prost::Message::encode_to_vec(e);
    let error = driver.state.apply(9, &encode(&future)).unwrap_err();
    assert!(error.to_string().contains("upgrade"), "{error}");
    (future.min_reader, future.kind) = (1, 99);
    assert!(
        driver
            .state
            .apply(9, &encode(&future))
            .unwrap_err()
            .to_string()
            .contains("kind 99")
    );
    assert!(driver.state.apply(9, b"\xff\xff").is_err());
    assert_eq!(driver.state, before);
    assert_ne!(State::default(), before);
}
