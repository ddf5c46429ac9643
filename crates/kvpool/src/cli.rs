//! The command line. Each command's flags live beside its code; here is the tree they hang in.

use clap::{Parser, Subcommand};

use crate::bench::BenchArgs;
use crate::cert::CertArgs;
use crate::ctl::members::{DrainArgs, ReleaseArgs, RemoveArgs, UndrainArgs};
use crate::ctl::{get::GetArgs, scale::ScaleArgs, status::StatusArgs};
use crate::data::check::CheckArgs;
use crate::dev::DevArgs;
use crate::roles::coordinator::CoordinatorArgs;
use crate::roles::proxy::ProxyArgs;
use crate::roles::shard::ShardArgs;

const EXAMPLES: &str = "\
Examples:
  kvpool dev                          a whole pool on this machine: 3 coordinators, 3 shards, 1 proxy
  kvpool status                       is the pool healthy, and if not, what is degraded and why
  kvpool get shards                   the shards, as a table
  kvpool get slots -o json            who holds which slots, for programs
  kvpool drain shard shard-1          move everything away from a shard, then it can be stopped and removed

Settings of `run` commands: flags win over KVPOOL_... variables, those over the --config file, that over defaults.
Exit codes: 0 done, 1 failed (status: degraded), 2 wrong usage, 3 no coordinator answered.";

/// A KV-cache pool for LLM serving that survives losing any one process.
#[derive(Debug, Parser)]
#[command(name = "kvpool", version, after_help = EXAMPLES, disable_help_subcommand = true)]
pub struct Cli {
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Run a whole pool on this machine, as child processes of one command
    Dev(Box<DevArgs>),
    /// The Raft group that decides
    #[command(subcommand)]
    Coordinator(CoordinatorCommand),
    /// A cache server that holds blocks
    #[command(subcommand)]
    Shard(Run<ShardArgs>),
    /// The front ends without a store, beside an engine
    #[command(subcommand)]
    Proxy(Run<ProxyArgs>),
    /// Say whether the pool is healthy, and if not, what is degraded and why
    Status(StatusArgs),
    /// Show nodes, shards, slots, members (the coordinators) or pools
    Get(GetArgs),
    /// Let a shard hand over its slots and take no new ones
    Drain(DrainArgs),
    /// Let a shard take part in placement again
    Undrain(UndrainArgs),
    /// Forget a shard that is Drained or Down
    Remove(RemoveArgs),
    /// Release a brake that the coordinator has put on itself
    Release(ReleaseArgs),
    /// Say how many coordinators are wanted
    Scale(ScaleArgs),
    /// Make a private CA and certificates for mutual TLS between the processes of a pool
    Cert(CertArgs),
    /// Measure servers against each other: throughput, latency and CPU per byte, every byte verified
    Bench(BenchArgs),
}

/// What a coordinator, or its data, can be told to do.
#[derive(Debug, Subcommand)]
pub enum CoordinatorCommand {
    /// Run the role in the foreground until SIGTERM or Ctrl-C
    Run(Box<CoordinatorArgs>),
    /// Check the data directory of a stopped coordinator; writes nothing
    Check(CheckArgs),
}

/// What a role can be told to do.
#[derive(Debug, Subcommand)]
pub enum Run<A: clap::Args> {
    /// Run the role in the foreground until SIGTERM or Ctrl-C
    Run(Box<A>),
}

#[cfg(test)]
mod tests;
