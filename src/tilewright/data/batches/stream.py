"""The batches of a run, in order: this rank's micro-batches of one optimizer step after the other.

The state is the same on every rank, and enough to continue at any number of ranks: seed, fingerprint of the data, next
sample, present weights and the samples of each domain before them. It does not grow with the moves of weights: these
are in a log (`move_log`), which only questions about samples of earlier stages need. Batches are made ahead in one
thread; `wait_s` is the time that the caller really waited."""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np

from tilewright.core.errors import CheckpointError
from tilewright.data.batches.mixture_order import BLOCK, Mixture, check_weights, without
from tilewright.data.batches.state.move_log import FILE, Mark, MoveLog, unreadable
from tilewright.data.batches.state.stream_state import (
    KeptLog,
    LoadedState,
    Position,
    asked_skips,
    opening_rows,
    read_rows,
    size_row,
    stage_row,
    weights_key,
)
from tilewright.data.batches.step_samples import (
    BuiltStep,
    DocumentSteps,
    FarRows,
    Rows,
    RowsOfDocuments,
    RowSteps,
    StepCut,
    StepDocuments,
)
from tilewright.data.batches.step_worker import StepWorker
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
        self.read_s = self.prepare_s = 0.0
        """Seconds that the thread which makes steps waited for rows from far away, and that it computed, for the step
        that `next_step` gave last."""
        self.documents: StepDocuments | None = None
        """Of the step that `next_step` gave last, on all ranks; None where steps are of rows."""
        self.row_domains: np.ndarray = np.zeros(0, np.int64)
        """Of each row or document of that step, in this rank's order, its domain's place in `domains`; -1 where a row
        only fills up."""
        self._cut: StepCut
        if documents:
            self._cut = DocumentSteps(
                cast(RowsOfDocuments, prepared), batch_size, Room(world, micro_batch_size, takes), rank
            )
        else:
            self._cut = RowSteps(prepared, batch_size, micro_batch_size, rank, world)
        self._prepared, self._prefetch = prepared, prefetch
        self._next = self._step = 0
        self._worker: StepWorker | None = None
        self._far = prepared if isinstance(prepared, FarRows) else None
        self._mixture = Mixture(seed, prepared.num_rows, order=self._far.row_order if self._far else None)
        self._log = MoveLog()
        self._told: tuple[Mixture, list[Position]] | None = None  # of a log that was read
        self._history: tuple[Mark, tuple[Mixture, list[Position]]] | None = None  # of the log as it was then
        self._size = Position(0, 0, batch_size)
        self.away: tuple[str, ...] = ()
        """Domains that are left out, whatever weights are asked for: their sources cannot be read."""
        self._asked = weights_key(mine := self._weights(weights))
        self._wanted = dict(mine)  # sample weights, those of domains that are away too
        self._mixture.add_stage(0, mine)
        self._log.begin(opening_rows(self._mixture, self._size))

    def _weights(self, weights: Mapping[str, float] | None) -> Mapping[str, float]:
        """Weights of the stream's samples, by domain."""
        if not weights:
            return check_weights(self._prepared.num_rows, tuple(self._prepared.num_rows))
        return self._cut.weights(check_weights(weights, tuple(self._prepared.num_rows)))

    def next_step(self) -> list[Batch]:
        """Return this rank's micro-batches of the stream's next step; every rank has as many.

        A rank with fewer rows than the others is filled up with a row that has no targets.
        """
        if self._prefetch and self._worker is None:
            self._worker = StepWorker(self._build, self._next, self._prefetch)
        started = time.perf_counter()
        built = self._worker.get() if self._worker else self._build(self._next)
        self.wait_s = time.perf_counter() - started
        self.waited_s += self.wait_s
        self._next, self.documents, self.row_domains = built.end, built.documents, built.domains
        self.read_s, self.prepare_s = built.read_s, built.prepare_s
        self._step += 1
        return built.batches

    def numbers(self) -> dict[str, float]:
        """The stream's numbers for the metrics of the step that `next_step` gave last: seconds of reading and of making
        it, and numbers of its documents."""
        times = {"read_s": self.read_s, "prepare_s": self.prepare_s}
        return times | (self.documents.numbers() if self.documents else {})

    @property
    def takes_documents(self) -> bool:
        """True if steps of the stream are of documents, whose places can be assigned."""
        return isinstance(self._cut, DocumentSteps)

    def assign_with(self, assign: Assign) -> None:
        """Let `assign` choose, from the stream's next step on, which micro-batch of which rank gets each document.

        Call it on every rank after the same step, with functions that give the same. What was made ahead is thrown away
        and made again.

        Raises:
            AssertionError: steps are of rows.
        """
        if not isinstance(self._cut, DocumentSteps):
            raise AssertionError("rows of one length are not assigned")
        self.close()
        self._cut.assign = assign

    @property
    def domains(self) -> tuple[str, ...]:
        """The names of the stream's domains, in the mixture's order."""
        return self._mixture.domains

    @property
    def num_rows(self) -> Mapping[str, int]:
        """Number of training rows of each domain of the stream."""
        return self._prepared.num_rows

    @property
    def num_samples(self) -> Mapping[str, int]:
        """Samples of each domain up to the stream's next step, near a block's end exact."""
        return dict(zip(self._mixture.domains, self._mixture.counts(self._next), strict=True))

    @property
    def weights(self) -> dict[str, float]:
        """Weights of the stream's samples, by domain, that hold from the next block on."""
        return self._mixture.weights()

    def samples_of(self, step: int) -> Sequence[int]:
        """The samples of a step of the stream, over all ranks, also where the size of a step changed before it.

        Args:
            step: counted from 0.

        Raises:
            DataError: of a step before the state that was loaded, and the log is not at hand.
        """
        if step >= self._step and self._told is None:
            mixture, at = self._mixture, Position(self._step, self._next, self._cut.size)
        else:
            mixture, sizes = self._past()
            known = [one for one in sizes if one.step <= step]
            if not known:
                raise unreadable(Path(FILE), f"rows of steps from {sizes[0].step + 1} on, none of step {step + 1}")
            at = known[-1]
        start = self._cut.skip(mixture, at.sample, step - at.step, at.size)
        stop = self._cut.skip(mixture, start, 1, at.size)
        if not any(start < b and a < stop for a, b in mixture.skips):
            return range(start, stop)
        return [one for one in range(start, stop) if not any(a <= one < b for a, b in mixture.skips)]

    def mix_with(self, weights: Mapping[str, float] | None) -> int | None:
        """Mix the stream with `weights` (empty: in proportion to the rows) from the next block boundary on, where that
        is not what was asked for last; returns the first sample that they hold for, None where nothing changes.

        Call it on every rank after the same step. What was made ahead is thrown away and made again.
        """
        mine = self._weights(weights)
        if weights_key(mine) == self._asked:
            return None
        self._asked = weights_key(mine)
        return self._add_stage(mine, "data.weights changed")

    def move(self, weights: Mapping[str, float], why: str) -> int | None:
        """Move the stream's weights as `mix_with` does, without a user's request: the weights that were asked for stay
        recorded, and a resume does not return to them.

        Args:
            weights: as for `mix_with`.
            why: for the log.
        """
        mine = self._weights(weights)
        return None if dict(mine) == self._wanted else self._add_stage(mine, why)

    def leave_away(self, domains: Collection[str], why: str) -> int | None:
        """Leave domains that are away out of the stream from the next block boundary on, and no others: the rest has
        the weights among itself that were asked for. Returns the first sample, None where nothing changes.

        Call it on every rank after the same step.

        Args:
            domains: that are away.
            why: for the log.
        """
        away = tuple(name for name in self.domains if name in domains)
        if away == self.away:
            return None
        self.away = away
        return self._add_stage(self._wanted, why)

    def _add_stage(self, weights: Mapping[str, float], why: str) -> int:
        self._wanted = dict(weights)
        weights = without(weights, self.away, self._prepared.num_rows)
        start = -(-self._next // BLOCK) * BLOCK
        self.close()
        self._forget()
        stage = self._mixture.add_stage(start, weights)
        self._log.append(stage_row(self._mixture, stage, self._step, why))
        return start

    def _forget(self) -> None:
        """Forget stages of the stream that are over; they are in the log alone."""
        old, skips = self._mixture, self._mixture.skips
        self._mixture = Mixture(old.seed, self._prepared.num_rows, old.since(self._next), old.order)
        self._mixture.skips = [one for one in skips if one[1] > self._next]

    def leave_out(self, first: int, stop: int, why: str) -> tuple[int, int] | None:
        """Leave out of the stream samples from `first` to before `stop`, those that are still to come; returns them, or
        None.

        Call it on every rank after the same step.
        """
        first = max(first, self._next)
        if first >= stop:
            return None
        self.close()
        self._mixture.skip(first, stop)
        self._log.append({"kind": "skip", "samples": [first, stop], "step": self._step, "why": why})
        return first, stop

    def keep_log(self, path: Path) -> KeptLog:
        """Keep the stream's log in this file from now on, and in memory no longer; the first of several ranks does.

        Args:
            path: of the run's log, or of none. A log there that does not belong to this stream's state is renamed, and
                another begun.

        Returns:
            What every rank is then to `leave_out`, and what is to be said.
        """
        behind, lost = self._log.keep_in(path)
        if lost is not None:
            self._log.begin(opening_rows(self._mixture, Position(self._step, self._next, self._cut.size)))
            lost = f"{path.name} {lost}: it begins again here, so samples before {self._next:,} can no longer be told"
        return KeptLog(lost, asked_skips(behind))

    def read_log(self, path: Path, mark: Mark | None) -> None:
        """Read the stream's log of the run about samples, also behind the state that was loaded.

        Args:
            path: of the log, which another process may be writing.
            mark: `log` of the state that was loaded; None: of none.

        Raises:
            DataError: it is not the log of that state, or cannot be read.
        """
        self._told = read_rows(self._log.read_in(path, mark), self._mixture, path)

    def _past(self) -> tuple[Mixture, list[Position]]:
        """All stages and sizes of steps of the stream."""
        if self._told is not None:
            return self._told
        if self._history is None or self._history[0] != self._log.mark:
            self._history = self._log.mark, read_rows(self._log.rows(), self._mixture, Path(FILE))
        return self._history[1]

    def state_dict(self) -> dict[str, Any]:
        """The stream's state that a resume needs; plain JSON values, of one size however often the weights moved."""
        skips = [list(one) for one in self._mixture.skips if one[1] > self._next]
        return {
            "seed": self._mixture.seed,
            "fingerprint": self._prepared.fingerprint,
            "next_sample": self._next,
            "step": self._step,
            "size": list(self._size),
            "stages": [[one.start, list(one.weights), list(one.before)] for one in self._mixture.since(self._next)],
            "asked": self._asked,
            "log": list(self._log.mark),
            **({"skips": skips} if skips else {}),
            **({"away": list(self.away), "wanted": list(self._wanted.values())} if self.away else {}),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the stream where `state` was taken, with its seed and weights and this stream's size of a step.

        A state of a version that kept all stages brings its log with it. One without sizes counts as one of steps of
        this stream's size.

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
        found = LoadedState.of(state, self._mixture, self._cut.size)
        self.close()
        self._mixture, self._next, self._step = found.mixture, found.next_sample, found.step
        self._asked, self._size = found.asked, found.size
        self.away, self._wanted = found.away, found.wanted
        if found.rows is not None:
            self._log.begin(found.rows)
        else:
            self._log.go_to(found.mark)
        self._forget()
        if self._size.size != self._cut.size:
            self._size = Position(self._step, self._next, self._cut.size)
            self._log.append(size_row(self._size))

    def explain(self, sample: int) -> dict[str, Any]:
        """Explain a sample of the stream: domain, epoch, row and the documents in it. For a stage that is over, the log
        says it.

        Raises:
            DataError: that is not at hand.
        """
        here = self._told is None and self._mixture.knows(sample)
        mixture = self._mixture if here else self._past()[0]
        if not mixture.knows(sample):
            raise unreadable(Path(FILE), f"no row of sample {sample:,}")
        picks = mixture.picks(np.array([sample], np.int64))
        domain, row = self._mixture.domains[int(picks.domain[0])], int(picks.row[0])
        return {
            "sample": sample,
            "domain": domain,
            "epoch": int(picks.epoch[0]),
            "row": row,
            "documents": self._prepared.describe_row(domain, row),
        }

    def close(self) -> None:
        """Close the stream: stop the thread. It can be used again afterwards."""
        if self._worker:
            self._worker.close()
            self._worker = None

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _build(self, start: int) -> BuiltStep:
        began, before = time.perf_counter(), self._far.read_s if self._far else 0.0
        if self._far is not None:
            self._far.follow(self._mixture, start)
        built = self._cut.build(self._mixture, start)
        read_s = (self._far.read_s if self._far else 0.0) - before
        return replace(built, read_s=read_s, prepare_s=time.perf_counter() - began - read_s)
