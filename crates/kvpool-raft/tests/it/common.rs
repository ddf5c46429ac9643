//! Members in one process on real files: a register of bytes, and a transport that calls `handle` directly.
use std::collections::BTreeMap;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use kvpool_raft::{
    Config, FileDisk, Lane, LogOptions, MemberId, Peer, RaftNode, SnapshotWriter, StateMachine, StopMember, Timing,
    Transport, TransportError,
};

/// Every applied command in order.
#[derive(Clone, Default)]
pub struct Journal(pub Arc<Mutex<Vec<Vec<u8>>>>);

impl Journal {
    pub fn len(&self) -> usize {
        self.0.lock().unwrap().len()
    }

    pub fn all(&self) -> Vec<Vec<u8>> {
        self.0.lock().unwrap().clone()
    }
}

impl StateMachine for Journal {
    fn apply(&mut self, _index: u64, _term: u64, command: &[u8]) -> Result<Bytes, StopMember> {
        if command == b"poison" {
            return Err(StopMember("poison".to_string()));
        }
        assert!(command != b"panic", "told to panic");
        let mut all = self.0.lock().unwrap();
        all.push(command.to_vec());
        Ok(Bytes::from((all.len() as u64 - 1).to_le_bytes().to_vec()))
    }

    fn snapshot(&self) -> SnapshotWriter {
        let all = self.all();
        Box::new(move |out| {
            for command in all {
                out.write_all(&(command.len() as u32).to_le_bytes())?;
                out.write_all(&command)?;
            }
            Ok(())
        })
    }

    fn restore(&mut self, from: &mut dyn Read) -> io::Result<()> {
        let mut bytes = Vec::new();
        from.read_to_end(&mut bytes)?;
        let mut all = Vec::new();
        let mut rest = &bytes[..];
        while let Some((len, tail)) = rest.split_first_chunk::<4>() {
            let (command, tail) = tail.split_at(u32::from_le_bytes(*len) as usize);
            all.push(command.to_vec());
            rest = tail;
        }
        *self.0.lock().unwrap() = all;
        Ok(())
    }
}

pub type Node = RaftNode<Journal>;

/// Calls members directly; one that is not registered is unreachable.
#[derive(Clone, Default)]
pub struct Direct {
    nodes: Arc<Mutex<BTreeMap<MemberId, Node>>>,
}

impl Direct {
    pub fn add(&self, id: MemberId, node: Node) {
        self.nodes.lock().unwrap().insert(id, node);
    }

    pub fn remove(&self, id: MemberId) {
        self.nodes.lock().unwrap().remove(&id);
    }
}

impl Transport for Direct {
    async fn send(&self, to: &Peer, _: Lane, message: Bytes, ttl: Duration) -> Result<Bytes, TransportError> {
        let node = self.nodes.lock().unwrap().get(&to.id).cloned();
        let node = node.ok_or_else(|| TransportError::Unreachable("not running".to_string()))?;
        match tokio::time::timeout(ttl, node.handle(message)).await {
            Err(_) => Err(TransportError::Timeout),
            Ok(answer) => answer.map_err(|e| TransportError::Failed(e.to_string())),
        }
    }
}

/// Settings with small files and frequent snapshots, patient about time.
pub fn small(id: MemberId) -> Config {
    let mut config = Config::new("test", id, Timing::Relaxed);
    config.max_in_flight = 64;
    config.snapshot_every = 500;
    config.keep_applied = 640;
    config.log = LogOptions {
        segment_bytes: 64 << 10,
        batch_bytes: 16 << 10,
        cache_bytes: 32 << 10,
    };
    config
}

pub struct Member {
    pub node: Node,
    pub journal: Journal,
}

/// Three members in subdirectories of one directory.
pub struct Cluster {
    pub dir: PathBuf,
    pub net: Direct,
    pub members: BTreeMap<MemberId, Member>,
    pub config: fn(MemberId) -> Config,
}

impl Cluster {
    pub async fn start(dir: &Path, config: fn(MemberId) -> Config) -> Cluster {
        let mut cluster = Cluster {
            dir: dir.to_path_buf(),
            net: Direct::default(),
            members: BTreeMap::new(),
            config,
        };
        for id in 1..=3 {
            cluster.boot(id).await;
        }
        cluster
    }

    pub async fn create(dir: &Path, config: fn(MemberId) -> Config) -> Cluster {
        let cluster = Cluster::start(dir, config).await;
        let members = (1..=3).map(|id| (id, format!("member-{id}"))).collect();
        cluster.members[&1].node.initialize(members).await.unwrap();
        cluster
    }

    pub async fn boot(&mut self, id: MemberId) {
        let disk = FileDisk::open(self.dir.join(id.to_string())).unwrap();
        let journal = Journal::default();
        let node = Node::start((self.config)(id), disk, self.net.clone(), journal.clone())
            .await
            .unwrap();
        self.net.add(id, node.clone());
        self.members.insert(id, Member { node, journal });
    }

    /// Shuts a member down; its directory may be in use a little longer.
    pub async fn halt(&mut self, id: MemberId) {
        self.net.remove(id);
        self.members.remove(&id).unwrap().node.shutdown().await;
    }

    /// Shuts a member down and waits until its directory is free.
    pub async fn stop(&mut self, id: MemberId) {
        self.halt(id).await;
        let dir = self.dir.join(id.to_string());
        // The lock goes with the last handle, which library tasks may hold for a moment longer.
        for _ in 0..500 {
            if FileDisk::open(&dir).is_ok() {
                return;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        panic!("member {id} did not let go of its directory");
    }

    /// Proposes through whoever leads, trying until it is certain.
    pub async fn propose(&self, command: &[u8]) -> kvpool_raft::Applied {
        for _ in 0..3000 {
            for member in self.members.values() {
                if member.node.status().is_leader()
                    && let Ok(applied) = member.node.propose(Bytes::copy_from_slice(command)).await
                {
                    return applied;
                }
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        panic!("no leader took the proposal");
    }

    pub async fn leader(&self) -> MemberId {
        for _ in 0..3000 {
            if let Some((id, _)) = self.members.iter().find(|(_, m)| m.node.status().is_leader()) {
                return *id;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        panic!("no leader");
    }

    /// Waits until every running member has applied `index`.
    pub async fn applied(&self, index: u64) {
        for (id, member) in &self.members {
            let mut watch = member.node.applied_watch();
            let wait = watch.wait_for(|applied| *applied >= Some(index));
            let waited = tokio::time::timeout(Duration::from_secs(60), wait).await;
            assert!(
                waited.is_ok(),
                "member {id} did not apply {index}: {:?}",
                member.node.status()
            );
        }
    }
}
