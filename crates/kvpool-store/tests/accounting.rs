//! The ledger against the process: resident memory stays within the limit plus the stated overhead, and what an
//! entry is charged covers what it costs. One test, alone in its process.

mod common;

use common::{check_empty, check_limit};
use kvpool_store::{PutSpec, Store};

const MIB: u64 = 1 << 20;

fn resident() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").expect("procfs");
    let pages: u64 = statm
        .split(' ')
        .nth(1)
        .and_then(|n| n.parse().ok())
        .expect("second field");
    pages * 4096
}

fn fill(store: &Store, from: u64, count: u64, len: u64) {
    for i in from..from + count {
        let key = format!("meta-llama/Llama-3.1-8B-Instruct@01000100@0@{i:064x}");
        let spec = PutSpec {
            len,
            write_id: i,
            ..PutSpec::default()
        };
        let mut writer = store.reserve(key.as_bytes(), spec, 0).expect("old blocks make room");
        while writer.remaining() > 0 {
            let spare = writer.spare();
            spare.fill(1);
            let n = spare.len();
            writer.advance(n);
        }
        writer.commit(0).expect("complete");
    }
}

#[test]
fn o19_resident_memory_stays_within_the_limit() {
    const LIMIT: u64 = 128 * MIB;
    let before = resident();
    let store = Store::new(LIMIT).expect("a mapping");
    let bound = LIMIT + LIMIT / 20 + 8 * MIB;
    let check = |what: &str| {
        check_limit(&store);
        let used = resident() - before;
        println!("{what}: {} MiB resident, {:?}", used / MIB, store.stats().memory);
        assert!(used <= bound, "{what}: {used} bytes resident, bound {bound}");
    };
    while store.prefault_step(8 << 20) > 0 {}
    check("prefaulted");
    fill(&store, 0, 300_000, 200);
    check("small blocks");
    fill(&store, 1_000_000, 200, 2 * MIB);
    store.prefault_step(1);
    check("big blocks after small ones");
    fill(&store, 2_000_000, 300_000, 900);
    check("small blocks after big ones");
    fill(&store, 3_000_000, 60_000, 70_000);
    store.prefault_step(1);
    check("mid-sized blocks");
    store.clear();
    check_empty(&store);
}
