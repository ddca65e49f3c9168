"""Output of `tilewright precision search`, and the weights of a run that it may begin with."""

import json
import os
import statistics
from collections.abc import Sequence
from pathlib import Path

from tilewright.cli.common import echo, show_table
from tilewright.cli.load_run import load_newest
from tilewright.core.config import setting_names
from tilewright.core.config.load import CLI, Loaded
from tilewright.core.config.toml import RECIPES
from tilewright.core.errors import ConfigError
from tilewright.models.base.protocols import Model
from tilewright.precision.policy.gemm_names import GEMM_NAMES
from tilewright.precision.search.gemm_time import TIMES
from tilewright.precision.search.layer_stats import SearchUnit
from tilewright.precision.search.loss_model import percent, standard_error
from tilewright.precision.search.policy_file import PolicyFile
from tilewright.precision.search.policy_search import PolicyCandidate, speed_up
from tilewright.precision.search.sensitivity import FormatSwitch
from tilewright.training.precision_search import SearchResult, Weights

SHOWN = 12
"""Layers in the printed table; all of them are in the policy file."""
_DECIDED = ("mode", "rules", "bf16_grad_layers", "fp8_min_gain", "start_mode")
"""Settings of the precision section that the policy replaces."""


def weights_of(run: str) -> Weights:
    """The newest valid checkpoint of a run, from which the precision search starts, and the losses that led there.

    Raises:
        ConfigError: there is no such run.
    """
    folder = next((path for path in (Path(run), Path("runs") / run) if (path / "run.toml").is_file()), None)
    if folder is None:
        raise ConfigError("No such run", got=run, need="a folder with a run.toml", where="--run")

    def load(model: Model) -> tuple[Sequence[float], Sequence[float]]:
        load_newest(folder, model)
        return recorded_losses(folder)

    return load


def recorded_losses(run: Path) -> tuple[list[float], list[float]]:
    """Read steps and losses from a run's metrics.jsonl for the precision search; none without that file. A corrupt line
    is left out."""
    path = run / "metrics.jsonl"
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else []:
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue
    pairs = [(row["step"], row["loss"]) for row in rows if isinstance(row.get("loss"), float)]
    return [float(step) for step, _ in pairs], [loss for _, loss in pairs]


def policy_text(found: SearchResult, loaded: Loaded, out: Path, intro: Sequence[str]) -> str:
    """Write the policy that the precision search found as TOML text, with `intro` at its top."""
    settings: dict[str, dict[str, object]] = {}
    values = loaded.recipe.model_dump(mode="json")
    for path, source in loaded.sources.items():
        section, _, name = path.rpartition(".")
        if source == CLI and path != "run.name" and not (section == "precision" and name in _DECIDED):
            settings.setdefault(section, {})[name] = setting_names.value_at(values, path)
    precision = settings.pop("precision", {})
    clear = loaded.recipe.precision.start_mode is not None
    kept = found.policy.rules
    remarks = {unit.name: _remark(found, unit) for unit in found.space.units}
    formats = found.formats
    return str(PolicyFile(_extends(loaded, out), intro, settings, precision, kept, formats, remarks, clear))


def intro_of(found: SearchResult, name: str, budget: str, weights: str) -> list[str]:
    """Introduce the policy that the precision search found: its space, its result, and the measure."""
    return [
        f"Precision policy for {name!r}, within {budget} of the loss; by `tilewright precision search`.",
        f"Predicted loss change {found.chosen.predicted}; measured on other batches {found.checked['chosen']}.",
        f"Linear matmuls {_times_as_fast(found, found.chosen)} as fast as all in BF16: {TIMES[found.time]}.",
        f"Measured at the weights of {weights}. Edit freely: later rules win.",
    ]


def _extends(loaded: Loaded, out: Path) -> str:
    """The path of the searched recipe relative to `out`, which the found policy's `extends` names."""
    if loaded.path is None or loaded.path.resolve().parent == RECIPES:
        return loaded.name
    return os.path.relpath(loaded.path.resolve(), out.resolve().parent)


def show(found: SearchResult, budget: str) -> None:
    """Print the result of the precision search: the layers that hurt most, and what the policy gains over the usual
    ones."""
    units = sorted(found.sensitivity.units, key=lambda unit: (_cost(found, unit), _blur(found, unit)), reverse=True)
    rows = []
    for unit in units[:SHOWN]:
        switches = _switches(found, unit)
        blur = " ".join(_parts_per_million(switches[gemm]) for gemm in GEMM_NAMES)
        lost = " ".join(percent(unit.underflow[name]) for name in ("x", "weight", "dy") if name in unit.underflow)
        formats = str(found.formats[unit.name])
        rows.append((unit.name, _loss_change(switches["fprop"]), blur, lost, percent(_cost(found, unit)), formats))
    columns = ("layer", "loss change (fprop)", "step lost, ppm (f d w)", "underflow (x w dy)", "predicted", "chosen")
    show_table(columns, rows)
    if len(units) > SHOWN:
        echo(f"... and {len(units) - SHOWN} layers that hurt less; all of them are in the policy file")
    echo(f"\nspeed of the linear matmuls is {TIMES[found.time]}")
    lines = []
    for candidate in (found.chosen, *found.baselines):
        share = f"{len(candidate.fp8)} of {3 * len(units)}"
        measured = str(found.checked[candidate.name])
        lines.append((candidate.name, share, _times_as_fast(found, candidate), str(candidate.predicted), measured))
    show_table(("policy", "in FP8", "speed", "predicted loss change", "measured, other batches"), lines)
    if found.space.model.slope == 0:
        echo("The loss did not fall before measuring, so blurred gradients count for nothing: raise --warmup.")
    if not found.chosen.fp8:
        echo(f"Nothing is faster in FP8 within {budget}: the policy is all BF16. See --time.")


def _times_as_fast(found: SearchResult, candidate: PolicyCandidate) -> str:
    return f"{speed_up(found.baselines, candidate):.3g}x"


def _switches(found: SearchResult, unit: SearchUnit) -> dict[str, FormatSwitch]:
    return {switch.gemm: switch for switch in found.sensitivity.switches if switch.unit == unit.name}


def _cost(found: SearchResult, unit: SearchUnit) -> float:
    return sum(found.space.model.costs[unit.name, gemm] for gemm in GEMM_NAMES)


def _blur(found: SearchResult, unit: SearchUnit) -> float:
    """The share of a step that the matmuls of one unit of the precision search lose together."""
    return sum(statistics.fmean(switch.lost) for switch in _switches(found, unit).values())


def _loss_change(switch: FormatSwitch) -> str:
    return f"{percent(statistics.fmean(switch.loss_change))} ± {percent(standard_error(switch.loss_change))}"


def _parts_per_million(switch: FormatSwitch) -> str:
    millionths = 1e6 * statistics.fmean(switch.lost)
    return f"{millionths:,.0f}" if millionths >= 100 else f"{millionths:.2g}"


def _remark(found: SearchResult, unit: SearchUnit) -> str:
    """One line on how a unit of the precision search was measured."""
    switches = _switches(found, unit)
    blur = ", ".join(f"{gemm} {_parts_per_million(switches[gemm])}" for gemm in GEMM_NAMES)
    lost = ", ".join(f"{name} {percent(share)}" for name, share in unit.underflow.items())
    return f"loss {_loss_change(switches['fprop'])}; of a step lost, ppm: {blur}; underflow: {lost or 'not seen'}"
