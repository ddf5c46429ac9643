"""Fixtures: pools, LMCache client processes, a Redis to compare with, and the checks that close every test.

After each test every `kvpool_*violation*` counter of every living process must be 0 and no log may hold a panic. A
failing test prints the ends of its pools' logs.

`--foreign-resp HOST:PORT --foreign-lm HOST:PORT` runs the tests against other servers (Redis, LMCache's own), which is how
the tests themselves are tried: where those servers misbehave, they must fail.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from types import SimpleNamespace

import harness
import pytest
from harness import LIVE, Pool, free_port, wait_until
from lmcache_client import Client
from wire import Resp


def pytest_addoption(parser):
    parser.addoption("--foreign-resp", help="run against this RESP server instead of a kvpool")
    parser.addoption("--foreign-lm", help="run against this lm:// server instead of a kvpool")
    parser.addoption("--main-job-rounds", type=int, default=1, help="how often to run the main-job test")


# ------------------------------------------------------------------------------------- time limits and reports

TEST_TIMEOUT = 300  # a test that says nothing else has hung after this many seconds


def pytest_configure(config):
    config.addinivalue_line("markers", "limit(seconds): how long the test may take before it counts as hung")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    limit = item.get_closest_marker("limit")
    seconds = limit.args[0] if limit else TEST_TIMEOUT
    seconds *= 20 if harness.soak() else 1

    def hung(*_):
        raise TimeoutError(f"the test did not end within {seconds} s")

    previous = signal.signal(signal.SIGALRM, hung)
    signal.alarm(seconds)
    try:
        return (yield)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if report.failed:
        for pool in LIVE:
            report.sections.append((f"logs of the pool in {pool.dir}", pool.logs()))
    return report


def pytest_sessionfinish():
    for pool in list(LIVE):
        pool.close()


# --------------------------------------------------------------------------------------------------------- pools


class Foreign:
    """Stands in for a pool where the server is somebody else's."""

    def __init__(self, resp, lm):
        self.proxy = SimpleNamespace(name="proxy", pid=None, address={"resp": resp, "lm": lm})
        self.shards, self.coordinators = [self.proxy] * 3, []

    def total(self, *_, **__):
        pytest.skip("a foreign server has no such counters")

    def violations(self):
        return []

    def logs(self):
        return ""


@pytest.fixture(autouse=True)
def nothing_violated(request):
    """The check that ends every test. It asks for the pools first, so that it runs before they are closed."""
    yield
    problems = [v for pool in LIVE for v in pool.violations()]
    assert not problems, "\n".join(problems)


@pytest.fixture(scope="module")
def pool(request):
    """A healthy pool of three coordinators, three shards and a proxy, shared by the tests of a file."""
    resp, lm = request.config.getoption("--foreign-resp"), request.config.getoption("--foreign-lm")
    if resp or lm:
        yield Foreign(resp, lm)
        return
    p = Pool(memory="512MiB")
    try:
        p.wait_settled()
        yield p
    finally:
        p.close()


@pytest.fixture
def new_pool(request):
    """Makes pools of the test's own; they end with it."""
    made = []

    def make(healthy: bool = True, **kw) -> Pool:
        p = Pool(**kw)
        made.append(p)
        if healthy:
            p.wait_settled()
        return p

    yield make
    problems = [v for p in made if p in LIVE for v in p.violations()]
    for p in made:
        p.close()
    assert not problems, "\n".join(problems)


# ------------------------------------------------------------------------------------------------------- clients


@pytest.fixture(scope="session")
def clients():
    """LMCache client processes by name: `clients("writer")`. A dead one is replaced."""
    made: dict[str, Client] = {}

    def client(name: str) -> Client:
        if name not in made or not made[name].alive():
            made[name] = Client()
        return made[name]

    for name in ("writer", "reader"):  # their slow imports run side by side
        client(name)
    yield client
    for c in made.values():
        c.close()


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory):
    """A real Redis on a free port: the reference for replies and errors."""
    exe = shutil.which("redis-server")
    assert exe, "redis-server is not installed (tests/setup.sh installs it)"
    port, where = free_port(), tmp_path_factory.mktemp("redis")
    server = subprocess.Popen(
        [exe, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--dir", str(where)],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, preexec_fn=harness._die_with_parent,
    )  # fmt: skip
    address = f"127.0.0.1:{port}"

    def answers():
        try:
            with Resp(address, 1) as r:
                return r("PING") == "PONG"
        except OSError:
            return False

    try:
        wait_until("redis-server answers", answers, 20)
        yield address
    finally:
        server.terminate()
        server.wait()


@pytest.fixture(scope="session")
def unique():
    """Numbers no other test of this run has used: block names never collide on a shared pool."""
    state = {"next": int.from_bytes(os.urandom(4), "big") << 20}

    def take(n: int = 1) -> list[int]:
        first = state["next"]
        state["next"] += n
        return list(range(first, first + n))

    return take
