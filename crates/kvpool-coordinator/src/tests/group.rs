//! The group's life: a lost disk is replaced, the group grows and shrinks, and no second cluster comes of two lost disks.

use super::{TestCluster, eventually};
use crate::CoordinatorError;
use kvpool_client::StatusReply;
use kvpool_proto::v1::ScaleCoordinatorsRequest;
use kvpool_proto::v1::cluster_client::ClusterClient;

async fn wipe(cluster: &TestCluster, id: u64) {
    eventually("the disk can be wiped", async || {
        std::fs::remove_dir_all(cluster.data_dir(id)).ok()
    })
    .await;
}

fn raft_id(status: &StatusReply, name: u64) -> u64 {
    status.members.iter().find(|m| m.name == name).map_or(0, |m| m.id)
}

/// Members whose names the state knows, all of them reachable voters.
fn whole(status: &StatusReply, size: usize) -> bool {
    let sound = |m: &&kvpool_proto::v1::MemberStatus| m.name != 0 && m.reachable && m.role != "learner";
    let waits = status.conditions.iter().any(|c| c.kind == "group_waits");
    status.members.len() == size && status.members.iter().filter(sound).count() == size && !waits
}

async fn scale(cluster: &TestCluster, target: u32) {
    eventually("the target is committed", async || {
        let address = cluster.member(1).address.clone();
        let channel = kvpool_client::Trust::Plain
            .endpoint(&address, kvpool_client::Timing::Relaxed)
            .unwrap();
        let mut request = tonic::Request::new(ScaleCoordinatorsRequest {
            target,
            why: "test".into(),
            ..ScaleCoordinatorsRequest::default()
        });
        let token: kvpool_proto::JoinToken = super::cluster::TOKEN.parse().unwrap();
        token.attach(request.metadata_mut());
        let mut client = ClusterClient::new(channel.connect_lazy());
        client.scale_coordinators(request).await.ok()
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_member_that_lost_its_disk_comes_back_under_a_new_id() {
    let mut cluster = TestCluster::start(3, 1).await;
    let before = cluster
        .wait_status("the first boot is written down", |s| whole(s, 3))
        .await;
    assert_eq!([1, 2, 3].map(|n| raft_id(&before, n)), [1, 2, 3]);
    // The leader's own disk, then a follower's: one after the other.
    let leader = cluster.leader().await;
    let follower = (1..=3).find(|id| *id != leader).unwrap();
    for (lost, new) in [(leader, 101), (follower, 102)] {
        cluster.kill(lost);
        wipe(&cluster, lost).await;
        cluster.start_member(lost).await;
        let after = cluster
            .wait_status("the disk is replaced", |s| whole(s, 3) && raft_id(s, lost) == new)
            .await;
        assert!(
            !after.members.iter().any(|m| m.id == lost),
            "the old id is gone: {after:?}"
        );
        cluster.client().configure_pool("default", 2).await.unwrap();
    }
    // And it is a member like any other: it comes back from its disk.
    cluster.stop(leader).await.unwrap();
    cluster.start_member(leader).await;
    cluster.wait_status("it is back", |s| whole(s, 3)).await;
    cluster.kill(follower);
    cluster.client().configure_pool("default", 3).await.unwrap();
}

/// Fault O44: two of three disks are gone. No writes, no second cluster, a clear status.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_lost_disks_of_three_make_no_new_cluster() {
    let mut cluster = TestCluster::start(3, 1).await;
    cluster
        .wait_status("the first boot is written down", |s| whole(s, 3))
        .await;
    for id in [2, 3] {
        cluster.kill(id);
        wipe(&cluster, id).await;
    }
    for id in [2, 3] {
        cluster.start_member(id).await;
    }
    let says = |id: u64| {
        let status = cluster.running(id).handle.status();
        // By the survivor, when it has a leader's duties left, or by nobody: then a quorum is missing.
        let clear = |text: &str| text.contains("too few") || text.contains("quorum");
        let why = |c: &kvpool_proto::v1::Condition| c.kind == "not_a_member" && clear(&c.message);
        status.conditions.into_iter().find(why)
    };
    for id in [2, 3] {
        eventually("the empty ones say why they wait", async || says(id)).await;
        assert!(!cluster.running(id).handle.is_ready());
        assert_eq!(cluster.running(id).handle.status().cluster_id, "");
    }
    let refused = cluster.client_of(&[1]).configure_pool("default", 2).await;
    assert!(refused.is_err(), "{refused:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_group_grows_to_five_and_shrinks_to_three() {
    let mut cluster = TestCluster::new(5, 1);
    let three: Vec<(u64, String)> = (1..=3).map(|id| (id, cluster.member(id).address.clone())).collect();
    for id in 1..=3 {
        let seeds = three.clone();
        cluster.start_member_with(id, |c| c.members = seeds).await;
    }
    cluster
        .wait_status("the first boot is written down", |s| whole(s, 3))
        .await;
    // Nobody wants it yet: it waits and says so.
    cluster.start_member(4).await;
    let idle = eventually("it says that it is idle", async || {
        let status = cluster.running(4).handle.status();
        status.conditions.into_iter().find(|c| c.message.contains("idle"))
    })
    .await;
    assert_eq!(idle.subject, "4");
    scale(&cluster, 5).await;
    cluster.start_member(5).await;
    cluster.wait_status("five vote", |s| whole(s, 5)).await;
    cluster.client().configure_pool("default", 2).await.unwrap();
    scale(&cluster, 3).await;
    let three = cluster.wait_status("three vote", |s| whole(s, 3)).await;
    assert!(
        three.members.iter().all(|m| m.name <= 3),
        "the highest go first: {three:?}"
    );
    cluster.client().configure_pool("default", 3).await.unwrap();
}

/// A disk that was replaced stops by name when it comes back.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_replaced_disk_that_comes_back_is_refused() {
    let mut cluster = TestCluster::start(3, 1).await;
    cluster
        .wait_status("the first boot is written down", |s| whole(s, 3))
        .await;
    cluster.kill(2);
    let aside = cluster.data_dir(9);
    eventually("the disk is set aside", async || {
        std::fs::rename(cluster.data_dir(2), &aside).ok()
    })
    .await;
    cluster.start_member(2).await;
    cluster
        .wait_status("the disk is replaced", |s| whole(s, 3) && raft_id(s, 2) == 101)
        .await;
    cluster.stop(2).await.unwrap();
    cluster.start_member_with(2, |c| c.data_dir = aside).await;
    let Err(CoordinatorError::Boot(why)) = cluster.outcome(2).await else {
        panic!("an old disk came back")
    };
    assert!(why.contains("replaced by id 101"), "{why}");
}

/// One member of an older build: nothing new is proposed, and the status names it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_feature_level_waits_for_the_last_member() {
    let mut cluster = TestCluster::new(3, 1);
    for id in [1, 2] {
        cluster.start_member(id).await;
    }
    cluster.start_member_with(3, |c| c.features = 1).await;
    cluster.wait_ready().await;
    let blocked = cluster
        .wait_status("the old member is named", |s| {
            s.conditions.iter().any(|c| c.message.contains("waits for member id 3"))
        })
        .await;
    assert!(!blocked.healthy);
    cluster.client().configure_pool("default", 2).await.unwrap();
    cluster.stop(3).await.unwrap();
    cluster.start_member(3).await;
    cluster.wait_status("the level is raised", |s| whole(s, 3)).await;
    let core = cluster.running(1).core.clone();
    eventually("it is committed", async || {
        (core.replica.read(|s| s.feature_level()) == 2).then_some(())
    })
    .await;
}
