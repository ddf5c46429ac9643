//! `kvpool shard run`.

use std::process::ExitCode;

use anyhow::Result;
use clap::Args;
use serde::{Deserialize, Serialize};

use super::{Base, Common, Launch, loopback, settle};
use crate::config::values::{ByteSize, Endpoint, ListenAddr};
use crate::config::{listen, need};

const EXAMPLES: &str = "\
Examples:
  kvpool shard run --id shard-1 --node node-1 --memory 64GiB --coordinators 127.0.0.1:7400 \\
    --join-token-file /etc/kvpool/token

  For clients on other machines (no TLS yet: only where the network is trusted):
    kvpool shard run --id shard-1 --node node-1 --memory 64GiB --insecure-bind \\
      --peer 0.0.0.0:7420 --resp 0.0.0.0:7421 --lm 0.0.0.0:7422 --advertise-host 10.0.0.7 \\
      --coordinators 10.0.0.1:7400,10.0.0.2:7400,10.0.0.3:7400 --join-token-file /etc/kvpool/token

  The same from a file: kvpool shard run --config shard.toml
      id = \"shard-1\"
      node = \"node-1\"
      memory = \"64GiB\"
      coordinators = [\"10.0.0.1:7400\", \"10.0.0.2:7400\", \"10.0.0.3:7400\"]

Two copies of a slot are never on one node, so shards on one machine need one --node each only for tries like
`kvpool dev`.";

/// Run one cache server.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct ShardArgs {
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
    /// Name of this shard, unique in the cluster
    #[arg(long, env = "KVPOOL_ID", value_name = "NAME")]
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<String>,
    /// Name of the machine it runs on; copies of a slot go to different ones
    #[arg(long, env = "KVPOOL_NODE", value_name = "NAME")]
    #[serde(skip_serializing_if = "Option::is_none")]
    node: Option<String>,
    /// Failure zone of the machine; copies go to different ones where they can [default: none]
    #[arg(long, env = "KVPOOL_ZONE", value_name = "NAME")]
    #[serde(skip_serializing_if = "Option::is_none")]
    zone: Option<String>,
    /// Pool it belongs to [default: default]
    #[arg(long, env = "KVPOOL_POOL", value_name = "NAME")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pool: Option<String>,
    /// Memory for blocks, such as 64GiB or a number of bytes
    #[arg(long, env = "KVPOOL_MEMORY", value_name = "SIZE")]
    #[serde(skip_serializing_if = "Option::is_none")]
    memory: Option<ByteSize>,
    /// Address for other shards and proxies [default: 127.0.0.1:7420]
    #[arg(long, env = "KVPOOL_PEER", value_name = "IP:PORT")]
    #[serde(skip_serializing_if = "Option::is_none")]
    peer: Option<ListenAddr>,
    /// Address for RESP clients (redis://, resp://) [default: 127.0.0.1:7421]
    #[arg(long, env = "KVPOOL_RESP", value_name = "IP:PORT")]
    #[serde(skip_serializing_if = "Option::is_none")]
    resp: Option<ListenAddr>,
    /// Address for lm:// clients [default: 127.0.0.1:7422]
    #[arg(long, env = "KVPOOL_LM", value_name = "IP:PORT")]
    #[serde(skip_serializing_if = "Option::is_none")]
    lm: Option<ListenAddr>,
    /// Host name or IP under which others reach this shard [default: the addresses it listens on]
    #[arg(long, env = "KVPOOL_ADVERTISE_HOST", value_name = "HOST")]
    #[serde(skip_serializing_if = "Option::is_none")]
    advertise_host: Option<String>,
    /// gRPC addresses of the coordinators: HOST:PORT,...
    #[arg(long, env = "KVPOOL_COORDINATORS", value_delimiter = ',', value_name = "HOST:PORT")]
    #[serde(skip_serializing_if = "Option::is_none")]
    coordinators: Option<Vec<Endpoint>>,
}

/// Ports of the listeners when they are not given.
const PEER_PORT: u16 = 7420;
const RESP_PORT: u16 = 7421;
const LM_PORT: u16 = 7422;
const HTTP_PORT: u16 = 7423;

/// Runs the shard until it is told to stop.
pub async fn run(args: ShardArgs) -> Result<ExitCode> {
    let (common, own) = settle(&["shard", "run"], &args.launch, &args.common, &args.own)?;
    let id = need(own.id, "id", "shard-1")?;
    let node = need(own.node, "node", "node-1")?;
    let memory = need(own.memory, "memory", "64GiB")?;
    let coordinators = need(own.coordinators, "coordinators", "127.0.0.1:7400")?;
    let base = Base::start("shard", &args.launch, &common, HTTP_PORT).await?;
    let host = own.advertise_host.as_deref();
    let open = base.insecure_bind;
    let peer = listen::bind("peer", own.peer.unwrap_or(loopback(PEER_PORT)), open).await?;
    let resp = listen::bind("resp", own.resp.unwrap_or(loopback(RESP_PORT)), open).await?;
    let lm = listen::bind("lm", own.lm.unwrap_or(loopback(LM_PORT)), open).await?;
    let addresses = kvpool_state::records::ShardAddresses {
        peer: listen::advertised("peer", &peer, host)?,
        resp: listen::advertised("resp", &resp, host)?,
        lm: listen::advertised("lm", &lm, host)?,
        http: base.http_address(host)?,
    };
    let shard = kvpool_shard::Shard::start(kvpool_shard::ShardConfig {
        id,
        node,
        zone: own.zone.unwrap_or_default(),
        pool: own.pool.unwrap_or_else(|| "default".to_owned()),
        memory_bytes: memory.0,
        peer,
        resp,
        lm,
        addresses,
        coordinators: coordinators.into_iter().map(|e| e.0).collect(),
        join_token: base.join_token.clone(),
        trust: base.trust.clone(),
        timing: base.timing,
        shutdown: base.shutdown.clone(),
    })?;
    let health = shard.health();
    base.run(move || health.obstacles(), async move { Ok(shard.wait().await?) })
        .await
}
