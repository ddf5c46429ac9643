use clap::{Command, CommandFactory, Parser};

use super::Cli;

/// Every command that does something, with its words.
fn leaves(at: &Command, path: &str, found: &mut Vec<(String, Command)>) {
    let path = format!("{path} {}", at.get_name());
    let mut children = at.get_subcommands().peekable();
    if children.peek().is_none() {
        found.push((path.trim().to_owned(), at.clone()));
    }
    for child in children {
        leaves(child, &path, found);
    }
}

#[test]
fn the_tree_is_sound() {
    Cli::command().debug_assert();
}

#[test]
fn every_command_has_examples_and_every_flag_has_help() {
    let mut found = Vec::new();
    leaves(&Cli::command(), "", &mut found);
    assert!(found.len() >= 6);
    for (name, mut command) in found {
        let help = command.render_long_help().to_string();
        assert!(help.contains("Examples:"), "{name}: {help}");
        for arg in command.get_arguments().filter(|arg| !arg.is_hide_set()) {
            assert!(arg.get_help().is_some(), "{name}: {arg}");
        }
    }
    assert!(Cli::command().render_long_help().to_string().contains("Examples:"));
}

#[test]
fn every_flag_can_come_from_the_environment() {
    let mut found = Vec::new();
    leaves(&Cli::command(), "", &mut found);
    for (name, command) in found
        .iter()
        .filter(|(name, _)| name.ends_with(" run") || name.ends_with(" dev"))
    {
        for arg in command.get_arguments().filter(|arg| !arg.is_hide_set()) {
            let Some(long) = arg.get_long().filter(|long| !matches!(*long, "help" | "version")) else {
                continue;
            };
            let variable = arg
                .get_env()
                .unwrap_or_else(|| panic!("{name} --{long}"))
                .to_string_lossy();
            let upper = long.replace('-', "_").to_uppercase();
            assert!(
                variable.starts_with("KVPOOL_") && variable.ends_with(&upper),
                "{name} --{long}: {variable}"
            );
        }
    }
}

#[test]
fn wrong_usage_is_told_by_name() {
    for (line, word) in [
        ("kvpool shard run --memory many", "--memory"),
        ("kvpool proxy run --resp nowhere", "--resp"),
        ("kvpool coordinator run --members 1:2", "--members"),
        ("kvpool get things", "shards"),
        ("kvpool dev --resp-port 99999", "--resp-port"),
        ("kvpool status --endpoints nowhere", "--endpoints"),
    ] {
        let error = Cli::try_parse_from(line.split_whitespace()).unwrap_err();
        assert_eq!(error.exit_code(), 2, "{line}");
        assert!(error.to_string().contains(word), "{line}: {error}");
    }
}

#[test]
fn no_flag_takes_a_secret() {
    let mut found = Vec::new();
    leaves(&Cli::command(), "", &mut found);
    for (name, command) in found {
        assert!(
            command.get_arguments().all(|arg| arg.get_long() != Some("join-token")),
            "{name}"
        );
    }
}
