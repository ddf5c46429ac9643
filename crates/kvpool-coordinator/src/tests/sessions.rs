//! Sessions, failure detection, placement: the life of a shard.

use super::calls::with_token;
use super::shards::{FakeShard, hello};
use super::{TestCluster, eventually};
use kvpool_client::{Kind, WatchFilter, WatchItem};
use kvpool_proto::Timing;
use kvpool_proto::meta::{Reason, Refused};
use kvpool_proto::v1::nodes_client::NodesClient;
use kvpool_proto::v1::{self, SessionUp, Welcome, session_down, session_up};
use kvpool_state::records::{Record, ShardRecord, ShardState};
use std::sync::atomic::Ordering;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Status, Streaming};

async fn shard(cluster: &TestCluster, id: &str) -> Option<ShardRecord> {
    let listed = cluster.client().list(Kind::Shard).await.ok()?;
    listed.records.into_iter().find_map(|r| match r {
        Record::Shard(s) if s.id == id => Some(s),
        _ => None,
    })
}

async fn wait_down(cluster: &TestCluster, id: &str) -> ShardRecord {
    eventually("the shard is Down", async || {
        shard(cluster, id).await.filter(|s| s.state() == ShardState::Down)
    })
    .await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn shards_register_fill_fail_and_come_back() {
    let cluster = TestCluster::start(3, 2).await;
    let mut shards: Vec<_> = ["a", "b", "c"]
        .map(|id| FakeShard::start(&cluster, id, "boot-1"))
        .into();
    cluster.wait_status("all slots have two copies", |s| s.healthy).await;
    let before = shards[0].incarnation().await;

    // R11: heartbeats write nothing. Many are exchanged while the log stands still.
    let core = cluster.running(cluster.leader().await).core.clone();
    let log = eventually("the log stands still", async || {
        let at = core.status().last_log;
        let mut contacts = 0;
        for shard in &mut shards {
            for _ in 0..3 {
                shard.state.changed().await.unwrap();
                contacts += 1;
            }
        }
        (core.status().last_log == at && contacts == 9).then_some(at)
    });
    assert!(log.await.is_some());

    // A broken session that is not resumed: Down, out of the map, its slots filled elsewhere.
    let gone = shards.remove(0);
    drop(gone);
    let down = wait_down(&cluster, "a").await;
    assert!(down.reason.starts_with("session broken"), "{}", down.reason);
    let status = cluster
        .wait_status("b and c hold everything", |s| s.pools[0].in_sync == 16384)
        .await;
    assert!(!status.healthy);
    assert!(
        status
            .conditions
            .iter()
            .any(|c| c.kind == "shard_down" && c.subject == "a" && c.since_ms > 0)
    );
    let map = shards[0].map.borrow().clone().unwrap();
    assert!(map.shards.iter().all(|s| s.id != "a"), "{:?}", map.shards);

    // A new process under the same id: a new incarnation, an empty store.
    let back = FakeShard::start(&cluster, "a", "boot-2");
    let after = back.incarnation().await;
    assert!(after > before);
    assert_eq!(back.clears.load(Ordering::SeqCst), 1);
    cluster.wait_status("it is filled again", |s| s.healthy).await;
}

/// Faults O31 and O32: a restart within the grace is a new incarnation at first contact; an idle one stays.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn o31_a_fast_restart_is_a_new_incarnation() {
    let cluster = TestCluster::start(1, 1).await;
    let first = FakeShard::start(&cluster, "a", "boot-1");
    let before = first.incarnation().await;
    cluster.wait_status("it serves", |s| s.healthy).await;
    drop(first);
    let second = FakeShard::start(&cluster, "a", "boot-2");
    let after = second.incarnation().await;
    assert!(after > before);
    let record = shard(&cluster, "a").await.unwrap();
    assert_eq!((record.incarnation, record.boot_id.as_str()), (after, "boot-2"));
    cluster.wait_status("it is filled again", |s| s.healthy).await;
    let map = second.map.borrow().clone().unwrap();
    assert!(map.shards.iter().all(|s| s.incarnation == after));
}

/// Fault O38: the new leader knows everything, and declares nobody dead for having nobody's heartbeats.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn o38_a_leader_change_keeps_shards_up() {
    let mut cluster = TestCluster::start(3, 2).await;
    let shards: Vec<_> = ["a", "b", "c"]
        .map(|id| FakeShard::start(&cluster, id, "boot-1"))
        .into();
    cluster
        .wait_status("all slots are where they belong", |s| s.healthy && s.pools[0].settled)
        .await;
    let mut before = Vec::new();
    for shard in &shards {
        before.push(shard.incarnation().await);
    }
    let listed = eventually("the first boot is written down", async || {
        let listed = cluster.client().list(Kind::Unspecified).await.ok()?;
        let members = listed.records.iter().filter(|r| matches!(r, Record::Member(_))).count();
        let level = |r: &Record| matches!(r, Record::Cluster(c) if c.feature_level == kvpool_state::command::READER);
        (members == 3 && listed.records.iter().any(level)).then_some(listed)
    })
    .await;
    let mut changes = cluster.client().watch(WatchFilter::default(), listed.revision);

    for graceful in [false, true] {
        let leader = cluster.leader().await;
        if graceful {
            cluster.stop(leader).await.unwrap();
        } else {
            cluster.kill(leader);
        }
        let term = cluster.running(cluster.leader().await).core.status().term;
        for shard in &shards {
            shard
                .state
                .clone()
                .wait_for(|s| s.connected && s.term >= term)
                .await
                .unwrap();
        }
        cluster.start_member(leader).await;
        cluster.wait_ready().await;
        cluster.wait_status("all is well again", |s| s.healthy).await;
    }
    let after = cluster.client().list(Kind::Unspecified).await.unwrap();
    assert!(
        after.records == listed.records,
        "{} and {}",
        listed.revision,
        after.revision
    );
    for (shard, before) in shards.iter().zip(before) {
        assert_eq!(shard.incarnation().await, before);
        assert_eq!(shard.clears.load(Ordering::SeqCst), 1);
    }
    // Not even for a moment: nothing has changed but the pool made now.
    cluster.client().configure_pool("end", 1).await.unwrap();
    let Some(WatchItem::Changes { events, .. }) = changes.next().await else {
        panic!("relisted")
    };
    assert!(
        matches!(&events[0].record, Some(Record::Pool(p)) if p.name == "end"),
        "{:?}",
        events[0]
    );
}

/// A session that a test drives by hand.
struct Raw {
    up: mpsc::Sender<SessionUp>,
    down: Streaming<v1::SessionDown>,
}

impl Raw {
    async fn open(address: &str, hello: v1::ShardHello) -> Result<(Raw, Welcome), Refused> {
        let (up, rx) = mpsc::channel(8);
        up.try_send(SessionUp {
            what: Some(session_up::What::Hello(hello)),
        })
        .unwrap();
        let channel = kvpool_client::Trust::Plain
            .endpoint(address, Timing::Relaxed)
            .unwrap()
            .connect_lazy();
        let refused = |s: Status| Refused::from_status(&s).unwrap_or_else(|| panic!("{s}"));
        let opened = NodesClient::new(channel)
            .session(with_token(ReceiverStream::new(rx)))
            .await;
        let mut down = opened.map_err(refused)?.into_inner();
        match down.message().await.map_err(refused)?.unwrap().what {
            Some(session_down::What::Welcome(welcome)) => Ok((Raw { up, down }, welcome)),
            other => panic!("{other:?}"),
        }
    }
}

fn raw_hello(id: &str, boot: &str, incarnation: u64) -> v1::ShardHello {
    let hello = hello(id, "node-1", boot);
    v1::ShardHello {
        cluster_id: String::new(),
        shard: hello.shard,
        pool: hello.pool,
        node: Some(hello.node),
        boot_id: hello.boot_id,
        addresses: Some(hello.addresses),
        capacity_bytes: hello.capacity_bytes,
        incarnation,
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_silent_session_expires_and_an_old_incarnation_is_never_heard_again() {
    let cluster = TestCluster::start(1, 1).await;
    let address = cluster.members[0].address.clone();
    let (mut silent, welcome) = Raw::open(&address, raw_hello("a", "boot-1", 0)).await.unwrap();
    assert_eq!((welcome.heartbeat_ms, welcome.lease_ms), (1_000, 8_000));
    let down = wait_down(&cluster, "a").await;
    assert!(down.reason.starts_with("lease expired"), "{}", down.reason);
    // Its session ends by name, and resuming gives it a new incarnation.
    let status = silent.down.message().await.unwrap_err();
    assert_eq!(Refused::from_status(&status).unwrap().reason, Reason::StaleIncarnation);
    let (_back, again) = Raw::open(&address, raw_hello("a", "boot-1", welcome.incarnation))
        .await
        .unwrap();
    assert!(again.incarnation > welcome.incarnation);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_session_resumes_and_two_processes_do_not_take_turns() {
    let cluster = TestCluster::start(1, 1).await;
    let address = cluster.members[0].address.clone();
    let (first, welcome) = Raw::open(&address, raw_hello("a", "boot-1", 0)).await.unwrap();
    drop(first);
    let (resumed, again) = Raw::open(&address, raw_hello("a", "boot-1", welcome.incarnation))
        .await
        .unwrap();
    assert_eq!(again.incarnation, welcome.incarnation);
    let beat = SessionUp {
        what: Some(session_up::What::Heartbeat(v1::Heartbeat::default())),
    };
    resumed.up.send(beat).await.unwrap();
    let twin = Raw::open(&address, raw_hello("a", "boot-2", 0)).await.err().unwrap();
    assert_eq!(twin.reason, Reason::DuplicateShard);
    drop(resumed);
    eventually("the twin may come when the first is gone", async || {
        Raw::open(&address, raw_hello("a", "boot-2", 0)).await.ok()
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hellos_that_cannot_be_are_refused_by_name() {
    let cluster = TestCluster::start(3, 1).await;
    let leader = cluster.leader().await;
    let address = cluster.member(leader).address.clone();
    let reason = async |hello| Raw::open(&address, hello).await.err().unwrap().reason;
    let foreign = v1::ShardHello {
        cluster_id: "another".into(),
        ..raw_hello("a", "b", 0)
    };
    assert_eq!(reason(foreign).await, Reason::ClusterId);
    let no_pool = v1::ShardHello {
        pool: "nowhere".into(),
        ..raw_hello("a", "b", 0)
    };
    assert_eq!(reason(no_pool).await, Reason::Invalid);
    assert_eq!(
        reason(v1::ShardHello {
            node: None,
            ..raw_hello("a", "b", 0)
        })
        .await,
        Reason::Invalid
    );
    assert_eq!(reason(raw_hello("", "b", 0)).await, Reason::Invalid);
    assert_eq!(reason(raw_hello(&"x".repeat(300), "b", 0)).await, Reason::Invalid);
    let follower = cluster.members.iter().find(|m| m.id != leader).unwrap().address.clone();
    let refused = Raw::open(&follower, raw_hello("a", "b", 0)).await.err().unwrap();
    assert_eq!(refused.reason, Reason::NotLeader);
    assert_eq!(refused.leader, Some(address.clone()));
    assert!(shard(&cluster, "a").await.is_none(), "none of them changed anything");
}
