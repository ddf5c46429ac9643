//! First boot: which cluster an empty member belongs to, and who creates it.
//!
//! Invariants: a cluster is created only when every listed member answers and is empty (with `bootstrap` said on each
//! member of a majority: that majority); a member that has a marker never takes another id; an empty member of a cluster that was created
//! already may be one that lost its disk: it gets a new raft id from the leader, never its old one (see `join`).
//!
//! The member with the lowest id takes a random cluster id and makes it durable; the others, seeing it uninitialized, do
//! the same; then the first one initializes raft. A crash at any point leaves something from which this goes on.

use crate::config::CoordinatorError;
use crate::core::Core;
use kvpool_client::Backoff;
use kvpool_proto::meta::Refused;
use kvpool_proto::v1::members_client::MembersClient;
use kvpool_proto::v1::{MemberHello, MemberHelloReply};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;
use tokio::time::timeout;
use tonic::transport::Channel;
use tonic::{Request, Response, Status};

/// What this member is.
#[derive(Clone, Debug)]
pub(crate) struct Me {
    pub(crate) id: u64,
    pub(crate) bootstrap: bool,
    /// From the marker; empty = none yet.
    pub(crate) cluster_id: String,
}

/// What to do next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    Wait(String),
    /// Make this cluster id durable.
    Adopt(String),
    /// This member shall choose a new cluster id.
    Choose,
    /// Create the cluster: everybody who has to has made the id durable.
    Initialize,
    /// The cluster exists and this member is in it.
    Joined,
    /// The cluster exists and this disk is empty: ask the leader for a new raft id (`join`).
    Join(String),
    /// A person must look.
    Refuse(String),
}

/// Decides from what the other members answered.
pub(crate) fn decide(me: &Me, seeds: &BTreeSet<u64>, replies: &BTreeMap<u64, MemberHelloReply>) -> Step {
    for (id, reply) in replies {
        if reply.member_id != *id {
            return Step::Refuse(format!(
                "member {} answers at the address of member {id}",
                reply.member_id
            ));
        }
        // A cluster that exists is not made of lists any more.
        if !reply.initialized && !reply.seeds.iter().eq(seeds.iter()) {
            return Step::Refuse(format!(
                "member {id} was started with members {:?}, this one with {seeds:?}",
                reply.seeds
            ));
        }
    }
    let mut ids: BTreeSet<&str> = replies
        .values()
        .map(|r| r.cluster_id.as_str())
        .filter(|c| !c.is_empty())
        .collect();
    if !me.cluster_id.is_empty() {
        ids.insert(&me.cluster_id);
    }
    if ids.len() > 1 {
        return Step::Refuse(format!("cluster_id: the members belong to different clusters: {ids:?}"));
    }
    let created = replies.values().any(|r| r.initialized);
    let missing: Vec<u64> = seeds
        .iter()
        .filter(|s| **s != me.id && !replies.contains_key(s))
        .copied()
        .collect();
    let majority = (replies.len() + 1) * 2 > seeds.len();
    let enough = missing.is_empty() || me.bootstrap && majority;
    let lowest_here = replies.keys().all(|id| *id > me.id);
    let first = seeds.first() == Some(&me.id) || me.bootstrap && lowest_here;
    match ids.first() {
        Some(_) if created && !me.cluster_id.is_empty() => Step::Joined,
        Some(id) if created => Step::Join((*id).to_owned()),
        _ if !enough => Step::Wait(format!("members {missing:?} have not answered")),
        Some(id) if me.cluster_id.is_empty() => Step::Adopt((*id).to_owned()),
        Some(_) if first => {
            let behind: Vec<u64> = replies
                .iter()
                .filter(|(_, r)| r.cluster_id.is_empty())
                .map(|(id, _)| *id)
                .collect();
            let ready = replies.len() - behind.len() + 1;
            if behind.is_empty() || me.bootstrap && ready * 2 > seeds.len() {
                Step::Initialize
            } else {
                Step::Wait(format!("members {behind:?} have not taken the cluster id yet"))
            }
        }
        None if first => Step::Choose,
        _ => Step::Wait("the cluster has not been created yet".into()),
    }
}

/// Asks the others until the next step is not to wait.
pub(crate) async fn next_step(core: &Core, me: &Me) -> Result<Step, CoordinatorError> {
    let seeds: BTreeSet<u64> = core.seeds.keys().copied().collect();
    let mut backoff = Backoff::new(Duration::from_millis(30), Duration::from_millis(500));
    let mut said = String::new();
    loop {
        let (replies, refusals) = ask_all(core, me).await;
        match decide(me, &seeds, &replies) {
            Step::Wait(why) => {
                let why = if refusals.is_empty() {
                    why
                } else {
                    format!("{why} ({})", refusals.join("; "))
                };
                if why != said {
                    tracing::info!(why, "waiting at first boot");
                    said = why;
                }
            }
            Step::Refuse(why) => return Err(CoordinatorError::Boot(why)),
            step => return Ok(step),
        }
        tokio::time::sleep(backoff.next_wait()).await;
    }
}

async fn ask_all(core: &Core, me: &Me) -> (BTreeMap<u64, MemberHelloReply>, Vec<String>) {
    let others = core.seeds.iter().filter(|(id, _)| **id != me.id);
    let asked = others.map(|(id, address)| async move { (*id, hello(core, &me.cluster_id, *id, address).await) });
    let mut replies = BTreeMap::new();
    let mut refusals = Vec::new();
    for (id, reply) in futures::future::join_all(asked).await {
        match reply {
            Ok(reply) => {
                replies.insert(id, reply);
            }
            Err(Some(refused)) => {
                refusals.push(format!(
                    "member {id} refuses: {}: {}",
                    refused.reason.word(),
                    refused.message
                ));
            }
            Err(None) => {}
        }
    }
    (replies, refusals)
}

/// `Err(None)`: not reached.
pub(crate) async fn hello(
    core: &Core,
    cluster_id: &str,
    to: u64,
    address: &str,
) -> Result<MemberHelloReply, Option<Refused>> {
    let hello = MemberHello {
        from: core.name,
        to,
        cluster_id: cluster_id.to_owned(),
    };
    ask_member(core, address, hello, |mut c, r| async move { c.hello(r).await }).await
}

/// One call to another member. `Err(None)`: not reached.
pub(crate) async fn ask_member<M, T, F>(
    core: &Core,
    address: &str,
    message: M,
    call: impl FnOnce(MembersClient<Channel>, Request<M>) -> F,
) -> Result<T, Option<Refused>>
where
    F: Future<Output = Result<Response<T>, Status>>,
{
    let endpoint = core.trust.endpoint(address, core.timing).map_err(|_| None)?;
    let mut request = Request::new(message);
    core.token.attach(request.metadata_mut());
    let client = MembersClient::new(endpoint.connect_lazy());
    match timeout(core.timing.attempt(), call(client, request)).await {
        Ok(Ok(reply)) => Ok(reply.into_inner()),
        Ok(Err(status)) => Err(Refused::from_status(&status)),
        Err(_) => Err(None),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn me(id: u64, cluster_id: &str) -> Me {
        Me {
            id,
            bootstrap: false,
            cluster_id: cluster_id.into(),
        }
    }

    fn reply(id: u64, cluster_id: &str, initialized: bool) -> (u64, MemberHelloReply) {
        let cluster_id = cluster_id.into();
        (
            id,
            MemberHelloReply {
                member_id: id,
                cluster_id,
                initialized,
                seeds: vec![1, 2, 3],
                ..MemberHelloReply::default()
            },
        )
    }

    fn step(me: &Me, replies: &[(u64, MemberHelloReply)]) -> Step {
        decide(me, &BTreeSet::from([1, 2, 3]), &replies.iter().cloned().collect())
    }

    #[test]
    fn the_lowest_chooses_when_all_are_empty_and_answer() {
        assert!(matches!(step(&me(1, ""), &[reply(2, "", false)]), Step::Wait(_)));
        let all = [reply(2, "", false), reply(3, "", false)];
        assert_eq!(step(&me(1, ""), &all), Step::Choose);
        assert!(matches!(
            step(&me(2, ""), &[reply(1, "", false), reply(3, "", false)]),
            Step::Wait(_)
        ));
        assert_eq!(
            step(&me(2, ""), &[reply(1, "X", false), reply(3, "", false)]),
            Step::Adopt("X".into())
        );
        assert!(
            matches!(step(&me(2, ""), &[reply(1, "X", false)]), Step::Wait(_)),
            "3 might belong elsewhere"
        );
    }

    #[test]
    fn it_initializes_when_all_have_the_id() {
        assert!(matches!(
            step(&me(1, "X"), &[reply(2, "X", false), reply(3, "", false)]),
            Step::Wait(_)
        ));
        let all = [reply(2, "X", false), reply(3, "X", false)];
        assert_eq!(step(&me(1, "X"), &all), Step::Initialize);
        assert!(matches!(
            step(&me(2, "X"), &[reply(1, "X", false), reply(3, "X", false)]),
            Step::Wait(_)
        ));
        assert_eq!(step(&me(2, "X"), &[reply(1, "X", true)]), Step::Joined);
    }

    #[test]
    fn a_crash_of_the_lowest_goes_on_with_the_same_id() {
        let left = [reply(2, "X", false), reply(3, "", false)];
        assert_eq!(step(&me(1, ""), &left), Step::Adopt("X".into()));
    }

    #[test]
    fn an_empty_member_asks_to_join_what_exists() {
        for bootstrap in [false, true] {
            let mut new = me(3, "");
            new.bootstrap = bootstrap;
            assert_eq!(step(&new, &[reply(1, "X", true)]), Step::Join("X".into()));
            // Two of three disks are lost: the one that is left says that the cluster exists.
            let answers = [reply(1, "X", true), reply(2, "", false)];
            assert_eq!(step(&new, &answers), Step::Join("X".into()));
        }
    }

    #[test]
    fn mismatches_are_refused_by_name() {
        let Step::Refuse(why) = step(&me(1, "X"), &[reply(2, "Y", false)]) else {
            panic!()
        };
        assert!(
            why.contains("cluster_id") && why.contains('X') && why.contains('Y'),
            "{why}"
        );
        let wrong = (
            2,
            MemberHelloReply {
                member_id: 3,
                ..reply(2, "", false).1
            },
        );
        assert!(matches!(step(&me(1, ""), &[wrong]), Step::Refuse(_)));
        let other = (
            2,
            MemberHelloReply {
                seeds: vec![1, 2],
                ..reply(2, "", false).1
            },
        );
        assert!(matches!(step(&me(1, ""), &[other]), Step::Refuse(_)));
    }

    #[test]
    fn bootstrap_needs_a_majority_only() {
        let mut first = me(2, "");
        first.bootstrap = true;
        assert!(matches!(step(&first, &[]), Step::Wait(_)));
        assert_eq!(step(&first, &[reply(3, "", false)]), Step::Choose);
        first.cluster_id = "X".into();
        assert!(matches!(step(&first, &[reply(3, "", false)]), Step::Wait(_)));
        assert_eq!(step(&first, &[reply(3, "X", false)]), Step::Initialize);
        let mut second = me(3, "");
        assert!(
            matches!(step(&second, &[reply(2, "X", false)]), Step::Wait(_)),
            "nobody said that 3 is new"
        );
        second.bootstrap = true;
        assert!(
            matches!(step(&second, &[reply(2, "", false)]), Step::Wait(_)),
            "2 chooses"
        );
        assert_eq!(step(&second, &[reply(2, "X", false)]), Step::Adopt("X".into()));
        let alone = decide(&me(1, ""), &BTreeSet::from([1]), &BTreeMap::new());
        assert_eq!(alone, Step::Choose);
        assert_eq!(
            decide(&me(1, "X"), &BTreeSet::from([1]), &BTreeMap::new()),
            Step::Initialize
        );
    }
}
