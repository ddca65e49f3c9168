"""A file system that waits, fails and goes away as it is told, in front of a folder: addresses `paced://NAME/...`."""

import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import fsspec
from fsspec.spec import AbstractFileSystem


@dataclass
class Server:
    """A folder behind a slow line."""

    folder: Path
    latency_s: float = 0.0
    bytes_per_s: float = 0.0
    """0: as many as there are."""
    fail_every: int = 0
    """Every so many-th read fails. 0: none."""
    in_memory: bool = False
    """The folder is read once, and then no more."""
    away: set[str] = field(default_factory=set)
    """Beginnings of names that cannot be read."""
    refused: int = 0
    """Reads that are refused for want of credentials, from now on."""
    damaged: Counter[str] = field(default_factory=Counter)
    """Names that come with a byte changed, and how many times."""
    reads: list[str] = field(default_factory=list)
    """Names in the order in which they were asked for."""
    num_bytes: int = 0
    """That were sent."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    content: dict[str, bytes] = field(default_factory=dict)
    """By name, `in_memory`."""

    def __post_init__(self) -> None:
        for path in self.folder.rglob("*") if self.in_memory else ():
            name = path.relative_to(self.folder)
            if path.is_file() and "work" not in name.parts:
                self.content[name.as_posix()] = path.read_bytes()

    def read(self, name: str) -> bytes:
        with self.lock:
            self.reads.append(name)
            number = len(self.reads)
            if self.refused:
                self.refused -= 1
                raise PermissionError("the token has expired")
            damaged = self.damaged[name] > 0
            self.damaged[name] -= 1
        time.sleep(self.latency_s)
        if any(name.startswith(begin) for begin in self.away):
            raise ConnectionError("no route to host")
        if self.fail_every and number % self.fail_every == 0:
            raise ConnectionResetError("connection reset by peer")
        content = self._content(name)
        if self.bytes_per_s:
            time.sleep(len(content) / self.bytes_per_s)
        with self.lock:
            self.num_bytes += len(content)
        return bytes([content[0] ^ 1]) + content[1:] if damaged else content

    def _content(self, name: str) -> bytes:
        if not self.in_memory:
            return (self.folder / name).read_bytes()
        if name not in self.content:
            raise FileNotFoundError(name)
        return self.content[name]


class PacedFileSystem(AbstractFileSystem):
    protocol = "paced"
    servers: ClassVar[dict[str, Server]] = {}

    def cat_file(self, path, start=None, end=None, **kwargs):
        name, _, rest = self._strip_protocol(path).partition("/")
        return self.servers[name].read(rest)


def serve(name: str, folder: Path, **options) -> tuple[str, Server]:
    """The address of a folder, and its server."""
    fsspec.register_implementation("paced", PacedFileSystem, clobber=True)
    PacedFileSystem.servers[name] = Server(folder, **options)
    return f"paced://{name}", PacedFileSystem.servers[name]
