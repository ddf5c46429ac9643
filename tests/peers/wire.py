"""Raw sockets for both data protocols: they say exactly what a test wants said, well-formed or not.

Layouts: the `lm://` request is nine little-endian i32 (command, length, format, dtype, location, shape × 4) and a key of
150 bytes padded with spaces; the reply is nine i32 with the location last.
"""

from __future__ import annotations

import socket
import struct
from dataclasses import dataclass

from harness import split

PUT, GET, EXIST, LIST, HEALTH = 1, 2, 3, 4, 5
OK, FAIL = 200, 400
HEADER = struct.Struct("<9i")
BFLOAT16, FP8_E4M3 = 3, 7
TIMEOUT = 10.0


def connect(address: str, timeout: float = TIMEOUT) -> socket.socket:
    s = socket.create_connection(split(address), timeout)
    s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return s


def lm_request(command, key, length=0, fmt=1, dtype=BFLOAT16, shape=(2, 4, 64, 1024)) -> bytes:
    key = key.encode() if isinstance(key, str) else key
    return HEADER.pack(command, length, fmt, dtype, 0, *shape) + key.ljust(150)


@dataclass
class LmReply:
    code: int
    length: int
    fmt: int
    dtype: int
    shape: tuple[int, ...]
    location: int
    body: bytes


class Closed(Exception):
    """The server closed the connection where a reply was due."""


class Lm:
    """One `lm://` connection."""

    def __init__(self, address: str, timeout: float = TIMEOUT):
        self.s = connect(address, timeout)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self) -> None:
        self.s.close()

    def exactly(self, n: int) -> bytes:
        buf = bytearray(n)
        view, got = memoryview(buf), 0
        while got < n:
            try:
                k = self.s.recv_into(view[got:])
            except ConnectionResetError:
                k = 0
            if k == 0:
                raise Closed(f"closed after {got} of {n} bytes")
            got += k
        return bytes(buf)

    def put(self, key: str, body: bytes, **header) -> None:
        self.s.sendall(lm_request(PUT, key, len(body), **header) + body)

    def ask(self, command: int, key: str) -> LmReply:
        self.s.sendall(lm_request(command, key))
        code, length, fmt, dtype, *shape, location = HEADER.unpack(self.exactly(36))
        body = self.exactly(length) if command == GET and code == OK else b""
        return LmReply(code, length, fmt, dtype, tuple(shape), location, body)

    def get(self, key: str) -> bytes | None:
        r = self.ask(GET, key)
        assert r.code in (OK, FAIL), r
        return r.body if r.code == OK else None

    def exists(self, key: str) -> bool:
        return self.ask(EXIST, key).code == OK


class RespError(str):
    """An error reply."""


class Resp:
    """One RESP connection; replies of RESP2 and RESP3."""

    def __init__(self, address: str, timeout: float = TIMEOUT):
        self.s = connect(address, timeout)
        self.f = self.s.makefile("rb")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self) -> None:
        self.f.close()
        self.s.close()

    @staticmethod
    def encode(*args) -> bytes:
        parts = [a if isinstance(a, (bytes, bytearray)) else str(a).encode() for a in args]
        return b"*%d\r\n" % len(parts) + b"".join(b"$%d\r\n%b\r\n" % (len(p), p) for p in parts)

    def send(self, *args) -> None:
        self.s.sendall(self.encode(*args))

    def __call__(self, *args):
        self.send(*args)
        return self.read()

    def read(self):
        line = self.f.readline()
        if not line.endswith(b"\r\n"):
            raise Closed(f"closed in a reply: {line!r}")
        kind, rest = line[:1], line[1:-2]
        if kind == b"+":
            return rest.decode()
        if kind == b"-":
            return RespError(rest.decode())
        if kind == b":":
            return int(rest)
        if kind == b"_":
            return None
        if kind == b"#":
            return rest == b"t"
        if kind == b",":
            return float(rest)
        if kind in b"$=":
            n = int(rest)
            if n < 0:
                return None
            body = self.f.read(n + 2)
            if len(body) != n + 2:
                raise Closed(f"closed after {len(body)} of {n} bytes")
            return body[:-2]
        if kind in b"*~>":
            n = int(rest)
            return None if n < 0 else [self.read() for _ in range(n)]
        if kind == b"%":
            return {_hashable(self.read()): self.read() for _ in range(int(rest))}
        raise AssertionError(f"not a RESP reply: {line!r}")


def _hashable(x):
    return x.decode() if isinstance(x, bytes) else x


def block(tag: str, size: int) -> bytes:
    """Bytes that name their key and repeat at no round distance, so that mixed or shifted blocks differ."""
    unit = f"<{tag}>".encode()
    unit = (unit * (4093 // len(unit) + 1))[:4093]
    return (unit * (size // len(unit) + 1))[:size]


def mp_key(model: str, number: int) -> str:
    """A key of LMCache's MP form, by which a native client is recognised."""
    return f"{model}@01000100@0@{number:064x}"
