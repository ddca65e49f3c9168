"""Lengths of the documents of a step: drawn from a distribution, from a file, or of a prepared dataset. No torch."""

import difflib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import pyarrow.parquet as pq

from tilewright.core.errors import ConfigError, DataError

DOCUMENTS = "documents.parquet"
"""The table of a prepared dataset's documents."""
SHORTEST = 64
"""Tokens of the shortest document that is drawn, or fewer where the longest is."""


class Lengths(Protocol):
    """Where lengths come from."""

    def draw(self, number: int, seed: int) -> np.ndarray:
        """Draw lengths of documents in tokens, int64 [N]; equal seeds, equal lengths."""
        ...


@dataclass(frozen=True)
class DrawnLengths:
    """Lengths of a distribution.

    Example:
        >>> DrawnLengths("fixed", (512.0,), most=4096).draw(3, seed=0).tolist()
        [512, 512, 512]
    """

    name: str
    numbers: tuple[float, ...]
    most: int
    """Tokens of the longest document: longer ones are cut."""

    def draw(self, number: int, seed: int) -> np.ndarray:
        """Draw lengths of documents: see `Lengths`."""
        drawn = DISTRIBUTIONS[self.name](np.random.default_rng(seed), number, *self.numbers)
        return np.clip(drawn, min(SHORTEST, self.most), self.most).astype(np.int64)


@dataclass(frozen=True)
class ListedLengths:
    """Lengths of a file, of which each step has other ones."""

    lengths: tuple[int, ...]
    where: str

    def draw(self, number: int, seed: int) -> np.ndarray:
        """Draw lengths of documents: see `Lengths`.

        Raises:
            DataError: fewer are listed.
        """
        if number > len(self.lengths):
            raise DataError(
                "File of lengths has fewer documents than a step",
                got=f"{len(self.lengths):,} lengths",
                need=f"{number:,}: data parallel rows x micro-batches x documents per micro-batch",
                try_=f"--documents {max(1, len(self.lengths) * 8 // number // 8)}, or fewer --microbatches, "
                "or a file of more lengths",
                where=self.where,
            )
        return np.random.default_rng(seed).permutation(np.array(self.lengths, np.int64))[:number]


Sampler = Callable[..., np.ndarray]


def _lognormal(draw: np.random.Generator, number: int, mean: float, sigma: float) -> np.ndarray:
    return draw.lognormal(mean, sigma, number)


def _uniform(draw: np.random.Generator, number: int, low: float, high: float) -> np.ndarray:
    return draw.uniform(low, high, number)


def _fixed(draw: np.random.Generator, number: int, length: float) -> np.ndarray:
    return np.full(number, length)


DISTRIBUTIONS: dict[str, Sampler] = {"lognormal": _lognormal, "uniform": _uniform, "fixed": _fixed}
_NUMBERS = {"lognormal": "MEAN,SIGMA of the logarithm", "uniform": "LEAST,MOST", "fixed": "LENGTH"}


def lengths_from(text: str, most: int) -> Lengths:
    """The lengths of documents that `--lengths` names: `lognormal:6.6,1.1`, `uniform:64,4096`, `fixed:2048`, a file, or
    the folder of a prepared dataset.

    Args:
        text: of the option.
        most: tokens of the longest document.

    Raises:
        ConfigError: neither a distribution nor a file.
        DataError: the file has no lengths, or none that can be used.
    """
    # 1. A distribution by name.
    name, colon, rest = text.partition(":")
    if name in DISTRIBUTIONS and colon:
        numbers = _numbers(rest)
        if numbers is None or not _usable(name, numbers):
            raise ConfigError(
                f"Lengths cannot be drawn from {name!r} with these numbers",
                got=text,
                need=f"{name}:{_NUMBERS[name]}, all above zero, the least before the most",
                try_="--lengths lognormal:6.6,1.1",
                where="--lengths",
            )
        return DrawnLengths(name, numbers, most)
    # 2. A path. A distribution without numbers is none, and is found out below.
    path = Path(text)
    if path.is_dir():
        return _prepared(path, most)
    if path.is_file():
        return _listed(path, most)
    near = difflib.get_close_matches(name, DISTRIBUTIONS, n=1)
    raise ConfigError(
        "Lengths are neither a distribution nor a file",
        got=text,
        need="lognormal:MEAN,SIGMA, uniform:LEAST,MOST, fixed:LENGTH, a file with one length per line, "
        "or the folder of a prepared dataset",
        try_=f"--lengths {near[0]}:{_NUMBERS[near[0]].split(' of ')[0]}" if near else "--lengths lognormal:6.6,1.1",
        where="--lengths",
    )


def _numbers(text: str) -> tuple[float, ...] | None:
    try:
        return tuple(float(one) for one in text.split(","))
    except ValueError:
        return None


def _usable(name: str, numbers: Sequence[float]) -> bool:
    wanted = len(_NUMBERS[name].split(" of ")[0].split(","))
    if len(numbers) != wanted or not all(math.isfinite(one) and one > 0 for one in numbers):
        return False
    return name != "uniform" or numbers[0] <= numbers[1]


def _listed(path: Path, most: int) -> ListedLengths:
    """Read lengths of documents from a file: whole numbers, one per line, or a list of JSON."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise _no_lengths(path, f"bytes that are no text: {error.reason}") from error
    try:
        found = json.loads(text) if text.lstrip().startswith("[") else text.split()
    except ValueError as error:
        raise _no_lengths(path, f"text that is no JSON: {error}") from error
    lengths = []
    for number, one in enumerate(found, 1):
        if not str(one).isdecimal() or int(one) < 1:
            raise _no_lengths(path, f"{str(one)[:40]!r} at place {number}")
        lengths.append(int(one))
    return _checked(lengths, path, most)


def _prepared(folder: Path, most: int) -> ListedLengths:
    """Lengths of the documents for training of a prepared dataset, which has a table of them."""
    found = next((path for path in (folder / DOCUMENTS, folder / "tokens" / DOCUMENTS) if path.is_file()), None)
    if found is None:
        raise _no_lengths(folder, f"a folder without {DOCUMENTS}")
    try:
        table = pq.read_table(found, columns=["split", "length"], filters=[("split", "=", "train")])
    except (OSError, ValueError, KeyError) as error:  # pyarrow's own errors are of these
        raise _no_lengths(found, str(error).splitlines()[0]) from error
    return _checked([int(one) for one in table["length"].to_pylist()], found, most)


def _checked(lengths: Sequence[int], path: Path, most: int) -> ListedLengths:
    if not lengths:
        raise _no_lengths(path, "an empty file")
    if max(lengths) > most:
        raise DataError(
            "File of lengths has a document above the limit",
            got=f"{max(lengths):,} tokens",
            need=f"at most {most:,}, which is --max-length",
            try_=f"--max-length {max(lengths)}",
            where=str(path),
        )
    return ListedLengths(tuple(lengths), str(path))


def _no_lengths(path: Path, got: str) -> DataError:
    return DataError(
        "File has no lengths of documents",
        got=got,
        need="whole numbers of tokens from 1 on, one per line, a list of them in JSON, or a dataset of `data build`",
        try_="--lengths lognormal:6.6,1.1",
        where=str(path),
    )
