//! The gRPC server: one listener for all services, and the one place where the join token is checked.

use crate::core::{Core, refuse};
use crate::listener::accept;
use crate::services::{ClusterService, MembersService, NodesService};
use kvpool_proto::limits;
use kvpool_proto::meta::{Reason, Refused};
use kvpool_proto::v1::cluster_server::ClusterServer;
use kvpool_proto::v1::members_server::MembersServer;
use kvpool_proto::v1::nodes_server::NodesServer;
use std::sync::Arc;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use tonic::service::InterceptorLayer;
use tonic::transport::Server;
use tonic::{Request, Status};

/// Calls under way on one connection.
const MAX_STREAMS: u32 = 1_024;

/// Serves until `stop`; calls that are under way then have a moment to end.
///
/// # Errors
/// When the transport fails as a whole.
pub(crate) async fn serve(
    core: Arc<Core>,
    listener: TcpListener,
    stop: CancellationToken,
) -> Result<(), tonic::transport::Error> {
    let token = core.token.clone();
    let check_token = move |request: Request<()>| -> Result<Request<()>, Status> {
        if token.is_in(request.metadata()) {
            Ok(request)
        } else {
            Err(refuse(Refused::new(
                Reason::JoinToken,
                "the join token is missing or is not this cluster's",
            )))
        }
    };
    let cluster = ClusterServer::new(ClusterService::new(core.clone()))
        .max_decoding_message_size(limits::MAX_SESSION_BYTES)
        .max_encoding_message_size(limits::MAX_MESSAGE_BYTES);
    let nodes = NodesServer::new(NodesService { core: core.clone() })
        .max_decoding_message_size(limits::MAX_SESSION_BYTES)
        .max_encoding_message_size(limits::MAX_SESSION_BYTES);
    let members = MembersServer::new(MembersService { core })
        .max_decoding_message_size(limits::MAX_MEMBER_BYTES)
        .max_encoding_message_size(limits::MAX_MEMBER_BYTES);
    Server::builder()
        .http2_keepalive_interval(Some(limits::KEEPALIVE_INTERVAL))
        .http2_keepalive_timeout(Some(limits::KEEPALIVE_TIMEOUT))
        .max_concurrent_streams(MAX_STREAMS)
        .layer(InterceptorLayer::new(check_token))
        .add_service(cluster)
        .add_service(nodes)
        .add_service(members)
        .serve_with_incoming_shutdown(accept(listener), stop.cancelled_owned())
        .await
}
