//! The brake, the wait of shards that come and go, and the parts that shards take.

use kvpool_policy::failure::Suspicion;
use kvpool_policy::membership::{
    BRAKE_WINDOW_MS, Brake, MAX_SETTLE_MS, Phase, brake, parts, phase, settle_ms, settles_until,
};
use kvpool_policy::placement::Part;
use kvpool_state::records::{ShardRecord, ShardState};
use proptest::prelude::*;
use std::collections::BTreeSet;

const NOW: u64 = 1_000_000;

fn shard(n: u64, state: ShardState, since_ms: u64) -> ShardRecord {
    ShardRecord {
        id: format!("s{n}"),
        node: format!("n{n}"),
        capacity_bytes: 100,
        state: state.into(),
        since_ms,
        ..ShardRecord::default()
    }
}

fn pool(up: u64, down: u64) -> Vec<ShardRecord> {
    let up = (0..up).map(|n| shard(n, ShardState::Up, 0));
    up.chain((100..100 + down).map(|n| shard(n, ShardState::Down, NOW - 1_000)))
        .collect()
}

/// The brake when the first `silent` shards that are up are out of contact.
fn held(shards: &[ShardRecord], silent: usize, released: u64) -> bool {
    let gone: BTreeSet<&str> = shards.iter().take(silent).map(|s| s.id.as_str()).collect();
    brake(shards, released, NOW, |s| gone.contains(s.id.as_str())) != Brake::Open
}

#[test]
fn one_shard_is_always_declared_and_many_are_not() {
    for shards in 1..6 {
        assert!(!held(&pool(shards, 0), 1, 0), "one of {shards}");
    }
    assert!(held(&pool(2, 0), 2, 0) && held(&pool(3, 0), 2, 0) && held(&pool(7, 0), 2, 0));
    assert!(!held(&pool(8, 0), 2, 0), "a quarter is not more than a quarter");
    assert!(held(&pool(8, 0), 3, 0));
    assert!(held(&pool(2, 1), 1, 0), "the second within the window");
    assert!(!held(&pool(3, 1), 0, 0), "nobody is to be declared");
    assert!(!held(&pool(3, 0), 2, NOW + 1), "a person has released it");
    let long_ago = vec![
        shard(1, ShardState::Up, 0),
        shard(2, ShardState::Up, 0),
        shard(3, ShardState::Down, NOW - BRAKE_WINDOW_MS),
    ];
    assert!(!held(&long_ago, 1, 0), "what is Down for long is another failure");
    let mut leaving = pool(2, 1);
    leaving[2].out = true;
    assert!(!held(&leaving, 1, 0), "a shard that was asked to leave is no loss");
}

#[test]
fn the_brake_says_its_arithmetic() {
    let shards = pool(3, 1);
    let Brake::Held(words) = brake(&shards, 0, NOW, |s| s.id == "s0") else {
        panic!("open")
    };
    for part in [
        "1 out of contact",
        "1 Down within 60 s",
        "2 shards with 200 of 400 bytes",
        "(50 %",
    ] {
        assert!(words.contains(part), "{words}");
    }
}

#[test]
fn coming_and_going_costs_time_up_to_a_bound() {
    let waits: Vec<u64> = [0, 1, 2, 3, 4, 5, 8, u32::MAX].map(settle_ms).into();
    assert_eq!(waits, [0, 0, 0, 15_000, 30_000, 60_000, MAX_SETTLE_MS, MAX_SETTLE_MS]);
    let flapping = ShardRecord {
        downs: 3,
        ..shard(1, ShardState::Up, NOW)
    };
    assert_eq!(settles_until(&flapping, NOW + 14_999), Some(NOW + 15_000));
    assert_eq!(settles_until(&flapping, NOW + 15_000), None);
    let two = [&flapping, &shard(2, ShardState::Up, 0)];
    assert_eq!(parts(&two, 1, NOW, |_| None), [Part::Leaving, Part::In]);
    assert_eq!(
        parts(&two, 2, NOW, |_| None),
        [Part::In, Part::In],
        "better than a missing copy"
    );
    assert_eq!(parts(&two, 1, NOW + 15_000, |_| None), [Part::In, Part::In]);
}

#[test]
fn phases() {
    let late = Some(Suspicion::Late { silent_ms: 1 });
    let of = |state, suspicion, complete| phase(&shard(1, state, 0), suspicion, complete);
    assert_eq!(of(ShardState::Up, None, 0), Phase::Joining);
    assert_eq!(of(ShardState::Up, None, 1), Phase::Up);
    assert_eq!(of(ShardState::Up, late, 1), Phase::Suspect);
    assert_eq!(of(ShardState::Draining, late, 1), Phase::Draining);
    assert_eq!(of(ShardState::Drained, None, 0), Phase::Drained);
    assert_eq!(of(ShardState::Down, late, 0), Phase::Down);
}

fn any_shard() -> impl Strategy<Value = ShardRecord> {
    let number = || prop_oneof![0u64..2_000_000, any::<u64>()];
    let word = (0i32..7, 0u64..8, any::<bool>(), any::<u32>());
    (word, number(), number()).prop_map(|((state, node, out, downs), since_ms, capacity_bytes)| ShardRecord {
        state,
        node: format!("n{node}"),
        out,
        downs,
        since_ms,
        capacity_bytes,
        ..ShardRecord::default()
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    /// Any records at any time: no panic; only a shard that is Up can get anything new, and it is never alone for that.
    #[test]
    fn parts_follow_the_committed_state(
        shards in prop::collection::vec((any_shard(), 0u8..4), 0..12), factor in 0u32..6, now in any::<u64>(),
    ) {
        let suspicion = |n: u8| match n {
            1 => Some(Suspicion::Late { silent_ms: 9 }),
            2 => Some(Suspicion::Broken { since_ms: 9 }),
            3 => Some(Suspicion::Unreachable { reporters: 2 }),
            _ => None,
        };
        let records: Vec<&ShardRecord> = shards.iter().map(|(s, _)| s).collect();
        let of = |s: &ShardRecord| shards.iter().find(|(r, _)| std::ptr::eq(r, s)).and_then(|(_, n)| suspicion(*n));
        let parts = parts(&records, factor, now, of);
        prop_assert_eq!(parts.len(), records.len());
        for (part, (shard, n)) in parts.iter().zip(&shards) {
            match part {
                Part::In => prop_assert!(shard.state() == ShardState::Up && *n == 0),
                Part::Held | Part::Demoted => prop_assert!(shard.state() == ShardState::Up && *n > 0),
                Part::Leaving => prop_assert!(shard.is_up()),
                Part::Gone => prop_assert!(!shard.is_up()),
            }
        }
        // Settling never costs a copy that could be had.
        let nodes = |wanted: &dyn Fn(&Part) -> bool| {
            let of = parts.iter().zip(&shards).filter(|(p, (s, _))| s.state() == ShardState::Up && wanted(p));
            of.map(|(_, (s, _))| &s.node).collect::<BTreeSet<_>>().len()
        };
        let takes = |p: &Part| *p != Part::Leaving;
        prop_assert!(nodes(&takes) >= nodes(&|_| true).min(factor as usize));
    }

    /// Held exactly when the rule says so, whatever the numbers.
    #[test]
    fn the_brake_follows_its_rule(shards in prop::collection::vec((any_shard(), any::<bool>()), 0..12), now in any::<u64>(), released in any::<u64>()) {
        let silent: Vec<bool> = shards.iter().map(|(_, silent)| *silent).collect();
        let mut asked = 0;
        let held = brake(shards.iter().map(|(s, _)| s), released, now, |s| {
            asked += 1;
            shards.iter().position(|(r, _)| std::ptr::eq(r, s)).is_some_and(|i| silent[i])
        }) != Brake::Open;
        let serving = |s: &ShardRecord| matches!(s.state(), ShardState::Up | ShardState::Draining);
        let recent = |s: &ShardRecord| s.state() == ShardState::Down && !s.out && now.saturating_sub(s.since_ms) < BRAKE_WINDOW_MS;
        let sum = |f: &dyn Fn(&(ShardRecord, bool)) -> bool| -> u128 { shards.iter().filter(|x| f(x)).map(|(s, _)| u128::from(s.capacity_bytes)).sum() };
        let would = |x: &(ShardRecord, bool)| serving(&x.0) && x.1 || recent(&x.0);
        let members = shards.iter().filter(|x| would(x)).count();
        let lost = sum(&would);
        let total = sum(&|x| serving(&x.0) || recent(&x.0));
        let any = shards.iter().any(|x| serving(&x.0) && x.1);
        prop_assert_eq!(held, any && members >= 2 && lost * 4 > total && now >= released);
        prop_assert_eq!(asked, shards.iter().filter(|x| serving(&x.0)).count());
    }
}
