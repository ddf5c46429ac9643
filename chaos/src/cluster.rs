//! Three simulated members: their disks, their processes and who restarts them.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use kvpool_raft::{Config, LogOptions, MemberId, RaftNode, StartError, Timing};

use crate::disk::{Faults, SimDisk};
use crate::machine::Model;
use crate::mutation::Mutation;
use crate::net::{Net, Node};
use crate::oracle::Oracle;
use crate::world;

/// Every member's id.
pub const MEMBERS: [MemberId; 3] = [1, 2, 3];

/// Settings with small files, so that segments roll, logs are purged and snapshots travel within seconds.
pub fn config(id: MemberId) -> Config {
    let mut config = Config::new("sim", id, Timing::Normal);
    config.max_in_flight = 4;
    config.snapshot_every = 30;
    config.keep_applied = 40;
    config.log = LogOptions {
        segment_bytes: 8 << 10,
        batch_bytes: 2 << 10,
        cache_bytes: 2 << 10,
    };
    config
}

struct Running<V> {
    view: V,
    life: u64,
}

/// See the module. Clones share it.
#[derive(Clone)]
pub struct Cluster<M: Model> {
    /// The network.
    pub net: Net,
    /// Judges the log, the leaders and the clients.
    pub oracle: Oracle,
    /// What the members keep.
    pub model: M,
    /// What is broken on purpose.
    pub mutation: Option<Mutation>,
    disks: BTreeMap<MemberId, SimDisk>,
    running: Arc<Mutex<BTreeMap<MemberId, Running<M::View>>>>,
    lives: Arc<Mutex<u64>>,
    config: fn(MemberId) -> Config,
}

impl<M: Model> Cluster<M> {
    /// Three members that do not run yet.
    pub fn new(model: M, oracle: Oracle, config: fn(MemberId) -> Config, mutation: Option<Mutation>) -> Self {
        let net = Net::new();
        if mutation == Some(Mutation::GrantPreVotes) {
            net.grant_pre_votes();
        }
        Cluster {
            net,
            oracle,
            model,
            mutation,
            disks: MEMBERS.iter().map(|id| (*id, SimDisk::default())).collect(),
            running: Arc::default(),
            lives: Arc::default(),
            config,
        }
    }

    fn running(&self) -> MutexGuard<'_, BTreeMap<MemberId, Running<M::View>>> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A member's disk.
    pub fn disk(&self, id: MemberId) -> &SimDisk {
        &self.disks[&id]
    }

    /// Lets a disk misbehave; what a mutation broke stays broken.
    pub fn set_faults(&self, id: MemberId, faults: Faults) {
        self.disk(id).set_faults(Faults {
            lying: self.mutation == Some(Mutation::LyingDisks),
            ..faults
        });
    }

    /// True while a member's process runs.
    pub fn runs(&self, id: MemberId) -> bool {
        self.running().contains_key(&id)
    }

    /// A running member with a view of its state and the number of its life.
    pub fn member(&self, id: MemberId) -> Option<(Node, M::View, u64)> {
        let node = self.net.node(id)?;
        let running = self.running();
        let running = running.get(&id)?;
        Some((node, running.view.clone(), running.life))
    }

    /// Starts a member's process. When its disk fails meanwhile it stays down.
    pub async fn boot(&self, id: MemberId) {
        let disk = self.disk(id).clone();
        disk.power_on();
        match self.mutation {
            Some(Mutation::ForgetVotes) => disk.forget_votes(),
            Some(Mutation::LyingDisks) => self.set_faults(id, Faults::default()),
            Some(Mutation::LoseTheTail) => disk.lose_tail(),
            Some(Mutation::ReuseAnId) if world::chance(300) => disk.wipe(),
            _ => {}
        }
        let (machine, view) = self.model.machine(id);
        let start = RaftNode::start((self.config)(id), disk.clone(), self.net.end(id), machine);
        match world::inside(id, start).await {
            Ok(node) => {
                let life = {
                    let mut lives = self.lives.lock().unwrap_or_else(PoisonError::into_inner);
                    *lives += 1;
                    *lives
                };
                self.watch(id, &node);
                world::at(id, || self.model.started(id, &node, &view));
                self.net.plug(id, node);
                self.running().insert(id, Running { view, life });
            }
            Err(e) => {
                world::kill(id);
                if !disk.is_off() && !disk.has_failed() && !disk.was_full() {
                    self.oracle.violation(format!("member {id} does not start: {e}"));
                } else if matches!(e, StartError::Config(_)) {
                    self.oracle.violation(format!("member {id} has bad settings: {e}"));
                }
                disk.crash();
            }
        }
    }

    /// Tells the oracle what a member says of itself.
    fn watch(&self, id: MemberId, node: &Node) {
        let mut status = node.status_watch();
        let (oracle, disk) = (self.oracle.clone(), self.disk(id).clone());
        world::spawn_at(world::OUTSIDE, async move {
            loop {
                let now = status.borrow_and_update().clone();
                oracle.status(&now);
                if let Some(fatal) = &now.fatal
                    && !disk.is_off()
                    && !disk.has_failed()
                    && !disk.was_full()
                {
                    oracle.violation(format!("member {id} stopped by itself: {fatal}"));
                }
                if status.changed().await.is_err() {
                    return;
                }
            }
        });
    }

    /// Takes a member's power away.
    pub fn crash(&self, id: MemberId) {
        let gone = self.running().remove(&id);
        self.net.unplug(id);
        world::kill(id);
        if gone.is_some() {
            self.oracle.crashed();
        }
        self.disk(id).crash();
    }

    /// Boots all members and creates the group.
    pub async fn create(&self) {
        for id in MEMBERS {
            self.boot(id).await;
        }
        let Some((node, ..)) = self.member(1) else { return };
        let members = MEMBERS.iter().map(|id| (*id, format!("member-{id}"))).collect();
        if let Err(e) = world::inside(1, node.initialize(members)).await {
            self.oracle.violation(format!("the group was not created: {e}"));
        }
    }

    /// Ends everything, so that nothing refers to itself any more.
    pub fn tear_down(&self) {
        for id in MEMBERS {
            self.net.unplug(id);
            world::kill(id);
        }
        self.running().clear();
        world::kill(world::OUTSIDE);
    }
}

/// Waits until `done`, at most `bound`; returns whether it was.
pub async fn wait(bound: Duration, mut done: impl FnMut() -> bool) -> bool {
    let until = world::now() + bound.as_nanos() as u64;
    while !done() {
        if world::now() >= until {
            return false;
        }
        world::sleep(Duration::from_millis(20)).await;
    }
    true
}
