"""The samples of a step, and their cut into a rank's micro-batches: rows of one length, or documents.

Both are functions of the first sample alone, whatever the number of ranks, so a stream's state is where it stands.

Legend: N documents of a step, or samples  R rows of a micro-batch  T tokens of a micro-batch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol, runtime_checkable

import numpy as np

from tilewright.core.errors import ConfigError
from tilewright.data.batches.mixture_order import BLOCK, Mixture, Picks, RowOrder
from tilewright.data.batches.tensors import Batch, as_tensors
from tilewright.parallel.pipeline.assignment import Assign, Assignment, Room, check_assignment, in_stream_order

NUM_LENGTHS = 16
"""Micro-batches of documents are filled up to one of so many lengths. oneDNN keeps code for each shape that it has
seen: 100 lengths of a small model 570 to 730 MiB, four of them 34."""
_LENGTH_STEP = 32
_WALK = 4096  # documents that are looked at together


class Rows(Protocol):
    """The methods of prepared data, of any kind, that a stream calls."""

    fingerprint: str
    num_rows: Mapping[str, int]

    def train_arrays(self, picks: Picks, seed: int) -> dict[str, np.ndarray]:
        """Batch arrays of a step's samples, the training rows `picks`, in their order."""
        ...

    def blank_row(self) -> dict[str, np.ndarray]:
        """A blank row without targets for a step, for a rank that has fewer rows than the others."""
        ...

    def describe_row(self, domain: str, row: int) -> list[dict[str, Any]]:
        """The source documents of a training row, a sample of a step."""
        ...


@runtime_checkable
class FarRows(Protocol):
    """Further methods of rows that are read from far away during a run."""

    row_order: RowOrder
    """In which few places are read at a time."""

    @property
    def read_s(self) -> float:
        """Seconds that rows at far addresses were waited for so far, for samples of steps."""
        ...

    def follow(self, mixture: Mixture, sample: int) -> None:
        """Tell the reader that the next step begins with this sample of this mixture, so that it reads ahead from
        there."""
        ...


@runtime_checkable
class GatheredRows(Protocol):
    """Rows in memory that several calls gather at once: a call for them costs as much as some dozens of them do."""

    @property
    def rows_per_call(self) -> int:
        """Rows of samples that are asked for at once, of several steps together where steps have fewer."""
        ...


class RowsOfDocuments(Rows, Protocol):
    """Further methods where each row is one document."""

    num_tokens: Mapping[str, int]

    def lengths(self, picks: Picks) -> np.ndarray:
        """Tokens of each document that may be a step's sample, int64."""
        ...

    def joined(self, picks: Picks, seed: int, length: int) -> dict[str, np.ndarray]:
        """Batch arrays [1, T] of a step's documents behind each other, and where they begin; none gives padding
        alone."""
        ...


@dataclass(frozen=True)
class StepDocuments:
    """The documents of a step, on all ranks, and where they went."""

    lengths_N: np.ndarray
    """Tokens of each, int64, in stream order."""
    assignment: Assignment
    """See `parallel.pipeline.assignment`."""
    most: int
    """Tokens that a micro-batch may have."""

    def numbers(self) -> dict[str, float]:
        """Numbers of a step's documents for the metrics: documents, micro-batches per rank, and the share of all
        positions that is padding."""
        parts = [part for rank in self.assignment for part in rank]
        positions = sum(padded_length(int(self.lengths_N[part].sum()), self.most) for part in parts)
        padding = 1 - float(self.lengths_N.sum()) / positions
        return {"documents": len(self.lengths_N), "micro_batches": len(self.assignment[0]), "padding": padding}


@dataclass(frozen=True)
class BuiltStep:
    """A rank's part of a training step: its micro-batches, and their domains and documents."""

    batches: list[Batch]
    end: int
    """The sample after the step's last one."""
    domains: np.ndarray
    """Of each row or document of the micro-batches, in their order, the place of its domain in the mixture, int64; -1
    where a row only fills up."""
    documents: StepDocuments | None = None
    read_s: float = 0.0
    """Seconds in which rows were waited for."""
    prepare_s: float = 0.0
    """Seconds of the rest of its making."""


class StepCut(Protocol):
    """The cut of a stream of samples into training steps and a rank's micro-batches."""

    size: int
    """Of a step over all ranks, in rows or tokens."""

    def weights(self, weights: Mapping[str, float]) -> Mapping[str, float]:
        """The weights by which this cut of steps mixes samples of domains, where a user sets them."""
        ...

    def build(self, mixture: Mixture, start: int) -> BuiltStep:
        """Build a rank's part of the training step whose first sample is `start`."""
        ...

    def skip(self, mixture: Mixture, start: int, steps: int, size: int) -> int:
        """The first sample of the step that comes so many steps of this size behind the one at `start`."""
        ...


@dataclass
class _Ahead:
    """Steps of rows that were made in one call."""

    mixture: Mixture
    skips: list[tuple[int, int]]
    """Of the mixture as it was then."""
    steps: dict[int, BuiltStep]
    """By their first samples."""


class RowSteps:
    """Cuts a stream into steps of `batch_size` rows; rank r gets every `world`-th of them, from the r-th one on.

    Where rows are `GatheredRows`, those of the next steps are made with them, up to the end of a block of samples.

    Args:
        prepared: what to read.
        batch_size: rows of a step, over all ranks.
        micro_batch_size: most rows in one batch.
        rank, world: this process and the number of them.

    Raises:
        ConfigError: fewer rows in a step than ranks.
    """

    def __init__(self, prepared: Rows, batch_size: int, micro_batch_size: int, rank: int, world: int) -> None:
        if batch_size < world:
            raise ConfigError(
                "Fewer rows per step than ranks",
                where="train.global_batch_size",
                got=f"global_batch_size = {batch_size}, {world} ranks",
                need=f"at least {world}",
                try_=f"train.global_batch_size = {world}",
            )
        self.size = batch_size
        self._prepared, self._rank, self._world, self._micro_batch = prepared, rank, world, micro_batch_size
        per_call = prepared.rows_per_call if isinstance(prepared, GatheredRows) else 1
        self._most_steps = max(1, per_call // -(-batch_size // world))
        self._ahead: _Ahead | None = None

    def weights(self, weights: Mapping[str, float]) -> Mapping[str, float]:
        """Weights of samples for steps of rows, all of one length."""
        return weights

    def build(self, mixture: Mixture, start: int) -> BuiltStep:
        """Build a step's samples of this rank, rows; one with fewer rows than others is filled up with a row without
        targets."""
        ahead = self._ahead
        known = ahead is not None and ahead.mixture is mixture and ahead.skips is mixture.skips
        if ahead is None or not known or start not in ahead.steps:
            number = max(1, min(self._most_steps, (BLOCK - start % BLOCK) // self.size))
            ahead = self._ahead = _Ahead(mixture, mixture.skips, self._made(mixture, start, number))
        return ahead.steps.pop(start)

    def _made(self, mixture: Mixture, start: int, number: int) -> dict[int, BuiltStep]:
        """So many steps of rows, by their first samples."""
        samples = mixture.following(start, number * self.size).reshape(number, self.size)
        samples = samples[:, self._rank :: self._world]
        picks = mixture.picks(samples.ravel())
        arrays, domains = self._prepared.train_arrays(picks, mixture.seed), picks.domain
        rows, most = samples.shape[1], -(-self.size // self._world)
        if rows < most:
            blank = self._prepared.blank_row()
            arrays = {name: _filled(array, blank[name], number) for name, array in arrays.items()}
            domains = _filled(domains, np.array([-1]), number)
        num_batches = -(-most // self._micro_batch)
        bounds = [most * i // num_batches for i in range(num_batches + 1)]
        tensors, steps = as_tensors(arrays), dict[int, BuiltStep]()
        for at in range(0, number * most, most):
            batches = [{name: tensor[at + a : at + b] for name, tensor in tensors.items()} for a, b in pairwise(bounds)]
            end = mixture.behind(start, self.size)
            steps[start] = BuiltStep(batches, end, domains[at : at + most])
            start = end
        return steps

    def skip(self, mixture: Mixture, start: int, steps: int, size: int) -> int:
        """The first sample after some steps of rows: steps of one size have one number of samples."""
        return mixture.behind(start, steps * size)


class DocumentSteps:
    """A step is the next whole documents of the stream that have at most `tokens` tokens together, at least one.

    All ranks compute where all of them go, and each reads its own.

    Args:
        prepared: what to read, a document in each row.
        tokens: of a step, over all ranks.
        room: what its micro-batches may be.
        rank: that this process has among those of `room`.
    """

    def __init__(self, prepared: RowsOfDocuments, tokens: int, room: Room, rank: int) -> None:
        self.size, self.room, self._rank = tokens, room, rank
        self.assign: Assign = in_stream_order
        """Says where documents go. Settable while nothing is built."""
        self._prepared = prepared
        documents, tokens_there = (sum(of.values()) for of in (prepared.num_rows, prepared.num_tokens))
        self._mean = max(1.0, tokens_there / max(1, documents))

    def weights(self, weights: Mapping[str, float]) -> Mapping[str, float]:
        """Convert weights of tokens to weights of samples for steps of documents: a document has more tokens in one
        domain than in another."""
        rows, tokens = self._prepared.num_rows, self._prepared.num_tokens
        return {name: weight * rows[name] / tokens[name] if weight else weight for name, weight in weights.items()}

    def build(self, mixture: Mixture, start: int) -> BuiltStep:
        """Build a step of documents: each micro-batch is [1, T], filled up with padding to one of a few lengths."""
        picks, lengths_N = self._next(mixture, start, self.size)
        assignment = self.assign(lengths_N, self.room)
        check_assignment(assignment, lengths_N, self.room)
        batches = []
        for part in assignment[self._rank]:
            length = padded_length(int(lengths_N[part].sum()), self.room.tokens)
            arrays = self._prepared.joined(_of(picks, part), mixture.seed, length)
            batches.append(as_tensors(arrays))
        end = mixture.behind(start, len(lengths_N))
        domains = np.concatenate([picks.domain[part] for part in assignment[self._rank]] or [picks.domain[:0]])
        return BuiltStep(batches, end, domains, StepDocuments(lengths_N, assignment, self.room.tokens))

    def skip(self, mixture: Mixture, start: int, steps: int, size: int) -> int:
        """The first sample behind some steps of documents, which are counted, many steps at a time."""
        number = _WALK + 2 * int(size / self._mean)
        while steps:
            ends_N = np.cumsum(self._prepared.lengths(_picks(mixture, start, number)))
            at = before = 0
            while steps and (end := int(np.searchsorted(ends_N, before + size, side="right"))) < number:
                at = max(at + 1, end)
                before, steps = int(ends_N[at - 1]), steps - 1
            number, start = number if at else 2 * number, mixture.behind(start, at)
        return start

    def _next(self, mixture: Mixture, start: int, tokens: int) -> tuple[Picks, np.ndarray]:
        """The next documents of the step that begins at a sample, and their tokens."""
        number = int(tokens / self._mean) + BLOCK
        while True:
            picks = _picks(mixture, start, number)
            lengths_N = self._prepared.lengths(picks)
            fit = int(np.searchsorted(np.cumsum(lengths_N), tokens, side="right"))
            if fit < number:
                here = slice(0, max(1, fit))
                return _of(picks, here), lengths_N[here]
            number *= 2


def _filled(values: np.ndarray, blank: np.ndarray, number: int) -> np.ndarray:
    """Values of `number` steps filled up, with one blank row behind those of each."""
    rows, rest = len(values) // number, values.shape[1:]
    every = np.broadcast_to(blank, (number, *blank.shape))
    return np.concatenate([values.reshape(number, rows, *rest), every], axis=1).reshape(number * (rows + 1), *rest)


def padded_length(tokens: int, most: int) -> int:
    """Padded length of a step's documents, T of a micro-batch [1, T] of documents with so many tokens: the next of
    `NUM_LENGTHS` lengths or fewer.

    Args:
        tokens: of documents.
        most: in a micro-batch; the longest of the lengths.

    Example:
        >>> [padded_length(tokens, 1024) for tokens in (0, 1, 64, 65, 1000)]
        [64, 64, 64, 128, 1024]
    """
    step = -(-most // (NUM_LENGTHS * _LENGTH_STEP)) * _LENGTH_STEP
    return min(most, max(1, -(-tokens // step)) * step)


def _picks(mixture: Mixture, start: int, number: int) -> Picks:
    return mixture.picks(mixture.following(start, number))


def _of(picks: Picks, which: np.ndarray | slice) -> Picks:
    return Picks(picks.sample[which], picks.domain[which], picks.epoch[which], picks.row[which])
