//! From samples to numbers: tables, per-round ratios, bars, JSON and Markdown.

use std::fmt::Write as _;

use anyhow::{Context, Result, bail};
use comfy_table::Table;
use serde_json::{Value, json};

use super::window::{Cell, Op, Sample};

const GIB: f64 = (1u64 << 30) as f64;

/// All samples of a run: `samples[target][cell][round]`.
pub struct Results {
    pub targets: Vec<String>,
    pub cells: Vec<Cell>,
    pub samples: Vec<Vec<Vec<Sample>>>,
    /// Load averages (1 minute) before and after.
    pub load: (f64, f64),
}

/// What two servers are compared in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Metric {
    /// Units per second.
    Throughput,
    /// Client and server CPU per unit.
    TotalCpu,
    /// Server CPU per unit.
    ServerCpu,
}

impl Metric {
    fn of(self, sample: &Sample) -> Option<f64> {
        let units = sample.units();
        match self {
            Self::Throughput => Some(sample.rate),
            Self::TotalCpu => Some((sample.client_cpu_ns + sample.server_cpu_ns?) as f64 / units),
            Self::ServerCpu => Some(sample.server_cpu_ns? as f64 / units),
        }
    }
}

/// The median of per-round figures and their spread.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Spread {
    pub median: f64,
    pub least: f64,
    pub most: f64,
}

impl std::fmt::Display for Spread {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:.2} [{:.2}–{:.2}]", self.median, self.least, self.most)
    }
}

fn spread(mut values: Vec<f64>) -> Option<Spread> {
    values.sort_by(f64::total_cmp);
    let (least, most) = (*values.first()?, *values.last()?);
    let middle = values.len() / 2;
    let median = match values.len() % 2 {
        1 => values[middle],
        _ => (values[middle - 1] + values[middle]) / 2.0,
    };
    Some(Spread { median, least, most })
}

fn percentile(sorted: &[u64], per_cent: usize) -> u64 {
    let at = (sorted.len() * per_cent).div_ceil(100).saturating_sub(1);
    sorted.get(at).copied().unwrap_or_default()
}

impl Results {
    /// Per round the geometric mean over the cells of `op` of `metric(a) / metric(b)`, then median and spread.
    pub fn ratio(&self, op: Op, metric: Metric, a: usize, b: usize) -> Option<Spread> {
        let cells: Vec<usize> = (0..self.cells.len())
            .filter(|&cell| self.cells[cell].op == op)
            .collect();
        let rounds = cells
            .iter()
            .map(|&cell| self.samples[a][cell].len().min(self.samples[b][cell].len()))
            .min()?;
        let of_round = |round: usize| {
            let mut sum = 0.0;
            for &cell in &cells {
                let ours = metric.of(&self.samples[a][cell][round])?;
                let theirs = metric.of(&self.samples[b][cell][round])?;
                sum += (ours / theirs).ln();
            }
            Some((sum / cells.len() as f64).exp())
        };
        spread((0..rounds).map(of_round).collect::<Option<Vec<f64>>>()?)
    }

    fn median(&self, target: usize, cell: usize, metric: Metric) -> Option<f64> {
        let values: Option<Vec<f64>> = self.samples[target][cell].iter().map(|s| metric.of(s)).collect();
        spread(values?).map(|s| s.median)
    }

    /// Latencies of all rounds, sorted.
    fn latencies(&self, target: usize, cell: usize) -> Vec<u64> {
        let mut all: Vec<u64> = self.samples[target][cell]
            .iter()
            .flat_map(|s| s.latencies.iter().copied())
            .collect();
        all.sort_unstable();
        all
    }

    fn total(&self, target: usize, of: impl Fn(&Sample) -> u64) -> u64 {
        self.samples[target].iter().flatten().map(of).sum()
    }

    /// One row per cell and server.
    pub fn cell_rows(&self) -> Vec<Vec<String>> {
        let mut rows = vec![
            [
                "operation",
                "value",
                "conns",
                "server",
                "rate",
                "p50",
                "p99",
                "server CPU",
                "total CPU",
            ]
            .map(String::from)
            .to_vec(),
        ];
        for (c, cell) in self.cells.iter().enumerate() {
            for (t, name) in self.targets.iter().enumerate() {
                let latencies = self.latencies(t, c);
                let cpu = |metric| self.median(t, c, metric).map_or("–".into(), |ns| show_cpu(cell.op, ns));
                rows.push(vec![
                    cell.op.to_string(),
                    show_bytes(cell.size),
                    cell.conns.to_string(),
                    name.clone(),
                    self.median(t, c, Metric::Throughput)
                        .map_or("–".into(), |rate| show_rate(cell.op, rate)),
                    show_time(percentile(&latencies, 50)),
                    show_time(percentile(&latencies, 99)),
                    cpu(Metric::ServerCpu),
                    cpu(Metric::TotalCpu),
                ]);
            }
        }
        rows
    }

    /// Each server against the first, per operation.
    pub fn ratio_rows(&self) -> Vec<Vec<String>> {
        let first = self.targets.first().map_or("", String::as_str);
        let mut rows = vec![vec![
            "operation".to_owned(),
            "server".to_owned(),
            format!("throughput / {first}"),
            format!("total CPU / {first}"),
            format!("server CPU / {first}"),
        ]];
        let mut ops: Vec<Op> = self.cells.iter().map(|cell| cell.op).collect();
        ops.sort();
        ops.dedup();
        for op in ops {
            for (t, name) in self.targets.iter().enumerate().skip(1) {
                let ratio = |metric| self.ratio(op, metric, t, 0).map_or("–".into(), |s| s.to_string());
                let ratios = [Metric::Throughput, Metric::TotalCpu, Metric::ServerCpu].map(ratio);
                rows.push([vec![op.to_string(), name.clone()], ratios.to_vec()].concat());
            }
        }
        rows
    }

    /// One row per bar.
    pub fn bar_rows(&self, bars: &[Bar]) -> Result<Vec<Vec<String>>> {
        let mut rows = vec![["bar", "measured", "result"].map(String::from).to_vec()];
        for bar in bars {
            let find = |name: &str| {
                let at = self.targets.iter().position(|target| target == name);
                at.with_context(|| format!("failed to judge {:?}: no server is named {name:?}", bar.text))
            };
            let measured = self.ratio(bar.op, bar.metric, find(&bar.ours)?, find(&bar.theirs)?);
            let (shown, result) = match measured {
                None => ("–".to_owned(), "NOT MEASURED"),
                Some(s) if bar.holds(s.median) => (s.to_string(), "PASS"),
                Some(s) => (s.to_string(), "MISSED"),
            };
            rows.push(vec![bar.text.clone(), shown, result.to_owned()]);
        }
        Ok(rows)
    }

    /// Notes below the tables.
    pub fn notes(&self) -> Vec<String> {
        let rounds = self.samples.first().and_then(|t| t.first()).map_or(0, Vec::len);
        let mut notes = vec![format!(
            "{rounds} interleaved rounds; medians; ratios are per-round geometric means over the cells, median [least–most]; \
             1-minute load average {:.1} before, {:.1} after; no TLS.",
            self.load.0, self.load.1
        )];
        for (t, name) in self.targets.iter().enumerate() {
            let misses = self.total(t, |sample| sample.misses);
            let stale = self.total(t, |sample| sample.stale);
            if misses + stale > 0 {
                notes.push(format!(
                    "{name}: {misses} reads missed and {stale} found an earlier value: the server had dropped a write, or a value."
                ));
            }
        }
        notes
    }

    /// Everything, for programs. Times in nanoseconds, rates in units per second.
    pub fn json(&self, bars: &[Bar]) -> Result<Value> {
        let sample = |s: &Sample| {
            let mut sorted = s.latencies.clone();
            sorted.sort_unstable();
            json!({
                "bytes": s.bytes, "ops": s.ops, "rate": s.rate, "misses": s.misses, "stale": s.stale,
                "client_cpu_ns": s.client_cpu_ns, "server_cpu_ns": s.server_cpu_ns,
                "p50_ns": percentile(&sorted, 50), "p99_ns": percentile(&sorted, 99),
            })
        };
        let cells: Vec<Value> = (self.cells.iter().enumerate())
            .map(|(c, cell)| {
                let by_target = |(t, name): (usize, &String)| {
                    let all = self.latencies(t, c);
                    json!({
                        "server": name,
                        "rate": self.median(t, c, Metric::Throughput),
                        "total_cpu_ns_per_unit": self.median(t, c, Metric::TotalCpu),
                        "server_cpu_ns_per_unit": self.median(t, c, Metric::ServerCpu),
                        "p50_ns": percentile(&all, 50), "p99_ns": percentile(&all, 99),
                        "rounds": self.samples[t][c].iter().map(sample).collect::<Vec<_>>(),
                    })
                };
                let servers: Vec<Value> = self.targets.iter().enumerate().map(by_target).collect();
                json!({ "op": cell.op.to_string(), "size": cell.size, "conns": cell.conns, "servers": servers })
            })
            .collect();
        Ok(json!({
            "load_average": [self.load.0, self.load.1],
            "cells": cells,
            "ratios": objects(&self.ratio_rows()),
            "bars": objects(&self.bar_rows(bars)?),
        }))
    }
}

/// Rows with a heading as JSON objects.
fn objects(rows: &[Vec<String>]) -> Value {
    let Some((heads, rows)) = rows.split_first() else {
        return json!([]);
    };
    let object =
        |row: &Vec<String>| -> Value { heads.iter().cloned().zip(row.iter().map(|cell| json!(cell))).collect() };
    rows.iter().map(object).collect()
}

/// A bound on a ratio: `OP METRIC A/B >= N` or `<= N`.
#[derive(Clone, Debug, PartialEq)]
pub struct Bar {
    text: String,
    op: Op,
    metric: Metric,
    ours: String,
    theirs: String,
    at_least: bool,
    bound: f64,
}

impl Bar {
    fn holds(&self, measured: f64) -> bool {
        if self.at_least {
            measured >= self.bound
        } else {
            measured <= self.bound
        }
    }
}

impl std::str::FromStr for Bar {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Self> {
        let words: Vec<&str> = text.split_whitespace().collect();
        let &[op, metric, servers, compare, bound] = &words[..] else {
            bail!("failed to read the bar {text:?}: five words are needed, as in \"get total_cpu ours/raw <= 1.15\"");
        };
        let metric = match metric {
            "throughput" => Metric::Throughput,
            "total_cpu" => Metric::TotalCpu,
            "server_cpu" => Metric::ServerCpu,
            _ => bail!("failed to read the bar {text:?}: throughput, total_cpu and server_cpu are known"),
        };
        let (ours, theirs) = servers
            .split_once('/')
            .with_context(|| format!("failed to read the bar {text:?}: A/B is needed"))?;
        let at_least = match compare {
            ">=" => true,
            "<=" => false,
            _ => bail!("failed to read the bar {text:?}: >= or <= is needed"),
        };
        Ok(Self {
            text: text.to_owned(),
            op: clap::ValueEnum::from_str(op, false)
                .map_err(|e| anyhow::anyhow!("failed to read the bar {text:?}: {e}"))?,
            metric,
            ours: ours.to_owned(),
            theirs: theirs.to_owned(),
            at_least,
            bound: bound
                .parse()
                .with_context(|| format!("failed to read the bar {text:?}"))?,
        })
    }
}

/// Rows as a table for people.
pub fn table(rows: &[Vec<String>]) -> String {
    let mut table = Table::new();
    table.load_style(comfy_table::presets::NOTHING);
    if let Some((heads, rows)) = rows.split_first() {
        table.set_header(heads.iter().map(|head| head.to_uppercase()));
        table.add_rows(rows);
    }
    table.to_string()
}

/// Rows as a Markdown table.
pub fn markdown(rows: &[Vec<String>]) -> String {
    let mut out = String::new();
    for (n, row) in rows.iter().enumerate() {
        let _ = writeln!(out, "| {} |", row.join(" | "));
        if n == 0 {
            let _ = writeln!(out, "|{}", " --- |".repeat(row.len()));
        }
    }
    out
}

/// `64Ki`, `4Mi`.
pub fn show_bytes(bytes: u64) -> String {
    match bytes {
        b if b >= 1 << 20 && b % (1 << 20) == 0 => format!("{}Mi", b >> 20),
        b if b >= 1 << 10 && b % (1 << 10) == 0 => format!("{}Ki", b >> 10),
        b => b.to_string(),
    }
}

fn show_rate(op: Op, rate: f64) -> String {
    match op {
        Op::Exists => format!("{rate:.0}/s"),
        _ => format!("{:.2} GiB/s", rate / GIB),
    }
}

fn show_cpu(op: Op, ns_per_unit: f64) -> String {
    match op {
        Op::Exists => format!("{:.1} µs/op", ns_per_unit / 1e3),
        _ => format!("{:.3} s/GiB", ns_per_unit * GIB / 1e9),
    }
}

fn show_time(ns: u64) -> String {
    match ns {
        ns if ns >= 1_000_000 => format!("{:.1} ms", ns as f64 / 1e6),
        ns => format!("{:.0} µs", ns as f64 / 1e3),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(rate: f64, cpu: u64) -> Sample {
        Sample {
            bytes: 1000,
            ops: 1,
            rate,
            client_cpu_ns: cpu,
            server_cpu_ns: Some(cpu),
            latencies: vec![5],
            ..Sample::default()
        }
    }

    fn results() -> Results {
        let cell = |size| Cell {
            op: Op::Get,
            size,
            conns: 1,
        };
        // Against the first: twice and eight times the rate (geometric mean 4), the same CPU, in both rounds.
        Results {
            targets: vec!["raw".into(), "ours".into()],
            cells: vec![cell(1 << 16), cell(1 << 20)],
            samples: vec![
                vec![
                    vec![sample(10.0, 7), sample(20.0, 7)],
                    vec![sample(10.0, 7), sample(10.0, 7)],
                ],
                vec![
                    vec![sample(20.0, 7), sample(40.0, 7)],
                    vec![sample(80.0, 7), sample(80.0, 7)],
                ],
            ],
            load: (0.0, 0.0),
        }
    }

    #[test]
    fn ratios_are_geometric_means_per_round() {
        let ratio = results().ratio(Op::Get, Metric::Throughput, 1, 0).expect("measured");
        assert!((ratio.median - 4.0).abs() < 1e-9 && (ratio.most - ratio.least).abs() < 1e-9);
        assert_eq!(results().ratio(Op::Put, Metric::Throughput, 1, 0), None);
    }

    #[test]
    fn bars_are_read_and_judged() {
        let bars = [
            "get throughput ours/raw >= 4",
            "get total_cpu ours/raw <= 0.5",
            "put total_cpu ours/raw <= 1",
        ];
        let bars: Vec<Bar> = bars.iter().map(|bar| bar.parse().expect("well formed")).collect();
        let rows = results().bar_rows(&bars).expect("known servers");
        let judged: Vec<&str> = rows[1..].iter().map(|row| row[2].as_str()).collect();
        assert_eq!(judged, ["PASS", "MISSED", "NOT MEASURED"]);
        for bad in [
            "",
            "get rate a/b >= 1",
            "get throughput ab >= 1",
            "get throughput a/b = 1",
            "pet throughput a/b >= 1",
        ] {
            assert!(bad.parse::<Bar>().is_err(), "{bad:?}");
        }
        let unknown: Bar = "get throughput us/raw >= 4".parse().expect("well formed");
        assert!(results().bar_rows(&[unknown]).is_err());
        assert!(results().json(&bars).expect("known servers")["cells"].is_array());
    }

    #[test]
    fn percentiles_are_of_the_nearest_rank() {
        let sorted: Vec<u64> = (1..=100).collect();
        assert_eq!((percentile(&sorted, 50), percentile(&sorted, 99)), (50, 99));
        assert_eq!((percentile(&[7], 99), percentile(&[], 50)), (7, 0));
    }
}
