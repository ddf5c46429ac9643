//! One seed of the control plane: three members, four shards, three clients, two watchers, and a few seconds of whatever
//! can go wrong; then everything must heal.

use std::sync::atomic::Ordering;
use std::time::Duration;

use kvpool_raft::{Config, MemberId};
use kvpool_state::command::CreateCluster;
use kvpool_state::records::{ShardState, SlotCopy};
use kvpool_state::{Command, State};

use crate::cluster::{self, MEMBERS};
use crate::faults::{self, Menu, any_member};
use crate::linear::Verdict;
use crate::mutation::Mutation;
use crate::oracle::Oracle;
use crate::pool::client::{Client, Clients, NAMES};
use crate::pool::leader::POOL;
use crate::pool::replica::Pools;
use crate::pool::shard::{self, SHARDS};
use crate::pool::watcher::{Mirror, Watcher};
use crate::rpc::{self, CALLERS};
use crate::scenario::{Outcome, RECOVERY};
use crate::world;

const CLIENTS: u64 = 3;
const WATCHERS: u64 = 2;
const FAULTS: u64 = 8;
/// The factor that the pool is created with.
const FACTOR: u32 = 2;

type Cluster = cluster::Cluster<Pools>;

fn config(id: MemberId) -> Config {
    let mut config = cluster::config(id);
    // Plans and reports are larger than the register's operations.
    config.log.segment_bytes = 256 << 10;
    config.log.batch_bytes = 64 << 10;
    config.log.cache_bytes = 64 << 10;
    config
}

/// Runs one seed.
pub fn run(seed: u64, mutation: Option<Mutation>) -> Outcome {
    let oracle = Oracle::default();
    let pools = Pools::new(oracle.clone(), mutation);
    let cluster = Cluster::new(pools, oracle.clone(), config, mutation);
    let ((), trace) = world::run(seed, async {
        story(&cluster).await;
        for shard in 0..SHARDS {
            world::kill(shard::place(shard));
        }
        for place in CALLERS..CALLERS + CLIENTS + WATCHERS + 1 {
            world::kill(place);
        }
        cluster.tear_down();
    });
    Outcome::of(&oracle, trace)
}

async fn story(cluster: &Cluster) {
    cluster.create().await;
    if !found(cluster).await {
        cluster.oracle.violation("the cluster was not created".to_owned());
        return;
    }
    let clients = Clients::default();
    for client in 0..CLIENTS {
        let place = CALLERS + client;
        world::spawn_at(place, clients.client(cluster, place).run());
    }
    for watcher in 0..WATCHERS {
        let watcher = Watcher {
            name: format!("w{watcher}"),
            place: CALLERS + CLIENTS + watcher,
            mirror: Mirror::default(),
        };
        world::spawn_at(watcher.place, watcher.run(cluster.clone()));
    }
    let mut lives = 0;
    for shard in 0..SHARDS {
        shard::start(cluster, shard, lives);
    }
    world::spawn_at(world::OUTSIDE, replay(cluster.clone(), clients.clone()));
    let menu = Menu {
        crashes: true,
        disk_errors: true,
    };
    for _ in 0..FAULTS {
        faults::pause(cluster, 100, 700).await;
        if world::chance(300) {
            lives += 1;
            hurt_a_shard(cluster, lives).await;
        } else {
            faults::fault(cluster, menu).await;
        }
    }
    faults::heal(cluster).await;
    clients.stop.store(true, Ordering::Relaxed);
    let mut last = clients.client(cluster, CALLERS + CLIENTS + WATCHERS);
    settle(cluster, &clients, &mut last, "after the faults").await;
    for id in MEMBERS {
        cluster.crash(id);
    }
    for id in MEMBERS {
        cluster.boot(id).await;
    }
    settle(cluster, &clients, &mut last, "after a power loss of all").await;
    judge(cluster, &clients);
}

/// The first entry, as the member that creates a cluster proposes it.
async fn found(cluster: &Cluster) -> bool {
    let create = Command::CreateCluster(CreateCluster {
        cluster_id: "sim".to_owned(),
        pool: POOL.to_owned(),
        factor: FACTOR,
    });
    for _ in 0..200 {
        let create = create.clone();
        let done = rpc::call(
            cluster,
            CALLERS,
            any_member(),
            faults::PATIENCE,
            move |node, _| async move {
                node.propose(create.to_entry(None, world::wall_clock_ms()).into())
                    .await
                    .is_ok()
            },
        );
        if done.await == Some(true) {
            return true;
        }
        world::sleep(Duration::from_millis(50)).await;
    }
    false
}

/// What a deposed leader decided comes again, as from a queue that was stuck (O39): fences must turn it away.
async fn replay(cluster: Cluster, clients: Clients) {
    while !clients.stop.load(Ordering::Relaxed) {
        world::sleep(Duration::from_millis(50 + world::random(400))).await;
        let Some(entry) = cluster.model.rules.any_decided(world::random) else {
            continue;
        };
        cluster.oracle.count("fault: an old decision is proposed again");
        let again = rpc::call(
            &cluster,
            CALLERS,
            any_member(),
            faults::PATIENCE,
            move |node, _| async move { node.propose(entry.into()).await.is_ok() },
        );
        again.await;
    }
}

async fn hurt_a_shard(cluster: &Cluster, life: u64) {
    let shard = world::random(SHARDS);
    let place = shard::place(shard);
    if world::chance(600) {
        cluster.oracle.count("fault: a shard dies and starts again");
        world::kill(place);
        faults::pause(cluster, 10, 3_000).await;
        shard::start(cluster, shard, life);
    } else {
        cluster.oracle.count("fault: a shard is frozen");
        world::freeze(place);
        faults::pause(cluster, 100, 3_000).await;
        world::thaw(place);
    }
}

/// Everything must come to rest in time: a write is taken, members catch up, every slot gets its copies.
async fn settle(cluster: &Cluster, clients: &Clients, client: &mut Client, when: &str) {
    let until = world::now() + RECOVERY.as_nanos() as u64;
    let mut written = false;
    while !written && world::now() < until {
        written = client.write(NAMES[0], u64::from(FACTOR)).await;
    }
    if !written {
        let what = format!("no write was taken within {RECOVERY:?} {when}");
        cluster.oracle.violation(what);
        return;
    }
    let ended = || clients.running.load(Ordering::Relaxed) <= 1;
    if !cluster::wait(RECOVERY, ended).await {
        cluster.oracle.violation(format!("a client did not end {when}"));
    }
    let whole = |state: &State| {
        let up = state.shards().filter(|s| s.state() == ShardState::Up).count();
        // Not what was written last here: a call of another client may have come later.
        let factor = state.pool(POOL).map_or(0, |p| p.factor as usize);
        let complete = |list: &[SlotCopy]| list.len() == factor && list.iter().all(|c| c.in_sync);
        let table = state.slot_table(POOL).map(|(_, table)| table);
        up == SHARDS as usize && table.is_some_and(|table| table.iter().all(|(_, list)| complete(list)))
    };
    let mut revision = 0;
    let rested = || {
        let newest = cluster.model.rules.newest();
        let all = MEMBERS.iter().all(|id| {
            let member = cluster.member(*id);
            member.is_some_and(|(_, view, _)| view.read(|s| s.revision() == newest && whole(s)))
        });
        // For two looks in a row.
        std::mem::replace(&mut revision, newest) == newest && all
    };
    if !cluster::wait(RECOVERY, rested).await {
        let holds: Vec<String> = MEMBERS.iter().map(|id| describe(cluster, *id)).collect();
        cluster
            .oracle
            .violation(format!("not at rest within {RECOVERY:?} {when}: {}", holds.join("; ")));
        return;
    }
    for id in MEMBERS {
        if let Some((_, view, _)) = cluster.member(id) {
            let state = view.read(State::clone);
            cluster.model.rules.holds(id, &state);
        }
    }
    client.read(NAMES[0]).await;
    client.read(NAMES[1]).await;
}

fn describe(cluster: &Cluster, id: MemberId) -> String {
    let Some((node, view, _)) = cluster.member(id) else {
        return format!("member {id} is down");
    };
    view.read(|s| {
        let up: Vec<_> = s
            .shards()
            .filter(|s| s.state() == ShardState::Up)
            .map(|s| &s.id)
            .collect();
        let ranges = s.slot_table(POOL).map(|(epoch, table)| (epoch, table.to_ranges()));
        let filling = ranges.as_ref().map_or(0, |(_, ranges)| {
            ranges.iter().filter(|r| r.copies.iter().any(|c| !c.in_sync)).count()
        });
        format!(
            "member {id} {} in term {} at {} of {}, shards up {up:?}, epoch {:?}, {filling} ranges filling",
            node.status().role.name(),
            node.status().term,
            s.revision(),
            cluster.model.rules.newest(),
            ranges.map(|(epoch, _)| epoch),
        )
    })
}

/// Is there an order of the clients' calls?
fn judge(cluster: &Cluster, clients: &Clients) {
    let histories = clients.histories();
    let initial = |pool: &str| (pool == POOL).then_some(u64::from(FACTOR));
    match histories.check(initial) {
        Verdict::Linearizable => cluster.oracle.count("a history was found linearizable"),
        Verdict::Undecided => cluster.oracle.count("a history was too hard to decide"),
        Verdict::Broken(why) => cluster.oracle.violation(format!("not linearizable: {why}")),
    }
}
