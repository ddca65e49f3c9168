"""Token shards of a dataset: files of a few MiB with the training tokens of whole documents of one domain, and an index
of them with sizes and hashes.

    shards/index.json    format, dtype, whether tokens have marks, and a row per shard
    shards/00000.bin     the tokens of its documents behind each other, little-endian; then, where only some tokens are
                         targets, a byte per token

Documents are in the order of `documents.parquet`, domain after domain.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq
import xxhash

from tilewright.core.errors import DataError

FOLDER, INDEX, FORMAT = "shards", "shards/index.json", 1
_DTYPES = ("uint16", "uint32")


@dataclass(frozen=True)
class TokenShard:
    """A token shard of a dataset at an address: one file of the tokens of whole documents."""

    file: str
    """Below the dataset's address."""
    size: int
    """Bytes."""
    digest: str
    """xxh3-128 of them."""
    domain: str
    documents: int
    tokens: int


@dataclass(frozen=True)
class ShardIndex:
    """The index of all token shards of a dataset."""

    dtype: str
    marked: bool
    """A byte per token says whether it is a target."""
    shards: tuple[TokenShard, ...]

    @classmethod
    def of(cls, content: bytes, where: str) -> "ShardIndex":
        """Read an index of shards.

        Raises:
            DataError: it is none, or one of another version.
        """
        try:
            found = json.loads(content)
            if found["format"] != FORMAT or found["dtype"] not in _DTYPES:
                raise ValueError(f"format {found['format']}, tokens of {found['dtype']}")
            return cls(found["dtype"], bool(found["marked"]), tuple(TokenShard(**shard) for shard in found["shards"]))
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(
                "Index of token shards cannot be read",
                got=f"{type(error).__name__}: {error}",
                need=f"format {FORMAT}, as `tilewright data build` writes it",
                try_="the same `tilewright data build` again, and upload its folder again",
                where=f"{where}/{INDEX}",
            ) from error

    def to_json(self) -> str:
        """The index of shards as JSON text, as it is written."""
        head = {"format": FORMAT, "dtype": self.dtype, "marked": self.marked}
        return json.dumps(head | {"shards": [asdict(shard) for shard in self.shards]}, indent=1, ensure_ascii=False)


def by_domain(domains: list[str]) -> np.ndarray:
    """The order of documents in indexed shards: domain after domain, in each as they were.

    Example:
        >>> by_domain(["code", "docs", "code"]).tolist()
        [0, 2, 1]
    """
    return np.argsort(np.array(domains, dtype=str), kind="stable")


def write_shards(tokens: Path, folder: Path, shard_bytes: int) -> Mapping[str, Any]:
    """Write the shards of a dataset and their index into `folder`/shards; returns counts.

    Args:
        tokens: folder with `train.npy` and `documents.parquet`.
        folder: of the unit.
        shard_bytes: of a shard at most, where it holds more than one document.
    """
    (folder / FOLDER).mkdir()
    stream = np.load(tokens / "train.npy", mmap_mode="r", allow_pickle=False)
    marks = None
    if (tokens / "train.trained.npy").exists():
        marks = np.load(tokens / "train.trained.npy", mmap_mode="r", allow_pickle=False)
    table = pq.read_table(tokens / "documents.parquet", columns=["split", "domain", "length"])
    trained = pc.equal(table["split"], "train")  # pyright: ignore[reportAttributeAccessIssue]  # made at import
    table = table.filter(trained)
    lengths, domains = table["length"].to_numpy().astype(np.int64), table["domain"].to_pylist()
    starts = np.cumsum(lengths) - lengths
    shards = []
    for group in _groups(lengths, domains, shard_bytes // (stream.dtype.itemsize + (marks is not None))):
        name = f"{FOLDER}/{len(shards):05}.bin"
        spans = [slice(start, start + length) for start, length in zip(starts[group], lengths[group], strict=True)]
        content = _bytes(stream, spans) + (b"" if marks is None else _bytes(marks, spans))
        (folder / name).write_bytes(content)
        digest = xxhash.xxh3_128_hexdigest(content)
        count = len(group), int(lengths[group].sum())
        shards.append(TokenShard(name, len(content), digest, domains[group[0]], *count))
    index = ShardIndex(str(stream.dtype), marks is not None, tuple(shards))
    (folder / INDEX).write_text(index.to_json(), encoding="utf-8")
    return {"shards": len(shards)}


def _bytes(values: np.ndarray, spans: list[slice]) -> bytes:
    little = values.dtype.newbyteorder("<")
    return b"".join(values[span].astype(little, copy=False).tobytes() for span in spans)


def _groups(lengths: np.ndarray, domains: list[str], most: int) -> Iterator[np.ndarray]:
    """Documents of each shard of the index."""
    order = by_domain(domains)
    begin, filled = 0, 0
    for at, document in enumerate(order.tolist()):
        other = at > begin and domains[document] != domains[order[begin]]
        if at > begin and (other or filled + lengths[document] > most):
            yield order[begin:at]
            begin, filled = at, 0
        filled += int(lengths[document])
    if begin < len(order):
        yield order[begin:]
