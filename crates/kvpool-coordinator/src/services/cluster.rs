//! The API service: list, status, configure; the watch is in its own module.

use crate::core::{Core, refuse};
use crate::services::forward::Forwarder;
use crate::services::watch::Watches;
use crate::services::{check_name, may_change};
use crate::status::report;
use kvpool_proto::meta::{Reason, Refused};
use kvpool_proto::v1::cluster_server::Cluster;
use kvpool_proto::v1::{
    ConfigurePoolRequest, DrainShardRequest, Kind, ListReply, ListRequest, ReleaseBrakeRequest, RemoveShardRequest,
    ScaleCoordinatorsRequest, StatusReply, StatusRequest, WatchReply, WatchRequest,
};
use kvpool_state::command::{ConfigureGroup, ConfigurePool, DrainShard, ReleaseBrake, RemoveShard};
use kvpool_state::records::{Event, Record};
use kvpool_state::{Command, Response as StateResponse};
use std::sync::Arc;
use std::time::Duration;
use tokio::time::timeout;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status};

pub(crate) struct ClusterService {
    core: Arc<Core>,
    forward: Forwarder,
    watches: Watches,
}

impl ClusterService {
    pub(crate) fn new(core: Arc<Core>) -> Self {
        ClusterService {
            forward: Forwarder::new(core.clone()),
            watches: Watches::new(core.clone()),
            core,
        }
    }

    /// The bound of a unary call here, below the caller's own.
    fn patience(&self) -> Duration {
        self.core.timing.attempt().saturating_sub(Duration::from_millis(200))
    }

    async fn bounded<T>(&self, call: impl Future<Output = Result<T, Refused>>) -> Result<T, Refused> {
        let late = Refused::new(Reason::Unknown, "no outcome in time; it may still happen");
        match timeout(self.patience(), call).await {
            Ok(outcome) => outcome,
            Err(_) if !self.core.contacts.quorum(&self.core.status()) => Err(self.core.no_leader()),
            Err(_) => Err(late),
        }
    }

    async fn list_here(&self, kind: Kind) -> Result<ListReply, Refused> {
        self.bounded(self.core.read_barrier()).await?;
        Ok(self.core.replica.read(|state| {
            let revision = state.revision();
            let records = state
                .records()
                .into_iter()
                .filter(|r| kind == Kind::Unspecified || kind_of(r) == kind);
            let records = records
                .map(|r| Event {
                    revision,
                    record: Some(r),
                })
                .collect();
            ListReply { revision, records }
        }))
    }

    async fn scale_here(&self, request: ScaleCoordinatorsRequest) -> Result<StateResponse, Refused> {
        if !matches!(request.target, 1 | 3 | 5) {
            let text = format!("a group has 1, 3 or 5 coordinators, not {}", request.target);
            return Err(Refused::new(Reason::Invalid, text));
        }
        let command = Command::ConfigureGroup(ConfigureGroup {
            target_members: request.target,
            feature_level: 0,
            why: request.why,
        });
        self.bounded(self.core.propose(&command, request.request_id)).await
    }

    async fn configure_here(&self, request: ConfigurePoolRequest) -> Result<StateResponse, Refused> {
        check_name("pool", &request.pool)?;
        let command = Command::ConfigurePool(ConfigurePool {
            pool: request.pool,
            factor: request.factor,
        });
        self.bounded(self.core.propose(&command, request.request_id)).await
    }

    async fn drain_here(&self, request: DrainShardRequest) -> Result<StateResponse, Refused> {
        check_name("shard", &request.shard)?;
        let command = Command::DrainShard(DrainShard {
            id: request.shard,
            out: request.out,
            why: request.why,
        });
        self.bounded(self.core.propose(&command, request.request_id)).await
    }

    async fn remove_here(&self, request: RemoveShardRequest) -> Result<StateResponse, Refused> {
        check_name("shard", &request.shard)?;
        let duty = self.core.duty.borrow().clone().ok_or_else(|| self.core.elsewhere())?;
        // Forgotten while it runs, it would register again at once, as one that takes part.
        let lately = self.core.timing.heartbeat() * 2;
        if duty.observed.live_boot_id(&request.shard, lately).is_some() {
            let text = format!("shard {} still runs: stop it first", request.shard);
            return Err(Refused::new(Reason::Invalid, text));
        }
        let command = Command::RemoveShard(RemoveShard { id: request.shard });
        self.bounded(self.core.propose(&command, request.request_id)).await
    }

    async fn release_here(&self, request: ReleaseBrakeRequest) -> Result<StateResponse, Refused> {
        check_name("pool", &request.pool)?;
        let command = Command::ReleaseBrake(ReleaseBrake {
            pool: request.pool,
            for_ms: request.for_ms,
        });
        self.bounded(self.core.propose(&command, request.request_id)).await
    }
}

pub(super) fn kind_of(record: &Record) -> Kind {
    match record {
        Record::Cluster(_) => Kind::Cluster,
        Record::Node(_) => Kind::Node,
        Record::Shard(_) => Kind::Shard,
        Record::Pool(_) => Kind::Pool,
        Record::Slots(_) => Kind::SlotMap,
        Record::Member(_) => Kind::Member,
    }
}

#[tonic::async_trait]
impl Cluster for ClusterService {
    async fn list(&self, request: Request<ListRequest>) -> Result<Response<ListReply>, Status> {
        let kind = Kind::try_from(request.get_ref().kind)
            .map_err(|_| refuse(Refused::new(Reason::Invalid, "the kind is unknown")))?;
        let here = self.list_here(kind);
        Ok(self
            .forward
            .at_leader(request, here, |mut c, r| async move { c.list(r).await })
            .await?)
    }

    type WatchStream = ReceiverStream<Result<WatchReply, Status>>;

    async fn watch(&self, request: Request<WatchRequest>) -> Result<Response<Self::WatchStream>, Status> {
        self.watches
            .start(request.into_inner())
            .map(Response::new)
            .map_err(refuse)
    }

    async fn status(&self, request: Request<StatusRequest>) -> Result<Response<StatusReply>, Status> {
        let here = async { Ok(report(&self.core)) };
        let there = |mut c: kvpool_proto::v1::cluster_client::ClusterClient<_>, r| async move { c.status(r).await };
        match self.forward.at_leader(request, here, there).await {
            Ok(reply) => Ok(reply),
            // The leader is out of reach: this member tells what it knows.
            Err(_) => Ok(Response::new(report(&self.core))),
        }
    }

    async fn scale_coordinators(
        &self,
        request: Request<ScaleCoordinatorsRequest>,
    ) -> Result<Response<StateResponse>, Status> {
        may_change(&request)?;
        let here = self.scale_here(request.get_ref().clone());
        let there =
            |mut c: kvpool_proto::v1::cluster_client::ClusterClient<_>, r| async move { c.scale_coordinators(r).await };
        Ok(self.forward.at_leader(request, here, there).await?)
    }

    async fn configure_pool(&self, request: Request<ConfigurePoolRequest>) -> Result<Response<StateResponse>, Status> {
        may_change(&request)?;
        let here = self.configure_here(request.get_ref().clone());
        let there =
            |mut c: kvpool_proto::v1::cluster_client::ClusterClient<_>, r| async move { c.configure_pool(r).await };
        Ok(self.forward.at_leader(request, here, there).await?)
    }

    async fn drain_shard(&self, request: Request<DrainShardRequest>) -> Result<Response<StateResponse>, Status> {
        may_change(&request)?;
        let here = self.drain_here(request.get_ref().clone());
        let there =
            |mut c: kvpool_proto::v1::cluster_client::ClusterClient<_>, r| async move { c.drain_shard(r).await };
        Ok(self.forward.at_leader(request, here, there).await?)
    }

    async fn remove_shard(&self, request: Request<RemoveShardRequest>) -> Result<Response<StateResponse>, Status> {
        may_change(&request)?;
        let here = self.remove_here(request.get_ref().clone());
        let there =
            |mut c: kvpool_proto::v1::cluster_client::ClusterClient<_>, r| async move { c.remove_shard(r).await };
        Ok(self.forward.at_leader(request, here, there).await?)
    }

    async fn release_brake(&self, request: Request<ReleaseBrakeRequest>) -> Result<Response<StateResponse>, Status> {
        may_change(&request)?;
        let here = self.release_here(request.get_ref().clone());
        let there =
            |mut c: kvpool_proto::v1::cluster_client::ClusterClient<_>, r| async move { c.release_brake(r).await };
        Ok(self.forward.at_leader(request, here, there).await?)
    }
}
