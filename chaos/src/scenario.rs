//! One seed: three members, three clients, and a few seconds of whatever can go wrong.

use std::collections::BTreeSet;
use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use kvpool_raft::{AsyncRuntime, MemberId, ProposeError};

use crate::cluster::{Cluster, MEMBERS, Sabotage};
use crate::disk::Faults;
use crate::net::Weather;
use crate::oracle::Counts;
use crate::register::command;
use crate::runtime::Sim;
use crate::world::{self, Trace};

const CLIENTS: u64 = 3;
/// How long a client waits for one call.
const PATIENCE: Duration = Duration::from_millis(1_500);
/// How long a healed group may take to serve again.
const RECOVERY: Duration = Duration::from_secs(30);
/// Votes on the way when a member is cut off have run out after this.
const VOTES_RUN_OUT: Duration = Duration::from_millis(400);

/// What a run of one seed showed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Outcome {
    /// What must not have been seen, and when.
    pub violations: Vec<String>,
    /// What happened.
    pub counts: Counts,
    /// Every step of it as a hash.
    pub trace: Trace,
}

/// Which faults a run may use.
#[derive(Debug, Clone, Copy)]
pub struct Plan {
    /// Faults one after the other.
    pub faults: u64,
    /// Power losses and crashes at a disk operation.
    pub crashes: bool,
    /// Disks that fail an operation.
    pub disk_errors: bool,
    /// What is broken on purpose.
    pub sabotage: Sabotage,
    /// Settings of the members.
    pub config: fn(MemberId) -> kvpool_raft::Config,
    /// Longest pause of a client between two calls.
    pub pause: Duration,
}

impl Default for Plan {
    fn default() -> Self {
        Plan {
            faults: 8,
            crashes: true,
            disk_errors: true,
            sabotage: Sabotage::default(),
            config: crate::cluster::config,
            pause: Duration::from_millis(60),
        }
    }
}

/// Runs one seed.
pub fn run(seed: u64, plan: Plan) -> Outcome {
    let cluster = Cluster::new(plan.config, plan.sabotage);
    let oracle = cluster.oracle.clone();
    let ((), trace) = world::run(seed, async {
        story(&cluster, plan).await;
        cluster.tear_down();
    });
    let (mut violations, counts) = oracle.verdict();
    violations.extend(
        trace
            .panics
            .iter()
            .map(|(place, panic)| format!("member {place} panicked: {panic}")),
    );
    Outcome {
        violations,
        counts,
        trace,
    }
}

async fn story(cluster: &Cluster, plan: Plan) {
    cluster.create().await;
    let stop = Arc::new(AtomicBool::new(false));
    let operations = Arc::new(AtomicU64::new(1));
    for _ in 0..CLIENTS {
        let (cluster, stop, operations) = (cluster.clone(), stop.clone(), operations.clone());
        world::spawn_at(world::OUTSIDE, client(cluster, stop, operations, plan.pause));
    }
    for _ in 0..plan.faults {
        pause(cluster, 100, 500).await;
        fault(cluster, plan).await;
    }
    heal(cluster).await;
    stop.store(true, Ordering::Relaxed);
    settle(cluster, &operations, "after the faults").await;
    if plan.crashes {
        for id in MEMBERS {
            cluster.crash(id);
        }
        for id in MEMBERS {
            cluster.boot(id).await;
        }
        settle(cluster, &operations, "after a crash of all").await;
    }
}

/// Waits a random time in milliseconds, meanwhile noticing members whose disk took them down.
async fn pause(cluster: &Cluster, least: u64, most: u64) {
    let until = world::now() + (least + world::random(most - least)) * 1_000_000;
    while world::now() < until {
        world::sleep(Duration::from_millis(20)).await;
        reap(cluster).await;
    }
}

/// Ends the processes of failed disks, and boots what is down with some probability.
async fn reap(cluster: &Cluster) {
    for id in MEMBERS {
        let disk = cluster.disk(id);
        if cluster.runs(id) {
            // A process with a failed disk exits; its supervisor starts it again.
            if disk.is_off() || disk.has_failed() {
                cluster.crash(id);
            }
        } else if world::chance(60) {
            cluster.boot(id).await;
        }
    }
}

fn any_member() -> MemberId {
    MEMBERS[world::random(MEMBERS.len() as u64) as usize]
}

fn others(id: MemberId) -> impl Iterator<Item = MemberId> {
    MEMBERS.into_iter().filter(move |other| *other != id)
}

async fn fault(cluster: &Cluster, plan: Plan) {
    match world::random(11) {
        0 if plan.crashes => cluster.crash(any_member()),
        1 if plan.crashes => MEMBERS.into_iter().for_each(|id| cluster.crash(id)),
        2 if plan.crashes => {
            let crash_after = Some(world::random(40));
            set_faults(
                cluster,
                plan,
                Faults {
                    crash_after,
                    ..Faults::default()
                },
            );
        }
        3 if plan.disk_errors => {
            let fail_after = Some(world::random(40));
            set_faults(
                cluster,
                plan,
                Faults {
                    fail_after,
                    ..Faults::default()
                },
            );
        }
        4 | 5 => isolate(cluster).await,
        6 => {
            let from = any_member();
            for to in others(from).filter(|_| world::chance(600)) {
                cluster.net.cut(from, to);
            }
            pause(cluster, 200, 1_500).await;
            cluster.net.heal();
        }
        7 => {
            cluster.net.set_weather(Weather::FOUL);
            pause(cluster, 300, 1_500).await;
            cluster.net.set_weather(Weather::FAIR);
        }
        8 => {
            let id = any_member();
            // One that is down would be booted frozen, and whoever boots it would wait for ever.
            if !cluster.runs(id) {
                return;
            }
            world::freeze(id);
            pause(cluster, 100, 1_500).await;
            world::thaw(id);
        }
        9 => {
            if let Some((node, ..)) = cluster.member(any_member()) {
                let to = any_member();
                // Only a leader heeds it.
                drop(within(node.transfer_leader(to)).await);
            }
        }
        _ => {
            let (one, other) = (any_member(), any_member());
            cluster.net.cut(one, other);
            cluster.net.cut(other, one);
            pause(cluster, 200, 1_500).await;
            cluster.net.heal();
        }
    }
}

fn set_faults(cluster: &Cluster, plan: Plan, faults: Faults) {
    let faults = Faults {
        lying: plan.sabotage.lying_disks,
        ..faults
    };
    cluster.disk(any_member()).set_faults(faults);
}

/// Cuts one member off and checks that it does not raise its term.
async fn isolate(cluster: &Cluster) {
    let id = any_member();
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
    cluster.net.heal();
}

async fn heal(cluster: &Cluster) {
    cluster.net.heal();
    cluster.net.set_weather(Weather::FAIR);
    for id in MEMBERS {
        let faults = Faults {
            lying: cluster.lies(),
            ..Faults::default()
        };
        cluster.disk(id).set_faults(faults);
        world::thaw(id);
        if cluster.disk(id).is_off() || cluster.disk(id).has_failed() {
            cluster.crash(id);
        }
        if !cluster.runs(id) {
            cluster.boot(id).await;
        }
    }
}

/// Gives up on a call after the patience of a client.
async fn within<T: Send>(call: impl Future<Output = T> + Send) -> Option<T> {
    Sim::timeout(PATIENCE, call).await.ok()
}

/// Writes once more and checks that all members hold everything.
async fn settle(cluster: &Cluster, operations: &AtomicU64, when: &str) {
    let until = world::now() + RECOVERY.as_nanos() as u64;
    let mut written = None;
    while written.is_none() && world::now() < until {
        for id in MEMBERS {
            written = written.or(write(cluster, id, operations).await);
        }
        world::sleep(Duration::from_millis(50)).await;
    }
    let Some(index) = written else {
        cluster
            .oracle
            .violation(format!("no write was taken within {RECOVERY:?} {when}"));
        return;
    };
    let caught_up = || {
        MEMBERS.iter().all(|id| {
            let view = cluster.member(*id).map(|(_, view, _)| view.get());
            view.is_some_and(|h| h.applied.last().is_some_and(|(last, _)| *last >= index))
        })
    };
    if !Cluster::wait(RECOVERY, caught_up).await {
        let behind: Vec<_> = MEMBERS
            .iter()
            .map(|id| cluster.member(*id).map(|m| m.0.status()))
            .collect();
        cluster
            .oracle
            .violation(format!("a member did not catch up to {index} {when}: {behind:?}"));
        return;
    }
    // Unknown outcomes of clients may still come in; only what is equal everywhere is compared.
    let holds: Vec<_> = MEMBERS
        .iter()
        .filter_map(|id| Some((*id, cluster.member(*id)?.1.get())))
        .collect();
    let lengths: BTreeSet<usize> = holds.iter().map(|(_, h)| h.applied.len()).collect();
    if lengths.len() == 1 {
        for (id, history) in &holds {
            cluster.oracle.at_rest(*id, history);
        }
    } else {
        cluster
            .oracle
            .violation(format!("members at rest hold {lengths:?} operations {when}"));
    }
}

/// One write through one member; returns its index if it was acknowledged.
async fn write(cluster: &Cluster, id: MemberId, operations: &AtomicU64) -> Option<u64> {
    let (node, ..) = cluster.member(id)?;
    let operation = operations.fetch_add(1, Ordering::Relaxed);
    let mark = cluster.oracle.begin();
    let padding = world::random(if world::chance(20) { 1_500 } else { 120 }) as usize;
    match within(node.propose(command(operation, padding))).await {
        Some(Ok(applied)) => {
            cluster
                .oracle
                .acknowledged(mark, id, applied.term, applied.index, operation);
            return Some(applied.index);
        }
        Some(Err(ProposeError::Unknown(_) | ProposeError::Fatal(_))) | None => cluster.oracle.unknown(),
        Some(Err(_)) => cluster.oracle.refused(operation),
    }
    None
}

/// One linearizable read through one member.
async fn read(cluster: &Cluster, id: MemberId) {
    let Some((node, view, _)) = cluster.member(id) else {
        return;
    };
    let mark = cluster.oracle.begin();
    if cluster.reads_anywhere() {
        cluster.oracle.read(mark, id, 0, &view.get());
    } else if let Some(Ok(index)) = within(node.linearizable_read()).await {
        cluster.oracle.read(mark, id, index, &view.get());
    }
}

async fn client(cluster: Cluster, stop: Arc<AtomicBool>, operations: Arc<AtomicU64>, pause: Duration) {
    let mut target = any_member();
    while !stop.load(Ordering::Relaxed) {
        if world::chance(700) {
            if write(&cluster, target, &operations).await.is_none() {
                target = any_member();
            }
        } else {
            read(&cluster, target).await;
        }
        world::sleep(Duration::from_micros(1 + world::random(pause.as_micros() as u64))).await;
    }
}
