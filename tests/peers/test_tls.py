"""Mutual TLS between real processes, with the private CA of `kvpool cert`: who is let in, as whom, and that no secret is said aloud."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from harness import _die_with_parent, binary, free_port, wait_until
from wire import Resp, block

TOKEN = "canary-join-token-5f1d"


class Secured:
    """Three coordinators, two shards and a proxy, each with a certificate of its own."""

    def __init__(self, home: Path):
        self.home, self.certs, self.children = home, home / "certs", {}
        self.cli("cert", "ca", "--dir", str(self.certs))
        self.grpc = {n: free_port() for n in (1, 2, 3)}
        self.endpoints = ",".join(f"127.0.0.1:{port}" for port in self.grpc.values())
        self.resp = free_port()

    def certificate(self, role: str, name: str, directory: Path | None = None) -> list[str]:
        code, said = self.cli("cert", "issue", role, name, "--dir", str(directory or self.certs))
        assert code == 0, said
        return said.split()

    def cli(self, *args: str, tls: list[str] = (), timeout: float = 60) -> tuple[int, str]:
        env = {k: v for k, v in os.environ.items() if not k.startswith("KVPOOL_")}
        env["KVPOOL_JOIN_TOKEN"] = TOKEN
        command = [binary(), *args, *tls]
        r = subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout)
        return r.returncode, r.stdout if r.returncode == 0 else r.stdout + r.stderr

    def start(self, name: str, *args: str) -> None:
        env = {k: v for k, v in os.environ.items() if not k.startswith("KVPOOL_")}
        env["KVPOOL_JOIN_TOKEN"] = TOKEN
        common = ["--http", f"127.0.0.1:{free_port()}", "--timing", "relaxed", "--log", "debug"]
        with (self.home / f"{name}.log").open("ab") as out:
            self.children[name] = subprocess.Popen(
                [binary(), *args, *common], env=env, stdout=out, stderr=out, stdin=subprocess.DEVNULL,
                preexec_fn=_die_with_parent, start_new_session=True,
            )  # fmt: skip

    def start_all(self) -> None:
        members = ",".join(f"{n}=127.0.0.1:{port}" for n, port in self.grpc.items())
        for n, port in self.grpc.items():
            self.start(
                f"coordinator-{n}", "coordinator", "run", "--id", str(n), "--members", members, "--listen", f"127.0.0.1:{port}",
                "--data-dir", str(self.home / f"data-{n}"), *self.certificate("member", str(n)),
            )  # fmt: skip
        shared = self.certificate("shard", "*")
        for n in (1, 2):
            own = self.certificate("shard", "shard-1") if n == 1 else shared
            self.shard(f"shard-{n}", own)
        self.start(
            "proxy", "proxy", "run", "--coordinators", self.endpoints, "--resp", f"127.0.0.1:{self.resp}", "--lm", f"127.0.0.1:{free_port()}",
            *self.certificate("proxy", "*"),
        )  # fmt: skip

    def shard(self, name: str, tls: list[str]) -> None:
        ports = [arg for flag in ("--peer", "--resp", "--lm") for arg in (flag, f"127.0.0.1:{free_port()}")]
        self.start(
            name, "shard", "run", "--id", name, "--node", f"node-of-{name}", "--memory", "64MiB",
            "--coordinators", self.endpoints, *ports, *tls,
        )  # fmt: skip

    def log(self, name: str) -> str:
        return (self.home / f"{name}.log").read_text(errors="replace")

    def close(self) -> None:
        for child in self.children.values():
            child.terminate()
        for child in self.children.values():
            try:
                child.wait(15)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()


@pytest.fixture
def secured(tmp_path, request):
    if request.config.getoption("--foreign-resp") or request.config.getoption("--foreign-lm"):
        pytest.skip("a foreign server has no such certificates")
    pool = Secured(tmp_path)
    try:
        yield pool
    finally:
        pool.close()


def test_a_pool_with_mutual_tls_serves_and_lets_in_only_whom_it_should(secured):
    pool = secured
    pool.start_all()
    person = pool.certificate("person", "ada")
    ask = ("--endpoints", pool.endpoints)

    said = ""

    def healthy() -> bool:
        nonlocal said
        code, said = pool.cli("status", *ask, tls=person)
        return code == 0

    try:
        wait_until("the pool is healthy", healthy, 60, every=0.3)
    except AssertionError as e:
        raise AssertionError(f"{e}: {said}\n{pool.log('coordinator-1')[-4000:]}") from None
    with Resp(f"127.0.0.1:{pool.resp}", 30) as r:
        body = block("tls", 1_000_000)
        assert r("SET", "tls", body) == "OK" and r("GET", "tls") == body

    # Somebody with the join token alone, or with a certificate of another CA.
    code, said = pool.cli("status", *ask)
    assert code == 3, said
    other = pool.home / "other"
    pool.cli("cert", "ca", "--dir", str(other))
    code, said = pool.cli("status", *ask, tls=pool.certificate("person", "eve", other))
    assert code == 3, said
    # A shard under a name that its certificate does not have.
    pool.shard("shard-9", pool.certificate("shard", "shard-8"))
    wait_until("the impostor is refused", lambda: "not_allowed" in pool.log("shard-9"), 30)
    code, said = pool.cli("get", "shards", *ask, tls=person)
    assert code == 0 and "shard-2" in said and "shard-9" not in said, said
    # Keys that do not fit are an error that names the setting.
    code, said = pool.cli("status", *ask, tls=["--tls-ca", str(pool.certs / "ca.pem")])
    assert code == 2 and "--tls-cert" in said and "--tls-key" in said, said

    secrets = [TOKEN, *(p.read_text().splitlines()[1] for p in pool.certs.glob("*.key"))]
    for log in pool.home.glob("*.log"):
        text = log.read_text(errors="replace")
        assert "panicked" not in text, log.name
        assert not [s for s in secrets if s in text], f"a secret stands in {log.name}"
