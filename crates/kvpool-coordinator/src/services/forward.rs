//! Hands a unary call on to the leader: once, never in a circle.

use crate::core::Core;
use crate::metric_definitions as m;
use kvpool_proto::limits;
use kvpool_proto::meta::{FORWARDED, Refused};
use kvpool_proto::v1::cluster_client::ClusterClient;
use parking_lot::Mutex;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::timeout;
use tonic::metadata::AsciiMetadataValue;
use tonic::transport::Channel;
use tonic::{Request, Response, Status};

pub(super) struct Forwarder {
    core: Arc<Core>,
    /// The connection to the leader of the last call.
    channel: Mutex<Option<(String, Channel)>>,
}

impl Forwarder {
    pub(super) fn new(core: Arc<Core>) -> Self {
        Forwarder {
            core,
            channel: Mutex::new(None),
        }
    }

    /// Answers at the leader. `here` is the call on this member, tried first when it leads; `there` the call on the leader.
    pub(super) async fn at_leader<Q, R, H, T>(
        &self,
        request: Request<Q>,
        here: H,
        there: impl FnOnce(ClusterClient<Channel>, Request<Q>) -> T,
    ) -> Result<Response<R>, Refusal>
    where
        Q: Clone,
        H: Future<Output = Result<R, Refused>>,
        T: Future<Output = Result<Response<R>, Status>>,
    {
        let core = &self.core;
        let status = core.raft()?.status();
        let leader = status
            .leader
            .clone()
            .filter(|l| l.id != core.raft_id() && !l.address.is_empty());
        let address = match leader {
            Some(leader)
                if !request.metadata().contains_key(FORWARDED) && !status.role.eq(&kvpool_raft::Role::Leader) =>
            {
                // A leader unheard of for so long is frozen or cut off; to ask it would use up the caller's time (O17).
                if !core.contacts.quorum(&status) {
                    return Err(core.no_leader().into());
                }
                leader.address
            }
            _ => return Ok(Response::new(here.await?)),
        };
        metrics::counter!(m::FORWARDED).increment(1);
        let mut onward = Request::new(request.into_inner());
        onward
            .metadata_mut()
            .insert(FORWARDED, AsciiMetadataValue::from_static("1"));
        core.token.attach(onward.metadata_mut());
        let patience = core.timing.attempt().saturating_sub(Duration::from_millis(100));
        match timeout(patience, there(self.client(&address)?, onward)).await {
            Ok(Ok(reply)) => Ok(reply),
            Ok(Err(status)) if Refused::from_status(&status).is_some() => Err(Refusal::Passed(status)),
            // The leader is gone or frozen: an election is near, or there is no quorum.
            Ok(Err(_)) | Err(_) => {
                self.channel.lock().take();
                Err(core.no_leader().into())
            }
        }
    }

    fn client(&self, address: &str) -> Result<ClusterClient<Channel>, Refused> {
        let mut held = self.channel.lock();
        let channel = match &*held {
            Some((to, channel)) if to == address => channel.clone(),
            _ => {
                let channel = self
                    .core
                    .trust
                    .endpoint(address, self.core.timing)
                    .map_err(|_| self.core.no_leader())?
                    .connect_lazy();
                *held = Some((address.to_owned(), channel.clone()));
                channel
            }
        };
        Ok(ClusterClient::new(channel)
            .max_decoding_message_size(limits::MAX_MESSAGE_BYTES)
            .max_encoding_message_size(limits::MAX_MESSAGE_BYTES))
    }
}

/// Why a call failed: a refusal of this member, or one that the leader gave and counted.
pub(super) enum Refusal {
    Own(Refused),
    Passed(Status),
}

impl From<Refused> for Refusal {
    fn from(refused: Refused) -> Self {
        Refusal::Own(refused)
    }
}

impl From<Refusal> for Status {
    fn from(refusal: Refusal) -> Status {
        match refusal {
            Refusal::Own(refused) => crate::core::refuse(refused),
            Refusal::Passed(status) => status,
        }
    }
}
