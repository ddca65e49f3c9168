"""The stream's batches against torchdata's StatefulDataLoader, over the same packed rows: processor seconds per million
tokens, of this process and its children.

python -m benchmarks.data.loader_peer

Rows are those of prepared text, in one order. `packed`: each loader makes whole batches of 8 rows of `input_ids`,
`labels`, `positions` and `segments`; torchdata's by a dataset that gives a row at an index from the same memory-mapped
arrays, and its default collation. `blocks`: both give blocks of tokens from one array, without packing. Workers: 0 and
2 processes of torchdata's; the stream has a thread of its own in both. Needs `pip install torchdata`.
"""

import argparse
import resource
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import spread, write_result
from tilewright.data.batches.mixture_order import Picks
from tilewright.data.batches.stream import Stream
from tilewright.data.dataset.prepared_text import PreparedData
from tilewright.data.prepare import prepare

CLAIM = "the stream serves packed rows at 3 times the rate of torchdata's StatefulDataLoader, and plain blocks as fast"
LENGTH, BATCH, TURNS = 256, 8, 5


class Blocks:
    """Blocks of one array of tokens, as rows of a stream."""

    fingerprint = "blocks"

    def __init__(self, tokens: np.ndarray) -> None:
        self.tokens = tokens
        self.num_rows = {"all": (len(tokens) - 1) // LENGTH}

    def train_arrays(self, picks: Picks, seed: int) -> dict[str, np.ndarray]:
        at = picks.row[:, None] * LENGTH + np.arange(LENGTH + 1)
        block = self.tokens[at].astype(np.int64)
        return {"input_ids": block[:, :-1], "labels": block[:, 1:]}

    def blank_row(self) -> dict[str, np.ndarray]:
        return {"input_ids": np.zeros((1, LENGTH), np.int64), "labels": np.full((1, LENGTH), -100)}

    def describe_row(self, domain: str, row: int) -> list[dict[str, Any]]:
        return []


class OneRow:
    """A map-style dataset of the rows, in the order in which the stream has them."""

    def __init__(self, rows: Any, number: int) -> None:
        self.rows = rows
        stream = Stream(rows, seed=0, batch_size=BATCH, micro_batch_size=BATCH, prefetch=0)
        self.picks = stream._mixture.picks(np.arange(number * BATCH))

    def __len__(self) -> int:
        return len(self.picks.row)

    def __getitem__(self, at: int) -> dict[str, np.ndarray]:
        one = slice(at, at + 1)
        picks = Picks(self.picks.sample[one], self.picks.domain[one], self.picks.epoch[one], self.picks.row[one])
        return {name: array[0] for name, array in self.rows.train_arrays(picks, 0).items()}


def ours(rows: Any, number: int) -> Iterator[Any]:
    """Batches of the stream."""
    with Stream(rows, seed=0, batch_size=BATCH, micro_batch_size=BATCH, prefetch=2) as stream:
        for _ in range(number):
            yield stream.next_step()[0]


def theirs(workers: int) -> Callable[[Any, int], Iterator[Any]]:
    """Batches of StatefulDataLoader."""

    def batches(rows: Any, number: int) -> Iterator[Any]:
        from torchdata.stateful_dataloader import StatefulDataLoader

        yield from StatefulDataLoader(OneRow(rows, number), batch_size=BATCH, num_workers=workers)

    return batches


def processor_seconds() -> float:
    """Of this process and of its children that have ended."""
    found = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(one.ru_utime + one.ru_stime for one in found)


def measured(loader: Callable[[Any, int], Iterator[Any]], rows: Any, number: int) -> dict[str, float]:
    """Seconds per million tokens: of the processor, and of the clock."""
    list(loader(rows, 20))
    began, clock, seen = processor_seconds(), time.perf_counter(), 0
    for batch in loader(rows, number):
        seen += batch["input_ids"].numel()
    assert seen == number * BATCH * LENGTH
    return {
        "processor_s": (processor_seconds() - began) / seen * 1e6,
        "clock_s": (time.perf_counter() - clock) / seen * 1e6,
    }


def check_same(rows: Any) -> None:
    """Both give the same batches in the same order."""
    for mine, other in zip(ours(rows, 10), theirs(0)(rows, 10), strict=True):
        assert all(np.array_equal(mine[name], other[name]) for name in ("input_ids", "labels"))


def main() -> None:
    """Measure turn by turn, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=int, default=800)
    parser.add_argument("--source", default="installed", help="of the text")
    args = parser.parse_args()
    prepared = prepare(args.source, seq_len=LENGTH, vocab_size=4096)
    assert isinstance(prepared, PreparedData)
    with tempfile.TemporaryDirectory() as name:
        path = Path(name, "tokens.npy")
        np.save(path, np.random.default_rng(0).integers(0, 4096, 8_000_000, np.uint16))
        kinds = {"packed": prepared, "blocks": Blocks(np.load(path, mmap_mode="r"))}
        loaders = {"stream": ours, "torchdata, 0 workers": theirs(0), "torchdata, 2 workers": theirs(2)}
        found: dict[str, Any] = {kind: {name: [] for name in loaders} for kind in kinds}
        for rows in kinds.values():
            check_same(rows)
        for _ in range(TURNS):
            for kind, rows in kinds.items():
                for name, loader in loaders.items():
                    found[kind][name].append(measured(loader, rows, args.batches))
    results: dict[str, Any] = {"unit": "seconds per million tokens", "batch": BATCH, "length": LENGTH}
    for kind, by_loader in found.items():
        rows_of = {
            name: {what: spread([one[what] for one in turns]) for what in ("processor_s", "clock_s")}
            for name, turns in by_loader.items()
        }
        for what in ("processor_s", "clock_s"):
            base = rows_of["stream"][what]["median"]
            for name in loaders:
                rows_of[name][what]["times_the_stream"] = round(rows_of[name][what]["median"] / base, 2)
        results[kind] = rows_of
    write_result("loader_peer", CLAIM, results)


if __name__ == "__main__":
    main()
