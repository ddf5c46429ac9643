//! The report of a scenario: what was done to the pool and what its clients met, as plain text.

use crate::record::Record;
use crate::scenario::run::End;
use std::fmt::Write as _;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

/// One fault and the time around it.
#[derive(Clone, Debug)]
pub struct Line {
    pub fault: String,
    pub held: Duration,
    pub healed: Duration,
    pub write_gap: Duration,
    pub get: Duration,
    pub set: Duration,
    pub own_lag: Duration,
    pub unknown_writes: u64,
    pub hits: u64,
    pub misses: u64,
    pub violations: u64,
}

impl Line {
    /// The numbers in words.
    #[must_use]
    pub fn numbers(&self) -> String {
        let ms = |d: Duration| d.as_millis();
        format!(
            "write gap {} ms, longest GET {} ms, SET {} ms, {} of {} reads hit, {} writes unknown, own lag {} ms",
            ms(self.write_gap),
            ms(self.get),
            ms(self.set),
            self.hits,
            self.hits + self.misses,
            self.unknown_writes,
            ms(self.own_lag)
        )
    }
}

/// Everything about one run.
pub struct Report {
    pub scenario: String,
    pub about: String,
    pub seed: u64,
    pub lines: Vec<Line>,
    pub end: End,
    /// Where logs and data were kept.
    pub logs: Option<PathBuf>,
    pub record: Arc<Record>,
}

impl Report {
    #[must_use]
    pub fn violations(&self) -> u64 {
        self.record.violation_count()
    }

    /// The table and the verdict.
    #[must_use]
    pub fn summary(&self) -> String {
        let mut out = format!("scenario {}, seed {}: {}\n\n", self.scenario, self.seed, self.about);
        out += "| fault | held s | healthy after ms | write gap ms | longest GET ms | SET ms | own lag ms | hits % | violations |\n";
        out += "| --- | --- | --- | --- | --- | --- | --- | --- | --- |\n";
        for line in &self.lines {
            let reads = line.hits + line.misses;
            let hits = (line.hits * 100)
                .checked_div(reads)
                .map_or_else(|| "-".to_owned(), |p| p.to_string());
            let _ = writeln!(
                out,
                "| {} | {:.1} | {} | {} | {} | {} | {} | {hits} | {} |",
                line.fault,
                line.held.as_secs_f64(),
                line.healed.as_millis(),
                line.write_gap.as_millis(),
                line.get.as_millis(),
                line.set.as_millis(),
                line.own_lag.as_millis(),
                line.violations,
            );
        }
        let (end, record) = (&self.end, &self.record);
        let _ = writeln!(
            out,
            "\n{} faults in {} s; {} reads hit, {} missed, {} blocks written; {} operations on control state ({} compared with \
             the log, {} could not be, {} writes with unknown result); watchers: {} changes, {} resumes, {} lists",
            self.lines.len().saturating_sub(1),
            record.elapsed().as_secs(),
            record.get_hits.get(),
            record.get_misses.get(),
            record.sets_stored.get(),
            end.operations,
            end.compared,
            end.not_compared,
            record.unknown_writes.get(),
            end.changes,
            end.resumed,
            end.relisted,
        );
        if let Some(logs) = &self.logs {
            let _ = writeln!(out, "logs and data: {}", logs.display());
        }
        let verdict = if self.violations() == 0 { "ok" } else { "FAILED" };
        let _ = writeln!(out, "{verdict}: {} violations", self.violations());
        out
    }
}
