"""Any bytes on any port: no panic, no unbounded memory, no descriptor kept, no effect on anybody else.

Every listening port of every process is tried: both data ports, the port between shards, the coordinators' ports, HTTP.
"""

from __future__ import annotations

import os
import random
import socket
import struct
import threading

import pytest
from harness import fd_count, listening, wait_until
from wire import Lm, Resp, block, connect, lm_request

MIB = 1 << 20
SEED = int(os.environ.get("KVPOOL_TEST_SEED", random.randrange(2**32)))

TLS_HELLO = bytes.fromhex("16030100c8010000c40303") + bytes(range(189))
HTTP = b"GET / HTTP/1.1\r\nHost: localhost\r\nUser-Agent: probe\r\n\r\n"
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


def hostile() -> list[tuple[str, bytes]]:
    rng = random.Random(SEED)
    cases = [
        ("http", HTTP),
        ("http2", PREFACE + rng.randbytes(64)),
        ("tls", TLS_HELLO),
        ("zeros", bytes(4096)),
        ("ones", b"\xff" * 4096),
        ("resp: a billion arguments", b"*1000000000\r\n"),
        ("resp: a key of 2 GiB", b"*2\r\n$3\r\nGET\r\n$2147483647\r\n"),
        ("resp: a value of 1 TiB", b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$1099511627776\r\n"),
        ("resp: a value above 512 MiB", b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$536870913\r\n"),
        ("resp: negative counts", b"*-7\r\n*3\r\n$-5\r\n"),
        ("resp: number too long", b"*" + b"9" * 5000 + b"\r\n"),
        ("resp: a line without end", b"A" * 300_000),
        ("resp: nested arrays", b"*1\r\n" * 5000),
        ("resp: not terminated bulk", b"*2\r\n$3\r\nGETxx$1\r\nk\r\n"),
        ("lm: length -1", lm_request(1, "m@1@0@ab@bfloat16", -1)),
        ("lm: length of 2 GiB", lm_request(1, "m@1@0@ab@bfloat16", 2**31 - 1)),
        ("lm: unknown command", lm_request(99, "m@1@0@ab@bfloat16")),
        ("lm: key that is not UTF-8", lm_request(2, b"\xff\xfe\x80" * 40)),
        ("lm: negative shape", lm_request(1, "k", 16, shape=(-1, -2, 3, 4)) + bytes(16)),
        ("half an lm header", lm_request(2, "k")[:100]),
        ("half a resp header", b"*3\r\n$3\r\nSE"),
        ("one byte", b"*"),
        ("nothing", b""),
    ]
    cases += [(f"random {n}", rng.randbytes(rng.choice([1, 7, 36, 186, 1000, 70_000]))) for n in range(12)]
    # Well-formed beginnings that turn to noise: deeper into a parser than noise alone gets.
    for n in range(6):
        good = Resp.encode("SET", f"noise{n}", rng.randbytes(300)) + lm_request(3, f"noise{n}")
        bad = bytearray(good)
        for _ in range(rng.randrange(1, 5)):
            bad[rng.randrange(len(bad))] = rng.randrange(256)
        cases.append((f"mutated {n}", bytes(bad)))
    return cases


def throw(port: int, data: bytes, end: str) -> None:
    """Send bytes and leave: politely, by shutting the sending half, or with a reset."""
    try:
        with connect(f"127.0.0.1:{port}", 5) as s:
            s.settimeout(0.3)
            s.sendall(data)
            if end == "shutdown":
                s.shutdown(socket.SHUT_WR)
            try:
                while s.recv(65536):
                    pass
            except TimeoutError:
                pass
            if end == "reset":
                s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    except OSError:
        pass  # refused or reset: the server's right


class Bystander(threading.Thread):
    """A well-behaved client on both data ports of one process, which must not notice anything."""

    def __init__(self, proc, tag):
        super().__init__(daemon=True)
        self.proc, self.tag = proc, tag
        self.ended, self.rounds, self.problem = threading.Event(), 0, None

    def run(self):
        value = block(self.tag, 50_000)
        try:
            with Resp(self.proc.address["resp"]) as r, Lm(self.proc.address["lm"]) as lm:
                while not self.ended.is_set():
                    assert r("SET", self.tag, value) == "OK" and r("GET", self.tag) == value
                    lm.put(self.tag + "lm", value)
                    assert lm.get(self.tag + "lm") == value
                    self.rounds += 1
                    self.ended.wait(0.02)
        except Exception as e:
            self.problem = f"{type(e).__name__}: {e}"

    def finish(self):
        self.ended.set()
        self.join(30)
        assert self.problem is None and self.rounds > 0, f"{self.proc.name}: {self.problem}, {self.rounds} rounds"


@pytest.mark.limit(420)
def test_any_bytes_on_any_port(pool):
    print(f"KVPOOL_TEST_SEED={SEED}")
    procs = list(pool.procs.values())
    pool.settle_memory()
    bystanders = [Bystander(p, f"bystander-{p.name}") for p in [*pool.shards, pool.proxy]]
    for b in bystanders:
        b.start()
    before = {p.name: (pool.overhead(p), fd_count(p.pid)) for p in procs}
    ports = {p.name: sorted(listening(p.pid)) for p in procs}
    assert all(ports.values()), ports
    # One process of each role is enough: they run the same code.
    targets = [next(p for p in procs if p.role == role) for role in ("shard", "proxy", "coordinator")]
    for n, (name, data) in enumerate(hostile()):
        throwers = [
            threading.Thread(target=throw, args=(port, data, ("close", "shutdown", "reset")[(n + i) % 3]))
            for p in targets
            for i, port in enumerate(ports[p.name])
        ]
        for t in throwers:
            t.start()
        for t in throwers:
            t.join()
        dead = [p.name for p in procs if not p.alive()]
        assert not dead, f"{name} ended {dead}"
    for b in bystanders:
        b.finish()
    for p in targets:
        grown = pool.overhead(p) - before[p.name][0]
        assert grown < 64 * MIB, f"{p.name} grew by {grown >> 20} MiB"
        wait_until(
            f"{p.name} has its descriptors back ({fd_count(p.pid)}, had {before[p.name][1]})",
            lambda p=p: fd_count(p.pid) <= before[p.name][1] + 6,
            60,
        )
    assert pool.total("kvpool_shard_refused_input_total") > 0
    pool.wait_healthy()


@pytest.mark.parametrize("port", ["resp", "lm"])
def test_half_headers_are_bounded_in_time_and_idle_clients_are_not(pool, port):
    address = pool.proxy.address[port]
    idle = connect(address)
    halves = [connect(address) for _ in range(20)]
    for s in halves:
        s.sendall(b"*2\r\n$3\r\nGE" if port == "resp" else lm_request(2, "k")[:50])

    def closed(s) -> bool:
        try:
            s.settimeout(0.01)
            while True:
                if not s.recv(4096):
                    return True
        except TimeoutError:
            return False
        except OSError:
            return True

    wait_until("half-sent headers are given up", lambda: all(closed(s) for s in halves), 90, every=0.5)
    idle.settimeout(10)
    if port == "resp":
        idle.sendall(Resp.encode("PING"))
        assert idle.recv(100) == b"+PONG\r\n"
    else:
        idle.sendall(lm_request(5, "k"))
        assert len(idle.recv(36)) == 36
    for s in [idle, *halves]:
        s.close()


def test_many_half_headers_do_not_starve_others(pool):
    """More half-sent requests than any sane client makes: bounded in number, and a good client still gets in."""
    address = pool.proxy.address["resp"]
    halves = []
    try:
        for _ in range(600):
            try:
                s = connect(address, 5)
                s.sendall(b"*3\r\n$3\r\nSET\r\n$5\r\nabc")
                halves.append(s)
            except OSError:
                break
        with Resp(address, 10) as r:
            assert r("PING") == "PONG"
            assert r("SET", "after-halves", "x") == "OK" and r("DEL", "after-halves") == 1
    finally:
        for s in halves:
            s.close()


def test_announced_sizes_cost_nothing_until_bytes_come(pool):
    """Forty uploads of 256 MiB are announced and not sent: memory must not follow the announcement."""
    proxy = pool.proxy
    pool.settle_memory()
    before = {p.name: pool.overhead(p) for p in [*pool.shards, proxy]}
    idle = []
    for i in range(40):
        s = connect(proxy.address["resp"])
        s.sendall(b"*3\r\n$3\r\nSET\r\n$9\r\nbig-%05d\r\n$268435456\r\n" % i + b"x" * 1000)
        idle.append(s)
    with Resp(proxy.address["resp"]) as r:
        assert r("SET", "small", "value") == "OK"
        for p in [*pool.shards, proxy]:
            assert pool.overhead(p) - before[p.name] < 64 * MIB, p.name
        # Room is set aside when a block is announced; whoever then sends nothing loses it after 30 s, and others get it.
        wait_until(
            "the room of uploads that never came is given to others",
            lambda: r("SET", "small", "value") == "OK" and r("GET", "small") == b"value",
            60,
        )
    for s in idle:
        s.close()
