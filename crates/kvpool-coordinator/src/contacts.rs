//! When this member last heard which other member: the ground for `no_quorum` and for reachability in the status. Observed
//! on this member alone, never replicated.

use kvpool_raft::Status;
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

pub(crate) struct Contacts {
    patience: Duration,
    inner: Mutex<Inner>,
}

struct Inner {
    /// Last append or heartbeat from a leader, at first the start of the process.
    leader: Instant,
    /// Last answer of each member.
    answers: BTreeMap<u64, Instant>,
}

impl Contacts {
    pub(crate) fn new(patience: Duration) -> Self {
        let inner = Inner {
            leader: Instant::now(),
            answers: BTreeMap::new(),
        };
        Contacts {
            patience,
            inner: Mutex::new(inner),
        }
    }

    pub(crate) fn leader_heard(&self) {
        self.inner.lock().leader = Instant::now();
    }

    pub(crate) fn answered(&self, member: u64) {
        self.inner.lock().answers.insert(member, Instant::now());
    }

    /// How long a member has not answered; without end when it never has.
    pub(crate) fn silence(&self, member: u64) -> Duration {
        let last = self.inner.lock().answers.get(&member).copied();
        last.map_or(Duration::MAX, |at| at.elapsed())
    }

    pub(crate) fn reachable(&self, member: u64) -> bool {
        self.inner
            .lock()
            .answers
            .get(&member)
            .is_some_and(|at| at.elapsed() < self.patience)
    }

    /// False when a leader, or for the leader a quorum, has been out of contact for so long that this is no election.
    pub(crate) fn quorum(&self, status: &Status) -> bool {
        if status.is_leader() {
            let others = status.voters.iter().filter(|id| **id != status.member_id);
            let heard = others.filter(|id| self.reachable(**id)).count() + 1;
            return heard * 2 > status.voters.len();
        }
        self.inner.lock().leader.elapsed() < self.patience
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvpool_raft::Role;

    fn status(role: Role, voters: &[u64]) -> Status {
        Status {
            member_id: 1,
            role,
            voters: voters.iter().copied().collect(),
            ..Status::default()
        }
    }

    #[test]
    fn a_leader_needs_a_majority_and_a_follower_a_leader() {
        let contacts = Contacts::new(Duration::from_secs(3_600));
        assert!(contacts.quorum(&status(Role::Leader, &[1])), "alone it is the majority");
        assert!(!contacts.quorum(&status(Role::Leader, &[1, 2, 3])));
        contacts.answered(3);
        assert!(contacts.quorum(&status(Role::Leader, &[1, 2, 3])));
        assert!(!contacts.quorum(&status(Role::Leader, &[1, 2, 3, 4, 5])));
        assert!(
            contacts.quorum(&status(Role::Candidate, &[1, 2, 3])),
            "within an election"
        );
        let impatient = Contacts::new(Duration::ZERO);
        impatient.answered(3);
        assert!(!impatient.quorum(&status(Role::Follower, &[1, 2, 3])));
        assert!(!impatient.quorum(&status(Role::Leader, &[1, 2, 3])));
    }
}
