//! The watch: ordered, nothing lost or doubled over leader changes, relists.

use super::{TestCluster, eventually};
use kvpool_client::{Kind, WatchFilter, WatchItem, WatchStream};
use kvpool_state::command::{Command, ConfigurePool};
use kvpool_state::feed::MAX_EVENTS;
use kvpool_state::records::Record;
use std::collections::BTreeMap;

fn pools() -> WatchFilter {
    WatchFilter {
        kinds: vec![Kind::Pool],
        pool: String::new(),
    }
}

/// Follows until pool `end` appears; gives the relist's revision and every change as (revision, pool, factor).
async fn follow(mut stream: WatchStream) -> (u64, Vec<(u64, String, u32)>) {
    let (mut began, mut seen) = (0, Vec::new());
    loop {
        match stream.next().await.unwrap() {
            WatchItem::Relisted { revision, .. } => {
                assert_eq!(began, 0, "a watch that keeps up relists once");
                began = revision;
            }
            WatchItem::Changes { revision, events } => {
                for event in events {
                    assert!(event.revision <= revision);
                    if let Some(Record::Pool(pool)) = event.record {
                        seen.push((event.revision, pool.name.clone(), pool.factor));
                        if pool.name == "end" {
                            return (began, seen);
                        }
                    }
                }
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_is_lost_or_doubled_over_leader_changes() {
    let mut cluster = TestCluster::start(3, 2).await;
    let client = cluster.client();
    let watchers: Vec<_> = (0..4).map(|_| tokio::spawn(follow(client.watch(pools(), 0)))).collect();
    let mut written = Vec::new();
    for round in 0..3u32 {
        for i in 0..20u32 {
            let (pool, factor) = (format!("p{}", i % 7), 1 + (i / 7 + round) % 4);
            let response = client.configure_pool(&pool, factor).await.unwrap();
            written.push((response.revision, pool, factor));
        }
        let leader = cluster.leader().await;
        cluster.kill(leader);
        let response = client.configure_pool("mid", 1 + round).await.unwrap();
        written.push((response.revision, "mid".into(), 1 + round));
        cluster.start_member(leader).await;
        cluster.wait_ready().await;
    }
    let response = client.configure_pool("end", 1).await.unwrap();
    written.push((response.revision, "end".into(), 1));
    for watcher in watchers {
        let (began, seen) = watcher.await.unwrap();
        assert!(began > 0);
        assert!(seen.windows(2).all(|w| w[0].0 < w[1].0), "in order, once: {seen:?}");
        // A write that repeats the present factor changes nothing and has no event.
        let mut factors = BTreeMap::new();
        let changes = written
            .iter()
            .filter(|(_, pool, factor)| factors.insert(pool.clone(), *factor) != Some(*factor));
        let expected: Vec<_> = changes.filter(|(revision, _, _)| *revision > began).cloned().collect();
        assert_eq!(seen, expected);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_watch_resumes_by_revision_and_relists_when_too_far_behind() {
    let cluster = TestCluster::start(1, 2).await;
    let client = cluster.client();
    let first = client.configure_pool("a", 1).await.unwrap().revision;
    let second = client.configure_pool("a", 2).await.unwrap().revision;
    let mut resumed = client.watch(pools(), first);
    let item = resumed.next().await.unwrap();
    assert!(
        matches!(&item, WatchItem::Changes { revision, events } if *revision == second && events.len() == 1),
        "{item:?}"
    );
    drop(resumed);

    let mut other = client.watch(
        WatchFilter {
            kinds: vec![Kind::Pool, Kind::SlotMap],
            pool: "b".into(),
        },
        first,
    );
    let revision = client.configure_pool("b", 3).await.unwrap().revision;
    let item = other.next().await.unwrap();
    assert!(
        matches!(&item, WatchItem::Changes { events, .. } if events.len() == 2),
        "only pool b: {item:?}"
    );
    drop(other);

    // More changes than the ring holds: the reader of old is told everything anew.
    let core = cluster.running(1).core.clone();
    let mut factor = 0;
    while core.replica.read(|s| s.revision()) < revision + MAX_EVENTS as u64 {
        factor = factor % 4 + 1;
        let burst = (0..400u32).map(|i| {
            let pool = ConfigurePool {
                pool: "c".into(),
                factor: (factor + i) % 4 + 1,
            };
            let core = core.clone();
            async move { core.propose(&Command::ConfigurePool(pool), None).await }
        });
        futures::future::join_all(burst).await;
    }
    let mut late = client.watch(pools(), first);
    let item = late.next().await.unwrap();
    let WatchItem::Relisted { records, revision } = item else {
        panic!("{item:?}")
    };
    assert_eq!(records.len(), 4);
    client.configure_pool("d", 1).await.unwrap();
    let item = eventually("the watch goes on behind the relist", async || late.next().await).await;
    assert!(
        matches!(&item, WatchItem::Changes { events, .. } if events.iter().all(|e| e.revision > revision)),
        "{item:?}"
    );
}
