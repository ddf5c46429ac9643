//! A member alone, with the power failing at every single disk operation: creation, votes, batches, new
//! segments, snapshots, purges. After each it must start, and hold what it acknowledged.

use std::time::Duration;

use kvpool_chaos::cluster;
use kvpool_chaos::disk::{Faults, SimDisk};
use kvpool_chaos::net::{Net, Node};
use kvpool_chaos::oracle::Oracle;
use kvpool_chaos::register::{Operation, Register, View, command};
use kvpool_chaos::runtime::Sim;
use kvpool_chaos::world;
use kvpool_raft::{AsyncRuntime, Config, RaftNode, StartError};

const MEMBER: u64 = 1;
const WRITES: u64 = 80;
const LUCK: u64 = 4;

fn config() -> Config {
    let mut config = cluster::config(MEMBER);
    config.max_in_flight = 1;
    config.snapshot_every = 12;
    config.keep_applied = 12;
    config
}

struct Member {
    disk: SimDisk,
    net: Net,
    oracle: Oracle,
    acknowledged: Vec<(u64, Operation)>,
    next: Operation,
}

impl Member {
    fn new() -> Member {
        Member {
            disk: SimDisk::default(),
            net: Net::new(),
            oracle: Oracle::default(),
            acknowledged: Vec::new(),
            next: 1,
        }
    }

    async fn boot(&self) -> Result<(Node, View), StartError> {
        self.disk.power_on();
        let (register, view) = Register::new(MEMBER, self.oracle.clone());
        let start = RaftNode::start(config(), self.disk.clone(), self.net.end(MEMBER), register);
        Ok((world::inside(MEMBER, start).await?, view))
    }

    fn crash(&self) {
        world::kill(MEMBER);
        self.disk.crash();
    }

    /// Creates the group if needed and writes until enough is written or the disk gives up.
    async fn work(&mut self, node: &Node, writes: u64) {
        if !node.status().initialized() {
            let created = node.initialize([(MEMBER, "member-1".to_string())].into());
            drop(Sim::timeout(Duration::from_secs(3), world::inside(MEMBER, created)).await);
        }
        let mut done = 0;
        let mut tries = 0;
        while done < writes && tries < 3 * writes + 200 && !self.disk.is_off() && !self.disk.has_failed() {
            tries += 1;
            let operation = self.next;
            self.next += 1;
            let proposed = node.propose(command(operation, 200));
            if let Ok(Ok(applied)) = Sim::timeout(Duration::from_secs(1), proposed).await {
                self.acknowledged.push((applied.index, operation));
                done += 1;
            } else {
                world::sleep(Duration::from_millis(20)).await;
            }
        }
    }

    fn check(&self, view: &View, what: &str) {
        let held = view.get().applied;
        for acknowledged in &self.acknowledged {
            assert!(
                held.contains(acknowledged),
                "{what}: {acknowledged:?} was acknowledged and is lost"
            );
        }
    }
}

/// Works with `faults`, loses power, and works again. Returns whether the fault ever came.
async fn one(faults: Faults, what: &str) -> bool {
    let mut member = Member::new();
    member.disk.set_faults(faults);
    let hit = match member.boot().await {
        Ok((node, _view)) => {
            member.work(&node, WRITES).await;
            member.disk.is_off() || member.disk.has_failed()
        }
        Err(e) => {
            assert!(member.disk.is_off() || member.disk.has_failed(), "{what}: {e}");
            true
        }
    };
    // Twice, so that the first recovery's own writes are lost once too.
    for life in 0..2 {
        member.crash();
        member.disk.set_faults(Faults::default());
        let (node, view) = member
            .boot()
            .await
            .unwrap_or_else(|e| panic!("{what}, life {life}: {e}"));
        let before = member.acknowledged.len();
        member.work(&node, 3).await;
        assert_eq!(
            member.acknowledged.len(),
            before + 3,
            "{what}: it does not work again: {:?}",
            node.status()
        );
        member.check(&view, what);
    }
    let (violations, _) = member.oracle.verdict();
    assert!(violations.is_empty(), "{what}: {violations:?}");
    world::kill(MEMBER);
    hit
}

fn every_step(faults: impl Fn(u64) -> Faults, stride: usize) {
    let mut hits = 0;
    for step in (0..).step_by(stride) {
        let mut hit = false;
        // What a power loss leaves is a matter of luck, so each step gets several.
        for luck in 0..LUCK {
            let what = format!("at operation {step}, luck {luck}");
            let (hit_now, trace) = world::run(step * LUCK + luck, one(faults(step), &what));
            assert!(trace.panics.is_empty(), "{what}: {:?}", trace.panics);
            hit |= hit_now;
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
        let (hit, trace) = world::run(kib, one(faults, &what));
        assert!(hit && trace.panics.is_empty(), "{what}: {:?}", trace.panics);
    }
}
