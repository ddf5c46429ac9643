//! What a member knows about itself and the group, as a value and as a watch.

use std::collections::{BTreeMap, BTreeSet};

use crate::config::MemberId;

/// A leader by id and address.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Leader {
    /// The leader's id.
    pub id: MemberId,
    /// Its address as given to `initialize`; empty when the membership does not name it.
    pub address: String,
}

/// What a member is doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Role {
    /// Receives the log, does not vote.
    #[default]
    Learner,
    /// Follows a leader, or waits for one.
    Follower,
    /// Asks for votes.
    Candidate,
    /// Leads.
    Leader,
    /// Has stopped: shut down or failed.
    Stopped,
}

impl Role {
    /// The role's name in metrics, logs and output.
    pub fn name(self) -> &'static str {
        match self {
            Role::Learner => "learner",
            Role::Follower => "follower",
            Role::Candidate => "candidate",
            Role::Leader => "leader",
            Role::Stopped => "stopped",
        }
    }
}

/// One member's state. Log indexes start at 0; `None` means nothing yet.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Status {
    /// This member.
    pub member_id: MemberId,
    /// What it is doing.
    pub role: Role,
    /// Its term.
    pub term: u64,
    /// The leader it knows of.
    pub leader: Option<Leader>,
    /// Last entry in its log.
    pub last_log: Option<u64>,
    /// Last entry it knows to be committed.
    pub committed: Option<u64>,
    /// Last entry applied to its state.
    pub applied: Option<u64>,
    /// Last entry in its newest snapshot.
    pub snapshot: Option<u64>,
    /// Last entry removed from its log.
    pub purged: Option<u64>,
    /// Every member with its address.
    pub members: BTreeMap<MemberId, String>,
    /// The members that vote; while the voters change, those of both sets.
    pub voters: BTreeSet<MemberId>,
    /// Set while the voters change from one set to another: the set that they change to.
    pub joint: Option<BTreeSet<MemberId>>,
    /// True once the membership in force is known to be committed.
    pub membership_committed: bool,
    /// On a leader: how far each other member is.
    pub followers: BTreeMap<MemberId, Follower>,
    /// Why the member stopped by itself. The process must exit with an error when this is set.
    pub fatal: Option<String>,
}

impl Status {
    /// True when the member belongs to a group.
    pub fn initialized(&self) -> bool {
        !self.members.is_empty()
    }

    /// True when this member leads.
    pub fn is_leader(&self) -> bool {
        self.role == Role::Leader
    }
}

/// A follower as its leader sees it.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Follower {
    /// Last entry known to be in its log.
    pub matched: Option<u64>,
    /// Entries of the leader's log that it is not known to have.
    pub lag: u64,
}
