//! Names, ids, target, feature level and hash of the group.

#![allow(clippy::unwrap_used)] // tests

mod common;

use common::{Driver, create};
use kvpool_state::command::{AdmitMember, ConfigureGroup, StateHash};
use kvpool_state::records::{MemberRole, Record};
use kvpool_state::{Command, Refusal, State};

fn admit(name: u64, id: u64, boot: &str, address: &str) -> Command {
    Command::AdmitMember(AdmitMember {
        name,
        address: address.into(),
        boot: boot.into(),
        member_id: id,
        why: "test".into(),
    })
}

fn configure(target: u32, level: u32) -> Command {
    Command::ConfigureGroup(ConfigureGroup {
        target_members: target,
        feature_level: level,
        why: "test".into(),
    })
}

/// Three members of the first boot, written down.
fn written() -> Driver {
    let mut driver = Driver::created();
    for id in 1..=3 {
        driver.ok(&admit(id, id, "", &format!("m{id}:1")));
    }
    driver.ok(&configure(3, 2));
    driver
}

fn id_of(state: &State, name: u64) -> u64 {
    state.members().find(|m| m.name == name).unwrap().id
}

#[test]
fn a_new_disk_gets_an_id_that_nobody_had() {
    let mut driver = written();
    let answer = driver.apply(&admit(2, 0, "a", "m2:1"), None);
    assert_eq!(
        (answer.response.refusal(), answer.response.incarnation),
        (Refusal::None, 101)
    );
    assert_eq!(id_of(&driver.state, 2), 101);
    // The same process asks again: the reply was lost.
    let again = driver.apply(&admit(2, 0, "a", "m2:1"), None);
    assert_eq!((again.response.incarnation, again.events.len()), (101, 0));
    // It starts anew and empty: another life.
    assert_eq!(driver.apply(&admit(2, 0, "b", "m2:1"), None).response.incarnation, 102);
    // The disks before come back.
    for old in [2, 101] {
        let refused = driver.apply(&admit(2, old, "", "m2:1"), None).response;
        assert_eq!(refused.refusal(), Refusal::MemberReplaced, "{}", refused.message);
    }
    let another = driver.apply(&admit(4, 102, "", "m4:1"), None).response;
    assert_eq!(another.refusal(), Refusal::Invalid, "an id of another name");
    assert_eq!(driver.state.cluster().unwrap().next_member_id, 103);
}

#[test]
fn a_member_moves_and_keeps_its_id() {
    let mut driver = written();
    let moved = driver.apply(&admit(3, 3, "", "elsewhere:1"), None);
    assert_eq!(moved.response.incarnation, 3);
    assert!(matches!(&moved.events[0].record, Some(Record::Member(m)) if m.address == "elsewhere:1"));
    let same = driver.apply(&admit(3, 3, "", "elsewhere:1"), None);
    assert!(same.events.is_empty());
}

#[test]
fn the_lowest_names_are_wanted() {
    let mut driver = written();
    let roles = |d: &Driver| -> Vec<MemberRole> { d.state.members().map(|m| m.role()).collect() };
    driver.ok(&configure(5, 0));
    driver.ok(&admit(5, 0, "e", "m5:1"));
    driver.ok(&admit(4, 0, "d", "m4:1"));
    assert_eq!(roles(&driver), [MemberRole::Voter; 5]);
    let shrunk = driver.apply(&configure(3, 0), None);
    assert_eq!(shrunk.events.len(), 3, "the cluster and two members");
    assert_eq!(roles(&driver)[3..], [MemberRole::Idle; 2]);
    assert_eq!(
        driver.apply(&configure(4, 0), None).response.refusal(),
        Refusal::Invalid
    );
}

#[test]
fn level_and_hash_only_grow() {
    let mut driver = written();
    assert_eq!(driver.state.feature_level(), 2);
    assert_eq!(
        driver.apply(&configure(0, 1), None).response.refusal(),
        Refusal::Invalid
    );
    let hash = |revision, byte| {
        Command::StateHash(StateHash {
            revision,
            hash: vec![byte; 32],
        })
    };
    driver.ok(&hash(9, 1));
    assert!(driver.apply(&hash(9, 2), None).events.is_empty());
    assert_eq!(driver.state.cluster().unwrap().state_hash, vec![1; 32]);
    let short = Command::StateHash(StateHash {
        revision: 20,
        hash: vec![1],
    });
    assert_eq!(driver.apply(&short, None).response.refusal(), Refusal::Invalid);
}

#[test]
fn members_come_back_from_a_snapshot() {
    let driver = written();
    let items: Vec<_> = driver.state.snapshot_items().collect();
    assert!(State::from_snapshot_items(items).unwrap() == driver.state);
    let records = driver.state.records();
    assert_eq!(records.iter().filter(|r| matches!(r, Record::Member(_))).count(), 3);
}

/// A build of before can't read what is proposed at level 2, and says so.
#[test]
fn new_commands_need_a_new_reader() {
    assert_eq!(create().level(), 1);
    for command in [admit(1, 1, "", "a:1"), configure(3, 0)] {
        assert_eq!(command.level(), 2);
    }
    let empty = State::default();
    assert!(empty.may_propose(&create()) && !empty.may_propose(&configure(3, 0)));
    let mut driver = Driver::created();
    assert!(!driver.state.may_propose(&configure(3, 0)), "the level is 1");
    assert!(driver.state.may_propose(&configure(0, 2)), "it raises the level");
    driver.ok(&configure(0, 2));
    assert!(driver.state.may_propose(&configure(3, 0)));
    let entry = configure(0, 3).to_entry(None, 1);
    let error = kvpool_state::command::decode(&entry).unwrap_err().to_string();
    assert!(error.contains("needs reader 3"), "{error}");
}
