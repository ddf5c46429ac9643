//! Consensus for kvpool: a replicated log of opaque commands, built on openraft.
//!
//! This is the only crate that names openraft; it knows nothing of caches. It is generic over the runtime, the
//! disk and the transport, so that the simulator in `chaos/` runs this very code. See `OVERVIEW.md`.

mod apply;
mod change;
mod codec;
mod config;
mod disk;
mod error;
mod log;
mod machine;
mod marker;
pub mod metric_definitions;
mod network;
mod node;
mod observe;
mod offline;
mod serve;
mod snapshot;
mod status;
mod transport;
mod types;
mod wire;

pub use change::{CAUGHT_UP_LAG, MAX_VOTERS, preflight};
pub use config::{
    Config, ConfigError, MAX_CLUSTER_ID_BYTES, MAX_COMMAND_BYTES, MAX_IN_FLIGHT, MAX_MESSAGE_BYTES, MemberId, Timing,
};
pub use disk::{Disk, DiskFile, FileDisk};
pub use error::{
    ChangeError, ChangeRefusal, Damage, HandleError, InitializeError, LogError, ProposeError, ReadError, StartError,
};
pub use log::LogOptions;
pub use machine::{SnapshotWriter, StateMachine, StopMember};
pub use marker::{MARKER_FILE, Marker};
pub use node::{Applied, RaftNode};
pub use offline::{Inspection, LogSeen, Position, SnapshotSeen, VoteSeen, inspect};
/// What a runtime must offer; implemented by [`Tokio`] and by the simulator.
pub use openraft::AsyncRuntime;
pub use status::{Follower, Leader, Role, Status};
pub use transport::{Lane, Peer, Transport, TransportError};

/// The production runtime. Members must be started, and their futures polled, inside a tokio runtime.
#[allow(
    deprecated,
    reason = "the re-export is the library's own; its crate would be one more pinned alpha"
)]
pub type Tokio = openraft::impls::TokioRuntime;

/// For the simulator only.
#[doc(hidden)]
pub mod testing {
    use bytes::Bytes;

    /// The granting answer to `message` if it is a pre-vote: what a transport without pre-vote amounts to.
    pub fn grant_pre_vote(message: &Bytes) -> Option<Bytes> {
        crate::wire::grant_pre_vote(message)
    }
}
