//! Sessions of shards. Only the leader takes them; each ends with the leadership it began in.

use crate::actors::{Done, Duty, SessionGuard};
use crate::core::{Core, refuse};
use crate::metric_definitions as m;
use crate::services::check_name;
use kvpool_net::{Caller, Role};
use kvpool_proto::meta::{Reason, Refused};
use kvpool_proto::v1::nodes_server::Nodes;
use kvpool_proto::v1::session_down::What as Down;
use kvpool_proto::v1::session_up::What as Up;
use kvpool_proto::v1::{Beat, InSyncDone, SessionDown, SessionUp, ShardHello};
use std::sync::Arc;
use tokio::sync::{mpsc, watch};
use tokio::time::timeout;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status, Streaming};

/// Messages on their way to a shard; one that does not read loses its session.
const QUEUE: usize = 16;

pub(crate) struct NodesService {
    pub(crate) core: Arc<Core>,
}

impl NodesService {
    /// The leader's duty, for a shard of this cluster.
    fn duty_for(&self, hello: &ShardHello) -> Result<Arc<Duty>, Refused> {
        check_name("shard", &hello.shard)?;
        check_name("pool", &hello.pool)?;
        check_name("boot_id", &hello.boot_id)?;
        let mine = self.core.cluster_id();
        if !hello.cluster_id.is_empty() && !mine.is_empty() && hello.cluster_id != mine {
            let text = format!(
                "shard {} is of cluster {}, this is {mine}",
                hello.shard, hello.cluster_id
            );
            return Err(Refused::new(Reason::ClusterId, text));
        }
        self.core.duty.borrow().clone().ok_or_else(|| self.core.elsewhere())
    }

    async fn begin(
        &self,
        caller: Caller,
        mut up: Streaming<SessionUp>,
    ) -> Result<ReceiverStream<Result<SessionDown, Status>>, Refused> {
        let hello = match timeout(self.core.timing.attempt(), up.message()).await {
            Ok(Ok(Some(SessionUp {
                what: Some(Up::Hello(hello)),
            }))) => hello,
            Ok(Ok(_)) => return Err(Refused::new(Reason::Invalid, "a session begins with a hello")),
            Ok(Err(status)) => return Err(Refused::new(Reason::Invalid, status.message().to_owned())),
            Err(_) => return Err(Refused::new(Reason::Invalid, "no hello in time")),
        };
        if !caller.is_named(Role::Shard, &hello.shard) {
            let text = format!("{} may not be shard {}", caller.words(), hello.shard);
            return Err(Refused::new(Reason::NotAllowed, text));
        }
        let duty = self.duty_for(&hello)?;
        let welcome = duty.attach(hello.clone()).await?;
        let incarnation = welcome.incarnation;
        let node = hello.node.as_ref().map_or("", |n| n.id.as_str());
        let guard = duty.observed.open(&hello.shard, node, &hello.boot_id, incarnation);
        let done = duty.inbox.open(&hello.shard, incarnation);
        let (tx, rx) = mpsc::channel(QUEUE);
        // The queue is empty.
        let _ = tx.try_send(Ok(SessionDown {
            what: Some(Down::Welcome(welcome)),
        }));
        let session = Session {
            duty,
            guard,
            incarnation,
            tx,
            done,
        };
        tokio::spawn(session.run(up));
        Ok(ReceiverStream::new(rx))
    }
}

#[tonic::async_trait]
impl Nodes for NodesService {
    type SessionStream = ReceiverStream<Result<SessionDown, Status>>;

    async fn session(&self, request: Request<Streaming<SessionUp>>) -> Result<Response<Self::SessionStream>, Status> {
        let caller = Caller::of(request.extensions());
        self.begin(caller, request.into_inner())
            .await
            .map(Response::new)
            .map_err(refuse)
    }
}

struct Session {
    duty: Arc<Duty>,
    guard: SessionGuard,
    incarnation: u64,
    tx: mpsc::Sender<Result<SessionDown, Status>>,
    done: watch::Receiver<Done>,
}

impl Session {
    async fn run(mut self, mut up: Streaming<SessionUp>) {
        metrics::gauge!(m::SESSIONS).increment(1.0);
        let why = self.serve(&mut up).await;
        metrics::gauge!(m::SESSIONS).decrement(1.0);
        tracing::debug!(shard = %self.guard.shard, incarnation = self.incarnation, term = self.duty.term,
            why = why.as_ref().map_or("closed", |r| r.reason.word()), "a session ended");
        if let Some(refused) = why {
            // A full queue has no reader.
            let _ = self.tx.try_send(Err(refuse(refused)));
        }
    }

    /// Until the session ends; with the reason, where the shard should hear one.
    async fn serve(&mut self, up: &mut Streaming<SessionUp>) -> Option<Refused> {
        let stale = || {
            Some(Refused::new(
                Reason::StaleIncarnation,
                "this session is not the shard's newest one",
            ))
        };
        loop {
            let down = tokio::select! {
                message = up.message() => match message {
                    Ok(Some(SessionUp { what: Some(Up::Heartbeat(beat)) })) => {
                        if !self.guard.heard(&beat) {
                            return stale();
                        }
                        Down::Beat(Beat { term: self.duty.term, revision: *self.duty.core.replica.revision().borrow() })
                    }
                    Ok(Some(SessionUp { what: Some(Up::InSync(report)) })) => {
                        self.duty.inbox.put(&self.guard.shard, self.incarnation, &report);
                        continue;
                    }
                    Ok(Some(_)) => return Some(Refused::new(Reason::Invalid, "an unexpected message")),
                    Ok(None) | Err(_) => return None,
                },
                changed = self.done.changed() => match changed {
                    Ok(()) => {
                        let done = *self.done.borrow_and_update();
                        Down::InSyncDone(InSyncDone { sequence: done.sequence, refused: done.refused })
                    }
                    Err(_) => return None,
                },
                () = self.duty.end.cancelled() => return Some(self.duty.core.elsewhere()),
                () = self.guard.end.cancelled() => return stale(),
            };
            if self.tx.try_send(Ok(SessionDown { what: Some(down) })).is_err() {
                return None;
            }
        }
    }
}
