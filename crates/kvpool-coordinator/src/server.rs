//! The gRPC server: one listener for all services, and the one place where the join token and the role of the caller are checked.

use crate::core::{Core, refuse};
use crate::listener::accept;
use crate::services::{ClusterService, MembersService, NodesService};
use kvpool_net::{Caller, Role};
use kvpool_proto::limits;
use kvpool_proto::meta::{Reason, Refused};
use kvpool_proto::v1::cluster_server::ClusterServer;
use kvpool_proto::v1::members_server::MembersServer;
use kvpool_proto::v1::nodes_server::NodesServer;
use std::sync::Arc;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use tonic::service::interceptor::InterceptedService;
use tonic::{Request, Status};

/// Calls under way on one connection.
const MAX_STREAMS: u32 = 1_024;

/// Who may call a service: whoever has the join token and, with TLS, a certificate of one of these roles.
fn admit(core: &Core, roles: &'static [Role]) -> impl Fn(Request<()>) -> Result<Request<()>, Status> + Clone + use<> {
    let token = core.token.clone();
    move |request: Request<()>| {
        if !token.is_in(request.metadata()) {
            let text = "the join token is missing or is not this cluster's";
            return Err(refuse(Refused::new(Reason::JoinToken, text)));
        }
        let caller = Caller::of(request.extensions());
        if !roles.iter().any(|role| caller.is(*role)) {
            let wanted: Vec<&str> = roles.iter().map(|role| role.word()).collect();
            let text = format!("{} may not call this: it is for {}", caller.words(), wanted.join(", "));
            return Err(refuse(Refused::new(Reason::NotAllowed, text)));
        }
        Ok(request)
    }
}

/// Serves until `stop`; calls that are under way then have a moment to end.
///
/// # Errors
/// When the transport fails as a whole.
pub(crate) async fn serve(core: Arc<Core>, listener: TcpListener, stop: CancellationToken) -> Result<(), String> {
    let everybody = admit(&core, &Role::ALL);
    let holders = admit(&core, &[Role::Shard, Role::Agent]);
    let fellows = admit(&core, &[Role::Member]);
    let builder = core.trust.server()?;
    let cluster = ClusterServer::new(ClusterService::new(core.clone()))
        .max_decoding_message_size(limits::MAX_SESSION_BYTES)
        .max_encoding_message_size(limits::MAX_MESSAGE_BYTES);
    let nodes = NodesServer::new(NodesService { core: core.clone() })
        .max_decoding_message_size(limits::MAX_SESSION_BYTES)
        .max_encoding_message_size(limits::MAX_SESSION_BYTES);
    let members = MembersServer::new(MembersService { core })
        .max_decoding_message_size(limits::MAX_MEMBER_BYTES)
        .max_encoding_message_size(limits::MAX_MEMBER_BYTES);
    builder
        .max_concurrent_streams(MAX_STREAMS)
        .add_service(InterceptedService::new(cluster, everybody))
        .add_service(InterceptedService::new(nodes, holders))
        .add_service(InterceptedService::new(members, fellows))
        .serve_with_incoming_shutdown(accept(listener), stop.cancelled_owned())
        .await
        .map_err(|e| e.to_string())
}
