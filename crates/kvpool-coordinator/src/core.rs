//! What every part of a member shares: the replica, raft's handle, and the translation of raft's errors to refusals.

use crate::actors::{Conditions, Duty};
use crate::config::CoordinatorConfig;
use crate::contacts::Contacts;
use crate::metric_definitions as m;
use crate::replica::{Machine, Replica};
use kvpool_net::Trust;
use kvpool_proto::meta::{Reason, Refused};
use kvpool_proto::{JoinToken, Timing};
use kvpool_raft::{Leader, ProposeError, RaftNode, ReadError, Status};
use kvpool_state::records::RequestId;
use kvpool_state::{Command, Response};
use parking_lot::Mutex;
use prost::Message;
use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use tokio::sync::watch;

pub(crate) type Raft = RaftNode<Machine>;

pub(crate) struct Core {
    /// This member's name: its number in the list of members. Its raft id is one disk life's, see `raft_id`.
    pub(crate) name: u64,
    /// Highest feature level that this build can work at.
    pub(crate) features: u32,
    /// Why this process is not a member yet, or any more.
    pub(crate) waits: Mutex<Option<String>>,
    pub(crate) seeds: BTreeMap<u64, String>,
    pub(crate) token: JoinToken,
    pub(crate) trust: Trust,
    pub(crate) timing: Timing,
    pub(crate) factor: u32,
    pub(crate) replica: Arc<Replica>,
    pub(crate) contacts: Arc<Contacts>,
    pub(crate) conditions: Conditions,
    /// The leader's duty while this member leads and its actors stand.
    pub(crate) duty: watch::Sender<Option<Arc<Duty>>>,
    /// For the actors' clocks.
    pub(crate) started: Instant,
    /// Where tests let actors panic.
    #[cfg(test)]
    pub(crate) root: Mutex<Option<ractor::ActorRef<crate::actors::RootMsg>>>,
    raft: OnceLock<Raft>,
    /// From the marker on disk; empty at first boot.
    cluster_id: Mutex<String>,
}

impl Core {
    pub(crate) fn new(config: &CoordinatorConfig) -> Arc<Self> {
        Arc::new(Core {
            name: config.id,
            features: config.features,
            waits: Mutex::default(),
            seeds: config.members.iter().cloned().collect(),
            token: config.join_token.clone(),
            trust: config.trust.clone(),
            timing: config.timing,
            factor: config.factor,
            replica: Replica::new(),
            contacts: Arc::new(Contacts::new(config.timing.no_quorum_after())),
            conditions: Conditions::default(),
            duty: watch::Sender::new(None),
            started: Instant::now(),
            #[cfg(test)]
            root: Mutex::new(None),
            raft: OnceLock::new(),
            cluster_id: Mutex::new(String::new()),
        })
    }

    #[cfg(test)]
    pub(crate) fn inject(&self, message: crate::actors::LeadershipMsg) {
        if let Some(root) = &*self.root.lock() {
            let _ = root.cast(crate::actors::RootMsg::Leadership(message));
        }
    }

    /// Raft's marker is on disk from here on.
    pub(crate) fn raft_started(&self, raft: Raft, cluster_id: &str) {
        cluster_id.clone_into(&mut self.cluster_id.lock());
        // It is set once, by `run`.
        let _ = self.raft.set(raft);
    }

    pub(crate) fn raft(&self) -> Result<&Raft, Refused> {
        self.raft
            .get()
            .ok_or_else(|| Refused::new(Reason::NoCluster, "this member has not joined a cluster yet"))
    }

    pub(crate) fn cluster_id(&self) -> String {
        self.cluster_id.lock().clone()
    }

    /// The raft id on this member's disk; its name as long as there is none.
    pub(crate) fn raft_id(&self) -> u64 {
        self.raft.get().map_or(self.name, |r| r.status().member_id)
    }

    pub(crate) fn status(&self) -> Status {
        self.raft.get().map(RaftNode::status).unwrap_or_default()
    }

    /// Milliseconds since the process began, for the pure machines.
    pub(crate) fn millis(&self, at: Instant) -> u64 {
        u64::try_from(at.saturating_duration_since(self.started).as_millis()).unwrap_or(u64::MAX)
    }

    /// Commits a command. A refusal by the state is in the response; a refusal by raft is the error.
    pub(crate) async fn propose(&self, command: &Command, request: Option<RequestId>) -> Result<Response, Refused> {
        if !self.replica.read(|s| s.may_propose(command)) {
            let text = "the members do not all know this yet: see the status for who must be upgraded";
            return Err(Refused::new(Reason::LeaseExpired, text));
        }
        let entry = command.to_entry(request, wall_clock_ms());
        let applied = self
            .raft()?
            .propose(entry.into())
            .await
            .map_err(|e| self.proposal_refused(e))?;
        Response::decode(applied.response)
            .map_err(|e| Refused::new(Reason::Unknown, format!("failed to read the answer of the state: {e}")))
    }

    /// After this the replica holds every write acknowledged before.
    pub(crate) async fn read_barrier(&self) -> Result<(), Refused> {
        match self.raft()?.linearizable_read().await {
            Ok(_) => Ok(()),
            Err(ReadError::NotLeader { leader }) => Err(self.not_leader(leader)),
            Err(ReadError::NoQuorum) => Err(self.no_leader()),
            Err(e @ ReadError::Fatal(_)) => Err(Refused::new(Reason::Stopping, e.to_string())),
        }
    }

    fn proposal_refused(&self, error: ProposeError) -> Refused {
        let text = error.to_string();
        match error {
            ProposeError::NotLeader { leader } => self.not_leader(leader),
            ProposeError::LeaseExpired => self.no_leader(),
            ProposeError::Overloaded { retry_after } => {
                Refused::new(Reason::Overload, text).with_retry_after(retry_after)
            }
            ProposeError::TooLarge { .. } => Refused::new(Reason::Invalid, text),
            ProposeError::Unknown(_) if !self.contacts.quorum(&self.status()) => Refused::new(
                Reason::NoQuorum,
                "a quorum is out of contact; whether the change is kept is unknown",
            ),
            ProposeError::Unknown(_) => Refused::new(Reason::Unknown, text),
            ProposeError::Fatal(_) => Refused::new(Reason::Stopping, text),
        }
    }

    pub(crate) fn not_leader(&self, leader: Option<Leader>) -> Refused {
        match leader.filter(|l| l.id != self.raft_id() && !l.address.is_empty()) {
            Some(leader) => Refused::new(Reason::NotLeader, format!("member {} leads, not this one", leader.id))
                .with_leader(Some(leader.address)),
            None => self.no_leader(),
        }
    }

    /// An election, or no quorum: which of them, the time since the last contact tells.
    pub(crate) fn no_leader(&self) -> Refused {
        if self.contacts.quorum(&self.status()) {
            let text = "no leader holds its lease right now";
            Refused::new(Reason::LeaseExpired, text).with_retry_after(Duration::from_millis(50))
        } else {
            Refused::new(Reason::NoQuorum, "a quorum of the coordinators is out of contact")
        }
    }

    /// The refusal of a call that only the leader takes.
    pub(crate) fn elsewhere(&self) -> Refused {
        match self.raft() {
            Ok(raft) => self.not_leader(raft.status().leader),
            Err(refused) => refused,
        }
    }
}

/// Counts a refusal on its way out.
pub(crate) fn refuse(refused: Refused) -> tonic::Status {
    metrics::counter!(m::REFUSALS, "reason" => refused.reason.word()).increment(1);
    refused.into()
}

/// Log time is made from it; raft keeps it from going back.
pub(crate) fn wall_clock_ms() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(now.as_millis()).unwrap_or(u64::MAX)
}
