//! What goes wrong in a run, one fault after the other, and the healing at its end. Every fault is counted by its name.

use std::time::Duration;

use kvpool_raft::{AsyncRuntime, MemberId};

use crate::cluster::{Cluster, MEMBERS};
use crate::disk::Faults;
use crate::machine::Model;
use crate::net::Weather;
use crate::runtime::Sim;
use crate::world;

/// How long a client waits for one call.
pub const PATIENCE: Duration = Duration::from_millis(1_500);
/// Votes on the way when a member is cut off have run out after this.
const VOTES_RUN_OUT: Duration = Duration::from_millis(400);

/// Which faults a run may use.
#[derive(Debug, Clone, Copy)]
pub struct Menu {
    /// Power losses and crashes at a disk operation.
    pub crashes: bool,
    /// Disks that fail an operation, are full or slow.
    pub disk_errors: bool,
}

/// Waits a random time in milliseconds, meanwhile noticing members whose disk took them down.
pub async fn pause<M: Model>(cluster: &Cluster<M>, least: u64, most: u64) {
    let until = world::now() + (least + world::random(most - least)) * 1_000_000;
    while world::now() < until {
        world::sleep(Duration::from_millis(20)).await;
        reap(cluster).await;
    }
}

/// Ends the processes of failed disks, and boots what is down with some probability.
async fn reap<M: Model>(cluster: &Cluster<M>) {
    for id in MEMBERS {
        let disk = cluster.disk(id);
        if let Some((node, ..)) = cluster.member(id) {
            // A process with a failed disk exits; its supervisor starts it again.
            let full = disk.was_full() && node.status().fatal.is_some();
            if disk.is_off() || disk.has_failed() || full {
                cluster.crash(id);
            }
        } else if world::chance(60) {
            cluster.boot(id).await;
        }
    }
}

/// One of the members.
pub fn any_member() -> MemberId {
    MEMBERS[world::random(MEMBERS.len() as u64) as usize]
}

fn others(id: MemberId) -> impl Iterator<Item = MemberId> {
    MEMBERS.into_iter().filter(move |other| *other != id)
}

/// A fault of any kind, from its beginning to its end.
pub async fn fault<M: Model>(cluster: &Cluster<M>, menu: Menu) {
    match world::random(18) {
        0..=4 if menu.crashes => crash(cluster),
        5..=8 if menu.disk_errors => disk(cluster).await,
        9 => freeze(cluster).await,
        10 => starve(cluster).await,
        11 | 12 => clocks(cluster).await,
        13 => transfer(cluster).await,
        _ => network(cluster).await,
    }
}

fn crash<M: Model>(cluster: &Cluster<M>) {
    match world::random(4) {
        0 => {
            cluster.oracle.count("fault: all members lose power");
            MEMBERS.into_iter().for_each(|id| cluster.crash(id));
        }
        1 | 2 => {
            cluster.oracle.count("fault: power lost at a disk operation");
            let faults = Faults {
                crash_after: Some(world::random(40)),
                ..Faults::default()
            };
            cluster.set_faults(any_member(), faults);
        }
        _ => {
            cluster.oracle.count("fault: a member loses power");
            cluster.crash(any_member());
        }
    }
}

async fn disk<M: Model>(cluster: &Cluster<M>) {
    let id = any_member();
    match world::random(3) {
        0 => {
            cluster.oracle.count("fault: a disk operation fails");
            let faults = Faults {
                fail_after: Some(world::random(40)),
                ..Faults::default()
            };
            cluster.set_faults(id, faults);
        }
        1 => {
            cluster.oracle.count("fault: a disk is full");
            let faults = Faults {
                capacity: Some(cluster.disk(id).used() + world::random(12_000)),
                ..Faults::default()
            };
            cluster.set_faults(id, faults);
            pause(cluster, 300, 2_000).await;
            cluster.set_faults(id, Faults::default());
        }
        _ => {
            cluster.oracle.count("fault: a disk is slow");
            let faults = Faults {
                slow: 20 + world::random(200),
                ..Faults::default()
            };
            cluster.set_faults(id, faults);
            pause(cluster, 300, 2_000).await;
            cluster.set_faults(id, Faults::default());
        }
    }
}

async fn freeze<M: Model>(cluster: &Cluster<M>) {
    let id = any_member();
    // One that is down would be booted frozen, and whoever boots it would wait for ever.
    if !cluster.runs(id) {
        return;
    }
    cluster.oracle.count("fault: a member is frozen");
    world::freeze(id);
    pause(cluster, 100, 1_500).await;
    world::thaw(id);
}

/// The member runs for some milliseconds now and then.
async fn starve<M: Model>(cluster: &Cluster<M>) {
    let id = any_member();
    if !cluster.runs(id) {
        return;
    }
    cluster.oracle.count("fault: a member is starved");
    for _ in 0..5 + world::random(15) {
        world::freeze(id);
        world::sleep(Duration::from_millis(10 + world::random(150))).await;
        world::thaw(id);
        world::sleep(Duration::from_micros(200 + world::random(8_000))).await;
        if !cluster.runs(id) {
            return;
        }
    }
}

async fn clocks<M: Model>(cluster: &Cluster<M>) {
    let id = any_member();
    if world::chance(500) {
        cluster.oracle.count("fault: a wall clock jumps");
        let ms = world::random(120_000) as i64 - 60_000;
        world::set_ahead(id, ms);
    } else {
        cluster.oracle.count("fault: a clock runs fast or slow");
        world::set_speed(id, 500 + world::random(1_500));
        pause(cluster, 300, 3_000).await;
        world::set_speed(id, 1_000);
    }
}

async fn transfer<M: Model>(cluster: &Cluster<M>) {
    let (id, to) = (any_member(), any_member());
    if let Some((node, ..)) = cluster.member(id) {
        cluster.oracle.count("fault: leadership is handed over");
        // Only a leader heeds it.
        drop(Sim::timeout(PATIENCE, world::inside(id, node.transfer_leader(to))).await);
    }
}

async fn network<M: Model>(cluster: &Cluster<M>) {
    match world::random(5) {
        0 | 1 => isolate(cluster).await,
        2 => {
            cluster.oracle.count("fault: a one-way cut");
            let from = any_member();
            for to in others(from).filter(|_| world::chance(600)) {
                cluster.net.cut(from, to);
            }
            pause(cluster, 200, 1_500).await;
        }
        3 => {
            cluster.oracle.count("fault: loss, delay, doubles, disorder");
            cluster.net.set_weather(Weather::FOUL);
            pause(cluster, 300, 1_500).await;
            cluster.net.set_weather(Weather::FAIR);
        }
        _ => {
            // The third member is the bridge.
            cluster.oracle.count("fault: a cut with a bridge");
            let one = any_member();
            let other = others(one).nth(world::random(2) as usize).unwrap_or(one);
            cluster.net.cut(one, other);
            cluster.net.cut(other, one);
            pause(cluster, 200, 1_500).await;
        }
    }
    cluster.net.heal();
}

/// Cuts one member off and checks that it does not raise its term.
async fn isolate<M: Model>(cluster: &Cluster<M>) {
    let id = any_member();
    cluster.oracle.count("fault: a member is cut off");
    for other in others(id) {
        cluster.net.cut(id, other);
        cluster.net.cut(other, id);
    }
    world::sleep(VOTES_RUN_OUT).await;
    let look = || {
        if let Some((node, _, life)) = cluster.member(id) {
            cluster.oracle.cut_off(id, life, node.status().term);
        }
    };
    look();
    pause(cluster, 300, 2_500).await;
    look();
    cluster.oracle.reconnected(id);
}

/// Ends every fault and boots who is down.
pub async fn heal<M: Model>(cluster: &Cluster<M>) {
    cluster.net.heal();
    cluster.net.set_weather(Weather::FAIR);
    for id in MEMBERS {
        cluster.set_faults(id, Faults::default());
        world::set_ahead(id, 0);
        world::set_speed(id, 1_000);
        world::thaw(id);
        let disk = cluster.disk(id);
        let fatal = cluster
            .member(id)
            .is_some_and(|(node, ..)| node.status().fatal.is_some());
        if disk.is_off() || disk.has_failed() || fatal {
            cluster.crash(id);
        }
        if !cluster.runs(id) {
            cluster.boot(id).await;
        }
    }
}
