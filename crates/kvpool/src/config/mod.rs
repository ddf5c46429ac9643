//! Settings of the roles: flags, then `KVPOOL_...` environment, then a TOML file with the same names, then defaults.
//!
//! clap itself lets a flag win over its variable; figment lays both over the file. Every setting is an `Option` up to the
//! end, so that "not said" and "said the default" stay apart. A key in the file that is no flag of the command is an error.

use std::collections::BTreeSet;
use std::path::Path;

use anyhow::Result;
use figment::Figment;
use figment::providers::{Format, Serialized, Toml};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::exit::usage;

pub mod listen;
pub mod tls;
pub mod token;
pub mod values;

/// Copies of each block when nobody says otherwise.
pub const DEFAULT_FACTOR: u32 = 2;
/// Largest config file that is read, in bytes.
const MAX_FILE: u64 = 1 << 20;

/// The layers of one command: its file below, flags and environment above.
pub struct Layers {
    figment: Figment,
    file: Option<String>,
}

impl Layers {
    /// Reads the file, if there is one, and checks its keys against the flags of `command` (`["shard", "run"]`).
    pub fn new(file: Option<&Path>, command: &[&str]) -> Result<Self> {
        let Some(path) = file else {
            return Ok(Layers {
                figment: Figment::new(),
                file: None,
            });
        };
        let shown = path.display().to_string();
        let size = std::fs::metadata(path)
            .map_err(|e| usage(format!("failed to read --config {shown}: {e}")))?
            .len();
        if size > MAX_FILE {
            return Err(usage(format!(
                "failed to read --config {shown}: {size} bytes is no config file"
            )));
        }
        let text = std::fs::read_to_string(path).map_err(|e| usage(format!("failed to read --config {shown}: {e}")))?;
        let figment = Figment::from(Toml::string(&text));
        let keys: BTreeSet<String> = match figment.extract::<figment::value::Dict>() {
            Ok(dict) => dict.into_keys().collect(),
            Err(e) => return Err(usage(format!("failed to read --config {shown}: {e}"))),
        };
        let known = known_keys(command);
        if let Some(key) = keys.iter().find(|key| !known.contains(*key)) {
            let names: Vec<&str> = known.iter().map(String::as_str).collect();
            return Err(usage(format!(
                "failed to read --config {shown}: unknown key `{key}`; `kvpool {}` knows {}",
                command.join(" "),
                names.join(", ")
            )));
        }
        Ok(Layers {
            figment,
            file: Some(shown),
        })
    }

    /// The settings of one flags struct: what clap found, over what the file says.
    pub fn settle<T: Serialize + DeserializeOwned>(&self, flags: &T) -> Result<T> {
        self.figment
            .clone()
            .merge(Serialized::defaults(flags))
            .extract()
            .map_err(|e| {
                let at = if e.path.is_empty() {
                    String::new()
                } else {
                    format!(" in `{}`", e.path.join("."))
                };
                let file = self.file.as_deref().unwrap_or("the settings");
                usage(format!("failed to read --config {file}: {}{at}", e.kind))
            })
    }
}

/// The long flags of a command that a file may set.
pub fn known_keys(command: &[&str]) -> BTreeSet<String> {
    let mut at = <crate::cli::Cli as clap::CommandFactory>::command();
    for word in command {
        at = match at.find_subcommand(word) {
            Some(sub) => sub.clone(),
            None => return BTreeSet::new(),
        };
    }
    at.get_arguments()
        .filter(|arg| !arg.is_hide_set())
        .filter_map(|arg| arg.get_long())
        .filter(|name| !matches!(*name, "config" | "help" | "version"))
        .map(str::to_owned)
        .collect()
}

/// A setting without a default: the error names it in all three spellings.
pub fn need<T>(value: Option<T>, flag: &str, example: &str) -> Result<T> {
    value.ok_or_else(|| {
        let variable = flag.replace('-', "_").to_uppercase();
        usage(format!(
            "`{flag}` is not set: give --{flag} {example}, or KVPOOL_{variable}, or `{flag}` in the --config file"
        ))
    })
}

#[cfg(test)]
mod tests;
