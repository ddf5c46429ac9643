"""Faults of memory: growth without end, a full pool that refuses for ever (K06), and lookups that promise what is evicted
(K02)."""

from __future__ import annotations

import random
import threading

import pytest
from harness import rss, soak, wait_until
from wire import Lm, Resp, RespError, block

MIB = 1 << 20


def bound(limit: int, connections: int = 16) -> int:
    """The product's word on resident memory: limit + 5 % + 64 MiB + 16 KiB per connection."""
    return limit + limit // 20 + 64 * MIB + connections * 16 * 1024


@pytest.mark.limit(240)
def test_O19_ten_times_the_capacity_is_written_and_memory_stays_bounded(new_pool):
    limit = 1024 * MIB if soak() else 128 * MIB
    pool = new_pool(memory=f"{limit // MIB}MiB")
    size, total = 16 * MIB, (10 * 1024 if soak() else 1280) * MIB
    count = total // size
    worst = 0

    def watch():
        nonlocal worst
        while not done.wait(0.1):
            worst = max(worst, max(rss(p.pid) for p in pool.shards if p.alive()))

    done = threading.Event()
    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        with Lm(pool.proxy.address["lm"], 60) as c:
            for i in range(count):
                c.put(f"m@1@0@{i:x}@bfloat16", block(f"o19-{i}", size))
            assert c.exists(f"m@1@0@{count - 1:x}@bfloat16"), "the newest block is there"
            hits = 0
            for i in reversed(range(count)):
                body = c.get(f"m@1@0@{i:x}@bfloat16")
                assert body is None or body == block(f"o19-{i}", size)
                hits += body is not None
    finally:
        done.set()
        watcher.join()
    assert all(p.alive() for p in pool.procs.values())
    assert worst <= bound(limit), f"a shard had {worst / MIB:.0f} MiB resident, {bound(limit) / MIB:.0f} allowed"
    assert rss(pool.proxy.pid) < 256 * MIB, "a proxy stores nothing"
    # Two copies of each block: half of the memory is distinct blocks. Metadata and rounding take their part.
    assert hits * size >= 3 * limit // 2 // 2, f"only {hits} blocks of {size >> 20} MiB are still there"
    evicted = sum(
        pool.total("kvpool_shard_store_events_total", pool.shards, event=e) for e in ("evicted_small", "evicted_main")
    )
    assert evicted > 0, "evictions are counted"
    pool.wait_healthy()


@pytest.mark.limit(240)
def test_O20_a_full_pool_takes_writes_for_ever(new_pool):
    pool = new_pool(memory="64MiB")
    rng = random.Random(20)
    puts = 10_000 if soak() else 1500

    def outcomes():
        return {o: pool.total("kvpool_shard_put_total", [pool.proxy], outcome=o) for o in ("stored2", "stored1", "dropped")}

    with Resp(pool.proxy.address["resp"], 30) as r:
        for i in range(100):
            assert r("SET", f"fill-{i}", block(f"fill-{i}", 1 * MIB)) == "OK"
        leased, before = [], outcomes()
        for i in range(puts):
            key = f"o20-{i}"
            body = block(key, rng.choice([4_096, 50_000, 300_000, 1 * MIB, 4 * MIB]))
            assert r("SET", key, body) == "OK", "SET never fails: a drop is a counter"
            if i % 5 == 0 and r("EXISTS", key):
                leased.append(key)
        after = outcomes()
        assert sum(after.values()) - sum(before.values()) == puts, (before, after)
        # Nothing may be stuck: what is written now can be read now.
        kept = 0
        for i in range(20):
            assert r("SET", f"last-{i}", block(f"last-{i}", 100_000)) == "OK"
            got = r("GET", f"last-{i}")
            assert got is None or got == block(f"last-{i}", 100_000)
            kept += got is not None
        assert kept >= 15, f"only {kept} of 20 writes into a full pool were kept; outcomes {after}"


def test_O04_a_lookup_that_said_yes_is_kept_or_is_a_clean_miss(new_pool):
    pool = new_pool(memory="128MiB")
    body = {f"m@1@0@{i:x}@bfloat16": block(f"o04-{i}", 1 * MIB) for i in range(64)}
    few = list(body)[:12]  # well below the quarter of memory that leases may hold
    with Lm(pool.proxy.address["lm"], 30) as c, Resp(pool.proxy.address["resp"], 30) as other:
        for key, value in body.items():
            c.put(key, value)
        for key in [*body, *few]:
            assert c.exists(key)
        for i in range(80):  # several times what all shards hold
            assert other("SET", f"pressure-{i}", block(f"pressure-{i}", 8 * MIB)) == "OK"
        hits = {key for key in body if c.get(key) is not None}
        for key in body:
            assert c.get(key) in (None, body[key])
        assert c.ask(5, "k").code == 200, "the connection is usable"
        print(f"{len(hits)} of 64 looked-up blocks survived; leases were taken for all")
        assert len(hits) >= 12, "leases protect what was looked up, up to their share"


def test_O07_parallel_reads_beyond_the_staging_memory_are_whole_or_absent(new_pool):
    """With one copy a front end takes a block whole before passing it on: 32 readers ask for more than may be in flight."""
    pool = new_pool(memory="256MiB", factor=1)
    size, problems, hits = 16 * MIB, [], []
    bodies = [block(f"o07-{i}", size) for i in range(8)]
    with Resp(pool.proxy.address["resp"], 60) as w:
        for i, body in enumerate(bodies):
            assert w("SET", f"o07-{i}", body) == "OK"

    def read(n):
        try:
            with Resp(pool.proxy.address["resp"], 60) as r:
                for i in range(n, n + 3):
                    got = r("GET", f"o07-{i % 8}")
                    assert not isinstance(got, RespError), got
                    if got is not None:
                        hits.append(i)
                        if got != bodies[i % 8]:
                            problems.append(f"block {i % 8}: {len(got)} bytes, not what was stored")
        except Exception as e:
            problems.append(f"{type(e).__name__}: {e}")

    threads = [threading.Thread(target=read, args=(n,)) for n in range(32)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not problems, problems[:5]
    assert hits, "nothing was read at all"
    print(f"{len(hits)} of 96 reads were hits")
    wait_until("in-flight memory is given back", lambda: rss(pool.proxy.pid) < 512 * MIB, 30)
