//! The service between members: who are you, and raft's messages.

use crate::core::{Core, refuse};
use crate::services::check_name;
use crate::transport::lane_number;
use kvpool_net::{Caller, Role};
use kvpool_policy::group::Ask;
use kvpool_proto::meta::{Reason, Refused};
use kvpool_proto::v1::members_server::Members;
use kvpool_proto::v1::{JoinReply, JoinRequest, MemberHello, MemberHelloReply, RaftMessage};
use kvpool_raft::{HandleError, Lane};
use std::sync::Arc;
use tonic::{Request, Response, Status};

pub(crate) struct MembersService {
    pub(crate) core: Arc<Core>,
}

#[tonic::async_trait]
impl Members for MembersService {
    async fn hello(&self, request: Request<MemberHello>) -> Result<Response<MemberHelloReply>, Status> {
        let hello = request.into_inner();
        let core = &self.core;
        let cluster_id = core.cluster_id();
        if !hello.cluster_id.is_empty() && !cluster_id.is_empty() && hello.cluster_id != cluster_id {
            let text = format!(
                "member {} is of cluster {}, this is {cluster_id}",
                hello.from, hello.cluster_id
            );
            return Err(refuse(Refused::new(Reason::ClusterId, text)));
        }
        Ok(Response::new(MemberHelloReply {
            member_id: core.name,
            cluster_id,
            // A member that only granted a vote has no membership yet, but it is not new either.
            initialized: core.status().initialized() || core.status().term > 0,
            seeds: core.seeds.keys().copied().collect(),
            raft_id: core.status().member_id,
            features: core.features,
        }))
    }

    async fn join(&self, request: Request<JoinRequest>) -> Result<Response<JoinReply>, Status> {
        let caller = Caller::of(request.extensions());
        let asked = request.into_inner();
        if !caller.is_named(Role::Member, &asked.name.to_string()) {
            let text = format!("{} may not be member {}", caller.words(), asked.name);
            return Err(refuse(Refused::new(Reason::NotAllowed, text)));
        }
        let core = &self.core;
        let mine = core.cluster_id();
        if !asked.cluster_id.is_empty() && asked.cluster_id != mine {
            let text = format!(
                "member {} is of cluster {}, this is {mine}",
                asked.name, asked.cluster_id
            );
            return Err(refuse(Refused::new(Reason::ClusterId, text)));
        }
        check_name("address", &asked.address).map_err(refuse)?;
        let ask = Ask {
            name: asked.name,
            address: asked.address,
            boot: asked.boot,
            id: asked.raft_id,
        };
        let duty = core.duty.borrow().clone();
        let duty = duty.ok_or_else(|| refuse(core.elsewhere()))?;
        duty.join(ask).await.map(Response::new).map_err(refuse)
    }

    async fn exchange(&self, request: Request<RaftMessage>) -> Result<Response<RaftMessage>, Status> {
        let RaftMessage { payload, lane } = request.into_inner();
        let raft = self.core.raft().map_err(refuse)?;
        match raft.handle(payload).await {
            Ok(payload) => {
                let from_leader = [Lane::Append, Lane::Heartbeat].map(lane_number).contains(&lane);
                if from_leader {
                    self.core.contacts.leader_heard();
                }
                Ok(Response::new(RaftMessage { payload, lane }))
            }
            Err(e) => {
                let reason = match e {
                    HandleError::Fatal(_) => Reason::Stopping,
                    HandleError::Misdirected { .. } => Reason::ClusterId,
                    _ => Reason::Invalid,
                };
                Err(refuse(Refused::new(reason, e.to_string())))
            }
        }
    }
}
