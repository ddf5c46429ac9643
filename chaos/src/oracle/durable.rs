//! An acknowledged write is applied at its index and stays; a refused one is never applied.

use std::collections::{BTreeMap, BTreeSet};

use kvpool_raft::MemberId;

use super::prefix::Prefix;
use crate::register::Operation;

/// Outcomes that clients were told.
#[derive(Default)]
pub struct Durable {
    acknowledged: BTreeMap<u64, Operation>,
    refused: BTreeSet<Operation>,
}

impl Durable {
    /// A client was told that its write is applied.
    pub fn acknowledged(&mut self, operation: Operation, index: u64, prefix: &Prefix) -> Result<(), String> {
        if let Some(other) = self.acknowledged.insert(index, operation) {
            return Err(format!(
                "operations {other} and {operation} were both acknowledged at {index}"
            ));
        }
        match prefix.at(index) {
            Some(known) if known == operation => Ok(()),
            other => Err(format!(
                "operation {operation} was acknowledged at {index}, where {other:?} was applied"
            )),
        }
    }

    /// A client was told that its write will never be applied.
    pub fn refused(&mut self, operation: Operation, prefix: &Prefix) -> Result<(), String> {
        self.refused.insert(operation);
        if prefix.contains(operation) {
            return Err(format!("operation {operation} was refused but had been applied"));
        }
        Ok(())
    }

    /// A member applied an operation.
    pub fn applied(&self, operation: Operation) -> Result<(), String> {
        if self.refused.contains(&operation) {
            return Err(format!("operation {operation} was applied after it was refused"));
        }
        Ok(())
    }

    /// A member at rest holds everything that was ever acknowledged.
    pub fn holds_all(&self, member: MemberId, holds: &[(u64, Operation)]) -> Result<(), String> {
        let holds: BTreeSet<(u64, Operation)> = holds.iter().copied().collect();
        for (index, operation) in &self.acknowledged {
            if !holds.contains(&(*index, *operation)) {
                return Err(format!(
                    "operation {operation}, acknowledged at {index}, is lost on member {member}"
                ));
            }
        }
        Ok(())
    }
}
