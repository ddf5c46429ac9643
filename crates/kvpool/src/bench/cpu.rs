//! CPU time of the client's threads (its own clock) and of servers (by pid), in nanoseconds.

use std::collections::HashMap;
use std::fs;

/// CPU time of the calling thread.
pub fn of_this_thread() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// CPU time of each thread of some processes at one moment.
pub struct Snapshot(HashMap<(u32, String), u64>);

impl Snapshot {
    /// Reads `/proc/<pid>/task/*/schedstat`, whose first field is the thread's time on CPU. A process that is gone
    /// counts nothing.
    pub fn take(pids: &[u32]) -> Self {
        let mut times = HashMap::new();
        for &pid in pids {
            let Ok(tasks) = fs::read_dir(format!("/proc/{pid}/task")) else {
                continue;
            };
            for task in tasks.flatten() {
                let text = fs::read_to_string(task.path().join("schedstat")).unwrap_or_default();
                let first = text.split_whitespace().next();
                if let Some(ns) = first.and_then(|ns| ns.parse().ok()) {
                    let name = task.file_name().to_string_lossy().into_owned();
                    times.insert((pid, name), ns);
                }
            }
        }
        Self(times)
    }

    /// CPU time since `earlier`. What threads that ended in between used since then is lost; the servers measured here
    /// keep their threads.
    pub fn since(&self, earlier: &Self) -> u64 {
        let spent = |(task, now): (&(u32, String), &u64)| now.saturating_sub(earlier.0.get(task).copied().unwrap_or(0));
        self.0.iter().map(spent).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_of_this_process_is_seen() {
        let pid = [std::process::id()];
        let (before, thread) = (Snapshot::take(&pid), of_this_thread());
        let mut x = 1u64;
        while of_this_thread() - thread < 30_000_000 {
            x = std::hint::black_box(x.wrapping_mul(3));
        }
        assert!(Snapshot::take(&pid).since(&before) > 10_000_000);
        assert_eq!(Snapshot::take(&[]).since(&before), 0);
    }
}
