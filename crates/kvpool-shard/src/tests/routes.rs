//! What happens while all is well: forwarding, replication, conditions, deletion, expiry, refusals.

use super::*;
use crate::ops::{DropReason, Ttl};
use crate::usual::Lengths;
use kvpool_store::Usual;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn blocks_of_every_size_are_stored_twice_and_read_through_everybody() {
    let (nodes, proxy) = cluster(3, &[(1, true), (2, true)]).await;
    for (seed, len) in [0, 1, 28, 4096, PIECE - 1, PIECE, PIECE + 1, MIB, 5 * MIB + 7]
        .into_iter()
        .enumerate()
    {
        for (at, writer) in [&nodes[0].router, &nodes[1].router, &nodes[2].router, &proxy.router]
            .into_iter()
            .enumerate()
        {
            let name = format!("k{len}-{at}");
            let bytes = value(seed as u64 * 10 + at as u64, len);
            assert_eq!(put(writer, &name, &bytes).await, PutOutcome::Stored2, "{name}");
            expect(&nodes[0].router, &name, &bytes, Path::Local).await;
            expect(&nodes[1].router, &name, &bytes, Path::Forwarded).await;
            expect(&nodes[2].router, &name, &bytes, Path::Forwarded).await;
            expect(&proxy.router, &name, &bytes, Path::Forwarded).await;
            for node in &nodes[..2] {
                let copy = node.router.peek(name.as_bytes()).expect("both copies hold it");
                assert!(copy.verify());
                assert_eq!(copy.slices().collect::<Vec<_>>().concat(), bytes);
            }
            assert!(nodes[2].router.peek(name.as_bytes()).is_none());
        }
    }
    assert_eq!(proxy.router.staging().held_bytes(), 0);
    assert_eq!(nodes[2].router.staging().held_bytes(), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn exists_and_misses_carry_the_usual_length() {
    let (nodes, proxy) = cluster(2, &[(1, true), (2, true)]).await;
    let stored = "m@01000100@0@98efc76eafb06cfe";
    let absent = key("m@01000100@0@98efc76eafb06cff");
    put(&nodes[0].router, stored, &value(1, MIB)).await;
    assert!(exists(&proxy.router, stored).await);
    let op = proxy.router.op(Front::Resp);
    let fresh = Proxy::start();
    fresh
        .router
        .adopt(&map_of(1, &addresses(&nodes), &[(1, true), (2, true)]));
    match fresh.router.get(&fresh.router.op(Front::Resp), &absent).await {
        GetAnswer::Miss { reason, usual } => {
            assert_eq!(reason, MissReason::Absent);
            assert_eq!(
                usual,
                Usual::Size(MIB as u64),
                "a proxy that saw no SET learns it from the owner"
            );
        }
        GetAnswer::Hit { .. } => panic!("absent"),
    }
    let answer = proxy.router.exists(&op, &absent).await;
    assert!(answer.hit.is_none());
    assert_eq!(answer.usual, Usual::Size(MIB as u64));
}

#[test]
fn two_owners_with_two_lengths_make_a_prefix_mixed() {
    let lengths = Lengths::default();
    let name = b"m@01000100@0@98efc76eafb06cfe";
    assert_eq!(lengths.learn(name, Usual::Unknown, 0), Usual::Unknown);
    assert_eq!(lengths.learn(name, Usual::Size(10), 0), Usual::Size(10));
    assert_eq!(lengths.learn(name, Usual::Unknown, 1), Usual::Size(10));
    assert_eq!(lengths.learn(name, Usual::Size(20), 1), Usual::Mixed);
    assert_eq!(lengths.learn(b"no lmcache key", Usual::Size(1), 1), Usual::Unknown);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn conditions_and_expiry_said_after_the_value_hold_at_both_copies() {
    let (nodes, proxy) = cluster(2, &[(1, true), (2, true)]).await;
    for router in [&nodes[0].router, &proxy.router] {
        let name = format!("cond-{}", router.op(Front::Resp).request_id);
        let set = async |condition, ttl, bytes: &[u8]| {
            let mut sink = router
                .put(&router.op(Front::Resp), &key(&name), spec(bytes.len()))
                .await;
            sink.spare()[..bytes.len()].copy_from_slice(bytes);
            sink.advance(bytes.len()).await;
            sink.finish_with(ttl, condition).await
        };
        assert_eq!(set(Condition::IfPresent, None, b"x").await, PutOutcome::ConditionFailed);
        assert_eq!(set(Condition::IfAbsent, None, b"one").await, PutOutcome::Stored2);
        assert_eq!(
            set(Condition::IfAbsent, None, b"two").await,
            PutOutcome::ConditionFailed
        );
        expect(&nodes[0].router, &name, b"one", Path::Local).await;
        let long = Duration::from_secs(3600);
        assert_eq!(
            set(Condition::IfPresent, Some(long), b"three").await,
            PutOutcome::Stored2
        );
        for node in &nodes {
            let block = node.router.peek(name.as_bytes()).unwrap();
            assert_eq!(block.slices().collect::<Vec<_>>().concat(), b"three");
            assert!(block.expires_at_ms().is_some());
        }
        let op = router.op(Front::Resp);
        assert!(matches!(router.ttl(&op, &key(&name)).await, Ttl::Remaining(left) if left > long / 2));
        assert!(router.expire(&op, &key(&name), 2 * long).await);
        assert!(matches!(router.ttl(&op, &key(&name)).await, Ttl::Remaining(left) if left > long));
        assert_eq!(
            nodes[1].router.ttl_here(name.as_bytes()),
            nodes[1].router.ttl_here(name.as_bytes())
        );
        assert!(router.del(&op, &key(&name)).await);
        assert!(!router.del(&op, &key(&name)).await);
        assert_eq!(router.ttl(&op, &key(&name)).await, Ttl::NoKey);
        assert!(!router.expire(&op, &key(&name), long).await);
        assert!(nodes.iter().all(|node| node.router.peek(name.as_bytes()).is_none()));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_upload_that_ends_early_was_never_visible() {
    let (nodes, proxy) = cluster(2, &[(1, true), (2, true)]).await;
    for router in [&nodes[0].router, &proxy.router] {
        let mut sink = router.put(&router.op(Front::Lm), &key("torn"), spec(MIB)).await;
        for _ in 0..3 {
            let n = sink.spare().len();
            sink.advance(n).await;
        }
        drop(sink);
        assert!(matches!(get(router, "torn").await, Got::Miss(MissReason::Absent)));
    }
    assert!(nodes.iter().all(|node| node.router.peek(b"torn").is_none()));
    eventually("staging is given back", || proxy.router.staging().held_bytes() == 0).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn overwrites_end_the_same_at_both_copies() {
    let (nodes, proxy) = cluster(2, &[(1, true), (2, true)]).await;
    let mut tasks = tokio::task::JoinSet::new();
    for round in 0..24_u64 {
        let router = Arc::clone(if round % 3 == 0 {
            &proxy.router
        } else {
            &nodes[(round % 2) as usize].router
        });
        tasks.spawn(async move { put(&router, "same", &value(round, MIB + round as usize)).await });
    }
    while let Some(outcome) = tasks.join_next().await {
        assert!(matches!(outcome.unwrap(), PutOutcome::Stored2 | PutOutcome::Stored1));
    }
    let ids = || {
        nodes
            .iter()
            .map(|node| node.router.peek(b"same").unwrap().write_id())
            .collect::<Vec<_>>()
    };
    eventually("both copies hold the same write", || ids()[0] == ids()[1]).await;
    let Got::Hit(bytes, _) = get(&proxy.router, "same").await else {
        panic!("it is there")
    };
    assert_eq!(
        bytes,
        value((bytes.len() - MIB) as u64, bytes.len()),
        "one whole write, whichever"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_block_too_big_for_the_shard_is_refused_and_read_to_its_end() {
    let (nodes, proxy) = cluster(2, &[(1, true), (2, true)]).await;
    for router in [&nodes[0].router, &proxy.router] {
        assert_eq!(
            put(router, "big", &value(1, 40 * MIB)).await,
            PutOutcome::Dropped(DropReason::Size)
        );
        assert!(matches!(get(router, "big").await, Got::Miss(MissReason::Absent)));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nobody_in_the_list_and_no_map_are_misses_and_drops() {
    let (nodes, proxy) = cluster(1, &[]).await;
    for router in [&nodes[0].router, &proxy.router, &Proxy::start().router] {
        assert_eq!(put(router, "k", b"v").await, PutOutcome::Dropped(DropReason::OwnerDown));
        assert!(matches!(get(router, "k").await, Got::Miss(MissReason::OwnerDown)));
        assert!(!exists(router, "k").await);
        assert!(!router.del(&router.op(Front::Resp), &key("k")).await);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_operation_of_an_older_generation_gets_and_stores_nothing() {
    let (nodes, proxy) = cluster(2, &[(1, true), (2, true)]).await;
    put(&proxy.router, "k", b"old weights").await;
    let op = proxy.router.op(Front::Resp);
    let mut next = (*map_of(2, &addresses(&nodes), &[(1, true), (2, true)])).clone();
    next.generation = 2;
    let next = Arc::new(next);
    nodes.iter().for_each(|node| assert!(node.router.adopt(&next)));
    // Stamped before, arriving after; by a proxy that has heard of it and by one that has not.
    let answer = proxy.router.get(&op, &key("k")).await;
    assert!(matches!(
        answer,
        GetAnswer::Miss {
            reason: MissReason::Generation,
            ..
        }
    ));
    assert_eq!(
        put_as(&proxy.router, &op, "k", b"old weights").await,
        PutOutcome::Dropped(DropReason::Generation)
    );
    eventually("the proxy fetches the newer map from a shard", || {
        proxy.router.known().generation == 2
    })
    .await;
    assert!(
        matches!(get(&proxy.router, "k").await, Got::Miss(MissReason::Absent)),
        "older blocks are gone"
    );
    assert_eq!(put(&proxy.router, "k", b"new weights").await, PutOutcome::Stored2);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_older_side_fetches_the_newer_map() {
    let (nodes, proxy) = cluster(3, &[(1, true), (2, true)]).await;
    put(&proxy.router, "k", b"v").await;
    let next = map_of(7, &addresses(&nodes), &[(2, true), (1, true)]);
    assert!(nodes[0].router.adopt(&next));
    assert!(
        !nodes[0].router.adopt(&map_of(6, &addresses(&nodes), &[(3, true)])),
        "epochs only grow"
    );
    expect(&proxy.router, "k", b"v", Path::Forwarded).await;
    eventually("the proxy has it from shard 1", || proxy.router.known().epoch == 7).await;
    expect(&proxy.router, "k", b"v", Path::Forwarded).await;
    eventually("shard 2 has it from shard 1 or 3, or is asked by a newer one", || {
        nodes[1].router.known().epoch == 7 || nodes[1].router.known().epoch == 1
    })
    .await;
    // A shard that is asked by somebody newer asks back.
    put(&nodes[0].router, "k2", b"v").await;
    eventually("shard 2 has it too", || nodes[1].router.known().epoch == 7).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_put_to_a_shard_outside_the_list_goes_to_one_inside() {
    let (nodes, proxy) = cluster(3, &[(3, true), (2, true)]).await;
    let newer = map_of(2, &addresses(&nodes), &[(1, true), (2, true)]);
    assert!(
        nodes[2].router.adopt(&newer),
        "shard 3 knows that it has left the list, the proxy does not"
    );
    assert_eq!(
        put(&proxy.router, "k", &value(1, MIB)).await,
        PutOutcome::Stored1,
        "stored at shard 2"
    );
    assert!(nodes[1].router.peek(b"k").is_some());
    assert!(nodes[2].router.peek(b"k").is_none());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lease_is_taken_at_both_copies() {
    let (nodes, proxy) = cluster(2, &[(1, true), (2, true)]).await;
    put(&proxy.router, "leased", &value(1, MIB)).await;
    assert!(exists(&proxy.router, "leased").await);
    for node in &nodes {
        eventually("leased", || node.router.store().unwrap().stats().leased > 0).await;
    }
}
