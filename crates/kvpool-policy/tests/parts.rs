//! Shards that leave, are suspected or come back: what each step gives them and takes from them.

#![allow(clippy::unwrap_used)] // tests

mod common;

use common::{World, shard};
use kvpool_policy::placement::Part;
use kvpool_state::SLOTS;

const GIB: u64 = 1 << 30;

fn settled(factor: u32, shards: u32) -> World {
    let mut world = World::new(factor, (1..=shards).map(|n| shard(n, n, 0, GIB)).collect());
    world.settle();
    world.fills = 0;
    world
}

/// Slots whose list names the shard, and those of which it is primary.
fn held(world: &World, number: u32) -> (u32, u32) {
    let of = |f: &dyn Fn(&[kvpool_state::records::SlotCopy]) -> bool| {
        world.table.iter().filter(|(_, list)| f(list)).count() as u32
    };
    (
        of(&|l| l.iter().any(|c| c.shard == number)),
        of(&|l| l.first().is_some_and(|c| c.shard == number)),
    )
}

/// Fault O35: primaries go first, copies when their successors are complete, and nothing new comes.
#[test]
fn a_drain_hands_over_and_ends() {
    for factor in 1..=3 {
        let mut world = settled(factor, 4);
        let (copies, _) = held(&world, 1);
        world.shards[0].part = Part::Leaving;
        let first = world.plan();
        world.apply(&first);
        if factor > 1 {
            assert_eq!(
                held(&world, 1),
                (copies, 0),
                "primaries are handed over at once, copies stay"
            );
            assert_eq!(first.under_replicated, 0);
        }
        world.settle();
        assert_eq!(held(&world, 1), (0, 0));
        assert!(
            world.fills <= u64::from(copies) + u64::from(copies) / 50 + 4,
            "{} for {copies}",
            world.fills
        );
        assert!(world.plan().shortfall.is_empty());
    }
}

/// Fault O36: 3 -> 4 -> 3 moves about a quarter of the slots and nothing else.
#[test]
fn growing_and_shrinking_move_their_share_only() {
    let mut world = settled(2, 3);
    let owners = |world: &World| -> Vec<u32> { world.table.iter().map(|(_, l)| l[0].shard).collect() };
    let changed = |a: &[u32], b: &[u32]| a.iter().zip(b).filter(|(a, b)| a != b).count();
    let quarter = usize::from(SLOTS) / 4;
    // Copies are what moving costs. Who of them is primary changes a little more, and costs nothing.
    let (copies, owned) = (u64::from(SLOTS) * 2 / 4, quarter + quarter / 2);
    let at_three = owners(&world);
    world.shards.push(shard(4, 4, 0, GIB));
    world.settle();
    let at_four = owners(&world);
    assert!(world.fills <= copies + copies / 50, "{} copies moved", world.fills);
    assert!(
        changed(&at_three, &at_four) <= owned,
        "{}",
        changed(&at_three, &at_four)
    );
    assert!(
        held(&world, 4).1 >= quarter as u32 - 1,
        "it gets its share of new writes"
    );
    world.fills = 0;
    world.shards[3].part = Part::Leaving;
    world.settle();
    let back = owners(&world);
    assert!(world.fills <= copies + copies / 50, "{} copies moved", world.fills);
    assert!(changed(&at_four, &back) <= owned, "{}", changed(&at_four, &back));
    assert_eq!(held(&world, 4), (0, 0));
}

#[test]
fn the_last_shard_keeps_what_nobody_takes() {
    let mut world = settled(2, 2);
    world.shards[0].part = Part::Leaving;
    world.shards[1].part = Part::Leaving;
    let plan = world.plan();
    world.apply(&plan);
    assert!(!world.plan().settled, "it waits for somebody");
    assert!(world.table.iter().all(|(_, list)| list.len() == 1 && list[0].in_sync));
    world.shards.push(shard(3, 3, 0, GIB));
    world.settle();
    assert_eq!(
        (held(&world, 1), held(&world, 2), held(&world, 3).0),
        ((0, 0), (0, 0), u32::from(SLOTS))
    );
}

#[test]
fn a_suspect_gets_nothing_new_and_one_out_of_reach_stands_behind() {
    let mut world = settled(2, 4);
    let before = held(&world, 1);
    world.shards[0].part = Part::Held;
    assert!(world.plan().settled, "it keeps its place");
    // Another one dies: what it held goes to the other two, and what is the suspect's share waits.
    world.down(1);
    for _ in 0..8 {
        let plan = world.plan();
        world.apply(&plan);
        world.report(|_, _| true);
    }
    assert_eq!(held(&world, 1).0, before.0);
    assert!(!world.plan().settled);
    let mut world = settled(2, 4);
    world.shards[0].part = Part::Demoted;
    let plan = world.plan();
    world.apply(&plan);
    assert_eq!(held(&world, 1), (before.0, 0), "never first, evicted from nothing");
    assert!(world.plan().settled && world.fills == 0);
    world.shards[0].part = Part::In;
    world.settle();
    assert_eq!(held(&world, 1), before);
    assert_eq!(world.fills, 0);
}

/// Fault O34: a shard that comes back empty is never in more lists than its share, whatever else is going on.
#[test]
fn a_returning_shard_is_ramped_by_its_share() {
    let mut world = settled(2, 4);
    world.down(0);
    world.settle();
    world.shards[0].part = Part::In;
    world.max_filling = 1_000;
    let share = 2 * u32::from(SLOTS) / 4;
    let mut last = 0;
    let mut steps = 0;
    while !world.plan().settled {
        let plan = world.plan();
        world.apply(&plan);
        let (lists, primaries) = held(&world, 1);
        assert!(lists <= share + share / 100 + 2, "{lists} lists of a share of {share}");
        let complete = world
            .table
            .iter()
            .filter(|(_, l)| l.iter().any(|c| c.shard == 1 && c.in_sync));
        assert!(primaries <= complete.count() as u32, "primary only of what it has");
        assert!(lists.saturating_sub(last) <= 1_000, "in steps");
        last = lists;
        steps += 1;
        world.report(|_, _| true);
    }
    assert!(steps > 4, "{steps}");
}
