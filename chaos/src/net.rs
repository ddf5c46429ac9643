//! A simulated network: delay, loss, duplication, reordering, and cuts in either direction.
//!
//! Invariant: a message may be lost, late or delivered twice, never changed.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use futures::channel::oneshot;
use kvpool_raft::{AsyncRuntime, Lane, MemberId, Peer, RaftNode, Transport, TransportError};

use crate::disk::SimDisk;
use crate::machine::Machine;
use crate::runtime::Sim;
use crate::world;

/// A member as the simulator runs it.
pub type Node = RaftNode<Machine, SimDisk, Sim>;

/// How bad the network is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Weather {
    /// Messages lost, in a thousand.
    pub loss: u64,
    /// Messages delivered twice, in a thousand.
    pub duplicate: u64,
    /// Longest usual delay in microseconds.
    pub delay: u64,
    /// Messages that take up to 300 ms, in a thousand.
    pub straggle: u64,
}

impl Weather {
    /// A local network.
    pub const FAIR: Weather = Weather {
        loss: 0,
        duplicate: 5,
        delay: 2_000,
        straggle: 1,
    };
    /// A bad day.
    pub const FOUL: Weather = Weather {
        loss: 60,
        duplicate: 60,
        delay: 15_000,
        straggle: 30,
    };
}

struct State {
    nodes: BTreeMap<MemberId, Node>,
    /// Directed pairs that are cut.
    cuts: BTreeSet<(MemberId, MemberId)>,
    weather: Weather,
    grant_pre_votes: bool,
}

/// The network all members share.
#[derive(Clone)]
pub struct Net {
    state: Arc<Mutex<State>>,
}

/// One member's end of it.
#[derive(Clone)]
pub struct End {
    net: Net,
    from: MemberId,
}

impl Net {
    /// A fair network without members.
    #[allow(clippy::new_without_default, reason = "it is no default of anything")]
    pub fn new() -> Net {
        let state = State {
            nodes: BTreeMap::new(),
            cuts: BTreeSet::new(),
            weather: Weather::FAIR,
            grant_pre_votes: false,
        };
        Net {
            state: Arc::new(Mutex::new(state)),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The transport of member `from`.
    pub fn end(&self, from: MemberId) -> End {
        End {
            net: self.clone(),
            from,
        }
    }

    /// Connects a running member.
    pub fn plug(&self, id: MemberId, node: Node) {
        let old = self.lock().nodes.insert(id, node);
        drop(old);
    }

    /// Disconnects a member that no longer runs.
    pub fn unplug(&self, id: MemberId) {
        let old = self.lock().nodes.remove(&id);
        drop(old);
    }

    /// A running member.
    pub fn node(&self, id: MemberId) -> Option<Node> {
        self.lock().nodes.get(&id).cloned()
    }

    /// Cuts one direction.
    pub fn cut(&self, from: MemberId, to: MemberId) {
        self.lock().cuts.insert((from, to));
    }

    /// Mends every cut.
    pub fn heal(&self) {
        self.lock().cuts.clear();
    }

    /// Changes the weather.
    pub fn set_weather(&self, weather: Weather) {
        self.lock().weather = weather;
    }

    /// Makes the network answer every pre-vote with a grant, as a transport without pre-vote does.
    pub fn grant_pre_votes(&self) {
        self.lock().grant_pre_votes = true;
    }

    /// One trip: `None` when the message is lost, else how long it takes.
    pub fn trip(&self, from: MemberId, to: MemberId) -> Option<Duration> {
        let state = self.lock();
        let w = state.weather;
        if state.cuts.contains(&(from, to)) || world::chance(w.loss) {
            return None;
        }
        let micros = 50
            + world::random(w.delay)
            + if world::chance(w.straggle) {
                world::random(300_000)
            } else {
                0
            };
        Some(Duration::from_micros(micros))
    }

    /// Carries one copy of a request there and its reply back.
    fn deliver(&self, from: MemberId, to: MemberId, message: Bytes, reply: Option<oneshot::Sender<Answer>>) {
        let Some(delay) = self.trip(from, to) else { return };
        let net = self.clone();
        world::spawn_at(world::OUTSIDE, async move {
            world::sleep(delay).await;
            let Some(node) = net.node(to) else {
                if let Some(reply) = reply {
                    let _ = reply.send(Err(TransportError::Unreachable("connection refused".to_string())));
                }
                return;
            };
            // Handled at the receiver, so that it dies and freezes with it.
            world::spawn_at(to, async move {
                let answer = node
                    .handle(message)
                    .await
                    .map_err(|e| TransportError::Failed(e.to_string()));
                drop(node);
                let Some(delay) = net.trip(to, from) else { return };
                world::spawn_at(world::OUTSIDE, async move {
                    world::sleep(delay).await;
                    if let Some(reply) = reply {
                        let _ = reply.send(answer);
                    }
                });
            });
        });
    }
}

type Answer = Result<Bytes, TransportError>;

impl Transport for End {
    async fn send(&self, to: &Peer, _lane: Lane, message: Bytes, ttl: Duration) -> Result<Bytes, TransportError> {
        let (net, from, to) = (self.net.clone(), self.from, to.id);
        let granted = net
            .lock()
            .grant_pre_votes
            .then(|| kvpool_raft::testing::grant_pre_vote(&message))
            .flatten();
        if let Some(granted) = granted {
            world::sleep(Duration::from_millis(1)).await;
            return Ok(granted);
        }
        let (tx, rx) = oneshot::channel();
        let twice = world::chance(net.lock().weather.duplicate);
        net.deliver(from, to, message.clone(), Some(tx));
        if twice {
            net.deliver(from, to, message, None);
        }
        match Sim::timeout(ttl, rx).await {
            Ok(Ok(answer)) => answer,
            // Lost on the way: nothing comes back until the time is up.
            Ok(Err(_)) => {
                world::sleep(ttl).await;
                Err(TransportError::Timeout)
            }
            Err(_) => Err(TransportError::Timeout),
        }
    }
}
