"""Redis's own clients: redis-cli, and redis-py with RESP2 and RESP3; and a real Redis beside it, whose replies and errors are
the reference."""

from __future__ import annotations

import subprocess
import time

import pytest
import redis
from harness import split, wait_until
from wire import Closed, Resp, RespError, block

MIB = 1 << 20


@pytest.fixture(params=["proxy", "shard1"])
def at(pool, request) -> str:
    return (pool.proxy if request.param == "proxy" else pool.shards[0]).address["resp"]


@pytest.fixture
def key(unique):
    return f"redis-test:{unique()[0]}"


def cli(address: str, *args: str, stdin: bytes | None = None) -> str:
    host, port = split(address)
    r = subprocess.run(
        ["redis-cli", "-h", host, "-p", str(port), *args], input=stdin, capture_output=True, timeout=30
    )
    assert r.returncode in (0, 1), r  # 1: the server answered with an error
    return r.stdout.decode(errors="replace").strip()


# ------------------------------------------------------------------------------------------------------ clients


@pytest.mark.parametrize("protocol", [2, 3])
def test_redis_py(at, key, protocol):
    host, port = split(at)
    r = redis.Redis(host, port, protocol=protocol, socket_timeout=20)
    assert r.ping()
    value = block(key, 300_000)
    assert r.get(key) is None
    assert r.set(key, value) is True
    assert r.get(key) == value
    assert r.exists(key, key + "x") == 1
    assert r.set(key, b"other", nx=True) is None
    assert r.set(key + "x", b"other", xx=True) is None
    assert r.set(key, b"short", xx=True) is True
    assert r.get(key) == b"short"
    assert r.ttl(key) == -1 and r.ttl(key + "x") == -2
    assert r.set(key, b"a", ex=100) is True and 90 <= r.ttl(key) <= 100
    assert r.set(key, b"a", px=100_000) is True and 90 <= r.ttl(key) <= 100
    assert r.expire(key, 1000) and 990 <= r.ttl(key) <= 1000
    assert not r.expire(key + "x", 1000)
    assert r.set(key, b"b") is True and r.ttl(key) == -1, "a plain SET ends the time to live"
    assert r.delete(key, key + "x") == 1
    assert r.set(key, b"c") and r.unlink(key) == 1 and r.exists(key) == 0
    assert r.dbsize() >= 0
    assert r.info("replication")["role"] == "master"
    assert r.client_id() > 0
    assert r.client_setname("tester") and r.client_getname() in ("tester", b"tester")
    assert r.command_count() > 10
    assert r.echo(b"hello") == b"hello"
    with pytest.raises(redis.ResponseError):
        r.flushall()
    assert r.ping(), "the connection survives a refusal"
    r.close()


@pytest.mark.parametrize("protocol", [2, 3])
def test_redis_py_pipelines(at, key, protocol):
    host, port = split(at)
    r = redis.Redis(host, port, protocol=protocol, socket_timeout=20)
    pipe = r.pipeline(transaction=False)
    for i in range(200):
        pipe.set(f"{key}:{i}", b"%d" % i)
        pipe.get(f"{key}:{i}")
        pipe.get(f"{key}:absent")
    replies = pipe.execute()
    assert replies == [x for i in range(200) for x in (True, b"%d" % i, None)]
    assert r.delete(*[f"{key}:{i}" for i in range(200)]) == 200
    r.close()


def test_redis_cli(at, key):
    assert cli(at, "PING") == "PONG"
    assert cli(at, "-x", "SET", key, stdin=b"from a pipe") == "OK"
    assert cli(at, "GET", key) == "from a pipe"
    assert cli(at, "-3", "HELLO").startswith("server")
    assert cli(at, "EXISTS", key) == "1"
    assert cli(at, "TTL", key) == "-1"
    assert "role:master" in cli(at, "INFO", "replication")
    assert cli(at, "DEL", key) == "1"
    assert cli(at, "GET", key) == ""
    assert "NOPERM" in cli(at, "FLUSHALL") or "ERR" in cli(at, "FLUSHALL")


@pytest.mark.parametrize("size", [0, 1, 1023, 1024, 1025, 65_536, 1 * MIB, 33 * MIB + 7, 100 * MIB])
def test_values_of_every_size(at, key, size):
    host, port = split(at)
    r = redis.Redis(host, port, socket_timeout=60)
    value = block(key, size)
    assert r.set(key, value) is True
    assert r.get(key) == value
    assert r.delete(key) == 1
    r.close()


# ---------------------------------------------------------------------------------------- the same as real Redis

# Each is one connection's conversation; K is a key of its own. Replies must equal real Redis's, an error's first word too.
CONVERSATIONS = {
    "set-options": [
        "SET K a", "GET K", "SET K b NX", "GET K", "SET K c XX", "GET K", "SET K d EX 100", "TTL K", "SET K e PX 90000",
        "TTL K", "SET K f", "TTL K", "DEL K", "SET K g XX", "GET K", "SET K g NX", "GET K", "DEL K",
    ],
    "set-errors": [
        "SET K", "SET K v NX XX", "SET K v EX", "SET K v EX 0", "SET K v EX -1", "SET K v EX ten", "SET K v PX 0",
        "SET K v EX 1 PX 1", "SET K v BOGUS", "SET K v EX 9223372036854775807", "GET K", "EXISTS K",
    ],
    "arity": ["GET", "GET a b", "EXISTS", "DEL", "UNLINK", "TTL", "EXPIRE K", "ECHO", "SELECT", "WAIT 1", "DBSIZE x"],
    "unknown": ["BOGUS", "BOGUS a b c", "GETT K", "CLIENT BOGUS", "COMMAND BOGUS"],
    "counts": ["EXISTS K K2", "SET K a", "SET K2 b", "EXISTS K K2 K", "DEL K K2 K3", "EXISTS K K2", "UNLINK K K2"],
    "ttl": [
        "TTL K", "EXPIRE K 10", "SET K a", "TTL K", "EXPIRE K 100", "TTL K", "EXPIRE K 0", "EXISTS K", "TTL K",
        "SET K a", "EXPIRE K -1", "EXISTS K", "SET K a", "EXPIRE K ten", "DEL K",
    ],
    "select": ["SELECT 0", "SELECT 99", "SELECT -1", "SELECT zero"],
    "ping": ["PING", "PING hello", "PING a b", "ECHO hi"],
    "hello": ["HELLO 9", "HELLO two", "HELLO 2 BOGUS"],
    "names": ["CLIENT GETNAME", "CLIENT SETNAME me", "CLIENT GETNAME", "CLIENT SETNAME"],
    "case": ["set K a", "gEt K", "DeL K"],
}  # fmt: skip


@pytest.mark.parametrize("protocol", [2, 3])
@pytest.mark.parametrize("conversation", CONVERSATIONS)
def test_replies_as_redis(pool, redis_server, key, conversation, protocol):
    lines = [[w.replace("K", key) if w[:1] == "K" else w for w in c.split()] for c in CONVERSATIONS[conversation]]

    def hold(address):
        with Resp(address) as r:
            if protocol == 3:
                assert r("HELLO", 3)["proto"] == 3
            said = []
            for line in lines:
                reply = r(*line)
                said.append((" ".join(line), reply.split()[0] if isinstance(reply, RespError) else reply))
            return said

    assert hold(pool.proxy.address["resp"]) == hold(redis_server)


def test_expiry_removes_a_block(at, key):
    with Resp(at) as r:
        assert r("SET", key, "soon gone", "PX", 300) == "OK"
        wait_until("the block has expired", lambda: r("GET", key) is None, 10, every=0.05)
        assert r("EXISTS", key) == 0 and r("TTL", key) == -2


def test_hello_auth_client_info_command_quit(at):
    with Resp(at) as r:
        hello = r("HELLO", 3, "AUTH", "default", "any", "SETNAME", "me")
        # Redis answers WRONGPASS or OK by its own users; a pool has none yet, so a client that has a password is let in.
        assert isinstance(hello, dict) and hello["proto"] == 3 and hello["role"] == b"master"
        assert r("CLIENT", "GETNAME") == b"me"
        assert r("CLIENT", "SETINFO", "LIB-NAME", "test") == "OK"
        assert r("GET", "absent:none") is None
        assert isinstance(r("HELLO", 2), list)
        assert r("AUTH", "pw") == "OK" and r("AUTH", "default", "pw") == "OK"
        assert b"role:master" in r("INFO") and b"role:master" in r("INFO", "REPLICATION")
        assert isinstance(r("COMMAND"), list) and r("COMMAND", "COUNT") == len(r("COMMAND"))
        assert isinstance(r("DBSIZE"), int)
        assert r("QUIT") == "OK"
        with pytest.raises(Closed):
            r("PING")


def test_wait_tells_how_many_copies_hold_the_last_writes(pool, at, key):
    with Resp(at) as r:
        assert r("SET", key, block(key, 1 * MIB)) == "OK"
        assert r("WAIT", 2, 1000) == 2
        assert r("DEL", key) == 1


def test_dbsize_counts_blocks(pool, key):
    with Resp(pool.proxy.address["resp"]) as r:
        before = r("DBSIZE")
        assert isinstance(before, int) and before >= 0


REFUSED = [
    "FLUSHALL", "FLUSHDB", "CONFIG SET maxmemory 1", "CONFIG REWRITE", "DEBUG SLEEP 0", "SHUTDOWN NOSAVE",
    "EVAL return(1) 0", "REPLICAOF NO ONE", "SLAVEOF NO ONE", "SCRIPT FLUSH", "MIGRATE h 1 k 0 1", "SWAPDB 0 1",
]  # fmt: skip


def test_destructive_commands_are_refused_and_the_connection_goes_on(pool, at, key):
    with Resp(at) as r:
        assert r("SET", key, "kept") == "OK"
        for line in REFUSED:
            reply = r(*line.split())
            assert isinstance(reply, RespError), f"{line}: {reply!r}"
            assert r("GET", key) == b"kept", line
        assert r("DEL", key) == 1


def test_pipelined_requests_are_answered_in_order(at, key):
    """Many requests in one write, cut at odd places: replies come in order and in step."""
    n = 300
    stream = b"".join(
        Resp.encode("SET", f"{key}:{i}", b"v%d" % i * (i % 7)) + Resp.encode("GET", f"{key}:{i}") + Resp.encode("PING")
        for i in range(n)
    )
    with Resp(at) as r:
        for cut in range(0, len(stream), 997):
            r.s.sendall(stream[cut : cut + 997])
        for i in range(n):
            assert [r.read(), r.read(), r.read()] == ["OK", b"v%d" % i * (i % 7), "PONG"], i
        assert r("DEL", *[f"{key}:{i}" for i in range(n)]) == n


def test_a_slow_upload_is_stored_whole(at, key):
    """A client may take its time in the middle of a value; nobody else waits for it."""
    value = block(key, 2 * MIB)
    request = Resp.encode("SET", key, value)
    with Resp(at) as slow, Resp(at) as other:
        for part in range(4):
            slow.s.sendall(request[part * len(request) // 4 : (part + 1) * len(request) // 4])
            assert other("PING") == "PONG"
            time.sleep(0.05)
        assert slow.read() == "OK"
        assert slow("GET", key) == value
        assert other("DEL", key) == 1
