"""Samples and moves of the controller of a run, finished or not: reads precision.jsonl. Plain Python; for the report.

    {"kind": "sample", "step", "above_8bit", "noise", "layers": Evidence, "after"?: why it was taken out of turn}
    {"kind": "move" | "refused", "step", "layer", "gemm", "before", "after", "evidence", "value", "threshold", "unit"}

Steps count from 1, as in metrics.jsonl. A sample is taken before its step, one out of turn after it; its moves hold
from then on.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tilewright.precision.controller.groups import Move
from tilewright.precision.controller.layer_statistics import GemmStats, QuantStats, TensorStats
from tilewright.precision.policy.gemm_names import GEMM_NAMES


@dataclass(frozen=True)
class Sample:
    """One sample, after its moves."""

    step: int
    above_8bit: float
    """Share of the work above 8 bits."""
    noise: float
    evidence: QuantStats
    after: str | None = None
    """The bad step that it was taken after; None for a sample in its turn."""


@dataclass(frozen=True)
class History:
    """All samples, moves and refused moves of a run, in their order.

    Args:
        samples: see `Sample`.
        moves: carried out.
        refused: not carried out, because the budget did not allow it.
        start: formats before the first move, by (layer, gemm).
    """

    samples: list[Sample]
    moves: list[Move]
    refused: list[Move]
    start: dict[tuple[str, str], str]

    @property
    def layers(self) -> list[str]:
        """Names of the layers in the controller's log, in the order of the model."""
        return list(dict.fromkeys(layer for layer, _ in self.start))

    def formats(self, steps: Iterable[int]) -> dict[int, dict[tuple[str, str], str]]:
        """Formats in the controller's log, of each matmul at the end of each of these steps: the map of layers by
        steps.

        Schedules and steps redone in wider formats are not in it.
        """
        found = {}
        for step in steps:
            now = dict(self.start)
            for move in self.moves:
                if move.step <= step:
                    now[move.layer, move.gemm] = move.after
            found[step] = now
        return found

    def tensor(self, layer: str, tensor: str) -> list[tuple[int, TensorStats]]:
        """One tensor in the controller's log over the samples: (step, evidence). `tensor`: see
        `layer_statistics.TENSORS`."""
        found = [(s.step, s.evidence.layers[layer].tensors) for s in self.samples if layer in s.evidence.layers]
        return [(step, tensors[tensor]) for step, tensors in found if tensor in tensors]

    def matmul(self, layer: str, gemm: str, name: str = "fp8_tile") -> list[tuple[int, GemmStats]]:
        """One matmul in the controller's log, in one format over the samples: (step, evidence)."""
        found = [(s.step, s.evidence.layers[layer].matmuls) for s in self.samples if layer in s.evidence.layers]
        return [(step, matmuls[f"{gemm}.{name}"]) for step, matmuls in found if f"{gemm}.{name}" in matmuls]


def read_history(run: Path | str) -> History:
    """Read the controller's log of a run folder. A run without a controller has an empty history; a corrupt last line
    is left out.

    Args:
        run: the run folder; its precision.json gives the formats at the start.
    """
    samples: list[Sample] = []
    moves: dict[str, list[Move]] = {"move": [], "refused": []}
    for row in _rows(Path(run) / "precision.jsonl"):
        kind = row.pop("kind")
        if kind == "sample":
            evidence = QuantStats.from_json(row["layers"])
            samples.append(Sample(row["step"], row["above_8bit"], row["noise"], evidence, row.get("after")))
        else:
            row |= {name: _number(row[name]) for name in ("value", "threshold")}
            moves[kind].append(Move(**row))
    return History(samples, moves["move"], moves["refused"], _start(Path(run) / "precision.json") if samples else {})


def _rows(path: Path) -> list[dict[str, Any]]:
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def _number(value: float | None) -> float:
    """A number of the controller's log; the run's files have null for what is not one."""
    return float("nan") if value is None else value


def _start(path: Path) -> dict[tuple[str, str], str]:
    table = json.loads(path.read_text(encoding="utf-8"))
    return {(row["fqn"], gemm): row["gemms"][gemm] for row in table if row.get("gemms") for gemm in GEMM_NAMES}
