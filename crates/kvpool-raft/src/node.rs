//! The handle of a running member (signatures first; bodies follow).
use std::collections::BTreeMap;
use std::marker::PhantomData;

use bytes::Bytes;
use openraft::AsyncRuntime;
use tokio::sync::watch;

use crate::config::{Config, MemberId};
use crate::disk::{Disk, FileDisk};
use crate::error::{HandleError, InitializeError, ProposeError, ReadError, StartError};
use crate::machine::StateMachine;
use crate::status::Status;
use crate::transport::Transport;
use crate::Tokio;

/// A proposal that was committed and applied on this member.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Applied {
    /// Its log index.
    pub index: u64,
    /// The term of its leader.
    pub term: u64,
    /// What the state machine answered.
    pub response: Bytes,
}

/// A running member. Clones share it.
pub struct RaftNode<S, D = FileDisk, R = Tokio> {
    _p: PhantomData<(S, D, R)>,
}

#[allow(clippy::todo, clippy::unused_async, unused_variables, missing_docs)]
impl<S: StateMachine, D: Disk, R: AsyncRuntime> RaftNode<S, D, R> {
    pub async fn start<T: Transport>(config: Config, disk: D, transport: T, machine: S) -> Result<Self, StartError> {
        todo!()
    }
    pub async fn propose(&self, command: Bytes) -> Result<Applied, ProposeError> {
        todo!()
    }
    pub async fn linearizable_read(&self) -> Result<u64, ReadError> {
        todo!()
    }
    pub fn status(&self) -> Status {
        todo!()
    }
    pub fn status_watch(&self) -> watch::Receiver<Status> {
        todo!()
    }
    pub fn applied_watch(&self) -> watch::Receiver<Option<u64>> {
        todo!()
    }
    pub async fn initialize(&self, members: BTreeMap<MemberId, String>) -> Result<(), InitializeError> {
        todo!()
    }
    pub async fn transfer_leader(&self, to: MemberId) -> Result<(), ProposeError> {
        todo!()
    }
    pub async fn handle(&self, message: Bytes) -> Result<Bytes, HandleError> {
        todo!()
    }
    pub async fn shutdown(&self) {
        todo!()
    }
}
