//! The two roles: a shard (front ends, routing, store, peer server, session with the leader) and a proxy (the same
//! without store, peer server and session).

use std::sync::Arc;
use std::time::Duration;

use kvpool_client::{
    Client, ClientConfig, JoinToken, SessionState, ShardHello, ShardSession, ShardSummary, Timing, Trust,
    follow_slot_map,
};
use kvpool_state::records::{NodeRecord, ShardAddresses, SlotMap};
use kvpool_store::{Store, StoreError};
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::front::{FrontLimits, serve_lm, serve_resp};
use crate::metric_definitions as names;
use crate::peer::{Peer, server};
use crate::router::{Router, Upkeep};
use crate::stats;
use crate::transfer::Transfer;

/// How long a shard serves without having heard a leader (R9).
const ORPHAN_SERVE: Duration = Duration::from_secs(3600);
/// How long a process waits for the map from a coordinator before it asks seed shards.
const SEED_AFTER: Duration = Duration::from_secs(1);
/// Pause between two rounds of asking seed shards.
const SEED_EVERY: Duration = Duration::from_millis(500);
/// Memory faulted in per step, and the pause after it: the first touch of a page costs more than moving its bytes.
const PREFAULT_BYTES: usize = 4 << 20;
const PREFAULT_PAUSE: Duration = Duration::from_millis(4);
/// How often the standing with the leader is looked at, and the numbers published.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// Why a shard could not start.
#[derive(Debug, thiserror::Error)]
pub enum ShardError {
    /// No memory for the blocks.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// A part of it ended although nobody asked it to.
    #[error("failed to go on: a task ended: {0}")]
    Task(String),
}

/// A shard to be started.
pub struct ShardConfig {
    /// Unique in the cluster.
    pub id: String,
    /// The machine; copies of a slot go to different ones.
    pub node: String,
    /// Failure zone of the machine; empty for none.
    pub zone: String,
    pub pool: String,
    /// Hard limit of the store, in bytes.
    pub memory_bytes: u64,
    pub peer: TcpListener,
    pub resp: TcpListener,
    pub lm: TcpListener,
    /// Where others reach the listeners.
    pub addresses: ShardAddresses,
    /// Coordinators, each `host:port`.
    pub coordinators: Vec<String>,
    pub join_token: JoinToken,
    /// How gRPC with the coordinators is secured.
    pub trust: Trust,
    pub timing: Timing,
    pub shutdown: CancellationToken,
}

/// A proxy to be started.
pub struct ProxyConfig {
    pub pool: String,
    pub resp: TcpListener,
    pub lm: TcpListener,
    /// Coordinators, each `host:port`.
    pub coordinators: Vec<String>,
    /// Peer addresses of shards that have the map when no coordinator answers, each `host:port`.
    pub seed_shards: Vec<String>,
    pub join_token: JoinToken,
    /// How gRPC with the coordinators is secured.
    pub trust: Trust,
    pub timing: Timing,
    pub shutdown: CancellationToken,
}

/// Whether a process can serve, and if not, why.
#[derive(Clone)]
pub struct Health {
    router: Arc<Router>,
    session: Option<watch::Receiver<SessionState>>,
}

impl Health {
    /// What stands in the way of serving, one sentence each; empty when nothing does.
    #[must_use]
    pub fn obstacles(&self) -> Vec<String> {
        let mut obstacles = Vec::new();
        if let Some(session) = &self.session {
            let state = session.borrow();
            if state.incarnation.is_none() {
                let why = state.refused.as_ref().map_or(String::new(), |why| format!(" ({why})"));
                obstacles.push(format!("not registered with the coordinator yet{why}"));
            } else if !self.router.is_serving() {
                obstacles.push("out of contact with every coordinator for too long".to_owned());
            }
        }
        if self.router.known().epoch == 0 {
            obstacles.push("no slot map yet".to_owned());
        }
        obstacles
    }
}

/// Tasks that live until the process is told to stop.
struct Tasks {
    set: JoinSet<&'static str>,
    shutdown: CancellationToken,
}

impl Tasks {
    fn new(shutdown: CancellationToken) -> Self {
        Tasks {
            set: JoinSet::new(),
            shutdown,
        }
    }

    fn spawn(&mut self, name: &'static str, task: impl Future<Output = ()> + Send + 'static) {
        self.set.spawn(async move {
            task.await;
            name
        });
    }

    /// Runs `task` until shutdown.
    fn spawn_until(&mut self, name: &'static str, task: impl Future<Output = ()> + Send + 'static) {
        let shutdown = self.shutdown.clone();
        self.spawn(name, async move {
            tokio::select! {
                () = shutdown.cancelled() => {}
                () = task => {}
            }
        });
    }

    /// Waits until all have ended.
    async fn wait(mut self) -> Result<(), ShardError> {
        let mut result = Ok(());
        while let Some(ended) = self.set.join_next().await {
            let stopping = self.shutdown.is_cancelled();
            match ended {
                Ok(_) if stopping => {}
                Ok(name) => result = Err(ShardError::Task(name.to_owned())),
                Err(error) => result = Err(ShardError::Task(error.to_string())),
            }
            // Half a shard is worse than none: a supervisor starts it again, whole.
            self.shutdown.cancel();
        }
        result
    }
}

/// A running shard.
pub struct Shard {
    tasks: Tasks,
    health: Health,
}

impl Shard {
    /// Starts a shard; must be called within a tokio runtime.
    ///
    /// # Errors
    /// The store's memory could not be had.
    pub fn start(config: ShardConfig) -> Result<Shard, ShardError> {
        names::describe();
        let store = Store::new(config.memory_bytes)?;
        let token = config.join_token.reveal().to_owned();
        let (router, upkeep) = Router::new(config.id.clone(), config.pool.clone(), token, Some(store.clone()));
        router.set_serving(false);
        let client = Client::new(ClientConfig {
            endpoints: config.coordinators,
            join_token: config.join_token,
            trust: config.trust,
            timing: config.timing,
        });
        let hello = ShardHello {
            shard: config.id,
            pool: config.pool.clone(),
            node: NodeRecord {
                id: config.node,
                zone: config.zone,
                ..NodeRecord::default()
            },
            boot_id: uuid::Uuid::new_v4().to_string(),
            addresses: config.addresses,
            capacity_bytes: config.memory_bytes,
        };
        let (summary, summaries) = watch::channel(ShardSummary::default());
        let clearing = Arc::clone(&router);
        let session = ShardSession::start(client.clone(), hello, summaries, move || {
            let router = Arc::clone(&clearing);
            async move { router.leave() }
        });
        let session = Arc::new(session);
        let state = session.state();
        let mut tasks = Tasks::new(config.shutdown.clone());
        start_common(&mut tasks, &router, upkeep, config.resp, config.lm);
        let follower = follow_slot_map(client, config.pool.clone());
        tasks.spawn_until("slot map", adopt_maps(Arc::clone(&router), follower.0));
        let reporter = Arc::clone(&session);
        let pool = config.pool;
        let report = Box::new(move |epoch, ranges: &[_]| reporter.report_in_sync(pool.clone(), epoch, ranges));
        let transfer = Transfer::new(Arc::clone(&router), report);
        let again = Arc::clone(&transfer.again);
        tasks.spawn("transfer", transfer.run(config.shutdown.clone()));
        tasks.spawn_until("session", follow_session(Arc::clone(&router), state.clone(), again));
        tasks.spawn(
            "peer server",
            server::serve(config.peer, Arc::clone(&router), config.shutdown.clone()),
        );
        tasks.spawn_until("prefault", prefault(Arc::clone(&router), store));
        tasks.spawn_until(
            "numbers",
            stats::publish(Arc::clone(&router), Some(summary), LOOK_EVERY),
        );
        Ok(Shard {
            tasks,
            health: Health {
                router,
                session: Some(state),
            },
        })
    }

    /// Whether it can serve.
    #[must_use]
    pub fn health(&self) -> Health {
        self.health.clone()
    }

    /// Waits until it has stopped.
    ///
    /// # Errors
    /// A part of it ended by itself.
    pub async fn wait(self) -> Result<(), ShardError> {
        self.tasks.wait().await
    }
}

/// A running proxy.
pub struct Proxy {
    tasks: Tasks,
    health: Health,
}

impl Proxy {
    /// Starts a proxy; must be called within a tokio runtime.
    ///
    /// # Errors
    /// None at present; the same shape as a shard's.
    pub fn start(config: ProxyConfig) -> Result<Proxy, ShardError> {
        names::describe();
        let token = config.join_token.reveal().to_owned();
        let id = format!("proxy-{}", uuid::Uuid::new_v4());
        let (router, upkeep) = Router::new(id, config.pool.clone(), token, None);
        let client = Client::new(ClientConfig {
            endpoints: config.coordinators,
            join_token: config.join_token,
            trust: config.trust,
            timing: config.timing,
        });
        let mut tasks = Tasks::new(config.shutdown);
        start_common(&mut tasks, &router, upkeep, config.resp, config.lm);
        let follower = follow_slot_map(client, config.pool);
        tasks.spawn_until("slot map", adopt_maps(Arc::clone(&router), follower.0));
        tasks.spawn(
            "seeds",
            ask_seeds(Arc::clone(&router), config.seed_shards, tasks.shutdown.clone()),
        );
        tasks.spawn_until("numbers", stats::publish(Arc::clone(&router), None, LOOK_EVERY));
        Ok(Proxy {
            tasks,
            health: Health { router, session: None },
        })
    }

    /// Whether it can serve.
    #[must_use]
    pub fn health(&self) -> Health {
        self.health.clone()
    }

    /// Waits until it has stopped.
    ///
    /// # Errors
    /// A part of it ended by itself.
    pub async fn wait(self) -> Result<(), ShardError> {
        self.tasks.wait().await
    }
}

fn start_common(tasks: &mut Tasks, router: &Arc<Router>, upkeep: Upkeep, resp: TcpListener, lm: TcpListener) {
    let shutdown = tasks.shutdown.clone();
    tasks.spawn(
        "resp",
        serve_resp(resp, Arc::clone(router), FrontLimits::default(), shutdown.clone()),
    );
    tasks.spawn(
        "lm",
        serve_lm(lm, Arc::clone(router), FrontLimits::default(), shutdown.clone()),
    );
    tasks.spawn("upkeep", upkeep.run(shutdown));
}

/// Puts each newer map in force.
async fn adopt_maps(router: Arc<Router>, mut maps: watch::Receiver<Option<Arc<SlotMap>>>) {
    loop {
        let map = maps.borrow_and_update().clone();
        if let Some(map) = map {
            router.adopt(&map);
        }
        if maps.changed().await.is_err() {
            // The follower never ends by itself; if it did, the map from peers' replies would still be followed.
            warn!("the slot map is no longer followed");
            return std::future::pending().await;
        }
    }
}

/// A proxy that has no map asks shards for one.
async fn ask_seeds(router: Arc<Router>, seeds: Vec<String>, shutdown: CancellationToken) {
    let asking = async {
        sleep(SEED_AFTER).await;
        while router.known().epoch == 0 && !seeds.is_empty() {
            for seed in &seeds {
                let peer = Peer::new("seed", seed, 0, Arc::clone(router.identity()));
                match router.fetch_map(&peer).await {
                    Ok(true) => info!(seed, "got the slot map from a shard"),
                    Ok(false) => {}
                    Err(failure) => warn!(seed, %failure, "failed to get the slot map from a seed shard"),
                }
            }
            sleep(SEED_EVERY).await;
        }
    };
    tokio::select! {
        () = shutdown.cancelled() => return,
        () = asking => {}
    }
    shutdown.cancelled().await;
}

/// Takes over incarnations, and stops serving when no leader has been heard for too long.
async fn follow_session(
    router: Arc<Router>,
    mut session: watch::Receiver<SessionState>,
    again: Arc<tokio::sync::Notify>,
) {
    let mut refused = 0;
    loop {
        let state = session.borrow_and_update().clone();
        let incarnation = state.incarnation.unwrap_or(0);
        if incarnation != router.identity().incarnation() {
            if incarnation < router.identity().incarnation() && incarnation != 0 {
                names::violated("R4");
            }
            router.enlist(incarnation);
        }
        let heard = state.last_contact.is_some_and(|at| at.elapsed() < ORPHAN_SERVE);
        router.set_serving(incarnation != 0 && heard);
        metrics::gauge!(names::INCARNATION).set(incarnation as f64);
        metrics::gauge!(names::SERVING).set(if router.is_serving() { 1.0 } else { 0.0 });
        if state.refused_reports != refused {
            refused = state.refused_reports;
            again.notify_one();
        }
        tokio::select! {
            changed = session.changed() => {
                if changed.is_err() {
                    warn!("the session with the coordinator ended");
                    return;
                }
            }
            () = sleep(LOOK_EVERY) => {}
        }
    }
}

/// Faults the arena in, a little at a time, once the shard serves; later gives back what the heap does not need.
async fn prefault(router: Arc<Router>, store: Store) {
    while !router.is_serving() {
        sleep(LOOK_EVERY / 4).await;
    }
    loop {
        let step = store.clone();
        let done = tokio::task::spawn_blocking(move || step.prefault_step(PREFAULT_BYTES))
            .await
            .unwrap_or(0);
        sleep(if done == 0 { LOOK_EVERY } else { PREFAULT_PAUSE }).await;
    }
}
