"""Faults of members: data gone with its shard (K02), restarts under stock clients (K04), hung shards and absent coordinators
(K05)."""

from __future__ import annotations

import signal
import threading
import time

import pytest
from harness import connections, soak, wait_until
from lmcache_client import MIB
from wire import Lm, Resp, RespError, block

DEADLINE = 1.0  # no single-key call may take longer: the one timing a test may assert


class Load(threading.Thread):
    """Reads and writes by raw sockets, timing every call."""

    def __init__(self, address: str, tag: str, known: dict[str, bytes]):
        super().__init__(daemon=True)
        self.c, self.tag, self.known = Resp(address, 30), tag, known
        self.ended = threading.Event()
        self.calls = self.hits = self.misses = 0
        self.worst, self.problems = 0.0, []

    def timed(self, *args):
        began = time.monotonic()
        reply = self.c(*args)
        took = time.monotonic() - began
        self.calls += 1
        self.worst = max(self.worst, took)
        if isinstance(reply, RespError):
            self.problems.append(f"{args[0]}: {reply}")
        if took > DEADLINE:
            self.problems.append(f"{args[0]} took {took:.2f} s")
        return reply

    def run(self):
        try:
            i = 0
            while not self.ended.is_set():
                for key, body in self.known.items():
                    if self.ended.is_set():
                        break
                    got = self.timed("GET", key)
                    self.hits += got is not None
                    self.misses += got is None
                    if got is not None and got != body:
                        self.problems.append(f"{key}: other bytes")
                    self.timed("SET", f"{self.tag}-{i % 50}", b"w" * 100_000)
                    i += 1
                    time.sleep(0.005)
        except Exception as e:
            self.problems.append(f"{type(e).__name__}: {e}")

    def end(self):
        self.ended.set()
        self.join(60)
        self.c.close()
        assert self.calls > 0 and not self.problems, self.problems[:5]


def store(address: str, tag: str, n: int, size: int) -> dict[str, bytes]:
    bodies = {f"{tag}-{i}": block(f"{tag}-{i}", size) for i in range(n)}
    with Resp(address, 30) as r:
        for key, body in bodies.items():
            assert r("SET", key, body) == "OK"
    return bodies


def test_O06_a_shard_that_comes_back_empty_answers_misses(new_pool):
    pool = new_pool(factor=1)
    at = pool.proxy.address["resp"]
    bodies = store(at, "o06", 60, 100_000)
    victim = pool.shards[0]
    with Resp(at, 30) as r, Lm(pool.proxy.address["lm"], 30) as lm:
        assert all(r("GET", k) == b for k, b in bodies.items())
        pool.kill(victim)
        for key, body in bodies.items():
            assert r("GET", key) in (None, body)
        pool.restart(victim)
        pool.wait_healthy()
        gone = [k for k in bodies if r("EXISTS", k) == 0]
        assert gone, "the victim had blocks"
        for key, body in bodies.items():
            assert r("GET", key) == (None if key in gone else body)
            assert not lm.exists(key)
        for key in gone:
            assert r("SET", key, bodies[key]) == "OK" and r("GET", key) == bodies[key]


@pytest.mark.limit(420)
def test_O11_a_rolling_restart_drops_no_client(new_pool, clients, unique):
    """Eight stock clients at the node-local proxy while every coordinator and every shard is restarted, one by one."""
    pool = new_pool(memory="256MiB")
    keys, conns = unique(8), []
    for name in ("writer", "reader"):
        for scheme, port in (("lm", "lm"), ("lm", "lm"), ("mp", "resp"), ("redis", "resp")):
            model = f"meta/roll-{scheme}-{len(conns)}"
            c = clients(name).open(scheme, pool.proxy.address[port], 1 * MIB, model, 2)
            c.put(keys)
            assert c.get(keys) == ["hit"] * 8
            conns.append((clients(name), c))
    before = {id(c): connections(p.pid, c.port) for p, c in conns}
    for victim in [*pool.coordinators, *pool.shards]:
        pool.kill(victim, number=signal.SIGTERM)
        for _, c in conns:
            c.put(keys[:1])
            assert all(r in ("hit", "miss") for r in c.get(keys[:2])), victim.name
        pool.restart(victim)
        pool.wait_healthy()
        for process, c in conns:
            assert before[id(c)] <= connections(process.pid, c.port), f"a connection was lost with {victim.name}"
            assert c.get(keys) == ["hit"] * 8, f"after {victim.name} came back"
    for _, c in conns:
        c.close()


@pytest.mark.limit(240)
def test_O15_one_frozen_shard_slows_nobody_beyond_the_deadline(new_pool):
    pool = new_pool(shards=4)
    at = pool.proxy.address["resp"]
    known = store(at, "o15", 60, 200_000)
    pids = {p.name: p.pid for p in pool.procs.values()}
    loads = [Load(at, f"load-{n}", known) for n in range(2)] + [Load(pool.shards[3].address["resp"], "direct", known)]
    for load in loads:
        load.start()
    pool.stop(pool.shards[0])
    try:
        time.sleep(60 if soak() else 8)
    finally:
        pool.cont(pool.shards[0])
    pool.wait_healthy()
    hits = [load.hits for load in loads]
    wait_until("every load goes on after the thaw", lambda: all(b.hits > a for a, b in zip(hits, loads)), 30)
    for load in loads:
        load.end()
        assert load.misses == 0, f"{load.misses} misses although every block had a second copy"
    assert pids == {p.name: p.pid for p in pool.procs.values()} and all(p.alive() for p in pool.procs.values())
    print("worst call:", max(load.worst for load in loads))


@pytest.mark.limit(240)
def test_O17_without_a_quorum_data_flows_and_control_says_no_quorum(new_pool):
    pool = new_pool()
    at = pool.proxy.address["resp"]
    known = store(at, "o17", 40, 200_000)
    load = Load(at, "o17-load", known)
    load.start()
    leader = pool.leader()
    frozen = [leader, next(c for c in pool.coordinators if c is not leader)]
    for c in frozen:
        pool.stop(c)
    try:
        time.sleep(300 if soak() else 10)
        code, said = pool.cli("get", "shards", timeout=30)
        assert code != 0 and "no_quorum" in said.replace(" ", "_").lower(), f"exit {code}: {said}"
        ok, status = pool.status()
        assert not ok, status
        calls = load.calls
        wait_until("data still flows", lambda: load.calls > calls + 20, 10)
    finally:
        for c in frozen:
            pool.cont(c)
    pool.wait_healthy()
    load.end()
    assert load.misses == 0
    assert all(s.alive() and s.child is None for s in pool.shards), "no shard was restarted"
