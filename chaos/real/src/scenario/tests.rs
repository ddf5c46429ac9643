//! Scenario files: the ones we keep are read, and mistakes are refused by name.

use super::*;

#[test]
fn every_kept_scenario_is_read() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../scenarios");
    let mut names = Vec::new();
    for folder in [folder.join("long"), folder] {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                continue;
            }
            let scenario = Scenario::read(&path).unwrap();
            assert_eq!(path.file_stem().unwrap().to_str(), Some(scenario.name.as_str()));
            names.push(scenario.name);
        }
    }
    assert!(names.len() >= 3, "{names:?}");
}

#[test]
fn mistakes_are_refused() {
    let head = "name = \"x\"\nabout = \"y\"\n";
    assert!(Scenario::parse(head).is_ok());
    let fault = |rest: &str| format!("{head}[[fault]]\n{rest}\n");
    assert!(Scenario::parse(&fault("kind = \"kill\"\non = \"leader\"\nfor = \"5s\"")).is_ok());
    for (text, word) in [
        (format!("{head}shard = 3"), "shard"),
        (format!("{head}timing = \"fast\""), "timing"),
        (format!("{head}coordinators = 2"), "coordinators"),
        (fault("kind = \"explode\"\non = \"leader\"\nfor = \"5s\""), "explode"),
        (fault("kind = \"kill\"\non = \"shard-9\"\nfor = \"5s\""), "shard-9"),
        (fault("kind = \"kill\"\non = \"leader\"\nfor = \"soon\""), "for"),
        (fault("kind = \"kill\"\non = \"proxy\"\nfor = \"5s\""), "proxy"),
        (fault("kind = \"none\"\non = \"leader\"\nfor = \"5s\""), "nobody"),
        (
            fault("kind = \"partition\"\non = \"leader\"\nwith = \"mars\"\nfor = \"5s\""),
            "mars",
        ),
    ] {
        let error = format!("{:#}", Scenario::parse(&text).unwrap_err());
        assert!(error.contains(word), "{text}: {error}");
    }
}
