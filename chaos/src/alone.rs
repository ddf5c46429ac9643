//! A member alone that works while its disk fails, loses power, and works again.
//!
//! In the library and not in its test, because each test binary would compile the consensus library anew.

use std::time::Duration;

use kvpool_raft::{AsyncRuntime, Config, RaftNode, StartError};

use crate::cluster;
use crate::disk::{Faults, SimDisk};
use crate::machine::Model;
use crate::net::{Net, Node};
use crate::oracle::Oracle;
use crate::register::{Operation, Registers, View, command};
use crate::runtime::Sim;
use crate::world;

const MEMBER: u64 = 1;
const WRITES: u64 = 80;

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
        let (register, view) = Registers(self.oracle.clone()).machine(MEMBER);
        let start = RaftNode::start(config(), self.disk.clone(), self.net.end(MEMBER), register);
        Ok((world::inside(MEMBER, start).await?, view))
    }

    /// True when the disk has done what it was asked to.
    fn failed(&self) -> bool {
        self.disk.is_off() || self.disk.has_failed() || self.disk.was_full()
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
        while done < writes && tries < 3 * writes + 200 && !self.failed() {
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

/// Works with `faults`, loses power, and works again; panics when something acknowledged is lost or the member
/// does not start. Returns whether the fault ever came.
pub fn run(seed: u64, faults: Faults, what: &str) -> bool {
    let (hit, trace) = world::run(seed, one(faults, what));
    assert!(trace.panics.is_empty(), "{what}: {:?}", trace.panics);
    hit
}

async fn one(faults: Faults, what: &str) -> bool {
    let mut member = Member::new();
    member.disk.set_faults(faults);
    let hit = match member.boot().await {
        Ok((node, _view)) => {
            member.work(&node, WRITES).await;
            member.failed()
        }
        Err(e) => {
            assert!(member.failed(), "{what}: {e}");
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
