//! Raft's messages over gRPC: one HTTP/2 connection per peer and lane, so that an append or a snapshot never delays a
//! heartbeat. Nothing is queued or sent again here.

use crate::contacts::Contacts;
use bytes::Bytes;
use kvpool_net::Trust;
use kvpool_proto::v1::RaftMessage;
use kvpool_proto::v1::members_client::MembersClient;
use kvpool_proto::{JoinToken, Timing, limits, meta};
use kvpool_raft::{Lane, Peer, Transport, TransportError};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;
use tonic::transport::Channel;
use tonic::{Code, Request};

/// A dead connection is noticed within about three seconds, also one that carries nothing (faults O12, O39).
const KEEPALIVE: Duration = Duration::from_secs(1);

/// The number of a lane on the wire.
pub(crate) fn lane_number(lane: Lane) -> u32 {
    match lane {
        Lane::Append => 1,
        Lane::Heartbeat => 2,
        Lane::Vote => 3,
        Lane::Snapshot => 4,
    }
}

/// Sends raft's messages. Clones share the connections.
#[derive(Clone)]
pub(crate) struct GrpcTransport(Arc<Inner>);

struct Inner {
    token: JoinToken,
    trust: Trust,
    timing: Timing,
    contacts: Arc<Contacts>,
    /// One per peer and lane; peers are the members of the group.
    channels: Mutex<BTreeMap<(Peer, Lane), Channel>>,
}

impl GrpcTransport {
    pub(crate) fn new(token: JoinToken, trust: Trust, timing: Timing, contacts: Arc<Contacts>) -> Self {
        let channels = Mutex::new(BTreeMap::new());
        GrpcTransport(Arc::new(Inner {
            token,
            trust,
            timing,
            contacts,
            channels,
        }))
    }

    fn channel(&self, to: &Peer, lane: Lane) -> Result<Channel, TransportError> {
        let mut channels = self.0.channels.lock();
        if let Some(channel) = channels.get(&(to.clone(), lane)) {
            return Ok(channel.clone());
        }
        let channel = self
            .0
            .trust
            .endpoint(&to.address, self.0.timing)
            .map_err(TransportError::Unreachable)?
            .http2_keep_alive_interval(KEEPALIVE)
            .keep_alive_timeout(KEEPALIVE * 2)
            .connect_lazy();
        channels.insert((to.clone(), lane), channel.clone());
        Ok(channel)
    }
}

impl Transport for GrpcTransport {
    async fn send(&self, to: &Peer, lane: Lane, message: Bytes, ttl: Duration) -> Result<Bytes, TransportError> {
        let mut client = MembersClient::new(self.channel(to, lane)?)
            .max_decoding_message_size(limits::MAX_MEMBER_BYTES)
            .max_encoding_message_size(limits::MAX_MEMBER_BYTES);
        let mut request = Request::new(RaftMessage {
            payload: message,
            lane: lane_number(lane),
        });
        self.0.token.attach(request.metadata_mut());
        // The other side gives up with us.
        request.set_timeout(ttl);
        match tokio::time::timeout(ttl, client.exchange(request)).await {
            Ok(Ok(reply)) => {
                self.0.contacts.answered(to.id);
                Ok(reply.into_inner().payload)
            }
            Ok(Err(status)) if status.code() == Code::DeadlineExceeded => Err(TransportError::Timeout),
            Ok(Err(status)) => {
                let refused = meta::Refused::from_status(&status).is_some();
                let text = status.message().to_owned();
                let unsent = status.code() == Code::Unavailable && !refused;
                Err(if unsent {
                    TransportError::Unreachable(text)
                } else {
                    TransportError::Failed(text)
                })
            }
            Err(_) => Err(TransportError::Timeout),
        }
    }
}
