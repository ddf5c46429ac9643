//! ShardActor: gathers a shard's in-sync reports for a moment and commits them together. Reports stay in the inbox until
//! they are committed, so that a crash loses none.

use crate::actors::duty::Duty;
use crate::actors::gate::{Finally, Signal};
use crate::actors::inbox::Batch;
use kvpool_state::command::SlotsInSync;
use kvpool_state::{Command, Refusal};
use ractor::{Actor, ActorProcessingErr, ActorRef};
use std::sync::Arc;
use std::time::Duration;

/// How long reports are gathered. Each commit gives a new epoch and a new map to everybody.
const GATHER: Duration = Duration::from_millis(100);

pub(crate) struct ShardActor;

pub(crate) enum ShardMsg {
    /// A report came in.
    Wake,
    /// The gathering is over.
    Flush,
    /// The commit ended.
    Flushed,
    #[cfg(test)]
    Panic,
}

pub(crate) struct ShardState {
    duty: Arc<Duty>,
    shard: String,
    signal: Arc<Signal>,
    /// A flush is due or under way: there is one at a time.
    flushing: bool,
}

impl ShardState {
    fn flush_later(&mut self, myself: &ActorRef<ShardMsg>) {
        if !self.flushing {
            self.flushing = true;
            myself.send_after(GATHER, || ShardMsg::Flush);
        }
    }

    fn flush(&mut self, myself: &ActorRef<ShardMsg>) {
        let Some(batch) = self.duty.inbox.waiting(&self.shard) else {
            self.flushing = false;
            return;
        };
        let (duty, shard, myself) = (self.duty.clone(), self.shard.clone(), myself.clone());
        tokio::spawn(async move {
            let _end = Finally::new(myself, ShardMsg::Flushed);
            commit(&duty, &shard, &batch).await;
        });
    }
}

async fn commit(duty: &Duty, shard: &str, batch: &Batch) {
    let command = SlotsInSync {
        pool: batch.pool.clone(),
        shard: shard.to_owned(),
        incarnation: batch.incarnation,
        ranges: batch.slots.to_ranges(),
        epoch: batch.epoch,
    };
    match duty.propose(Command::SlotsInSync(command)).await {
        Ok(response) => {
            let refused = response.refusal() != Refusal::None;
            if refused {
                tracing::info!(shard, why = response.message, "an in-sync report was refused");
            }
            duty.inbox.done(shard, batch, refused);
        }
        Err(refused) => tracing::debug!(shard, why = refused.message, "an in-sync report waits"),
    }
}

impl Actor for ShardActor {
    type Msg = ShardMsg;
    type State = ShardState;
    type Arguments = (Arc<Duty>, String);

    async fn pre_start(
        &self,
        myself: ActorRef<ShardMsg>,
        (duty, shard): (Arc<Duty>, String),
    ) -> Result<ShardState, ActorProcessingErr> {
        let signal = Arc::new(Signal::default());
        duty.inbox.serve(&shard, myself, signal.clone());
        Ok(ShardState {
            duty,
            shard,
            signal,
            flushing: false,
        })
    }

    async fn handle(
        &self,
        myself: ActorRef<ShardMsg>,
        message: ShardMsg,
        state: &mut ShardState,
    ) -> Result<(), ActorProcessingErr> {
        match message {
            ShardMsg::Wake => {
                state.signal.take();
                state.flush_later(&myself);
            }
            ShardMsg::Flush => state.flush(&myself),
            ShardMsg::Flushed => {
                state.flushing = false;
                if state.duty.inbox.waiting(&state.shard).is_some() {
                    state.flush_later(&myself);
                }
            }
            #[cfg(test)]
            ShardMsg::Panic => panic!("injected"),
        }
        Ok(())
    }
}
