//! `docs/metrics.md` says what the crates describe: the same names, types and no others.

use std::collections::BTreeMap;
use std::sync::Mutex;

use metrics::{Counter, Gauge, Histogram, Key, KeyName, Metadata, Recorder, SharedString, Unit};

/// Collects descriptions.
#[derive(Default)]
struct Descriptions(Mutex<BTreeMap<String, &'static str>>);

impl Descriptions {
    fn add(&self, key: &KeyName, kind: &'static str) {
        self.0.lock().unwrap().insert(key.as_str().to_owned(), kind);
    }
}

impl Recorder for Descriptions {
    fn describe_counter(&self, key: KeyName, _: Option<Unit>, _: SharedString) {
        self.add(&key, "counter");
    }
    fn describe_gauge(&self, key: KeyName, _: Option<Unit>, _: SharedString) {
        self.add(&key, "gauge");
    }
    fn describe_histogram(&self, key: KeyName, _: Option<Unit>, _: SharedString) {
        self.add(&key, "histogram");
    }
    fn register_counter(&self, _: &Key, _: &Metadata<'_>) -> Counter {
        Counter::noop()
    }
    fn register_gauge(&self, _: &Key, _: &Metadata<'_>) -> Gauge {
        Gauge::noop()
    }
    fn register_histogram(&self, _: &Key, _: &Metadata<'_>) -> Histogram {
        Histogram::noop()
    }
}

fn described() -> BTreeMap<String, &'static str> {
    let recorder = Descriptions::default();
    metrics::with_local_recorder(&recorder, super::describe_all);
    recorder.0.into_inner().unwrap()
}

/// Rows of the page: `| name | type | labels | meaning |`.
fn documented() -> BTreeMap<String, String> {
    let page = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/metrics.md");
    let text = std::fs::read_to_string(page).unwrap();
    let mut found = BTreeMap::new();
    for line in text.lines().filter(|line| line.starts_with("| `")) {
        let cells: Vec<&str> = line.trim_matches('|').split('|').map(str::trim).collect();
        assert_eq!(cells.len(), 4, "{line}");
        let name = cells[0].trim_matches('`').to_owned();
        assert!(found.insert(name, cells[1].to_owned()).is_none(), "twice: {line}");
    }
    found
}

#[test]
fn the_page_and_the_descriptions_agree() {
    let (code, page) = (described(), documented());
    let missing: Vec<_> = code.keys().filter(|name| !page.contains_key(*name)).collect();
    let invented: Vec<_> = page.keys().filter(|name| !code.contains_key(*name)).collect();
    assert!(
        missing.is_empty() && invented.is_empty(),
        "not on the page: {missing:#?}\nnot in the code: {invented:#?}"
    );
    for (name, kind) in code {
        assert_eq!(page[&name], kind, "{name}");
    }
}

#[test]
fn names_follow_the_rule() {
    for (name, kind) in described() {
        let standard = name.starts_with("process_");
        assert!(standard || name.starts_with("kvpool_"), "{name}");
        assert_eq!(kind == "counter", name.ends_with("_total"), "{name} is a {kind}");
    }
}
