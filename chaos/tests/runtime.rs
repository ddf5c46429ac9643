//! The simulated runtime keeps the promises the library asks of a runtime.

use kvpool_chaos::runtime::Sim;
use kvpool_chaos::world;

#[test]
fn the_librarys_suite_passes() {
    openraft::testing::runtime::Suite::<Sim>::test_all();
}

#[test]
fn equal_seeds_take_equal_steps_and_others_do_not() {
    let work = || async {
        for i in 0..5u64 {
            world::spawn(async move {
                world::sleep(std::time::Duration::from_micros(world::random(100 * (i + 1)))).await;
                world::note(world::random(7));
            });
        }
        world::sleep(std::time::Duration::from_millis(5)).await;
    };
    assert_eq!(world::run(5, work()), world::run(5, work()));
    assert_ne!(world::run(5, work()).1.hash, world::run(6, work()).1.hash);
}
