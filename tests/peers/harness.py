"""A kvpool of real processes for one test: started by `kvpool dev`, hurt by pid, always cleaned up.

Nothing here knows how kvpool works inside: it uses the ready file, `kvpool status`, `kvpool get` and `/metrics`, as a
person would. `kvpool dev` restarts no child, so a victim comes back by running its own command line again, read from
/proc while it lived.
"""

from __future__ import annotations

import ctypes
import dataclasses
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
LIVE: list["Pool"] = []  # for the logs that a failing test prints, and for the last clean-up


def binary() -> str:
    """The kvpool under test: `KVPOOL_BIN`, else the release build of this checkout."""
    target = Path(os.environ.get("CARGO_TARGET_DIR", REPO / "target"))
    return os.environ.get("KVPOOL_BIN", str(target / "release" / "kvpool"))


def soak() -> bool:
    """True when the long cases run in full (`just soak`)."""
    return os.environ.get("KVPOOL_SOAK") == "1"


def free_port() -> int:
    """A loopback port that was free a moment ago."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def split(address: str) -> tuple[str, int]:
    host, port = address.rsplit(":", 1)
    return host, int(port)


def wait_until(what: str, condition: Callable[[], object], timeout: float, every: float = 0.1):
    """Poll until `condition` is truthy and return its value; otherwise fail naming what was awaited."""
    deadline = time.monotonic() + timeout
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout:.0f} s: {what}")
        time.sleep(every)


def _die_with_parent() -> None:
    """In the child before exec: a killed test runner must not leave a pool behind."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


# --------------------------------------------------------------------------------------------------- processes


@dataclasses.dataclass
class Proc:
    """One process of the pool: what it was told, so that it can be told again."""

    name: str  # coordinator-1, shard-2, proxy
    role: str
    ident: str
    pid: int
    address: dict[str, str]  # endpoint, resp, lm, http: host:port
    argv: list[str]
    env: dict[str, str]
    cwd: str
    born: str  # start time of the pid, so that a recycled pid is never signalled
    child: subprocess.Popen | None = None  # set when the harness, not `kvpool dev`, started it

    def alive(self) -> bool:
        if self.child is not None:
            return self.child.poll() is None
        return _birth(self.pid) == self.born and _state(self.pid) not in "ZX"

    def signal(self, number: int) -> None:
        if self.alive():
            os.kill(self.pid, number)


def _stat(pid: int) -> list[str]:
    try:
        # The command name may hold spaces: fields are counted from behind it.
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except (FileNotFoundError, ProcessLookupError):
        return []


def _birth(pid: int) -> str:
    fields = _stat(pid)
    return fields[19] if fields else ""


def _state(pid: int) -> str:
    fields = _stat(pid)
    return fields[0] if fields else "X"


def rss(pid: int) -> int:
    """Resident bytes of a process."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    return 0


def fd_count(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def thread_count(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/task"))


def _sockets(pid: int) -> set[str]:
    """Inodes of a process's sockets."""
    inodes = set()
    for fd in os.listdir(f"/proc/{pid}/fd"):
        try:
            link = os.readlink(f"/proc/{pid}/fd/{fd}")
        except FileNotFoundError:
            continue
        if link.startswith("socket:["):
            inodes.add(link[8:-1])
    return inodes


def listening(pid: int) -> set[int]:
    """TCP ports a process listens on."""
    inodes, found = _sockets(pid), set()
    for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]:
        f = line.split()
        if f[9] in inodes and f[3] == "0A":
            found.add(int(f[1].split(":")[1], 16))
    return found


def connections(pid: int, port: int) -> set[int]:
    """Local ports of a client process's established TCP connections to `port`.

    A lost connection shows here even where a client library quietly makes a new one.
    """
    inodes, found = _sockets(pid), set()
    for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]:
        f = line.split()
        local, remote, state, inode = f[1], f[2], f[3], f[9]
        if inode in inodes and state == "01" and int(remote.split(":")[1], 16) == port:
            found.add(int(local.split(":")[1], 16))
    return found


# ----------------------------------------------------------------------------------------------------- metrics


class Metrics:
    """One scrape, summed over the series that match."""

    LINE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)")
    LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')

    def __init__(self, text: str):
        self.series: list[tuple[str, dict[str, str], float]] = []
        for line in text.splitlines():
            m = None if line.startswith("#") else self.LINE.match(line)
            if m:
                self.series.append((m[1], dict(self.LABEL.findall(m[2] or "")), float(m[3])))

    def sum(self, name: str, **labels: str) -> float:
        return sum(v for _, v in self.of(name, **labels))

    def of(self, name: str, **labels: str) -> Iterator[tuple[dict[str, str], float]]:
        for n, l, v in self.series:
            if n == name and all(l.get(k) == w for k, w in labels.items()):
                yield l, v

    def violations(self) -> list[str]:
        return [f"{n}{l} = {v:g}" for n, l, v in self.series if "violation" in n and v != 0]


def scrape(http: str, timeout: float = 5) -> Metrics:
    with urllib.request.urlopen(f"http://{http}/metrics", timeout=timeout) as r:
        return Metrics(r.read().decode())


# -------------------------------------------------------------------------------------------------------- pool


class Pool:
    """`kvpool dev` and its children."""

    def __init__(
        self,
        coordinators: int = 3,
        shards: int = 3,
        factor: int = 2,
        memory: str = "128MiB",
        timing: str = "relaxed",
        data_dir: Path | None = None,
        ports: dict[str, int] | None = None,
        ready_within: float = 90,
    ):
        self.factor = factor
        self.dir = Path(tempfile.mkdtemp(prefix="kvpool-test-"))
        self.data = data_dir or self.dir / "data"
        self.ready_file = self.dir / "ready.json"
        self.log = self.dir / "dev.log"
        self.procs: dict[str, Proc] = {}
        self.dev: subprocess.Popen | None = None
        ports = ports or {p: free_port() for p in ("resp", "lm", "http")}
        self.argv = [
            binary(), "dev",
            "--coordinators", str(coordinators), "--shards", str(shards), "--factor", str(factor),
            "--memory-per-shard", memory, "--timing", timing,
            "--data-dir", str(self.data), "--ready-file", str(self.ready_file),
            "--resp-port", str(ports["resp"]), "--lm-port", str(ports["lm"]), "--http-port", str(ports["http"]),
        ]  # fmt: skip
        LIVE.append(self)
        try:
            self._start(ready_within)
        except BaseException:
            self.close()
            raise

    def _start(self, ready_within: float) -> None:
        with self.log.open("ab") as out:
            self.dev = subprocess.Popen(
                self.argv, stdout=out, stderr=out, stdin=subprocess.DEVNULL, preexec_fn=_die_with_parent,
                start_new_session=True,  # a hang-up of the terminal is not part of any test
            )  # fmt: skip

        def ready() -> dict | None:
            if self.dev.poll() is not None:
                raise AssertionError(f"kvpool dev ended with {self.dev.returncode}\n{self.logs()}")
            try:
                return json.loads(self.ready_file.read_text())
            except (FileNotFoundError, json.JSONDecodeError):
                return None

        began = time.monotonic()
        info = wait_until("the ready file of kvpool dev", ready, ready_within, every=0.05)
        self.ready_seconds = time.monotonic() - began
        for role, entries in (
            ("coordinator", info["coordinators"]), ("shard", info["shards"]), ("proxy", [info["proxy"]]),
        ):  # fmt: skip
            for n, e in enumerate(entries, 1):
                name = "proxy" if role == "proxy" else f"{role}-{n}"
                self.procs[name] = self._adopt(name, role, e)

    @staticmethod
    def _adopt(name: str, role: str, entry: dict) -> Proc:
        pid = entry["pid"]
        raw = Path(f"/proc/{pid}/environ").read_bytes()
        return Proc(
            name=name,
            role=role,
            ident=str(entry.get("id", name)),
            pid=pid,
            address={k: v for k, v in entry.items() if isinstance(v, str) and k != "id"},
            argv=[os.fsdecode(a) for a in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[:-1]],
            env=dict(os.fsdecode(e).split("=", 1) for e in raw.split(b"\0") if b"=" in e),
            cwd=os.readlink(f"/proc/{pid}/cwd"),
            born=_birth(pid),
        )

    # -- who is there

    @property
    def proxy(self) -> Proc:
        return self.procs["proxy"]

    def of_role(self, role: str) -> list[Proc]:
        return [p for p in self.procs.values() if p.role == role]

    @property
    def shards(self) -> list[Proc]:
        return self.of_role("shard")

    @property
    def coordinators(self) -> list[Proc]:
        return self.of_role("coordinator")

    def leader(self, timeout: float = 20) -> Proc:
        """The coordinator that leads, by the members' own account."""

        def ask() -> Proc | None:
            code, text = self.cli("get", "coordinators", "-o", "json")
            rows = json.loads(text) if code == 0 else []
            leads = [str(row["id"]) for row in rows if row["leader"]]
            return next((c for c in self.coordinators if c.ident in leads), None)

        return wait_until("a leader among the coordinators", ask, timeout)

    # -- what happens to them

    def kill(self, *procs: Proc, number: int = signal.SIGKILL) -> None:
        """End processes (all signalled before any is awaited)."""
        for p in procs:
            p.signal(number)
        for p in procs:
            wait_until(f"{p.name} (pid {p.pid}) is gone", lambda p=p: not p.alive(), 20, every=0.02)

    def stop(self, p: Proc) -> None:
        p.signal(signal.SIGSTOP)
        wait_until(f"{p.name} is stopped", lambda: _state(p.pid) in "TX", 5, every=0.01)

    def cont(self, p: Proc) -> None:
        p.signal(signal.SIGCONT)

    def restart(self, *procs: Proc) -> None:
        """Run the role's command again by hand, with the same arguments, environment and data."""
        for p in procs:
            assert not p.alive(), f"{p.name} still runs"
            with (self.dir / f"{p.name}.log").open("ab") as out:
                p.child = subprocess.Popen(
                    p.argv, env=p.env, cwd=p.cwd, stdout=out, stderr=out, stdin=subprocess.DEVNULL,
                    preexec_fn=_die_with_parent, start_new_session=True,
                )  # fmt: skip
            p.pid = p.child.pid
            p.born = _birth(p.pid)

    # -- what they say

    def cli(self, *args: str, timeout: float = 20) -> tuple[int, str]:
        """Run `kvpool ARGS` against this pool's coordinators: (exit code, output)."""
        env = dict(os.environ, KVPOOL_ENDPOINTS=",".join(c.address["endpoint"] for c in self.coordinators))
        env["KVPOOL_JOIN_TOKEN"] = self.coordinators[0].env["KVPOOL_JOIN_TOKEN"]
        try:
            r = subprocess.run([binary(), *args], env=env, capture_output=True, text=True, timeout=timeout)
        except subprocess.TimeoutExpired:
            return -1, f"kvpool {' '.join(args)}: no answer within {timeout} s"
        return r.returncode, r.stdout if r.returncode == 0 else r.stdout + r.stderr

    def get(self, kind: str) -> list[dict]:
        code, text = self.cli("get", kind, "-o", "json")
        assert code == 0, f"kvpool get {kind}: exit {code}: {text}"
        return json.loads(text)

    def status(self) -> tuple[bool, str]:
        """(is the pool healthy, what `kvpool status` says)."""
        code, text = self.cli("status")
        assert (code == 0) == text.startswith("healthy"), f"exit code {code} and words differ: {text}"
        return code == 0, text

    def wait_healthy(self, timeout: float = 90) -> str:
        said = ""

        def healthy() -> bool:
            nonlocal said
            ok, said = self.status()
            return ok

        try:
            wait_until("kvpool status says healthy", healthy, timeout, every=0.2)
        except AssertionError as e:
            raise AssertionError(f"{e}; it says:\n{said}") from None
        return said

    def wait_settled(self, timeout: float = 90) -> None:
        """Healthy, and every slot lies where it is to stay: just `factor` copies, all complete."""

        def settled() -> bool:
            lists = [row["copies"] for row in self.get("slots")]
            return all(len(copies) == self.factor and all(c["state"] == "in-sync" for c in copies) for copies in lists)

        self.wait_healthy(timeout)
        wait_until("no slot is on its way", settled, timeout, every=0.2)

    def metrics(self, p: Proc) -> Metrics:
        return scrape(p.address["http"])

    def total(self, name: str, procs: list[Proc] | None = None, **labels: str) -> float:
        """A counter summed over the given processes (default: shards and proxy)."""
        procs = procs if procs is not None else [*self.shards, self.proxy]
        return sum(self.metrics(p).sum(name, **labels) for p in procs if p.alive())

    def overhead(self, p: Proc) -> int:
        """Resident bytes of a process without the memory for blocks, which a shard touches whole soon after its start."""
        arena = self.metrics(p).sum("kvpool_shard_arena_bytes", kind="resident")
        return rss(p.pid) - int(arena)

    def settle_memory(self) -> None:
        """Waits until every shard has touched its memory, so that overheads can be compared."""

        def touched(p: Proc) -> bool:
            m = self.metrics(p)
            limit = m.sum("kvpool_shard_arena_bytes", kind="limit")
            return m.sum("kvpool_shard_arena_bytes", kind="resident") >= 0.9 * limit

        wait_until("the shards have touched their memory", lambda: all(touched(p) for p in self.shards), 120, every=0.5)

    def violations(self) -> list[str]:
        """Every violation counter that is not 0, and every panic in a log."""
        found = []
        for p in self.procs.values():
            if p.alive() and _state(p.pid) not in "T":
                try:
                    found += [f"{p.name}: {v}" for v in self.metrics(p).violations()]
                except OSError as e:
                    found.append(f"{p.name}: /metrics does not answer: {e}")
        for path in self.log_files():
            for line in path.read_text(errors="replace").splitlines():
                if "panicked at" in line:
                    found.append(f"{path.name}: {line}")
        return found

    def log_files(self) -> list[Path]:
        return sorted({*self.dir.rglob("*.log"), *(self.data.rglob("*.log") if self.data.exists() else ())})

    def logs(self, lines: int = 40) -> str:
        out = []
        for path in self.log_files():
            tail = path.read_text(errors="replace").splitlines()[-lines:]
            if tail:
                out.append(f"--- {path.name} (last {len(tail)} lines)\n" + "\n".join(tail))
        return "\n".join(out)

    # -- the end

    def interrupt(self, timeout: float = 30) -> int:
        """What Ctrl-C does: SIGINT to `kvpool dev`; its exit code."""
        self.dev.send_signal(signal.SIGINT)
        return self.dev.wait(timeout)

    def close(self) -> None:
        """End everything this pool started, and nothing else."""
        if self in LIVE:
            LIVE.remove(self)
        for p in self.procs.values():
            p.signal(signal.SIGCONT)
        if self.dev is not None and self.dev.poll() is None:
            self.dev.send_signal(signal.SIGTERM)
        for p in self.procs.values():
            if p.child is not None and p.child.poll() is None:
                p.child.terminate()
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline and any(p.alive() for p in self.procs.values()):
            time.sleep(0.05)
        for p in self.procs.values():
            p.signal(signal.SIGKILL)
            if p.child is not None:
                p.child.wait()
        if self.dev is not None:
            try:
                self.dev.wait(10)
            except subprocess.TimeoutExpired:
                self.dev.kill()
                self.dev.wait()
        if os.environ.get("KVPOOL_TEST_KEEP") != "1":
            shutil.rmtree(self.dir, ignore_errors=True)

