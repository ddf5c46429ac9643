//! One seed of the register: three members, three clients, and a few seconds of whatever can go wrong.

use std::collections::{BTreeMap, BTreeSet};
use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use kvpool_raft::{AsyncRuntime, MemberId, ProposeError};

use crate::cluster::{self, MEMBERS};
use crate::faults::{self, Menu, PATIENCE, any_member};
use crate::mutation::Mutation;
use crate::oracle::{Counts, Oracle};
use crate::register::{Registers, command};
use crate::runtime::Sim;
use crate::world::{self, Trace};

const CLIENTS: u64 = 3;
/// How long a healed group may take to serve again.
pub const RECOVERY: Duration = Duration::from_secs(30);

/// What a run of one seed showed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Outcome {
    /// What must not have been seen, and when.
    pub violations: Vec<String>,
    /// What happened to the log.
    pub counts: Counts,
    /// How often each kind of fault and each interesting event came.
    pub coverage: BTreeMap<&'static str, u64>,
    /// Every step of it as a hash.
    pub trace: Trace,
}

impl Outcome {
    /// What `oracle` found in a world that has ended.
    pub fn of(oracle: &Oracle, trace: Trace) -> Outcome {
        let (mut violations, counts) = oracle.verdict();
        violations.extend(
            trace
                .panics
                .iter()
                .map(|(place, panic)| format!("place {place} panicked: {panic}")),
        );
        Outcome {
            violations,
            counts,
            coverage: oracle.coverage(),
            trace,
        }
    }
}

/// What a run is made of.
#[derive(Debug, Clone, Copy)]
pub struct Plan {
    /// Faults one after the other.
    pub faults: u64,
    /// Which faults.
    pub menu: Menu,
    /// What is broken on purpose.
    pub mutation: Option<Mutation>,
    /// Settings of the members.
    pub config: fn(MemberId) -> kvpool_raft::Config,
    /// Longest pause of a client between two calls.
    pub pause: Duration,
}

impl Default for Plan {
    fn default() -> Self {
        Plan {
            faults: 8,
            menu: Menu {
                crashes: true,
                disk_errors: true,
            },
            mutation: None,
            config: cluster::config,
            pause: Duration::from_millis(60),
        }
    }
}

type Cluster = cluster::Cluster<Registers>;

/// Runs one seed.
pub fn run(seed: u64, plan: Plan) -> Outcome {
    let oracle = Oracle::default();
    let cluster = Cluster::new(Registers(oracle.clone()), oracle.clone(), plan.config, plan.mutation);
    let ((), trace) = world::run(seed, async {
        story(&cluster, plan).await;
        cluster.tear_down();
    });
    Outcome::of(&oracle, trace)
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
        faults::pause(cluster, 100, 500).await;
        faults::fault(cluster, plan.menu).await;
    }
    faults::heal(cluster).await;
    stop.store(true, Ordering::Relaxed);
    settle(cluster, &operations, "after the faults").await;
    if plan.menu.crashes {
        for id in MEMBERS {
            cluster.crash(id);
        }
        for id in MEMBERS {
            cluster.boot(id).await;
        }
        settle(cluster, &operations, "after a crash of all").await;
    }
}

/// Gives up on a call to a member after the patience of a client.
async fn within<T: Send>(id: MemberId, call: impl Future<Output = T> + Send) -> Option<T> {
    Sim::timeout(PATIENCE, world::inside(id, call)).await.ok()
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
    if !cluster::wait(RECOVERY, caught_up).await {
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
    match within(id, node.propose(command(operation, padding))).await {
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
    if cluster.mutation == Some(Mutation::ReadsAnywhere) {
        cluster.oracle.read(mark, id, 0, &view.get());
    } else if let Some(Ok(index)) = within(id, node.linearizable_read()).await {
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
