//! A cluster inside the test's process.

use super::eventually;
use crate::actors::{LeadershipMsg, Target};
use crate::core::Core;
use crate::{Coordinator, CoordinatorConfig, CoordinatorError, CoordinatorHandle};
use kvpool_client::{Client, ClientConfig, StatusReply, Timing};
use parking_lot::Mutex;
use std::path::PathBuf;
use std::sync::Arc;
use tempfile::TempDir;
use tokio::net::TcpListener;
use tokio::sync::oneshot;
use tokio_util::sync::CancellationToken;

pub(super) const TOKEN: &str = "a shared secret";

/// Ports that nobody else gets: the sockets are bound until the member listens on them.
pub(super) struct TestCluster {
    pub(super) members: Vec<Member>,
    addresses: Vec<(u64, String)>,
    dir: TempDir,
    factor: u32,
}

pub(super) struct Member {
    pub(super) id: u64,
    pub(super) address: String,
    pub(super) running: Option<Running>,
}

pub(super) struct Running {
    runtime: tokio::runtime::Runtime,
    pub(super) handle: CoordinatorHandle,
    pub(super) core: Arc<Core>,
    shutdown: CancellationToken,
    outcome: Mutex<oneshot::Receiver<Result<(), CoordinatorError>>>,
}

impl Running {
    /// Lets an actor of this member panic.
    pub(super) fn inject(&self, target: Target) {
        self.core.inject(LeadershipMsg::Panic(target));
    }
}

impl TestCluster {
    /// Members that are not started yet.
    pub(super) fn new(size: u64, factor: u32) -> Self {
        let hold: Vec<_> = (0..size)
            .map(|_| std::net::TcpListener::bind("127.0.0.1:0").unwrap())
            .collect();
        let address = |l: &std::net::TcpListener| l.local_addr().unwrap().to_string();
        let addresses: Vec<_> = (1..).zip(hold.iter().map(address)).collect();
        let member = |(id, address): &(u64, String)| Member {
            id: *id,
            address: address.clone(),
            running: None,
        };
        let members = addresses.iter().map(member).collect();
        TestCluster {
            members,
            addresses,
            dir: tempfile::tempdir().unwrap(),
            factor,
        }
    }

    /// A running cluster with a leader.
    pub(super) async fn start(size: u64, factor: u32) -> Self {
        let mut cluster = TestCluster::new(size, factor);
        for id in 1..=size {
            cluster.start_member(id).await;
        }
        cluster.wait_ready().await;
        cluster.leader().await;
        cluster
    }

    pub(super) fn data_dir(&self, id: u64) -> PathBuf {
        self.dir.path().join(format!("member-{id}"))
    }

    pub(super) async fn start_member(&mut self, id: u64) {
        self.start_member_with(id, |_| {}).await;
    }

    pub(super) async fn start_member_with(&mut self, id: u64, change: impl FnOnce(&mut CoordinatorConfig)) {
        let address = self.member(id).address.clone();
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build()
            .unwrap();
        // The port of a member that was killed may take a moment to be free.
        let listener = eventually("the port is free", async || {
            let address = address.clone();
            runtime
                .spawn(async move { TcpListener::bind(address).await })
                .await
                .unwrap()
                .ok()
        })
        .await;
        // So may its data directory: a killed process would have let go of it at once.
        let dir = self.data_dir(id);
        eventually("the directory is free", async || {
            kvpool_raft::FileDisk::open(&dir).ok().map(drop)
        })
        .await;
        let shutdown = CancellationToken::new();
        let mut config = CoordinatorConfig {
            id,
            data_dir: self.data_dir(id),
            grpc: listener,
            members: self.addresses.clone(),
            join_token: TOKEN.parse().unwrap(),
            timing: Timing::Relaxed,
            factor: self.factor,
            bootstrap: false,
            features: kvpool_state::command::READER,
            trust: kvpool_client::Trust::Plain,
            shutdown: shutdown.clone(),
        };
        change(&mut config);
        let coordinator = Coordinator::new(config).unwrap();
        let (handle, core) = (coordinator.handle(), coordinator.core());
        let (tx, outcome) = oneshot::channel();
        runtime.spawn(async move {
            let _ = tx.send(coordinator.run().await);
        });
        self.member_mut(id).running = Some(Running {
            runtime,
            handle,
            core,
            shutdown,
            outcome: Mutex::new(outcome),
        });
    }

    pub(super) fn member(&self, id: u64) -> &Member {
        self.members.iter().find(|m| m.id == id).unwrap()
    }

    fn member_mut(&mut self, id: u64) -> &mut Member {
        self.members.iter_mut().find(|m| m.id == id).unwrap()
    }

    pub(super) fn running(&self, id: u64) -> &Running {
        self.member(id).running.as_ref().unwrap()
    }

    pub(super) async fn wait_ready(&self) {
        eventually("every member is ready", async || {
            for running in self.members.iter().filter_map(|m| m.running.as_ref()) {
                if let Ok(outcome) = running.outcome.lock().try_recv() {
                    panic!("a member stopped: {outcome:?}");
                }
            }
            let mut running = self.members.iter().filter_map(|m| m.running.as_ref());
            running.all(|r| r.handle.is_ready()).then_some(())
        })
        .await;
    }

    /// The member that leads and has its actors.
    pub(super) async fn leader(&self) -> u64 {
        eventually("there is one leader", async || {
            let leads = |m: &&Member| m.running.as_ref().is_some_and(|r| r.core.duty.borrow().is_some());
            self.members.iter().find(leads).map(|m| m.id)
        })
        .await
    }

    /// Like SIGKILL: everything of the member is gone at once.
    pub(super) fn kill(&mut self, id: u64) {
        if let Some(running) = self.member_mut(id).running.take() {
            running.runtime.shutdown_background();
        }
    }

    /// Like SIGTERM.
    pub(super) async fn stop(&mut self, id: u64) -> Result<(), CoordinatorError> {
        let running = self.member_mut(id).running.take().unwrap();
        running.shutdown.cancel();
        let outcome = running.outcome.into_inner().await.unwrap();
        running.runtime.shutdown_background();
        outcome
    }

    /// What a member that stops by itself says.
    pub(super) async fn outcome(&mut self, id: u64) -> Result<(), CoordinatorError> {
        let running = self.member_mut(id).running.take().unwrap();
        let outcome = running.outcome.into_inner().await.unwrap();
        running.runtime.shutdown_background();
        outcome
    }

    pub(super) fn client(&self) -> Client {
        self.client_of(&self.members.iter().map(|m| m.id).collect::<Vec<_>>())
    }

    /// A client that knows these members only.
    pub(super) fn client_of(&self, ids: &[u64]) -> Client {
        let endpoints = ids.iter().map(|id| self.member(*id).address.clone()).collect();
        Client::new(ClientConfig {
            endpoints,
            join_token: TOKEN.parse().unwrap(),
            trust: kvpool_client::Trust::Plain,
            timing: Timing::Relaxed,
        })
    }

    pub(super) async fn wait_status(&self, what: &str, wanted: impl Fn(&StatusReply) -> bool) -> StatusReply {
        let client = self.client();
        let mut last = None;
        let found = eventually(what, async || {
            let reply = client.status().await.ok()?;
            let good = wanted(&reply);
            if !good && last.as_ref() != Some(&reply.conditions) {
                eprintln!(
                    "status: {:?}",
                    reply.conditions.iter().map(|c| &c.message).collect::<Vec<_>>()
                );
                last = Some(reply.conditions.clone());
            }
            good.then_some(reply)
        });
        found.await
    }
}

impl Drop for TestCluster {
    fn drop(&mut self) {
        for member in &mut self.members {
            if let Some(running) = member.running.take() {
                running.runtime.shutdown_background();
            }
        }
    }
}
