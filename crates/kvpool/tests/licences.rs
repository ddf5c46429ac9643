//! What the binary is made of: every package has a permissive licence and comes from the crates registry or this repository.

use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::process::Command;

const ALLOWED: &[&str] = &[
    "0BSD",
    "Apache-2.0",
    "Apache-2.0 WITH LLVM-exception",
    "BSD-2-Clause",
    "BSD-3-Clause",
    "CC0-1.0",
    "ISC",
    "MIT",
    "MIT-0",
    "Unicode-3.0",
    "Unlicense",
    "Zlib",
];

/// Packages with another licence, each with the reason why that is right.
const EXCEPTIONS: &[(&str, &str)] = &[];

fn packages() -> Vec<Value> {
    let output = Command::new(env!("CARGO"))
        .args(["metadata", "--locked", "--format-version", "1", "--manifest-path"])
        .arg(concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml"))
        .output()
        .expect("cargo runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let metadata: Value = serde_json::from_slice(&output.stdout).expect("metadata is JSON");
    metadata["packages"].as_array().expect("there are packages").clone()
}

/// An SPDX expression: `OR` needs one side, `AND` both and binds tighter; the old `/` means `OR`. Parentheses are looked into.
fn permitted(expression: &str) -> bool {
    let text = expression.trim();
    let (or, and) = (split(text, " OR "), split(text, " AND "));
    if or.len() > 1 {
        return or.into_iter().any(permitted);
    }
    if and.len() > 1 {
        return and.into_iter().all(permitted);
    }
    match text.strip_prefix('(').and_then(|t| t.strip_suffix(')')) {
        Some(inner) => permitted(inner),
        None => ALLOWED.contains(&text),
    }
}

/// Splits at a word outside parentheses.
fn split<'a>(text: &'a str, word: &str) -> Vec<&'a str> {
    let mut parts = Vec::new();
    let (mut start, mut depth) = (0, 0i32);
    for (at, c) in text.char_indices() {
        depth += i32::from(c == '(') - i32::from(c == ')');
        if depth == 0 && at >= start && text[at..].starts_with(word) {
            parts.push(&text[start..at]);
            start = at + word.len();
        }
    }
    parts.push(&text[start..]);
    parts
}

#[test]
fn every_package_has_a_permissive_licence() {
    let mut wrong = Vec::new();
    for package in packages() {
        let name = package["name"].as_str().unwrap_or_default();
        let licence = package["license"]
            .as_str()
            .unwrap_or_default()
            .replace(" / ", "/")
            .replace('/', " OR ");
        if !permitted(&licence) && !EXCEPTIONS.iter().any(|(n, _)| *n == name) {
            wrong.push(format!("{name}: {licence:?}"));
        }
    }
    assert!(
        wrong.is_empty(),
        "not permitted, and no exception gives a reason: {wrong:?}"
    );
}

#[test]
fn every_package_comes_from_the_registry_or_this_repository() {
    let packages = packages();
    let foreign: BTreeSet<&str> = packages
        .iter()
        .filter_map(|p| p["source"].as_str())
        .filter(|s| !(s.starts_with("registry+") && s.ends_with("crates.io-index")))
        .collect();
    assert!(foreign.is_empty(), "{foreign:?}");
    let root = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");
    let root = std::fs::canonicalize(root).expect("the repository is there");
    for package in packages.iter().filter(|p| p["source"].is_null()) {
        let manifest = package["manifest_path"].as_str().unwrap_or_default();
        assert!(
            std::path::Path::new(manifest).starts_with(&root),
            "{manifest} is not of this repository"
        );
        assert_eq!(package["license"], "Apache-2.0", "{manifest}");
    }
    let mut versions = BTreeMap::<&str, u32>::new();
    packages
        .iter()
        .filter_map(|p| p["name"].as_str())
        .for_each(|name| *versions.entry(name).or_default() += 1);
    let twice: Vec<&&str> = versions.iter().filter(|(_, n)| **n > 1).map(|(name, _)| name).collect();
    println!(
        "{} packages, {} of them in more than one version: {twice:?}",
        packages.len(),
        twice.len()
    );
}

#[test]
fn expressions_are_read_right() {
    for yes in [
        "MIT",
        "MIT OR GPL-3.0",
        "(MIT OR Apache-2.0) AND Unicode-3.0",
        "GPL-2.0 OR MIT AND Zlib",
    ] {
        assert!(permitted(yes), "{yes}");
    }
    for no in ["", "GPL-3.0", "MIT AND GPL-3.0", "(MIT AND LGPL-2.1) OR SSPL-1.0"] {
        assert!(!permitted(no), "{no}");
    }
}
