//! Who this process is to its peers, and the heights it has heard of.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use kvpool_wire::peer::Known;
use parking_lot::Mutex;
use tokio::sync::mpsc;

use crate::peer::Peer;

/// Shared by the router, its peer connections and its peer server.
pub(crate) struct Identity {
    /// Shard id, or a proxy's own name.
    pub(crate) id: String,
    pub(crate) join_token: String,
    /// Given by the coordinator; 0 for none (a proxy, or a shard that has not registered).
    incarnation: AtomicU64,
    cluster_id: Mutex<Arc<str>>,
    known: Mutex<Known>,
    /// Peers that hold a newer map; a full queue means that a fetch is due anyway.
    behind: mpsc::Sender<Arc<Peer>>,
}

impl Identity {
    pub(crate) fn new(id: String, join_token: String, behind: mpsc::Sender<Arc<Peer>>) -> Arc<Self> {
        Arc::new(Identity {
            id,
            join_token,
            incarnation: AtomicU64::new(0),
            cluster_id: Mutex::new("".into()),
            known: Mutex::new(Known::default()),
            behind,
        })
    }

    pub(crate) fn incarnation(&self) -> u64 {
        self.incarnation.load(Ordering::Acquire)
    }

    pub(crate) fn set_incarnation(&self, incarnation: u64) {
        self.incarnation.store(incarnation, Ordering::Release);
    }

    pub(crate) fn cluster_id(&self) -> Arc<str> {
        Arc::clone(&self.cluster_id.lock())
    }

    pub(crate) fn set_cluster_id(&self, id: &str) {
        *self.cluster_id.lock() = id.into();
    }

    /// Heights of the map in force.
    pub(crate) fn known(&self) -> Known {
        *self.known.lock()
    }

    pub(crate) fn set_known(&self, known: Known) {
        *self.known.lock() = known;
    }

    /// What a peer said it knows: when that is newer than ours, its map is wanted.
    pub(crate) fn heard(&self, theirs: Known, from: &Arc<Peer>) {
        if is_newer(theirs, self.known()) {
            // Full: a fetch is under way, and the next message of this peer asks again.
            let _ = self.behind.try_send(Arc::clone(from));
        }
    }
}

/// Whether `theirs` stands above `ours` in any height. Epochs compare within a cluster generation.
pub(crate) fn is_newer(theirs: Known, ours: Known) -> bool {
    let place = |known: Known| (known.cluster_generation, known.epoch);
    place(theirs) > place(ours)
}
