//! All members, in all their lives, apply the same operation at the same index, and skip none.

use std::collections::BTreeMap;

use kvpool_raft::MemberId;

use crate::register::Operation;

/// The one history, as far as anyone applied it.
#[derive(Default)]
pub struct Prefix(BTreeMap<u64, (u64, Operation)>);

impl Prefix {
    /// A member applied this.
    pub fn applied(&mut self, member: MemberId, index: u64, term: u64, operation: Operation) -> Result<(), String> {
        let known = *self.0.entry(index).or_insert((term, operation));
        if known == (term, operation) {
            return Ok(());
        }
        Err(format!(
            "member {member} applied operation {operation} of term {term} at {index}, another applied {known:?}"
        ))
    }

    /// The operation applied at an index.
    pub fn at(&self, index: u64) -> Option<Operation> {
        self.0.get(&index).map(|(_, operation)| *operation)
    }

    /// True when the operation was applied by anyone.
    pub fn contains(&self, operation: Operation) -> bool {
        self.0.values().any(|(_, known)| *known == operation)
    }

    /// The last index at or below `index` that holds an operation.
    pub fn last_at_or_below(&self, index: u64) -> Option<u64> {
        self.0.range(..=index).next_back().map(|(index, _)| *index)
    }

    /// A member's state must be the beginning of the history.
    pub fn is_prefix(&self, member: MemberId, holds: &[(u64, Operation)]) -> Result<(), String> {
        let ours = self.0.iter().map(|(index, (_, operation))| (*index, *operation));
        if ours.take(holds.len()).eq(holds.iter().copied()) {
            return Ok(());
        }
        Err(format!(
            "the state of member {member} is not a prefix of what others applied"
        ))
    }

    /// A member's state must be the whole history.
    pub fn is_all(&self, member: MemberId, holds: &[(u64, Operation)]) -> Result<(), String> {
        self.is_prefix(member, holds)?;
        if holds.len() == self.0.len() {
            return Ok(());
        }
        Err(format!(
            "member {member} holds {} operations of {} that were applied",
            holds.len(),
            self.0.len()
        ))
    }
}
