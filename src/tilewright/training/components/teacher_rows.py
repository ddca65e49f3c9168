"""Tokens of a teacher for rows of data, on disk: written when a row comes first, read when it comes again.

A row is found by the hash of its own tokens and document boundaries, so neither the order of rows nor their number,
epochs, weights of domains, ranks or resumes matter. `teacher.json` says of which teacher, data and format the folder
is. Each process appends to a file of its own; a record is a head and the bytes of `distill.kept_tokens`, with their
hash: a record that a killed process left torn, or that is damaged, counts as missing and is made again.

Legend: B rows  S positions  K tokens that are kept  G = K + 1 logarithms.
"""

import json
import os
import shutil
import struct
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
import xxhash
from torch import Tensor

from tilewright.core.errors import ConfigError, DataError, FitError
from tilewright.core.json_text import to_json
from tilewright.core.units import format_bytes
from tilewright.models.distill.kept_tokens import bytes_per_position, decode, encode, keeping
from tilewright.models.teacher_folder import note_rows

FILE = "teacher.json"
_HEAD = struct.Struct("<16sQI")
"""Hash of the row; hash of the bytes; positions."""


class TeacherRows:
    """A folder of rows.

    Args:
        folder: made where it is missing.
        made_of: what the bytes depend on: plain JSON values by name.
        top_k, vocab_size: format of a position.
        divergence: that learns from it; it says which tokens are kept.
        stream, steps: of the run that reads: its rows, see `models.teacher.stream_of`, and how many steps of them.

    Raises:
        ConfigError: the folder is of another teacher, of other data or in another format.
        DataError: it cannot be read or made.
    """

    def __init__(
        self,
        folder: Path,
        made_of: Mapping[str, Any],
        *,
        top_k: int,
        vocab_size: int,
        divergence: str,
        stream: str = "",
        steps: int = 0,
    ) -> None:
        self.folder, self.top_k, self._vocab_size = folder, top_k, vocab_size
        self._stream, self._steps, self.keeping = stream, steps, keeping(divergence)
        self._width = bytes_per_position(top_k, vocab_size)
        self._places: dict[bytes, tuple[Path, int, int, int]] = {}  # hash: file, offset, positions, hash of the bytes
        self._readers: dict[Path, BinaryIO] = {}
        self._writer: BinaryIO | None = None
        self.damaged = 0
        """Records that did not have their hash."""
        try:
            self._check({**made_of, "tokens": self.keeping.name})
            for path in sorted(folder.glob("*.rows")):
                self._index(path)
        except OSError as error:
            raise self._unusable(error) from error

    def __len__(self) -> int:
        """Number of rows of a teacher's tokens that are kept."""
        return len(self._places)

    def check_room(self, rows: int, row_length: int) -> None:
        """Raise where the disk has no room for the teacher's rows that are missing.

        Args:
            rows: different ones that a run may read.
            row_length: their positions.

        Raises:
            FitError: there is less free.
        """
        wanted = max(0, rows - len(self)) * (row_length * self._width + _HEAD.size)
        free = shutil.disk_usage(self.folder).free
        if wanted > free:
            raise FitError(
                "Disk has no room for the teacher's tokens",
                got=f"{format_bytes(free)} free in {self.folder}",
                need=f"{format_bytes(wanted)}: {rows - len(self):,} rows of {row_length} tokens, "
                f"{self._width} bytes each",
                try_='a smaller distill.cache_top_k, distill.cache on another disk, or distill.cache = ""',
                where="distill.cache",
            )

    def find(self, batch: Mapping[str, Tensor]) -> list[tuple[Tensor, Tensor] | None]:
        """Find teacher's rows: for each one of a micro-batch the teacher's tokens [S, K] and their logarithms [S, G];
        None where it is not there."""
        return [self._read(key) for key in _keys(batch)]

    def numbers(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Uniform random numbers in [0, 1) for the teacher's rows, of each position [B, S], on the host: a function of
        the row, whoever makes it."""
        length = batch["input_ids"].shape[1]
        generators = [torch.Generator().manual_seed(int.from_bytes(key[:7], "little")) for key in _keys(batch)]
        return torch.stack([torch.rand(length, generator=generator) for generator in generators])

    def add(self, batch: Mapping[str, Tensor], ids_BSK: Tensor, log_BSG: Tensor) -> None:
        """Add the teacher's rows of a micro-batch that are not there.

        Raises:
            DataError: they cannot be written.
        """
        for key, ids_SK, log_SG in zip(_keys(batch), ids_BSK, log_BSG, strict=True):
            if key not in self._places:
                try:
                    self._write(key, encode(ids_SK, log_SG, self._vocab_size).tobytes(), len(ids_SK))
                except OSError as error:
                    raise self._unusable(error) from error

    def has_read(self, step: int) -> None:
        """Note, after the last step, that each row of the run is among the teacher's. Plans read it.

        Args:
            step: counted from 1.

        Raises:
            DataError: it cannot be written.
        """
        if step == self._steps:
            try:
                note_rows(self.folder, self._stream, step)
            except OSError as error:
                raise self._unusable(error) from error

    def _write(self, key: bytes, kept: bytes, positions: int) -> None:
        if self._writer is None:
            self._writer = (self.folder / f"{time.time_ns()}-{os.getpid()}.rows").open("xb", buffering=0)
        digest = xxhash.xxh3_64_intdigest(kept)
        record = _HEAD.pack(key, digest, positions) + kept
        start = self._writer.tell()
        if self._writer.write(record) != len(record):  # a disk that is full takes a part
            raise OSError(f"{len(record)} bytes were not all written")
        self._places[key] = Path(self._writer.name), start + _HEAD.size, positions, digest

    def _read(self, key: bytes) -> tuple[Tensor, Tensor] | None:
        found = self._places.get(key)
        if found is None:
            return None
        path, offset, positions, digest = found
        try:
            reader = self._readers.get(path) or self._readers.setdefault(path, path.open("rb"))
            kept = os.pread(reader.fileno(), positions * self._width, offset)
        except OSError as error:
            raise self._unusable(error) from error
        if len(kept) != positions * self._width or xxhash.xxh3_64_intdigest(kept) != digest:
            self.damaged += 1
            del self._places[key]
            return None
        rows = np.frombuffer(kept, np.uint8).reshape(positions, self._width)
        ids_SK, logs_SG = decode(rows, self.top_k, self._vocab_size)
        return ids_SK, self.keeping.normalized(logs_SG)

    def _index(self, path: Path) -> None:
        """Read the heads of a file of teacher's rows, up to one that is cut off."""
        size = path.stat().st_size
        with path.open("rb") as file:
            while len(head := file.read(_HEAD.size)) == _HEAD.size:
                key, digest, positions = _HEAD.unpack(head)
                start = file.tell()
                end = start + positions * self._width
                if end > size:
                    return
                self._places[key] = path, start, positions, digest
                file.seek(end)

    def _check(self, made_of: dict[str, Any]) -> None:
        path = self.folder / FILE
        if not path.is_file():
            self.folder.mkdir(parents=True, exist_ok=True)
            own = path.with_name(f"{FILE}.{os.getpid()}")  # ranks write the same
            own.write_text(to_json(made_of, indent=1) + "\n", encoding="utf-8")
            own.replace(path)
            return
        try:
            before = json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, RecursionError):
            before = None
        before = before if isinstance(before, dict) else {}
        differing = [name for name, value in made_of.items() if before.get(name) != value]
        if differing:
            raise ConfigError(
                "Cache is of another teacher or of other data",
                got=f"{self.folder} with " + ", ".join(f"{name} {before.get(name)}" for name in differing),
                need=", ".join(f"{name} {made_of[name]}" for name in differing),
                try_="another folder",
                where="distill.cache",
            )

    def _unusable(self, error: OSError) -> DataError:
        return DataError(
            "Teacher's tokens cannot be kept or read",
            got=str(error),
            need="a folder that can be read and written",
            try_='free space, another folder, or distill.cache = ""',
            where=f"distill.cache = {self.folder}",
        )


def _keys(batch: Mapping[str, Tensor]) -> list[bytes]:
    """Keys of teacher's rows: hashes of their tokens and of where documents in them begin."""
    parts = [batch[name].cpu().to(torch.int64) for name in ("input_ids", "segments", "positions") if name in batch]
    return [xxhash.xxh3_128_digest(torch.stack(rows).contiguous().numpy().data) for rows in zip(*parts, strict=True)]
