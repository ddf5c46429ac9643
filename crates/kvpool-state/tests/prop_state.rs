//! Random commands: apply is deterministic, survives a snapshot in mid-way, and keeps the invariants of the state.
//! `PROPTEST_RNG_SEED` replays a run.

#![allow(clippy::unwrap_used)] // tests

mod common;

use common::{config, create, down, drain, drained, in_sync, lost, plan, range, register, remove};
use kvpool_state::command::{AdmitMember, ConfigureGroup, ConfigurePool, ReleaseBrake};
use kvpool_state::records::{MemberRole, Record, RequestId, ShardState, SlotCopy, SlotRange};
use kvpool_state::table::MAX_COPIES;
use kvpool_state::{Applied, Command, Refusal, SLOTS, SlotTable, State};
use proptest::prelude::*;
use std::collections::BTreeSet;

#[derive(Clone, Debug)]
enum Op {
    Create,
    Configure {
        pool: u8,
        factor: u32,
    },
    Register {
        shard: u8,
        node: u8,
        pool: u8,
        boot: u8,
    },
    Down {
        shard: u8,
        stale: bool,
    },
    Lost {
        shard: u8,
        stale: bool,
    },
    Drain {
        shard: u8,
        out: bool,
    },
    Drained {
        shard: u8,
        stale: bool,
    },
    Remove {
        shard: u8,
    },
    Release {
        pool: u8,
        for_ms: u64,
    },
    Plan {
        pool: u8,
        stale: bool,
        ranges: Vec<(u16, u16, Vec<u8>)>,
    },
    InSync {
        shard: u8,
        pool: u8,
        stale: bool,
        old_epoch: bool,
        ranges: Vec<(u16, u16)>,
    },
    Admit {
        name: u64,
        /// 0 = empty disk.
        id: u64,
        boot: u8,
        address: u8,
    },
    Group {
        target: u32,
        level: u32,
    },
    Raw(Vec<u8>),
}

#[derive(Clone, Debug)]
struct Entry {
    op: Op,
    /// Age of the request id in steps of two minutes, and its sequence.
    request: Option<(u8, u8)>,
    pass_ms: u64,
    /// Entries between this one and the one before (a new term's blank, …).
    skip: u8,
}

fn op() -> impl Strategy<Value = Op> {
    let span = (0u16..16_384, 0u16..4_000);
    let ranges = prop::collection::vec((span.clone(), prop::collection::vec(0u8..5, 0..4)), 0..6).prop_map(|v| {
        v.into_iter()
            .map(|((first, len), shards)| (first, len, shards))
            .collect()
    });
    prop_oneof![
        1 => Just(Op::Create),
        1 => (0u8..3, 0u32..6).prop_map(|(pool, factor)| Op::Configure { pool, factor }),
        4 => (0u8..6, 0u8..4, 0u8..2, any::<u8>())
            .prop_map(|(shard, node, pool, boot)| Op::Register { shard, node, pool, boot }),
        2 => (0u8..6, any::<bool>()).prop_map(|(shard, stale)| Op::Down { shard, stale }),
        2 => (0u8..6, any::<bool>()).prop_map(|(shard, stale)| Op::Lost { shard, stale }),
        3 => (0u8..6, prop::bool::weighted(0.7)).prop_map(|(shard, out)| Op::Drain { shard, out }),
        3 => (0u8..6, prop::bool::weighted(0.1)).prop_map(|(shard, stale)| Op::Drained { shard, stale }),
        2 => (0u8..6).prop_map(|shard| Op::Remove { shard }),
        1 => (0u8..3, any::<u64>()).prop_map(|(pool, for_ms)| Op::Release { pool, for_ms }),
        5 => (0u8..2, prop::bool::weighted(0.1), ranges)
            .prop_map(|(pool, stale, ranges)| Op::Plan { pool, stale, ranges }),
        5 => (0u8..6, 0u8..2, prop::bool::weighted(0.1), prop::bool::weighted(0.2), prop::collection::vec(span, 0..4))
            .prop_map(|(shard, pool, stale, old_epoch, ranges)| Op::InSync { shard, pool, stale, old_epoch, ranges }),
        3 => (0u64..7, prop_oneof![2 => Just(0u64), 1 => 1u64..110], 0u8..3, 0u8..2)
            .prop_map(|(name, id, boot, address)| Op::Admit { name, id, boot, address }),
        1 => (0u32..7, 0u32..3).prop_map(|(target, level)| Op::Group { target, level }),
        1 => prop::collection::vec(any::<u8>(), 0..40).prop_map(Op::Raw),
    ]
}

fn entry() -> impl Strategy<Value = Entry> {
    let request = prop::option::weighted(0.3, (0u8..8, 0u8..4));
    let pass = prop_oneof![8 => 0u64..1_000, 1 => 0u64..700_000];
    (op(), request, pass, 0u8..3).prop_map(|(op, request, pass_ms, skip)| Entry {
        op,
        request,
        pass_ms,
        skip,
    })
}

/// Ranges in order, without overlap.
fn spans(list: &[(u16, u16)]) -> Vec<(u32, u32)> {
    let mut list: Vec<(u32, u32)> = list
        .iter()
        .map(|(first, len)| {
            (
                u32::from(*first),
                (u32::from(*first) + u32::from(*len)).min(u32::from(SLOTS) - 1),
            )
        })
        .collect();
    list.sort_unstable();
    list.dedup_by(|next, kept| next.0 <= kept.1);
    list
}

fn pool_name(pool: u8) -> &'static str {
    ["main", "second", "third"]
        .get(usize::from(pool))
        .copied()
        .unwrap_or("none")
}

fn epoch_of(state: &State, pool: &str) -> u64 {
    state.slot_table(pool).map_or(0, |t| t.0)
}

fn command(state: &State, op: &Op) -> Option<Command> {
    let incarnation = |shard: u8, stale: bool| {
        let now = state.shard(&format!("s{shard}")).map_or(0, |s| s.incarnation);
        if stale { now.saturating_sub(1) } else { now }
    };
    Some(match op {
        Op::Create => create(),
        Op::Configure { pool, factor } => Command::ConfigurePool(ConfigurePool {
            pool: pool_name(*pool).into(),
            factor: *factor,
        }),
        Op::Register {
            shard,
            node,
            pool,
            boot,
        } => register(
            &format!("s{shard}"),
            pool_name(*pool),
            &format!("n{node}"),
            &format!("b{boot}"),
        ),
        Op::Down { shard, stale } => down(&format!("s{shard}"), incarnation(*shard, *stale)),
        Op::Lost { shard, stale } => lost(&format!("s{shard}"), incarnation(*shard, *stale)),
        Op::Drain { shard, out } => drain(&format!("s{shard}"), *out),
        Op::Drained { shard, stale } => drained(&format!("s{shard}"), incarnation(*shard, *stale)),
        Op::Remove { shard } => remove(&format!("s{shard}")),
        Op::Release { pool, for_ms } => Command::ReleaseBrake(ReleaseBrake {
            pool: pool_name(*pool).into(),
            for_ms: *for_ms,
        }),
        Op::Plan { pool, stale, ranges } => {
            let spans = spans(&ranges.iter().map(|(first, len, _)| (*first, *len)).collect::<Vec<_>>());
            let up: Vec<u32> = state
                .shards()
                .filter(|s| s.pool == pool_name(*pool) && s.is_up())
                .map(|s| s.number)
                .collect();
            let shards = |picks: &[u8]| -> Vec<u32> {
                let picks: BTreeSet<u32> = picks.iter().filter_map(|p| up.get(usize::from(*p)).copied()).collect();
                picks.into_iter().rev().collect()
            };
            let ranges = spans
                .iter()
                .zip(ranges)
                .map(|((f, l), (_, _, picks))| range(*f, *l, &shards(picks)));
            let base = epoch_of(state, pool_name(*pool)) - u64::from(*stale && epoch_of(state, pool_name(*pool)) > 0);
            plan(pool_name(*pool), base, ranges.collect())
        }
        Op::InSync {
            shard,
            pool,
            stale,
            old_epoch,
            ranges,
        } => {
            let epoch = epoch_of(state, pool_name(*pool)).saturating_sub(3 * u64::from(*old_epoch));
            let ranges = spans(ranges).iter().map(|(f, l)| range(*f, *l, &[])).collect();
            in_sync(
                pool_name(*pool),
                &format!("s{shard}"),
                incarnation(*shard, *stale),
                epoch,
                ranges,
            )
        }
        Op::Admit {
            name,
            id,
            boot,
            address,
        } => Command::AdmitMember(AdmitMember {
            name: *name,
            address: format!("m{address}:1"),
            boot: format!("b{boot}"),
            member_id: *id,
            why: "test".into(),
        }),
        Op::Group { target, level } => Command::ConfigureGroup(ConfigureGroup {
            target_members: *target,
            feature_level: *level,
            why: "test".into(),
        }),
        Op::Raw(_) => return None,
    })
}

/// Which record it is, whatever it says.
fn key(record: &Record) -> (u8, String) {
    match record {
        Record::Cluster(_) => (0, String::new()),
        Record::Node(n) => (1, n.id.clone()),
        Record::Shard(s) => (2, s.id.clone()),
        Record::Pool(p) => (3, p.name.clone()),
        Record::Slots(m) => (4, m.pool.clone()),
        Record::Member(m) => (5, m.name.to_string()),
    }
}

fn check(before: &State, after: &State, applied: &Applied) {
    assert!(after.log_time_ms() >= before.log_time_ms() && after.revision() > before.revision());
    // R4: numbers only grow.
    for pool in before.pools() {
        let now = after.pool(&pool.name).expect("pools stay");
        assert!(now.generation >= pool.generation);
        let (was, is) = (
            before.slot_table(&pool.name).unwrap(),
            after.slot_table(&pool.name).unwrap(),
        );
        assert!(is.0 >= was.0);
        let maps = (before.slot_map(&pool.name), after.slot_map(&pool.name));
        assert!(is.0 > was.0 || maps.0 == maps.1, "the map changed within one epoch");
    }
    check_members(before, after);
    let numbers: BTreeSet<u32> = after.shards().map(|s| s.number).collect();
    assert_eq!(numbers.len(), after.shards().count(), "shard numbers are unique");
    check_group(before, after);
    check_lists(after);
    check_events(before, after, applied);
}

/// An id belongs to one name, an old one never comes back, and the lowest names are wanted.
fn check_group(before: &State, after: &State) {
    assert!(after.feature_level() >= before.feature_level());
    let next = |s: &State| s.cluster().map_or(0, |c| c.next_member_id);
    assert!(next(after) >= next(before));
    for now in after.members() {
        let was = before.members().find(|m| m.name == now.name);
        // A new id of a known name was never handed out before.
        assert!(
            was.is_none_or(|was| was.id == now.id || now.id >= next(before)),
            "{was:?} {now:?}"
        );
        assert!(now.id < next(after));
    }
    let ids: BTreeSet<u64> = after.members().map(|m| m.id).collect();
    assert_eq!(ids.len(), after.members().count(), "ids are unique");
    let voters = after.members().filter(|m| m.role() == MemberRole::Voter).count();
    let target = after.target_members() as usize;
    assert!(target == 0 || voters == target.min(ids.len()));
    assert!(after.members().is_sorted_by_key(|m| m.role() == MemberRole::Idle));
}

/// Which state may follow which; an incarnation only grows, and what was removed comes back under a new number.
fn check_members(before: &State, after: &State) {
    use ShardState::{Down, Drained, Draining, Up};
    for shard in before.shards() {
        let Some(now) = after.shard(&shard.id) else {
            assert!(matches!(shard.state(), Down | Drained), "{shard:?} was removed");
            continue;
        };
        assert!(now.incarnation >= shard.incarnation && now.number == shard.number && now.pool == shard.pool);
        let registered = now.incarnation > shard.incarnation;
        let may = match (shard.state(), now.state()) {
            (a, b) if a == b => true,
            (_, Up) if registered => !shard.out,
            (_, Drained) if registered => shard.out,
            (Up, Draining) | (Draining, Drained) | (Draining | Drained, Up) => now.out != shard.out || now.out,
            (Up | Draining | Drained, Down) => !registered,
            _ => false,
        };
        assert!(may, "{shard:?} became {now:?}");
        assert!(!registered || now.out == shard.out, "only a person changes that");
    }
    for now in after.shards() {
        assert!(matches!(now.state(), Up | Down | Draining | Drained));
        assert!(now.out || !matches!(now.state(), Draining | Drained), "{now:?}");
        assert!(!now.out || now.state() != Up, "{now:?}");
        if before.shard(&now.id).is_none() {
            assert!(before.shards().all(|s| s.number < now.number), "a number is given once");
            assert!(now.state() == Up, "{now:?}");
        }
        let copies = |state: &State| state.copies_of(&now.pool, now.number);
        assert!(now.state() != Drained || copies(after) == 0, "{now:?} holds copies");
        let was_out = before.shard(&now.id).is_some_and(|s| s.out);
        assert!(
            !now.out || !was_out || copies(after) <= copies(before),
            "{now:?} got copies"
        );
    }
}

fn check_lists(state: &State) {
    for pool in state.pools() {
        let up: BTreeSet<u32> = state
            .shards()
            .filter(|s| s.pool == pool.name && s.is_up())
            .map(|s| s.number)
            .collect();
        for range in state.slot_map(&pool.name).unwrap().ranges {
            assert!(range.copies.len() <= MAX_COPIES);
            assert!(
                range.copies.iter().all(|c| up.contains(&c.shard)),
                "{range:?} names a shard that is not Up"
            );
            assert!(
                range.copies.is_sorted_by_key(|c| !c.in_sync),
                "{range:?} has filling before in-sync"
            );
            let shards: BTreeSet<u32> = range.copies.iter().map(|c| c.shard).collect();
            assert_eq!(shards.len(), range.copies.len());
        }
    }
}

/// Events say exactly what changed (a watcher that applies them has the state's records).
fn check_events(before: &State, after: &State, applied: &Applied) {
    let mut mirror: std::collections::BTreeMap<_, _> = before.records().into_iter().map(|r| (key(&r), r)).collect();
    for event in &applied.events {
        assert_eq!(event.revision, applied.response.revision);
        let record = event.record.clone().unwrap();
        match &record {
            // The last word about it: lists don't show it any more.
            Record::Shard(shard) if shard.state() == ShardState::Removed => mirror.remove(&key(&record)),
            _ => mirror.insert(key(&record), record),
        };
    }
    let records: std::collections::BTreeMap<_, _> = after.records().into_iter().map(|r| (key(&r), r)).collect();
    assert_eq!(mirror, records);
    if applied.response.refusal() != Refusal::None {
        assert!(applied.events.is_empty());
    }
}

fn restored(state: &State) -> State {
    let items: Vec<Vec<u8>> = state.snapshot_items().collect();
    State::from_snapshot_items(&items).expect("a snapshot can be read back")
}

proptest! {
    #![proptest_config(config(256))]

    #[test]
    fn apply_is_deterministic_and_keeps_the_invariants(
        entries in prop::collection::vec(entry(), 1..60),
        snapshot_at in 0usize..60,
        created in prop::bool::weighted(0.9),
    ) {
        let (mut a, mut b) = (State::default(), State::default());
        let mut c: Option<State> = None;
        let (mut index, mut now_ms) = (0, 10_000_000);
        if created {
            index += 1;
            for state in [&mut a, &mut b] {
                state.apply(index, &create().to_entry(None, now_ms)).unwrap();
            }
        }
        let mut recorded = std::collections::BTreeMap::new();
        for (i, entry) in entries.iter().enumerate() {
            if i == snapshot_at {
                c = Some(restored(&a));
                prop_assert_eq!(c.as_ref(), Some(&a));
            }
            index += 1 + u64::from(entry.skip);
            now_ms += entry.pass_ms;
            let request = entry.request.map(|(age, sequence)| RequestId {
                created_at_ms: (now_ms / 120_000 * 120_000).saturating_sub(u64::from(age) * 120_000),
                client: 1,
                sequence: u64::from(sequence),
            });
            let bytes = match (command(&a, &entry.op), &entry.op) {
                (Some(command), _) => command.to_entry(request.clone(), now_ms),
                (None, Op::Raw(bytes)) => bytes.clone(),
                (None, _) => Vec::new(),
            };
            let before = a.clone();
            let applied = a.apply(index, &bytes);
            prop_assert_eq!(&applied, &b.apply(index, &bytes));
            if let Some(c) = &mut c {
                prop_assert_eq!(&applied, &c.apply(index, &bytes));
            }
            let Ok(applied) = applied else {
                prop_assert_eq!(&a, &before);
                continue;
            };
            check(&before, &a, &applied);
            if let Some(request) = request {
                // R2: one answer per request id, or a refusal by name once it may have been forgotten.
                let refusal = applied.response.refusal();
                let answer = recorded.entry(request).or_insert_with(|| applied.response.clone());
                prop_assert!(refusal == Refusal::RequestExpired || *answer == applied.response);
            }
        }
        prop_assert_eq!(&a, &b);
        prop_assert_eq!(&a, &restored(&a));
        if let Some(c) = c {
            prop_assert_eq!(&a, &c);
        }
    }

    #[test]
    fn damaged_entries_never_panic(
        op in op(), flips in prop::collection::vec((any::<usize>(), any::<u8>()), 0..6), cut in any::<usize>(),
    ) {
        let mut driver = common::Driver::created();
        driver.shards(3);
        let Some(command) = command(&driver.state, &op) else { return Ok(()) };
        let mut bytes = command.to_entry(None, 1);
        bytes.truncate(1 + cut % bytes.len());
        for (at, value) in flips {
            let at = at % bytes.len();
            bytes[at] = value;
        }
        let before = driver.state.clone();
        match driver.state.apply(100, &bytes) {
            Ok(applied) => check(&before, &driver.state, &applied),
            Err(_) => prop_assert_eq!(&driver.state, &before),
        }
        check_lists(&driver.state);
    }

    #[test]
    fn damaged_snapshots_are_refused_or_read_but_never_panic(
        flips in prop::collection::vec((any::<usize>(), any::<usize>(), any::<u8>()), 1..8), cut in any::<usize>(),
    ) {
        let mut driver = common::Driver::created();
        driver.shards(3);
        let mut items: Vec<Vec<u8>> = driver.state.snapshot_items().collect();
        prop_assert!(State::from_snapshot_items(&items[..cut % items.len()]).is_err(), "a cut snapshot is noticed");
        for (item, at, value) in flips {
            let count = items.len();
            let item = &mut items[item % count];
            if !item.is_empty() {
                let at = at % item.len();
                item[at] = value;
            }
        }
        if let Ok(mut state) = State::from_snapshot_items(&items) {
            let register = register("s9", "main", "n9", "b").to_entry(None, 5);
            let _ = state.apply(200, &register);
            let _ = state.records();
        }
    }

    #[test]
    fn tables_and_ranges_are_the_same_thing(lists in prop::collection::vec((0u16..16_384, 0u16..600, prop::collection::btree_map(0u32..9, any::<bool>(), 0..8)), 0..40)) {
        let mut table = SlotTable::default();
        for (first, len, copies) in &lists {
            let list: Vec<SlotCopy> = copies.iter().map(|(s, i)| SlotCopy { shard: *s, in_sync: *i }).collect();
            for slot in *first..first.saturating_add(*len).min(SLOTS) {
                prop_assert!(table.set(slot, list.clone().into()));
            }
        }
        let ranges = table.to_ranges();
        prop_assert_eq!(ranges.iter().map(|r| r.last - r.first + 1).sum::<u32>(), u32::from(SLOTS));
        prop_assert!(ranges.windows(2).all(|w| w[0].copies != w[1].copies), "neighbours with equal lists are joined");
        prop_assert_eq!(SlotTable::from_ranges(&ranges), Ok(table));
    }

    #[test]
    fn any_ranges_are_taken_or_refused(ranges in prop::collection::vec((any::<u32>(), any::<u32>(), prop::collection::vec(0u32..12, 0..12)), 0..6)) {
        let ranges: Vec<SlotRange> = ranges.iter().map(|(f, l, shards)| range(*f % 20_000, *l % 20_000, shards)).collect();
        if let Ok(table) = SlotTable::from_ranges(&ranges) {
            for range in &ranges {
                prop_assert!(range.first <= range.last && range.last < u32::from(SLOTS));
                prop_assert_eq!(table.get(u16::try_from(range.first).unwrap()), &range.copies[..]);
            }
        }
        prop_assert!(SlotTable::default().get(SLOTS).is_empty());
        prop_assert!(!SlotTable::default().set(SLOTS, Vec::new().into()));
    }
}
