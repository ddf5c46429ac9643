//! Three members on real files.

use std::time::Duration;

use crate::common::{Cluster, Direct, Journal, Node, small};
use bytes::Bytes;
use kvpool_raft::{
    Config, Damage, FileDisk, HandleError, InitializeError, LogError, MAX_COMMAND_BYTES, ProposeError, ReadError, Role,
    StartError, Timing,
};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn writes_are_applied_everywhere_and_survive_restarts() {
    let dir = tempfile::tempdir().unwrap();
    let mut cluster = Cluster::create(dir.path(), small).await;
    let mut expected = Vec::new();
    let mut last = 0;
    for i in 0..100u32 {
        let command = format!("command {i}").into_bytes();
        let applied = cluster.propose(&command).await;
        assert!(applied.index > last, "indexes only grow");
        assert_eq!(applied.response, Bytes::from(u64::from(i).to_le_bytes().to_vec()));
        last = applied.index;
        expected.push(command);
    }
    cluster.applied(last).await;
    for member in cluster.members.values() {
        assert_eq!(member.journal.all(), expected);
    }

    let old = cluster.leader().await;
    cluster.stop(old).await;
    last = cluster.propose(b"after the leader").await.index;
    expected.push(b"after the leader".to_vec());
    cluster.boot(old).await;
    cluster.applied(last).await;
    for member in cluster.members.values() {
        assert_eq!(member.journal.all(), expected);
    }

    for id in 1..=3 {
        cluster.stop(id).await;
    }
    let mut cluster = Cluster::start(dir.path(), small).await;
    for member in cluster.members.values() {
        assert!(
            member.node.status().initialized(),
            "a member that was in a group says so from the start"
        );
    }
    last = cluster.propose(b"after all").await.index;
    expected.push(b"after all".to_vec());
    cluster.applied(last).await;
    for member in cluster.members.values() {
        assert_eq!(member.journal.all(), expected);
    }
    for id in 1..=3 {
        cluster.stop(id).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_member_that_missed_more_than_the_log_keeps_gets_a_snapshot() {
    let dir = tempfile::tempdir().unwrap();
    let mut cluster = Cluster::create(dir.path(), small).await;
    cluster.propose(b"first").await;
    let absent = (1..=3)
        .find(|id| !cluster.members[id].node.status().is_leader())
        .unwrap();
    cluster.stop(absent).await;
    let leader = cluster.leader().await;
    let mut last = 0;
    let purged = || cluster.members[&leader].node.status().purged > Some(1000);
    for round in 0..1000u32 {
        // Purging waits while a try to reach the absent member holds on to the entries.
        if round > 100 && purged() {
            break;
        }
        let batch = (0..50u32).map(|i| {
            let node = cluster.members[&leader].node.clone();
            async move { node.propose(Bytes::from(vec![round as u8; 100 + i as usize])).await }
        });
        for applied in futures::future::join_all(batch).await {
            last = last.max(applied.map_or(0, |a| a.index));
        }
    }
    let status = cluster.members[&leader].node.status();
    assert!(status.snapshot.is_some() && purged(), "{status:?}");
    cluster.boot(absent).await;
    let last = last.max(cluster.propose(b"last").await.index);
    cluster.applied(last).await;
    assert!(cluster.members[&absent].node.status().snapshot > Some(0));
    let journals: Vec<_> = cluster.members.values().map(|m| m.journal.all()).collect();
    assert!(journals[0] == journals[1] && journals[1] == journals[2]);

    // And it comes back from its own copy of that snapshot.
    cluster.stop(absent).await;
    cluster.boot(absent).await;
    cluster.applied(last).await;
    assert_eq!(cluster.members[&absent].journal.all(), journals[0]);
    for id in 1..=3 {
        cluster.stop(id).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn refusals_say_why() {
    let dir = tempfile::tempdir().unwrap();
    let mut cluster = Cluster::create(dir.path(), small).await;
    cluster.propose(b"first").await;
    let leader = cluster.leader().await;
    let follower = (1..=3).find(|id| *id != leader).unwrap();
    let node = cluster.members[&follower].node.clone();
    match node.propose(Bytes::from_static(b"x")).await {
        Err(ProposeError::NotLeader { leader: Some(named) }) => {
            assert_eq!((named.id, named.address), (leader, format!("member-{leader}")));
        }
        other => panic!("{other:?}"),
    }
    assert!(matches!(
        node.linearizable_read().await,
        Err(ReadError::NotLeader { leader: Some(_) })
    ));
    let big = Bytes::from(vec![0; MAX_COMMAND_BYTES + 1]);
    let node = cluster.members[&leader].node.clone();
    assert!(matches!(node.propose(big).await, Err(ProposeError::TooLarge { .. })));
    let largest = Bytes::from(vec![1; MAX_COMMAND_BYTES]);
    assert!(node.propose(largest).await.is_ok());
    let burst = futures::future::join_all((0..200).map(|_| node.propose(Bytes::from_static(b"y")))).await;
    let refused = burst
        .iter()
        .filter(|r| matches!(r, Err(ProposeError::Overloaded { .. })))
        .count();
    // The call before may still hold its place for a moment after it was answered.
    let bound = 200 - 64..=200 - 63;
    assert!(bound.contains(&refused), "{refused} refused, not {bound:?}");
    let again = cluster.members[&leader]
        .node
        .initialize([(leader, "x".to_string())].into())
        .await;
    assert_eq!(again, Err(InitializeError::AlreadyInitialized));
    assert!(matches!(
        node.handle(Bytes::from_static(b"GET / HTTP/1.1")).await,
        Err(HandleError::Malformed(_))
    ));
    assert!(matches!(
        node.handle(Bytes::new()).await,
        Err(HandleError::Misdirected { .. })
    ));

    // Without a quorum a leader neither confirms reads nor writes.
    for id in 1..=3 {
        if id != leader {
            cluster.halt(id).await;
        }
    }
    let read = node.linearizable_read().await;
    assert!(
        matches!(read, Err(ReadError::NoQuorum | ReadError::NotLeader { .. })),
        "{read:?}"
    );
    let write = node.propose(Bytes::from_static(b"z")).await;
    assert!(matches!(
        write,
        Err(ProposeError::LeaseExpired | ProposeError::Unknown(_) | ProposeError::NotLeader { .. })
    ));
    cluster.halt(leader).await;
    assert!(matches!(
        node.propose(Bytes::from_static(b"z")).await,
        Err(ProposeError::Fatal(_))
    ));
    assert_eq!(node.status().role, Role::Stopped);
    assert_eq!(node.status().fatal, None, "a shutdown is not a failure");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn leadership_is_transferred_and_reads_see_writes() {
    let dir = tempfile::tempdir().unwrap();
    let mut cluster = Cluster::create(dir.path(), small).await;
    let written = cluster.propose(b"one").await;
    let old = cluster.leader().await;
    let read = cluster.members[&old].node.linearizable_read().await.unwrap();
    assert!(read >= written.index);
    assert!(cluster.members[&old].journal.len() == 1);
    let to = (1..=3).find(|id| *id != old).unwrap();
    cluster.members[&old].node.transfer_leader(to).await.unwrap();
    let mut watch = cluster.members[&to].node.status_watch();
    let lead = tokio::time::timeout(Duration::from_secs(30), watch.wait_for(|s| s.is_leader()));
    assert!(lead.await.is_ok());
    let term = cluster.members[&to].node.status().term;
    let second = cluster.propose(b"two").await;
    assert!(second.term >= term && second.index > written.index);
    for id in 1..=3 {
        cluster.stop(id).await;
    }
}

#[tokio::test]
async fn an_apply_that_refuses_or_panics_stops_the_member() {
    for word in ["poison", "panic"] {
        let dir = tempfile::tempdir().unwrap();
        let disk = FileDisk::open(dir.path()).unwrap();
        let node = Node::start(small(1), disk, Direct::default(), Journal::default())
            .await
            .unwrap();
        node.initialize([(1, "member-1".to_string())].into()).await.unwrap();
        node.propose(Bytes::from_static(b"fine")).await.unwrap();
        let outcome = node.propose(Bytes::from(word)).await;
        assert!(
            matches!(outcome, Err(ProposeError::Unknown(_) | ProposeError::Fatal(_))),
            "{outcome:?}"
        );
        let mut watch = node.status_watch();
        let fatal = watch
            .wait_for(|s| s.fatal.is_some())
            .await
            .unwrap()
            .fatal
            .clone()
            .unwrap();
        assert!(fatal.contains(word), "{fatal}");
        assert_eq!(node.status().role, Role::Stopped);
        node.shutdown().await;
    }
}

#[tokio::test]
async fn a_foreign_or_shared_directory_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let start = async |config: Config| {
        let disk = FileDisk::open(dir.path()).unwrap();
        Node::start(config, disk, Direct::default(), Journal::default()).await
    };
    let node = start(small(1)).await.unwrap();
    assert!(FileDisk::open(dir.path()).is_err(), "the directory is locked");
    node.shutdown().await;
    drop(node);
    let mut elsewhere = small(1);
    elsewhere.cluster_id = "other".to_string();
    for config in [small(2), elsewhere] {
        // The lock goes with the last handle of the member before.
        while FileDisk::open(dir.path()).is_err() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        match start(config).await {
            Err(StartError::Log(LogError::Damage(Damage::Foreign { found_member: 1, .. }))) => {}
            other => panic!("{:?}", other.err()),
        }
    }
    std::fs::remove_file(dir.path().join("marker")).unwrap();
    let started = start(small(1)).await;
    assert!(
        started.is_ok(),
        "an unused log without a marker is a creation that was cut short"
    );
    started.unwrap().shutdown().await;
}

#[test]
fn settings_that_cannot_work_are_refused() {
    let mut config = Config::new("c", 1, Timing::Normal);
    config.keep_applied = 10_000;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    let dir = tempfile::tempdir().unwrap();
    let disk = FileDisk::open(dir.path()).unwrap();
    let started = runtime.block_on(Node::start(config, disk.clone(), Direct::default(), Journal::default()));
    assert!(matches!(started.err(), Some(StartError::Config(_))));
    let unnamed = Config::new("", 1, Timing::Normal);
    let started = runtime.block_on(Node::start(unnamed, disk, Direct::default(), Journal::default()));
    assert!(matches!(started.err(), Some(StartError::Config(_))));
}
