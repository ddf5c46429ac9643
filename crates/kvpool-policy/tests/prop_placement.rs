//! Placement under random fleets that change: every step keeps the rules (checked in `common`), and it always settles on a table
//! that meets the quotas. `PROPTEST_RNG_SEED` replays a run.

#![allow(clippy::unwrap_used)] // tests

mod common;

use common::{World, config, shard};
use kvpool_policy::placement::{Input, Part, PlaceShard, Rule, largest_remainder, plan};
use kvpool_state::records::SlotCopy;
use kvpool_state::{SLOTS, SlotTable};
use proptest::prelude::*;
use std::sync::Arc;

#[derive(Clone, Debug)]
enum Change {
    Join {
        node: u32,
        capacity: u64,
    },
    Down(usize),
    Back(usize),
    Part(usize, Part),
    Factor(u32),
    Capacity(usize, u64),
    /// Steps of which only a part of the copies becomes complete, before the next change comes.
    Work {
        steps: u8,
        part: u32,
    },
    Settle,
}

const GIB: u64 = 1 << 30;

fn capacity() -> impl Strategy<Value = u64> {
    prop_oneof![4 => Just(64 * GIB), 2 => GIB..(512 * GIB), 1 => 0..GIB, 1 => Just(u64::MAX)]
}

fn part() -> impl Strategy<Value = Part> {
    prop_oneof![
        Just(Part::In),
        Just(Part::Held),
        Just(Part::Demoted),
        Just(Part::Leaving)
    ]
}

fn change() -> impl Strategy<Value = Change> {
    prop_oneof![
        3 => (0u32..24, capacity()).prop_map(|(node, capacity)| Change::Join { node, capacity }),
        3 => any::<usize>().prop_map(Change::Down),
        2 => any::<usize>().prop_map(Change::Back),
        3 => (any::<usize>(), part()).prop_map(|(i, part)| Change::Part(i, part)),
        1 => (1u32..=4).prop_map(Change::Factor),
        1 => (any::<usize>(), capacity()).prop_map(|(i, c)| Change::Capacity(i, c)),
        2 => (1u8..4, 1u32..8).prop_map(|(steps, part)| Change::Work { steps, part }),
        2 => Just(Change::Settle),
    ]
}

fn make(world: &mut World, change: &Change) {
    let count = world.shards.len();
    match *change {
        Change::Join { node, capacity } => {
            let zone = node % world.zone_count;
            world.shards.push(shard(count as u32 + 1, node, zone, capacity));
        }
        Change::Down(i) if count > 0 => world.down(i % count),
        Change::Back(i) if count > 0 => world.shards[i % count].part = Part::In,
        // The part of a shard that is Down is no matter.
        Change::Part(i, part) if count > 0 && world.shards[i % count].part != Part::Gone => {
            world.shards[i % count].part = part;
        }
        Change::Capacity(i, capacity) if count > 0 => world.shards[i % count].capacity_bytes = capacity,
        Change::Factor(factor) => world.factor = factor,
        Change::Work { steps, part } => {
            for step in 0..u32::from(steps) {
                let plan = world.plan();
                world.apply(&plan);
                world.report(|slot, shard| (u32::from(slot) + shard + step).is_multiple_of(part));
            }
        }
        Change::Settle => {
            world.settle();
        }
        _ => {}
    }
}

/// Shards on nodes, the nodes in 1 to 4 zones by their number.
fn fleet(shards: std::ops::Range<usize>) -> impl Strategy<Value = Vec<PlaceShard>> {
    let place = (0u32..24, capacity());
    (prop::collection::vec(place, shards), 1u32..5).prop_map(|(places, zones)| {
        let shard = |(i, (node, capacity)): (usize, (u32, u64))| shard(i as u32 + 1, node, node % zones, capacity);
        places.into_iter().enumerate().map(shard).collect()
    })
}

/// What the present table needs at least: copies that shards lack to their exact share.
fn least_fills(world: &World) -> u64 {
    let have = world.counts();
    let want = world.quotas();
    have.iter()
        .zip(want)
        .map(|(have, want)| (want.0 + want.1).saturating_sub(have.0 + have.1))
        .sum()
}

proptest! {
    #![proptest_config(config(48))]

    #[test]
    fn it_settles_whatever_changes(
        factor in 1u32..=4,
        zones in 1u32..5,
        changes in prop::collection::vec(change(), 1..24),
        max_filling in prop_oneof![Just(300u32), Just(2_000), Just(16_384)],
        max_changes in prop_oneof![Just(500u32), Just(4_096), Just(16_384)],
    ) {
        let mut world = World::new(factor, Vec::new());
        (world.max_filling, world.max_changes, world.zone_count) = (max_filling, max_changes, zones);
        for change in &changes {
            make(&mut world, change);
        }
        world.settle();
    }

    #[test]
    fn plans_are_the_same_for_the_same_input(factor in 1u32..=4, shards in fleet(1..40), down in any::<usize>()) {
        let mut world = World::new(factor, shards);
        world.settle();
        world.down(down % world.shards.len());
        let (a, b) = (world.plan(), world.plan());
        prop_assert_eq!(a, b);
    }

    #[test]
    fn any_table_is_taken_as_it_is(
        factor in any::<u32>(),
        shards in fleet(0..8),
        lists in prop::collection::vec(prop::collection::vec((0u32..12, any::<bool>()), 0..9), 1..40),
        max in any::<u32>(),
    ) {
        let mut table = SlotTable::default();
        for slot in 0..SLOTS {
            let list = lists[usize::from(slot) % lists.len()].iter().map(|(shard, in_sync)| SlotCopy { shard: *shard, in_sync: *in_sync });
            table.set(slot, Arc::from(list.collect::<Vec<_>>()));
        }
        let input = Input { factor, shards: &shards, table: &table, max_filling_per_shard: max, max_changes: max };
        let _ = plan(&input);
    }

    #[test]
    fn parts_of_a_split_sum_up_and_are_rounded_shares(total in 0u64..100_000, weights in prop::collection::vec(any::<u64>(), 1..50)) {
        let parts = largest_remainder(total, &weights);
        let sum: u128 = weights.iter().map(|w| u128::from(*w)).sum();
        prop_assume!(sum > 0);
        prop_assert_eq!(parts.iter().sum::<u64>(), total);
        for (part, weight) in parts.iter().zip(&weights) {
            let floor = u128::from(total) * u128::from(*weight) / sum;
            prop_assert!(u128::from(*part) == floor || u128::from(*part) == floor + 1);
        }
    }

    #[test]
    fn equal_nodes_meet_every_bound_with_the_least_moves(nodes in 3u32..40, zones in 1u32..5, factor in 1u32..=3, lost in any::<usize>()) {
        // Zones of equal size: the rules never stand against the quotas.
        let nodes = nodes.next_multiple_of(zones).max(zones * factor);
        let mut world = World::new(factor, (0..nodes).map(|n| shard(n + 1, n, n % zones, 64 * GIB)).collect());
        world.settle();
        prop_assert_eq!(world.fills, 0);
        prop_assert!(world.plan().shortfall.is_empty());
        // A shard dies: nothing moves that need not.
        if factor > 1 && zones == 1 {
            let held = world.counts().iter().map(|c| c.0 + c.1).max().unwrap_or(0);
            world.down(lost % nodes as usize);
            world.settle();
            prop_assert!(world.fills <= held + held / 50 + 2, "{} fills for {held} lost copies", world.fills);
            prop_assert!(world.plan().shortfall.is_empty());
        }
        // One joins: it gets its share, and nothing else moves.
        world.fills = 0;
        world.shards.push(shard(900, 900, 0, 64 * GIB));
        let least = least_fills(&world);
        world.settle();
        if zones == 1 {
            prop_assert!(world.plan().shortfall.is_empty());
            prop_assert!(world.fills <= least + least / 50 + 2, "{} fills, {least} needed", world.fills);
        }
    }
}

#[test]
fn the_first_placement_gives_full_lists_at_once() {
    let mut world = World::new(2, (1..=3).map(|n| shard(n, n, 0, 128 << 20)).collect());
    (world.max_filling, world.max_changes) = (1, 1);
    let plan = world.plan();
    assert_eq!(plan.unserved, u32::from(SLOTS));
    world.apply(&plan);
    assert!(world.table.iter().all(|(_, list)| list.len() == 2));
    world.report(|_, _| true);
    assert!(world.plan().settled);
    let counts = world.counts();
    assert!(
        counts
            .iter()
            .all(|c| (5461..=5462).contains(&c.0) && (5461..=5462).contains(&c.1)),
        "{counts:?}"
    );
}

#[test]
fn replicas_of_one_shard_are_spread_over_the_others() {
    let mut world = World::new(2, (1..=10).map(|n| shard(n, n, 0, GIB)).collect());
    world.settle();
    let mut beside = std::collections::BTreeMap::<u32, u32>::new();
    for (_, list) in world.table.iter().filter(|(_, l)| l[0].shard == 1) {
        *beside.entry(list[1].shard).or_default() += 1;
    }
    assert!(beside.len() >= 5, "the load of a dead shard falls on {beside:?}");
    assert!(
        world.table.to_ranges().len() <= 1_200,
        "{} ranges",
        world.table.to_ranges().len()
    );
}

#[test]
fn a_second_node_fills_what_one_node_could_not() {
    let mut world = World::new(2, vec![shard(1, 1, 0, GIB), shard(2, 1, 0, GIB)]);
    world.settle();
    let plan = world.plan();
    assert_eq!(plan.under_replicated, u32::from(SLOTS));
    assert_eq!(plan.shortfall[0].rule, Rule::TooFewNodes);
    world.shards.push(shard(3, 2, 0, GIB));
    world.settle();
    assert_eq!(world.plan().under_replicated, 0);
}

#[test]
fn what_rules_forbid_is_reported() {
    let big = vec![shard(1, 1, 0, 10 * GIB), shard(2, 2, 0, GIB), shard(3, 3, 0, GIB)];
    let mut world = World::new(2, big);
    world.settle();
    let plan = world.plan();
    // 10/12 of two copies is more than one copy of every slot, by about 2/3 of the slots.
    assert_eq!(plan.shortfall.len(), 1);
    assert_eq!(
        (plan.shortfall[0].rule, plan.shortfall[0].slots),
        (Rule::NodeShare, 10_923)
    );
    assert_eq!(world.counts()[0].0, 13_654);
    let zones = vec![
        shard(1, 1, 0, GIB),
        shard(2, 2, 0, GIB),
        shard(3, 3, 0, GIB),
        shard(4, 4, 1, GIB),
    ];
    let mut world = World::new(2, zones);
    world.settle();
    assert_eq!(world.plan().shortfall[0].rule, Rule::ZoneShare);
    assert_eq!(world.counts()[3].0 + world.counts()[3].1, u64::from(SLOTS));
}

#[test]
fn without_shards_there_is_nothing_to_do() {
    let mut world = World::new(2, vec![shard(1, 1, 0, GIB)]);
    world.settle();
    world.shards.clear();
    let plan = world.plan();
    assert_eq!(
        (plan.under_replicated, plan.unserved),
        (u32::from(SLOTS), u32::from(SLOTS))
    );
    world.apply(&plan);
    assert!(world.plan().settled);
}

#[test]
fn no_filling_is_started_when_none_is_allowed() {
    let mut world = World::new(1, vec![shard(1, 1, 0, GIB)]);
    world.settle();
    world.shards.push(shard(2, 2, 0, GIB));
    world.max_filling = 0;
    let plan = world.plan();
    assert!(plan.ranges.is_empty() && !plan.settled);
}
