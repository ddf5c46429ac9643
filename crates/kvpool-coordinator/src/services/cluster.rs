//! The API service: list, status, configure; the watch is in its own module.

use crate::core::{Core, refuse};
use crate::services::check_name;
use crate::services::forward::Forwarder;
use crate::services::watch::Watches;
use crate::status::report;
use kvpool_proto::meta::{Reason, Refused};
use kvpool_proto::v1::cluster_server::Cluster;
use kvpool_proto::v1::{
    ConfigurePoolRequest, Kind, ListReply, ListRequest, StatusReply, StatusRequest, WatchReply, WatchRequest,
};
use kvpool_state::command::ConfigurePool;
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

    async fn configure_here(&self, request: ConfigurePoolRequest) -> Result<StateResponse, Refused> {
        check_name("pool", &request.pool)?;
        let command = Command::ConfigurePool(ConfigurePool {
            pool: request.pool,
            factor: request.factor,
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

    async fn configure_pool(&self, request: Request<ConfigurePoolRequest>) -> Result<Response<StateResponse>, Status> {
        let here = self.configure_here(request.get_ref().clone());
        let there =
            |mut c: kvpool_proto::v1::cluster_client::ClusterClient<_>, r| async move { c.configure_pool(r).await };
        Ok(self.forward.at_leader(request, here, there).await?)
    }
}
