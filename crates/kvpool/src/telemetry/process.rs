//! Metrics of the process itself, read from /proc at each scrape, under the names every Prometheus client uses.

use metrics::{Unit, counter, describe_counter, describe_gauge, gauge};

pub const BUILD_INFO: &str = "kvpool_build_info";
const RESIDENT_BYTES: &str = "process_resident_memory_bytes";
const OPEN_FDS: &str = "process_open_fds";
const THREADS: &str = "process_threads";
const CPU_SECONDS: &str = "process_cpu_seconds_total";
const START_SECONDS: &str = "process_start_time_seconds";

/// Describes the metrics of this module.
pub fn describe() {
    describe_gauge!(BUILD_INFO, "Always 1; the labels say what runs");
    describe_gauge!(RESIDENT_BYTES, Unit::Bytes, "Resident memory of the process");
    describe_gauge!(OPEN_FDS, "Open file descriptors");
    describe_gauge!(THREADS, "Threads of the process");
    describe_counter!(CPU_SECONDS, Unit::Seconds, "User and system CPU time, whole seconds");
    describe_gauge!(START_SECONDS, Unit::Seconds, "When the process started, Unix time");
}

/// Reads /proc and sets the metrics. What cannot be read keeps its last value.
pub fn collect() {
    if let Some(now) = read() {
        gauge!(RESIDENT_BYTES).set(now.resident_bytes as f64);
        gauge!(OPEN_FDS).set(now.open_fds as f64);
        gauge!(THREADS).set(now.threads as f64);
        counter!(CPU_SECONDS).absolute(now.cpu_seconds);
        gauge!(START_SECONDS).set(now.start_seconds as f64);
    }
}

struct Process {
    resident_bytes: u64,
    open_fds: usize,
    threads: u64,
    cpu_seconds: u64,
    start_seconds: u64,
}

fn read() -> Option<Process> {
    let page = rustix::param::page_size() as u64;
    let ticks = rustix::param::clock_ticks_per_second().max(1);
    let statm = std::fs::read_to_string("/proc/self/statm").ok()?;
    let stat = std::fs::read_to_string("/proc/self/stat").ok()?;
    // The command name stands in parentheses and may hold anything: fields are counted from behind it (proc(5)).
    let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
    let field = |n: usize| fields.get(n).and_then(|text| text.parse::<u64>().ok());
    let boot: u64 = std::fs::read_to_string("/proc/stat")
        .ok()?
        .lines()
        .find_map(|line| line.strip_prefix("btime "))?
        .trim()
        .parse()
        .ok()?;
    Some(Process {
        resident_bytes: statm.split_whitespace().nth(1)?.parse::<u64>().ok()? * page,
        open_fds: std::fs::read_dir("/proc/self/fd").ok()?.count().saturating_sub(1),
        threads: field(17)?,
        cpu_seconds: (field(11)? + field(12)?) / ticks,
        start_seconds: boot + field(19)? / ticks,
    })
}

#[cfg(test)]
mod tests {
    #[test]
    fn proc_is_read() {
        let p = super::read().unwrap();
        assert!(p.resident_bytes > 100_000 && p.open_fds > 2 && p.threads >= 1);
        assert!(p.start_seconds > 1_500_000_000);
    }
}
