//! The coordinators as the state knows them: their names, the raft id of each name's present disk, how many are wanted,
//! what all of them can do, and the hash that they compare their states by.
//!
//! Keeps: a raft id is handed out once; a name has one id at a time, and an old one never comes back; the lowest
//! `target_members` names are the wanted voters; feature level and hashed revision only grow.

use crate::command::{AdmitMember, Command, ConfigureGroup, Refusal, StateHash};
use crate::records::{MemberRecord, MemberRole, Record};
use crate::state::{State, Step, check_name, cut, refuse};
use std::sync::Arc;

/// Most names. They are never forgotten.
const MAX_MEMBERS: usize = 64;
/// Ids that are handed out begin above this, so that they are told from those of the first boot at a glance.
const HANDED_OUT_ABOVE: u64 = 100;
const HASH_BYTES: usize = 32;

impl State {
    pub(crate) fn admit_member(&mut self, index: u64, c: &AdmitMember) -> Step {
        check_name("address", &c.address)?;
        if c.name == 0 {
            return refuse(Refusal::Invalid, "names of members begin with 1");
        }
        if c.member_id == 0 {
            check_name("boot", &c.boot)?;
        }
        let known = self.members.get(&c.name).cloned();
        if known.is_none() && self.members.len() >= MAX_MEMBERS {
            return refuse(Refusal::Full, "too many members");
        }
        let again = known.as_ref().filter(|old| match c.member_id {
            0 => old.boot == c.boot,
            id => old.id == id,
        });
        let id = match (c.member_id, again, &known) {
            (_, Some(old), _) => old.id,
            (0, None, _) => self.next_member_id(),
            (id, None, Some(now)) => {
                let message = format!(
                    "member {} is id {} now: the disk of id {id} was replaced",
                    c.name, now.id
                );
                return refuse(Refusal::MemberReplaced, message);
            }
            (id, None, None) if self.members.values().any(|m| m.id == id) => {
                return refuse(Refusal::Invalid, format!("id {id} is another member's"));
            }
            (id, None, None) => id,
        };
        let mut record = MemberRecord {
            name: c.name,
            id,
            address: c.address.clone(),
            boot: c.boot.clone(),
            role: MemberRole::Unspecified.into(),
            since_ms: self.log_time_ms,
            reason: cut(&c.why),
        };
        let mut records = Vec::new();
        if let Some(old) = again {
            record.boot.clone_from(&old.boot);
            record.role = old.role;
            if old.address == record.address {
                record.since_ms = old.since_ms;
                record.reason.clone_from(&old.reason);
            }
        }
        if known.as_deref() != Some(&record) {
            let what = format!("member {} is id {id} at {}", c.name, c.address);
            self.decide(index, what, record.reason.clone());
            self.members.insert(c.name, Arc::new(record));
            records.extend(self.take_id(id));
            records.extend(self.give_roles(Some(c.name)));
        }
        let mut outcome = self.outcome(records, None);
        outcome.response.incarnation = id;
        Ok(outcome)
    }

    fn next_member_id(&self) -> u64 {
        let next = self.cluster.as_ref().map_or(0, |c| c.next_member_id);
        next.max(HANDED_OUT_ABOVE + 1)
    }

    /// Remembers that an id is used.
    fn take_id(&mut self, id: u64) -> Option<Record> {
        let cluster = self.cluster.as_mut().filter(|c| c.next_member_id <= id)?;
        Arc::make_mut(cluster).next_member_id = id.saturating_add(1);
        Some(Record::Cluster(cluster.as_ref().clone()))
    }

    /// Who is wanted as a voter, by name. Returns what changed, and `named` in any case.
    fn give_roles(&mut self, named: Option<u64>) -> Vec<Record> {
        let target = self.target_members();
        let mut changed = Vec::new();
        for (rank, member) in self.members.values_mut().enumerate() {
            let role = if target == 0 || rank < target as usize {
                MemberRole::Voter
            } else {
                MemberRole::Idle
            };
            if member.role() != role {
                let member = Arc::make_mut(member);
                member.set_role(role);
                member.since_ms = self.log_time_ms;
            } else if named != Some(member.name) {
                continue;
            }
            changed.push(Record::Member(member.as_ref().clone()));
        }
        changed
    }

    pub(crate) fn configure_group(&mut self, index: u64, c: &ConfigureGroup) -> Step {
        if !matches!(c.target_members, 0 | 1 | 3 | 5) {
            let message = format!("a group has 1, 3 or 5 coordinators, not {}", c.target_members);
            return refuse(Refusal::Invalid, message);
        }
        let Some(cluster) = self.cluster.clone() else {
            return refuse(Refusal::NotCreated, "the cluster has not been created yet");
        };
        if c.feature_level != 0 && c.feature_level < cluster.feature_level {
            let message = format!("the feature level is {} and only grows", cluster.feature_level);
            return refuse(Refusal::Invalid, message);
        }
        let mut new = cluster.as_ref().clone();
        let mut what = Vec::new();
        if c.target_members != 0 && c.target_members != new.target_members {
            what.push(format!("{} coordinators wanted", c.target_members));
            new.target_members = c.target_members;
        }
        if c.feature_level > new.feature_level {
            what.push(format!("feature level {}", c.feature_level));
            new.feature_level = c.feature_level;
        }
        let mut records = Vec::new();
        if !what.is_empty() {
            self.decide(index, what.join(", "), cut(&c.why));
            self.cluster = Some(Arc::new(new.clone()));
            records.push(Record::Cluster(new));
            records.extend(self.give_roles(None));
        }
        Ok(self.outcome(records, None))
    }

    pub(crate) fn state_hash(&mut self, c: &StateHash) -> Step {
        if c.hash.len() != HASH_BYTES {
            return refuse(Refusal::Invalid, format!("a hash has {HASH_BYTES} bytes"));
        }
        let Some(cluster) = self.cluster.as_mut() else {
            return refuse(Refusal::NotCreated, "the cluster has not been created yet");
        };
        if c.revision <= cluster.hashed_revision {
            return Ok(self.outcome(Vec::new(), None));
        }
        let cluster = Arc::make_mut(cluster);
        cluster.hashed_revision = c.revision;
        cluster.state_hash.clone_from(&c.hash);
        let record = Record::Cluster(cluster.clone());
        Ok(self.outcome(vec![record], None))
    }

    /// Voters that are wanted; 0 = nobody has said.
    #[must_use]
    pub fn target_members(&self) -> u32 {
        self.cluster.as_ref().map_or(0, |c| c.target_members)
    }

    /// What every member can do; 0 before the cluster exists.
    #[must_use]
    pub fn feature_level(&self) -> u32 {
        self.cluster.as_ref().map_or(0, |c| c.feature_level)
    }

    /// May the leader propose it? Nothing above the committed feature level, or members that don't know it would stop; but for
    /// the command that raises the level, which the leader makes when all of them can.
    #[must_use]
    pub fn may_propose(&self, command: &Command) -> bool {
        let raises = matches!(command, Command::ConfigureGroup(c) if c.feature_level > self.feature_level());
        // Before the cluster exists the first level is what there is.
        raises || command.level() <= self.feature_level().max(1)
    }

    /// Coordinators in order of their names.
    pub fn members(&self) -> impl Iterator<Item = &MemberRecord> {
        self.members.values().map(Arc::as_ref)
    }
}
