"""The test's end of `lmcache_worker.py`: the real LMCache client behind calls that always return."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

from harness import _die_with_parent, split

MIB = 1 << 20
START_TIMEOUT = 180.0  # the first import of LMCache takes 10 to 45 s on a busy machine
CALL_TIMEOUT = 60.0


class Hang(AssertionError):
    """The client library did not come back."""


class ClientError(AssertionError):
    """The client library raised."""


class Client:
    """One client process; it may hold several connections, each under a name."""

    def __init__(self):
        self.err = tempfile.TemporaryFile()
        self.p = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("lmcache_worker.py"))],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.err, text=True, bufsize=1,
            preexec_fn=_die_with_parent,
            env={**os.environ, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
        )  # fmt: skip
        self.lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._pump, daemon=True).start()
        self.ready = False

    @property
    def pid(self) -> int:
        return self.p.pid

    def _pump(self) -> None:
        for line in self.p.stdout:
            self.lines.put(line)
        self.lines.put(None)

    def _reply(self, timeout: float) -> dict:
        try:
            line = self.lines.get(timeout=timeout)
        except queue.Empty:
            self.close()
            raise Hang(f"LMCache's client did not return within {timeout:.0f} s\n{self.stderr()}") from None
        if line is None:
            raise ClientError(f"LMCache's client process ended ({self.p.wait()})\n{self.stderr()}")
        return json.loads(line)

    def stderr(self) -> str:
        self.err.seek(0)
        return self.err.read().decode(errors="replace")[-3000:]

    def wait_ready(self) -> None:
        if not self.ready:
            self._reply(START_TIMEOUT)
            self.ready = True

    def call(self, op: str, timeout: float = CALL_TIMEOUT, **kw) -> dict:
        self.wait_ready()
        self.p.stdin.write(json.dumps({"op": op, **kw}) + "\n")
        reply = self._reply(timeout)
        if "error" in reply:
            raise ClientError(f"{op}: {reply['error']}\n{reply.get('trace', '')}")
        return reply

    def open(self, scheme: str, address: str, size: int = 4 * MIB, model: str = "meta/m", workers: int = 4) -> "Conn":
        """Connect with one of `lm`, `redis`, `resp` (in-process connectors) or `mp` (the L2 adapter)."""
        host, port = split(address)
        conn = f"{scheme}-{address}-{size}-{model}-{workers}-{id(object())}"
        self.call("open", conn=conn, scheme=scheme, host=host, port=port, size=size, model=model, workers=workers)
        return Conn(self, conn, port)

    def alive(self) -> bool:
        return self.p.poll() is None

    def close(self) -> None:
        if self.alive():
            self.p.send_signal(signal.SIGKILL)
        self.p.wait()


class Conn:
    """One connector of a client process."""

    def __init__(self, client: Client, name: str, port: int):
        self.client, self.conn, self.port = client, name, port
        self.seconds = self.worst = 0.0  # of the last request inside the client: all calls, and the longest one

    def call(self, op: str, **kw) -> dict:
        reply = self.client.call(op, conn=self.conn, **kw)
        self.seconds, self.worst = reply.get("seconds", 0.0), reply.get("worst", 0.0)
        return reply

    def put(self, keys: list[int], **kw) -> None:
        results = self.call("put", keys=keys, **kw)["results"]
        assert results == ["ok"] * len(keys), results

    def get(self, keys: list[int], **kw) -> list[str]:
        return self.call("get", keys=keys, **kw)["results"]

    def exists(self, keys: list[int], **kw) -> list[bool]:
        return self.call("exists", keys=keys, **kw)["results"]

    def delete(self, keys: list[int]) -> None:
        self.call("delete", keys=keys)

    def name(self, key: int) -> str:
        """The key's text on the wire (without the suffixes of `redis://`)."""
        return self.client.call("name", conn=self.conn, keys=[key])["results"][0]

    def close(self) -> None:
        self.client.call("close", conn=self.conn)
