//! What `kvpool dev` will start: every child with its command line. Pure, so that tests can look at it.

use anyhow::Result;
use serde_json::{Value, json};

use super::DevArgs;
use super::home::Home;
use super::ports::{Ports, at};
use crate::config::values::{ByteSize, Timing};
use crate::exit::usage;

/// Most shards: each takes four ports and a process of this machine.
const MAX_SHARDS: usize = 64;
/// Least memory of a shard, in bytes: a few blocks must fit.
const MIN_MEMORY: u64 = 16 << 20;

/// A child to start.
#[derive(Debug, PartialEq, Eq)]
pub struct Spec {
    /// `coordinator-1`, `shard-1`, `proxy`.
    pub name: String,
    /// Where its `/readyz` is.
    pub http: String,
    /// Everything behind the program's name.
    pub args: Vec<String>,
}

/// See the module.
pub struct Plan {
    /// Coordinators, then shards, then the proxy.
    pub children: Vec<Spec>,
    pub ports: Ports,
    pub factor: u32,
    pub memory: ByteSize,
    pub timing: Timing,
}

/// Checks the numbers among the flags.
pub fn check(args: &DevArgs) -> Result<()> {
    if !matches!(args.coordinators, 1 | 3 | 5) {
        return Err(usage(format!(
            "--coordinators {}: a group has 1, 3 or 5",
            args.coordinators
        )));
    }
    if !(1..=MAX_SHARDS).contains(&args.shards) {
        return Err(usage(format!("--shards {}: between 1 and {MAX_SHARDS}", args.shards)));
    }
    if !(1..=kvpool_state::MAX_FACTOR).contains(&args.factor) {
        return Err(usage(format!(
            "--factor {}: between 1 and {}",
            args.factor,
            kvpool_state::MAX_FACTOR
        )));
    }
    if args.memory_per_shard.0 < MIN_MEMORY {
        let least = ByteSize(MIN_MEMORY);
        return Err(usage(format!(
            "--memory-per-shard {}: at least {least}",
            args.memory_per_shard
        )));
    }
    Ok(())
}

impl Plan {
    pub fn new(args: &DevArgs, home: &Home, ports: Ports) -> Result<Self> {
        let mut plan = Plan {
            children: Vec::new(),
            ports,
            factor: args.factor,
            memory: args.memory_per_shard,
            timing: args.timing,
        };
        let log = args.log.as_deref();
        let mut children: Vec<Spec> = (1..=plan.ports.coordinators.len())
            .map(|n| plan.coordinator(n, home))
            .collect();
        children.extend((1..=plan.ports.shards.len()).map(|n| plan.shard(n)));
        children.push(plan.proxy());
        for spec in &mut children {
            let parent = std::process::id().to_string();
            spec.args.extend(words(&[
                "--http",
                &spec.http,
                "--timing",
                plan.timing.word(),
                "--parent-pid",
                &parent,
            ]));
            spec.args.extend(log.iter().flat_map(|log| words(&["--log", log])));
        }
        plan.children = children;
        let names: Vec<String> = plan.children.iter().map(|spec| spec.name.clone()).collect();
        home.remember_ports(&plan.ports, &names)?;
        Ok(plan)
    }

    fn coordinator(&self, n: usize, home: &Home) -> Spec {
        let own = self.ports.coordinators[n - 1];
        let name = format!("coordinator-{n}");
        let all = self.ports.coordinators.iter().enumerate();
        let members: Vec<String> = all.map(|(i, c)| format!("{}={}", i + 1, at(c.grpc))).collect();
        let data = home.dir(&name).join("data");
        let mut args = words(&[
            "coordinator",
            "run",
            "--id",
            &n.to_string(),
            "--members",
            &members.join(","),
        ]);
        args.extend(words(&[
            "--listen",
            &at(own.grpc),
            "--data-dir",
            &data.to_string_lossy(),
        ]));
        args.extend(words(&["--factor", &self.factor.to_string()]));
        Spec {
            name,
            http: at(own.http),
            args,
        }
    }

    fn shard(&self, n: usize) -> Spec {
        let own = self.ports.shards[n - 1];
        let name = format!("shard-{n}");
        let mut args = words(&["shard", "run", "--id", &name, "--node", &format!("node-{n}")]);
        args.extend(words(&[
            "--memory",
            &self.memory.0.to_string(),
            "--coordinators",
            &self.endpoints(),
        ]));
        args.extend(words(&[
            "--peer",
            &at(own.peer),
            "--resp",
            &at(own.resp),
            "--lm",
            &at(own.lm),
        ]));
        Spec {
            name,
            http: at(own.http),
            args,
        }
    }

    fn proxy(&self) -> Spec {
        let own = self.ports.proxy;
        let seeds: Vec<String> = self.ports.shards.iter().map(|shard| at(shard.peer)).collect();
        let mut args = words(&[
            "proxy",
            "run",
            "--coordinators",
            &self.endpoints(),
            "--seed-shards",
            &seeds.join(","),
        ]);
        args.extend(words(&["--resp", &at(own.resp), "--lm", &at(own.lm)]));
        Spec {
            name: "proxy".to_owned(),
            http: at(own.http),
            args,
        }
    }

    /// The coordinators' gRPC addresses, as `--endpoints` takes them.
    pub fn endpoints(&self) -> String {
        let all: Vec<String> = self.ports.coordinators.iter().map(|c| at(c.grpc)).collect();
        all.join(",")
    }

    /// The content of `--ready-file`. `pids` are in the order of `children`.
    pub fn ready_json(&self, pids: &[u32]) -> Value {
        let pid = |i: usize| pids.get(i).copied().unwrap_or(0);
        let first_shard = self.ports.coordinators.len();
        let first_proxy = first_shard + self.ports.shards.len();
        let coordinators: Vec<Value> = (self.ports.coordinators.iter().enumerate())
            .map(|(i, c)| json!({"id": (i + 1).to_string(), "endpoint": at(c.grpc), "http": at(c.http), "pid": pid(i)}))
            .collect();
        let shards: Vec<Value> = (self.ports.shards.iter().enumerate())
            .map(|(i, s)| {
                let id = format!("shard-{}", i + 1);
                json!({"id": id, "resp": at(s.resp), "lm": at(s.lm), "http": at(s.http), "pid": pid(first_shard + i)})
            })
            .collect();
        let p = self.ports.proxy;
        let proxy = json!({"resp": at(p.resp), "lm": at(p.lm), "http": at(p.http), "pid": pid(first_proxy)});
        json!({"coordinators": coordinators, "shards": shards, "proxy": proxy})
    }
}

fn words(list: &[&str]) -> Vec<String> {
    list.iter().map(|word| (*word).to_owned()).collect()
}

#[cfg(test)]
mod tests;
