//! A recorder that keeps counters, so that tests can see what was counted. One per test process.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use metrics::{Counter, Gauge, Histogram, Key, KeyName, Metadata, Recorder, SharedString, Unit};

#[derive(Default)]
struct Counters(Mutex<HashMap<String, Arc<AtomicU64>>>);

static COUNTERS: OnceLock<Arc<Counters>> = OnceLock::new();

struct Handle(Arc<Counters>);

impl Recorder for Handle {
    fn describe_counter(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
    fn describe_gauge(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
    fn describe_histogram(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn register_counter(&self, key: &Key, _: &Metadata<'_>) -> Counter {
        let mut name = key.name().to_owned();
        for label in key.labels() {
            name.push_str(&format!(" {}={}", label.key(), label.value()));
        }
        let mut all = self.0.0.lock().unwrap();
        Counter::from_arc(Arc::clone(all.entry(name).or_default()))
    }

    fn register_gauge(&self, _: &Key, _: &Metadata<'_>) -> Gauge {
        Gauge::noop()
    }

    fn register_histogram(&self, _: &Key, _: &Metadata<'_>) -> Histogram {
        Histogram::noop()
    }
}

pub fn install() {
    COUNTERS.get_or_init(|| {
        let counters = Arc::new(Counters::default());
        metrics::set_global_recorder(Handle(Arc::clone(&counters))).unwrap();
        counters
    });
}

/// The sum of all counters of this name whose labels contain every one of `labels` (`key=value`).
pub fn counted(name: &str, labels: &[&str]) -> u64 {
    install();
    let all = COUNTERS.get().unwrap().0.lock().unwrap();
    all.iter()
        .filter(|(full, _)| {
            let mut words = full.split(' ');
            words.next() == Some(name) && labels.iter().all(|label| full.split(' ').any(|word| word == *label))
        })
        .map(|(_, count)| count.load(Ordering::Relaxed))
        .sum()
}
