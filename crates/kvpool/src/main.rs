//! The one binary of kvpool: every role is a subcommand.
//!
//! This crate is wiring: command line, settings, logs, metrics and HTTP probes. What the roles do lives in the crates below.

use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::Parser;

mod bench;
mod cert;
mod cli;
mod config;
mod ctl;
mod data;
mod dev;
mod exit;
mod http;
mod out;
mod roles;
mod shutdown;
mod telemetry;

use cli::{Cli, Command, CoordinatorCommand, Run};

fn main() -> ExitCode {
    match run(Cli::parse()) {
        Ok(code) => code,
        Err(error) => {
            // `{:#}` shows the chain of causes on one line.
            eprintln!("kvpool: {error:#}");
            ExitCode::from(exit::code_of(&error))
        }
    }
}

fn run(cli: Cli) -> Result<ExitCode> {
    match cli.command {
        Command::Coordinator(CoordinatorCommand::Run(args)) => many_threads()?.block_on(roles::coordinator::run(*args)),
        Command::Coordinator(CoordinatorCommand::Check(args)) => data::check::run(&args),
        Command::Shard(Run::Run(args)) => many_threads()?.block_on(roles::shard::run(*args)),
        Command::Proxy(Run::Run(args)) => many_threads()?.block_on(roles::proxy::run(*args)),
        Command::Dev(args) => one_thread()?.block_on(dev::run(*args)),
        Command::Status(args) => one_thread()?.block_on(ctl::status::run(args)),
        Command::Bench(args) => bench::run(args).map(|()| ExitCode::SUCCESS),
        Command::Scale(args) => one_thread()?.block_on(ctl::scale::run(args)),
        Command::Cert(args) => cert::run(args),
        Command::Get(args) => one_thread()?.block_on(ctl::get::run(args)),
        Command::Drain(args) => one_thread()?.block_on(ctl::members::drain(args)),
        Command::Undrain(args) => one_thread()?.block_on(ctl::members::undrain(args)),
        Command::Remove(args) => one_thread()?.block_on(ctl::members::remove(args)),
        Command::Release(args) => one_thread()?.block_on(ctl::members::release(args)),
    }
}

/// The runtime of the roles: a worker per core.
fn many_threads() -> Result<tokio::runtime::Runtime> {
    tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .thread_name("kvpool")
        .build()
        .context("failed to start the runtime")
}

/// The runtime of commands that mostly wait.
fn one_thread() -> Result<tokio::runtime::Runtime> {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("failed to start the runtime")
}
