//! The two timing presets, as far as they show on the wire.

use std::str::FromStr;
use std::time::Duration;

/// How patient the cluster is. Raft's own times belong to the same preset (kvpool-raft).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Timing {
    /// A lost shard or leader is noticed within seconds.
    #[default]
    Normal,
    /// For starved machines, and for tests that are not about failover time.
    Relaxed,
}

impl Timing {
    fn pick(self, normal: u64, relaxed: u64) -> Duration {
        Duration::from_millis(match self {
            Timing::Normal => normal,
            Timing::Relaxed => relaxed,
        })
    }

    /// How often a shard sends a heartbeat to the leader.
    #[must_use]
    pub fn heartbeat(self) -> Duration {
        self.pick(500, 1_000)
    }

    /// A shard without a heartbeat for this long is Down.
    #[must_use]
    pub fn lease(self) -> Duration {
        self.pick(3_000, 8_000)
    }

    /// A shard whose session broke and was not resumed for this long is Down.
    #[must_use]
    pub fn broken_grace(self) -> Duration {
        self.pick(1_000, 3_000)
    }

    /// Longest single attempt of a unary call, and longest wait for a connection.
    #[must_use]
    pub fn attempt(self) -> Duration {
        self.pick(1_000, 6_000)
    }

    /// Longest unary call with its retries.
    #[must_use]
    pub fn call(self) -> Duration {
        self.pick(10_000, 30_000)
    }

    /// Without word from a leader (or, for a leader, from a quorum) for this long there is no quorum, rather than an
    /// election. Above kvpool-raft's worst election of the preset.
    #[must_use]
    pub fn no_quorum_after(self) -> Duration {
        self.pick(2_500, 7_500)
    }

    /// The preset's name on command lines.
    #[must_use]
    pub fn word(self) -> &'static str {
        match self {
            Timing::Normal => "normal",
            Timing::Relaxed => "relaxed",
        }
    }
}

impl FromStr for Timing {
    type Err = String;

    fn from_str(s: &str) -> Result<Self, String> {
        [Timing::Normal, Timing::Relaxed]
            .into_iter()
            .find(|t| t.word() == s)
            .ok_or_else(|| format!("failed to read timing {s:?}: it is normal or relaxed"))
    }
}
