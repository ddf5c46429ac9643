//! At most one member leads a term.

use std::collections::BTreeMap;

use kvpool_raft::MemberId;

/// Who led which term.
#[derive(Default)]
pub struct Leaders(BTreeMap<u64, MemberId>);

impl Leaders {
    /// A member was seen leading, or acknowledged a write in this term.
    pub fn leads(&mut self, term: u64, member: MemberId) -> Result<(), String> {
        match *self.0.entry(term).or_insert(member) {
            known if known == member => Ok(()),
            known => Err(format!("members {known} and {member} both led term {term}")),
        }
    }

    /// Terms with a leader.
    pub fn len(&self) -> u64 {
        self.0.len() as u64
    }

    /// True when nobody ever led.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}
