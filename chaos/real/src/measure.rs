//! Failover figures: the same fault many times, and how long clients were kept waiting each time.
//!
//! Always with a control without a fault, and with how late the harness itself was woken, so that a starved machine shows.

use crate::dice::Dice;
use crate::load::blocks::BlockClient;
use crate::load::writer::Writer;
use crate::pool::{Pool, Role, Shape};
use crate::record::Record;
use crate::scenario::fault::{Fault, Kind};
use anyhow::{Context, Result, ensure};
use kvpool_client::Timing;
use std::fmt::Write as _;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;

const WRITERS: u32 = 3;
const READERS: u64 = 3;
const WITHIN: Duration = Duration::from_secs(120);
/// Between rounds.
const QUIET: Duration = Duration::from_secs(1);
/// Keys are written and read for this long before anything is measured.
const WARM_UP: Duration = Duration::from_secs(10);

/// What is measured, and its bars (median, worst) in milliseconds; 0 = none.
const CASES: [(Kind, &str, Duration, [u128; 2]); 6] = [
    (Kind::None, "nobody", Duration::from_secs(2), [0, 0]),
    (Kind::Kill, "leader", Duration::from_secs(3), [1000, 1500]),
    (Kind::Freeze, "leader", Duration::from_secs(3), [1000, 1500]),
    (Kind::Terminate, "leader", Duration::from_secs(2), [0, 150]),
    (Kind::Kill, "shard", Duration::from_secs(3), [0, 500]),
    (Kind::Freeze, "shard", Duration::from_secs(5), [0, 1000]),
];

/// Measures everything `rounds` times with `normal` timing; the table.
///
/// # Errors
/// The pool does not start or heal, or a promise was broken.
pub async fn measure(program: &Path, rounds: u32, seed: u64) -> Result<String> {
    let shape = Shape {
        coordinators: 3,
        shards: 3,
        proxies: 1,
        factor: 2,
        memory: 128 << 20,
        timing: Timing::Normal,
    };
    let before = load();
    let pool = Pool::start(program, &shape, seed, WITHIN).await?;
    let record = Arc::new(Record::new(false));
    let lag = record.clone();
    let lag = tokio::spawn(async move { lag.watch_own_lag().await });
    let mut table = String::from(
        "| fault | clients | times | median ms | worst ms | bar (median, worst) | result | own lag ms |\n\
         | --- | --- | --- | --- | --- | --- | --- | --- |\n",
    );
    for role in [Role::Coordinator, Role::Shard] {
        let stop = CancellationToken::new();
        start_clients(role, &pool, &record, seed, &stop);
        sleep(WARM_UP).await;
        for (kind, on, hold, bar) in CASES {
            let fault = Fault::new(kind, on, hold);
            if fault.role().is_some_and(|hit| hit != role) {
                continue;
            }
            let figures = rounds_of(&fault, rounds, &pool, &record, role, seed).await?;
            table += &figures.row(&fault.name(), role, bar);
            println!("{}", table.lines().last().unwrap_or_default());
        }
        stop.cancel();
    }
    lag.abort();
    let killed = pool.stop().await;
    ensure!(killed.is_empty(), "did not end after SIGTERM: {killed:?}");
    ensure!(
        record.violation_count() == 0,
        "promises were broken:\n{}",
        record.timeline()
    );
    let _ = write!(
        table,
        "\n`kvpool-chaos-run measure --rounds {rounds}`, seed {seed}; 3 coordinators, 3 shards, factor 2, `normal` timing; \
         1-minute load average {before} before, {} after.\n",
        load()
    );
    Ok(table)
}

fn start_clients(role: Role, pool: &Pool, record: &Arc<Record>, seed: u64, stop: &CancellationToken) {
    if role == Role::Coordinator {
        for number in 0..WRITERS {
            let writer = Writer {
                number,
                endpoints: pool.endpoints(),
                token: pool.token.clone(),
                timing: pool.timing,
                ids: pool.client(),
                record: record.clone(),
                stop: stop.clone(),
            };
            let record = record.clone();
            tokio::spawn(async move {
                if let Err(error) = writer.run().await {
                    record.violation(format!("{error:#}"));
                }
            });
        }
        return;
    }
    let addresses = pool
        .of(Role::Proxy)
        .into_iter()
        .map(|at| pool.members[at].address.clone());
    for address in addresses {
        for number in 0..READERS {
            let client = BlockClient {
                number,
                clients: READERS,
                address: address.clone(),
                record: record.clone(),
                dice: Dice::new(seed).fork(number),
                stop: stop.clone(),
            };
            tokio::spawn(client.run());
        }
    }
}

async fn rounds_of(
    fault: &Fault,
    rounds: u32,
    pool: &Pool,
    record: &Arc<Record>,
    role: Role,
    seed: u64,
) -> Result<Figures> {
    let mut figures = Figures::default();
    for round in 0..rounds {
        let mut dice = Dice::new(seed).fork(u64::from(round));
        sleep(QUIET).await;
        for longest in [&record.gets, &record.sets, &record.own_lag] {
            longest.take();
        }
        record.writes.take();
        let injected = fault.inject(pool, record, &mut dice).await?;
        // While the fault lasts: what healing costs is not failover.
        let took = match role {
            Role::Coordinator => record.writes.take(),
            _ => record.gets.take().max(record.sets.take()),
        };
        figures.took.push(took);
        figures.own_lag = figures.own_lag.max(record.own_lag.take());
        injected.heal(pool)?;
        pool.wait_healthy(WITHIN).await.context("after the fault")?;
    }
    figures.took.sort();
    Ok(figures)
}

#[derive(Default)]
struct Figures {
    took: Vec<Duration>,
    own_lag: Duration,
}

impl Figures {
    fn row(&self, fault: &str, role: Role, [median_bar, worst_bar]: [u128; 2]) -> String {
        let at = |n: usize| self.took.get(n).map_or(0, Duration::as_millis);
        let (median, worst) = (at(self.took.len() / 2), at(self.took.len().saturating_sub(1)));
        let met = (median_bar == 0 || median <= median_bar) && (worst_bar == 0 || worst <= worst_bar);
        let bar = |ms: u128| if ms == 0 { "-".to_owned() } else { format!("≤ {ms}") };
        let result = match (median_bar + worst_bar, met) {
            (0, _) => "control",
            (_, true) => "PASS",
            _ => "MISSED",
        };
        let clients = match role {
            Role::Coordinator => "longest time between two acknowledged writes",
            _ => "longest GET or SET",
        };
        format!(
            "| {fault} | {clients} | {} | {median} | {worst} | {}, {} | {result} | {} |\n",
            self.took.len(),
            bar(median_bar),
            bar(worst_bar),
            self.own_lag.as_millis()
        )
    }
}

/// The 1-minute load average.
fn load() -> String {
    let text = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    text.split(' ').next().unwrap_or_default().to_owned()
}
