//! The life of a member: serve, find out which cluster it belongs to, run raft and the actors, stop.

use crate::actors::start_root;
use crate::boot::{Me, Step, next_step};
use crate::config::{CoordinatorConfig, CoordinatorError};
use crate::core::{Core, Raft};
use crate::join::{join, stay};
use crate::metric_definitions::describe_metrics;
use crate::replica::Machine;
use crate::server::serve;
use crate::status::{report, set_gauges};
use crate::transport::GrpcTransport;
use futures::future::BoxFuture;
use kvpool_proto::Timing;
use kvpool_proto::v1::StatusReply;
use kvpool_raft::{Config, FileDisk, InitializeError, LogError, Marker, RaftNode, Timing as RaftTiming};
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::time::{interval, timeout};
use tokio_util::sync::CancellationToken;

/// How long calls that are under way may take at the end.
const LAST_CALLS: Duration = Duration::from_secs(2);

/// A member that is ready to run.
pub struct Coordinator {
    core: Arc<Core>,
    config: CoordinatorConfig,
    ready: watch::Sender<bool>,
}

/// Looks at a running member from outside. Clones share it.
#[derive(Clone)]
pub struct CoordinatorHandle {
    core: Arc<Core>,
    ready: watch::Receiver<bool>,
}

impl CoordinatorHandle {
    /// True while this member can serve: it belongs to a cluster and hears a leader.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        *self.ready.borrow()
    }

    /// Changes of [`Self::is_ready`].
    #[must_use]
    pub fn ready(&self) -> watch::Receiver<bool> {
        self.ready.clone()
    }

    /// What this member would say to a status call, without asking the leader.
    #[must_use]
    pub fn status(&self) -> StatusReply {
        report(&self.core)
    }
}

impl Coordinator {
    /// Checks the settings.
    ///
    /// # Errors
    /// [`CoordinatorError::Config`] with the setting that can't be.
    pub fn new(config: CoordinatorConfig) -> Result<Self, CoordinatorError> {
        config.check()?;
        describe_metrics();
        Ok(Coordinator {
            core: Core::new(&config),
            config,
            ready: watch::Sender::new(false),
        })
    }

    #[must_use]
    pub fn handle(&self) -> CoordinatorHandle {
        CoordinatorHandle {
            core: self.core.clone(),
            ready: self.ready.subscribe(),
        }
    }

    #[cfg(test)]
    pub(crate) fn core(&self) -> Arc<Core> {
        self.core.clone()
    }

    /// Runs until `shutdown` or until the member can't go on. Boxed here, so that no crate above compiles the member's
    /// code (all of openraft) once more.
    ///
    /// # Errors
    /// [`CoordinatorError`]: the process should exit with an error.
    #[must_use]
    pub fn run(self) -> BoxFuture<'static, Result<(), CoordinatorError>> {
        Box::pin(self.run_to_the_end())
    }

    async fn run_to_the_end(self) -> Result<(), CoordinatorError> {
        let Coordinator { core, config, ready } = self;
        let CoordinatorConfig {
            grpc,
            shutdown,
            data_dir,
            bootstrap,
            ..
        } = config;
        // The server outlives the rest by a moment, so that its calls end with a reason.
        let stop_server = CancellationToken::new();
        let mut server = spawn_server(&core, grpc, &stop_server);
        let outcome = tokio::select! {
            outcome = member(&core, data_dir, bootstrap, &ready, &shutdown) => outcome,
            ended = &mut server => {
                return Err(CoordinatorError::Serve(ended.map_or_else(|e| e.to_string(), |r| r.err().unwrap_or_default())));
            }
        };
        ready.send_replace(false);
        stop_server.cancel();
        if timeout(LAST_CALLS, &mut server).await.is_err() {
            server.abort();
        }
        outcome
    }
}

type ServerTask = tokio::task::JoinHandle<Result<(), String>>;

fn spawn_server(core: &Arc<Core>, listener: TcpListener, stop: &CancellationToken) -> ServerTask {
    let (core, stop) = (core.clone(), stop.clone());
    tokio::spawn(async move { serve(core, listener, stop).await })
}

async fn member(
    core: &Arc<Core>,
    data_dir: std::path::PathBuf,
    bootstrap: bool,
    ready: &watch::Sender<bool>,
    shutdown: &CancellationToken,
) -> Result<(), CoordinatorError> {
    let disk = open_disk(data_dir).await?;
    let marker = Marker::read(&disk)?;
    let mut me = Me {
        id: core.name,
        bootstrap: bootstrap && marker.is_none(),
        cluster_id: String::new(),
    };
    let mut raft_id = me.id;
    if let Some(marker) = marker {
        me.cluster_id = marker.cluster_id;
        // Another seed's disk is refused by raft; an id that was handed out is for the leader to judge.
        if !core.seeds.contains_key(&marker.member_id) {
            raft_id = marker.member_id;
        }
    } else {
        let step = tokio::select! {
            step = next_step(core, &me) => step?,
            () = shutdown.cancelled() => return Ok(()),
        };
        me.cluster_id = match step {
            Step::Adopt(id) => id,
            Step::Join(id) => {
                let boot = uuid::Uuid::new_v4().to_string();
                let joined = tokio::select! {
                    joined = join(core, &id, &boot, 0) => joined?,
                    () = shutdown.cancelled() => return Ok(()),
                };
                raft_id = joined;
                id
            }
            _ => uuid::Uuid::new_v4().to_string(),
        };
        tracing::info!(member = me.id, cluster = %me.cluster_id, raft_id, "this member joins a cluster");
    }
    let timing = match core.timing {
        Timing::Normal => RaftTiming::Normal,
        Timing::Relaxed => RaftTiming::Relaxed,
    };
    let transport = GrpcTransport::new(
        core.token.clone(),
        core.trust.clone(),
        core.timing,
        core.contacts.clone(),
    );
    let config = Config::new(me.cluster_id.clone(), raft_id, timing);
    let raft: Raft = RaftNode::start(config, disk, transport, Machine(core.replica.clone())).await?;
    core.raft_started(raft.clone(), &me.cluster_id);
    let outcome = tokio::select! {
        outcome = lead_or_follow(core, &raft, &me, ready) => outcome,
        refused = stay(core, raft_id) => Err(refused),
        () = shutdown.cancelled() => Ok(()),
    };
    if outcome.is_ok() {
        hand_over(core, &raft).await;
    }
    // Sessions and watches end; then the member stops.
    if let Some(duty) = core.duty.send_replace(None) {
        duty.end.cancel();
    }
    let _ = timeout(LAST_CALLS, raft.shutdown()).await;
    outcome
}

async fn open_disk(data_dir: std::path::PathBuf) -> Result<FileDisk, CoordinatorError> {
    let opened = tokio::task::spawn_blocking(move || FileDisk::open(data_dir)).await;
    let opened = opened.map_err(|e| CoordinatorError::Fatal(e.to_string()))?;
    opened.map_err(|source| {
        LogError::Io {
            what: "open the data directory".into(),
            source,
        }
        .into()
    })
}

async fn lead_or_follow(
    core: &Arc<Core>,
    raft: &Raft,
    me: &Me,
    ready: &watch::Sender<bool>,
) -> Result<(), CoordinatorError> {
    let (root, mut root_task) = start_root(core.clone())
        .await
        .map_err(|e| CoordinatorError::Fatal(e.to_string()))?;
    let _kill = KillOnDrop(root.get_cell());
    let mut status = raft.status_watch();
    let mut gauges = interval(Duration::from_secs(1));
    let create = create_cluster(core, raft, me);
    tokio::pin!(create);
    let mut created = false;
    loop {
        let now = status.borrow_and_update().clone();
        if let Some(why) = now.fatal {
            return Err(CoordinatorError::Fatal(why));
        }
        let serves = now.leader.is_some() && core.replica.read(|s| s.cluster().is_some());
        ready.send_if_modified(|held| std::mem::replace(held, serves && core.contacts.quorum(&core.status())) != *held);
        tokio::select! {
            outcome = &mut create, if !created => {
                outcome?;
                created = true;
            }
            changed = status.changed() => {
                if changed.is_err() {
                    return Err(CoordinatorError::Fatal("raft is gone".into()));
                }
            }
            _ = gauges.tick() => set_gauges(core),
            ended = &mut root_task => {
                return Err(CoordinatorError::Fatal(format!("the root actor ended: {ended:?}")));
            }
        }
    }
}

/// At first boot, on the member that creates the cluster; on the others nothing is to be done.
async fn create_cluster(core: &Core, raft: &Raft, me: &Me) -> Result<(), CoordinatorError> {
    let first = me.bootstrap || core.seeds.keys().next() == Some(&me.id);
    if raft.status().initialized() || !first {
        return Ok(());
    }
    if next_step(core, me).await? != Step::Initialize {
        return Ok(());
    }
    match raft.initialize(core.seeds.clone()).await {
        Ok(()) | Err(InitializeError::AlreadyInitialized) => Ok(()),
        // It is in the log: the election that follows commits it.
        Err(InitializeError::Unconfirmed) => Ok(()),
        Err(e) => Err(e.into()),
    }
}

/// A leader that goes down in an orderly way names its successor: changes pause for milliseconds, not for an election.
async fn hand_over(core: &Core, raft: &Raft) {
    let status = raft.status();
    if !status.is_leader() {
        return;
    }
    let reachable = status.followers.iter().filter(|(id, _)| core.contacts.reachable(**id));
    if let Some((to, _)) = reachable.min_by_key(|(_, f)| f.lag) {
        let _ = timeout(LAST_CALLS / 2, raft.transfer_leader(*to)).await;
        let mut watch = raft.status_watch();
        let gone = watch.wait_for(|s| !s.is_leader());
        let _ = timeout(LAST_CALLS / 2, gone).await;
    }
}

/// The tree is killed, not stopped: no handler is waited for.
struct KillOnDrop(ractor::ActorCell);

impl Drop for KillOnDrop {
    fn drop(&mut self) {
        self.0.kill();
    }
}
