use clap::{Args, Command, FromArgMatches};
use serde::{Deserialize, Serialize};

use super::values::{ByteSize, Endpoint, ListenAddr, Member, Timing};
use super::*;

#[derive(Clone, Debug, Default, PartialEq, Args, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
struct Some3 {
    #[arg(long, env = "KVPOOL_TEST_ONLY_MEMORY")]
    #[serde(skip_serializing_if = "Option::is_none")]
    memory: Option<ByteSize>,
    #[arg(long)]
    #[serde(skip_serializing_if = "Option::is_none")]
    resp: Option<ListenAddr>,
    #[arg(long, value_delimiter = ',')]
    #[serde(skip_serializing_if = "Option::is_none")]
    coordinators: Option<Vec<Endpoint>>,
    #[arg(long)]
    #[serde(skip_serializing_if = "Option::is_none")]
    timing: Option<Timing>,
}

fn flags(line: &str) -> Some3 {
    let command = Some3::augment_args(Command::new("test"));
    let matches = command
        .try_get_matches_from(std::iter::once("test").chain(line.split_whitespace()))
        .unwrap();
    Some3::from_arg_matches(&matches).unwrap()
}

fn file(text: &str) -> (tempfile::TempDir, std::path::PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("shard.toml");
    std::fs::write(&path, text).unwrap();
    (dir, path)
}

fn settled(text: &str, line: &str) -> Result<Some3> {
    let (_dir, path) = file(text);
    Layers::new(Some(&path), &["shard", "run"])?.settle(&flags(line))
}

#[test]
fn flags_win_over_the_file_and_the_file_fills_the_rest() {
    let text = "memory = \"1GiB\"\nresp = \"127.0.0.1:1\"\ntiming = \"relaxed\"\ncoordinators = [\"a:1\", \"b:2\"]";
    let got = settled(text, "--memory 2GiB").unwrap();
    assert_eq!(got.memory, Some(ByteSize(2 << 30)));
    assert_eq!(got.resp, Some("127.0.0.1:1".parse().unwrap()));
    assert_eq!(got.timing, Some(Timing::Relaxed));
    assert_eq!(
        got.coordinators.unwrap(),
        [Endpoint("a:1".into()), Endpoint("b:2".into())]
    );
    let got = settled(text, "--coordinators c:3 --timing normal").unwrap();
    assert_eq!(got.coordinators.unwrap(), [Endpoint("c:3".into())]);
    assert_eq!(got.timing, Some(Timing::Normal));
    assert_eq!(got.memory, Some(ByteSize(1 << 30)));
    let none = Layers::new(None, &["shard", "run"])
        .unwrap()
        .settle(&flags(""))
        .unwrap();
    assert_eq!(none, Some3::default());
}

#[test]
fn sizes_in_files_may_be_numbers() {
    assert_eq!(
        settled("memory = 134217728", "").unwrap().memory,
        Some(ByteSize(128 << 20))
    );
}

#[test]
fn errors_name_the_file_the_key_and_the_way_out() {
    for (text, words) in [
        ("memry = 1", &["memry", "shard run", "memory"] as &[&str]),
        ("parent-pid = 1", &["parent-pid"]),
        ("config = \"x\"", &["config"]),
        ("memory = \"many\"", &["memory", "128MiB"]),
        ("resp = \"here\"", &["resp", "127.0.0.1:7400"]),
        ("timing = \"fast\"", &["timing"]),
        ("= =", &["TOML"]),
    ] {
        let error = settled(text, "").map(|_| ()).unwrap_err();
        assert_eq!(crate::exit::code_of(&error), crate::exit::USAGE);
        let error = format!("{error:#}");
        assert!(error.contains("shard.toml"), "{text}: {error}");
        assert!(words.iter().all(|word| error.contains(word)), "{text}: {error}");
    }
    let error = Layers::new(Some(std::path::Path::new("/no/such.toml")), &["shard", "run"])
        .map(|_| ())
        .unwrap_err();
    assert!(error.to_string().contains("/no/such.toml"), "{error}");
}

#[test]
fn a_missing_setting_is_named_in_all_spellings() {
    let error = need::<u8>(None, "data-dir", "/var/lib/kvpool").unwrap_err().to_string();
    assert!(
        error.contains("--data-dir /var/lib/kvpool") && error.contains("KVPOOL_DATA_DIR"),
        "{error}"
    );
}

#[test]
fn every_role_knows_its_flags_as_keys() {
    for role in ["coordinator", "shard", "proxy"] {
        let keys = known_keys(&[role, "run"]);
        for key in ["http", "join-token-file", "timing", "insecure-bind", "log"] {
            assert!(keys.contains(key), "{role}: {key}");
        }
        assert!(!keys.contains("config") && !keys.contains("parent-pid"), "{role}");
        assert!(
            !keys.contains("join-token"),
            "a token in a flag can be read by every user"
        );
    }
}

#[test]
fn sizes_are_read_and_shown() {
    for (text, bytes) in [
        ("0", 0),
        ("134217728", 128 << 20),
        ("128MiB", 128 << 20),
        ("128 mib", 128 << 20),
        ("1.5GiB", 3 << 29),
        ("2TiB", 2 << 40),
        ("10kB", 10_000),
        ("3B", 3),
    ] {
        assert_eq!(text.parse(), Ok(ByteSize(bytes)), "{text}");
    }
    for text in [
        "",
        "MiB",
        "-1",
        "1XB",
        "1.2.3MiB",
        "99999999999TiB",
        "1e3",
        "NaN",
        "1 2MiB",
    ] {
        let error = text.parse::<ByteSize>().unwrap_err();
        assert!(error.contains("128MiB") && error.contains(text), "{text}: {error}");
    }
    for (bytes, shown) in [
        (0, "0B"),
        (1023, "1023B"),
        (128 << 20, "128MiB"),
        (3 << 29, "1.5GiB"),
        (1 << 40, "1TiB"),
    ] {
        assert_eq!(ByteSize(bytes).to_string(), shown);
    }
}

#[test]
fn addresses_are_read() {
    let localhost: ListenAddr = "localhost:7400".parse().unwrap();
    assert_eq!(localhost.0.to_string(), "127.0.0.1:7400");
    assert!("[::1]:7400".parse::<ListenAddr>().is_ok());
    for text in ["7400", "example.org:80", "127.0.0.1", "127.0.0.1:99999"] {
        assert!(
            text.parse::<ListenAddr>().unwrap_err().contains("127.0.0.1:7400"),
            "{text}"
        );
    }
    assert!("pool-0.pool:7400".parse::<Endpoint>().is_ok());
    for text in ["", ":1", "a", "a:0", "a:x", "http://a:1", "a:1,b:2"] {
        assert!(text.parse::<Endpoint>().is_err(), "{text}");
    }
    let member: Member = "3=host:7400".parse().unwrap();
    assert_eq!(
        (member.id, member.endpoint.as_str(), member.to_string().as_str()),
        (3, "host:7400", "3=host:7400")
    );
    for text in ["host:7400", "x=host:7400", "3=host", "=host:1"] {
        assert!(
            text.parse::<Member>().unwrap_err().contains("1=127.0.0.1:7400"),
            "{text}"
        );
    }
}
