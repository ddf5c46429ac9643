//! Unary calls: forwarding, request ids, quorum, overload.

use super::cluster::TOKEN;
use super::{TestCluster, eventually};
use kvpool_client::{ClientError, JoinToken, Kind};
use kvpool_proto::Timing;
use kvpool_proto::meta::{FORWARDED, Reason, Refused};
use kvpool_proto::v1::cluster_client::ClusterClient;
use kvpool_proto::v1::{ConfigurePoolRequest, ListRequest};
use kvpool_state::Refusal;
use kvpool_state::command::{Command, ConfigurePool};
use kvpool_state::records::Record;
use tonic::Request;
use tonic::transport::Channel;

pub(super) fn raw(address: &str) -> ClusterClient<Channel> {
    ClusterClient::new(
        kvpool_client::Trust::Plain
            .endpoint(address, Timing::Relaxed)
            .unwrap()
            .connect_lazy(),
    )
}

pub(super) fn with_token<T>(message: T) -> Request<T> {
    let mut request = Request::new(message);
    TOKEN.parse::<JoinToken>().unwrap().attach(request.metadata_mut());
    request
}

fn factor_of(records: &[Record], pool: &str) -> Option<u32> {
    records.iter().find_map(|r| match r {
        Record::Pool(p) if p.name == pool => Some(p.factor),
        _ => None,
    })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn followers_forward_once_and_reads_see_every_write() {
    let cluster = TestCluster::start(3, 2).await;
    let leader = cluster.leader().await;
    let followers: Vec<u64> = (1..=3).filter(|id| *id != leader).collect();
    let (a, b) = (cluster.client_of(&followers[..1]), cluster.client_of(&followers[1..]));
    for factor in [1, 2, 3, 4, 1, 2] {
        let written = a.configure_pool("p", factor).await.unwrap();
        assert_eq!(written.refusal(), Refusal::None);
        let read = b.list(Kind::Pool).await.unwrap();
        assert_eq!(factor_of(&read.records, "p"), Some(factor), "R2");
        assert!(read.revision >= written.revision);
    }
    // A forwarded call that reaches a follower is not forwarded again.
    let mut request = with_token(ListRequest { kind: 0 });
    request.metadata_mut().insert(FORWARDED, "1".parse().unwrap());
    let status = raw(&cluster.member(followers[0]).address)
        .list(request)
        .await
        .unwrap_err();
    let refused = Refused::from_status(&status).unwrap();
    assert_eq!(refused.reason, Reason::NotLeader);
    assert_eq!(refused.leader.as_deref(), Some(cluster.member(leader).address.as_str()));
    let refusal = a.configure_pool("p", 9).await.unwrap();
    assert_eq!(refusal.refusal(), Refusal::Invalid, "{}", refusal.message);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_repeated_request_id_is_told_from_a_new_write() {
    let cluster = TestCluster::start(3, 2).await;
    let id = cluster.client().request_id();
    let write = |request_id, factor| ConfigurePoolRequest {
        request_id: Some(request_id),
        pool: "p".into(),
        factor,
    };
    let mut answers = Vec::new();
    for member in &cluster.members {
        let request = with_token(write(id.clone(), 3));
        answers.push(raw(&member.address).configure_pool(request).await.unwrap().into_inner());
    }
    assert!(answers.iter().all(|a| *a == answers[0]), "{answers:?}");
    let old = kvpool_state::records::RequestId { created_at_ms: 1, ..id };
    let request = with_token(write(old, 4));
    let expired = raw(&cluster.members[0].address)
        .configure_pool(request)
        .await
        .unwrap()
        .into_inner();
    assert_eq!(expired.refusal(), Refusal::RequestExpired);
    let pools = cluster.client().list(Kind::Pool).await.unwrap().records;
    assert_eq!(factor_of(&pools, "p"), Some(3));
}

/// Fault O17: without a quorum control calls fail fast and by name, and all is normal when it returns.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn o17_no_quorum_is_a_fast_and_distinct_error() {
    let mut cluster = TestCluster::start(3, 2).await;
    let client = cluster.client();
    let leader = cluster.leader().await;
    let others: Vec<u64> = (1..=3).filter(|id| *id != leader).collect();
    cluster.kill(leader);
    cluster.kill(others[0]);
    eventually("the client is told", async || {
        matches!(client.configure_pool("p", 1).await, Err(ClientError::NoQuorum(_))).then_some(())
    })
    .await;
    // Once that is known, the next call fails without waiting for its deadline.
    let error = client.list(Kind::Pool).await.unwrap_err();
    assert_eq!(error.word(), "no_quorum", "{error}");
    let status = client.status().await.unwrap();
    assert!(!status.healthy && status.leader_id == 0);
    assert!(status.conditions.iter().any(|c| c.kind == "no_quorum"), "{status:?}");
    let handle = &cluster.running(others[1]).handle;
    eventually("it is not ready", async || (!handle.is_ready()).then_some(())).await;

    cluster.start_member(others[0]).await;
    cluster.wait_ready().await;
    client.configure_pool("p", 2).await.unwrap();
    let status = cluster.wait_status("the dead member is named", |s| {
        s.conditions
            .iter()
            .any(|c| c.kind == "member_unreachable" && c.subject == leader.to_string())
    });
    assert!(status.await.leader_id != 0);
    cluster.start_member(leader).await;
    cluster.wait_ready().await;
    let gone = |s: &kvpool_client::StatusReply| !s.conditions.iter().any(|c| c.kind.starts_with("member"));
    cluster.wait_status("everybody is reachable", gone).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_leader_refuses_what_is_beyond_its_bound() {
    let cluster = TestCluster::start(3, 2).await;
    let core = cluster.running(cluster.leader().await).core.clone();
    let propose = |i: usize| {
        let core = core.clone();
        let pool = ConfigurePool {
            pool: format!("p{}", i % 3),
            factor: 1 + i as u32 % 4,
        };
        async move { core.propose(&Command::ConfigurePool(pool), None).await }
    };
    let outcomes = futures::future::join_all((0..4_000).map(propose)).await;
    let refused: Vec<_> = outcomes.into_iter().filter_map(Result::err).collect();
    assert!(
        refused.iter().all(|r| r.reason == Reason::Overload),
        "{:?}",
        refused.iter().find(|r| r.reason != Reason::Overload)
    );
    assert!(refused.len() >= 1_000, "{} were refused", refused.len());
    assert!(refused.iter().all(|r| r.retry_after.is_some()));
    cluster.client().configure_pool("p0", 2).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_wrong_or_missing_token_is_refused_everywhere() {
    let cluster = TestCluster::start(1, 1).await;
    let address = cluster.members[0].address.clone();
    let status = raw(&address).list(ListRequest { kind: 0 }).await.unwrap_err();
    assert_eq!(Refused::from_status(&status).unwrap().reason, Reason::JoinToken);
    let config = kvpool_client::ClientConfig {
        endpoints: vec![address.clone()],
        join_token: "another secret".parse().unwrap(),
        trust: kvpool_client::Trust::Plain,
        timing: Timing::Relaxed,
    };
    let wrong = kvpool_client::Client::new(config);
    for error in [
        wrong.status().await.unwrap_err(),
        wrong.configure_pool("p", 1).await.unwrap_err(),
    ] {
        assert_eq!(error.word(), "join_token");
        assert!(!error.to_string().contains("secret"), "{error}");
    }
    let channel = kvpool_client::Trust::Plain
        .endpoint(&address, Timing::Relaxed)
        .unwrap()
        .connect_lazy();
    let hello = kvpool_proto::v1::MemberHello {
        from: 2,
        to: 1,
        cluster_id: String::new(),
    };
    let mut members = kvpool_proto::v1::members_client::MembersClient::new(channel);
    let status = members.hello(hello.clone()).await.unwrap_err();
    assert_eq!(Refused::from_status(&status).unwrap().reason, Reason::JoinToken);
    let foreign = kvpool_proto::v1::MemberHello {
        cluster_id: "another".into(),
        ..hello
    };
    let status = members.hello(with_token(foreign)).await.unwrap_err();
    assert_eq!(Refused::from_status(&status).unwrap().reason, Reason::ClusterId);
}
