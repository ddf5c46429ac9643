//! NodeActor: the shell around the failure detector for the shards of one node, and the door for their sessions.

use crate::actors::duty::{Attach, Duty};
use crate::actors::node_effects::{declare, register};
use kvpool_policy::failure::{Admission, FailureDetector, Known, admit};
use kvpool_proto::meta::{Reason, Refused};
use kvpool_state::records::ShardState;
use ractor::{Actor, ActorProcessingErr, ActorRef};
use std::collections::BTreeSet;
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
        let admission = self.duty.core.replica.read(|s| {
            let known = s.shard(&hello.shard).map(|r| Known {
                up: r.state() == ShardState::Up && r.node == self.node,
                boot_id: &r.boot_id,
                incarnation: r.incarnation,
            });
            admit(known, &hello.boot_id, hello.incarnation, live.as_deref())
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
            Admission::Register => register(self.duty.clone(), myself.clone(), attach),
        }
    }

    fn tick(&mut self, myself: &ActorRef<NodeMsg>) {
        self.follow_state();
        let core = &self.duty.core;
        let watched: Vec<String> = self.detector.shards().map(|(s, _)| s.to_owned()).collect();
        for shard in &watched {
            if let Some(seen) = self.duty.observed.get(shard) {
                self.detector.observe(shard, seen.evidence(|at| core.millis(at)));
            }
        }
        for verdict in self.detector.tick(self.now()) {
            if self.busy.insert(verdict.shard.clone()) {
                declare(self.duty.clone(), myself.clone(), verdict);
            }
        }
        myself.send_after(self.duty.tick(), || NodeMsg::Tick);
    }

    /// Forgets the shards that are not Up here as the watched incarnation any more.
    fn follow_state(&mut self) {
        let is_up = |state: &kvpool_state::State, shard: &str, incarnation: u64| {
            state
                .shard(shard)
                .is_some_and(|r| r.incarnation == incarnation && r.state() == ShardState::Up && r.node == self.node)
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
