use clap::Parser;

use super::*;
use crate::cli::{Cli, Command};
use crate::dev::ports;

fn args(line: &str) -> DevArgs {
    let zero = "--resp-port 0 --lm-port 0 --http-port 0";
    let words = format!("kvpool dev {zero} {line}");
    match Cli::try_parse_from(words.split_whitespace()).unwrap().command {
        Command::Dev(args) => *args,
        other => panic!("{other:?}"),
    }
}

async fn plan(line: &str, home: &Home) -> Plan {
    let args = args(line);
    check(&args).unwrap();
    let (ports, _held) = ports::choose(&args, home).await.unwrap();
    Plan::new(&args, home, ports).unwrap()
}

#[tokio::test]
async fn children_are_the_binarys_own_commands() {
    let home = Home::open(None).unwrap();
    let plan = plan(
        "--shards 2 --coordinators 1 --memory-per-shard 64MiB --timing relaxed",
        &home,
    )
    .await;
    let names: Vec<&str> = plan.children.iter().map(|spec| spec.name.as_str()).collect();
    assert_eq!(names, ["coordinator-1", "shard-1", "shard-2", "proxy"]);
    for spec in &plan.children {
        let line = std::iter::once("kvpool").chain(spec.args.iter().map(String::as_str));
        Cli::try_parse_from(line).unwrap();
        let all = spec.args.join(" ");
        assert!(all.contains("--timing relaxed"), "{all}");
        assert!(
            !all.contains(home.join_token.reveal()),
            "the token is visible to every user: {all}"
        );
    }
}

#[tokio::test]
async fn the_ready_file_has_the_promised_shape() {
    let home = Home::open(None).unwrap();
    let plan = plan("--shards 2", &home).await;
    let json = plan.ready_json(&[1, 2, 3, 4, 5, 6]);
    let keys = |value: &Value| value.as_object().unwrap().keys().cloned().collect::<Vec<_>>();
    assert_eq!(keys(&json), ["coordinators", "proxy", "shards"]);
    assert_eq!(keys(&json["coordinators"][0]), ["endpoint", "http", "id", "pid"]);
    assert_eq!(keys(&json["shards"][1]), ["http", "id", "lm", "pid", "resp"]);
    assert_eq!(keys(&json["proxy"]), ["http", "lm", "pid", "resp"]);
    assert_eq!(json["shards"][1]["id"], "shard-2");
    assert_eq!(
        (&json["shards"][1]["pid"], &json["proxy"]["pid"]),
        (&json!(5), &json!(6))
    );
    let resp = json["proxy"]["resp"].as_str().unwrap();
    assert!(resp.parse::<std::net::SocketAddr>().unwrap().port() > 0);
}

#[tokio::test]
async fn addresses_stay_over_restarts_and_new_shards_get_new_ones() {
    let dir = tempfile::tempdir().unwrap();
    let home = || Home::open(Some(dir.path())).unwrap();
    let first = plan("--shards 2", &home()).await;
    let second = plan("--shards 3", &home()).await;
    assert_eq!(first.ports.coordinators, second.ports.coordinators);
    assert_eq!(first.ports.shards[..], second.ports.shards[..2]);
    let error = ports::choose(&args("--coordinators 1"), &home())
        .await
        .map(|_| ())
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("--coordinators 1") && error.contains("--data-dir"),
        "{error}"
    );
}

#[tokio::test]
async fn a_taken_port_names_its_flag() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port();
    let home = Home::open(None).unwrap();
    for flag in ["--resp-port", "--lm-port", "--http-port"] {
        let words = format!("kvpool dev {flag} {port}");
        let mut line: Vec<&str> = words.split_whitespace().collect();
        for other in ["--resp-port", "--lm-port", "--http-port"] {
            if other != flag {
                line.extend([other, "0"]);
            }
        }
        let Command::Dev(args) = Cli::try_parse_from(line).unwrap().command else {
            panic!()
        };
        let error = ports::choose(&args, &home).await.map(|_| ()).unwrap_err().to_string();
        assert!(error.contains(flag) && error.contains("taken"), "{error}");
    }
}

#[test]
fn numbers_are_checked() {
    for (line, flag) in [
        ("--coordinators 2", "--coordinators"),
        ("--shards 0", "--shards"),
        ("--shards 65", "--shards"),
        ("--factor 0", "--factor"),
        ("--factor 9", "--factor"),
        ("--memory-per-shard 1MiB", "--memory-per-shard"),
    ] {
        let error = check(&args(line)).unwrap_err();
        assert_eq!(crate::exit::code_of(&error), crate::exit::USAGE);
        assert!(error.to_string().contains(flag), "{error}");
    }
}
