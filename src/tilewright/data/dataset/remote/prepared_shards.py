"""Prepared text whose training tokens stay at an address: rows of one shard each, read as a run needs them."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from tilewright.core.errors import DataError
from tilewright.data.batches.build_rows import INDEX
from tilewright.data.batches.mixture_order import Mixture, Picks
from tilewright.data.batches.pack_documents import Packing
from tilewright.data.batches.token_rows import TextRows
from tilewright.data.dataset.prepared_text import PreparedData
from tilewright.data.dataset.remote.read_ahead import ReadAhead, Unreadable
from tilewright.data.dataset.remote.remote_dataset import RemoteDataset
from tilewright.data.dataset.remote.shard_cache import ShardCache
from tilewright.data.dataset.remote.shard_index import ShardIndex
from tilewright.data.dataset.remote.shard_tokens import ShardTokens
from tilewright.data.dataset.remote.shard_windows import WindowedOrder


@dataclass(frozen=True)
class Streaming:
    """How shards are read."""

    window: int = 8
    """Shards of a domain whose rows are shuffled together."""
    cache_bytes: int = 4 << 30
    """Of the shards that are kept here."""
    retries: int = 5
    """Of a read that fails."""
    backoff_s: float = 0.5
    """Before the first of them."""
    return_s: float = 60.0
    """After which a source that is away is tried again."""


class PreparedShards(PreparedData):
    """Prepared text whose training tokens stay at an address; see `PreparedData`.

    Args:
        corpus: entry with what was brought of the datasets.
        packed: entry with the rows.
        datasets: where shards are.
        cache: folder of shards.
        streaming: how they are read.

    Raises:
        DataError: a cache that is smaller than a window, or a domain without a row.
    """

    def __init__(
        self, corpus: Path, packed: Path, datasets: Sequence[RemoteDataset], cache: Path, streaming: Streaming
    ) -> None:
        index = ShardIndex.of((corpus / INDEX).read_bytes(), str(corpus))
        self.shard_rows: Mapping[str, list[int]] = json.loads((packed / "meta.json").read_bytes())["shard_rows"]
        self.row_order = WindowedOrder(self.shard_rows, streaming.window)
        remotes = {shard.domain: one.remote for one in datasets for shard in one.shards}
        store = ShardCache(cache, streaming.cache_bytes)
        self.reader = ReadAhead(
            index.shards, remotes, store, self.row_order, tuple(self.shard_rows), streaming.return_s
        )
        for one in datasets:
            for domain in {shard.domain for shard in one.shards} & set(self.shard_rows) if one.away else ():
                self.reader.suspect(domain, one.away)
        self._tokens = ShardTokens(index, self.reader.bytes_of)
        self.blank_rows: dict[str, int] = {}
        """Rows that came without content, by domain."""
        super().__init__(corpus, packed)
        empty = [name for name, rows in self.num_rows.items() if not rows]
        if empty:
            raise DataError(
                "Domain without a row to train on",
                got=", ".join(empty),
                need="a document of two tokens or more in each domain",
                try_="data.domains = the others",
                where="data.source",
            )
        self.reader.check_room()

    def _open(self, split: str) -> TextRows:
        if split != "train":
            return super()._open(split)
        columns = (np.load(self.folder / f"train.{part}.npy", mmap_mode="r", allow_pickle=False) for part in _COLUMNS)
        packing = Packing(*(np.asarray(column) for column in columns))
        tokens: Any = self._tokens  # indexed as the array that it stands for
        marks: Any = self._tokens.marks()
        return TextRows(tokens, packing, self.seq_len, self.task == "causal_lm", marks)

    def follow(self, mixture: Mixture, sample: int) -> None:
        """Follow the mixture in prepared shards: read those that it wants next: see `ReadAhead.follow`."""
        self.reader.follow(mixture, sample)

    @property
    def rows_per_call(self) -> int:
        """Rows of one reading call of prepared shards: those of one step, so that what cannot be read is blank for as
        few steps as can be."""
        return 1

    @property
    def read_s(self) -> float:
        """Seconds that rows of prepared shards have waited for them."""
        return self.reader.counts.wait_s

    def train_arrays(self, picks: Picks, seed: int) -> dict[str, np.ndarray]:
        """Training rows of prepared shards as arrays: see `PreparedData`. Rows of a shard that cannot be read are
        blank, and counted."""
        arrays = super().train_arrays(picks, seed)
        self._count_blank(picks)
        return arrays

    def joined(self, picks: Picks, seed: int, length: int) -> dict[str, np.ndarray]:
        """Documents of prepared shards behind each other: see `PreparedData` and `train_arrays`."""
        arrays = super().joined(picks, seed, length)
        self._count_blank(picks)
        return arrays

    def _count_blank(self, picks: Picks) -> None:
        if not (self.reader.set_aside or self.reader.away):
            return
        at_B = np.searchsorted(self._shard_starts, self._first_row[picks.domain] + picks.row, side="right") - 1
        for at, domain in zip(at_B.tolist(), picks.domain.tolist(), strict=True):
            if isinstance(self.reader.bytes_of(self.places[at]), Unreadable):
                name = self.domains[domain]
                self.blank_rows[name] = self.blank_rows.get(name, 0) + 1

    @cached_property
    def _shard_starts(self) -> np.ndarray:
        rows = np.array([count for counts in self.shard_rows.values() for count in counts], np.int64)
        return np.cumsum(rows) - rows

    @cached_property
    def places(self) -> list[int]:
        """The places of prepared shards among all, of those whose domains are kept."""
        return [place for of_domain in self.reader.places for place in of_domain]

    def rows_of_shard(self, place: int) -> int:
        """Training rows of a prepared shard."""
        return [count for counts in self.shard_rows.values() for count in counts][self.places.index(place)]


_COLUMNS = ("starts", "lengths", "first")
