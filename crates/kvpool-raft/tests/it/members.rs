//! Changes of the membership with members that are killed meanwhile (O47).

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use crate::common::{Cluster, Direct, Node, small};
use bytes::Bytes;
use kvpool_raft::{ChangeError, ChangeRefusal, Config, MemberId, Timing};

/// Small files, and elections of the quick preset: here members are killed on every other step.
fn quick(id: MemberId) -> Config {
    let mut config = small(id);
    config.timing = Timing::Normal;
    config
}

impl Cluster {
    fn voters(&self) -> BTreeSet<MemberId> {
        let leads = self.members.values().map(|m| m.node.status());
        let leads = leads.filter(|s| s.is_leader()).max_by_key(|s| s.term);
        leads.map(|s| s.voters).unwrap_or_default()
    }

    /// Asks whoever leads until `change` is done or found done.
    async fn change<F>(&self, what: &str, done: impl Fn(&kvpool_raft::Status) -> bool, change: impl Fn(Node) -> F)
    where
        F: Future<Output = Result<(), ChangeError>>,
    {
        let mut last = String::new();
        for _ in 0..1500 {
            for member in self.members.values() {
                let status = member.node.status();
                if !status.is_leader() {
                    continue;
                }
                if let Some(target) = status.joint.clone() {
                    last = format!("{:?}", member.node.change_voters(target).await);
                } else if done(&status) && status.membership_committed {
                    return;
                } else {
                    last = format!("{:?}", change(member.node.clone()).await);
                }
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        panic!("{what} was never done: {last}");
    }

    async fn grow(&mut self, id: MemberId) {
        self.boot(id).await;
        let address = format!("member-{id}");
        let add = |node: Node| {
            let address = address.clone();
            async move { node.add_learner(id, address).await }
        };
        self.change("adding a learner", |s| s.members.contains_key(&id), add)
            .await;
    }

    /// Like SIGKILL as far as others see it: nothing is handed over.
    fn kill(&mut self, id: MemberId) {
        self.net.remove(id);
        let member = self.members.remove(&id).unwrap();
        tokio::spawn(async move { member.node.shutdown().await });
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_group_grows_from_one_to_five_and_back_to_three() {
    let dir = tempfile::tempdir().unwrap();
    let mut cluster = Cluster {
        dir: dir.path().to_path_buf(),
        net: Direct::default(),
        members: BTreeMap::new(),
        config: small,
    };
    cluster.boot(1).await;
    let first = [(1, "member-1".to_string())].into();
    cluster.members[&1].node.initialize(first).await.unwrap();
    for (size, joins) in [(3, 2..=3), (5, 4..=5)] {
        for id in joins {
            cluster.grow(id).await;
        }
        let want: BTreeSet<MemberId> = (1..=size).collect();
        let change = |node: Node| {
            let want = want.clone();
            async move { node.change_voters(want).await }
        };
        cluster.change("growing", |s| s.voters == want, change).await;
        cluster.propose(format!("with {size}").as_bytes()).await;
    }
    let leader = cluster.leader().await;
    let refused = cluster.members[&leader].node.remove(leader).await;
    assert_eq!(refused, Err(ChangeRefusal::Leads.into()));
    // Hand over to a member that stays, then shrink.
    let want: BTreeSet<MemberId> = (1..=3).collect();
    let change = |node: Node| {
        let want = want.clone();
        async move {
            if node.status().member_id > 3 {
                let _ = node.transfer_leader(1).await;
            }
            node.change_voters(want).await
        }
    };
    cluster.change("shrinking", |s| s.voters == want, change).await;
    assert_eq!(cluster.voters(), want);
    for id in 4..=5 {
        cluster.stop(id).await;
    }
    let last = cluster.propose(b"three again").await;
    cluster.applied(last.index).await;
    assert!(cluster.members.values().all(|m| m.journal.len() == 3));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_change_that_could_not_be_committed_is_not_proposed() {
    let dir = tempfile::tempdir().unwrap();
    let mut cluster = Cluster::create(dir.path(), quick).await;
    cluster.propose(b"first").await;
    let leader = cluster.leader().await;
    let node = cluster.members[&leader].node.clone();
    let others: Vec<MemberId> = (1..=3).filter(|id| *id != leader).collect();
    node.add_learner(9, "nowhere".to_string()).await.unwrap();
    assert_eq!(
        node.promote(9).await,
        Err(ChangeRefusal::NotCaughtUp(9).into()),
        "it never answered"
    );
    cluster.kill(others[0]);
    // To two voters of which one is dead: it would wait in the joint configuration for ever.
    let two: BTreeSet<MemberId> = [leader, others[0]].into();
    let mut outcome = Ok(());
    for _ in 0..1500 {
        if !node.alive().contains(&others[0]) {
            outcome = node.change_voters(two).await;
            break;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let why = ChangeRefusal::NoMajority {
        which: "new",
        sound: 1,
        of: 2,
    };
    assert_eq!(outcome, Err(why.into()));
    assert_eq!(node.status().joint, None);
    cluster.propose(b"still there").await;
    // Taking the dead one out leaves a majority of two.
    cluster
        .change(
            "removing the dead one",
            |s| s.voters.len() == 2,
            |node| {
                let dead = others[0];
                async move { node.remove(dead).await }
            },
        )
        .await;
    cluster.propose(b"and now").await;
}

/// Fault O47: a member killed, removed, another added, the leader killed in between, 50 rounds of it in random order.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fifty_rounds_of_kill_remove_add_and_kill_the_leader() {
    let seed = std::env::var("KVPOOL_SEED").ok().and_then(|s| s.parse().ok());
    let mut seed: u64 = seed.unwrap_or_else(|| u64::from(std::process::id()));
    println!("KVPOOL_SEED={seed}");
    let mut random = move |below: u64| {
        seed = seed
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (seed >> 33) % below
    };
    let dir = tempfile::tempdir().unwrap();
    let mut cluster = Cluster::create(dir.path(), quick).await;
    let (mut next, mut written) = (4, Vec::new());
    for round in 0..50u32 {
        let command = format!("round {round}").into_bytes();
        cluster.propose(&command).await;
        written.push(command);
        let leader = cluster.leader().await;
        let followers: Vec<MemberId> = cluster.members.keys().copied().filter(|id| *id != leader).collect();
        // The victim's disk is gone with it: its id is never used again.
        let victim = if random(3) == 0 {
            leader
        } else {
            followers[random(2) as usize]
        };
        cluster.kill(victim);
        let new = next;
        next += 1;
        cluster.grow(new).await;
        // Sometimes the leader dies in the middle of the change, and comes back from its disk.
        let mut back = None;
        let want: BTreeSet<MemberId> = cluster.members.keys().copied().collect();
        if random(3) == 0 {
            let leader = cluster.leader().await;
            let node = cluster.members[&leader].node.clone();
            let target = want.clone();
            let half = tokio::spawn(async move { node.change_voters(target).await });
            tokio::time::sleep(Duration::from_millis(random(8))).await;
            cluster.stop(leader).await;
            let _ = half.await;
            cluster.boot(leader).await;
            back = Some(leader);
        }
        let change = |node: Node| {
            let want = want.clone();
            async move { node.change_voters(want).await }
        };
        let what = format!("round {round}: {victim} replaced by {new}, {back:?} restarted");
        cluster
            .change(&what, |s| s.voters == want && s.members.keys().eq(want.iter()), change)
            .await;
    }
    let last = cluster.propose(b"end").await;
    written.push(b"end".to_vec());
    cluster.applied(last.index).await;
    for (id, member) in &cluster.members {
        let applied = member.journal.all();
        // A proposal whose outcome was unknown may stand twice; what was acknowledged is there, in order.
        let mut rest = applied.iter();
        assert!(written.iter().all(|w| rest.any(|a| a == w)), "member {id} lost a write");
        assert!(applied == cluster.members.values().next().unwrap().journal.all());
        assert_eq!(member.node.status().fatal, None);
    }
    let leads = cluster.members.values().filter(|m| m.node.status().is_leader()).count();
    assert_eq!(leads, 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_member_that_moved_is_reached_at_its_new_address() {
    let dir = tempfile::tempdir().unwrap();
    let cluster = Cluster::create(dir.path(), small).await;
    let leader = cluster.leader().await;
    let other = if leader == 1 { 2 } else { 1 };
    let node = cluster.members[&leader].node.clone();
    cluster
        .change(
            "moving",
            |s| s.members[&other] == "elsewhere",
            |node| async move { node.set_address(other, "elsewhere".to_string()).await },
        )
        .await;
    assert_eq!(
        node.set_address(7, "x".to_string()).await,
        Err(ChangeRefusal::NotAMember(7).into())
    );
    assert_eq!(node.status().voters, [1, 2, 3].into());
    let written = node.propose(Bytes::from_static(b"x")).await.unwrap();
    cluster.applied(written.index).await;
}

/// An empty member with a new id has no say before it is a voter: it is in nobody's configuration.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_learner_never_campaigns() {
    let dir = tempfile::tempdir().unwrap();
    let mut cluster = Cluster::create(dir.path(), quick).await;
    cluster.propose(b"first").await;
    cluster.grow(4).await;
    let last = cluster.propose(b"second").await;
    cluster.applied(last.index).await;
    for id in 1..=3 {
        cluster.kill(id);
    }
    // Several elections' worth of silence.
    tokio::time::sleep(Timing::Normal.election_max() * 6).await;
    let status = cluster.members[&4].node.status();
    assert!(
        !status.is_leader() && status.role == kvpool_raft::Role::Learner,
        "{status:?}"
    );
    assert_eq!(status.term, last.term);
}
