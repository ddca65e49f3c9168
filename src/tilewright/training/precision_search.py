"""From a recipe to the fastest precision policy inside an error budget: weights, batches, measurements, solver.

    set up -> weights (of a run, or a few BF16 steps) -> sensitivity -> times -> search -> check on fresh batches

What is measured and how it is estimated is in `precision.search.sensitivity`, `precision.search.loss_model` and
`precision.search.gemm_time`. Nothing is kept but the result.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from tilewright.core.config.load import Loaded
from tilewright.core.config.recipe import Recipe
from tilewright.core.config.sections.precision import PrecisionSection
from tilewright.core.errors import ConfigError
from tilewright.core.hardware import Machine, fp8_choice
from tilewright.data.batches.microbatches import Batch, first_rows, to_device
from tilewright.data.common.progress import ProgressBar
from tilewright.models.base.protocols import Model
from tilewright.precision.convert import set_mode
from tilewright.precision.float8.linear import float8_layers
from tilewright.precision.policy.gemm_formats import GEMM_NAMES, Gemms
from tilewright.precision.policy.policy import Policy
from tilewright.precision.search.gemm_time import UnitTime, estimate, measure_times
from tilewright.precision.search.layer_stats import SearchUnit, group_layers
from tilewright.precision.search.loss_model import LossModel, Prediction, Product, loss_slope
from tilewright.precision.search.policy_search import PolicyCandidate, SearchSpace, baselines, curve, fastest
from tilewright.precision.search.sensitivity import Sensitivity, measure, measure_policy, measuring_policy, num_passes
from tilewright.training.assemble import Components, RunContext, build, set_up

Weights = Callable[[Model], tuple[Sequence[float], Sequence[float]]]
"""Puts weights into a model; returns steps and losses of the run that they come from."""


@dataclass(frozen=True)
class SearchSettings:
    """How to search.

    Args:
        budget: relative loss change that a policy may cost, 0.0025 for 0.25 %.
        batches: that the choice rests on, two at least; as many more check it.
        rows: of each batch; None: a micro-batch of the recipe.
        warmup: BF16 steps before measuring, where no weights are given.
        time: a key of `gemm_time.TIMES`; None: measured where this machine has a unit for 8-bit tiles, else h200.
    """

    budget: float
    batches: int = 4
    rows: int | None = None
    warmup: int = 50
    time: str | None = None


@dataclass(frozen=True)
class SearchResult:
    """Result of a search. `checked` are loss changes of whole policies, measured on batches that did not choose."""

    sensitivity: Sensitivity
    space: SearchSpace
    time: str
    chosen: PolicyCandidate
    baselines: tuple[PolicyCandidate, ...]
    curve: tuple[PolicyCandidate, ...]
    checked: Mapping[str, Prediction]
    policy: Policy
    """The recipe's own: its rules were followed."""

    @property
    def formats(self) -> dict[str, Gemms]:
        """Formats by unit that a search for the precision policy chose."""
        return self.space.formats(self.chosen.fp8)

    def to_json(self) -> dict[str, Any]:
        """Every measurement of a search for the precision policy, plainly."""
        costs, formats = self.space.model.costs, self.formats
        units = []
        for unit in self.sensitivity.units:
            switches = [switch for switch in self.sensitivity.switches if switch.unit == unit.name]
            matmuls = {
                s.gemm: {
                    "format": getattr(formats[unit.name], s.gemm).name,
                    "predicted_loss_change": costs[s.unit, s.gemm],
                    "loss_change": list(s.loss_change),
                    "gradient": [asdict(change) for change in s.gradients],
                    "step_lost": list(s.lost),
                    "own_gradient": [asdict(change) for change in s.own],
                }
                for s in switches
            }
            units.append(asdict(unit) | {"seconds": asdict(self.space.times[unit.name]), "matmuls": matmuls})
        return {
            "losses": list(self.sensitivity.losses),
            "loss_slope": self.space.model.slope,
            "time": self.time,
            "chosen": _candidate_json(self.chosen, self.checked),
            "landmarks": [_candidate_json(mark, self.checked) for mark in self.baselines],
            "curve": [_candidate_json(point, {}) for point in self.curve],
            "units": units,
        }


def search(loaded: Loaded, settings: SearchSettings, weights: Weights | None = None) -> SearchResult:
    """Search for the fastest precision policy of a recipe's model inside a budget.

    Args:
        loaded: the recipe. Its rules are followed, its mode is not.
        settings: how to search.
        weights: where they come from; None: trained for `settings.warmup` steps in BF16.

    Raises:
        FitError: no policy is within the budget.
        ConfigError: the recipe leaves nothing to search.
        NumericsError: the loss in FP32 is not finite at these weights.
    """
    # 1. Weights, and twice as many batches as asked for: half to choose by, half to check with.
    _refuse(loaded.recipe)
    setup = set_up(replace(loaded, recipe=_searchable(loaded.recipe)))
    with ProgressBar("precision search") as progress:
        parts = build(setup, fresh=weights is None)
        try:
            steps, losses = weights(parts.model) if weights else _warm_up(parts, settings.warmup, progress)
            batches = _batches(setup, parts, 2 * settings.batches, settings.rows)
        finally:
            parts.stream.close()
            parts.memory_tracker.close()
        # 2. Measure: each matmul of each layer in 8 bits alone, and what it would save.
        policy = recipe_policy(loaded.recipe, setup.machine)
        set_mode(parts.model, measuring_policy(policy))
        _check_not_empty(parts.model)
        fixed = fixed_matmuls(policy, group_layers(parts.model))
        seen, fresh = batches[: settings.batches], batches[settings.batches :]
        sensitivity = _measure(parts.model, seen, progress)
        time = settings.time or ("measured" if "fp8_tile" in fp8_choice(setup.machine).native else "h200")
        progress.phase("time of each matmul", len(sensitivity.units))
        micro_batches = -(-loaded.recipe.train.global_batch_size // loaded.recipe.train.micro_batch_size)
        times = _times(sensitivity.units, time, micro_batches, setup, progress)
        # 3. Choose, beside policies that need no search.
        model = LossModel(sensitivity, loss_slope(steps, losses))
        space = SearchSpace(sensitivity.units, model, times, fixed)
        chosen = fastest(space, settings.budget)
        marks = tuple(baselines(space))
        points = tuple(curve(space))
        # 4. Whole policies on batches that did not choose: single changes were added up, which is an estimate.
        progress.phase("check on fresh batches", 1 + len(marks))
        checked = {}
        for candidate in (chosen, *marks):
            formats = by_layer(sensitivity.units, space.formats(candidate.fp8))
            checked[candidate.name] = model.of(measure_policy(parts.model, fresh, formats))
            progress.advance(1)
    return SearchResult(sensitivity, space, time, chosen, marks, points, checked, policy)


def recipe_policy(recipe: Recipe, machine: Machine) -> Policy:
    """The recipe's own precision policy, where the search begins."""
    parameters = "" if recipe.optim.master_weights == "fp32" else "bf16"
    return Policy.from_section(recipe.precision, machine.device, parameters=parameters)


def fixed_matmuls(policy: Policy, units: Sequence[SearchUnit]) -> dict[Product, str]:
    """Formats that the rules of the precision policy set, by unit and matmul, which a search keeps.

    Raises:
        ConfigError: a rule asks for an 8-bit format that the search does not know.
    """
    fixed: dict[Product, str] = {}
    for unit in units:
        for rule in policy.rules:
            if not any(rule.matches(name, ("linear",)) for name in unit.layers):
                continue
            named = dict.fromkeys(GEMM_NAMES, rule.compute) if rule.compute else {}
            for gemm, name in (named | rule.gemms).items():
                if name not in ("fp8_tile", "bf16"):
                    raise ConfigError(
                        "Precision search supports fp8_tile and bf16 only",
                        got=f"{rule}, which {unit.name} follows",
                        need="fp8_tile or bf16 in rules on layers with 8-bit matmuls",
                        try_="take the rule out for the search, and put it into the policy file",
                        where="precision.rules",
                    )
                fixed[unit.name, gemm] = name
    return fixed


def by_layer(units: Sequence[SearchUnit], formats: Mapping[str, Gemms]) -> dict[str, Gemms]:
    """Formats of a precision search's units as formats of their layers."""
    return {name: formats[unit.name] for unit in units for name in unit.layers}


def _searchable(recipe: Recipe) -> Recipe:
    """Change a recipe for the warm-up of the precision search: plain BF16 and eager, since layers are switched one by
    one afterwards."""
    precision = PrecisionSection(mode="bf16_mixed")
    train = recipe.train.model_copy(update={"compile": "off"})
    return recipe.model_copy(update={"precision": precision, "train": train})


def _refuse(recipe: Recipe) -> None:
    if not recipe.precision.enabled:
        raise ConfigError(
            "Precision search needs precision.enabled",
            got="precision.enabled = false: everything in FP32",
            need="precision.enabled = true",
            try_="--precision.enabled true",
            where="precision.enabled",
        )


def _check_not_empty(model: Model) -> None:
    if not float8_layers(model):
        raise ConfigError(
            "No linear layer of this model can compute in FP8",
            got="rules or fp32_ops that keep all of them out, or a model without such layers",
            need="at least one linear layer left free",
            try_="fewer precision.rules",
            where="precision.rules",
        )


def _warm_up(parts: Components, steps: int, progress: ProgressBar) -> tuple[list[float], list[float]]:
    progress.phase("BF16 steps before measuring", steps)
    losses = []
    for step in range(steps):
        losses.append(parts.executor.step(parts.stream.next_step(), parts.schedule.lr_at(step)).loss)
        progress.advance(1)
    return [float(step + 1) for step in range(steps)], losses


def _batches(setup: RunContext, parts: Components, num: int, rows: int | None) -> list[Batch]:
    """Put the first micro-batches of `num` further steps on the device, for the precision search."""
    found = (parts.stream.next_step()[0] for _ in range(num))
    return [to_device(first_rows(batch, rows), setup.device) for batch in found]


def _measure(model: Model, batches: Sequence[Batch], progress: ProgressBar) -> Sensitivity:
    total, done = num_passes(model, len(batches)), 0
    progress.phase(f"{total} forward and backward passes", total)

    def advance(now: int) -> None:
        nonlocal done
        progress.advance(now - done)
        done = now

    return measure(model, batches, advance=advance)


def _times(units: Sequence[SearchUnit], time: str, micro_batches: int, setup: RunContext, progress: ProgressBar):
    found: dict[str, UnitTime] = {}
    known: dict[tuple[int, ...], UnitTime] = {}
    for unit in units:
        shape = (len(unit.layers), unit.tokens, unit.in_features, unit.out_features)
        if shape not in known:
            known[shape] = (
                measure_times(unit, micro_batches, setup.kernels, torch.device(setup.device))
                if time == "measured"
                else estimate(unit, micro_batches, ideal=time == "ideal")
            )
        found[unit.name] = known[shape]
        progress.advance(1)
    return found


def _candidate_json(candidate: PolicyCandidate, checked: Mapping[str, Prediction]) -> dict[str, Any]:
    return {
        "name": candidate.name,
        "fp8": sorted(".".join(matmul) for matmul in candidate.fp8),
        "seconds": candidate.seconds,
        "predicted": asdict(candidate.predicted),
        "measured": asdict(checked[candidate.name]) if candidate.name in checked else None,
    }
