//! Runs one scenario: pool, clients, faults one after the other, and the judgement after each and at the end.

use super::fault::{Fault, Injected};
use super::{Bounds, Mix, Scenario};
use crate::dice::Dice;
use crate::load::blocks::BlockClient;
use crate::load::history::{self, Log, Op};
use crate::load::lmcache::{Installed, LmCache};
use crate::load::metadata::{self, MetadataClient};
use crate::load::watchers::{Seen, Watcher};
use crate::pool::{Pool, Role};
use crate::record::Record;
use crate::report::{Line, Report};
use anyhow::{Context, Result, ensure};
use parking_lot::Mutex;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::task::JoinHandle;
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;

const START_WITHIN: Duration = Duration::from_secs(120);
/// How long members may count differently after all is well.
const AGREE_WITHIN: Duration = Duration::from_secs(15);
/// Between faults: clients find the pool as it should be.
const QUIET: Duration = Duration::from_secs(2);

/// How a scenario is run.
#[derive(Clone, Debug)]
pub struct Options {
    pub program: PathBuf,
    pub seed: u64,
    /// Instead of the scenario's count: faults of the mix until this time is over.
    pub time: Option<Duration>,
    /// Print the timeline as it happens.
    pub echo: bool,
    /// Keep logs and data even when all is well.
    pub keep: bool,
    /// Without it, scenarios run without their LMCache clients, and say so.
    pub lmcache: Option<Installed>,
}

/// Runs it. An error is one of the harness or a pool that never came up; what the product did wrong is in the report.
///
/// # Errors
/// See above.
pub async fn run(scenario: &Scenario, options: &Options) -> Result<Report> {
    let record = Arc::new(Record::new(options.echo));
    record.note(format!("scenario {} with seed {}", scenario.name, options.seed));
    let shape = scenario.shape()?;
    let mut pool = Pool::start(&options.program, &shape, options.seed, START_WITHIN).await?;
    record.note("the pool is healthy");
    let dice = Dice::new(options.seed);
    let real = real_clients(scenario, options, &pool, &record).await?;
    let clients = Clients::start(scenario, &pool, &record, &dice);
    let mut lines = Vec::new();
    let faults = faults(scenario, options, &pool, &record, dice.fork(1), &mut lines).await;
    if let Err(error) = faults {
        record.violation(format!("{error:#}"));
    }
    for client in real {
        client.finish().await;
    }
    let end = clients.finish(&pool, &record).await;
    for name in pool.stop().await {
        record.violation(format!("{name} did not end within 15 s of SIGTERM"));
    }
    for panic in panics(&pool) {
        record.violation(panic);
    }
    let logs = (options.keep || record.violation_count() > 0).then(|| pool.keep().to_owned());
    Ok(Report {
        scenario: scenario.name.clone(),
        about: scenario.about.clone(),
        seed: options.seed,
        lines,
        end,
        logs,
        record,
    })
}

/// The LMCache clients of a scenario, one per proxy in turn.
async fn real_clients(
    scenario: &Scenario,
    options: &Options,
    pool: &Pool,
    record: &Arc<Record>,
) -> Result<Vec<LmCache>> {
    let mut clients = Vec::new();
    let proxies = pool.of(Role::Proxy);
    for (scheme, at) in scenario.load.lmcache.iter().zip(proxies.iter().cycle()) {
        match &options.lmcache {
            Some(installed) => {
                clients.push(LmCache::start(installed, scheme, &pool.members[*at].address, record).await?);
            }
            None => record.note(format!("without LMCache {scheme}://: no --lmcache-python")),
        }
    }
    Ok(clients)
}

async fn faults(
    scenario: &Scenario,
    options: &Options,
    pool: &Pool,
    record: &Arc<Record>,
    mut dice: Dice,
    lines: &mut Vec<Line>,
) -> Result<()> {
    let control = Fault::control();
    one(&[&control], scenario, pool, record, &mut dice, lines).await?;
    for fault in &scenario.fault {
        one(&[fault], scenario, pool, record, &mut dice, lines).await?;
    }
    let Some(mix) = &scenario.mix else { return Ok(()) };
    let began = Instant::now();
    let mut done = 0;
    while options.time.map_or(done < mix.count, |time| began.elapsed() < time) {
        let Some(first) = dice.pick(&mix.faults) else { break };
        let second = second(mix, first, &mut dice);
        let both: Vec<&Fault> = std::iter::once(first).chain(second).collect();
        one(&both, scenario, pool, record, &mut dice, lines).await?;
        done += 1;
    }
    Ok(())
}

/// A companion of another role, so that neither promise is void: no two shards, no two sets of coordinators.
fn second<'a>(mix: &'a Mix, first: &Fault, dice: &mut Dice) -> Option<&'a Fault> {
    if !dice.percent(mix.pairs_percent) || first.comes_alone() {
        return None;
    }
    let fits = |other: &&Fault| other.role().is_some() && other.role() != first.role() && !other.comes_alone();
    let others: Vec<&Fault> = mix.faults.iter().filter(fits).collect();
    dice.pick(&others).copied()
}

/// Injects (two faults at once), heals, waits until all is well, and looks at what clients met.
async fn one(
    faults: &[&Fault],
    scenario: &Scenario,
    pool: &Pool,
    record: &Arc<Record>,
    dice: &mut Dice,
    lines: &mut Vec<Line>,
) -> Result<()> {
    let before = record.violation_count();
    let counts = Counts::of(record);
    take_longest(record);
    let began = Instant::now();
    let (mut first, mut second) = (dice.fork(1), dice.fork(2));
    dice.next();
    let injected: Vec<Injected> = match faults {
        [a, b] => {
            let (a, b) = tokio::join!(a.inject(pool, record, &mut first), b.inject(pool, record, &mut second));
            vec![a?, b?]
        }
        [a] => vec![a.inject(pool, record, &mut first).await?],
        _ => Vec::new(),
    };
    for injected in &injected {
        injected.heal(pool)?;
    }
    let held = began.elapsed();
    let healed = pool
        .wait_healthy(scenario.bounds.heal)
        .await
        .context("after the fault")?;
    sleep(QUIET).await;
    let longest = take_longest(record);
    let text: Vec<&str> = injected.iter().map(|i| i.text.as_str()).collect();
    let line = Line {
        fault: text.join(" + "),
        held,
        healed,
        write_gap: longest.write_gap,
        get: longest.get,
        set: longest.set,
        own_lag: longest.own_lag,
        unknown_writes: record.unknown_writes.get() - counts.unknown,
        hits: record.get_hits.get() - counts.hits,
        misses: record.get_misses.get() - counts.misses,
        violations: 0,
    };
    record.note(format!("healthy {} ms after: {}", healed.as_millis(), line.numbers()));
    bounds(&line, faults, &scenario.bounds, scenario.load.metadata > 0, record);
    rules(pool, record).await;
    let violations = record.violation_count() - before;
    lines.push(Line { violations, ..line });
    Ok(())
}

/// Bounds on waiting; what the machine itself stood still is not the pool's.
fn bounds(line: &Line, faults: &[&Fault], bounds: &Bounds, writers: bool, record: &Record) {
    let hold = |which: fn(&Fault) -> bool| {
        if faults.iter().any(|f| which(f)) {
            line.held
        } else {
            Duration::ZERO
        }
    };
    let gap = bounds.write_gap + hold(Fault::stops_quorum) + line.own_lag;
    if writers && line.write_gap > gap {
        record.violation(format!(
            "bound: no write was acknowledged for {} ms",
            line.write_gap.as_millis()
        ));
    }
    let stall = bounds.stall + hold(Fault::hits_clients) + line.own_lag;
    for (what, took) in [("GET", line.get), ("SET", line.set)] {
        if took > stall {
            record.violation(format!("bound: a {what} took {} ms", took.as_millis()));
        }
    }
}

/// Counters of violations, panics, and whether everybody counts the same.
async fn rules(pool: &Pool, record: &Record) {
    let deadline = Instant::now() + AGREE_WITHIN;
    while let Err(text) = agreement(pool).await {
        if Instant::now() > deadline {
            record.violation(format!("O41: after {AGREE_WITHIN:?} {text:#}"));
            break;
        }
        sleep(Duration::from_millis(200)).await;
    }
    for at in 0..pool.members.len() {
        let name = &pool.members[at].name;
        match pool.metrics(at).await {
            Ok(metrics) => {
                for violation in metrics.violations() {
                    record.violation(format!("{name} counts {violation}"));
                }
            }
            Err(error) => record.violation(format!("{name}: {error:#}")),
        }
    }
    for panic in panics(pool) {
        record.violation(panic);
    }
}

/// In a settled pool all count the same: one leader that has every shard's session, one epoch everywhere, and as many
/// complete copies at the shards as the coordinators say.
async fn agreement(pool: &Pool) -> Result<()> {
    let pool_label = "pool=\"default\"";
    let (mut leaders, mut sessions, mut held) = (0.0, 0.0, 0.0);
    let (mut epochs, mut slots) = (Vec::new(), Vec::new());
    for at in 0..pool.members.len() {
        let metrics = pool.metrics(at).await?;
        if pool.members[at].role == Role::Coordinator {
            leaders += metrics.sum("kvpool_coordinator_is_leader", &[]);
            sessions += metrics.sum("kvpool_coordinator_sessions", &[]);
            epochs.push(metrics.sum("kvpool_coordinator_slot_map_epoch", &[pool_label]));
            slots.push(metrics.sum("kvpool_coordinator_slots", &[pool_label, "state=\"in_sync\""]));
        } else {
            epochs.push(metrics.sum("kvpool_shard_epoch", &[]));
            held += metrics.sum("kvpool_shard_slots", &["state=\"in_sync\""]);
        }
    }
    let same = |numbers: &[f64]| numbers.windows(2).all(|pair| pair.first() == pair.last());
    ensure!(leaders == 1.0, "{leaders} members lead");
    ensure!(
        sessions == pool.of(Role::Shard).len() as f64,
        "coordinators count {sessions} sessions of shards"
    );
    ensure!(same(&epochs), "epochs differ: {epochs:?}");
    ensure!(same(&slots), "coordinators count {slots:?} complete slots");
    let expected = slots.first().copied().unwrap_or(0.0) * f64::from(pool.factor);
    ensure!(
        held == expected,
        "shards hold {held} complete copies, coordinators count {expected}"
    );
    Ok(())
}

fn panics(pool: &Pool) -> Vec<String> {
    let of = |member: &crate::pool::Member| Some(format!("{} panicked: {}", member.name, member.proc.panic()?));
    pool.members.iter().filter_map(of).collect()
}

struct Counts {
    unknown: u64,
    hits: u64,
    misses: u64,
}

impl Counts {
    fn of(record: &Record) -> Self {
        Counts {
            unknown: record.unknown_writes.get(),
            hits: record.get_hits.get(),
            misses: record.get_misses.get(),
        }
    }
}

struct LongestOf {
    write_gap: Duration,
    get: Duration,
    set: Duration,
    own_lag: Duration,
}

fn take_longest(record: &Record) -> LongestOf {
    LongestOf {
        write_gap: record.writes.take(),
        get: record.gets.take(),
        set: record.sets.take(),
        own_lag: record.own_lag.take(),
    }
}

/// The clients of a run.
struct Clients {
    stop_writers: CancellationToken,
    stop_watchers: CancellationToken,
    workers: Vec<JoinHandle<()>>,
    watchers: Vec<JoinHandle<Seen>>,
    lag: JoinHandle<()>,
    history: Arc<Mutex<Vec<Op>>>,
    log: Arc<Mutex<Log>>,
}

impl Clients {
    fn start(scenario: &Scenario, pool: &Pool, record: &Arc<Record>, dice: &Dice) -> Self {
        let (stop_writers, stop_watchers) = (CancellationToken::new(), CancellationToken::new());
        let (history, log): (Arc<Mutex<Vec<Op>>>, Arc<Mutex<Log>>) = Default::default();
        let watchers = (0..scenario.load.watchers).map(|number| {
            let watcher = Watcher {
                number,
                client: pool.client(),
                record: record.clone(),
                log: log.clone(),
                dice: dice.fork(1000 + number),
                stop: stop_watchers.clone(),
            };
            tokio::spawn(watcher.run())
        });
        let watchers = watchers.collect();
        let mut workers = Vec::new();
        for number in 0..scenario.load.metadata {
            let client = MetadataClient {
                client: pool.client(),
                record: record.clone(),
                history: history.clone(),
                dice: dice.fork(2000 + number),
                stop: stop_writers.clone(),
            };
            workers.push(tokio::spawn(client.run()));
        }
        let proxies = pool.of(Role::Proxy);
        for (number, at) in (0..scenario.load.blocks).zip(proxies.iter().cycle()) {
            let client = BlockClient {
                number,
                clients: scenario.load.blocks,
                address: pool.members[*at].address.clone(),
                record: record.clone(),
                dice: dice.fork(3000 + number),
                stop: stop_writers.clone(),
            };
            workers.push(tokio::spawn(client.run()));
        }
        let lag = record.clone();
        Clients {
            stop_writers,
            stop_watchers,
            workers,
            watchers,
            lag: tokio::spawn(async move { lag.watch_own_lag().await }),
            history,
            log,
        }
    }

    /// Ends the clients and judges what they saw.
    async fn finish(mut self, pool: &Pool, record: &Record) -> End {
        self.stop_writers.cancel();
        for worker in std::mem::take(&mut self.workers) {
            if let Err(error) = worker.await {
                record.violation(format!("a client failed: {error}"));
            }
        }
        let mut end = End::default();
        if !self.watchers.is_empty() {
            self.await_last(pool, record).await;
        }
        self.stop_watchers.cancel();
        let mut seen = Vec::new();
        for watcher in self.watchers {
            match watcher.await {
                Ok(one) => seen.push(one),
                Err(error) => record.violation(format!("a watcher failed: {error}")),
            }
        }
        self.lag.abort();
        let (ops, mut log) = (self.history.lock(), self.log.lock());
        log.tidy();
        let verdict = history::check(&ops, &log);
        let missed = seen.iter().flat_map(|one| log.missed(&one.ranges, &one.changes));
        for text in verdict.violations.iter().cloned().chain(missed) {
            record.violation(text);
        }
        end.operations = ops.len();
        end.compared = verdict.compared;
        end.not_compared = verdict.not_compared;
        end.changes = log.change_count();
        end.resumed = seen.iter().map(|one| one.resumed).sum();
        end.relisted = seen.iter().map(|one| one.relisted).sum();
        end
    }

    /// One last write that watchers wait for: who has seen it has seen all before.
    async fn await_last(&self, pool: &Pool, record: &Record) {
        let written = metadata::write_last(&pool.client(), record, &self.history).await;
        let revision = match written {
            Ok(revision) => revision,
            Err(error) => return record.violation(format!("the last write failed: {error:#}")),
        };
        let deadline = Instant::now() + Duration::from_secs(30);
        while !self.log.lock().has(metadata::LAST_KEY, revision) {
            if Instant::now() > deadline {
                return record.violation("no watcher was given the last write within 30 s");
            }
            sleep(Duration::from_millis(50)).await;
        }
    }
}

/// What the judgement at the end rests on.
#[derive(Clone, Debug, Default)]
pub struct End {
    /// Operations of metadata clients (a list counts once per register).
    pub operations: usize,
    pub compared: usize,
    pub not_compared: usize,
    /// Changes that watchers were given.
    pub changes: usize,
    pub resumed: u64,
    pub relisted: u64,
}
