//! `kvpool coordinator run`.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use clap::Args;
use kvpool_coordinator::{Coordinator, CoordinatorConfig, CoordinatorHandle};
use serde::{Deserialize, Serialize};

use super::{Base, Common, Launch, loopback, settle};
use crate::config::values::{ListenAddr, Member};
use crate::config::{listen, need};
use crate::exit::usage;
use crate::http::Obstacles;

const EXAMPLES: &str = "\
Examples:
  A group of one, for a first try:
    KVPOOL_JOIN_TOKEN=a-long-secret kvpool coordinator run --id 1 --members 1=127.0.0.1:7400 --data-dir /tmp/kvpool-1

  The second of three (each with its own --id, --listen, --http and --data-dir; --members the same for all):
    kvpool coordinator run --id 2 --listen 127.0.0.1:7402 --http 127.0.0.1:7403 --data-dir /var/lib/kvpool/2 \\
      --members 1=127.0.0.1:7400,2=127.0.0.1:7402,3=127.0.0.1:7404 --join-token-file /etc/kvpool/token

  The same from a file:
    kvpool coordinator run --config coordinator.toml
      id = 2
      listen = \"127.0.0.1:7402\"
      http = \"127.0.0.1:7403\"
      data-dir = \"/var/lib/kvpool/2\"
      members = [\"1=127.0.0.1:7400\", \"2=127.0.0.1:7402\", \"3=127.0.0.1:7404\"]
      join-token-file = \"/etc/kvpool/token\"

The cluster is created when all members answer and all are empty, and never again. A member that has lost its data
directory comes back under a new raft id: the leader lets it in once its old self has been silent for a lease and a majority
answers. One whose number is beyond `kvpool scale coordinators` is idle until it is wanted.";

/// Run one member of the Raft group.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct CoordinatorArgs {
    #[command(flatten)]
    own: Settings,
    #[command(flatten)]
    common: Common,
    #[command(flatten)]
    launch: Launch,
}

#[derive(Clone, Debug, Default, Args, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
struct Settings {
    /// Number of this member, one of --members
    #[arg(long, env = "KVPOOL_ID", value_name = "N")]
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<u64>,
    /// All members at first boot, 1, 3 or 5 of them, this one included: ID=HOST:PORT,...
    #[arg(long, env = "KVPOOL_MEMBERS", value_delimiter = ',', value_name = "ID=HOST:PORT")]
    #[serde(skip_serializing_if = "Option::is_none")]
    members: Option<Vec<Member>>,
    /// Directory of this member's log and snapshots; created if it is not there
    #[arg(long, env = "KVPOOL_DATA_DIR", value_name = "DIR")]
    #[serde(skip_serializing_if = "Option::is_none")]
    data_dir: Option<PathBuf>,
    /// gRPC address for members, shards, proxies and the command line [default: 127.0.0.1:7400]
    #[arg(long, env = "KVPOOL_LISTEN", value_name = "IP:PORT")]
    #[serde(skip_serializing_if = "Option::is_none")]
    listen: Option<ListenAddr>,
    /// Copies of each block that the pool `default` is created with [default: 2]
    #[arg(long, env = "KVPOOL_FACTOR", value_name = "N")]
    #[serde(skip_serializing_if = "Option::is_none")]
    factor: Option<u32>,
    /// Create the cluster now, without asking the other members first; say it once, to one member
    #[arg(long, env = "KVPOOL_BOOTSTRAP", value_name = "BOOL", num_args = 0..=1, require_equals = true,
          default_missing_value = "true")]
    #[serde(skip_serializing_if = "Option::is_none")]
    bootstrap: Option<bool>,
}

/// Port of `--listen` when it is not given.
const LISTEN_PORT: u16 = 7400;
/// Port of `--http` when it is not given.
const HTTP_PORT: u16 = 7401;

/// Runs the member until it is told to stop.
pub async fn run(args: CoordinatorArgs) -> Result<ExitCode> {
    let (common, own) = settle(&["coordinator", "run"], &args.launch, &args.common, &args.own)?;
    let id = need(own.id, "id", "1")?;
    let data_dir = need(own.data_dir, "data-dir", "/var/lib/kvpool/1")?;
    let members = checked_members(need(own.members, "members", "1=127.0.0.1:7400")?, id)?;
    let base = Base::start("coordinator", &args.launch, &common, HTTP_PORT).await?;
    let grpc = listen::bind(
        "listen",
        own.listen.unwrap_or(loopback(LISTEN_PORT)),
        base.insecure_bind || base.trust.is_secure(),
    )
    .await?;
    let coordinator = Coordinator::new(CoordinatorConfig {
        id,
        data_dir,
        grpc,
        members,
        join_token: base.join_token.clone(),
        trust: base.trust.clone(),
        timing: base.timing,
        factor: own.factor.unwrap_or(crate::config::DEFAULT_FACTOR),
        bootstrap: own.bootstrap.unwrap_or(false),
        features: kvpool_state::command::READER,
        shutdown: base.shutdown.clone(),
    })?;
    let handle = coordinator.handle();
    base.run(move || obstacles(&handle), async move { Ok(coordinator.run().await?) })
        .await
}

/// Why this member cannot serve; empty when it can.
fn obstacles(handle: &CoordinatorHandle) -> Obstacles {
    if handle.is_ready() {
        return Vec::new();
    }
    let status = handle.status();
    let why = if status.cluster_id.is_empty() {
        "the cluster is not created yet: not all members have answered"
    } else if status.leader_id == 0 {
        "no leader is known"
    } else {
        "a quorum of the members is out of contact"
    };
    vec![why.to_owned()]
}

/// The members as the library wants them.
///
/// # Errors
/// Their number is not 1, 3 or 5, an id is 0 or named twice, or `id` is not among them.
fn checked_members(members: Vec<Member>, id: u64) -> Result<Vec<(u64, String)>> {
    let wrong = |what: String| Err(usage(format!("--members: {what}")));
    if !matches!(members.len(), 1 | 3 | 5) {
        return wrong(format!("a group has 1, 3 or 5 coordinators, not {}", members.len()));
    }
    for (at, member) in members.iter().enumerate() {
        if member.id == 0 {
            return wrong("ids begin with 1".to_owned());
        }
        if members.iter().skip(at + 1).any(|other| other.id == member.id) {
            return wrong(format!("id {} is named twice", member.id));
        }
    }
    if !members.iter().any(|member| member.id == id) {
        return wrong(format!("--id {id} is not among them; list this member too"));
    }
    Ok(members.into_iter().map(|m| (m.id, m.endpoint)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn member_lists_are_checked() {
        let list = |text: &str| -> Vec<Member> { text.split(',').map(|m| m.parse().unwrap()).collect() };
        assert!(checked_members(list("1=a:1"), 1).is_ok());
        for (members, id, word) in [
            ("1=a:1,2=b:1", 1, "1, 3 or 5"),
            ("1=a:1,2=b:1,2=c:1", 1, "twice"),
            ("0=a:1,2=b:1,3=c:1", 2, "begin with 1"),
            ("1=a:1,2=b:1,3=c:1", 4, "not among"),
        ] {
            let error = checked_members(list(members), id).unwrap_err().to_string();
            assert!(error.contains("--members") && error.contains(word), "{error}");
        }
    }
}
