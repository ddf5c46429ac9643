"""The real LMCache 0.5.6 client in a process of its own, driven by JSON lines.

Run by `lmcache_client.Client`. Its libraries can hang for ever (the native client on a nil, any client on a frozen server),
which is why it is a process: whoever drives it can give up and kill it. One line in, one line out:
    {"op": "put", "conn": "a", "keys": [1, 2]}  ->  {"results": ["ok", "ok"], "seconds": 0.03, "worst": 0.02}

Every block's bytes follow from its key, its length and a generation number stored in its first eight bytes; a read is
compared in full.
"""

import asyncio
import functools
import hashlib
import json
import os
import select
import sys
import threading
import time
import traceback

OUT = os.fdopen(os.dup(1), "w", buffering=1)  # replies; whatever the libraries print goes to stderr
os.dup2(2, 1)
os.environ.setdefault("LMCACHE_LOG_LEVEL", "ERROR")
os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")
os.environ.setdefault("PYTHONHASHSEED", "0")

import numpy as np  # noqa: E402
import torch  # noqa: E402
from lmcache.utils import CacheEngineKey  # noqa: E402
from lmcache.v1.config import LMCacheEngineConfig  # noqa: E402
from lmcache.v1.distributed.api import ObjectKey  # noqa: E402
from lmcache.v1.distributed.l2_adapters.config import get_l2_adapter_config_class  # noqa: E402
from lmcache.v1.distributed.l2_adapters.factory import create_l2_adapter_from_registry  # noqa: E402
from lmcache.v1.distributed.l2_adapters.native_connector_l2_adapter import _object_key_to_string  # noqa: E402
from lmcache.v1.memory_allocators.ad_hoc_memory_allocator import AdHocMemoryAllocator  # noqa: E402
from lmcache.v1.memory_management import MemoryFormat  # noqa: E402
from lmcache.v1.metadata import LMCacheMetadata  # noqa: E402
from lmcache.v1.storage_backend.connector import CreateConnector  # noqa: E402
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend  # noqa: E402

torch.set_num_threads(1)
MIB = 1 << 20
# layers, 2, tokens, heads, head size of bf16: the shapes of real chunks
SHAPES = {1 * MIB: (4, 2, 64, 8, 128), 4 * MIB: (4, 2, 256, 8, 128), 32 * MIB: (32, 2, 256, 8, 128)}
LOCAL_GIB = {1 * MIB: 0.1, 4 * MIB: 0.4, 32 * MIB: 0.25}  # what one batch of a test needs, with room
OP_TIMEOUT = 20.0


def content(name: str, size: int, generation: int) -> np.ndarray:
    seed = hashlib.blake2b(f"{name}/{size}/{generation}".encode(), digest_size=16).digest()
    data = np.frombuffer(np.random.Generator(np.random.PCG64(int.from_bytes(seed, "little"))).bytes(size), np.uint8).copy()
    data[:8] = np.frombuffer(generation.to_bytes(8, "little"), np.uint8)
    return data


def flat(memory_object) -> memoryview:
    view = memory_object.byte_array
    return (view if isinstance(view, memoryview) else memoryview(view)).cast("B")


def verdict(memory_object, name: str, size: int, wanted: set[int] | None) -> str:
    """`hit`, or what is wrong with the bytes that came back."""
    got = np.frombuffer(flat(memory_object), np.uint8)
    if got.size != size:
        return f"bad: {got.size} bytes instead of {size}"
    generation = int.from_bytes(got[:8].tobytes(), "little")
    if wanted is not None and generation not in wanted:
        return f"bad: generation {generation}, wanted one of {sorted(wanted)}"
    if not np.array_equal(got, content(name, size, generation)):
        return "bad: bytes differ"
    return "hit"


class Times:
    """How long calls took: all together, and the longest."""

    def __init__(self):
        self.total = self.worst = 0.0

    def __call__(self, call):
        began = time.perf_counter()
        try:
            return call()
        finally:
            took = time.perf_counter() - began
            self.total += took
            self.worst = max(self.worst, took)


@functools.cache
def local_memory(size: int, native_workers: int) -> LocalCPUBackend:
    """The memory that blocks are sent from and read into, touched whole when made: one per kind, not per connection."""
    shape = SHAPES[size]
    # The native connectors want whole chunks without a metadata header.
    extra = {}
    if native_workers:
        extra = {"save_chunk_meta": False, "resp_num_threads": native_workers, "valkey_num_workers": native_workers}
    config = LMCacheEngineConfig.from_defaults(
        chunk_size=shape[2], local_cpu=False, max_local_cpu_size=LOCAL_GIB[size], remote_url="lm://unused:1",
        remote_serde="naive", save_unfull_chunk=not native_workers, extra_config=extra, lmcache_instance_id="test",
    )  # fmt: skip
    metadata = LMCacheMetadata(
        model_name="meta/m", world_size=1, local_world_size=1, worker_id=0, local_worker_id=0,
        kv_dtype=torch.bfloat16, kv_shape=shape, chunk_size=shape[2],
    )  # fmt: skip
    return LocalCPUBackend(config, metadata, dst_device="cpu")


class InProcess:
    """`lm://`, `redis://`, `resp://`, `valkey://`: the connectors of LMCache inside the engine."""

    def __init__(self, scheme: str, host: str, port: int, size: int, model: str, workers: int):
        url = f"{scheme}://{host}:{port}"
        self.cpu = local_memory(size, workers if scheme in ("resp", "valkey") else 0)
        self.meta, self.model, self.size = self.cpu.metadata, model, size
        self.shape = self.meta.get_shapes()
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        self.conn = CreateConnector(url, self.loop, self.cpu, self.cpu.config, self.meta)

    def run(self, coroutine, timeout=OP_TIMEOUT):
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(timeout)

    def key(self, number: int) -> CacheEngineKey:
        return CacheEngineKey(self.model, 1, 0, number, torch.bfloat16)

    def name(self, number: int) -> str:
        return self.key(number).to_string()

    def filled(self, number: int, generation: int, tokens: int | None):
        shapes = self.shape
        if tokens:  # a chunk that is not full
            shapes = [torch.Size([*self.shape[0][:2], tokens, *self.shape[0][3:]])]
        m = self.cpu.allocate(shapes, self.meta.get_dtypes(), MemoryFormat.KV_2LTD)
        assert m is not None, "LMCache's local memory is full"
        view = flat(m)
        view[:] = memoryview(content(self.name(number), len(view), generation))
        return m

    @staticmethod
    def release(memory_object):
        while memory_object.get_ref_count() > 0:
            memory_object.ref_count_down()

    def put(self, numbers, generation=0, batch=False, tokens=None):
        objects = [self.filled(n, generation, tokens) for n in numbers]
        times = Times()
        try:
            if batch and self.conn.support_batched_put():
                times(lambda: self.run(self.conn.batched_put([self.key(n) for n in numbers], objects)))
            else:
                for n, m in zip(numbers, objects):
                    times(lambda n=n, m=m: self.run(self.conn.put(self.key(n), m)))
        finally:
            for m in objects:
                self.release(m)
        return ["ok"] * len(numbers), times

    def get(self, numbers, wanted=None, batch=False, size=None):
        keys = [self.key(n) for n in numbers]
        times = Times()
        if batch and self.conn.support_batched_get():
            objects = times(lambda: self.run(self.conn.batched_get(keys)))
        elif batch:
            objects = times(lambda: self.run(self.conn.batched_get_non_blocking("lookup", keys)))
            objects = [*objects, *[None] * (len(keys) - len(objects))]  # it returns the consecutive prefix
        else:
            objects = [times(lambda k=k: self.run(self.conn.get(k))) for k in keys]
        results = []
        for n, m in zip(numbers, objects):
            results.append("miss" if m is None else verdict(m, self.name(n), size or self.size, wanted))
            if m is not None:
                self.release(m)
        return results, times

    def exists(self, numbers, batch=False):
        times = Times()
        if batch:  # LMCache's lookup: how many of the first keys are there
            keys = [self.key(n) for n in numbers]
            hits = times(lambda: self.run(self.conn.batched_async_contains("lookup", keys)))
            found = [i < hits for i in range(len(numbers))]
        else:
            found = [bool(times(lambda n=n: self.run(self.conn.exists(self.key(n))))) for n in numbers]
        return found, times

    def close(self):
        # Not RemoteConnector.close(): in 0.5.6 it waits for ever for its idle job workers (`redis://`, `resp://`).
        inner = self.conn.getWrappedConnector()
        if hasattr(inner, "client_socket"):
            inner.client_socket.close()
        elif hasattr(inner, "pool"):
            self.run(inner.pool.disconnect(), 5)
        elif hasattr(inner, "client"):
            self.loop.call_soon_threadsafe(inner.client.close)
        # valkey:// has no other way to be closed; its connections end with the process.


class MultiProcess:
    """LMCache's MP mode: the L2 adapter `resp`, as `lmcache server` uses it."""

    def __init__(self, _scheme: str, host: str, port: int, size: int, model: str, workers: int):
        config = get_l2_adapter_config_class("resp").from_dict({"host": host, "port": port, "num_workers": workers})
        self.adapter = create_l2_adapter_from_registry(config)
        self.memory = AdHocMemoryAllocator("cpu")
        self.model, self.size = model, size
        self.shape = torch.Size([2, 4, size // (2 * 4 * 1024 * 2), 1024])
        self.rank = ObjectKey.ComputeKVRank(1, 0, 1, 0)

    def key(self, number: int) -> ObjectKey:
        return ObjectKey(number.to_bytes(32, "big"), self.model, self.rank)

    def name(self, number: int) -> str:
        return _object_key_to_string(self.key(number))

    def empty(self):
        return self.memory.allocate(self.shape, torch.bfloat16, MemoryFormat.KV_2LTD)

    @staticmethod
    def wait(fd: int, query, timeout=OP_TIMEOUT):
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            if (result := query()) is not None:
                return result
            if poll.poll(100):
                try:
                    os.read(fd, 8)
                except BlockingIOError:
                    pass
        raise TimeoutError(f"no completion within {timeout} s")

    def put(self, numbers, generation=0, batch=False, tokens=None):
        assert tokens is None, "the adapter stores whole chunks only"
        objects = [self.empty() for _ in numbers]
        for n, m in zip(numbers, objects):
            flat(m)[:] = memoryview(content(self.name(n), self.size, generation))
        times, results = Times(), []

        def store(part):
            task = self.adapter.submit_store_task([self.key(numbers[i]) for i in part], [objects[i] for i in part])
            fd = self.adapter.get_store_event_fd()
            return self.wait(fd, lambda: self.adapter.pop_completed_store_tasks() or None)[task]

        for part in self.parts(len(numbers), batch):
            done = times(lambda part=part: store(part))
            results += ["ok" if done.is_successful() else "error: store failed"] * len(part)
        return results, times

    def get(self, numbers, wanted=None, batch=False, size=None):
        objects = [self.empty() for _ in numbers]
        times, bits = Times(), []

        def load(part):
            task = self.adapter.submit_load_task([self.key(numbers[i]) for i in part], [objects[i] for i in part])
            return self.wait(self.adapter.get_load_event_fd(), lambda: self.adapter.query_load_result(task))

        for part in self.parts(len(numbers), batch):
            done = times(lambda part=part: load(part))
            bits += [done.test(i) for i in range(len(part))]
        results = [
            verdict(m, self.name(n), size or self.size, wanted) if hit else "miss"
            for n, m, hit in zip(numbers, objects, bits)
        ]
        return results, times

    def exists(self, numbers, batch=False):
        times, found = Times(), []

        def lookup(part):
            task = self.adapter.submit_lookup_and_lock_task([self.key(numbers[i]) for i in part], {})
            fd = self.adapter.get_lookup_and_lock_event_fd()
            return self.wait(fd, lambda: self.adapter.query_lookup_and_lock_result(task))

        for part in self.parts(len(numbers), batch):
            done = times(lambda part=part: lookup(part))
            found += [done.test(i) for i in range(len(part))]
        return found, times

    def delete(self, numbers):
        times = Times()
        times(lambda: self.adapter.delete([self.key(n) for n in numbers]))
        return ["ok"] * len(numbers), times

    @staticmethod
    def parts(n: int, batch: bool):
        return [range(n)] if batch else [[i] for i in range(n)]

    def close(self):
        self.adapter.close()


class Steady(threading.Thread):
    """Reads the given blocks and reads and writes its own, one call at a time, until told to stop."""

    def __init__(self, client, shared, own):
        super().__init__(daemon=True)
        self.client, self.shared, self.own = client, shared, own
        self.calls = {"get": 0, "put": 0, "exists": 0}
        self.worst = {"get": 0.0, "put": 0.0, "exists": 0.0}
        self.hits = self.own_misses = self.rounds = 0
        self.slow, self.problems = [], []
        self.generation = {n: set() for n in own}
        self.ended = threading.Event()

    def call(self, what, *args, **kw):
        results, times = getattr(self.client, what)(*args, **kw)
        seconds = times.worst
        self.calls[what] += 1
        self.worst[what] = max(self.worst[what], seconds)
        if seconds > 0.5:
            self.slow.append({"op": what, "seconds": round(seconds, 3), "at": time.time()})
        return results[0]

    def problem(self, text):
        if len(self.problems) < 20:
            self.problems.append(f"round {self.rounds}: {text}")

    def run(self):
        try:
            while not self.ended.is_set():
                self.round()
                time.sleep(0.02)  # steady, not saturating: the machine has other work
        except BaseException as e:
            self.problem(f"{type(e).__name__}: {e}\n{traceback.format_exc(limit=3)}")

    def round(self):
        i = self.rounds
        self.rounds += 1
        n = self.shared[i % len(self.shared)]
        if not self.call("exists", [n]):
            self.problem(f"EXISTS of stored block {n} says no")
        if (r := self.call("get", [n])) != "hit":
            self.problem(f"GET of stored block {n}: {r}")
        else:
            self.hits += 1
        if self.own and i % 4 == 0:
            mine, generation = self.own[(i // 4) % len(self.own)], i
            self.generation[mine].add(generation)
            if (r := self.call("put", [mine], generation=generation)) != "ok":
                self.problem(f"PUT of block {mine}: {r}")
            # A miss is allowed here (a write may be dropped); other bytes than were once written are not.
            r = self.call("get", [mine], wanted=self.generation[mine])
            if r == "miss":
                self.own_misses += 1
            elif r != "hit":
                self.problem(f"GET of own block {mine}: {r}")

    def report(self):
        return {
            "calls": self.calls, "worst": self.worst, "hits": self.hits, "own_misses": self.own_misses,
            "rounds": self.rounds, "slow": self.slow[:20], "problems": self.problems, "alive": self.is_alive(),
        }  # fmt: skip


class Worker:
    def __init__(self):
        self.conns, self.steady = {}, {}

    def do(self, op, conn=None, **kw):
        if op == "open":
            kind = MultiProcess if kw["scheme"] == "mp" else InProcess
            self.conns[conn] = kind(kw["scheme"], kw["host"], kw["port"], kw["size"], kw["model"], kw["workers"])
            return {}
        if op == "steady":
            self.steady[conn] = Steady(self.conns[conn], kw["shared"], kw["own"])
            self.steady[conn].start()
            return {}
        if op == "report":
            return self.steady[conn].report()
        if op == "steady_end":
            self.steady[conn].ended.set()
            self.steady[conn].join(OP_TIMEOUT * 2)
            return self.steady.pop(conn).report()
        if op == "name":
            return {"results": [self.conns[conn].name(n) for n in kw["keys"]]}
        if op == "close":
            self.conns.pop(conn).close()
            return {}
        results, times = getattr(self.conns[conn], op)(kw.pop("keys"), **kw)
        return {"results": results, "seconds": times.total, "worst": times.worst}


def main():
    worker = Worker()
    OUT.write(json.dumps({"ready": os.getpid()}) + "\n")
    for line in sys.stdin:
        try:
            request = json.loads(line)
            if isinstance(request.get("wanted"), list):
                request["wanted"] = set(request["wanted"])
            reply = worker.do(**request)
        except BaseException as e:  # whatever the client library raises is the answer
            reply = {"error": f"{type(e).__name__}: {e}", "trace": traceback.format_exc(limit=4)}
        OUT.write(json.dumps(reply) + "\n")
    os._exit(0)  # worker threads of the libraries never end by themselves


main()
