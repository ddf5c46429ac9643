//! `kvpool proxy run`.

use std::process::ExitCode;

use anyhow::Result;
use clap::Args;
use serde::{Deserialize, Serialize};

use super::{Base, Common, Launch, loopback, settle};
use crate::config::values::{Endpoint, ListenAddr};
use crate::config::{listen, need};

const EXAMPLES: &str = "\
Examples:
  kvpool proxy run --coordinators 127.0.0.1:7400 --join-token-file /etc/kvpool/token

  Then, in the configuration of the LMCache beside it, one of:
    remote_url: \"redis://127.0.0.1:6399\"
    remote_url: \"resp://127.0.0.1:6399\"
    remote_url: \"lm://127.0.0.1:65432\"

  A proxy that can start while all coordinators are gone: it gets the slot map from a shard's peer port:
    kvpool proxy run --coordinators 10.0.0.1:7400 --seed-shards 10.0.0.7:7420 --join-token-file /etc/kvpool/token";

/// Run the front ends and routing without a store, beside an engine.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct ProxyArgs {
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
    /// Address for RESP clients (redis://, resp://) [default: 127.0.0.1:6399]
    #[arg(long, env = "KVPOOL_RESP", value_name = "IP:PORT")]
    #[serde(skip_serializing_if = "Option::is_none")]
    resp: Option<ListenAddr>,
    /// Address for lm:// clients [default: 127.0.0.1:65432]
    #[arg(long, env = "KVPOOL_LM", value_name = "IP:PORT")]
    #[serde(skip_serializing_if = "Option::is_none")]
    lm: Option<ListenAddr>,
    /// Pool it serves [default: default]
    #[arg(long, env = "KVPOOL_POOL", value_name = "NAME")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pool: Option<String>,
    /// gRPC addresses of the coordinators: HOST:PORT,...
    #[arg(long, env = "KVPOOL_COORDINATORS", value_delimiter = ',', value_name = "HOST:PORT")]
    #[serde(skip_serializing_if = "Option::is_none")]
    coordinators: Option<Vec<Endpoint>>,
    /// Peer addresses of shards to get the slot map from when no coordinator answers: HOST:PORT,... [default: none]
    #[arg(long, env = "KVPOOL_SEED_SHARDS", value_delimiter = ',', value_name = "HOST:PORT")]
    #[serde(skip_serializing_if = "Option::is_none")]
    seed_shards: Option<Vec<Endpoint>>,
}

/// Ports of the listeners when they are not given. Redis's own 6379 is left to a Redis that may run beside it.
pub const RESP_PORT: u16 = 6399;
pub const LM_PORT: u16 = 65432;
pub const HTTP_PORT: u16 = 9400;

/// Runs the proxy until it is told to stop.
pub async fn run(args: ProxyArgs) -> Result<ExitCode> {
    let (common, own) = settle(&["proxy", "run"], &args.launch, &args.common, &args.own)?;
    let coordinators = need(own.coordinators, "coordinators", "127.0.0.1:7400")?;
    let base = Base::start("proxy", &args.launch, &common, HTTP_PORT).await?;
    let resp = listen::bind("resp", own.resp.unwrap_or(loopback(RESP_PORT)), base.insecure_bind).await?;
    let lm = listen::bind("lm", own.lm.unwrap_or(loopback(LM_PORT)), base.insecure_bind).await?;
    let texts = |list: Vec<Endpoint>| list.into_iter().map(|e| e.0).collect::<Vec<String>>();
    let proxy = kvpool_shard::Proxy::start(kvpool_shard::ProxyConfig {
        pool: own.pool.unwrap_or_else(|| "default".to_owned()),
        resp,
        lm,
        coordinators: texts(coordinators),
        seed_shards: texts(own.seed_shards.unwrap_or_default()),
        join_token: base.join_token.clone(),
        trust: base.trust.clone(),
        timing: base.timing,
        shutdown: base.shutdown.clone(),
    })?;
    let health = proxy.health();
    base.run(move || health.obstacles(), async move { Ok(proxy.wait().await?) })
        .await
}
