//! `kvpool scale`: how many of something are wanted.

use std::process::ExitCode;

use anyhow::Result;
use clap::{Args, Subcommand};
use kvpool_state::Refusal;

use super::Target;
use crate::exit::failure;
use crate::out;

const EXAMPLES: &str = "\
Examples:
  kvpool scale coordinators 5     then start number 4 and 5: each with its --id, and all five in --members
  kvpool scale coordinators 3     the highest numbers leave; stop them afterwards

The number is committed at once; the leader changes the group step by step, and never to one that could lose its majority.
`kvpool get members` shows the group, `kvpool status` what a step waits for.
Exit codes: 0 committed, 1 refused (for example: no quorum), 2 wrong usage, 3 no coordinator answered.";

/// Say how many coordinators are wanted.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct ScaleArgs {
    #[command(subcommand)]
    what: What,
    #[command(flatten)]
    target: Target,
}

#[derive(Debug, Subcommand)]
enum What {
    /// Members of the Raft group
    #[command(visible_alias = "members", after_help = EXAMPLES)]
    Coordinators {
        /// 1, 3 or 5
        #[arg(value_name = "N", value_parser = odd)]
        wanted: u32,
    },
}

fn odd(text: &str) -> Result<u32, String> {
    match text.parse() {
        Ok(n @ (1 | 3 | 5)) => Ok(n),
        _ => Err(format!("a group has 1, 3 or 5 coordinators, not `{text}`")),
    }
}

/// Runs the command.
pub async fn run(args: ScaleArgs) -> Result<ExitCode> {
    let What::Coordinators { wanted } = args.what;
    let client = args.target.client()?;
    let answer = args
        .target
        .ask(client.scale_coordinators(wanted, "kvpool scale"))
        .await?;
    if answer.refusal() != Refusal::None {
        return Err(failure(format!("{}: {}", answer.refusal().word(), answer.message)));
    }
    out::show(&format!(
        "{wanted} coordinators are wanted (revision {})\n",
        answer.revision
    ));
    Ok(ExitCode::SUCCESS)
}
