//! Scenarios: what runs, what hurts it, and what is allowed. Read from TOML; see `chaos/scenarios`.

pub mod fault;
pub mod run;

use crate::pool::Shape;
use anyhow::{Context, Result, ensure};
use fault::Fault;
use figment::Figment;
use figment::providers::{Format, Toml};
use kvpool_client::Timing;
use serde::{Deserialize, Deserializer};
use std::path::Path;
use std::time::Duration;

/// One scenario.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Scenario {
    pub name: String,
    /// What it is about, for people.
    pub about: String,
    /// `normal` or `relaxed`.
    #[serde(default = "relaxed")]
    timing: String,
    #[serde(default = "three")]
    coordinators: usize,
    #[serde(default = "three")]
    shards: usize,
    #[serde(default = "one")]
    proxies: usize,
    /// Bytes of each shard.
    #[serde(default = "memory")]
    memory: u64,
    #[serde(default)]
    pub load: Load,
    #[serde(default)]
    pub bounds: Bounds,
    /// Faults, one after the other.
    #[serde(default)]
    pub fault: Vec<Fault>,
    /// Faults drawn by the seed, after those.
    pub mix: Option<Mix>,
}

/// How many clients of each kind.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Load {
    pub metadata: u64,
    pub watchers: u64,
    pub blocks: u64,
    /// Real LMCache clients, each by the scheme of its URL (`redis`, `resp`).
    pub lmcache: Vec<String>,
}

/// What is allowed. Errors of the data plane and broken rules never are.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, default, rename_all = "kebab-case")]
pub struct Bounds {
    /// Longest time between two acknowledged writes of control state, while a majority of coordinators is well.
    #[serde(deserialize_with = "duration")]
    pub write_gap: Duration,
    /// Longest answer of the data plane.
    #[serde(deserialize_with = "duration")]
    pub stall: Duration,
    /// From the end of a fault until the pool is healthy and settled.
    #[serde(deserialize_with = "duration")]
    pub heal: Duration,
}

/// A random sequence.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Mix {
    /// How many, when no time is given on the command line.
    pub count: u32,
    /// Of 100 faults, so many come with a second one of another role.
    #[serde(default)]
    pub pairs_percent: u64,
    pub faults: Vec<Fault>,
}

impl Default for Load {
    fn default() -> Self {
        Load {
            metadata: 3,
            watchers: 3,
            blocks: 3,
            lmcache: Vec::new(),
        }
    }
}

impl Default for Bounds {
    fn default() -> Self {
        Bounds {
            write_gap: Duration::from_secs(15),
            stall: Duration::from_secs(5),
            heal: Duration::from_secs(120),
        }
    }
}

impl Scenario {
    /// # Errors
    /// The file can't be read, has an unknown field, or makes no sense.
    pub fn read(path: &Path) -> Result<Self> {
        let text = std::fs::read_to_string(path).with_context(|| format!("failed to read {}", path.display()))?;
        Self::parse(&text).with_context(|| format!("failed to understand {}", path.display()))
    }

    /// # Errors
    /// See [`Scenario::read`].
    pub fn parse(text: &str) -> Result<Self> {
        let scenario: Scenario = Figment::from(Toml::string(text)).extract()?;
        let faults = scenario
            .fault
            .iter()
            .chain(scenario.mix.iter().flat_map(|mix| &mix.faults));
        for fault in faults {
            fault.check(scenario.coordinators, scenario.shards)?;
        }
        ensure!(matches!(scenario.coordinators, 1 | 3 | 5), "coordinators: 1, 3 or 5");
        ensure!(
            scenario.shards >= 1 && scenario.proxies >= 1,
            "shards and proxies: at least 1"
        );
        scenario.shape()?;
        Ok(scenario)
    }

    /// # Errors
    /// `timing` is no word that we know.
    pub fn shape(&self) -> Result<Shape> {
        Ok(Shape {
            coordinators: self.coordinators,
            shards: self.shards,
            proxies: self.proxies,
            factor: 2.min(u32::try_from(self.shards).unwrap_or(1)),
            memory: self.memory,
            timing: self.timing.parse::<Timing>().map_err(anyhow::Error::msg)?,
        })
    }
}

fn relaxed() -> String {
    "relaxed".into()
}
fn one() -> usize {
    1
}
fn three() -> usize {
    3
}
fn memory() -> u64 {
    128 << 20
}

/// `1500ms`, `10s`, `2min`.
pub(crate) fn duration<'de, D: Deserializer<'de>>(from: D) -> Result<Duration, D::Error> {
    let text = String::deserialize(from)?;
    humantime::parse_duration(&text).map_err(serde::de::Error::custom)
}

#[cfg(test)]
mod tests;
