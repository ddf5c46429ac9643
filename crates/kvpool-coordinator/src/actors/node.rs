//! NodeActor: the shell around the failure detector for the shards of one node, and the door for their sessions.

use crate::actors::duty::{Attach, Duty, Suspect};
use crate::actors::node_effects::{declare, register};
use crate::core::wall_clock_ms;
use kvpool_policy::failure::{Admission, FailureDetector, Known, Verdict, admit};
use kvpool_proto::meta::{Reason, Refused};
use ractor::{Actor, ActorProcessingErr, ActorRef};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Instant;

pub(crate) struct NodeActor;

pub(crate) struct NodeArgs {
    pub(crate) duty: Arc<Duty>,
    pub(crate) node: String,
    /// The node's shards that are Up in the state, with their incarnations.
    pub(crate) up: Vec<(String, u64)>,
}

pub(crate) enum NodeMsg {
    Attach(Box<Attach>),
    /// The next one is sent when this one was handled, so that at most one waits.
    Tick,
    /// A registration ended; with the incarnation when it was committed.
    Registered {
        shard: String,
        incarnation: Option<u64>,
    },
    /// A verdict was committed, or will be given again.
    Declared {
        shard: String,
    },
    #[cfg(test)]
    Panic,
}

pub(crate) struct NodeState {
    duty: Arc<Duty>,
    node: String,
    detector: FailureDetector,
    /// Shards with a proposal under way: one at a time each.
    busy: BTreeSet<String>,
    /// Shards that were suspected when last looked at.
    suspected: BTreeSet<String>,
}

impl NodeState {
    fn now(&self) -> u64 {
        self.duty.core.millis(Instant::now())
    }

    fn attach(&mut self, myself: &ActorRef<NodeMsg>, attach: Box<Attach>) {
        let hello = &attach.hello;
        let live = self
            .duty
            .observed
            .live_boot_id(&hello.shard, self.duty.core.timing.heartbeat() * 2);
        let (admission, replaced) = self.duty.core.replica.read(|s| {
            let record = s.shard(&hello.shard);
            let known = record.map(|r| Known {
                up: r.is_up() && r.node == self.node,
                boot_id: &r.boot_id,
                incarnation: r.incarnation,
            });
            let replaced = record.filter(|r| r.is_up() && r.boot_id != hello.boot_id);
            let admission = admit(known, &hello.boot_id, hello.incarnation, live.as_deref());
            (admission, replaced.map(|r| r.incarnation))
        });
        // The caller may have given up meanwhile: then the answer has no reader.
        match admission {
            Admission::Resume { incarnation } => {
                self.detector
                    .watch(&hello.shard, incarnation, self.duty.core.millis(Instant::now()));
                let _ = attach.reply.send(self.duty.welcome(incarnation));
            }
            Admission::Duplicate => {
                let text = format!("another process has a live session as shard {}", hello.shard);
                let _ = attach.reply.send(Err(Refused::new(Reason::DuplicateShard, text)));
            }
            Admission::Register if !self.busy.insert(hello.shard.clone()) => {
                let text = "this shard's registration is under way";
                let _ = attach.reply.send(Err(Refused::new(Reason::LeaseExpired, text)));
            }
            Admission::Register => register(self.duty.clone(), myself.clone(), attach, replaced),
        }
    }

    fn tick(&mut self, myself: &ActorRef<NodeMsg>) {
        self.follow_state();
        let core = &self.duty.core;
        let limits = self.duty.limits();
        let watched: Vec<String> = self.detector.shards().map(|(s, _)| s.to_owned()).collect();
        for shard in &watched {
            if let Some(seen) = self.duty.observed.get(shard) {
                let lately = core.timing.lease() / 2;
                let accused = self.duty.observed.accusation(shard, seen.incarnation, lately, &limits);
                self.detector
                    .observe(shard, seen.evidence(accused, |at| core.millis(at)));
            }
        }
        let now = self.now();
        let verdicts = self.detector.tick(now);
        self.suspect(now);
        for verdict in verdicts {
            if self.may_declare(&verdict) && self.busy.insert(verdict.shard.clone()) {
                declare(self.duty.clone(), myself.clone(), verdict);
            }
        }
        myself.send_after(self.duty.tick(), || NodeMsg::Tick);
    }

    fn may_declare(&self, verdict: &Verdict) -> bool {
        let pool = self
            .duty
            .core
            .replica
            .read(|s| s.shard(&verdict.shard).map(|r| r.pool.clone()));
        pool.is_some_and(|pool| self.duty.may_declare(&pool))
    }

    /// Publishes whom the detector suspects, before anybody is declared Down: the brake counts them.
    fn suspect(&mut self, now: u64) {
        let incarnations: BTreeMap<&str, u64> = self.detector.shards().collect();
        let suspects: Vec<_> = self.detector.suspects(now).collect();
        if suspects.is_empty() && self.suspected.is_empty() {
            return;
        }
        let mut published = self.duty.suspects.lock();
        for gone in self.suspected.iter().filter(|s| suspects.iter().all(|(n, _)| n != s)) {
            published.remove(gone);
        }
        for (shard, suspicion) in &suspects {
            let incarnation = incarnations.get(shard).copied().unwrap_or(0);
            let held = published.get(*shard).filter(|s| s.incarnation == incarnation);
            let since_ms = held.map_or_else(wall_clock_ms, |s| s.since_ms);
            let suspect = Suspect {
                incarnation,
                suspicion: *suspicion,
                since_ms,
            };
            published.insert((*shard).to_owned(), suspect);
        }
        self.suspected = suspects.into_iter().map(|(shard, _)| shard.to_owned()).collect();
    }

    /// Forgets the shards that are not Up here as the watched incarnation any more.
    fn follow_state(&mut self) {
        let is_up = |state: &kvpool_state::State, shard: &str, incarnation: u64| {
            state
                .shard(shard)
                .is_some_and(|r| r.incarnation == incarnation && r.is_up() && r.node == self.node)
        };
        let gone: Vec<(String, u64)> = self.duty.core.replica.read(|state| {
            let watched = self.detector.shards();
            watched
                .filter(|(s, i)| !is_up(state, s, *i))
                .map(|(s, i)| (s.to_owned(), i))
                .collect()
        });
        for (shard, incarnation) in gone {
            self.detector.forget(&shard);
            self.duty.observed.end(&shard, incarnation);
        }
    }
}

impl Actor for NodeActor {
    type Msg = NodeMsg;
    type State = NodeState;
    type Arguments = NodeArgs;

    async fn pre_start(
        &self,
        myself: ActorRef<NodeMsg>,
        NodeArgs { duty, node, up }: NodeArgs,
    ) -> Result<NodeState, ActorProcessingErr> {
        let now = duty.core.millis(Instant::now());
        // What an earlier life of this actor published is looked at again.
        let suspected = up.iter().map(|(shard, _)| shard.clone()).collect();
        let mut detector = FailureDetector::new(duty.limits(), duty.core.millis(duty.since), now);
        for (shard, incarnation) in up {
            detector.watch(&shard, incarnation, now);
        }
        myself.cast(NodeMsg::Tick)?;
        Ok(NodeState {
            duty,
            node,
            detector,
            busy: BTreeSet::new(),
            suspected,
        })
    }

    async fn handle(
        &self,
        myself: ActorRef<NodeMsg>,
        message: NodeMsg,
        state: &mut NodeState,
    ) -> Result<(), ActorProcessingErr> {
        match message {
            NodeMsg::Attach(attach) => state.attach(&myself, attach),
            NodeMsg::Tick => state.tick(&myself),
            NodeMsg::Registered { shard, incarnation } => {
                state.busy.remove(&shard);
                if let Some(incarnation) = incarnation {
                    state.detector.watch(&shard, incarnation, state.now());
                }
            }
            NodeMsg::Declared { shard } => {
                state.busy.remove(&shard);
            }
            #[cfg(test)]
            NodeMsg::Panic => panic!("injected"),
        }
        Ok(())
    }
}
