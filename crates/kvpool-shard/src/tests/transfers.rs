//! Slot transfer: copies that come to be while clients read, write and delete.

use super::*;
use crate::transfer::Transfer;
use parking_lot::Mutex;
use std::collections::BTreeMap;

/// Starts the transfer of a node; returns the slots it has reported, by epoch.
fn transferring(node: &Node) -> Arc<Mutex<BTreeMap<u16, u64>>> {
    let reported: Arc<Mutex<BTreeMap<u16, u64>>> = Arc::default();
    let into = Arc::clone(&reported);
    let report = Box::new(move |epoch, ranges: &[SlotRange]| {
        for range in ranges {
            for slot in range.first..=range.last {
                into.lock().insert(slot as u16, epoch);
            }
        }
    });
    tokio::spawn(Transfer::new(Arc::clone(&node.router), report).run(node.stop.clone()));
    reported
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_filling_copy_ends_with_every_block_and_every_removal() {
    let nodes = [Node::start(1).await, Node::start(2).await];
    let proxy = Proxy::start();
    let all = addresses(&nodes);
    let before = map_of(1, &all, &[(1, true)]);
    nodes.iter().for_each(|node| assert!(node.router.adopt(&before)));
    proxy.router.adopt(&before);
    for at in 0..300_u64 {
        let len = if at % 10 == 0 {
            MIB / 4 + at as usize
        } else {
            at as usize * 7
        };
        put(&proxy.router, &format!("old-{at}"), &value(at, len)).await;
    }
    let reported = transferring(&nodes[1]);
    // Writers, overwriters and removers go on while the map changes and the copy fills.
    let writer = {
        let router = Arc::clone(&proxy.router);
        tokio::spawn(async move {
            for at in 0..300_u64 {
                match at % 3 {
                    0 => drop(put(&router, &format!("new-{at}"), &value(at + 1000, 5000)).await),
                    1 => drop(put(&router, &format!("old-{at}"), &value(at + 2000, 9000)).await),
                    _ => drop(router.del(&router.op(Front::Resp), &key(&format!("old-{at}"))).await),
                }
                tokio::task::yield_now().await;
            }
        })
    };
    let filling = map_of(2, &all, &[(1, true), (2, false)]);
    for node in &nodes {
        // False when it has fetched the map from the other one already.
        node.router.adopt(&filling);
    }
    writer.await.unwrap();
    eventually("every slot is reported", || reported.lock().len() == usize::from(SLOTS)).await;
    assert!(reported.lock().values().all(|epoch| *epoch == 2));
    eventually("no gap is left", || nodes[0].router.routing().peers[&2].gaps.len() == 0).await;
    let (from, to) = (nodes[0].router.store().unwrap(), nodes[1].router.store().unwrap());
    assert_eq!(from.len(), to.len());
    for slot in 0..SLOTS {
        let (a, b) = (from.slot_keys(slot, None, 1000), to.slot_keys(slot, None, 1000));
        assert_eq!(a.entries, b.entries, "the same writes of the same keys in slot {slot}");
        for entry in b.entries {
            let (a, b) = (
                nodes[0].router.peek(&entry.key).unwrap(),
                nodes[1].router.peek(&entry.key).unwrap(),
            );
            assert!(b.verify());
            assert_eq!(
                a.slices().collect::<Vec<_>>().concat(),
                b.slices().collect::<Vec<_>>().concat()
            );
        }
    }
    for at in (2..300).step_by(3) {
        assert!(
            nodes[1].router.peek(format!("old-{at}").as_bytes()).is_none(),
            "a removal is not undone"
        );
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn with_nobody_to_pull_from_a_copy_is_complete_at_once() {
    let node = Node::start(1).await;
    let reported = transferring(&node);
    assert!(node.router.adopt(&map_of(1, &[(1, node.address)], &[(1, false)])));
    eventually("reported", || reported.lock().len() == usize::from(SLOTS)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_source_that_knows_an_older_map_is_not_pulled_from_yet() {
    let nodes = [Node::start(1).await, Node::start(2).await];
    let all = addresses(&nodes);
    let before = map_of(1, &all, &[(1, true)]);
    nodes.iter().for_each(|node| assert!(node.router.adopt(&before)));
    put(&nodes[0].router, "k", b"v").await;
    let reported = transferring(&nodes[1]);
    // Only the filling side has the new map; asking makes the source fetch it, from then on it sends new writes.
    assert!(nodes[1].router.adopt(&map_of(2, &all, &[(1, true), (2, false)])));
    eventually("reported", || reported.lock().len() == usize::from(SLOTS)).await;
    assert_eq!(nodes[0].router.known().epoch, 2);
    assert!(nodes[1].router.peek(b"k").is_some());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_source_that_dies_is_waited_for_until_the_map_says_otherwise() {
    let mut nodes = [Node::start(1).await, Node::start(2).await];
    let all = addresses(&nodes);
    nodes[0].kill().await;
    let reported = transferring(&nodes[1]);
    assert!(nodes[1].router.adopt(&map_of(1, &all, &[(1, true), (2, false)])));
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert!(reported.lock().is_empty(), "an unreachable source is no empty source");
    assert!(nodes[1].router.adopt(&map_of(2, &all, &[(2, false)])));
    eventually("reported", || reported.lock().len() == usize::from(SLOTS)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn slots_that_leave_the_list_are_dropped_and_come_back_empty() {
    let (nodes, proxy) = cluster(2, &[(1, true), (2, true)]).await;
    put(&proxy.router, "k", b"v").await;
    let all = addresses(&nodes);
    nodes[1].router.adopt(&map_of(2, &all, &[(1, true)]));
    assert!(nodes[1].router.peek(b"k").is_none());
    assert_eq!(nodes[1].router.key_count(), 0);
    expect(&nodes[1].router, "k", b"v", Path::Forwarded).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_copy_that_went_and_came_back_in_epochs_never_seen_begins_empty() {
    let nodes = [Node::start(1).await, Node::start(2).await];
    let all = addresses(&nodes);
    let filling = [(1, true), (2, false)];
    nodes
        .iter()
        .for_each(|node| assert!(node.router.adopt(&map_of(1, &all, &filling))));
    put(&nodes[0].router, "gone", b"v").await;
    put(&nodes[0].router, "kept", b"w").await;
    let reported = transferring(&nodes[1]);
    eventually("reported", || reported.lock().len() == usize::from(SLOTS)).await;
    assert!(nodes[1].router.peek(b"gone").is_some());
    // Epoch 2, in which the second node holds nothing and a block is removed, reaches the first node only.
    assert!(nodes[0].router.adopt(&map_of(2, &all, &[(1, true)])));
    nodes[0]
        .router
        .del(&nodes[0].router.op(Front::Resp), &key("gone"))
        .await;
    let mut again = SlotMap::clone(&map_of(3, &all, &filling));
    for shard in again.shards.iter_mut().filter(|shard| shard.number == 2) {
        shard.dropped_at = 2;
    }
    let again = Arc::new(again);
    for node in nodes.iter().rev() {
        node.router.adopt(&again);
    }
    let since = |epoch: u64| reported.lock().values().filter(|at| **at >= epoch).count();
    eventually("reported again", || since(3) == usize::from(SLOTS)).await;
    assert!(nodes[1].router.peek(b"gone").is_none(), "a removed block came back");
    assert!(nodes[1].router.peek(b"kept").is_some());
}
