"""The state of a stream and the rows of its log, checked: from plain JSON to stages, sizes of steps and back."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from tilewright.core.errors import CheckpointError
from tilewright.data.batches.mixture_order import Mixture, MixtureStage
from tilewright.data.batches.state.move_log import Mark, Row, unreadable


class Position(NamedTuple):
    """A position in a data stream: a step, its first sample, and the size of it and of those that follow."""

    step: int
    sample: int
    size: int


class KeptLog(NamedTuple):
    """The rows of a stream's log behind a checkpoint."""

    lost: str | None
    """What was lost of it; None: nothing."""
    skips: list[tuple[int, int, str]]
    """Samples that a user has asked to leave out, as first and one behind the last, and why."""


def asked_skips(rows: Sequence[Row]) -> list[tuple[int, int, str]]:
    """The samples that rows of a stream's state behind a checkpoint ask to leave out. Rows of another shape, which we
    do not write, are passed over."""
    found = []
    for row in rows:
        samples = row.get("samples")
        if row["kind"] == "skip" and isinstance(samples, list) and [type(one) for one in samples] == [int, int]:
            found.append((samples[0], samples[1], str(row.get("why", ""))))
    return found


def weights_key(weights: Mapping[str, float]) -> str:
    """A key of weights in a stream's state, a few characters: what a user asked for, to see if it is what was asked for
    last."""
    return xxhash.xxh3_64_hexdigest(repr([float(weight) for weight in weights.values()]).encode())


def stage_row(mixture: Mixture, stage: MixtureStage, step: int, why: str) -> Row:
    """A mixture stage in the stream's state as a row of its log."""
    by_domain = {
        "weights": dict(zip(mixture.domains, stage.weights, strict=True)),
        "before": dict(zip(mixture.domains, stage.before, strict=True)),
    }
    return {"kind": "stage", "start": stage.start, **by_domain, "step": step, "why": why}


def size_row(at: Position) -> Row:
    """A size of steps in the stream's state as a row of its log."""
    return {"kind": "size", "step": at.step, "sample": at.sample, "size": at.size}


def opening_rows(mixture: Mixture, at: Position) -> list[Row]:
    """The first rows for a stream's state that begins at a position."""
    rows = [stage_row(mixture, stage, at.step, "") for stage in mixture.stages]
    rows += [{"kind": "skip", "samples": list(skip), "step": at.step, "why": ""} for skip in mixture.skips]
    return [*rows, size_row(at)]


def read_rows(rows: Sequence[Row], of: Mixture, path: Path) -> tuple[Mixture, list[Position]]:
    """Read a stream's state, mixture stages and sizes of steps, from the rows of its log.

    Args:
        rows: of the log.
        of: a mixture of the same seed and domains.
        path: for errors.

    Raises:
        DataError: a row has not what belongs to it, or there is none of a stage or of a size.
    """
    num_rows = of.num_rows
    stages, sizes, mixture = [], [], Mixture(of.seed, num_rows)
    for number, row in enumerate(rows, 1):
        try:
            if row["kind"] == "stage":
                columns = (tuple(row[name][domain] for domain in of.domains) for name in ("weights", "before"))
                stages.append(MixtureStage(int(row["start"]), *columns))
            elif row["kind"] == "size":
                sizes.append(Position(int(row["step"]), int(row["sample"]), int(row["size"])))
            elif row["kind"] == "skip":
                first, stop = row["samples"]
                mixture.skip(int(first), int(stop))
        except (KeyError, TypeError, ValueError) as error:
            raise unreadable(path, f"row {number} of kind {row['kind']!r}: {type(error).__name__} {error}") from error
    if not stages or not sizes:
        raise unreadable(path, f"{len(rows)} rows, none of a {'size' if stages else 'stage'}")
    whole = Mixture(of.seed, num_rows, stages, of.order)
    whole.skips = mixture.skips
    return whole, sizes


@dataclass(frozen=True)
class LoadedState:
    """A stream's state from a checkpoint, of this version or of one that kept every stage."""

    mixture: Mixture
    next_sample: int
    step: int
    size: Position
    asked: str
    mark: Mark
    rows: list[Row] | None
    """Of the log; None: it is not in the state."""
    wanted: dict[str, float]
    """Sample weights, those of domains that are away too."""
    away: tuple[str, ...] = ()
    """Domains that are left out."""

    @classmethod
    def of(cls, state: Mapping[str, Any], like: Mixture, size: int) -> "LoadedState":
        """Read a stream's state from the plain JSON of a checkpoint.

        Args:
            state: as it was saved.
            like: a mixture of the same domains.
            size: of the steps where the state does not say it.

        Raises:
            CheckpointError: it is none.
        """
        missing = {"seed", "next_sample", "stages"} - set(state)
        if missing:
            raise incomplete(f"no {', '.join(sorted(missing))}")
        try:
            return cls._new(state, like) if "log" in state else cls._old(state, like, size)
        except (KeyError, TypeError, ValueError, AssertionError) as error:
            raise incomplete(f"{type(error).__name__}: {error}") from error

    @classmethod
    def _new(cls, state: Mapping[str, Any], like: Mixture) -> "LoadedState":
        num_rows = like.num_rows
        stages = [MixtureStage(start, tuple(weights), tuple(before)) for start, weights, before in state["stages"]]
        if not stages or any(len(one.weights) != len(num_rows) or len(one.before) != len(num_rows) for one in stages):
            raise ValueError(f"stages of another number of domains than {len(num_rows)}")
        mixture = Mixture(state["seed"], num_rows, stages, like.order)
        for first, stop in state.get("skips", ()):
            mixture.skip(first, stop)
        number, digest = state["log"]
        at = Position(*(_whole(one) for one in state["size"]))
        following, step = _whole(state["next_sample"]), _whole(state["step"])
        mixture.since(following)
        wanted = dict(zip(num_rows, map(float, state.get("wanted", stages[-1].weights)), strict=True))
        mark, away = (_whole(number), str(digest)), tuple(str(name) for name in state.get("away", ()))
        return cls(mixture, following, step, at, str(state["asked"]), mark, None, wanted, away)

    @classmethod
    def _old(cls, state: Mapping[str, Any], like: Mixture, size: int) -> "LoadedState":
        mixture, rows = Mixture(state["seed"], like.num_rows, order=like.order), []
        for start, weights in state["stages"]:
            rows.append(stage_row(mixture, mixture.add_stage(start, weights), 0, ""))
        sizes = [Position(*one) for one in state.get("sizes", [(0, 0, size)])]
        rows += [size_row(one) for one in sizes]
        step = state.get("step", state["next_sample"] // size)
        asked = weights_key(mixture.weights())
        return cls(mixture, state["next_sample"], step, sizes[-1], asked, (0, ""), rows, mixture.weights())


def _whole(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is no count")
    return value


def incomplete(got: str) -> CheckpointError:
    """The error of a checkpoint's stream state that lacks something."""
    return CheckpointError(
        "Saved data position is incomplete",
        got=got,
        need="seed, fingerprint, next_sample, stages",
        try_="an earlier checkpoint of the run",
    )
