//! GroupActor: the leader's care for the Raft group itself. It tells kvpool-policy what it knows and does the one step that
//! comes back; it answers processes that ask to be let in. One step or admission at a time, each in a task that reports back.

use crate::actors::duty::{Duty, refused_by_state};
use crate::actors::gate::{Finally, OwnedTask, Permit, Signal};
use crate::actors::group_effects::{agree_level, do_step};
use kvpool_policy::group::{Admission, Ask, Group, Name, Peer, Step, admit, next};
use kvpool_proto::meta::Refused;
use kvpool_proto::v1::JoinReply;
use kvpool_raft::CAUGHT_UP_LAG;
use kvpool_state::Command;
use kvpool_state::command::{AdmitMember, READER};
use ractor::{Actor, ActorProcessingErr, ActorRef, RpcReplyPort, SupervisionEvent};
use std::sync::Arc;
use std::time::Duration;

pub(crate) struct GroupActor;

/// A process asks for its name.
#[derive(Debug)]
pub(crate) struct Join {
    pub(crate) ask: Ask,
    pub(crate) reply: RpcReplyPort<Result<JoinReply, Refused>>,
    pub(crate) _permit: Permit,
}

pub(crate) enum GroupMsg {
    Look,
    Join(Box<Join>),
    /// The task has ended.
    Done,
    #[cfg(test)]
    Panic,
}

pub(crate) struct GroupState {
    duty: Arc<Duty>,
    signal: Arc<Signal>,
    _ticks: OwnedTask,
    busy: bool,
}

impl GroupState {
    fn look(&mut self, myself: &ActorRef<GroupMsg>) {
        if self.busy {
            return;
        }
        // The commands of this room are of level 2: an older member could not read them.
        if self.duty.core.replica.read(|s| s.feature_level()) < READER {
            self.busy = true;
            let (duty, end) = (self.duty.clone(), Finally::new(myself.clone(), GroupMsg::Done));
            tokio::spawn(async move {
                agree_level(&duty).await;
                drop(end);
            });
            return;
        }
        let step = next(&group(&self.duty));
        *self.duty.group_waits.lock() = match &step {
            Step::Wait(why) => Some(why.clone()),
            _ => None,
        };
        if matches!(step, Step::Rest | Step::Wait(_)) {
            return;
        }
        self.busy = true;
        let (duty, end) = (self.duty.clone(), Finally::new(myself.clone(), GroupMsg::Done));
        tokio::spawn(async move {
            do_step(&duty, step).await;
            drop(end);
        });
    }

    fn join(&mut self, myself: &ActorRef<GroupMsg>, join: Box<Join>) {
        let cluster_id = self.duty.core.cluster_id();
        let answer = |id: u64, wait: &str, refused: &str| JoinReply {
            cluster_id: cluster_id.clone(),
            raft_id: id,
            wait: wait.into(),
            refused: refused.into(),
        };
        let admission = if self.busy || self.duty.core.replica.read(|s| s.feature_level()) < READER {
            Admission::Wait("the group is being changed".into())
        } else {
            admit(&group(&self.duty), &join.ask)
        };
        // The caller may have given up, here as below.
        let reply = match admission {
            Admission::Known(id) => answer(id, "", ""),
            Admission::Wait(why) => answer(0, &why, ""),
            Admission::Refuse(why) => answer(0, "", &why),
            Admission::Admit => {
                self.busy = true;
                let (duty, end) = (self.duty.clone(), Finally::new(myself.clone(), GroupMsg::Done));
                let ask = join.ask.clone();
                tokio::spawn(async move {
                    let response = duty.propose(admission_of(&ask)).await;
                    drop(end);
                    let outcome = response.and_then(|r| match refused_by_state(&r) {
                        None => Ok(JoinReply {
                            cluster_id: duty.core.cluster_id(),
                            raft_id: r.incarnation,
                            ..JoinReply::default()
                        }),
                        Some(refused) => Err(refused),
                    });
                    tracing::info!(name = ask.name, address = %ask.address, ?outcome, "a member was let in");
                    let _ = join.reply.send(outcome);
                });
                return;
            }
        };
        let _ = join.reply.send(Ok(reply));
    }
}

fn admission_of(ask: &Ask) -> Command {
    let why = match ask.id {
        0 => "its disk was empty, and its name was free for a lease",
        _ => "it told its address",
    };
    Command::AdmitMember(AdmitMember {
        name: ask.name,
        address: ask.address.clone(),
        boot: ask.boot.clone(),
        member_id: ask.id,
        why: why.into(),
    })
}

fn ms(d: Duration) -> u64 {
    u64::try_from(d.as_millis()).unwrap_or(u64::MAX)
}

/// What this leader knows of the group.
fn group(duty: &Duty) -> Group {
    let core = &duty.core;
    let raft = core.status();
    let peer = |(id, address): (&u64, &String)| {
        let follower = raft.followers.get(id);
        let me = *id == raft.member_id;
        let peer = Peer {
            address: address.clone(),
            voter: raft.voters.contains(id),
            caught_up: me || follower.is_some_and(|f| f.matched.is_some() && f.lag <= CAUGHT_UP_LAG),
            silent_ms: if me { 0 } else { ms(core.contacts.silence(*id)) },
        };
        (*id, peer)
    };
    let peers = raft.members.iter().map(peer).collect();
    core.replica.read(|state| Group {
        me: raft.member_id,
        target: state.target_members(),
        next_id: state.cluster().map_or(0, |c| c.next_member_id),
        names: state
            .members()
            .map(|m| {
                let name = Name {
                    id: m.id,
                    address: m.address.clone(),
                    boot: m.boot.clone(),
                };
                (m.name, name)
            })
            .collect(),
        peers,
        joint: raft.joint.clone(),
        lease_ms: ms(core.timing.lease()),
        patience_ms: ms(core.timing.broken_grace()),
        led_ms: ms(duty.since.elapsed()),
    })
}

impl Actor for GroupActor {
    type Msg = GroupMsg;
    type State = GroupState;
    type Arguments = Arc<Duty>;

    async fn pre_start(&self, myself: ActorRef<GroupMsg>, duty: Arc<Duty>) -> Result<GroupState, ActorProcessingErr> {
        let signal = Arc::new(Signal::default());
        let (sender, raise, every) = (myself, signal.clone(), duty.tick());
        let ticks = OwnedTask::spawn(async move {
            while !raise.raise() || sender.cast(GroupMsg::Look).is_ok() {
                tokio::time::sleep(every).await;
            }
        });
        Ok(GroupState {
            duty,
            signal,
            _ticks: ticks,
            busy: false,
        })
    }

    async fn handle(
        &self,
        myself: ActorRef<GroupMsg>,
        message: GroupMsg,
        state: &mut GroupState,
    ) -> Result<(), ActorProcessingErr> {
        match message {
            GroupMsg::Look => {
                state.signal.take();
                state.look(&myself);
            }
            GroupMsg::Join(join) => state.join(&myself, join),
            GroupMsg::Done => {
                state.busy = false;
                state.look(&myself);
            }
            #[cfg(test)]
            GroupMsg::Panic => panic!("injected"),
        }
        Ok(())
    }

    async fn handle_supervisor_evt(
        &self,
        _: ActorRef<GroupMsg>,
        _: SupervisionEvent,
        _: &mut GroupState,
    ) -> Result<(), ActorProcessingErr> {
        Ok(())
    }
}
