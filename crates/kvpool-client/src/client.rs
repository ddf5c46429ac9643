//! Unary calls: which member is asked next, what is retried, and when to give up.

use crate::backoff::Backoff;
use crate::channel::{Authenticated, Channels};
use crate::error::ClientError;
use crate::metric_definitions as m;
use crate::watch::{WatchFilter, WatchStream};
use kvpool_net::Trust;
use kvpool_proto::meta::{Reason, Refused};
use kvpool_proto::v1::cluster_client::ClusterClient;
use kvpool_proto::v1::{
    ConfigurePoolRequest, DrainShardRequest, Kind, ListReply, ListRequest, ReleaseBrakeRequest, RemoveShardRequest,
    ScaleCoordinatorsRequest, StatusReply, StatusRequest,
};
use kvpool_proto::{JoinToken, Timing, limits};
use kvpool_state::Response;
use kvpool_state::records::{Record, RequestId};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tokio::time::{Instant, sleep, timeout};
use tonic::Status;

/// How to reach a cluster.
#[derive(Clone, Debug)]
pub struct ClientConfig {
    /// Coordinators, each `host:port`.
    pub endpoints: Vec<String>,
    pub join_token: JoinToken,
    pub trust: Trust,
    pub timing: Timing,
}

/// A list and the revision it is of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listed {
    pub revision: u64,
    pub records: Vec<Record>,
}

/// A client of the coordinator. Clones share its connections.
#[derive(Clone)]
pub struct Client(Arc<Inner>);

struct Inner {
    endpoints: Vec<String>,
    timing: Timing,
    channels: Channels,
    /// Whom the last successful call or hint named.
    preferred: Mutex<Option<String>>,
    client_id: u64,
    sequence: AtomicU64,
}

pub(crate) type Cluster = ClusterClient<Authenticated>;

impl Client {
    /// Makes a client; connections are made by the first call.
    #[must_use]
    pub fn new(config: ClientConfig) -> Client {
        crate::metric_definitions::describe_metrics();
        Client(Arc::new(Inner {
            channels: Channels::new(config.join_token, config.trust, config.timing),
            endpoints: config.endpoints,
            timing: config.timing,
            preferred: Mutex::new(None),
            client_id: rand::random(),
            sequence: AtomicU64::new(1),
        }))
    }

    /// Every record of a kind ([`Kind::Unspecified`]: all kinds). Linearizable: sees every write acknowledged before.
    ///
    /// # Errors
    /// [`ClientError`] when no member gave an answer in time.
    pub async fn list(&self, kind: Kind) -> Result<Listed, ClientError> {
        let request = ListRequest { kind: kind.into() };
        let reply: ListReply = self
            .call("list", |mut c: Cluster| async move { c.list(request).await })
            .await?;
        let records = reply.records.into_iter().filter_map(|e| e.record).collect();
        Ok(Listed {
            revision: reply.revision,
            records,
        })
    }

    /// What is degraded and why. Without a quorum the asked member answers for itself.
    ///
    /// # Errors
    /// [`ClientError`] when no member gave an answer in time.
    pub async fn status(&self) -> Result<StatusReply, ClientError> {
        self.call(
            "status",
            |mut c: Cluster| async move { c.status(StatusRequest {}).await },
        )
        .await
    }

    /// Creates a pool or changes its factor. A refusal by the state is in the response.
    ///
    /// # Errors
    /// [`ClientError`]; after [`ClientError::Deadline`] the change may or may not have happened.
    pub async fn configure_pool(&self, name: &str, factor: u32) -> Result<Response, ClientError> {
        let request = ConfigurePoolRequest {
            request_id: Some(self.request_id()),
            pool: name.to_owned(),
            factor,
        };
        self.call("configure_pool", |mut c: Cluster| {
            let request = request.clone();
            async move { c.configure_pool(request).await }
        })
        .await
    }

    /// Asks a shard to leave, or (`out` false) takes that back. It has left when its state is Drained. A refusal by the state is
    /// in the response.
    ///
    /// # Errors
    /// [`ClientError`]; after [`ClientError::Deadline`] the change may or may not have happened.
    pub async fn drain_shard(&self, shard: &str, out: bool, why: &str) -> Result<Response, ClientError> {
        let request = DrainShardRequest {
            request_id: Some(self.request_id()),
            shard: shard.to_owned(),
            out,
            why: why.to_owned(),
        };
        self.call("drain_shard", |mut c: Cluster| {
            let request = request.clone();
            async move { c.drain_shard(request).await }
        })
        .await
    }

    /// Forgets a shard that is Drained or Down and whose process is gone. A refusal by the state is in the response.
    ///
    /// # Errors
    /// [`ClientError`]; it says so when the process still runs.
    pub async fn remove_shard(&self, shard: &str) -> Result<Response, ClientError> {
        let request = RemoveShardRequest {
            request_id: Some(self.request_id()),
            shard: shard.to_owned(),
        };
        self.call("remove_shard", |mut c: Cluster| {
            let request = request.clone();
            async move { c.remove_shard(request).await }
        })
        .await
    }

    /// Lets any number of shards of a pool be declared Down for a while (milliseconds, at most an hour).
    ///
    /// # Errors
    /// [`ClientError`]; after [`ClientError::Deadline`] the change may or may not have happened.
    pub async fn release_brake(&self, pool: &str, for_ms: u64) -> Result<Response, ClientError> {
        let request = ReleaseBrakeRequest {
            request_id: Some(self.request_id()),
            pool: pool.to_owned(),
            for_ms,
        };
        self.call("release_brake", |mut c: Cluster| {
            let request = request.clone();
            async move { c.release_brake(request).await }
        })
        .await
    }

    /// Says how many coordinators are wanted: 1, 3 or 5. A refusal by the state is in the response.
    ///
    /// # Errors
    /// [`ClientError`]; after [`ClientError::Deadline`] the change may or may not have happened.
    pub async fn scale_coordinators(&self, target: u32, why: &str) -> Result<Response, ClientError> {
        let request = ScaleCoordinatorsRequest {
            request_id: Some(self.request_id()),
            target,
            why: why.to_owned(),
        };
        self.call("scale_coordinators", |mut c: Cluster| {
            let request = request.clone();
            async move { c.scale_coordinators(request).await }
        })
        .await
    }

    /// Changes above `from_revision` (0: begin with a relist), for ever, over whichever member serves them.
    #[must_use]
    pub fn watch(&self, filter: WatchFilter, from_revision: u64) -> WatchStream {
        WatchStream::start(self.clone(), filter, from_revision)
    }

    pub fn timing(&self) -> Timing {
        self.0.timing
    }

    /// A new request id. Keep it over the retries of one write (R2).
    #[must_use]
    pub fn request_id(&self) -> RequestId {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        RequestId {
            created_at_ms: u64::try_from(now.as_millis()).unwrap_or(u64::MAX),
            client: self.0.client_id,
            sequence: self.0.sequence.fetch_add(1, Ordering::Relaxed),
        }
    }

    pub(crate) fn endpoints(&self) -> &[String] {
        &self.0.endpoints
    }

    pub(crate) fn channel(&self, address: &str) -> Result<Authenticated, String> {
        self.0.channels.get(address)
    }

    pub(crate) fn forget(&self, address: &str) {
        self.0.channels.forget(address);
    }

    pub(crate) fn cluster(&self, address: &str) -> Result<Cluster, String> {
        Ok(ClusterClient::new(self.channel(address)?)
            .max_decoding_message_size(limits::MAX_MESSAGE_BYTES)
            .max_encoding_message_size(limits::MAX_MESSAGE_BYTES))
    }

    /// One member after the other until one answers, the time is over, or every member says that there is no quorum.
    async fn call<T, F, Fut>(&self, name: &'static str, ask: F) -> Result<T, ClientError>
    where
        F: Fn(Cluster) -> Fut,
        Fut: Future<Output = Result<tonic::Response<T>, Status>>,
    {
        let mut plan = CallPlan::new(self);
        loop {
            let address = plan.next_address()?;
            let left = plan.deadline.saturating_duration_since(Instant::now());
            let attempt = left.min(self.0.timing.attempt());
            let result = match self.cluster(&address) {
                Ok(client) => timeout(attempt, ask(client)).await,
                Err(e) => Ok(Err(Status::unavailable(e))),
            };
            let status = match result {
                Ok(Ok(reply)) => {
                    *self.0.preferred.lock() = Some(address);
                    return Ok(reply.into_inner());
                }
                Ok(Err(status)) => status,
                Err(_) => Status::deadline_exceeded(format!("{address} did not answer in time")),
            };
            let refused = Refused::from_status(&status);
            if refused.is_none() {
                self.forget(&address);
            }
            metrics::counter!(m::RETRIES, "call" => name, "reason" => word(refused.as_ref())).increment(1);
            plan.failed(&address, refused, &status).await?;
        }
    }
}

fn word(refused: Option<&Refused>) -> &'static str {
    refused.map_or("unreachable", |r| r.reason.word())
}

/// Why a member is of no use now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Dead {
    NoQuorum,
    /// The first time it may be the connection that is dead, not the member (fault O12).
    NotReached {
        times: u32,
    },
}

/// Where one call stands.
struct CallPlan<'a> {
    client: &'a Inner,
    started: Instant,
    deadline: Instant,
    backoff: Backoff,
    next: Option<String>,
    /// Position in the configured endpoints.
    turn: usize,
    /// Members that are of no use now.
    dead: BTreeMap<String, Dead>,
    last: String,
}

impl<'a> CallPlan<'a> {
    fn new(client: &'a Client) -> Self {
        let inner: &Inner = &client.0;
        let started = Instant::now();
        CallPlan {
            client: inner,
            started,
            deadline: started + inner.timing.call(),
            backoff: Backoff::new(Duration::from_millis(20), Duration::from_millis(500)),
            next: inner.preferred.lock().clone(),
            turn: rand::random_range(0..inner.endpoints.len().max(1)),
            dead: BTreeMap::new(),
            last: "no attempt was made".into(),
        }
    }

    fn next_address(&mut self) -> Result<String, ClientError> {
        if let Some(address) = self.next.take() {
            return Ok(address);
        }
        self.turn += 1;
        let endpoints = &self.client.endpoints;
        match endpoints.get(self.turn % endpoints.len().max(1)) {
            Some(address) => Ok(address.clone()),
            None => Err(self.unreachable()),
        }
    }

    /// Decides what follows a failed attempt, and waits where waiting helps.
    async fn failed(&mut self, address: &str, refused: Option<Refused>, status: &Status) -> Result<(), ClientError> {
        self.last = status.message().to_owned();
        *self.client.preferred.lock() = None;
        let mut wait = self.backoff.next_wait();
        match refused {
            None => {
                let times = match self.dead.get(address) {
                    Some(Dead::NotReached { times }) => times + 1,
                    _ => 1,
                };
                self.dead.insert(address.to_owned(), Dead::NotReached { times });
            }
            Some(r) if r.reason == Reason::NoQuorum => {
                self.dead.insert(address.to_owned(), Dead::NoQuorum);
            }
            Some(r) => {
                self.dead.remove(address);
                match r.reason {
                    Reason::Overload => {
                        wait = wait.max(r.retry_after.unwrap_or_default());
                        self.next = Some(address.to_owned());
                    }
                    Reason::NotLeader if r.leader.is_some() => self.next = r.leader,
                    Reason::NotLeader
                    | Reason::LeaseExpired
                    | Reason::NoCluster
                    | Reason::Unknown
                    | Reason::Stopping => {}
                    _ => return Err(ClientError::Refused(Box::new(r))),
                }
            }
        }
        self.give_up()?;
        if self.deadline.saturating_duration_since(Instant::now()) <= wait {
            let seconds = self.client.timing.call().as_secs();
            return Err(ClientError::Deadline {
                seconds,
                last: self.last.clone(),
            });
        }
        sleep(wait).await;
        Ok(())
    }

    /// Once every configured member was tried in vain, going on helps only while an election may be under way.
    fn give_up(&self) -> Result<(), ClientError> {
        let all = self.client.endpoints.iter().all(|e| self.dead.contains_key(e));
        if !all {
            return Ok(());
        }
        if self.dead.values().any(|d| *d == Dead::NoQuorum) {
            return Err(ClientError::NoQuorum(self.last.clone()));
        }
        let again = self.dead.values().all(|d| *d != Dead::NotReached { times: 1 });
        if again && self.started.elapsed() > self.client.timing.attempt() {
            return Err(self.unreachable());
        }
        Ok(())
    }

    fn unreachable(&self) -> ClientError {
        let endpoints = self.client.endpoints.join(", ");
        ClientError::Unreachable {
            endpoints,
            last: self.last.clone(),
        }
    }
}
