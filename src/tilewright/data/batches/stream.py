"""The batches of a run, in order: this rank's micro-batches of one optimizer step after the other.

The state is the same on every rank, under a kilobyte, and enough to continue at any number of ranks: seed, fingerprint
of the data, next sample, log of mixture weights. Batches are made ahead in one thread; `wait_s` is the time that the
caller really waited."""

import queue
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from tilewright.core.errors import CheckpointError
from tilewright.data.batches.mix import BLOCK, Mixture, check_weights
from tilewright.data.batches.steps import BuiltStep, DocumentSteps, Rows, RowSteps, StepCut, StepDocuments
from tilewright.data.batches.tensors import Batch
from tilewright.parallel.pipeline.assignment import Assign, Room, any_count


class Stream:
    """Endless training batches.

    Args:
        prepared: what to read, see `prepare`.
        seed: order of the rows.
        weights: mixture weights by domain, of tokens; empty: in proportion to the rows, each once per epoch.
        batch_size: rows of one optimizer step, over all ranks. With `documents` tokens of whole documents, at most.
        micro_batch_size: most rows in one batch. With `documents` tokens.
        rank, world: this process and the number of them; rank r gets samples r, r + world, ... of each step. With
            `documents` what `assign_with` says.
        prefetch: steps made ahead in a thread. 0: made when asked for.
        documents: steps are of documents, each of which is a row of `prepared`, and micro-batches are [1, T].
        takes: with `documents`, whether a rank can run so many micro-batches in a step.

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
        documents: bool = False,
        takes: Callable[[int], bool] = any_count,
    ):
        self.wait_s = 0.0
        """Seconds that the last `next_step` waited for its batches."""
        self.waited_s = 0.0
        """Seconds that all of them waited."""
        self.documents: StepDocuments | None = None
        """Of the step that `next_step` gave last, on all ranks; None where steps are of rows."""
        self._cut: StepCut
        if documents:
            self._cut = DocumentSteps(prepared, batch_size, Room(world, micro_batch_size, takes), rank)
        else:
            self._cut = RowSteps(prepared, batch_size, micro_batch_size, rank, world)
        self._prepared, self._prefetch = prepared, prefetch
        self._next = self._step = 0
        self._sizes = [(0, 0, batch_size)]  # steps of one size: their first one, its first sample, the size
        self._worker: _Worker | None = None
        self._mixture = Mixture(seed, prepared.num_rows)
        self._mixture.add_stage(0, self._weights(weights))

    def _weights(self, weights: Mapping[str, float] | None) -> Mapping[str, float]:
        """Of samples, by domain."""
        if not weights:
            return check_weights(self._prepared.num_rows, tuple(self._prepared.num_rows))
        return self._cut.weights(check_weights(weights, tuple(self._prepared.num_rows)))

    def next_step(self) -> list[Batch]:
        """This rank's micro-batches of the next optimizer step; as many on every rank.

        A rank with fewer rows than the others is filled up with a row that has no targets.
        """
        if self._prefetch and self._worker is None:
            self._worker = _Worker(self._build, self._next, self._prefetch)
        started = time.perf_counter()
        built = self._worker.get() if self._worker else self._build(self._next)
        self.wait_s = time.perf_counter() - started
        self.waited_s += self.wait_s
        self._next, self.documents = built.end, built.documents
        self._step += 1
        return built.batches

    @property
    def takes_documents(self) -> bool:
        """Whether steps are of documents, whose places can be assigned."""
        return isinstance(self._cut, DocumentSteps)

    def assign_with(self, assign: Assign) -> None:
        """From the next step on, `assign` says which micro-batch of which rank gets each document.

        Call it on every rank after the same step, with functions that give the same. What was made ahead is thrown away
        and made again.

        Raises:
            AssertionError: steps are of rows.
        """
        if not isinstance(self._cut, DocumentSteps):
            raise AssertionError("rows of one length are not assigned")
        self.close()
        self._cut.assign = assign

    def samples_of(self, step: int) -> range:
        """The samples of a step, over all ranks, also where the size of a step changed before it.

        Args:
            step: counted from 0.
        """
        first, sample, size = max((one for one in self._sizes if one[0] <= step), key=lambda one: one[0])
        start = self._cut.skip(self._mixture, sample, step - first, size)
        return range(start, self._cut.skip(self._mixture, start, 1, size))

    def mix_with(self, weights: Mapping[str, float] | None) -> int | None:
        """Mix with `weights` (empty: in proportion to the rows) from the next block boundary on, where that is not
        what was asked for last; returns the first sample that they hold for, None where nothing changes.

        Call it on every rank after the same step. What was made ahead is thrown away and made again.
        """
        weights = self._weights(weights)
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
        self._step = state.get("step", self._next // self._cut.size)
        sizes = [tuple(one) for one in state.get("sizes", [(0, 0, self._cut.size)])]
        if sizes[-1][2] != self._cut.size:
            sizes = [one for one in sizes if one[0] < self._step]
            sizes.append((self._step, self._next, self._cut.size))
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

    def _build(self, start: int) -> BuiltStep:
        return self._cut.build(self._mixture, start)


class _Worker:
    """A thread that builds steps ahead into a bounded queue, and hands on what goes wrong in it."""

    def __init__(self, build: Callable[[int], BuiltStep], start: int, depth: int):
        self._queue: queue.Queue[tuple[BuiltStep | None, BaseException | None]] = queue.Queue(depth)
        self._stop = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(build, start), name="tilewright-data", daemon=True)
        self._thread.start()

    def get(self) -> BuiltStep:
        built: BuiltStep | None = None
        if self._error is None:
            built, self._error = self._queue.get()
        if self._error is not None:
            raise self._error
        assert built is not None
        return built

    def close(self) -> None:
        self._stop.set()
        while self._thread.is_alive():
            try:  # the thread may be before a full queue
                self._queue.get_nowait()
            except queue.Empty:
                self._thread.join(0.01)

    def _run(self, build: Callable[[int], BuiltStep], start: int) -> None:
        while not self._stop.is_set():
            try:
                built = build(start)
            except BaseException as error:  # noqa: BLE001  raised again in the caller's thread
                self._queue.put((None, error))
                return
            self._queue.put((built, None))
            start = built.end
