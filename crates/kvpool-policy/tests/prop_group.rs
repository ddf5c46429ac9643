//! The group's life, driven by a model of raft: random losses of disks, scalings and restarts, with the leader's steps taken
//! as they come.

#![allow(clippy::unwrap_used)] // tests

mod common;

use kvpool_policy::group::{Admission, Ask, Group, Name, Peer, Step, admit, next};
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};

const LEASE: u64 = 3_000;
const PATIENCE: u64 = 1_000;

/// Three members of a first boot, led by 1.
fn three() -> Group {
    let peer = |id: u64| Peer {
        address: format!("m{id}:1"),
        voter: true,
        caught_up: true,
        silent_ms: 0,
    };
    let name = |id: u64| Name {
        id,
        address: format!("m{id}:1"),
        boot: String::new(),
    };
    Group {
        me: 1,
        target: 3,
        next_id: 4,
        names: (1..=3).map(|id| (id, name(id))).collect(),
        peers: (1..=3).map(|id| (id, peer(id))).collect(),
        joint: None,
        lease_ms: LEASE,
        patience_ms: PATIENCE,
        led_ms: 1_000_000,
    }
}

fn empty(name: u64, boot: &str) -> Ask {
    Ask {
        name,
        address: format!("m{name}:1"),
        boot: boot.into(),
        id: 0,
    }
}

/// What the state and raft do with an admission.
fn take(group: &mut Group, ask: &Ask) {
    let id = if ask.id == 0 { group.next_id.max(101) } else { ask.id };
    group.next_id = group.next_id.max(id + 1);
    let name = Name {
        id,
        address: ask.address.clone(),
        boot: ask.boot.clone(),
    };
    group.names.insert(ask.name, name);
}

fn voters(group: &Group) -> BTreeSet<u64> {
    group.peers.iter().filter(|(_, p)| p.voter).map(|(id, _)| *id).collect()
}

/// Takes the leader's steps until it rests or waits.
fn settle(group: &mut Group) -> Step {
    for _ in 0..50 {
        let step = next(group);
        match &step {
            Step::Rest | Step::Wait(_) => return step,
            Step::Want(n) => group.target = *n,
            Step::Record { id, address } => take(
                group,
                &Ask {
                    id: *id,
                    name: *id,
                    address: address.clone(),
                    boot: String::new(),
                },
            ),
            Step::Move { id, address } => group.peers.get_mut(id).unwrap().address.clone_from(address),
            Step::AddLearner { id, address } => {
                assert!(!group.peers.contains_key(id));
                group.peers.insert(
                    *id,
                    Peer {
                        address: address.clone(),
                        voter: false,
                        caught_up: true,
                        silent_ms: 0,
                    },
                );
            }
            Step::Voters(to) => {
                assert!(to.contains(&group.me), "the leader hands over before it goes");
                group.joint = None;
                let old = voters(group);
                // Two only on the way from one to another.
                assert!(to.len() % 2 == 1 || to.len() <= old.len().max(2), "{old:?} to {to:?}");
                let sound = |id: &&u64| **id == group.me || group.peers[*id].silent_ms < PATIENCE;
                for set in [&old, to] {
                    assert!(set.iter().filter(sound).count() * 2 > set.len(), "{old:?} to {to:?}");
                }
                for id in to.difference(&old) {
                    assert!(group.peers[id].caught_up, "{id} votes without the log");
                }
                group.peers.retain(|id, p| to.contains(id) || !p.voter);
                for id in to {
                    group.peers.get_mut(id).unwrap().voter = true;
                }
            }
            Step::HandOver(to) => {
                assert!(group.peers[to].voter && group.peers[to].silent_ms < PATIENCE);
                group.me = *to;
            }
            Step::Remove(id) => {
                assert!(!group.peers[id].voter);
                group.peers.remove(id);
            }
        }
    }
    panic!("it never settles: {group:?}");
}

#[test]
fn a_lost_disk_is_replaced_by_a_new_id() {
    let mut group = three();
    assert_eq!(next(&group), Step::Rest);
    assert!(
        matches!(admit(&group, &empty(2, "a")), Admission::Wait(_)),
        "its holder lives"
    );
    group.peers.get_mut(&2).unwrap().silent_ms = LEASE;
    assert_eq!(admit(&group, &empty(2, "a")), Admission::Admit);
    take(&mut group, &empty(2, "a"));
    assert_eq!(
        admit(&group, &empty(2, "a")),
        Admission::Known(101),
        "the reply was lost"
    );
    assert!(
        matches!(next(&group), Step::AddLearner { id: 101, .. }),
        "a learner first"
    );
    settle(&mut group);
    assert_eq!(voters(&group), [1, 3, 101].into());
    assert_eq!(next(&group), Step::Rest);
    let old = Ask { id: 2, ..empty(2, "") };
    assert!(
        matches!(admit(&group, &old), Admission::Refuse(_)),
        "the old disk comes back"
    );
}

#[test]
fn a_newcomer_without_the_log_does_not_vote() {
    let mut group = three();
    group.peers.get_mut(&2).unwrap().silent_ms = LEASE;
    take(&mut group, &empty(2, "a"));
    let behind = Peer {
        address: "m2:1".into(),
        voter: false,
        caught_up: false,
        silent_ms: 0,
    };
    group.peers.insert(101, behind);
    assert!(matches!(next(&group), Step::Wait(why) if why.contains("101")));
    let again = admit(&group, &empty(2, "b"));
    assert!(matches!(again, Admission::Wait(_)), "the newcomer is alive: {again:?}");
}

#[test]
fn no_second_replacement_and_none_without_a_majority() {
    let mut group = three();
    group.peers.get_mut(&2).unwrap().silent_ms = LEASE;
    take(&mut group, &empty(2, "a"));
    group.peers.get_mut(&3).unwrap().silent_ms = LEASE;
    assert!(matches!(admit(&group, &empty(3, "b")), Admission::Wait(_)));
    let mut group = three();
    for id in [2, 3] {
        group.peers.get_mut(&id).unwrap().silent_ms = LEASE;
    }
    for name in [2, 3] {
        assert!(matches!(admit(&group, &empty(name, "a")), Admission::Wait(why) if why.contains("other voters")));
    }
    let mut group = three();
    group.peers.get_mut(&2).unwrap().silent_ms = LEASE * 9;
    group.led_ms = LEASE - 1;
    assert!(
        matches!(admit(&group, &empty(2, "a")), Admission::Wait(_)),
        "a new leader declares nobody dead"
    );
}

#[test]
fn a_group_grows_and_shrinks_by_its_target() {
    let mut group = three();
    assert!(matches!(admit(&group, &empty(4, "a")), Admission::Wait(why) if why.contains("idle")));
    group.target = 5;
    assert!(matches!(settle(&mut group), Step::Wait(why) if why.contains("5 coordinators")));
    assert_eq!(admit(&group, &empty(4, "a")), Admission::Admit);
    take(&mut group, &empty(4, "a"));
    assert!(matches!(settle(&mut group), Step::Wait(_)));
    assert_eq!(voters(&group).len(), 3, "four are no better than three");
    take(&mut group, &empty(5, "b"));
    settle(&mut group);
    assert_eq!(voters(&group), [1, 2, 3, 101, 102].into());
    // Back, while one that goes leads.
    group.me = 102;
    group.target = 3;
    assert_eq!(settle(&mut group), Step::Rest);
    assert_eq!(voters(&group), [1, 2, 3].into());
    let idle = Ask {
        id: 102,
        ..empty(5, "b")
    };
    assert!(matches!(admit(&group, &idle), Admission::Wait(why) if why.contains("idle")));
    group.target = 5;
    settle(&mut group);
    assert_eq!(
        voters(&group),
        [1, 2, 3, 101, 102].into(),
        "they come back with their disks"
    );
}

#[test]
fn the_first_boot_is_written_down_and_a_half_done_change_is_finished() {
    let mut group = three();
    group.names = BTreeMap::new();
    group.next_id = 0;
    group.target = 0;
    assert!(matches!(admit(&group, &empty(2, "a")), Admission::Wait(_)));
    assert_eq!(settle(&mut group), Step::Rest);
    assert_eq!((group.names.len(), group.target, group.next_id), (3, 3, 4));
    group.joint = Some([1, 2, 3].into());
    assert_eq!(next(&group), Step::Voters([1, 2, 3].into()));
    let moved = Ask {
        id: 3,
        address: "elsewhere:1".into(),
        ..empty(3, "")
    };
    group.joint = None;
    assert_eq!(admit(&group, &moved), Admission::Admit);
    take(&mut group, &moved);
    assert_eq!(settle(&mut group), Step::Rest);
    assert_eq!(group.peers[&3].address, "elsewhere:1");
}

/// What happens from outside.
#[derive(Clone, Debug)]
enum Happening {
    DiskLost(u64),
    Back(u64),
    Scale(u32),
    Lead(u64),
    Asks(u64),
}

fn happening() -> impl Strategy<Value = Happening> {
    prop_oneof![
        (1..=5u64).prop_map(Happening::DiskLost),
        (1..=5u64).prop_map(Happening::Back),
        prop_oneof![Just(1), Just(3), Just(5)].prop_map(Happening::Scale),
        (1..=5u64).prop_map(Happening::Lead),
        (1..=5u64).prop_map(Happening::Asks),
    ]
}

proptest! {
    #![proptest_config(common::config(512))]

    /// At most one disk is lost at a time: the group always heals to the wanted size, ids are never used twice, and the
    /// steps keep the majority (asserted in `settle`).
    #[test]
    fn the_group_heals_to_its_target(happenings in prop::collection::vec(happening(), 1..40)) {
        let mut group = three();
        let mut gone: Option<u64> = None;
        let mut used: BTreeSet<u64> = group.peers.keys().copied().collect();
        for (boot, happening) in happenings.into_iter().enumerate() {
            let boot = format!("b{boot}");
            match happening {
                Happening::DiskLost(name) if gone.is_none() => {
                    let Some(id) = group.names.get(&name).map(|n| n.id) else { continue };
                    if id == group.me && voters(&group).len() == 1 { continue }
                    if id == group.me {
                        group.me = *voters(&group).iter().find(|v| **v != id).unwrap();
                    }
                    if let Some(peer) = group.peers.get_mut(&id) {
                        peer.silent_ms = LEASE * 2;
                        gone = Some(name);
                    }
                }
                Happening::Back(_) | Happening::Asks(_) => {
                    let (Happening::Back(name) | Happening::Asks(name)) = happening else { unreachable!() };
                    let name = gone.unwrap_or(name);
                    let ask = empty(name, &boot);
                    if admit(&group, &ask) == Admission::Admit {
                        let holder = group.names.get(&name).map(|n| n.id);
                        prop_assert!(holder.is_none_or(|id| group.peers.get(&id).is_none_or(|p| p.silent_ms >= LEASE)));
                        take(&mut group, &ask);
                        prop_assert!(used.insert(group.names[&name].id), "an id is used twice");
                        gone = gone.filter(|g| *g != name);
                    }
                }
                Happening::Scale(target) => group.target = target,
                Happening::Lead(name) => {
                    let id = group.names.get(&name).map_or(0, |n| n.id);
                    if group.peers.get(&id).is_some_and(|p| p.voter && p.silent_ms == 0) {
                        group.me = id;
                    }
                }
                Happening::DiskLost(_) => {}
            }
            settle(&mut group);
            prop_assert!(!voters(&group).is_empty());
        }
        // Everybody who is asked for comes.
        for name in 1..=u64::from(group.target) {
            let holder = group.names.get(&name).map(|n| n.id);
            if holder.is_none_or(|id| group.peers.get(&id).is_some_and(|p| p.silent_ms > 0)) {
                let ask = empty(name, "last");
                let answer = admit(&group, &ask);
                if answer == Admission::Admit {
                    take(&mut group, &ask);
                    settle(&mut group);
                } else if voters(&group).len() > 2 {
                    prop_assert!(false, "{name} is kept out: {answer:?} {group:?}");
                }
            }
        }
        if voters(&group).iter().all(|id| group.peers[id].silent_ms == 0) {
            prop_assert_eq!(voters(&group).len(), group.target as usize);
            prop_assert_eq!(next(&group), Step::Rest);
        }
    }

    /// Whatever is known, the answers come without a panic.
    #[test]
    fn nothing_panics(me: u64, target in 0..9u32, next_id: u64, ids in prop::collection::vec((any::<u64>(), any::<bool>(), any::<bool>(), any::<u64>()), 0..9),
                      names in prop::collection::vec((any::<u64>(), any::<u64>()), 0..9), joint in prop::option::of(prop::collection::btree_set(any::<u64>(), 0..5)),
                      led_ms: u64, ask_name: u64, ask_id: u64) {
        let group = Group {
            me, target, next_id, joint, led_ms, lease_ms: LEASE, patience_ms: PATIENCE,
            names: names.into_iter().map(|(name, id)| (name, Name { id, address: String::new(), boot: String::new() })).collect(),
            peers: ids.into_iter().map(|(id, voter, caught_up, silent_ms)| (id, Peer { address: String::new(), voter, caught_up, silent_ms })).collect(),
        };
        let _ = next(&group);
        let _ = admit(&group, &Ask { name: ask_name, address: String::new(), boot: "b".into(), id: ask_id });
    }
}
