//! Members that leave, are suspected, fail together, or come and go.

use super::shards::FakeShard;
use super::{TestCluster, eventually};
use kvpool_client::{ClientError, Kind, ShardStatus, StatusReply};
use kvpool_state::command::{Command, ConfigureGroup};
use kvpool_state::records::{Record, ShardRecord, ShardState};
use kvpool_state::{Refusal, command};

async fn settled(cluster: &TestCluster) -> StatusReply {
    cluster
        .wait_status("all slots are where they belong", |s| s.healthy && s.pools[0].settled)
        .await
}

fn of<'a>(status: &'a StatusReply, id: &str) -> &'a ShardStatus {
    status.shard_status.iter().find(|s| s.id == id).unwrap()
}

fn says(status: &StatusReply, kind: &str, subject: &str) -> bool {
    status.conditions.iter().any(|c| c.kind == kind && c.subject == subject)
}

async fn records(cluster: &TestCluster) -> Vec<ShardRecord> {
    let listed = cluster.client().list(Kind::Shard).await.unwrap().records;
    let shard = |r| if let Record::Shard(s) = r { Some(s) } else { None };
    listed.into_iter().filter_map(shard).collect()
}

/// Fault O35: a shard leaves without a slot ever lacking a copy, is forgotten when it is gone, and may come back.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn o35_a_shard_drains_and_is_removed() {
    let cluster = TestCluster::start(3, 2).await;
    let mut shards: Vec<_> = ["a", "b", "c"]
        .map(|id| FakeShard::start(&cluster, id, "boot-1"))
        .into();
    let before = settled(&cluster).await;
    assert_eq!((of(&before, "a").phase.as_str(), of(&before, "a").r#in), ("Up", true));
    let client = cluster.client();
    let early = client.remove_shard("a").await.unwrap_err();
    assert!(
        matches!(&early, ClientError::Refused(r) if r.message.contains("still runs")),
        "{early}"
    );

    let mut map = shards[1].map.clone();
    let watched = tokio::spawn(async move {
        // Every map on the way has two complete copies of every slot.
        let mut least = 2;
        while map.changed().await.is_ok() {
            let held = map.borrow_and_update().clone().unwrap();
            let copies = held
                .ranges
                .iter()
                .map(|r| r.copies.iter().filter(|c| c.in_sync).count());
            least = least.min(copies.min().unwrap_or(0));
            let number = held.shards.iter().find(|s| s.id == "a").unwrap().number;
            if held.ranges.iter().all(|r| r.copies.iter().all(|c| c.shard != number)) {
                break;
            }
        }
        least
    });
    let asked = client.drain_shard("a", true, "test").await.unwrap();
    assert_eq!(asked.refusal(), Refusal::None);
    let status = cluster
        .wait_status("a is Drained", |s| of(s, "a").phase == "Drained" && s.healthy)
        .await;
    let a = of(&status, "a");
    assert_eq!((a.slots, a.r#in), (0, false));
    assert_eq!(watched.await.unwrap(), 2);
    let late = client.remove_shard("a").await.unwrap_err().to_string();
    assert!(late.contains("still runs"), "{late}");

    drop(shards.remove(0));
    let removed = eventually("a is gone", async || client.remove_shard("a").await.ok()).await;
    assert_eq!(removed.refusal(), Refusal::None, "{}", removed.message);
    assert!(records(&cluster).await.iter().all(|s| s.id != "a"));
    assert!(settled(&cluster).await.healthy, "nobody misses it");
    let back = FakeShard::start(&cluster, "a", "boot-2");
    back.incarnation().await;
    let status = cluster
        .wait_status("a takes part again", |s| {
            s.shard_status.iter().any(|x| x.id == "a" && x.primary > 0)
        })
        .await;
    assert!(of(&status, "a").r#in);
}

/// Asked to leave, it stays out over a restart, until that is taken back. Alone, it keeps what nobody takes.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_drain_waits_for_somebody_and_can_be_taken_back() {
    let cluster = TestCluster::start(1, 1).await;
    let first = FakeShard::start(&cluster, "a", "boot-1");
    settled(&cluster).await;
    let client = cluster.client();
    client.drain_shard("a", true, "test").await.unwrap();
    let stuck = cluster
        .wait_status("it says why", |s| says(s, "drain_stuck", "a"))
        .await;
    assert_eq!(
        (of(&stuck, "a").slots, of(&stuck, "a").phase.as_str()),
        (16_384, "Draining")
    );
    let _second = FakeShard::start(&cluster, "b", "boot-1");
    cluster
        .wait_status("b has taken it all", |s| of(s, "a").phase == "Drained" && s.healthy)
        .await;
    drop(first);
    let again = FakeShard::start(&cluster, "a", "boot-2");
    again.incarnation().await;
    let status = cluster
        .wait_status("a is back", |s| s.healthy && s.pools[0].settled)
        .await;
    assert_eq!(
        (of(&status, "a").phase.as_str(), of(&status, "a").slots),
        ("Drained", 0)
    );
    client.drain_shard("a", false, "test").await.unwrap();
    cluster
        .wait_status("it takes part again", |s| s.healthy && of(s, "a").primary == 8_192)
        .await;
}

/// DESIGN section 7: many at once are not declared Down; it ends when they return, or when a person says so.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_mass_failure_stops_declaring_until_they_return_or_a_person_says_so() {
    let cluster = TestCluster::start(1, 2).await;
    let mut shards: Vec<_> = ["a", "b", "c", "d"]
        .map(|id| FakeShard::start(&cluster, id, "boot-1"))
        .into();
    settled(&cluster).await;
    shards.truncate(2);
    let status = cluster
        .wait_status("the brake is held", |s| says(s, "mass_failure", "default"))
        .await;
    let why = status.conditions.iter().find(|c| c.kind == "mass_failure").unwrap();
    assert!(
        why.message.contains("2 shards") && why.message.contains("(50 %"),
        "{}",
        why.message
    );
    assert!(says(&status, "shard_suspect", "c") && says(&status, "shard_suspect", "d"));
    assert!(records(&cluster).await.iter().all(|s| s.state() == ShardState::Up));

    // One returns: the other is one shard, and a single shard is always declared.
    shards.push(FakeShard::start(&cluster, "c", "boot-2"));
    let status = cluster
        .wait_status("d alone is Down", |s| says(s, "shard_down", "d"))
        .await;
    assert!(!says(&status, "mass_failure", "default") && !says(&status, "shard_down", "c"));
    cluster
        .wait_status("three hold everything", |s| {
            s.pools[0].in_sync == 16_384 && s.pools[0].settled
        })
        .await;

    // Another one within the window is held again, until a person says so.
    drop(shards.pop());
    cluster
        .wait_status("the brake is held again", |s| says(s, "mass_failure", "default"))
        .await;
    cluster.client().release_brake("default", 600_000).await.unwrap();
    let status = cluster
        .wait_status("c is Down too", |s| says(s, "shard_down", "c"))
        .await;
    assert!(!says(&status, "mass_failure", "default"));
}

/// What only the others can't reach stands behind in lists and is evicted from none.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_shard_that_others_cannot_reach_is_demoted_and_not_evicted() {
    let cluster = TestCluster::start(1, 2).await;
    let shards: Vec<_> = ["a", "b", "c"]
        .map(|id| FakeShard::start(&cluster, id, "boot-1"))
        .into();
    let before = settled(&cluster).await;
    let incarnation = shards[2].incarnation().await;
    // One that accuses everybody is cut off itself.
    shards[0].accuse(2, &[("b", shards[1].incarnation().await), ("c", incarnation)]);
    shards[1].accuse(2, &[("c", incarnation)]);
    shards[0].accuse(2, &[("c", incarnation)]);
    let status = cluster
        .wait_status("c is demoted", |s| {
            says(s, "shard_suspect", "c") && of(s, "c").primary == 0
        })
        .await;
    let c = of(&status, "c");
    assert_eq!(
        (c.phase.as_str(), c.slots, c.in_sync),
        ("Suspect", of(&before, "c").slots, c.slots)
    );
    assert!(c.reason.contains("2 other shards can't reach it"), "{}", c.reason);
    assert_eq!(records(&cluster).await.iter().filter(|s| s.is_up()).count(), 3);
    shards[0].accuse(2, &[]);
    cluster
        .wait_status("it is first again where it was", |s| {
            s.healthy && of(s, "c").primary == of(&before, "c").primary
        })
        .await;
    assert_eq!(shards[2].incarnation().await, incarnation);
}

/// A shard that comes and goes gets its sessions at once and its slots after a wait.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_flapping_shard_waits_before_it_takes_slots_again() {
    let cluster = TestCluster::start(1, 2).await;
    // Times are counted by a command that members of the first level don't know.
    let level = Command::ConfigureGroup(ConfigureGroup {
        feature_level: command::READER,
        ..ConfigureGroup::default()
    });
    let core = cluster.running(1).core.clone();
    assert_eq!(core.propose(&level, None).await.unwrap().refusal(), Refusal::None);
    let _others: Vec<_> = ["a", "b"].map(|id| FakeShard::start(&cluster, id, "boot-1")).into();
    let mut flapping = FakeShard::start(&cluster, "c", "boot-1");
    settled(&cluster).await;
    for boot in ["boot-2", "boot-3", "boot-4"] {
        drop(flapping);
        flapping = FakeShard::start(&cluster, "c", boot);
        flapping.incarnation().await;
    }
    let status = cluster
        .wait_status("the others hold everything", |s| {
            says(s, "shard_settling", "c") && s.pools[0].in_sync == 16_384 && s.pools[0].settled
        })
        .await;
    let c = of(&status, "c");
    assert_eq!((c.phase.as_str(), c.slots, c.r#in), ("Joining", 0, false));
    cluster
        .wait_status("it has its share again", |s| {
            s.healthy && of(s, "c").primary > 0 && of(s, "c").r#in
        })
        .await;
}
