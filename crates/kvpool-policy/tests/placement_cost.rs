//! What a plan costs at the sizes we promise. Prints times; asserts none (the machine is shared).

#![allow(clippy::unwrap_used)] // tests

mod common;

use common::{World, shard};

fn measure(shards: u32, factor: u32, zones: u32) {
    let fleet = |n: u32| shard(n, n, n % zones, (64 + u64::from(n % 7)) << 30);
    let mut world = World::new(factor, (1..=shards).map(fleet).collect());
    let mut times = Vec::new();
    let mut timed = |world: &World, what: &str| {
        #[allow(clippy::disallowed_methods)] // measuring is the purpose
        let start = std::time::Instant::now();
        let plan = world.plan();
        times.push(format!(
            "{what} {:.1} ms ({} ranges)",
            start.elapsed().as_secs_f64() * 1e3,
            plan.ranges.len()
        ));
        plan
    };
    let first = timed(&world, "first");
    world.apply(&first);
    world.report(|_, _| true);
    let idle = timed(&world, "idle");
    assert!(idle.settled);
    world.down(shards as usize / 2);
    timed(&world, "down");
    world.settle();
    world.shards.push(fleet(shards + 1));
    timed(&world, "join");
    world.settle();
    println!("{shards} shards, factor {factor}, {zones} zones: {}", times.join(", "));
}

#[test]
fn cost_of_a_plan() {
    for (shards, factor, zones) in [(3, 2, 1), (16, 2, 3), (64, 2, 1), (64, 3, 4), (1_000, 2, 8)] {
        measure(shards, factor, zones);
    }
}

/// Ten thousand shards: more than the pool has slots for each, and yet no explosion.
#[test]
fn cost_of_a_plan_for_ten_thousand_shards() {
    let fleet: Vec<_> = (1..=10_000)
        .map(|n| shard(n, n, n % 16, (64 + u64::from(n % 7)) << 30))
        .collect();
    let mut world = World::new(2, fleet);
    #[allow(clippy::disallowed_methods)] // measuring is the purpose
    let start = std::time::Instant::now();
    let first = world.plan();
    println!("10000 shards, first: {:.0} ms", start.elapsed().as_secs_f64() * 1e3);
    for range in &first.ranges {
        for slot in range.first..=range.last {
            world.table.set(slot as u16, range.copies.clone().into());
        }
    }
    world.report(|_, _| true);
    assert!(world.plan().settled);
    world.down(77);
    #[allow(clippy::disallowed_methods)] // measuring is the purpose
    let start = std::time::Instant::now();
    let plan = world.plan();
    println!(
        "10000 shards, one down: {:.0} ms, {} ranges",
        start.elapsed().as_secs_f64() * 1e3,
        plan.ranges.len()
    );
    assert!(plan.ranges.len() < 64, "repair touches what was lost only");
}
