//! A member that reaches nobody raises no term: that is what pre-vote is for.

use std::collections::BTreeMap;

use kvpool_raft::MemberId;

/// Members that are cut off, with their life and term when votes on the way had run out.
#[derive(Default)]
pub struct Isolation(BTreeMap<MemberId, (u64, u64)>);

impl Isolation {
    /// A cut-off member is seen in a term, in its life number `life`.
    pub fn seen(&mut self, member: MemberId, life: u64, term: u64) -> Result<(), String> {
        let (known_life, known) = *self.0.entry(member).or_insert((life, term));
        if known_life == life && term > known {
            return Err(format!(
                "member {member} raised its term from {known} to {term} while it was cut off"
            ));
        }
        Ok(())
    }

    /// The member is connected again.
    pub fn over(&mut self, member: MemberId) {
        self.0.remove(&member);
    }
}
