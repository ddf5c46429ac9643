//! A member alone, with the power failing at every single disk operation: creation, votes, batches, new
//! segments, snapshots, purges. After each it must start, and hold what it acknowledged.

use kvpool_chaos::alone;
use kvpool_chaos::disk::Faults;

const LUCK: u64 = 4;

fn every_step(faults: impl Fn(u64) -> Faults, stride: usize) {
    let mut hits = 0;
    for step in (0..).step_by(stride) {
        let mut hit = false;
        // What a power loss leaves is a matter of luck, so each step gets several.
        for luck in 0..LUCK {
            let what = format!("at operation {step}, luck {luck}");
            hit |= alone::run(step * LUCK + luck, faults(step), &what);
        }
        if !hit {
            break;
        }
        hits += 1;
    }
    println!("{hits} steps");
    assert!(hits * stride > 150, "the work is long enough to be interesting: {hits}");
}

#[test]
fn the_power_may_fail_at_any_disk_operation() {
    every_step(
        |n| Faults {
            crash_after: Some(n),
            ..Faults::default()
        },
        1,
    );
}

#[test]
fn any_disk_operation_may_fail() {
    every_step(
        |n| Faults {
            fail_after: Some(n),
            ..Faults::default()
        },
        3,
    );
}

#[test]
fn a_full_disk_stops_the_member_and_loses_nothing() {
    for kib in [1, 9, 12, 17, 20, 25] {
        let what = format!("{kib} KiB");
        let faults = Faults {
            capacity: Some(kib << 10),
            ..Faults::default()
        };
        assert!(alone::run(kib, faults, &what), "{what} are enough");
    }
}
