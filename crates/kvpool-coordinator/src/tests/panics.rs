//! A panic in any actor loses nothing and never takes the leader down.

use super::shards::FakeShard;
use super::{TestCluster, eventually};
use crate::actors::Target;
use kvpool_client::Kind;
use kvpool_state::records::{Record, ShardState};
use std::sync::atomic::Ordering;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_injected_panic_in_any_actor_loses_nothing() {
    let cluster = TestCluster::start(1, 2).await;
    let shards: Vec<_> = ["a", "b"].map(|id| FakeShard::start(&cluster, id, "boot-1")).into();
    cluster
        .wait_status("all slots are where they belong", |s| {
            s.healthy && s.pools[0].settled && s.members.iter().all(|m| m.name != 0)
        })
        .await;
    let incarnations = (shards[0].incarnation().await, shards[1].incarnation().await);
    let before = cluster.client().list(Kind::Unspecified).await.unwrap();
    let leader = cluster.running(1);
    let term = leader.core.status().term;
    let targets = [
        Target::Shard {
            pool: "default".into(),
            shard: "a".into(),
        },
        Target::Node("node-of-a".into()),
        Target::Pool("default".into()),
        Target::NodeSupervisor,
        Target::PoolSupervisor,
        Target::Group,
        Target::Leadership,
    ];
    for target in targets {
        // Enough to raise a condition, not enough for long waits.
        for _ in 0..3 {
            leader.inject(target.clone());
            tokio::task::yield_now().await;
        }
        cluster.wait_status("it is well after a panic", |s| s.healthy).await;
        let after = cluster.client().list(Kind::Unspecified).await.unwrap();
        assert!(after.records == before.records, "after {target:?}");
    }
    assert_eq!(leader.core.status().term, term, "the leader never fell");
    assert_eq!(
        (shards[0].incarnation().await, shards[1].incarnation().await),
        incarnations
    );
    assert!(shards.iter().all(|s| s.clears.load(Ordering::SeqCst) == 1));

    // Every actor still does its work: detection, registration, placement, reports.
    let third = FakeShard::start(&cluster, "c", "boot-1");
    third.incarnation().await;
    // Two at once are a mass failure: nobody is declared Down until a person says so.
    cluster.client().release_brake("default", 600_000).await.unwrap();
    drop(shards);
    eventually("the lost ones are Down", async || {
        let records = cluster.client().list(Kind::Shard).await.ok()?.records;
        let down = records
            .iter()
            .filter(|r| matches!(r, Record::Shard(s) if s.state() == ShardState::Down));
        (down.count() == 2).then_some(())
    })
    .await;
    let status = cluster
        .wait_status("c serves every slot", |s| s.pools[0].under_replicated == 16384)
        .await;
    let why = status.conditions.iter().find(|c| c.kind == "under_replicated").unwrap();
    assert!(
        why.message.contains("fewer nodes are up than copies"),
        "{}",
        why.message
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn repeated_panics_raise_a_condition_and_stay_harmless() {
    let cluster = TestCluster::start(1, 1).await;
    let shard = FakeShard::start(&cluster, "a", "boot-1");
    cluster.wait_status("it serves", |s| s.healthy).await;
    let leader = cluster.running(1);
    let status = cluster.wait_status("the failing actor is named", |s| {
        leader.inject(Target::Pool("default".into()));
        s.conditions.iter().any(|c| c.kind == "actor_failing")
    });
    let status = status.await;
    let condition = status.conditions.iter().find(|c| c.kind == "actor_failing").unwrap();
    assert_eq!(condition.subject, "PoolActor(default)");
    assert!(condition.message.contains("injected"), "{}", condition.message);
    assert!(shard.state.borrow().connected);
    cluster.client().configure_pool("default", 2).await.unwrap();
}
