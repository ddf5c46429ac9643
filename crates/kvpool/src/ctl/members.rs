//! `kvpool drain`, `undrain`, `remove` and `release`: what people do with shards.

use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::Result;
use clap::{Args, Subcommand};
use kvpool_proto::v1::{ShardStatus, StatusReply};
use kvpool_state::{Refusal, Response};

use super::Target;
use crate::exit::failure;
use crate::out;

/// How often the progress of a drain is looked at.
const LOOK: Duration = Duration::from_secs(1);

const DRAIN_EXAMPLES: &str = "\
Examples:
  kvpool drain shard shard-1                            wait until it holds nothing, with progress
  kvpool drain shard shard-1 --no-wait                  ask, and come back at once
  kvpool drain shard shard-1 && kill $PID && kvpool remove shard shard-1

The shard gets no new slots from now on, hands its primaries over first, and keeps each copy until another shard has it
complete: no read fails, and no slot has fewer copies meanwhile. Ctrl-C ends the waiting, not the drain; `kvpool undrain`
takes it back. A drained shard stays up and may still be the address of clients until it is stopped.
Exit codes: 0 drained (or asked, with --no-wait), 1 refused or not in time, 2 wrong usage, 3 no coordinator answered,
130 Ctrl-C.";

/// Let a shard hand over its slots and take no new ones.
#[derive(Debug, Args)]
#[command(after_help = DRAIN_EXAMPLES)]
pub struct DrainArgs {
    #[command(subcommand)]
    what: DrainWhat,
}

#[derive(Debug, Subcommand)]
enum DrainWhat {
    /// A cache server
    #[command(after_help = DRAIN_EXAMPLES)]
    Shard(DrainShardArgs),
}

#[derive(Debug, Args)]
struct DrainShardArgs {
    /// Its name, as `kvpool get shards` shows it
    name: String,
    /// Don't wait until it is drained
    #[arg(long)]
    no_wait: bool,
    /// Longest time to wait until it is drained, such as 10m [default: for ever]
    #[arg(long, value_name = "TIME")]
    give_up_after: Option<humantime::Duration>,
    #[command(flatten)]
    target: Target,
}

const UNDRAIN_EXAMPLES: &str = "\
Examples:
  kvpool undrain shard shard-1

Exit codes: 0 done, 1 refused, 2 wrong usage, 3 no coordinator answered.";

/// Let a shard take part in placement again.
#[derive(Debug, Args)]
#[command(after_help = UNDRAIN_EXAMPLES)]
pub struct UndrainArgs {
    #[command(subcommand)]
    what: UndrainWhat,
}

#[derive(Debug, Subcommand)]
enum UndrainWhat {
    /// A cache server
    #[command(after_help = UNDRAIN_EXAMPLES)]
    Shard(OneShard),
}

const REMOVE_EXAMPLES: &str = "\
Examples:
  kvpool remove shard shard-1

It must be Drained or Down, and its process stopped: one that runs would register again at once.
Exit codes: 0 done, 1 refused, 2 wrong usage, 3 no coordinator answered.";

/// Forget a shard that is Drained or Down.
#[derive(Debug, Args)]
#[command(after_help = REMOVE_EXAMPLES)]
pub struct RemoveArgs {
    #[command(subcommand)]
    what: RemoveWhat,
}

#[derive(Debug, Subcommand)]
enum RemoveWhat {
    /// A cache server
    #[command(after_help = REMOVE_EXAMPLES)]
    Shard(OneShard),
}

#[derive(Debug, Args)]
struct OneShard {
    /// Its name, as `kvpool get shards` shows it
    name: String,
    #[command(flatten)]
    target: Target,
}

const RELEASE_EXAMPLES: &str = "\
Examples:
  kvpool release brake                      the pool default, for 10 minutes
  kvpool release brake prompts --for 1h

When two or more shards with more than a quarter of a pool's bytes would be Down at once, the coordinator declares none of
them Down (condition mass_failure). If they are really gone, this lets it go on.
Exit codes: 0 done, 1 refused, 2 wrong usage, 3 no coordinator answered.";

/// Release a brake that the coordinator has put on itself.
#[derive(Debug, Args)]
#[command(after_help = RELEASE_EXAMPLES)]
pub struct ReleaseArgs {
    #[command(subcommand)]
    what: ReleaseWhat,
}

#[derive(Debug, Subcommand)]
enum ReleaseWhat {
    /// The mass-failure brake of a pool
    #[command(after_help = RELEASE_EXAMPLES)]
    Brake(BrakeArgs),
}

#[derive(Debug, Args)]
struct BrakeArgs {
    /// Name of the pool
    #[arg(default_value = "default")]
    pool: String,
    /// For how long, at most 1h
    #[arg(long = "for", value_name = "TIME", default_value = "10m")]
    time: humantime::Duration,
    #[command(flatten)]
    target: Target,
}

/// Runs `kvpool drain`.
pub async fn drain(args: DrainArgs) -> Result<ExitCode> {
    let DrainWhat::Shard(args) = args.what;
    let client = args.target.client()?;
    let why = "asked with kvpool drain";
    accepted(args.target.ask(client.drain_shard(&args.name, true, why)).await?)?;
    out::show(&format!("shard/{} is to leave\n", args.name));
    if args.no_wait {
        return Ok(ExitCode::SUCCESS);
    }
    tokio::select! {
        done = wait(&args, &client) => done,
        _ = tokio::signal::ctrl_c() => {
            out::show(&format!("the drain goes on; `kvpool undrain shard {}` takes it back\n", args.name));
            Ok(ExitCode::from(130))
        }
    }
}

async fn wait(args: &DrainShardArgs, client: &kvpool_client::Client) -> Result<ExitCode> {
    let name = &args.name;
    let give_up = args.give_up_after.map(|after| Instant::now() + Duration::from(after));
    let mut shown = String::new();
    loop {
        let status = args.target.ask(client.status()).await?;
        match progress(&status, name) {
            Progress::Done(line) => {
                out::show(&format!("shard/{name} {line}\n"));
                return Ok(ExitCode::SUCCESS);
            }
            Progress::Failed(line) => return Err(failure(format!("shard {name} {line}"))),
            Progress::Going(line) => {
                if line != shown {
                    out::show(&format!("shard/{name} {line}\n"));
                }
                shown = line;
            }
        }
        if give_up.is_some_and(|at| Instant::now() >= at) {
            return Err(failure(format!(
                "shard {name} is not drained in time; the drain goes on"
            )));
        }
        tokio::time::sleep(LOOK).await;
    }
}

#[derive(Debug, PartialEq, Eq)]
enum Progress {
    Going(String),
    Done(String),
    Failed(String),
}

fn progress(status: &StatusReply, name: &str) -> Progress {
    let Some(shard) = status.shard_status.iter().find(|s| s.id == name) else {
        return Progress::Done("is removed".into());
    };
    let stuck = status
        .conditions
        .iter()
        .find(|c| c.kind == "drain_stuck" && c.subject == name);
    match shard.phase.as_str() {
        "Drained" => Progress::Done("drained".into()),
        "Draining" => Progress::Going(match stuck {
            Some(stuck) => format!("draining: {}", stuck.message),
            None => format!("draining: {}", left(shard)),
        }),
        "Down" => Progress::Done(format!("is Down and out ({}): it holds nothing", shard.reason)),
        // A member that has not heard of it yet, or somebody took it back.
        _ if shard.r#in && status.is_leader => Progress::Failed("is to stay: the drain was taken back".into()),
        phase => Progress::Going(phase.to_owned()),
    }
}

fn left(shard: &ShardStatus) -> String {
    format!("{} slots left, {} of them primary", shard.slots, shard.primary)
}

/// Runs `kvpool undrain`.
pub async fn undrain(args: UndrainArgs) -> Result<ExitCode> {
    let UndrainWhat::Shard(args) = args.what;
    let client = args.target.client()?;
    let why = "asked with kvpool undrain";
    accepted(args.target.ask(client.drain_shard(&args.name, false, why)).await?)?;
    out::show(&format!("shard/{} is to stay\n", args.name));
    Ok(ExitCode::SUCCESS)
}

/// Runs `kvpool remove`.
pub async fn remove(args: RemoveArgs) -> Result<ExitCode> {
    let RemoveWhat::Shard(args) = args.what;
    let client = args.target.client()?;
    accepted(args.target.ask(client.remove_shard(&args.name)).await?)?;
    out::show(&format!("shard/{} removed\n", args.name));
    Ok(ExitCode::SUCCESS)
}

/// Runs `kvpool release`.
pub async fn release(args: ReleaseArgs) -> Result<ExitCode> {
    let ReleaseWhat::Brake(args) = args.what;
    let client = args.target.client()?;
    let for_ms = u64::try_from(Duration::from(args.time).as_millis()).unwrap_or(u64::MAX);
    accepted(args.target.ask(client.release_brake(&args.pool, for_ms)).await?)?;
    out::show(&format!("brake of pool/{} released for {}\n", args.pool, args.time));
    Ok(ExitCode::SUCCESS)
}

/// A refusal by the state, in words.
fn accepted(response: Response) -> Result<()> {
    match response.refusal() {
        Refusal::None => Ok(()),
        refusal => Err(failure(format!("{}: {}", refusal.word(), response.message))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvpool_proto::v1::Condition;

    fn status(phase: &str, r#in: bool) -> StatusReply {
        StatusReply {
            is_leader: true,
            shard_status: vec![ShardStatus {
                id: "a".into(),
                phase: phase.into(),
                r#in,
                slots: 7,
                primary: 2,
                ..Default::default()
            }],
            ..Default::default()
        }
    }

    #[test]
    fn a_drain_tells_where_it_stands() {
        let going = |s: &StatusReply| progress(s, "a");
        assert_eq!(
            going(&status("Draining", false)),
            Progress::Going("draining: 7 slots left, 2 of them primary".into())
        );
        assert_eq!(going(&status("Drained", false)), Progress::Done("drained".into()));
        assert!(matches!(going(&status("Down", false)), Progress::Done(_)));
        assert!(matches!(going(&status("Up", true)), Progress::Failed(_)));
        assert!(matches!(progress(&status("Up", true), "b"), Progress::Done(_)));
        let mut stuck = status("Draining", false);
        stuck.conditions.push(Condition {
            kind: "drain_stuck".into(),
            subject: "a".into(),
            message: "no other shard".into(),
            since_ms: 0,
        });
        assert_eq!(going(&stuck), Progress::Going("draining: no other shard".into()));
    }
}
