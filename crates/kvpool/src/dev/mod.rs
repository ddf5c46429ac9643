//! `kvpool dev`: a whole pool on this machine, as child processes of one command.
//!
//! The parent starts the roles of this very binary, waits until the pool is whole, says how to use it, and then only
//! watches. It restarts no child: seeing what a lost process does is what `dev` is for. Every child ends with the parent,
//! however the parent ends.

use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::Result;
use clap::Args;
use tokio::task::JoinSet;

use crate::config::values::{ByteSize, Timing};
use crate::exit::failure;
use crate::roles::proxy;
use crate::{out, shutdown, telemetry};

mod child;
mod home;
mod plan;
mod ports;
mod ready;
mod tail;
mod words;

use child::{Child, Ended};
use home::Home;
use plan::Plan;
use tail::Tails;

const EXAMPLES: &str = "\
Examples:
  kvpool dev                                        everything in memory and a temporary directory, gone at the end
  kvpool dev --data-dir ./pool                      members, pools and addresses survive restarts
  kvpool dev --shards 5 --memory-per-shard 1GiB --factor 2
  kvpool dev --coordinators 1 --shards 1            the smallest pool; slots are under-replicated then
  kvpool dev --resp-port 0 --lm-port 0 --http-port 0 --ready-file ready.json
                                                    free ports, for tests: the file says which

Ctrl-C (or SIGTERM) stops everything. A child that dies is not restarted; the line that says so shows how to start it
again by hand.
Exit codes: 0 stopped as asked, 1 a child failed at the start, 2 wrong usage.";

/// Run a whole pool on this machine, as child processes of one command.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct DevArgs {
    /// How many coordinators: 1, 3 or 5
    #[arg(long, env = "KVPOOL_DEV_COORDINATORS", value_name = "N", default_value_t = 3)]
    coordinators: usize,
    /// How many shards, each on a node of its own
    #[arg(long, env = "KVPOOL_DEV_SHARDS", value_name = "N", default_value_t = 3)]
    shards: usize,
    /// Copies of each block
    #[arg(long, env = "KVPOOL_DEV_FACTOR", value_name = "N", default_value_t = crate::config::DEFAULT_FACTOR)]
    factor: u32,
    /// Memory of each shard for blocks
    #[arg(
        long,
        env = "KVPOOL_DEV_MEMORY_PER_SHARD",
        value_name = "SIZE",
        default_value = "128MiB"
    )]
    memory_per_shard: ByteSize,
    /// How patient to be with slow processes
    #[arg(long, env = "KVPOOL_DEV_TIMING", default_value = "normal")]
    timing: Timing,
    /// Directory of all data and logs [default: a temporary one, removed at the end]
    #[arg(long, env = "KVPOOL_DEV_DATA_DIR", value_name = "DIR")]
    data_dir: Option<std::path::PathBuf>,
    /// The proxy's port for redis:// and resp://; 0 = a free one
    #[arg(long, env = "KVPOOL_DEV_RESP_PORT", value_name = "PORT", default_value_t = proxy::RESP_PORT)]
    resp_port: u16,
    /// The proxy's port for lm://; 0 = a free one
    #[arg(long, env = "KVPOOL_DEV_LM_PORT", value_name = "PORT", default_value_t = proxy::LM_PORT)]
    lm_port: u16,
    /// The proxy's port for /livez, /readyz and /metrics; 0 = a free one
    #[arg(long, env = "KVPOOL_DEV_HTTP_PORT", value_name = "PORT", default_value_t = proxy::HTTP_PORT)]
    http_port: u16,
    /// JSON file with all addresses and pids, written when the pool is ready and removed at the end
    #[arg(long, env = "KVPOOL_DEV_READY_FILE", value_name = "FILE")]
    ready_file: Option<std::path::PathBuf>,
    /// What this command and its children log, in the syntax of RUST_LOG
    #[arg(long, env = "KVPOOL_LOG", value_name = "FILTER")]
    log: Option<String>,
}

/// How long children may take to stop before they are killed: longer than they give themselves.
const STOP_GRACE: Duration = Duration::from_secs(7);
/// How often the children's logs are looked at.
const TAIL_EVERY: Duration = Duration::from_millis(300);

/// Runs the pool until it is told to stop.
pub async fn run(args: DevArgs) -> Result<ExitCode> {
    let began = Instant::now();
    telemetry::log::start(args.log.as_deref(), "warn")?;
    let stop = shutdown::token(None)?;
    plan::check(&args)?;
    let home = Home::open(args.data_dir.as_deref())?;
    if let Some(file) = &args.ready_file {
        home::remove_ready_file(file)?;
    }
    let (ports, held) = ports::choose(&args, &home).await?;
    let plan = Plan::new(&args, &home, ports)?;
    // From here on the ports are free for the children, for the few milliseconds until they bind them.
    drop(held);
    let mut pool = Pool::start(&plan, &home).await?;
    let waited = tokio::select! {
        done = ready::wait(&plan, &home) => done,
        ended = pool.next_end() => Err(died_early(&ended, &home)),
        () = stop.cancelled() => {
            pool.stop().await;
            return Ok(ExitCode::SUCCESS);
        }
    };
    if let Err(error) = waited {
        pool.stop().await;
        home.keep();
        return Err(error);
    }
    if let Some(file) = &args.ready_file {
        home::write_ready_file(file, &plan.ready_json(&pool.pids()))?;
    }
    out::show(&words::welcome(&plan, &home, &pool.pids(), began.elapsed()));
    watch(&mut pool, &plan, &home, &stop).await;
    out::show(&format!("stopping {} processes\n", pool.living()));
    pool.stop().await;
    if let Some(file) = &args.ready_file {
        home::remove_ready_file(file)?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Shows what happens to the children until it is time to stop.
async fn watch(pool: &mut Pool, plan: &Plan, home: &Home, stop: &tokio_util::sync::CancellationToken) {
    let mut tails = Tails::new(
        plan.children
            .iter()
            .map(|spec| (spec.name.clone(), home.log(&spec.name))),
    );
    let mut tick = tokio::time::interval(TAIL_EVERY);
    tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            ended = pool.next_end() => out::show(&words::ended(&ended, plan, home)),
            _ = tick.tick() => tails.show(|line| out::show(&format!("{line}\n"))),
        }
    }
}

fn died_early(ended: &Ended, home: &Home) -> anyhow::Error {
    failure(format!(
        "{} ended at the start ({}). Its last lines, from {}:\n{}",
        ended.name,
        words::how(ended.status),
        home.log(&ended.name).display(),
        tail::last_lines(&home.log(&ended.name), 12)
    ))
}

/// The children.
struct Pool {
    children: Vec<Child>,
    waits: JoinSet<Ended>,
    stop: tokio_util::sync::CancellationToken,
}

impl Pool {
    async fn start(plan: &Plan, home: &Home) -> Result<Self> {
        let mut pool = Pool {
            children: Vec::new(),
            waits: JoinSet::new(),
            stop: Default::default(),
        };
        for spec in &plan.children {
            match child::spawn(spec, home) {
                Ok((child, process)) => {
                    pool.waits
                        .spawn(child::wait(spec.name.clone(), process, pool.stop.clone(), STOP_GRACE));
                    pool.children.push(child);
                }
                Err(error) => {
                    pool.stop().await;
                    return Err(error);
                }
            }
        }
        Ok(pool)
    }

    /// The next child that ends; never when none is left.
    async fn next_end(&mut self) -> Ended {
        loop {
            match self.waits.join_next().await {
                Some(Ok(ended)) => return ended,
                Some(Err(error)) => tracing::error!(%error, "failed to watch a child"),
                None => std::future::pending().await,
            }
        }
    }

    /// Stops all children at once and waits for them.
    async fn stop(&mut self) {
        self.stop.cancel();
        while let Some(ended) = self.waits.join_next().await {
            if let Ok(Ended { name, killed: true, .. }) = ended {
                out::show(&format!(
                    "{name} did not stop within {} s and was killed\n",
                    STOP_GRACE.as_secs()
                ));
            }
        }
    }

    fn living(&self) -> usize {
        self.waits.len()
    }

    fn pids(&self) -> Vec<u32> {
        self.children.iter().map(|child| child.pid).collect()
    }
}
