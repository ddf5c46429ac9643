//! What the actors of one leadership share. It carries the term (R1) and ends with it.

use crate::actors::gate::{Gate, Permit};
use crate::actors::group::{GroupMsg, Join};
use crate::actors::inbox::Inbox;
use crate::actors::node_supervisor::NodeSupervisorMsg;
use crate::actors::observed::Observed;
use crate::core::{Core, wall_clock_ms};
use crate::metric_definitions as m;
use kvpool_policy::failure::{Limits, Suspicion};
use kvpool_policy::membership::{Brake, brake};
use kvpool_policy::placement::{Part, Shortfall};
use kvpool_proto::meta::{Reason, Refused};
use kvpool_proto::v1::{JoinReply, ShardHello, Welcome};
use kvpool_state::records::ShardRecord;
use kvpool_state::{Command, Refusal, Response};
use parking_lot::Mutex;
use ractor::rpc::CallResult;
use ractor::{ActorRef, RpcReplyPort};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio_util::sync::CancellationToken;

/// Registrations under way at once; beyond it shards come again a moment later.
const MAX_ATTACHING: usize = 256;

/// Members that ask to be let in at once.
const MAX_JOINING: usize = 64;

/// A shard asks for a session.
#[derive(Debug)]
pub(crate) struct Attach {
    pub(crate) hello: ShardHello,
    pub(crate) reply: RpcReplyPort<Result<Welcome, Refused>>,
    _permit: Permit,
}

/// What placement says of a pool.
#[derive(Clone, Debug, Default)]
pub(crate) struct Placement {
    /// Epoch of the map that it looked at.
    pub(crate) epoch: u64,
    pub(crate) settled: bool,
    /// What it can't do.
    pub(crate) shortfall: Vec<Shortfall>,
    /// The part that each shard had in it.
    pub(crate) parts: Vec<(String, Part)>,
}

/// A shard that this leader suspects.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Suspect {
    pub(crate) incarnation: u64,
    pub(crate) suspicion: Suspicion,
    /// Wall clock.
    pub(crate) since_ms: u64,
}

/// Those suspected at one moment.
#[derive(Default)]
pub(crate) struct Suspects(BTreeMap<String, Suspect>);

impl Suspects {
    /// What is suspected of this incarnation.
    pub(crate) fn of(&self, shard: &ShardRecord) -> Option<Suspect> {
        let suspect = self.0.get(&shard.id).copied()?;
        (suspect.incarnation == shard.incarnation).then_some(suspect)
    }
}

/// Why nobody of a pool is declared Down.
#[derive(Clone, Debug)]
pub(crate) struct Held {
    pub(crate) words: String,
    /// Wall clock.
    pub(crate) since_ms: u64,
    looked: Instant,
}

/// A brake that is held is not looked at again before: in a mass failure every node would.
const LOOK_AGAIN: Duration = Duration::from_millis(200);

pub(crate) struct Duty {
    pub(crate) core: Arc<Core>,
    pub(crate) term: u64,
    pub(crate) since: Instant,
    /// Cancelled when this leadership ends: its sessions end with it.
    pub(crate) end: CancellationToken,
    pub(crate) observed: Arc<Observed>,
    pub(crate) inbox: Inbox,
    /// What the newest plan of each pool said, for the status.
    pub(crate) placements: Mutex<BTreeMap<String, Placement>>,
    /// Shards that are Up and may soon not be. In this leader's memory only (R10, R11).
    pub(crate) suspects: Mutex<BTreeMap<String, Suspect>>,
    /// Pools whose brake is held.
    pub(crate) held: Mutex<BTreeMap<String, Held>>,
    /// Replaced when the supervisor is restarted.
    pub(crate) nodes: Mutex<Option<ActorRef<NodeSupervisorMsg>>>,
    attaching: Gate,
    /// Replaced when the actor is restarted.
    pub(crate) group: Mutex<Option<ActorRef<GroupMsg>>>,
    joining: Gate,
    /// What the group's next change waits for, for the status.
    pub(crate) group_waits: Mutex<Option<String>>,
}

impl Duty {
    pub(crate) fn new(core: Arc<Core>, term: u64) -> Arc<Self> {
        Arc::new(Duty {
            core,
            term,
            since: Instant::now(),
            end: CancellationToken::new(),
            observed: Arc::default(),
            inbox: Inbox::default(),
            placements: Mutex::default(),
            suspects: Mutex::default(),
            held: Mutex::default(),
            nodes: Mutex::default(),
            attaching: Gate::new("registrations", MAX_ATTACHING),
            group: Mutex::default(),
            joining: Gate::new("joins", MAX_JOINING),
            group_waits: Mutex::default(),
        })
    }

    pub(crate) fn limits(&self) -> Limits {
        let ms = |d: Duration| u64::try_from(d.as_millis()).unwrap_or(u64::MAX);
        let timing = self.core.timing;
        Limits {
            lease_ms: ms(timing.lease()),
            broken_grace_ms: ms(timing.broken_grace()),
            tick_ms: ms(self.tick()),
        }
    }

    /// How often a NodeActor looks at its shards.
    pub(crate) fn tick(&self) -> Duration {
        self.core.timing.broken_grace() / 4
    }

    /// Whom this leader suspects now: a copy, so that no lock is held while the state is read.
    pub(crate) fn suspects(&self) -> Suspects {
        Suspects(self.suspects.lock().clone())
    }

    /// Whether shards of a pool may be declared Down now. Keeps why not, for the status.
    pub(crate) fn may_declare(&self, pool: &str) -> bool {
        let mut held = self.held.lock();
        if held.get(pool).is_some_and(|h| h.looked.elapsed() < LOOK_AGAIN) {
            return false;
        }
        let suspects = self.suspects();
        let now_ms = wall_clock_ms();
        let brake = self.core.replica.read(|state| {
            let released = state.pool(pool).map_or(0, |p| p.brake_released_until_ms);
            brake(state.shards().filter(|s| s.pool == pool), released, now_ms, |s| {
                suspects.of(s).is_some_and(|x| x.suspicion.out_of_contact())
            })
        });
        let open = matches!(brake, Brake::Open);
        metrics::gauge!(m::BRAKE_HELD, "pool" => pool.to_owned()).set(f64::from(u8::from(!open)));
        match brake {
            Brake::Open => {
                if held.remove(pool).is_some() {
                    tracing::info!(pool, term = self.term, "the mass-failure brake is open again");
                }
            }
            Brake::Held(words) => {
                let since_ms = held.get(pool).map(|h| h.since_ms);
                if since_ms.is_none() {
                    tracing::warn!(pool, term = self.term, why = words, "the mass-failure brake is held");
                }
                let since_ms = since_ms.unwrap_or(now_ms);
                let looked = Instant::now();
                held.insert(
                    pool.to_owned(),
                    Held {
                        words,
                        since_ms,
                        looked,
                    },
                );
            }
        }
        open
    }

    /// Lets a member in under its name, or says why not.
    pub(crate) async fn join(&self, ask: kvpool_policy::group::Ask) -> Result<JoinReply, Refused> {
        let _permit = self.joining.enter()?;
        let again = || Refused::new(Reason::LeaseExpired, "this leader is not ready to take members yet");
        let group = self.group.lock().clone().ok_or_else(again)?;
        let ask = |reply| GroupMsg::Join(Box::new(Join { ask, reply, _permit }));
        match group.call(ask, Some(self.core.timing.attempt())).await {
            Ok(CallResult::Success(answer)) => answer,
            Ok(CallResult::Timeout) => Err(Refused::new(Reason::Unknown, "the admission took too long")),
            Ok(CallResult::SenderError) | Err(_) => Err(again()),
        }
    }

    /// Commits an effect of this term. Refused when the term is over: the new leader decides anew.
    pub(crate) async fn propose(&self, command: Command) -> Result<Response, Refused> {
        let status = self.core.status();
        if self.end.is_cancelled() || !status.is_leader() || status.term != self.term {
            return Err(self.core.elsewhere());
        }
        self.core.propose(&command, None).await
    }

    /// Gives a shard its session: as the incarnation it has, or as a new one.
    pub(crate) async fn attach(&self, hello: ShardHello) -> Result<Welcome, Refused> {
        let permit = self.attaching.enter()?;
        let again = || Refused::new(Reason::LeaseExpired, "the leader is not ready for sessions yet");
        let nodes = self.nodes.lock().clone().ok_or_else(again)?;
        let ask = |reply| {
            NodeSupervisorMsg::Attach(Box::new(Attach {
                hello,
                reply,
                _permit: permit,
            }))
        };
        match nodes.call(ask, Some(self.core.timing.attempt())).await {
            Ok(CallResult::Success(answer)) => answer,
            Ok(CallResult::Timeout) => Err(Refused::new(Reason::Unknown, "the registration took too long")),
            // The actor failed with the call inside, and is being restarted.
            Ok(CallResult::SenderError) | Err(_) => Err(again()),
        }
    }

    /// The answer to a shard that has a session.
    pub(crate) fn welcome(&self, incarnation: u64) -> Result<Welcome, Refused> {
        let cluster = self.core.replica.read(|s| s.cluster().cloned());
        let cluster = cluster.ok_or_else(|| Refused::new(Reason::NoCluster, "the cluster has not been created yet"))?;
        let ms = |d: Duration| u64::try_from(d.as_millis()).unwrap_or(u64::MAX);
        Ok(Welcome {
            cluster_id: cluster.cluster_id,
            cluster_generation: cluster.cluster_generation,
            term: self.term,
            incarnation,
            heartbeat_ms: ms(self.core.timing.heartbeat()),
            lease_ms: ms(self.core.timing.lease()),
        })
    }
}

/// A refusal by the state, as the caller of an API sees it.
pub(crate) fn refused_by_state(response: &Response) -> Option<Refused> {
    let refusal = response.refusal();
    let reason = match refusal {
        Refusal::None => return None,
        Refusal::NotCreated => Reason::NoCluster,
        Refusal::Full => Reason::Overload,
        Refusal::StaleIncarnation => Reason::StaleIncarnation,
        _ => Reason::Invalid,
    };
    Some(Refused::new(
        reason,
        format!("{}: {}", refusal.word(), response.message),
    ))
}
