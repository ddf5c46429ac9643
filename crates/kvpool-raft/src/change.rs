//! Changes of the group's membership: learners in, voters changed, members out.
//!
//! Invariants: one change at a time; nothing is proposed that a majority of the old or of the new voters could not
//! commit now (a change to a set with a dead majority would block for ever in the joint configuration); a voter is
//! made only of a member that has the log; a change whose caller went away is carried on to its end by a task of its
//! own. A leader that dies between the two steps leaves a joint configuration: [`Status::joint`] names where it leads,
//! and the next leader asks for that set again.

use std::collections::BTreeSet;
use std::future::Future;
use std::pin::Pin;
use std::time::Duration;

use openraft::async_runtime::{Oneshot, OneshotSender, WatchReceiver};
use openraft::errors::{ClientWriteError, RaftError};
use openraft::raft::Precondition;
use openraft::{AsyncRuntime, BasicNode, ChangeMembers, RaftMetrics};

use crate::config::{MemberId, Timing};
use crate::disk::Disk;
use crate::error::{ChangeError, ChangeRefusal};
use crate::machine::StateMachine;
use crate::node::{RaftNode, leader};
use crate::observe;
use crate::status::Status;
use crate::types::Types;

/// Most voters of a group.
pub const MAX_VOTERS: usize = 7;
/// Entries that a member may lack and still count as one that has the log.
pub const CAUGHT_UP_LAG: u64 = 1_000;

type Changes = ChangeMembers<MemberId, BasicNode>;
type Failure<R> = RaftError<Types<R>, ClientWriteError<Types<R>>>;

/// How long a member may be silent and still count as reachable: several heartbeats, and an election.
pub(crate) fn patience(timing: Timing) -> Duration {
    timing.election_max() * 2
}

/// Refuses what could cost the majority. `alive` are members that answered lately, this one included.
///
/// # Errors
/// The first rule that is broken.
pub fn preflight(now: &Status, alive: &BTreeSet<MemberId>, voters: &BTreeSet<MemberId>) -> Result<(), ChangeRefusal> {
    if !now.is_leader() {
        return Err(ChangeRefusal::NotLeading);
    }
    let finishes = now.joint.as_ref() == Some(voters);
    if !now.membership_committed || now.joint.is_some() && !finishes {
        return Err(ChangeRefusal::InProgress);
    }
    if voters.is_empty() || voters.len() > MAX_VOTERS {
        return Err(ChangeRefusal::Size(voters.len()));
    }
    if let Some(unknown) = voters.iter().find(|id| !now.members.contains_key(id)) {
        return Err(ChangeRefusal::NotAMember(*unknown));
    }
    let sound = |id: &&MemberId| alive.contains(id) && caught_up(now, **id);
    let joins = voters.iter().filter(|id| !now.voters.contains(id));
    if let Some(behind) = joins.clone().find(|id| !sound(id)) {
        return Err(ChangeRefusal::NotCaughtUp(*behind));
    }
    for (which, set) in [("old", &now.voters), ("new", voters)] {
        let sound = set.iter().filter(sound).count();
        // In a joint configuration the voters are those of both sets: a majority of all is a stricter rule, and it must
        // not keep the one way out closed.
        if sound * 2 <= set.len() && !(finishes && which == "old") {
            return Err(ChangeRefusal::NoMajority {
                which,
                sound,
                of: set.len(),
            });
        }
    }
    Ok(())
}

/// True for this member, and for one whose log lacks little of the leader's.
fn caught_up(now: &Status, id: MemberId) -> bool {
    id == now.member_id
        || now
            .followers
            .get(&id)
            .is_some_and(|f| f.matched.is_some() && f.lag <= CAUGHT_UP_LAG)
}

impl<S: StateMachine, D: Disk, R: AsyncRuntime> RaftNode<S, D, R> {
    /// Members that have answered this leader lately, itself included. Empty when it does not lead.
    pub fn alive(&self) -> BTreeSet<MemberId> {
        let metrics = self.inner.raft.metrics().borrow_watched().clone();
        self.heard(&metrics)
    }

    fn heard(&self, metrics: &RaftMetrics<Types<R>>) -> BTreeSet<MemberId> {
        let Some(heartbeats) = &metrics.heartbeat else {
            return BTreeSet::new();
        };
        let now = <Types<R> as openraft::type_config::TypeConfigExt>::now();
        let lately = heartbeats
            .iter()
            .filter(|(_, at)| at.is_some_and(|at| now < *at + self.inner.patience));
        lately.map(|(id, _)| *id).chain([metrics.id]).collect()
    }

    /// Adds a member that receives the log and does not vote. Its id must never have been used by another disk. Known
    /// already: does nothing.
    ///
    /// # Errors
    /// See [`ChangeError`].
    pub async fn add_learner(&self, id: MemberId, address: String) -> Result<(), ChangeError> {
        let nodes = [(id, BasicNode { addr: address })].into();
        self.change(ChangeMembers::AddNodes(nodes), None).await
    }

    /// Tells the group that a member has moved. The member must be the same, with the same disk: messages name the
    /// receiver by id, so a wrong address loses them but does no harm.
    ///
    /// # Errors
    /// See [`ChangeError`].
    pub async fn set_address(&self, id: MemberId, address: String) -> Result<(), ChangeError> {
        if !self.status().members.contains_key(&id) {
            return Err(ChangeRefusal::NotAMember(id).into());
        }
        let nodes = [(id, BasicNode { addr: address })].into();
        self.change(ChangeMembers::SetNodes(nodes), None).await
    }

    /// Makes exactly these members the voters, in one joint change. Former voters leave the group. Also finishes a change
    /// that another leader left half done.
    ///
    /// # Errors
    /// See [`ChangeError`]; a refusal by the preflight has changed nothing.
    pub async fn change_voters(&self, voters: BTreeSet<MemberId>) -> Result<(), ChangeError> {
        self.change(ChangeMembers::ReplaceAllVoters(voters.clone()), Some(voters))
            .await
    }

    /// Makes a learner a voter.
    ///
    /// # Errors
    /// See [`ChangeError`].
    pub async fn promote(&self, id: MemberId) -> Result<(), ChangeError> {
        let mut voters = self.status().voters;
        voters.insert(id);
        self.change_voters(voters).await
    }

    /// Takes a member out of the group, voter or not. The leader must hand over before it can be taken out.
    ///
    /// # Errors
    /// See [`ChangeError`].
    pub async fn remove(&self, id: MemberId) -> Result<(), ChangeError> {
        let mut voters = self.status().voters;
        if voters.remove(&id) {
            return self.change_voters(voters).await;
        }
        self.change(ChangeMembers::RemoveNodes([id].into()), None).await
    }

    async fn change(&self, change: Changes, voters: Option<BTreeSet<MemberId>>) -> Result<(), ChangeError> {
        let inner = &*self.inner;
        let Ok(turn) = inner.changes.clone().try_acquire_owned() else {
            return Err(ChangeRefusal::InProgress.into());
        };
        let metrics = inner.raft.metrics().borrow_watched().clone();
        let now = observe::status::<R>(&metrics);
        // Without other voters asked for, the present ones must be able to commit.
        let voters = voters.unwrap_or_else(|| now.voters.clone());
        if now.is_leader() && !voters.contains(&now.member_id) {
            return Err(ChangeRefusal::Leads.into());
        }
        preflight(&now, &self.heard(&metrics), &voters)?;
        let base = Precondition::LastMembershipLogId {
            last_membership_log_id: *metrics.membership_config.log_id(),
        };
        let raft = inner.raft.clone();
        let (tx, rx) = R::Oneshot::channel();
        // A task of its own: dropped between its two steps the change would stay half done.
        drop(R::spawn(async move {
            let change: Pin<Box<dyn Future<Output = _> + Send>> =
                Box::pin(raft.change_membership_if(change, false, [base]));
            let outcome = change.await.map(drop);
            drop(turn);
            let _ = tx.send(outcome);
        }));
        match R::timeout(inner.wait_bound, rx).await {
            Err(_) => Err(ChangeError::Unknown("no outcome in time".to_string())),
            Ok(Err(_)) => Err(ChangeError::Unknown("the member stopped".to_string())),
            Ok(Ok(Ok(()))) => Ok(()),
            Ok(Ok(Err(e))) => Err(refusal(e)),
        }
    }
}

fn refusal<R: AsyncRuntime>(error: Failure<R>) -> ChangeError {
    match error {
        RaftError::Fatal(e) => ChangeError::Fatal(e.to_string()),
        RaftError::APIError(ClientWriteError::ForwardToLeader(f)) => ChangeError::NotLeader { leader: leader(f) },
        // The first step may have been committed by another leader, or will be.
        RaftError::APIError(e @ ClientWriteError::LogEntryDiscarded(_)) => ChangeError::Unknown(e.to_string()),
        RaftError::APIError(ClientWriteError::PreconditionFailed(_)) => ChangeRefusal::InProgress.into(),
        RaftError::APIError(ClientWriteError::ChangeMembershipError(e)) => ChangeRefusal::Library(e.to_string()).into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::status::{Follower, Role};
    use std::collections::BTreeMap;

    /// Leader 1 of voters 1-3, with learner 4; `behind` lack too much of the log.
    fn group(behind: &[MemberId]) -> Status {
        let follower = |id: MemberId| {
            let lag = if behind.contains(&id) { CAUGHT_UP_LAG + 1 } else { 0 };
            (id, Follower { matched: Some(9), lag })
        };
        Status {
            member_id: 1,
            role: Role::Leader,
            members: (1..=4).map(|id| (id, String::new())).collect::<BTreeMap<_, _>>(),
            voters: [1, 2, 3].into(),
            membership_committed: true,
            followers: (2..=4).map(follower).collect(),
            ..Status::default()
        }
    }

    fn judge(now: &Status, alive: &[MemberId], voters: &[MemberId]) -> Result<(), ChangeRefusal> {
        preflight(now, &alive.iter().copied().collect(), &voters.iter().copied().collect())
    }

    #[test]
    fn what_a_majority_of_both_sets_can_commit_passes() {
        assert_eq!(judge(&group(&[]), &[1, 2, 3, 4], &[1, 2, 3, 4]), Ok(()));
        assert_eq!(
            judge(&group(&[]), &[1, 3, 4], &[1, 3, 4]),
            Ok(()),
            "2 is dead and replaced"
        );
        assert_eq!(judge(&group(&[]), &[1, 2, 3], &[1]), Ok(()));
    }

    #[test]
    fn what_could_cost_the_majority_does_not() {
        let dead = |which| ChangeRefusal::NoMajority { which, sound: 1, of: 3 };
        assert_eq!(judge(&group(&[]), &[1, 4], &[1, 4]), Err(dead("old")));
        let new = ChangeRefusal::NoMajority {
            which: "new",
            sound: 1,
            of: 2,
        };
        assert_eq!(
            judge(&group(&[]), &[1, 3], &[1, 2]),
            Err(new),
            "3 to 2 with a dead one blocks for ever"
        );
        assert_eq!(
            judge(&group(&[2, 3]), &[1, 2, 3], &[1, 2, 3]),
            Err(dead("old")),
            "a member that lacks the log counts as dead"
        );
        for (behind, alive) in [(&[4][..], &[1, 2, 3, 4][..]), (&[], &[1, 2, 3])] {
            let refused = judge(&group(behind), alive, &[1, 2, 3, 4]);
            assert_eq!(refused, Err(ChangeRefusal::NotCaughtUp(4)));
        }
        assert_eq!(
            judge(&group(&[]), &[1, 2, 3], &[1, 2, 9]),
            Err(ChangeRefusal::NotAMember(9))
        );
        assert_eq!(judge(&group(&[]), &[1, 2, 3], &[]), Err(ChangeRefusal::Size(0)));
    }

    #[test]
    fn a_change_under_way_leaves_only_its_own_end() {
        let mut now = group(&[]);
        now.voters = [1, 2, 3, 4].into();
        now.joint = Some([1, 3, 4].into());
        assert_eq!(judge(&now, &[1, 3, 4], &[1, 2, 3]), Err(ChangeRefusal::InProgress));
        assert_eq!(judge(&now, &[1, 3, 4], &[1, 3, 4]), Ok(()));
        now.membership_committed = false;
        assert_eq!(judge(&now, &[1, 3, 4], &[1, 3, 4]), Err(ChangeRefusal::InProgress));
        let follower = Status {
            role: Role::Follower,
            ..group(&[])
        };
        assert_eq!(judge(&follower, &[1, 2, 3], &[1]), Err(ChangeRefusal::NotLeading));
    }
}
