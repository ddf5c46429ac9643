//! `kvpool bench`: the data path of one or more servers, compared in interleaved rounds.
//!
//! Each round runs every cell (operation × value size × connections) against every server in turn, so that whatever the
//! machine does besides meets all of them alike; figures are medians over the rounds, comparisons medians of per-round
//! ratios. Clients are plain blocking threads. The gate is CPU time per byte, which a loaded machine disturbs least.

mod client;
mod cpu;
mod pattern;
mod raw;
mod report;
mod target;
mod window;

use std::collections::BTreeMap;
use std::fs;
use std::io::{IsTerminal, Write};
use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use indicatif::{ProgressBar, ProgressStyle};

use pattern::Lane;
use raw::RawKind;
use report::{Bar, Results, markdown, table};
use target::Target;
use window::{Cell, KeySet, Op, Sample};

/// Operations of an `exists` window.
const EXISTS_OPS: u64 = 2000;
/// Least operations per connection and window.
const MIN_OPS: u64 = 3;
/// Windows per cell, server and round, when there are operations for so many.
const PARTS: u64 = 3;

const EXAMPLES: &str = "\
Examples:
  kvpool bench redis://127.0.0.1:6400
  kvpool bench raw ours=resp://127.0.0.1:6400 redis=redis://127.0.0.1:6379 \\
      --server-pid ours=4711 --server-pid redis=4712 --bar 'get throughput ours/raw >= 0.9'
  kvpool bench lm://127.0.0.1:6401 --size 32Mi --conns 1,8 --op get,mixed --json result.json

Servers: redis://, resp:// (the same) and lm:// URLs; `raw` and `raw-sum` start the thinnest possible server, without
and with a checksum, as what loopback itself costs.";

/// Measure servers against each other: throughput, latency and CPU per byte, every byte verified
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct BenchArgs {
    /// Servers, as [NAME=]URL; the first is what the others are compared with
    #[arg(value_name = "[NAME=]URL", required_unless_present = "serve_raw")]
    pub urls: Vec<String>,
    /// Value sizes (64Ki to 32Mi)
    #[arg(long = "size", value_delimiter = ',', default_value = "64Ki,1Mi,4Mi,16Mi", value_parser = parse_size)]
    pub sizes: Vec<u64>,
    /// Connections (1 to 8)
    #[arg(long, value_delimiter = ',', default_value = "1,4", value_parser = clap::value_parser!(u8).range(1..=8))]
    pub conns: Vec<u8>,
    /// Operations
    #[arg(long = "op", value_enum, value_delimiter = ',', default_value = "put,get")]
    pub ops: Vec<Op>,
    /// Rounds; 9 or more for figures to be quoted
    #[arg(long, default_value_t = 9, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub rounds: u32,
    /// Keys per cell
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u32).range(8..=64))]
    pub keys: u32,
    /// Bytes moved per cell, server and round (`exists`: 2000 operations)
    #[arg(long, default_value = "96Mi", value_parser = parse_bytes)]
    pub bytes: u64,
    /// Processes of a server, for its CPU time: NAME=PID[,PID]
    #[arg(long = "server-pid", value_name = "NAME=PID[,PID]")]
    pub server_pids: Vec<String>,
    /// Use only keys in these hash slots of a server: NAME=FIRST-LAST[,FIRST-LAST]
    #[arg(long, value_name = "NAME=RANGES")]
    pub slots: Vec<String>,
    /// Judge a ratio, as in 'get total_cpu ours/raw <= 1.15' (throughput, total_cpu or server_cpu)
    #[arg(long = "bar", value_name = "BAR")]
    pub bars: Vec<Bar>,
    /// Write everything measured as JSON (`-` for standard output, instead of the tables)
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// Write the tables as Markdown
    #[arg(long, value_name = "FILE")]
    pub markdown: Option<PathBuf>,
    /// Be a raw server (how the bench starts its own peer)
    #[arg(long, hide = true)]
    pub serve_raw: Option<RawKind>,
}

fn parse_bytes(text: &str) -> Result<u64, String> {
    let unit = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(unit);
    let shift = match unit.trim_end_matches('B') {
        "" => 0,
        "Ki" | "K" => 10,
        "Mi" | "M" => 20,
        "Gi" | "G" => 30,
        _ => return Err(format!("unknown unit {unit:?} (Ki, Mi, Gi)")),
    };
    let number: u64 = number.parse().map_err(|_| "a number is needed".to_owned())?;
    number
        .checked_mul(1 << shift)
        .filter(|&n| n > 0 && n <= 1 << 40)
        .ok_or_else(|| "out of range".to_owned())
}

fn parse_size(text: &str) -> Result<u64, String> {
    let size = parse_bytes(text)?;
    let good = (64 << 10..=32 << 20).contains(&size);
    good.then_some(size).ok_or_else(|| "sizes are 64Ki to 32Mi".to_owned())
}

/// Runs the bench, blocking until it is done.
///
/// # Errors
/// A server is not reachable, breaks its protocol, is silent for 20 s, or returns a wrong byte.
pub fn run(args: BenchArgs) -> Result<()> {
    if let Some(kind) = args.serve_raw {
        return raw::serve(kind);
    }
    let results = measure(&args)?;
    let to_stdout = args.json.as_ref().is_some_and(|path| path.as_os_str() == "-");
    if let Some(path) = &args.json {
        let text = serde_json::to_string_pretty(&results.json(&args.bars)?)?;
        match to_stdout {
            true => writeln!(std::io::stdout(), "{text}")?,
            false => fs::write(path, text + "\n").with_context(|| format!("failed to write {}", path.display()))?,
        }
    }
    let mut tables = vec![results.cell_rows()];
    if results.targets.len() > 1 {
        tables.push(results.ratio_rows());
    }
    if !args.bars.is_empty() {
        tables.push(results.bar_rows(&args.bars)?);
    }
    if let Some(path) = &args.markdown {
        let mut parts: Vec<String> = tables.iter().map(|rows| markdown(rows)).collect();
        parts.push(results.notes().join("\n") + "\n");
        fs::write(path, parts.join("\n")).with_context(|| format!("failed to write {}", path.display()))?;
    }
    if !to_stdout {
        let mut out = std::io::stdout().lock();
        for rows in &tables {
            writeln!(out, "{}\n", table(rows))?;
        }
        for note in results.notes() {
            writeln!(out, "{note}")?;
        }
    }
    Ok(())
}

fn measure(args: &BenchArgs) -> Result<Results> {
    let parse = |url: &String| Target::parse(url, &args.server_pids, &args.slots);
    let mut targets: Vec<Target> = args.urls.iter().map(parse).collect::<Result<_>>()?;
    let names: Vec<String> = targets.iter().map(|target| target.name.clone()).collect();
    for (at, name) in names.iter().enumerate() {
        ensure!(
            !names[..at].contains(name),
            "failed to tell servers apart: two are named {name:?}"
        );
    }
    let cells = cells(args);
    let max = args.sizes.iter().copied().max().unwrap_or_default() as usize;
    let conns = args.conns.iter().copied().max().unwrap_or(1);
    let mut lanes: Vec<Lane> = (0..conns).map(|_| Lane::new(max)).collect();

    let bar = progress(args.rounds as usize * cells.len() * targets.len());
    let load = load_average();
    let sets = populate(args, &mut targets, &mut lanes, &bar)?;
    let mut results = Results {
        samples: vec![vec![Vec::new(); cells.len()]; targets.len()],
        targets: names,
        cells,
        load: (load, load),
    };
    for round in 0..args.rounds as usize {
        for c in 0..results.cells.len() {
            let samples = one_cell(args, round, results.cells[c], &mut targets, &sets, &mut lanes, &bar)?;
            for (t, sample) in samples.into_iter().enumerate() {
                results.samples[t][c].push(sample);
            }
        }
    }
    bar.finish_and_clear();
    results.load.1 = load_average();
    Ok(results)
}

/// One cell of one round on every server, in parts that take turns: which cores a client and its server thread share is
/// decided anew for each window and matters much for small values.
fn one_cell(
    args: &BenchArgs,
    round: usize,
    cell: Cell,
    targets: &mut [Target],
    sets: &BTreeMap<(usize, u64), KeySet>,
    lanes: &mut [Lane],
    bar: &ProgressBar,
) -> Result<Vec<Sample>> {
    let wanted = if cell.op == Op::Exists {
        EXISTS_OPS
    } else {
        args.bytes / cell.size
    };
    let ops = wanted.max(MIN_OPS * cell.conns as u64);
    let parts = if ops >= PARTS * MIN_OPS * cell.conns as u64 {
        PARTS
    } else {
        1
    };
    let count = targets.len();
    let mut samples = vec![Sample::default(); count];
    for part in 0..parts as usize {
        for turn in 0..count {
            // Whoever comes first finds another machine than whoever comes last: the order rotates.
            let t = (turn + round + part) % count;
            let (target, set) = (&mut targets[t], &sets[&(t, cell.size)]);
            let size = report::show_bytes(cell.size);
            bar.set_message(format!(
                "round {} {} {size} c{} {}",
                round + 1,
                cell.op,
                cell.conns,
                target.name
            ));
            samples[t].merge(window::run(target, set, cell, ops / parts, lanes)?);
            if part + 1 == parts as usize && matches!(cell.op, Op::Put | Op::Mixed) {
                let (misses, stale) = window::verify(target, set, cell.size, &mut lanes[0])?;
                samples[t].misses += misses;
                samples[t].stale += stale;
            }
        }
    }
    bar.inc(count as u64);
    Ok(samples)
}

/// Writes and checks all keys of all sizes on all servers once.
fn populate(
    args: &BenchArgs,
    targets: &mut [Target],
    lanes: &mut [Lane],
    bar: &ProgressBar,
) -> Result<BTreeMap<(usize, u64), KeySet>> {
    let mut sets = BTreeMap::new();
    for (t, target) in targets.iter_mut().enumerate() {
        for (s, &size) in args.sizes.iter().enumerate() {
            bar.set_message(format!(
                "writing {} values to {}",
                report::show_bytes(size),
                target.name
            ));
            let keys = target.keys(size, args.keys, s as u32 * args.keys);
            let set = sets.entry((t, size)).or_insert_with(|| KeySet::new(keys));
            window::populate(target, set, size, &mut lanes[0])
                .with_context(|| format!("failed to write to {}", target.name))?;
        }
    }
    Ok(sets)
}

fn cells(args: &BenchArgs) -> Vec<Cell> {
    let mut cells = Vec::new();
    for &op in &args.ops {
        for &size in &args.sizes {
            for &conns in &args.conns {
                cells.push(Cell {
                    op,
                    size,
                    conns: conns as usize,
                });
            }
        }
    }
    cells.sort();
    cells.dedup();
    cells
}

fn progress(steps: usize) -> ProgressBar {
    if !std::io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let style = ProgressStyle::with_template("{bar:30} {pos}/{len} {msg}  {eta} left");
    ProgressBar::new(steps as u64).with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
}

/// The 1-minute load average; 0 if the kernel does not say.
fn load_average() -> f64 {
    let text = fs::read_to_string("/proc/loadavg").unwrap_or_default();
    text.split(' ')
        .next()
        .and_then(|first| first.parse().ok())
        .unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_and_bounded() {
        assert_eq!(parse_size("64Ki"), Ok(65536));
        assert_eq!(parse_size("32MiB"), Ok(32 << 20));
        for bad in ["", "Ki", "1Ki", "33Mi", "1x", "99999999999999999999Mi"] {
            assert!(parse_size(bad).is_err(), "{bad}");
        }
    }
}
