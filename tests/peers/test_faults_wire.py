"""Faults of the wire: odd, broken or foreign input on a data port (K07), and idle or misdirected clients (K04)."""

from __future__ import annotations

import re
import time

import pytest
from harness import connections, fd_count, rss, soak, wait_until
from lmcache_client import MIB
from test_hostile_input import HTTP, TLS_HELLO
from wire import EXIST, FAIL, GET, HEALTH, LIST, OK, PUT, Closed, Lm, Resp, block, connect, lm_request


@pytest.mark.parametrize("port", ["lm", "resp"])
def test_O22_plain_tcp_probes_leave_nothing(pool, port):
    p = pool.proxy
    with Lm(p.address["lm"]) as c:
        before, log = fd_count(p.pid), sum(f.stat().st_size for f in pool.log_files())
        for i in range(30_000 if soak() else 600):
            s = connect(p.address[port])
            if i % 3 == 1:
                s.sendall(b"0123456789")
            s.close()
        assert c.ask(HEALTH, "probe").code == OK
        wait_until("every descriptor is back", lambda: fd_count(p.pid) <= before + 4, 30)
        grown = sum(f.stat().st_size for f in pool.log_files()) - log
        assert grown < 64 * 1024, f"probes wrote {grown} bytes of log"


BAD_HEADERS = {
    "length -1": lm_request(PUT, "m@1@0@ab@bfloat16", -1),
    "length 2^31-1": lm_request(PUT, "m@1@0@ab@bfloat16", 2**31 - 1),
    "command 99": lm_request(99, "m@1@0@ab@bfloat16"),
    "command -1": lm_request(-1, "m@1@0@ab@bfloat16"),
    "dtype 77": lm_request(PUT, "m@1@0@ab@bfloat16", 16, dtype=77) + bytes(16),
    "format 1000": lm_request(PUT, "m@1@0@ab@bfloat16", 16, fmt=1000) + bytes(16),
    "key not UTF-8": lm_request(GET, b"\xff\xfe\xfd@1@0@ab@x"),
    "empty key": lm_request(GET, ""),
}


def test_O23_a_bad_header_costs_its_own_connection_at_most(pool):
    p = pool.proxy
    with Lm(p.address["lm"]) as bystander:
        bystander.put("bystander", b"fine")
        before, refused = rss(p.pid), pool.total("kvpool_shard_refused_input_total")
        for what, data in BAD_HEADERS.items():
            with Lm(p.address["lm"], timeout=10) as c:
                c.s.sendall(data + lm_request(EXIST, "nobody"))
                try:
                    c.exactly(36)  # an answer to one or the other
                except Closed:
                    pass
            assert bystander.get("bystander") == b"fine", what
        assert rss(p.pid) - before < 16 * MIB
        assert pool.total("kvpool_shard_refused_input_total") > refused


@pytest.mark.parametrize("port", ["lm", "resp"])
@pytest.mark.parametrize("what", ["http", "tls"])
def test_O24_foreign_protocols_are_closed_and_logged_once(pool, what, port):
    data = HTTP if what == "http" else TLS_HELLO
    p = pool.proxy
    for _ in range(200):
        with connect(p.address[port]) as s:
            s.settimeout(5)
            s.sendall(data)
            got = b""
            try:
                while chunk := s.recv(4096):
                    got += chunk
            except ConnectionResetError:
                pass  # a close with unread bytes; a hang would have been a timeout
            if what == "http" and got:
                assert got.startswith((b"HTTP/1.1 4", b"-ERR")), got
    lines = [x for f in pool.log_files() for x in f.read_text(errors="replace").splitlines()]
    told = [x for x in lines if re.search(what, x, re.I) and re.search("port|protocol", x, re.I)]
    assert told, f"no log line names {what}"
    assert len(told) < 50, "the log line is not rate-limited"


def test_O25_a_command_nobody_serves_is_answered(pool, unique):
    with Lm(pool.proxy.address["lm"]) as c:
        try:
            assert c.ask(LIST, "k").code == FAIL
        except Closed:
            pass
    with Resp(pool.proxy.address["resp"]) as r:
        assert r("SUBSCRIBE", "x").startswith("ERR") and r("PING") == "PONG"


def test_O25_health_is_answered_under_full_load(pool, clients, unique):
    own = unique(8)
    busy = [clients(n).open("mp", pool.proxy.address["resp"], 4 * MIB, "meta/busy", 4) for n in ("writer", "reader")]
    for c in busy:
        c.put(own)
        c.call("steady", shared=own, own=[])
    worst = 0.0
    with Lm(pool.proxy.address["lm"]) as c:
        for _ in range(100):
            began = time.monotonic()
            assert c.ask(HEALTH, "probe").code == OK
            worst = max(worst, time.monotonic() - began)
    for c in busy:
        assert c.call("steady_end")["problems"] == []
        c.close()
    assert worst < 1, f"HEALTH took {worst:.2f} s (product deadline 1 s)"


@pytest.mark.limit(180)
def test_O13_an_idle_client_is_kept(pool, clients, unique):
    idle = 15 * 60 if soak() else 45
    keys, conns = unique(2), []
    for scheme, port in (("lm", "lm"), ("mp", "resp"), ("redis", "resp")):
        c = clients("writer").open(scheme, pool.proxy.address[port], 1 * MIB, f"meta/idle-{scheme}", 2)
        c.put(keys[:1])
        conns.append((c, connections(clients("writer").pid, c.port)))
    time.sleep(idle)
    for c, before in conns:
        assert before <= connections(clients("writer").pid, c.port), "an idle connection was closed"
        c.put(keys[1:])
        assert c.exists(keys) == [True, True] and c.get(keys) == ["hit", "hit"]
    for c, _ in conns:
        c.close()


def test_O13_a_client_at_the_wrong_port_is_told(pool):
    p = pool.proxy
    lm, resp = lm_request(EXIST, "m@1@0@ab@bfloat16"), Resp.encode("GET", "k")
    ways = [("lm:// client, RESP port", p.address["resp"], lm), ("RESP client, lm:// port", p.address["lm"], resp)]
    ways += [("lm:// client, metrics port", p.address["http"], lm), ("RESP client, metrics port", p.address["http"], resp)]
    for c in pool.coordinators[:1]:
        ways += [("lm:// client, coordinator", c.address["endpoint"], lm), ("RESP client, coordinator", c.address["endpoint"], resp)]
    for what, address, data in ways:
        with connect(address) as s:
            s.settimeout(10)
            s.sendall(data)
            try:
                while s.recv(4096):
                    pass
            except ConnectionResetError:
                pass
            except TimeoutError:
                raise AssertionError(f"{what}: neither closed nor refused") from None


def test_a_block_of_64_mib_is_read_in_pieces_by_a_slow_reader(pool, unique):
    """A reader that stops in the middle holds up nobody else, and gets every byte when it goes on."""
    key, body = f"slow-{unique()[0]}", block("slow", 64 * MIB)
    with Resp(pool.proxy.address["resp"], 60) as w, Resp(pool.proxy.address["resp"], 60) as r:
        assert w("SET", key, body) == "OK"
        r.send("GET", key)
        head = r.f.read(1_000_000)
        for _ in range(20):
            assert w("EXISTS", key) == 1
            time.sleep(0.05)
        rest = r.f.read(len(b"$67108864\r\n") + len(body) + 2 - len(head))
        assert (head + rest)[11:-2] == body
        assert w("DEL", key) == 1
