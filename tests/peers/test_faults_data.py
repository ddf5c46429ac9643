"""Faults of the data: wrong identity (K01), unfinished or competing writes (K03).

Numbers are those of the project's list of faults found in the field; each names what users suffered.
"""

from __future__ import annotations

import random
import threading
import time

import pytest
from harness import soak, wait_until
from wire import BFLOAT16, FP8_E4M3, OK, PUT, Lm, Resp, block, lm_request

MIB = 1 << 20


def test_O01_two_number_formats_of_one_model_never_meet(pool, unique):
    h = f"{unique()[0]:x}"
    a, b = block("bf16", 64_000), block("fp8", 64_000)
    with Lm(pool.proxy.address["lm"]) as w, Lm(pool.shards[0].address["lm"]) as r:
        w.put(f"m@1@0@{h}@bfloat16", a, dtype=BFLOAT16)
        w.put(f"m@1@0@{h}@fp8_e4m3fn", b, dtype=FP8_E4M3)
        assert w.exists(f"m@1@0@{h}@fp8_e4m3fn")
        first, second = r.ask(2, f"m@1@0@{h}@bfloat16"), r.ask(2, f"m@1@0@{h}@fp8_e4m3fn")
        assert (first.dtype, first.body) == (BFLOAT16, a)
        assert (second.dtype, second.body) == (FP8_E4M3, b)
        assert not r.exists(f"m@1@0@{h}@half")


def test_O02_blocks_of_another_parallel_layout_are_not_offered(pool, unique):
    h = f"{unique()[0]:x}"
    keys = [f"m@1@0@{h}@bfloat16", f"m@2@0@{h}@bfloat16", f"m@2@1@{h}@bfloat16"]
    with Lm(pool.proxy.address["lm"]) as c:
        for key in keys:
            c.put(key, block(key, 30_000))
        assert [c.exists(f"m@4@{rank}@{h}@bfloat16") for rank in range(4)] == [False] * 4
        assert [c.get(k) for k in keys] == [block(k, 30_000) for k in keys]


@pytest.mark.parametrize("front", ["lm", "resp"])
def test_O08_a_writer_that_dies_leaves_nothing_behind(pool, unique, front):
    key, size = f"m@1@0@{unique()[0]:x}@bfloat16", 64 * MIB
    address = pool.proxy.address[front]
    with Resp(pool.proxy.address["resp"]) as r:
        assert r("SET", f"o08-{key}", b"something") == "OK"

    def in_use():
        return pool.total("kvpool_shard_arena_bytes", pool.shards, kind="used")

    time.sleep(3)  # gauges are set every two seconds
    before = in_use()
    if front == "lm":
        with Lm(address) as torn:
            torn.s.sendall(lm_request(PUT, key, size) + b"x" * (10 * MIB))
    else:
        with Resp(address) as torn:
            torn.s.sendall(b"*3\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (len(key), key.encode(), size) + b"x" * (10 * MIB))
    body = block(key, 1 * MIB)
    with Lm(pool.proxy.address["lm"]) as lm, Resp(address if front == "resp" else pool.proxy.address["resp"]) as r:
        assert r("EXISTS", key) == 0 and not lm.exists(key)
        assert lm.get(key) is None
        assert in_use() > 0, "the gauge is there"
        wait_until("the bytes of the unfinished block are free again", lambda: in_use() < before + 16 * MIB, 15)
        if front == "lm":
            lm.put(key, body)
            assert lm.exists(key) and lm.get(key) == body
        else:
            assert r("SET", key, body) == "OK" and r("GET", key) == body
        assert r("DEL", key) == 1


@pytest.mark.parametrize("front", ["lm", "resp"])
def test_O09_two_writers_of_one_key(pool, unique, front):
    rounds, size = 1000 if soak() else 40, 8 * MIB
    key = f"m@1@0@{unique()[0]:x}@bfloat16"
    bodies = [b"A" * size, b"B" * size]
    problems = []

    def put(c, body):
        if front == "lm":
            c.put(key, body)
            assert c.exists(key) in (True, False)  # the barrier of lm://
        else:
            assert c("SET", key, body) == "OK"

    make = Lm if front == "lm" else Resp
    places = [pool.proxy, pool.shards[0], pool.shards[1]]
    conns = [make(p.address[front]) for p in places]
    if front == "resp":
        for c in conns:
            assert c("PING") == "PONG"  # not LMCache's native client, which is closed on when no size is known

    def guarded(f, *args):
        try:
            f(*args)
        except Exception as e:
            problems.append(f"{type(e).__name__}: {e}")

    def read(c):
        got = c.get(key) if front == "lm" else c("GET", key)
        if got is not None and got not in bodies:
            problems.append(f"mixed: {len(got)} bytes, {got.count(b'A')} A, {got.count(b'B')} B")

    for _ in range(rounds):
        threads = [
            threading.Thread(target=guarded, args=(put, conns[0], bodies[0])),
            threading.Thread(target=guarded, args=(put, conns[1], bodies[1])),
            threading.Thread(target=guarded, args=(read, conns[2])),
        ]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        assert not problems, problems
    # With no write under way the copies agree, wherever one asks.
    answers = set()
    for c in conns:
        answers.add(c.get(key) if front == "lm" else c("GET", key))
    assert len(answers) == 1 and answers < {*bodies, None}, [a and a[:1] for a in answers]
    with Resp(pool.proxy.address["resp"]) as r:
        r("DEL", key)
    for c in conns:
        c.close()


@pytest.mark.parametrize("via", ["proxy", "shard"])
@pytest.mark.parametrize("front", ["lm", "resp"])
def test_O10_lengths_at_every_edge(pool, unique, front, via):
    where = pool.proxy if via == "proxy" else pool.shards[2]
    tag = f"{unique()[0]:x}"
    lengths = [0, 1, 4095, 4096, 4097, 65535, 65536, 65537, 262143, 262144, 262145, 16 * MIB - 1, 16 * MIB]
    bodies = {f"m@1@0@{tag}{n:08x}@bfloat16": block(f"{tag}{n}", n) for n in lengths}
    order = list(bodies)
    random.Random(tag).shuffle(order)
    if front == "lm":
        with Lm(where.address["lm"]) as c:
            for key, body in bodies.items():
                c.put(key, body)
            for key in order:
                reply = c.ask(2, key)
                assert reply.code == OK and reply.body == bodies[key], (len(bodies[key]), reply.code)
    else:
        with Resp(where.address["resp"]) as c:
            c("PING")  # not the native client
            for key, body in bodies.items():
                assert c("SET", key, body) == "OK"
            for key in order:
                assert c("GET", key) == bodies[key], len(bodies[key])
    with Resp(pool.proxy.address["resp"]) as r:
        assert r("DEL", *bodies) == len(bodies)
