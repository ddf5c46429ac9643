//! What happens to bytes on their way: one condition per direction of a pair of processes.

use std::collections::BTreeMap;
use std::time::Duration;

/// What the bytes from one process to another meet. The default is a healthy link.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Condition {
    /// Nothing passes, and nobody is told: no FIN, no RST.
    pub cut: bool,
    pub delay: Duration,
    /// Up to this much more, drawn for each piece.
    pub jitter: Duration,
    /// Pieces of 100 that meet a lost packet, which TCP shows as a stall until it is sent again.
    pub loss_percent: u64,
    /// Bytes per second; 0 = no limit.
    pub rate: u64,
    /// An end of the stream arrives this much later.
    pub slow_close: Duration,
}

impl Condition {
    #[must_use]
    pub fn cut() -> Self {
        Condition {
            cut: true,
            ..Condition::default()
        }
    }
}

/// The conditions in force, by (from, to); what is not here is healthy.
#[derive(Clone, Debug, Default)]
pub struct Rules(BTreeMap<(String, String), Condition>);

impl Rules {
    #[must_use]
    pub fn get(&self, from: &str, to: &str) -> Condition {
        let found = self.0.iter().find(|((f, t), _)| f == from && t == to);
        found.map_or_else(Condition::default, |(_, condition)| condition.clone())
    }

    pub fn set(&mut self, from: &str, to: &str, condition: Condition) {
        self.0.insert((from.to_owned(), to.to_owned()), condition);
    }

    pub fn clear(&mut self) {
        self.0.clear();
    }

    /// True when no packet comes back from `to`, so that no connection can be made.
    #[must_use]
    pub fn silent(&self, from: &str, to: &str) -> bool {
        self.get(from, to).cut || self.get(to, from).cut
    }
}
