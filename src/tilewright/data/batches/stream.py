"""The batches of a run, in order: this rank's micro-batches of one optimizer step after the other.

The state is the same on every rank, under a kilobyte, and enough to continue at any number of ranks: seed, fingerprint
of the data, next sample, log of mixture weights. Batches are made ahead in one thread; `wait_s` is the time that the
caller really waited."""

import queue
import threading
import time
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any, Protocol

import numpy as np

from tilewright.core.errors import CheckpointError, ConfigError
from tilewright.data.batches.mix import BLOCK, Mixture, Picks, check_weights
from tilewright.data.batches.tensors import Batch, as_tensors


class Rows(Protocol):
    """What `Stream` needs of prepared data, of any kind."""

    fingerprint: str
    num_rows: Mapping[str, int]

    def train_arrays(self, picks: Picks, seed: int) -> dict[str, np.ndarray]:
        """Batch arrays of the training rows `picks`, in their order."""
        ...

    def blank_row(self) -> dict[str, np.ndarray]:
        """A row without targets, for a rank that has fewer rows than the others."""
        ...

    def describe_row(self, domain: str, row: int) -> list[dict[str, Any]]:
        """The source documents of a training row."""
        ...


class Stream:
    """Endless training batches.

    Args:
        prepared: what to read, see `prepare`.
        seed: order of the rows.
        weights: mixture weights by domain; empty: in proportion to the rows, which is to tokens.
        batch_size: rows of one optimizer step, over all ranks.
        micro_batch_size: most rows in one batch.
        rank, world: this process and the number of them; rank r gets samples r, r + world, ... of each step.
        prefetch: steps made ahead in a thread. 0: made when asked for.

    Raises:
        ConfigError: impossible weights, or fewer rows in a step than ranks.
    """

    def __init__(
        self,
        prepared: Rows,
        *,
        seed: int,
        weights: Mapping[str, float] | None = None,
        batch_size: int,
        micro_batch_size: int,
        rank: int = 0,
        world: int = 1,
        prefetch: int = 2,
    ):
        if batch_size < world:
            raise ConfigError(
                "Fewer rows per step than ranks",
                where="train.global_batch_size",
                got=f"global_batch_size = {batch_size}, {world} ranks",
                need=f"at least {world}",
                try_=f"train.global_batch_size = {world}",
            )
        self.wait_s = 0.0
        """Seconds that the last `next_step` waited for its batches."""
        self._prepared, self._rank, self._world = prepared, rank, world
        self._batch_size, self._micro_batch, self._prefetch = batch_size, micro_batch_size, prefetch
        self._next = self._step = 0
        self._sizes = [(0, 0, batch_size)]  # steps of one size: their first one, its first sample, the size
        self._worker: _Worker | None = None
        self._mixture = Mixture(seed, prepared.num_rows)
        self._mixture.add_stage(0, weights or dict(prepared.num_rows))

    def next_step(self) -> list[Batch]:
        """This rank's micro-batches of the next optimizer step; as many on every rank.

        A rank with fewer rows than the others is filled up with a row that has no targets.
        """
        if self._prefetch and self._worker is None:
            self._worker = _Worker(self._build, self._next, self._batch_size, self._prefetch)
        started = time.perf_counter()
        batches = self._worker.get() if self._worker else self._build(self._next)
        self.wait_s = time.perf_counter() - started
        self._next += self._batch_size
        self._step += 1
        return batches

    def samples_of(self, step: int) -> range:
        """The samples of a step, over all ranks, also where the size of a step changed before it.

        Args:
            step: counted from 0.
        """
        first, sample, size = max((one for one in self._sizes if one[0] <= step), key=lambda one: one[0])
        start = sample + (step - first) * size
        return range(start, start + size)

    def mix_with(self, weights: Mapping[str, float] | None) -> int | None:
        """Mix with `weights` (empty: in proportion to the rows) from the next block boundary on, where that is not
        what was asked for last; returns the first sample that they hold for, None where nothing changes.

        Call it on every rank after the same step. What was made ahead is thrown away and made again.
        """
        weights = check_weights(weights or self._prepared.num_rows, self._mixture.domains)
        if weights == self._mixture.stages[-1][1]:
            return None
        start = -(-self._next // BLOCK) * BLOCK
        self.close()
        self._mixture.add_stage(start, weights)
        return start

    def state_dict(self) -> dict[str, Any]:
        """What a resume needs; plain JSON values."""
        return {
            "seed": self._mixture.seed,
            "fingerprint": self._prepared.fingerprint,
            "next_sample": self._next,
            "step": self._step,
            "sizes": [list(one) for one in self._sizes],
            "stages": [[start, dict(weights)] for start, weights in self._mixture.stages],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken, with its seed and weights and this stream's size of a step.

        A state without sizes, of a version that did not keep them, counts as one of steps of this stream's size.

        Raises:
            CheckpointError: the state was taken over other data, or is not a state.
        """
        if state.get("fingerprint") != self._prepared.fingerprint:
            raise CheckpointError(
                "Dataset changed: the saved data position is invalid",
                got=f"data fingerprint {self._prepared.fingerprint}",
                need=f"{state.get('fingerprint')}, as in the checkpoint",
                try_="the same [data] settings and files as before, or checkpoint.resume = 'never' to start again",
                where="data",
            )
        missing = {"seed", "next_sample", "stages"} - set(state)
        if missing:
            raise CheckpointError(
                "Saved data position is incomplete",
                got=f"no {', '.join(sorted(missing))}",
                need="seed, fingerprint, next_sample, stages",
                try_="an earlier checkpoint of the run",
            )
        mixture = Mixture(state["seed"], self._prepared.num_rows)
        for start, weights in state["stages"]:
            mixture.add_stage(start, weights)
        self.close()
        self._mixture, self._next = mixture, state["next_sample"]
        self._step = state.get("step", self._next // self._batch_size)
        sizes = [tuple(one) for one in state.get("sizes", [(0, 0, self._batch_size)])]
        if sizes[-1][2] != self._batch_size:
            sizes = [one for one in sizes if one[0] < self._step]
            sizes.append((self._step, self._next, self._batch_size))
        self._sizes = sizes

    def explain(self, sample: int) -> dict[str, Any]:
        """Where a sample comes from: domain, epoch, row and the documents in it. Needs no log of the run."""
        picks = self._mixture.picks(np.array([sample], np.int64))
        domain, row = self._mixture.domains[int(picks.domain[0])], int(picks.row[0])
        return {
            "sample": sample,
            "domain": domain,
            "epoch": int(picks.epoch[0]),
            "row": row,
            "documents": self._prepared.describe_row(domain, row),
        }

    def close(self) -> None:
        """Stop the thread. The stream can be used again afterwards."""
        if self._worker:
            self._worker.close()
            self._worker = None

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _build(self, start: int) -> list[Batch]:
        """The micro-batches of the step whose first sample is `start`."""
        samples = np.arange(start + self._rank, start + self._batch_size, self._world)
        arrays = self._prepared.train_arrays(self._mixture.picks(samples), self._mixture.seed)
        most = -(-self._batch_size // self._world)
        if len(samples) < most:
            blank = self._prepared.blank_row()
            arrays = {name: np.concatenate([array, blank[name]]) for name, array in arrays.items()}
        num_batches = -(-most // self._micro_batch)
        bounds = [most * i // num_batches for i in range(num_batches + 1)]
        tensors = as_tensors(arrays)
        return [{name: tensor[a:b] for name, tensor in tensors.items()} for a, b in pairwise(bounds)]


class _Worker:
    """A thread that builds steps ahead into a bounded queue, and hands on what goes wrong in it."""

    def __init__(self, build: Callable[[int], list[Batch]], start: int, stride: int, depth: int):
        self._queue: queue.Queue[tuple[list[Batch] | None, BaseException | None]] = queue.Queue(depth)
        self._stop = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(
            target=self._run, args=(build, start, stride), name="tilewright-data", daemon=True
        )
        self._thread.start()

    def get(self) -> list[Batch]:
        if self._error is None:
            batches, self._error = self._queue.get()
        if self._error is not None:
            raise self._error
        return batches

    def close(self) -> None:
        self._stop.set()
        while self._thread.is_alive():
            try:  # the thread may be before a full queue
                self._queue.get_nowait()
            except queue.Empty:
                self._thread.join(0.01)

    def _run(self, build: Callable[[int], list[Batch]], start: int, stride: int) -> None:
        while not self._stop.is_set():
            try:
                item = build(start), None
            except BaseException as error:  # noqa: BLE001  raised again in the caller's thread
                item = None, error
            self._queue.put(item)
            if item[1] is not None:
                return
            start += stride
