//! Clients of the API: they configure pools and read them, through any member, with request ids over lost replies. What they
//! call and what they are told goes into a history that is checked for linearizability.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use kvpool_raft::{Applied, MemberId};
use kvpool_state::command::ConfigurePool;
use kvpool_state::records::RequestId;
use kvpool_state::{Command, Refusal, Response, State};
use prost::Message;

use crate::cluster::Cluster;
use crate::faults::{PATIENCE, any_member};
use crate::linear::{Call, Histories, Operation, Value};
use crate::mutation::Mutation;
use crate::pool::replica::{Pools, View, operation};
use crate::rpc;
use crate::world::{self, Place};

/// Pools that clients configure. The first is the one with shards.
pub const NAMES: [&str; 2] = ["default", "other"];
/// How often a write is tried with one request id.
const TRIES: u64 = 6;

/// What came of one try of a write.
enum Tried {
    /// The answer, where it stands in the log, and the entry.
    Done(Response, Applied, Vec<u8>),
    /// Refused, or no answer: to be tried again with the same request id.
    Failed,
}

/// What all clients share.
#[derive(Clone, Default)]
pub struct Clients {
    /// Set when they should end.
    pub stop: Arc<AtomicBool>,
    /// How many run.
    pub running: Arc<AtomicU64>,
    histories: Arc<Mutex<Histories>>,
    ticks: Arc<AtomicU64>,
}

/// One of them.
pub struct Client {
    cluster: Cluster<Pools>,
    shared: Clients,
    place: Place,
    sequence: u64,
    target: MemberId,
}

impl Clients {
    /// A moment: later ones are greater.
    fn tick(&self) -> u64 {
        self.ticks.fetch_add(1, Ordering::Relaxed)
    }

    fn add(&self, key: &str, operation: Operation) {
        let mut histories = self.histories.lock().unwrap_or_else(PoisonError::into_inner);
        histories.add(key, operation);
    }

    /// The calls of all clients.
    pub fn histories(&self) -> Histories {
        self.histories.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// A client at `place`.
    pub fn client(&self, cluster: &Cluster<Pools>, place: Place) -> Client {
        self.running.fetch_add(1, Ordering::Relaxed);
        Client {
            cluster: cluster.clone(),
            shared: self.clone(),
            place,
            sequence: 0,
            target: any_member(),
        }
    }
}

/// What a pool's history holds as a value: its factor.
pub fn value(state: &State, pool: &str) -> Value {
    state.pool(pool).map(|p| u64::from(p.factor))
}

impl Client {
    /// Works until it is told to stop.
    pub async fn run(mut self) {
        while !self.shared.stop.load(Ordering::Relaxed) {
            let pool = NAMES[usize::from(world::chance(850))];
            if world::chance(500) {
                let most = if pool == NAMES[0] { 3 } else { 4 };
                self.write(pool, 1 + world::random(most)).await;
            } else {
                self.read(pool).await;
            }
            world::sleep(Duration::from_micros(1_000 + world::random(150_000))).await;
        }
        self.shared.running.fetch_sub(1, Ordering::Relaxed);
    }

    /// Sets a pool's factor; true when it was acknowledged.
    pub async fn write(&mut self, pool: &str, factor: u64) -> bool {
        self.sequence += 1;
        let mut request = RequestId {
            created_at_ms: world::wall_clock_ms(),
            client: self.place,
            sequence: self.sequence,
        };
        let command = Command::ConfigurePool(ConfigurePool {
            pool: pool.to_owned(),
            factor: u32::try_from(factor).unwrap_or(1),
        });
        let called = self.shared.tick();
        let mark = self.cluster.oracle.begin();
        let mut returned = None;
        for attempt in 0..TRIES {
            if attempt > 0 && self.cluster.mutation == Some(Mutation::NewIdForARetry) {
                request.sequence = self.sequence + 1_000_000 * attempt;
            }
            match self.propose(&command, request.clone()).await {
                Tried::Done(response, ..) if response.refusal() == Refusal::RequestExpired => break,
                Tried::Done(_, applied, entry) => {
                    let (term, index) = (applied.term, applied.index);
                    let operation = operation(&entry);
                    self.cluster
                        .oracle
                        .acknowledged(mark, self.target, term, index, operation);
                    returned = Some(self.shared.tick());
                    break;
                }
                Tried::Failed => self.target = any_member(),
            }
            self.cluster.oracle.count("a write was tried again");
            world::sleep(Duration::from_millis(10 + world::random(100))).await;
        }
        if returned.is_none() {
            self.cluster.oracle.unknown();
        }
        let call = Call::Write(Some(factor));
        self.shared.add(pool, Operation { called, returned, call });
        returned.is_some()
    }

    /// One try through the present member.
    async fn propose(&mut self, command: &Command, request: RequestId) -> Tried {
        let command = command.clone();
        let tried = rpc::call(
            &self.cluster,
            self.place,
            self.target,
            PATIENCE,
            move |node, _| async move {
                let entry = command.to_entry(Some(request), world::wall_clock_ms());
                match node.propose(entry.clone().into()).await {
                    Err(_) => Tried::Failed,
                    Ok(applied) => match Response::decode(applied.response.clone()) {
                        Ok(response) => Tried::Done(response, applied, entry),
                        Err(_) => Tried::Failed,
                    },
                }
            },
        );
        tried.await.unwrap_or(Tried::Failed)
    }

    /// A linearizable read of a pool's factor.
    pub async fn read(&mut self, pool: &str) {
        let anywhere = self.cluster.mutation == Some(Mutation::ReadsAnywhere);
        let name = pool.to_owned();
        let called = self.shared.tick();
        let mark = self.cluster.oracle.begin();
        let look = move |view: &View| view.read(|s| (value(s, &name), s.revision()));
        let read = rpc::call(
            &self.cluster,
            self.place,
            self.target,
            PATIENCE,
            move |node, view| async move {
                if !anywhere {
                    node.linearizable_read().await.ok()?;
                }
                Some(look(&view))
            },
        );
        match read.await.flatten() {
            Some((saw, revision)) => {
                self.cluster.oracle.looked(mark, revision);
                let returned = Some(self.shared.tick());
                let call = Call::Read(saw);
                self.shared.add(pool, Operation { called, returned, call });
            }
            None => self.target = any_member(),
        }
    }
}
