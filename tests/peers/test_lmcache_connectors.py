"""LMCache 0.5.6 itself against the pool: its `lm://`, `redis://`, `resp://`, `valkey://` connectors and the
MP L2 adapter `resp`.

Writer and reader are separate processes. Blocks go in through the proxy and come out of a shard, and the other way round;
every byte is compared.
"""

from __future__ import annotations

import pytest
from harness import wait_until
from lmcache_client import MIB
from wire import Lm, Resp, block, lm_request, PUT

SCHEMES = ["lm", "redis", "resp", "valkey", "mp"]
NATIVE = ["resp", "mp"]
COUNT = {1 * MIB: 8, 4 * MIB: 6, 32 * MIB: 2}


def address(pool, via: str, scheme: str) -> str:
    where = pool.proxy if via == "proxy" else pool.shards[int(via[-1]) - 1 if len(pool.shards) > 1 else 0]
    return where.address["lm" if scheme == "lm" else "resp"]


def open_at(client, pool, via, scheme, size=1 * MIB, model="meta/m", workers=4):
    return client.open(scheme, address(pool, via, scheme), size, f"{model}-{scheme}-{size}", workers)


def forget(pool, *names: str) -> None:
    """Delete blocks again, so that a shared pool never has to evict under a later test."""
    if pool.proxy.address.get("resp"):
        with Resp(pool.proxy.address["resp"]) as r:
            r("DEL", *[n + suffix for n in names for suffix in ("", "metadata", "kv_bytes")])


@pytest.mark.parametrize("via", ["proxy", "shard1"])
@pytest.mark.parametrize("size", [1 * MIB, 4 * MIB, 32 * MIB], ids=["1MiB", "4MiB", "32MiB"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_stored_blocks_are_loaded_by_another_process(pool, clients, unique, scheme, size, via):
    single, batch = unique(COUNT[size]), unique(COUNT[size])
    writer = open_at(clients("writer"), pool, via, scheme, size)
    assert writer.exists(single) == [False] * len(single), "hits before anything was stored"
    writer.put(single)
    writer.put(batch, batch=True)
    # lm:// acknowledges no PUT: an EXIST on the same connection is the barrier.
    assert writer.exists(single + batch) == [True] * len(single + batch)
    for other in ("shard2", "proxy"):
        reader = open_at(clients("reader"), pool, other, scheme, size)
        assert reader.exists(single + batch, batch=True) == [True] * len(single + batch)
        assert reader.get(single) == ["hit"] * len(single)
        assert reader.get(batch, batch=True) == ["hit"] * len(batch)
        reader.close()
    assert writer.get(single[:1]) == ["hit"]
    forget(pool, *[writer.name(k) for k in single + batch])
    writer.close()


@pytest.mark.parametrize("via", ["proxy", "shard1"])
@pytest.mark.parametrize("scheme", ["lm", "redis", "valkey"])
def test_a_miss_is_a_miss_and_the_connection_goes_on(pool, clients, unique, scheme, via):
    there, absent = unique(3), unique(3)
    c = open_at(clients("writer"), pool, via, scheme)
    c.put(there)
    assert c.get([there[0], absent[0], there[1], absent[1], there[2]]) == ["hit", "miss", "hit", "miss", "hit"]
    assert c.exists([there[0], absent[0]], batch=True) == [True, False]
    assert c.get(there, batch=True) == ["hit"] * 3
    c.close()


@pytest.mark.parametrize("via", ["proxy", "shard1"])
@pytest.mark.parametrize("workers", [1, 8])
def test_a_native_miss_neither_hangs_nor_unsteps_the_adapter(pool, clients, unique, via, workers):
    """The native client reads as many bytes as its size header would have: Redis's nil hangs it for ever."""
    there, absent = unique(4), unique(4)
    c = open_at(clients("native"), pool, via, "mp", workers=workers, model="meta/miss")
    c.put(there)
    mixed = [k for pair in zip(there, absent) for k in pair]
    for _ in range(3):
        assert c.get(mixed, batch=True) == ["hit", "miss"] * 4
        assert c.get(there) == ["hit"] * 4
        assert c.exists(mixed, batch=True) == [True, False] * 4
        assert c.get(absent[:1]) == ["miss"]
    c.delete(there[:2])
    assert c.exists(there) == [False, False, True, True]
    assert c.get(there) == ["miss", "miss", "hit", "hit"]
    c.close()


@pytest.mark.parametrize("via", ["proxy", "shard1"])
def test_a_native_miss_in_process_returns_and_the_connection_goes_on(pool, clients, unique, via):
    """LMCache 0.5.6's `resp://` connector ignores which keys of a load failed and hands out the buffer as it was: whatever a
    server answers to a miss, the engine is given stale bytes (docs/lmcache.md). What a server can do is not to hang it."""
    there, absent = unique(4), unique(1)
    c = open_at(clients("native"), pool, via, "resp", workers=1, model="meta/miss")
    c.put(there)
    assert c.exists(there + absent) == [True] * 4 + [False]
    (result,) = c.get(absent)
    assert result.startswith("bad"), "LMCache reports misses of resp:// now: tell docs/lmcache.md"
    assert c.get(there) == ["hit"] * 4
    assert c.exists(there + absent) == [True] * 4 + [False]
    assert c.get(there, batch=True) == ["hit"] * 4
    c.close()


def test_a_native_miss_is_sized_by_a_front_end_that_stored_nothing(pool, clients, unique):
    """The size travels with every internal reply: a front end that saw no SET of the model still knows it."""
    there, absent = unique(2), unique(2)
    w = open_at(clients("writer"), pool, "shard1", "mp", model="meta/elsewhere")
    w.put(there)
    for via in ("proxy", "shard2", "shard3"):
        r = open_at(clients("native"), pool, via, "mp", workers=1, model="meta/elsewhere")
        assert r.get([absent[0], there[0], absent[1], there[1]]) == ["miss", "hit", "miss", "hit"], via
        r.close()
    w.close()


@pytest.mark.parametrize("via", ["proxy", "shard1"])
def test_a_native_miss_of_unknown_size_closes_the_connection_and_is_counted(pool, clients, unique, via):
    counter = "kvpool_shard_closed_unknown_size_total"
    before = pool.total(counter)
    c = open_at(clients("unknown"), pool, via, "mp", workers=1, model=f"meta/never-{unique()[0]}")
    assert c.get(unique(1)) == ["miss"]  # closed, so the load failed: but it did come back
    assert pool.total(counter) == before + 1
    other = open_at(clients("writer"), pool, via, "redis")
    keys = unique(2)
    other.put(keys)
    assert other.get(keys) == ["hit"] * 2
    clients("unknown").close()


@pytest.mark.parametrize("scheme", ["lm", "redis"])
def test_chunks_that_are_not_full_keep_their_length_and_shape(pool, clients, unique, scheme):
    (key,) = unique(1)
    w = open_at(clients("writer"), pool, "proxy", scheme)
    w.put([key], tokens=13)
    size = 13 * (1 * MIB // 64)
    for via in ("proxy", "shard1", "shard2"):
        r = open_at(clients("reader"), pool, via, scheme)
        assert r.get([key], size=size) == ["hit"]
        r.close()
    w.close()


def test_a_native_client_never_gets_a_block_of_another_length(pool, clients, unique):
    """One prefix, two lengths: MP keys carry no chunk size. The other length is a miss or a counted close, never a hit
    and never a hang; the right length is still read."""
    model, (small,), (large,) = "meta/two-sizes", unique(1), unique(1)
    at = pool.proxy.address["resp"]
    w1 = clients("writer").open("mp", at, 1 * MIB, model, 1)
    w1.put([small])
    w4 = clients("writer").open("mp", at, 4 * MIB, model, 1)
    w4.put([large])
    r4 = clients("native").open("mp", at, 4 * MIB, model, 1)
    assert r4.get([large]) == ["hit"]
    assert r4.get([small]) == ["miss"]
    r1 = clients("native").open("mp", at, 1 * MIB, model, 1)
    assert r1.get([large]) == ["miss"]
    r4 = clients("native").open("mp", at, 4 * MIB, model, 1)
    assert r4.get([large]) == ["hit"]
    clients("native").close()  # its connections may be closed by now


@pytest.mark.parametrize("via", ["proxy", "shard1"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_torn_put_was_never_there(pool, clients, unique, scheme, via):
    size, (warm, key) = 1 * MIB, unique(2)
    c = open_at(clients("writer"), pool, via, scheme, size)
    c.put([warm])
    name = c.name(key) + ("kv_bytes" if scheme == "redis" else "")
    if scheme == "lm":
        with Lm(address(pool, via, "lm")) as torn:
            torn.s.sendall(lm_request(PUT, name, size) + b"x" * 1000)
    else:
        with Resp(address(pool, via, "resp")) as torn:
            torn.s.sendall(b"*3\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (len(name), name.encode(), size) + b"x" * 1000)
    assert c.exists([key]) == [False]
    if scheme != "resp":  # which cannot be told of a miss: see above
        assert c.get([key]) == ["miss"]
    c.put([key])
    assert c.exists([key]) == [True]
    r = open_at(clients("reader"), pool, "proxy", scheme, size)
    assert r.get([key]) == ["hit"]
    r.close()
    c.close()


def test_a_block_without_lm_metadata_is_a_miss_for_lm(pool, clients, unique):
    keys, model = unique(2), "meta/no-meta"
    w = clients("writer").open("resp", pool.proxy.address["resp"], 1 * MIB, model, 1)
    w.put(keys)
    for where in (pool.proxy, pool.shards[0]):
        r = clients("reader").open("lm", where.address["lm"], 1 * MIB, model)
        assert r.exists(keys) == [False, False]
        assert r.get(keys) == ["miss", "miss"]
        r.put(keys[:1])
        assert r.get(keys) == ["hit", "miss"]
        w.put(keys)  # and back: the newest write has no metadata again
        r.close()
    assert w.get(keys) == ["hit", "hit"]
    w.close()


def test_two_copies_are_confirmed_by_the_put_counters(pool, clients, unique):
    keys = unique(16)
    c = open_at(clients("writer"), pool, "proxy", "mp", model="meta/copies")
    before = pool.total("kvpool_shard_put_total", outcome="stored2")
    c.put(keys)
    wait_until(
        "16 PUTs counted as stored in two copies",
        lambda: pool.total("kvpool_shard_put_total", outcome="stored2") - before >= 16,
        10,
    )
    c.close()


def test_old_and_odd_keys_are_opaque_over_lm(pool, unique):
    """LMCache's own server closes on a key it can't parse; a pool stores any key."""
    body = block("odd", 4096)
    for key in ("vllm@m@1@0@dead01", "no-format-at-all", "m@1@0@-7b@half", "x" * 150, "mödel@1@0@ab@bfloat16"):
        with Lm(pool.proxy.address["lm"]) as c:
            assert not c.exists(key)
            c.put(key, body)
            assert c.exists(key)
            assert c.get(key) == body
