//! Chaos on real processes: starts a pool of `kvpool` processes with its own network between them, hurts it as scenarios
//! say, and judges what clients met. The product is a black box here. `docs/chaos.md` says how to read the reports.

mod dice;
mod fabric;
mod load;
mod measure;
mod pool;
mod record;
mod report;
mod scenario;

use anyhow::{Context, Result, bail, ensure};
use clap::{Args, Parser, Subcommand};
use load::lmcache::Installed;
use scenario::Scenario;
use scenario::run::Options;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;
use tokio::signal::unix::{SignalKind, signal};

const EXAMPLES: &str = "\
Examples:
  kvpool-chaos-run run chaos/scenarios/mixed.toml --seed 7
  kvpool-chaos-run run chaos/scenarios/mixed.toml --minutes 60 --report /tmp/report.txt
  kvpool-chaos-run run chaos/scenarios            # all of them, one after the other

Exit codes: 0 no violation, 1 violations (the report lists them), 2 wrong usage or a harness that could not run.";

/// Hurt a pool of real processes and judge what its clients met.
#[derive(Parser)]
#[command(name = "kvpool-chaos-run", after_help = EXAMPLES)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Run scenarios
    Run(RunArgs),
    /// Measure how long clients wait when a leader or a shard is killed or frozen, or a leader is told to stop
    Measure(MeasureArgs),
    /// Become a member of the pool that ends with the harness (started by the harness itself)
    #[command(hide = true)]
    Guard {
        parent: u32,
        program: String,
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<String>,
    },
}

#[derive(Args)]
struct RunArgs {
    /// Scenario files, or directories of them
    #[arg(required = true)]
    scenarios: Vec<PathBuf>,
    /// Seed of everything random [default: from the clock; printed]
    #[arg(long)]
    seed: Option<u64>,
    /// Draw faults of the scenario's mix for this long, whatever its count says
    #[arg(long)]
    minutes: Option<u64>,
    /// The kvpool binary [default: `kvpool` beside this program]
    #[arg(long, env = "KVPOOL_BIN")]
    kvpool: Option<PathBuf>,
    /// Python with LMCache, as `tests/setup.sh` prints it [default: scenarios run without their LMCache clients]
    #[arg(long, env = "KVPOOL_LMCACHE_PYTHON")]
    lmcache_python: Option<PathBuf>,
    /// Write report and timeline to this file, too
    #[arg(long)]
    report: Option<PathBuf>,
    /// Keep logs and data even when all is well
    #[arg(long)]
    keep: bool,
}

#[derive(Args)]
struct MeasureArgs {
    /// How often each fault is done
    #[arg(long, default_value_t = 20)]
    rounds: u32,
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// The kvpool binary [default: `kvpool` beside this program]
    #[arg(long, env = "KVPOOL_BIN")]
    kvpool: Option<PathBuf>,
}

fn main() -> ExitCode {
    match start(Cli::parse()) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("{error:#}");
            ExitCode::from(2)
        }
    }
}

fn start(cli: Cli) -> Result<ExitCode> {
    match cli.command {
        Command::Guard { parent, program, args } => pool::guard(parent, &program, &args).map(|()| ExitCode::SUCCESS),
        // Members are started by tasks of this thread and of workers; both live until the end, which is what the death
        // signal of the guard asks for.
        Command::Run(args) => until_interrupted(run(args)),
        Command::Measure(args) => until_interrupted(async move {
            let table = measure::measure(&program(args.kvpool.as_deref())?, args.rounds, args.seed).await?;
            println!("\n{table}");
            Ok(ExitCode::SUCCESS)
        }),
    }
}

/// Ctrl-C and SIGTERM end the work by dropping it, which ends the pool.
fn until_interrupted(work: impl Future<Output = Result<ExitCode>>) -> Result<ExitCode> {
    tokio::runtime::Runtime::new()?.block_on(async {
        let mut term = signal(SignalKind::terminate())?;
        tokio::select! {
            done = work => done,
            _ = tokio::signal::ctrl_c() => bail!("interrupted"),
            _ = term.recv() => bail!("told to stop"),
        }
    })
}

async fn run(args: RunArgs) -> Result<ExitCode> {
    let program = program(args.kvpool.as_deref())?;
    let mut scenarios = Vec::new();
    for path in files(&args.scenarios)? {
        scenarios.push(Scenario::read(&path)?);
    }
    ensure!(!scenarios.is_empty(), "no scenario was found");
    let (mut passed, mut failed, mut text) = (0, 0, String::new());
    for scenario in &scenarios {
        let options = Options {
            program: program.clone(),
            seed: args.seed.unwrap_or_else(clock_seed),
            time: args.minutes.map(|minutes| Duration::from_secs(minutes * 60)),
            echo: true,
            keep: args.keep,
            lmcache: args.lmcache_python.as_deref().map(Installed::new).transpose()?,
        };
        let report = scenario::run::run(scenario, &options).await?;
        let summary = report.summary();
        println!("\n{summary}");
        text += &format!("{summary}\n{}\n", report.record.timeline());
        if report.violations() == 0 {
            passed += 1
        } else {
            failed += 1
        }
    }
    if let Some(path) = &args.report {
        std::fs::write(path, text).with_context(|| format!("failed to write {}", path.display()))?;
    }
    println!("{passed} scenarios passed, {failed} failed");
    Ok(ExitCode::from(u8::from(failed > 0)))
}

/// The binary under test.
fn program(given: Option<&Path>) -> Result<PathBuf> {
    let path = match given {
        Some(path) => path.to_owned(),
        None => std::env::current_exe()?.with_file_name("kvpool"),
    };
    path.canonicalize()
        .with_context(|| format!("failed to find {}: build it with cargo build --release", path.display()))
}

fn files(paths: &[PathBuf]) -> Result<Vec<PathBuf>> {
    let mut all = Vec::new();
    for path in paths {
        if path.is_dir() {
            let entries = std::fs::read_dir(path).with_context(|| format!("failed to read {}", path.display()))?;
            let found = entries.flatten().map(|entry| entry.path());
            let mut found: Vec<PathBuf> = found.filter(|p| p.extension().is_some_and(|e| e == "toml")).collect();
            found.sort();
            all.extend(found);
        } else {
            all.push(path.clone());
        }
    }
    Ok(all)
}

fn clock_seed() -> u64 {
    let now = std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .unwrap_or_default();
    dice::mix(u64::try_from(now.as_nanos()).unwrap_or(0)) % 1_000_000
}
