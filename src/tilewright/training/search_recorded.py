"""A precision policy from what a run has written down: no model, no batch, no measurement. Called by `cli.precision`.

The run must have had `precision.controller = true`, which samples evidence. The bounds that come of it are those of
`precision.recorded`.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tilewright.core.errors import ConfigError
from tilewright.core.hardware import detect_machine
from tilewright.core.load import Loaded, load_recipe
from tilewright.precision.budget import loss_slope
from tilewright.precision.gemm_time import UnitTime, estimate
from tilewright.precision.gemms import GEMM_NAMES, Gemms
from tilewright.precision.history import History, read_history
from tilewright.precision.layer_facts import Unit
from tilewright.precision.policy import Policy
from tilewright.precision.recorded import RecordedModel
from tilewright.precision.search import Candidate, SearchSpace, curve, fastest, landmarks
from tilewright.training.checkpoint import CheckpointStore, stored_tensors
from tilewright.training.search_precision import fixed_products, recipe_policy

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Recorded:
    """What a search in records found; all changes are upper bounds."""

    units: tuple[Unit, ...]
    space: SearchSpace
    model: RecordedModel
    time: str
    chosen: Candidate
    landmarks: tuple[Candidate, ...]
    curve: tuple[Candidate, ...]
    policy: Policy
    samples: int

    @property
    def formats(self) -> dict[str, Gemms]:
        """Chosen formats by layer."""
        return self.space.formats(self.chosen.fp8)

    def to_json(self) -> dict[str, Any]:
        """Every number, plainly."""

        def candidate(found: Candidate) -> dict[str, Any]:
            bound = {"change": found.predicted.change, "se": found.predicted.se}
            return {"name": found.name, "fp8": sorted(map(".".join, found.fp8)), "seconds": found.seconds} | {
                "upper_bound": bound
            }

        return {
            "samples": self.samples,
            "loss_slope": self.model.slope,
            "time": self.time,
            "chosen": candidate(self.chosen),
            "landmarks": [candidate(mark) for mark in self.landmarks],
            "curve": [candidate(point) for point in self.curve],
            "noise": {".".join(product): list(values) for product, values in self.model.noise.items()},
        }


def search_recorded(loaded: Loaded, run: Path, budget: float, time: str | None = None) -> Recorded:
    """The fastest policy inside a budget, by what a run recorded.

    Args:
        loaded: the recipe that the policy is for; its rules are followed.
        run: folder of a run of the same model.
        budget: relative loss change.
        time: h200 (the default) or ideal.

    Raises:
        ConfigError: the run recorded no evidence, or `time` would need something to run.
        FitError: no policy is within the budget.
    """
    if time == "measured":
        raise ConfigError(
            "A search in records measures nothing.", got="--time measured", need="h200 or ideal", where="--time"
        )
    history = read_history(run)
    if not history.samples:
        raise ConfigError(
            "The run recorded no evidence.",
            got=f"{run} without samples in precision.jsonl",
            need="a run with precision.controller = true, which takes samples",
            try_="tilewright precision search without --stats-only, which measures",
            where="--stats-only",
        )
    shapes = weight_shapes(run)
    recipe = load_recipe(run / "run.toml", environ={}).recipe
    tokens = recipe.train.micro_batch * recipe.data.seq_len
    units = units_of(history, shapes, tokens, recipe.model.num_experts, recipe.model.num_experts_per_token)
    micro_batches = -(-recipe.train.batch_size // recipe.train.micro_batch)
    times: dict[str, UnitTime] = {unit.name: estimate(unit, micro_batches, ideal=time == "ideal") for unit in units}
    numel = {unit.name: unit.in_features * unit.out_features for unit in units}
    model = RecordedModel(history, numel, sum(map(math.prod, shapes.values())), loss_slope(*recorded_losses(run)))
    policy = recipe_policy(loaded.recipe, detect_machine(loaded.recipe.run.device))
    space = SearchSpace(tuple(units), model, times, fixed_products(policy, units))
    chosen = fastest(space, budget)
    marks, points = tuple(landmarks(space)), tuple(curve(space))
    return Recorded(
        tuple(units), space, model, time or "h200", chosen, marks, points, policy, len(history.samples)
    )  # fmt: skip


def units_of(history: History, shapes: Shapes, tokens: int, num_experts: int, experts_per_token: int) -> list[Unit]:
    """A unit for each layer that was sampled; which of them share an input is not recorded."""
    units = []
    for number, name in enumerate(history.layers):
        out_features, in_features = shapes[f"{name}.weight"]
        share = experts_per_token / num_experts if num_experts and ".experts." in name else 1.0
        units.append(Unit(name, (name,), in_features, out_features, round(tokens * share), number))
    return units


def weight_shapes(run: Path) -> dict[str, tuple[int, ...]]:
    """Shapes of the model's parameters, from the index of the newest sound checkpoint.

    Raises:
        ConfigError: there is none.
    """
    store = CheckpointStore(run / "checkpoints")
    try:
        path, _ = store.newest_sound()
    finally:
        store.close()
    if path is None:
        raise ConfigError(
            "The run has no sound checkpoint, which would tell the sizes of its layers.",
            got=str(run / "checkpoints"),
            need="one written by train",
            where="--stats-only",
        )
    named = {name.partition(".")[::2]: shape for name, (_, shape) in stored_tensors(path).items()}
    return {name: tuple(shape) for (part, name), shape in named.items() if part == "model"}


def recorded_losses(run: Path) -> tuple[list[float], list[float]]:
    """Steps and losses of a run's metrics.jsonl; none where there is no such file. A torn line is left out."""
    path = run / "metrics.jsonl"
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else []:
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue
    pairs = [(row["step"], row["loss"]) for row in rows if isinstance(row.get("loss"), float)]
    return [float(step) for step, _ in pairs], [loss for _, loss in pairs]


def noise_words(model: RecordedModel, layer: str) -> str:
    """A layer's noise over signal in words: mean over samples, by product."""
    parts = []
    for gemm in GEMM_NAMES:
        values = model.noise[layer, gemm]
        parts.append(f"{gemm} {sum(values) / len(values):.2g}" if values else f"{gemm} not compared")
    return "noise over signal: " + ", ".join(parts)
