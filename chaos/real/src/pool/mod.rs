//! A pool of real processes: coordinators, shards and proxies, each started as a role of the `kvpool` binary, with the
//! [fabric](crate::fabric) between them.
//!
//! Invariants: only processes started here are ever signalled; they end with this process, however it ends; a member
//! keeps its ports over restarts.

mod metrics;
mod proc;

pub use metrics::Metrics;
pub use proc::{Proc, guard};

use crate::fabric::{Fabric, INSIDE, OUTSIDE};
use anyhow::{Context, Result, bail, ensure};
use kvpool_client::{Client, ClientConfig, JoinToken, StatusReply, Timing};
use rustix::process::Signal;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;
use tokio::time::{Instant, sleep, timeout};

/// How often the pool is asked whether it has healed.
const LOOK: Duration = Duration::from_millis(200);
/// Longest wait for one status.
const STATUS: Duration = Duration::from_secs(5);

/// What kind of process a member is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Role {
    Coordinator,
    Shard,
    Proxy,
}

impl Role {
    #[must_use]
    pub fn word(self) -> &'static str {
        match self {
            Role::Coordinator => "coordinator",
            Role::Shard => "shard",
            Role::Proxy => "proxy",
        }
    }
}

/// How large a pool is and how patient.
#[derive(Clone, Debug)]
pub struct Shape {
    pub coordinators: usize,
    pub shards: usize,
    pub proxies: usize,
    pub factor: u32,
    /// Bytes for blocks, of each shard.
    pub memory: u64,
    pub timing: Timing,
}

/// One process with its addresses.
pub struct Member {
    pub name: String,
    pub role: Role,
    pub proc: Proc,
    /// `gRPC` of a coordinator, RESP of a shard or proxy; the direct way, past the fabric.
    pub address: String,
    http: String,
}

/// See the module.
pub struct Pool {
    pub fabric: Fabric,
    pub members: Vec<Member>,
    pub token: JoinToken,
    pub timing: Timing,
    /// Copies of each block that are aimed for.
    pub factor: u32,
    // Last, so that processes end before their files go.
    dir: Dir,
}

/// The directory of a run: kept when something went wrong, so that the logs can be read.
struct Dir {
    path: PathBuf,
    keep: bool,
}

impl Drop for Dir {
    fn drop(&mut self) {
        if !self.keep {
            let _ = std::fs::remove_dir_all(&self.path);
        }
    }
}

/// Ports of one member. All are opened in the fabric; which one is used directly is the role's business.
struct Ports(Vec<u16>);

impl Ports {
    async fn open(fabric: &Fabric, name: &str, count: usize) -> Result<Self> {
        let mut ports = Vec::new();
        for _ in 0..count {
            ports.push(fabric.open_port(name).await?);
        }
        Ok(Ports(ports))
    }

    fn inside(&self, n: usize) -> String {
        SocketAddr::from((INSIDE, self.0[n])).to_string()
    }

    fn outside(&self, n: usize) -> String {
        SocketAddr::from((OUTSIDE, self.0[n])).to_string()
    }
}

impl Pool {
    /// Starts a pool and waits until it is healthy and settled.
    ///
    /// # Errors
    /// A process can't be started, or the pool is not there within `within`.
    pub async fn start(program: &Path, shape: &Shape, seed: u64, within: Duration) -> Result<Self> {
        let dir = tempfile::Builder::new().prefix("kvpool-chaos-").tempdir()?.keep();
        let dir = Dir { path: dir, keep: false };
        let secret = format!("chaos-{seed:016x}-{}", std::process::id());
        let token_file = dir.path.join("token");
        std::fs::write(&token_file, &secret)?;
        std::fs::set_permissions(&token_file, std::os::unix::fs::PermissionsExt::from_mode(0o600))?;
        let fabric = Fabric::new(seed);
        let members = plan(&fabric, program, shape, &dir.path, &token_file).await?;
        let mut pool = Pool {
            fabric,
            members,
            token: secret.parse()?,
            timing: shape.timing,
            factor: shape.factor,
            dir,
        };
        for at in 0..pool.members.len() {
            pool.start_member(at)?;
        }
        if let Err(error) = pool.wait_healthy(within).await {
            pool.dir.keep = true;
            return Err(error.context(format!("the pool did not start; logs in {}", pool.dir.path.display())));
        }
        Ok(pool)
    }

    /// Starts a member that does not run.
    ///
    /// # Errors
    /// It can't be started.
    pub fn start_member(&self, at: usize) -> Result<()> {
        let member = self.members.get(at).context("no such member")?;
        let pid = member.proc.start()?;
        self.fabric.set_pid(&member.name, pid);
        Ok(())
    }

    /// Keeps the logs and says where they are.
    pub fn keep(&mut self) -> &Path {
        self.dir.keep = true;
        &self.dir.path
    }

    /// Positions of the members of a role.
    #[must_use]
    pub fn of(&self, role: Role) -> Vec<usize> {
        (0..self.members.len())
            .filter(|at| self.members[*at].role == role)
            .collect()
    }

    /// Addresses of the coordinators, past the fabric.
    #[must_use]
    pub fn endpoints(&self) -> Vec<String> {
        self.of(Role::Coordinator)
            .into_iter()
            .map(|at| self.members[at].address.clone())
            .collect()
    }

    /// A client as any other would be, with connections of its own.
    #[must_use]
    pub fn client(&self) -> Client {
        Client::new(ClientConfig {
            endpoints: self.endpoints(),
            join_token: self.token.clone(),
            trust: kvpool_client::Trust::Plain,
            timing: self.timing,
        })
    }

    /// The coordinator that says of itself that it leads, at the highest term.
    ///
    /// # Errors
    /// None does within `within`.
    pub async fn leader(&self, within: Duration) -> Result<usize> {
        let deadline = Instant::now() + within;
        loop {
            let mut best = None;
            for at in self.of(Role::Coordinator) {
                let member = &self.members[at];
                if !member.proc.alive() {
                    continue;
                }
                // A frozen member does not answer; it is not waited for.
                let scraped = timeout(Duration::from_millis(500), Metrics::scrape(&member.http)).await;
                if let Ok(Ok(metrics)) = scraped
                    && metrics.sum("kvpool_raft_is_leader_count", &[]) > 0.0
                {
                    let term = metrics.sum("kvpool_raft_term_count", &[]);
                    if best.is_none_or(|(_, highest)| term > highest) {
                        best = Some((at, term));
                    }
                }
            }
            if let Some((at, _)) = best {
                return Ok(at);
            }
            ensure!(Instant::now() < deadline, "no coordinator leads");
            sleep(Duration::from_millis(50)).await;
        }
    }

    /// Waits until `kvpool status` would say healthy and every slot is where it belongs; how long it took.
    ///
    /// # Errors
    /// It is not within `within`; says what is still wrong.
    pub async fn wait_healthy(&self, within: Duration) -> Result<Duration> {
        let began = Instant::now();
        let client = self.client();
        loop {
            for member in &self.members {
                ensure!(
                    member.proc.alive(),
                    "{} has ended by itself: {}",
                    member.name,
                    tail(member.proc.log())
                );
            }
            let wrong = match self.not_ready().await {
                Some(wrong) => Some(wrong),
                None => match timeout(STATUS, client.status()).await {
                    Ok(Ok(status)) => obstacle(&status),
                    Ok(Err(error)) => Some(error.to_string()),
                    Err(_) => Some(format!("no status within {STATUS:?}")),
                },
            };
            let Some(wrong) = wrong else {
                return Ok(began.elapsed());
            };
            if began.elapsed() >= within {
                bail!("not healthy after {within:?}: {wrong}");
            }
            sleep(LOOK).await;
        }
    }

    /// The first member that says, or shows by silence, that it does not serve. Status alone would do too early: it does
    /// not know yet what happened a moment ago.
    async fn not_ready(&self) -> Option<String> {
        for member in &self.members {
            if let Err(error) = metrics::ready(&member.http).await {
                return Some(format!("{}: {error:#}", member.name));
            }
        }
        None
    }

    /// What a process counts.
    ///
    /// # Errors
    /// It does not answer.
    pub async fn metrics(&self, at: usize) -> Result<Metrics> {
        let member = self.members.get(at).context("no such member")?;
        Metrics::scrape(&member.http).await
    }

    /// Ends all processes, politely at first; those that had to be killed.
    pub async fn stop(&self) -> Vec<String> {
        let mut killed = Vec::new();
        self.fabric.change(crate::fabric::Rules::clear);
        for member in &self.members {
            member.proc.signal(Signal::CONT);
            member.proc.signal(Signal::TERM);
        }
        for member in &self.members {
            if member.proc.gone(Duration::from_secs(15)).await.is_err() {
                killed.push(member.name.clone());
                let _ = member.proc.kill().await;
            }
        }
        self.fabric.close();
        killed
    }
}

/// What keeps a pool from being healthy and settled. Pools of the metadata load have no shards, which is no fault.
fn obstacle(status: &StatusReply) -> Option<String> {
    let ours = |subject: &str| subject.starts_with(crate::load::metadata::POOL_PREFIX);
    let conditions: Vec<String> = (status.conditions.iter())
        .filter(|c| !ours(&c.subject))
        .map(|c| format!("{} {}: {}", c.kind, c.subject, c.message))
        .collect();
    if !conditions.is_empty() {
        return Some(conditions.join("; "));
    }
    let moving = status
        .pools
        .iter()
        .find(|p| !ours(&p.name) && (p.filling > 0 || !p.settled));
    moving.map(|p| format!("pool {} is not settled ({} slots filling)", p.name, p.filling))
}

/// The end of a log, for error messages.
pub fn tail(log: &Path) -> String {
    let text = std::fs::read(log).unwrap_or_default();
    let from = text.len().saturating_sub(1500);
    String::from_utf8_lossy(&text[from..]).into_owned()
}

async fn plan(fabric: &Fabric, program: &Path, shape: &Shape, dir: &Path, token: &Path) -> Result<Vec<Member>> {
    let name = |role: Role, n: usize| format!("{}-{n}", role.word());
    let mut coordinators = Vec::new();
    for n in 1..=shape.coordinators {
        coordinators.push(Ports::open(fabric, &name(Role::Coordinator, n), 2).await?);
    }
    let mut shards = Vec::new();
    for n in 1..=shape.shards {
        shards.push(Ports::open(fabric, &name(Role::Shard, n), 4).await?);
    }
    let seeds: Vec<String> = (coordinators.iter().enumerate())
        .map(|(i, p)| format!("{}={}", i + 1, p.outside(0)))
        .collect();
    let endpoints: Vec<String> = coordinators.iter().map(|p| p.outside(0)).collect();
    let peers: Vec<String> = shards.iter().map(|p| p.outside(0)).collect();
    let (seeds, endpoints, peers) = (seeds.join(","), endpoints.join(","), peers.join(","));
    let mut members = Vec::new();
    let mut add = |role: Role, number: usize, args: Vec<String>, address: String, http: String| {
        let name = name(role, number);
        let mut all = vec![role.word().to_owned(), "run".to_owned()];
        all.extend(args);
        all.extend(strings(&["--http", &http, "--timing", shape.timing.word()]));
        all.extend(strings(&["--join-token-file", &token.to_string_lossy()]));
        let log = dir.join(format!("{name}.log"));
        let proc = Proc::new(program.to_owned(), all, log);
        members.push(Member {
            name,
            role,
            proc,
            address,
            http,
        });
    };
    for (i, ports) in coordinators.iter().enumerate() {
        let data = dir.join(format!("data-{}", i + 1));
        let (id, factor) = ((i + 1).to_string(), shape.factor.to_string());
        let mut args = strings(&["--id", &id, "--members", &seeds, "--listen", &ports.inside(0)]);
        args.extend(strings(&["--data-dir", &data.to_string_lossy(), "--factor", &factor]));
        add(Role::Coordinator, i + 1, args, ports.inside(0), ports.inside(1));
    }
    for (i, ports) in shards.iter().enumerate() {
        let (id, node) = (format!("shard-{}", i + 1), format!("node-{}", i + 1));
        let mut args = strings(&["--id", &id, "--node", &node, "--memory", &shape.memory.to_string()]);
        args.extend(strings(&[
            "--advertise-host",
            &std::net::Ipv4Addr::from(OUTSIDE).to_string(),
        ]));
        args.extend(strings(&["--coordinators", &endpoints, "--peer", &ports.inside(0)]));
        args.extend(strings(&["--resp", &ports.inside(1), "--lm", &ports.inside(2)]));
        add(Role::Shard, i + 1, args, ports.inside(1), ports.inside(3));
    }
    for n in 1..=shape.proxies {
        let ports = Ports::open(fabric, &name(Role::Proxy, n), 3).await?;
        let mut args = strings(&["--coordinators", &endpoints, "--seed-shards", &peers]);
        args.extend(strings(&["--resp", &ports.inside(0), "--lm", &ports.inside(1)]));
        add(Role::Proxy, n, args, ports.inside(0), ports.inside(2));
    }
    Ok(members)
}

fn strings(list: &[&str]) -> Vec<String> {
    list.iter().map(|s| (*s).to_owned()).collect()
}
