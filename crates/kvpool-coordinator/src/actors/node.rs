//! NodeActor: the shell around the failure detector for the shards of one node, and the door for their sessions.

use crate::actors::duty::{Attach, Duty, refused_by_state};
use crate::metric_definitions as m;
use kvpool_policy::failure::{Admission, FailureDetector, Known, Verdict, admit};
use kvpool_proto::meta::{Reason, Refused};
use kvpool_proto::v1::ShardHello;
use kvpool_state::Command;
use kvpool_state::command::{RegisterShard, ShardDown};
use kvpool_state::records::ShardState;
use ractor::{Actor, ActorProcessingErr, ActorRef};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Instant;

pub(crate) struct NodeActor;

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
            Admission::Register => self.register(myself.clone(), attach),
        }
    }

    fn register(&self, myself: ActorRef<NodeMsg>, attach: Box<Attach>) {
        let duty = self.duty.clone();
        tokio::spawn(async move {
            let shard = attach.hello.shard.clone();
            let outcome = duty
                .propose(registration(&attach.hello))
                .await
                .and_then(|response| refused_by_state(&response).map_or(Ok(response.incarnation), Err));
            let incarnation = outcome.as_ref().ok().copied();
            // First the actor, so that the new incarnation is watched from its first moment.
            let _ = myself.cast(NodeMsg::Registered { shard, incarnation });
            let _ = attach.reply.send(outcome.and_then(|i| duty.welcome(i)));
        });
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

fn declare(duty: Arc<Duty>, myself: ActorRef<NodeMsg>, verdict: Verdict) {
    tokio::spawn(async move {
        let reason = verdict.cause.words();
        let down = ShardDown {
            id: verdict.shard.clone(),
            incarnation: verdict.incarnation,
            reason,
        };
        match duty.propose(Command::ShardDown(down)).await {
            Ok(response) if refused_by_state(&response).is_none() => {
                metrics::counter!(m::SHARDS_DOWN, "cause" => verdict.cause.word()).increment(1);
                tracing::warn!(shard = %verdict.shard, incarnation = verdict.incarnation, reason = verdict.cause.words(),
                    term = duty.term, "declared Down");
                duty.observed.end(&verdict.shard, verdict.incarnation);
            }
            Ok(response) => tracing::info!(shard = %verdict.shard, why = response.message, "not declared Down"),
            Err(refused) => tracing::debug!(shard = %verdict.shard, why = refused.message, "not declared Down yet"),
        }
        // A dead actor's successor judges anew.
        let _ = myself.cast(NodeMsg::Declared { shard: verdict.shard });
    });
}

fn registration(hello: &ShardHello) -> Command {
    Command::RegisterShard(RegisterShard {
        id: hello.shard.clone(),
        pool: hello.pool.clone(),
        node: hello.node.clone(),
        boot_id: hello.boot_id.clone(),
        addresses: hello.addresses.clone(),
        capacity_bytes: hello.capacity_bytes,
    })
}

impl Actor for NodeActor {
    type Msg = NodeMsg;
    type State = NodeState;
    type Arguments = (Arc<Duty>, String);

    async fn pre_start(
        &self,
        myself: ActorRef<NodeMsg>,
        (duty, node): (Arc<Duty>, String),
    ) -> Result<NodeState, ActorProcessingErr> {
        let now = duty.core.millis(Instant::now());
        let mut detector = FailureDetector::new(duty.limits(), duty.core.millis(duty.since), now);
        duty.core.replica.read(|state| {
            for shard in state.shards().filter(|s| s.node == node && s.state() == ShardState::Up) {
                detector.watch(&shard.id, shard.incarnation, now);
            }
        });
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
