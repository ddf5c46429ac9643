//! What happened: a timeline, what broke a promise, and how long clients were kept waiting.

use parking_lot::Mutex;
use std::fmt::Write as _;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Violations kept in full; the rest is counted.
const MAX_VIOLATIONS: usize = 200;
const MAX_LINES: usize = 20_000;

/// Everything that a run records. Shared by all its parts.
pub struct Record {
    start: Instant,
    lines: Mutex<Vec<(Duration, String)>>,
    violations: Mutex<Vec<String>>,
    violation_count: AtomicU64,
    /// Time between acknowledged writes of control state, of all writers together.
    pub writes: Gap,
    /// Longest answers of the data plane.
    pub gets: Longest,
    pub sets: Longest,
    /// How late this process itself was woken: what the machine, not the pool, did to clients.
    pub own_lag: Longest,
    pub get_hits: Count,
    pub get_misses: Count,
    pub sets_stored: Count,
    pub unknown_writes: Count,
    echo: bool,
}

impl Record {
    #[must_use]
    pub fn new(echo: bool) -> Self {
        Record {
            start: Instant::now(),
            lines: Mutex::default(),
            violations: Mutex::default(),
            violation_count: AtomicU64::new(0),
            writes: Gap::new(),
            gets: Longest::default(),
            sets: Longest::default(),
            own_lag: Longest::default(),
            get_hits: Count::default(),
            get_misses: Count::default(),
            sets_stored: Count::default(),
            unknown_writes: Count::default(),
            echo,
        }
    }

    #[must_use]
    pub fn elapsed(&self) -> Duration {
        self.start.elapsed()
    }

    /// Microseconds since the start: the clock of histories.
    #[must_use]
    pub fn micros(&self) -> u64 {
        u64::try_from(self.start.elapsed().as_micros()).unwrap_or(u64::MAX)
    }

    /// A line of the timeline.
    pub fn note(&self, text: impl Into<String>) {
        let (at, text) = (self.start.elapsed(), text.into());
        if self.echo {
            println!("{} {text}", stamp(at));
        }
        let mut lines = self.lines.lock();
        if lines.len() < MAX_LINES {
            lines.push((at, text));
        }
    }

    /// A broken promise.
    pub fn violation(&self, text: impl Into<String>) {
        let text = text.into();
        if self.violation_count.fetch_add(1, Ordering::Relaxed) < MAX_VIOLATIONS as u64 {
            self.note(format!("VIOLATION {text}"));
            self.violations.lock().push(text);
        }
    }

    #[must_use]
    pub fn violation_count(&self) -> u64 {
        self.violation_count.load(Ordering::Relaxed)
    }

    /// The timeline as text.
    #[must_use]
    pub fn timeline(&self) -> String {
        let mut out = String::new();
        for (at, text) in self.lines.lock().iter() {
            let _ = writeln!(out, "{} {text}", stamp(*at));
        }
        out
    }

    /// Watches how late this process is woken, for ever.
    pub async fn watch_own_lag(&self) {
        let pause = Duration::from_millis(10);
        loop {
            let began = Instant::now();
            tokio::time::sleep(pause).await;
            self.own_lag.add(began.elapsed().saturating_sub(pause));
        }
    }
}

fn stamp(at: Duration) -> String {
    format!("[{:>4}.{:03}]", at.as_secs(), at.subsec_millis())
}

/// The longest time between two successes.
pub struct Gap(Mutex<(Instant, Duration)>);

impl Gap {
    fn new() -> Self {
        Gap(Mutex::new((Instant::now(), Duration::ZERO)))
    }

    pub fn success(&self) {
        let mut gap = self.0.lock();
        let now = Instant::now();
        gap.1 = gap.1.max(now.saturating_duration_since(gap.0));
        gap.0 = now;
    }

    /// The longest since the last call, one that goes on included; what was before a call is not counted again.
    pub fn take(&self) -> Duration {
        let mut gap = self.0.lock();
        let now = Instant::now();
        let longest = gap.1.max(now.saturating_duration_since(gap.0));
        *gap = (now, Duration::ZERO);
        longest
    }
}

/// The largest of many durations.
#[derive(Debug, Default)]
pub struct Longest(AtomicU64);

impl Longest {
    pub fn add(&self, took: Duration) {
        let micros = u64::try_from(took.as_micros()).unwrap_or(u64::MAX);
        self.0.fetch_max(micros, Ordering::Relaxed);
    }

    /// The largest since the last call.
    pub fn take(&self) -> Duration {
        Duration::from_micros(self.0.swap(0, Ordering::Relaxed))
    }
}

#[derive(Debug, Default)]
pub struct Count(AtomicU64);

impl Count {
    pub fn add(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }

    #[must_use]
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}
