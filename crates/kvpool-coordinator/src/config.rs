//! What a coordinator is started with, and why it stops.

use kvpool_net::Trust;
use kvpool_proto::{JoinToken, Timing};
use kvpool_raft::{InitializeError, LogError, StartError};
use std::path::PathBuf;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

/// Settings of one member.
#[derive(Debug)]
pub struct CoordinatorConfig {
    /// This member's id; one of `members`. Never reused after its disk was lost.
    pub id: u64,
    pub data_dir: PathBuf,
    /// Where this member serves gRPC.
    pub grpc: TcpListener,
    /// All members at first boot, 1, 3 or 5, each with the `host:port` that the others reach it at.
    pub members: Vec<(u64, String)>,
    pub join_token: JoinToken,
    /// How gRPC is secured, here and towards the other members.
    pub trust: Trust,
    pub timing: Timing,
    /// Factor of the pool `default` when the cluster is created; not used afterwards.
    pub factor: u32,
    /// Said once, by a person who knows that this member is new: a majority of such members creates the cluster without
    /// the others, and a later one joins it. Without it all members must answer. Not used once there is a marker.
    pub bootstrap: bool,
    /// Highest feature level that this member says it can work at: [`kvpool_state::command::READER`]. Lower in tests of mixed
    /// versions.
    pub features: u32,
    /// Ends the member gracefully.
    pub shutdown: CancellationToken,
}

/// Why a coordinator stopped. The process should exit with an error.
#[derive(Debug, thiserror::Error)]
pub enum CoordinatorError {
    #[error("failed to accept the settings: {0}")]
    Config(String),
    #[error(transparent)]
    Disk(#[from] LogError),
    #[error(transparent)]
    Start(#[from] StartError),
    #[error("failed to create the cluster: {0}")]
    Initialize(#[from] InitializeError),
    /// First boot found something that only a person can put right.
    #[error("failed at first boot: {0}")]
    Boot(String),
    #[error("failed to serve gRPC: {0}")]
    Serve(String),
    /// Raft stopped by itself: the disk failed or an entry can't be applied. A restart recovers from disk.
    #[error("failed: the member has stopped: {0}")]
    Fatal(String),
}

impl CoordinatorConfig {
    pub(crate) fn check(&self) -> Result<(), CoordinatorError> {
        let bad = |what: String| Err(CoordinatorError::Config(what));
        let mut ids: Vec<u64> = self.members.iter().map(|(id, _)| *id).collect();
        ids.sort_unstable();
        ids.dedup();
        if ids.len() != self.members.len() || !matches!(ids.len(), 1 | 3 | 5) {
            return bad(format!(
                "there are {} members with {} ids; 1, 3 or 5 are allowed",
                self.members.len(),
                ids.len()
            ));
        }
        if !ids.contains(&self.id) {
            return bad(format!("member {} is not in the list of members {ids:?}", self.id));
        }
        if let Some((id, address)) = self.members.iter().find(|(id, a)| *id == 0 || !a.contains(':')) {
            return bad(format!(
                "member {id} at {address:?}: ids begin at 1 and addresses are host:port"
            ));
        }
        if !(1..=kvpool_state::MAX_FACTOR).contains(&self.factor) {
            return bad(format!(
                "factor {} is not within 1-{}",
                self.factor,
                kvpool_state::MAX_FACTOR
            ));
        }
        Ok(())
    }
}
