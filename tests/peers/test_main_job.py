"""The main job: unmodified LMCache keeps its KV blocks in a pool that survives losing any one process.

Three coordinators, three shards of 512 MiB, one proxy. LMCache stores 64 chunks of 4 MiB through the proxy, in two copies by the
put counters. While a second LMCache process reads and writes steadily: SIGKILL, then SIGSTOP, of the leader and of each
shard in turn, then SIGKILL of all coordinators. During and after each: 64 of 64 hits, every byte equal, no client
connection lost, no single-key call longer than 1 s. At the end everything restarts, and members, pools and slot map are
what was acknowledged.

`--main-job-rounds N` (`just main-job N`) repeats it; KVPOOL_MAIN_JOB_REPORT names a file that gets a line for each.
"""

from __future__ import annotations

import json
import os
import time

import pytest
from harness import Pool, Proc, connections, wait_until
from lmcache_client import MIB, Client, Conn

CHUNKS, SIZE = 64, 4 * MIB
DEADLINE = 1.0  # for a single-key call: a promise of the product, and the only timing a test may assert
FROZEN = 5.0  # seconds a victim is stopped
# `redis://` keeps a chunk under two keys, so one call of its connector is two single-key calls.
KEYS_PER_CHUNK = {"mp": 1, "lm": 1, "redis": 2}


def pytest_generate_tests(metafunc):
    rounds = metafunc.config.getoption("--main-job-rounds")
    metafunc.parametrize("round_number", range(1, rounds + 1), ids=lambda n: f"round{n}")


class Job:
    """The two clients, and what must hold of them at any time."""

    def __init__(self, pool: Pool, first: Client, second: Client, scheme: str):
        self.pool, self.scheme = pool, scheme
        address = pool.proxy.address["lm" if scheme == "lm" else "resp"]
        self.a: Conn = first.open(scheme, address, SIZE, "meta/main-job", 4)
        self.b: Conn = second.open(scheme, address, SIZE, "meta/main-job", 4)
        self.chunks, self.own = list(range(1, CHUNKS + 1)), list(range(1001, 1009))
        self.sockets: dict[int, set[int]] = {}
        self.worst, self.reads = 0.0, 0
        self.began = time.monotonic()

    def store(self) -> None:
        """Stores the chunks, again if need be, until the counters say that each has two copies."""
        wanted = CHUNKS * KEYS_PER_CHUNK[self.scheme]
        for _ in range(3):
            before = self.pool.total("kvpool_shard_put_total", [self.pool.proxy], outcome="stored2")
            self.a.put(self.chunks)
            assert self.a.exists(self.chunks) == [True] * CHUNKS
            now = self.pool.total("kvpool_shard_put_total", [self.pool.proxy], outcome="stored2")
            if now - before >= wanted:
                return
            print(f"{now - before:g} of {wanted} PUTs had two copies; storing again")
        raise AssertionError("the put counters did not confirm two copies of every chunk")

    def start(self) -> None:
        self.b.call("steady", shared=self.chunks, own=self.own)
        wait_until("the second client is busy", lambda: self.b.call("report")["rounds"] >= 8, 30)
        self.check("before any fault")
        for c in (self.a, self.b):
            self.sockets[c.client.pid] = connections(c.client.pid, c.port)
            assert self.sockets[c.client.pid], "the client is connected"

    def check(self, when: str) -> None:
        """64 hits with every byte equal, each within the deadline; nothing wrong at the second client."""
        results = self.a.get(self.chunks)
        self.reads += CHUNKS
        bad = {n: r for n, r in zip(self.chunks, results) if r != "hit"}
        assert not bad, f"{when}: {CHUNKS - len(bad)} of {CHUNKS} hits: {bad}"
        self.within(when, "GET", self.a.worst)
        assert self.a.exists(self.chunks) == [True] * CHUNKS, when
        self.within(when, "EXISTS", self.a.worst)
        report = self.b.call("report")
        assert report["alive"] and not report["problems"], f"{when}: second client: {report['problems']}"
        for op, worst in report["worst"].items():
            self.within(when, f"{op} of the second client", worst)
        for pid, before in self.sockets.items():
            lost = before - connections(pid, self.a.port)
            assert not lost, f"{when}: client connections lost: {sorted(lost)}"

    def within(self, when: str, what: str, seconds: float) -> None:
        self.worst = max(self.worst, seconds)
        limit = DEADLINE * KEYS_PER_CHUNK[self.scheme]
        assert seconds <= limit, f"{when}: a single-key {what} took {seconds:.2f} s"

    def check_during(self, when: str, seconds: float) -> None:
        end = time.monotonic() + seconds
        self.check(when)
        while time.monotonic() < end:
            self.check(when)

    def kill(self, victims: list[Proc], what: str) -> float:
        self.pool.kill(*victims)
        self.check_during(f"{what} killed", 2)
        self.pool.restart(*victims)
        return self.healed(f"{what} killed and restarted")

    def freeze(self, victim: Proc, what: str) -> float:
        self.pool.stop(victim)
        try:
            self.check_during(f"{what} frozen", FROZEN)
        finally:
            self.pool.cont(victim)
        return self.healed(f"{what} frozen and continued")

    def healed(self, when: str) -> float:
        began = time.monotonic()
        self.pool.wait_healthy(120)
        took = time.monotonic() - began
        self.check(when)
        print(f"{when}: healthy after {took:.1f} s")
        return took

    def finish(self) -> dict:
        report = self.b.call("steady_end")
        assert not report["problems"], report["problems"]
        assert report["calls"]["put"] > 0 and report["hits"] > 0
        for conn in (self.a, self.b):
            conn.client.close()
        return {
            "scheme": self.scheme,
            "seconds": round(time.monotonic() - self.began),
            "reads": self.reads + report["calls"]["get"],
            "writes": report["calls"]["put"],
            "worst_call_seconds": round(max([self.worst, *report["worst"].values()]), 3),
            "own_misses": report["own_misses"],
        }


def acknowledged(pool: Pool) -> dict:
    """Members, pools and slot map, as the API tells them to anyone."""
    slots = {}
    for row in pool.get("slots"):
        for slot in range(row["first"], row["last"] + 1):
            slots[slot] = (row["epoch"], [c["shard"] for c in row["copies"]])
    return {
        "coordinators": sorted(r["id"] for r in pool.get("coordinators")),
        "nodes": sorted(r["id"] for r in pool.get("nodes")),
        "shards": sorted((r["id"], r["node"], r["pool"]) for r in pool.get("shards")),
        "pools": sorted((r["name"], r["factor"]) for r in pool.get("pools")),
        "slots": slots,
    }


def compare(before: dict, after: dict) -> None:
    for what in ("coordinators", "nodes", "shards", "pools"):
        assert after[what] == before[what], what
    assert set(after["slots"]) == set(before["slots"])
    for slot, (epoch, shards) in before["slots"].items():
        new_epoch, new_shards = after["slots"][slot]
        assert new_epoch >= epoch, f"slot {slot}: epoch {epoch} became {new_epoch}"
        if new_epoch == epoch:
            assert new_shards == shards, f"slot {slot}: {shards} became {new_shards} within one epoch"
        assert sorted(new_shards) == sorted(set(new_shards)) and len(new_shards) == len(shards), f"slot {slot}: {new_shards}"


@pytest.mark.limit(600)
@pytest.mark.parametrize("scheme", ["mp", "redis", "lm"])
def test_main_job(new_pool, clients, scheme, round_number):
    pool = new_pool(memory="512MiB")
    job = Job(pool, clients("first"), clients("second"), scheme)
    job.store()
    job.start()
    healing = 0.0
    leader = pool.leader()
    healing = max(healing, job.kill([leader], "the leader"))
    healing = max(healing, job.freeze(pool.leader(), "the leader"))
    for shard in pool.shards:
        healing = max(healing, job.kill([shard], shard.name))
        healing = max(healing, job.freeze(shard, shard.name))
    healing = max(healing, job.kill(pool.coordinators, "all coordinators"))
    summary = job.finish() | {"round": round_number, "slowest_healing_seconds": round(healing, 1)}
    assert pool.total("kvpool_shard_aborted_replies_total", [pool.proxy]) == 0
    assert pool.total("kvpool_shard_closed_unknown_size_total", [pool.proxy]) == 0

    before = acknowledged(pool)
    everything = list(pool.procs.values())
    pool.kill(*everything)
    pool.restart(*pool.coordinators)
    pool.leader(60)
    compare(before, acknowledged(pool))
    pool.restart(*pool.shards, pool.proxy)
    pool.wait_healthy(120)
    compare(before, acknowledged(pool))
    print(json.dumps(summary))
    if report := os.environ.get("KVPOOL_MAIN_JOB_REPORT"):
        with open(report, "a") as f:
            f.write(json.dumps(summary) + "\n")
