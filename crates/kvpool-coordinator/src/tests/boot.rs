//! First boot, restart, and what is refused there.

use super::TestCluster;
use crate::CoordinatorError;
use kvpool_client::Kind;
use kvpool_state::records::{Record, ShardState};

fn cluster_ids(records: &[Record]) -> Vec<String> {
    records
        .iter()
        .filter_map(|r| match r {
            Record::Cluster(c) => Some(c.cluster_id.clone()),
            _ => None,
        })
        .collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn three_empty_members_create_one_cluster_and_find_it_again() {
    let mut cluster = TestCluster::new(3, 2);
    cluster.start_member(3).await;
    cluster.start_member(2).await;
    assert_eq!(
        cluster.client_of(&[2]).list(Kind::Cluster).await.unwrap_err().word(),
        "deadline",
        "not without member 1"
    );
    cluster.start_member(1).await;
    cluster.wait_ready().await;

    let client = cluster.client();
    let made = client.list(Kind::Unspecified).await.unwrap();
    let ids = cluster_ids(&made.records);
    assert_eq!(ids.len(), 1);
    assert!(
        made.records
            .iter()
            .any(|r| matches!(r, Record::Pool(p) if p.name == "default" && p.factor == 2))
    );
    for factor in [1, 3] {
        client.configure_pool("other", factor).await.unwrap();
    }
    cluster
        .wait_status("the group is written down", |s| s.members.iter().all(|m| m.name != 0))
        .await;
    let before = client.list(Kind::Unspecified).await.unwrap();

    // All stop in different ways; everything acknowledged is there again (R3).
    cluster.stop(1).await.unwrap();
    cluster.kill(2);
    cluster.kill(3);
    for id in 1..=3 {
        cluster.start_member(id).await;
    }
    cluster.wait_ready().await;
    let after = client.list(Kind::Unspecified).await.unwrap();
    assert_eq!(after.records, before.records);
    assert!(after.revision >= before.revision);
    let status = cluster
        .wait_status("the members see each other", |s| s.members.iter().all(|m| m.reachable))
        .await;
    assert_eq!(status.cluster_id, ids[0]);
    assert!(!status.healthy, "no shard is there");
    assert!(
        status
            .conditions
            .iter()
            .any(|c| c.kind == "unserved" && c.subject == "default"),
        "{status:?}"
    );
    assert!(status.shards.iter().all(|s| s.state() == ShardState::Up));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_single_member_is_a_cluster() {
    let mut cluster = TestCluster::start(1, 1).await;
    cluster.client().configure_pool("default", 2).await.unwrap();
    cluster.stop(1).await.unwrap();
    cluster.start_member(1).await;
    cluster.wait_ready().await;
    let pools = cluster.client().list(Kind::Pool).await.unwrap().records;
    assert!(matches!(&pools[..], [Record::Pool(p)] if p.factor == 2));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bootstrap_creates_with_a_majority() {
    let mut cluster = TestCluster::new(3, 1);
    for id in [2, 3] {
        cluster.start_member_with(id, |c| c.bootstrap = true).await;
    }
    cluster.wait_ready().await;
    // The late one is empty while the cluster exists: it may have lost its disk, and gets a new id.
    cluster.start_member(1).await;
    cluster
        .wait_status("the late one votes", |s| {
            s.members
                .iter()
                .any(|m| m.name == 1 && m.id == 101 && m.reachable && m.role != "learner")
        })
        .await;
    cluster.kill(2);
    cluster.client().configure_pool("default", 3).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn settings_that_cannot_be_are_refused_by_name() {
    let mut cluster = TestCluster::start(3, 1).await;
    cluster.stop(3).await.unwrap();
    // The same disk under another member's id.
    let wrong = cluster.data_dir(3);
    cluster.stop(2).await.unwrap();
    cluster.start_member_with(2, |c| c.data_dir = wrong).await;
    let error = cluster.outcome(2).await.unwrap_err().to_string();
    assert!(error.contains("belongs to member 3"), "{error}");
}

/// An entry that this build can't read is not guessed at.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_entry_that_cannot_be_read_stops_the_member_by_name() {
    let mut cluster = TestCluster::start(1, 1).await;
    let client = cluster.client();
    client.configure_pool("default", 2).await.unwrap();
    let core = cluster.running(1).core.clone();
    let too_new = kvpool_state::command::Envelope {
        format: 9,
        min_reader: 9,
        kind: 1,
        ..Default::default()
    };
    let entry = prost::Message::encode_to_vec(&too_new);
    assert!(core.raft().unwrap().propose(entry.into()).await.is_err());
    let error = cluster.outcome(1).await.unwrap_err();
    assert!(matches!(error, CoordinatorError::Fatal(_)), "{error}");
    assert!(error.to_string().contains("needs reader 9"), "{error}");
}
