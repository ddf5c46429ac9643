//! The session of a shard: one background task keeps exactly one session with the leader, for ever.
//!
//! Invariants: a Welcome of an older term is never adopted (R1); a new incarnation is adopted only after the store was
//! cleared; the incarnation stays in force while no leader can be reached (R9: the caller bounds that by `orphan_serve`).

use crate::backoff::Backoff;
use crate::client::Client;
use crate::metric_definitions as m;
use crate::reports::Reports;
use kvpool_proto::limits;
use kvpool_proto::meta::{Reason, Refused};
use kvpool_proto::v1::nodes_client::NodesClient;
use kvpool_proto::v1::{self, Heartbeat, PeerReport, SessionDown, SessionUp, Welcome, session_down, session_up};
use kvpool_state::records::{NodeRecord, ShardAddresses, SlotRange};
use parking_lot::Mutex;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{Notify, mpsc, watch};
use tokio::task::JoinHandle;
use tokio::time::{Instant, MissedTickBehavior, interval, sleep, timeout};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Status, Streaming};

/// Messages that wait for the connection; a session that can't send for this many is broken.
const QUEUE: usize = 16;

/// Who a shard is. The same for the whole life of the process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShardHello {
    pub shard: String,
    pub pool: String,
    pub node: NodeRecord,
    /// Random, chosen at process start.
    pub boot_id: String,
    pub addresses: ShardAddresses,
    pub capacity_bytes: u64,
}

/// What a heartbeat tells.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ShardSummary {
    pub used_bytes: u64,
    /// Epoch of the slot map that the shard holds.
    pub epoch: u64,
    /// Other shards that don't answer it, the longest silent first; the first 16 are told.
    pub unreachable: Vec<PeerReport>,
    /// How many don't answer it, and how many it knows in all.
    pub unreachable_peers: u32,
    pub peers: u32,
}

/// Reports in one heartbeat: the leader looks at no more.
pub const MAX_PEER_REPORTS: usize = 16;

/// Where the session stands.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SessionState {
    /// `None` before the first registration, and while the store is cleared for a new one.
    pub incarnation: Option<u64>,
    /// Empty before the first registration.
    pub cluster_id: String,
    pub cluster_generation: u64,
    /// Highest term heard.
    pub term: u64,
    pub connected: bool,
    /// When a leader was heard last.
    pub last_contact: Option<std::time::Instant>,
    /// Grows with each in-sync report that the leader refused: complete copies that the newest map still lists as filling
    /// must be reported again.
    pub refused_reports: u64,
    /// Why the last attempt was refused, for people.
    pub refused: Option<String>,
}

/// The handle of the background task. Dropping it ends the session.
pub struct ShardSession {
    state: watch::Receiver<SessionState>,
    reports: Arc<Shared>,
    task: JoinHandle<()>,
}

#[derive(Default)]
struct Shared {
    reports: Mutex<Reports>,
    wake: Notify,
}

impl ShardSession {
    /// Starts the task. `clear` empties the store; it runs before a new incarnation is adopted.
    #[must_use]
    pub fn start<F, Fut>(
        client: Client,
        hello: ShardHello,
        summary: watch::Receiver<ShardSummary>,
        clear: F,
    ) -> ShardSession
    where
        F: Fn() -> Fut + Send + Sync + 'static,
        Fut: Future<Output = ()> + Send + 'static,
    {
        let (tx, state) = watch::channel(SessionState::default());
        let shared = Arc::new(Shared::default());
        let keeper = Keeper {
            client,
            hello,
            summary,
            clear,
            tx,
            shared: shared.clone(),
        };
        ShardSession {
            state,
            reports: shared,
            task: tokio::spawn(keeper.run()),
        }
    }

    #[must_use]
    pub fn state(&self) -> watch::Receiver<SessionState> {
        self.state.clone()
    }

    /// Says that the copies of these slots are complete as of the map of `epoch`. Reports merge and are sent again after a
    /// reconnect. The leader refuses a report when a plan took slots from this shard after `epoch`: so report again whenever
    /// a newer map still lists a complete copy as filling, or `refused_reports` grew.
    pub fn report_in_sync(&self, pool: String, epoch: u64, ranges: &[SlotRange]) {
        self.reports.reports.lock().add(pool, epoch, ranges);
        self.reports.wake.notify_one();
    }
}

impl Drop for ShardSession {
    fn drop(&mut self) {
        self.task.abort();
    }
}

struct Keeper<F> {
    client: Client,
    hello: ShardHello,
    summary: watch::Receiver<ShardSummary>,
    clear: F,
    tx: watch::Sender<SessionState>,
    shared: Arc<Shared>,
}

/// One open session.
struct Open {
    up: mpsc::Sender<SessionUp>,
    down: Streaming<SessionDown>,
    welcome: Welcome,
}

impl<F, Fut> Keeper<F>
where
    F: Fn() -> Fut + Send + Sync + 'static,
    Fut: Future<Output = ()> + Send + 'static,
{
    async fn run(self) {
        let most = self.client.timing().heartbeat();
        let mut backoff = Backoff::new(Duration::from_millis(20), most);
        let mut turn: usize = rand::random_range(0..1024);
        let mut hint: Option<String> = None;
        loop {
            let endpoints = self.client.endpoints();
            let configured = || endpoints.get(turn % endpoints.len().max(1)).cloned();
            let told = hint.is_some();
            let address = hint.take().or_else(configured).unwrap_or_default();
            let status = match self.open(&address).await {
                Ok(open) => {
                    backoff.reset();
                    self.keep(open).await
                }
                Err(status) => status,
            };
            self.shared.reports.lock().broken();
            let refused = Refused::from_status(&status);
            if refused.is_none() {
                self.client.forget(&address);
            }
            let reason = refused.as_ref().map_or("unreachable", |r| r.reason.word());
            metrics::counter!(m::SESSION_ENDS, "reason" => reason).increment(1);
            metrics::gauge!(m::SESSION_UP).set(0.0);
            self.say_why(&address, refused.as_ref(), &status);
            hint = refused.and_then(|r| r.leader).filter(|leader| *leader != address);
            turn += 1;
            if hint.is_some() && !told {
                // Somebody says who leads: ask that one at once. Only one step, for two members could name each other.
                continue;
            }
            sleep(backoff.next_wait()).await;
        }
    }

    fn say_why(&self, address: &str, refused: Option<&Refused>, status: &Status) {
        let lasting = refused.filter(|r| {
            matches!(
                r.reason,
                Reason::JoinToken | Reason::NotAllowed | Reason::ClusterId | Reason::DuplicateShard | Reason::Invalid
            )
        });
        let why = lasting.map(|r| format!("{}: {}", r.reason.word(), r.message));
        if let Some(why) = &why {
            tracing::warn!(%address, shard = %self.hello.shard, why, "the leader refuses this shard");
        } else {
            tracing::debug!(%address, shard = %self.hello.shard, why = status.message(), "no session");
        }
        self.tx.send_modify(|s| {
            s.connected = false;
            s.refused = why;
        });
    }

    async fn open(&self, address: &str) -> Result<Open, Status> {
        let patience = self.client.timing().attempt();
        let channel = self.client.channel(address).map_err(Status::unavailable)?;
        let mut nodes = NodesClient::new(channel)
            .max_decoding_message_size(limits::MAX_SESSION_BYTES)
            .max_encoding_message_size(limits::MAX_SESSION_BYTES);
        let (up, rx) = mpsc::channel(QUEUE);
        // The queue is empty and has room for it.
        let _ = up.try_send(SessionUp {
            what: Some(session_up::What::Hello(self.hello_message())),
        });
        let late = |_| Status::unavailable("no answer in time");
        let opened = timeout(patience, nodes.session(ReceiverStream::new(rx)))
            .await
            .map_err(late)?;
        let mut down = opened?.into_inner();
        // The leader registers the shard before it answers: that takes a commit.
        match timeout(patience * 2, down.message()).await.map_err(late)?? {
            Some(SessionDown {
                what: Some(session_down::What::Welcome(welcome)),
            }) => Ok(Open { up, down, welcome }),
            _ => Err(Status::unavailable("the session ended before its welcome")),
        }
    }

    fn hello_message(&self) -> v1::ShardHello {
        let state = self.tx.borrow();
        let hello = &self.hello;
        v1::ShardHello {
            cluster_id: state.cluster_id.clone(),
            shard: hello.shard.clone(),
            pool: hello.pool.clone(),
            node: Some(hello.node.clone()),
            boot_id: hello.boot_id.clone(),
            addresses: Some(hello.addresses.clone()),
            capacity_bytes: hello.capacity_bytes,
            incarnation: state.incarnation.unwrap_or(0),
        }
    }

    /// Takes the incarnation over, or refuses a leader of the past or of another cluster.
    async fn adopt(&self, welcome: &Welcome) -> Result<(), Status> {
        let held = self.tx.borrow().clone();
        if !held.cluster_id.is_empty() && held.cluster_id != welcome.cluster_id {
            let message = format!(
                "the leader is of cluster {}, not {}",
                welcome.cluster_id, held.cluster_id
            );
            return Err(Refused::new(Reason::ClusterId, message).into());
        }
        let heard = (held.cluster_generation, held.term);
        if (welcome.cluster_generation, welcome.term) < heard || welcome.incarnation == 0 {
            return Err(Status::unavailable("the welcome is of an older term"));
        }
        if held.incarnation != Some(welcome.incarnation) {
            self.tx.send_modify(|s| s.incarnation = None);
            self.shared.reports.lock().clear();
            (self.clear)().await;
        }
        self.tx.send_modify(|s| {
            s.incarnation = Some(welcome.incarnation);
            s.cluster_id.clone_from(&welcome.cluster_id);
            s.cluster_generation = welcome.cluster_generation;
            s.term = welcome.term;
            s.connected = true;
            s.last_contact = Some(std::time::Instant::now());
            s.refused = None;
        });
        metrics::gauge!(m::SESSION_UP).set(1.0);
        Ok(())
    }

    /// Heartbeats and reports up, beats and answers down, until the session breaks.
    async fn keep(&self, mut open: Open) -> Status {
        if let Err(status) = self.adopt(&open.welcome).await {
            return status;
        }
        let timing = self.client.timing();
        let bounded = |ms: u64, most: Duration| Duration::from_millis(ms).clamp(Duration::from_millis(10), most);
        let mut beat = interval(bounded(open.welcome.heartbeat_ms, timing.heartbeat() * 4));
        beat.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let silence = bounded(open.welcome.lease_ms, timing.lease() * 4);
        let mut heard = Instant::now();
        loop {
            let sent = tokio::select! {
                message = open.down.message() => match message {
                    Ok(Some(message)) => {
                        heard = Instant::now();
                        if let Err(status) = self.receive(message) {
                            return status;
                        }
                        true
                    }
                    Ok(None) => return Status::unavailable("the leader ended the session"),
                    Err(status) => return status,
                },
                _ = beat.tick() => {
                    if heard.elapsed() > silence {
                        return Status::unavailable("the leader fell silent");
                    }
                    self.send_heartbeat(&open)
                }
                () = self.shared.wake.notified() => true,
            };
            if !sent || !self.send_report(&open) {
                return Status::unavailable("the session does not take messages");
            }
        }
    }

    fn receive(&self, message: SessionDown) -> Result<(), Status> {
        match message.what {
            Some(session_down::What::Beat(beat)) => {
                if beat.term < self.tx.borrow().term {
                    return Err(Status::unavailable("the leader is of an older term"));
                }
                self.tx.send_modify(|s| {
                    s.term = beat.term;
                    s.last_contact = Some(std::time::Instant::now());
                });
            }
            Some(session_down::What::InSyncDone(done)) => {
                self.shared.reports.lock().done(done.sequence);
                if done.refused {
                    self.tx.send_modify(|s| s.refused_reports += 1);
                }
            }
            _ => {}
        }
        Ok(())
    }

    fn send_heartbeat(&self, open: &Open) -> bool {
        let summary = self.summary.borrow().clone();
        let heartbeat = Heartbeat {
            used_bytes: summary.used_bytes,
            epoch: summary.epoch,
            unreachable: summary.unreachable.into_iter().take(MAX_PEER_REPORTS).collect(),
            unreachable_peers: summary.unreachable_peers,
            peers: summary.peers,
        };
        open.up
            .try_send(SessionUp {
                what: Some(session_up::What::Heartbeat(heartbeat)),
            })
            .is_ok()
    }

    fn send_report(&self, open: &Open) -> bool {
        let report = {
            let mut reports = self.shared.reports.lock();
            metrics::gauge!(m::REPORT_DEPTH).set(f64::from(reports.depth()));
            reports.next()
        };
        report.is_none_or(|report| {
            open.up
                .try_send(SessionUp {
                    what: Some(session_up::What::InSync(report)),
                })
                .is_ok()
        })
    }
}
