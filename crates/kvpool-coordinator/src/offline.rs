//! Work on data directories that no coordinator runs in.

use crate::replica::{Machine, Replica};
use kvpool_raft::{FileDisk, inspect};
pub use kvpool_raft::{Inspection, LogError, LogSeen, Position};
use std::path::Path;

/// What [`check`] found.
#[derive(Debug)]
pub struct Checked {
    /// Files, positions, and everything that is wrong.
    pub files: Inspection,
    /// Of the state that the files build, as far as they could be read. 0 = the cluster has not been created.
    pub cluster_generation: u64,
    /// The last revision in it.
    pub revision: u64,
    pub nodes: usize,
    pub shards: usize,
    /// Name and epoch of each pool.
    pub pools: Vec<(String, u64)>,
}

/// Reads a whole data directory and builds the state from it, as a start would. Writes nothing. Blocks.
///
/// # Errors
/// When there is no such directory, a coordinator works in it, or it cannot be read at all. What is wrong with the
/// files is not an error but in [`Inspection::faults`].
pub fn check(dir: &Path) -> Result<Checked, LogError> {
    let disk = FileDisk::open_read_only(dir).map_err(|source| LogError::Io {
        what: format!("open the data directory {}", dir.display()),
        source,
    })?;
    let replica = Replica::new();
    let decodes = |command: &[u8]| {
        let decoded = kvpool_state::command::decode(command);
        decoded.map(|_| ()).map_err(|e| e.to_string())
    };
    let files = inspect(&disk, &mut Machine(replica.clone()), decodes);
    Ok(replica.read(|state| Checked {
        files,
        cluster_generation: state.cluster().map_or(0, |c| c.cluster_generation),
        revision: state.revision(),
        nodes: state.nodes().count(),
        shards: state.shards().count(),
        pools: state
            .pools()
            .map(|p| (p.name.clone(), state.slot_table(&p.name).map_or(0, |(epoch, _)| epoch)))
            .collect(),
    }))
}
