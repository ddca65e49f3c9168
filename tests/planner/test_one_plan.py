"""`plan` and `train` decide the same, and what `plan` prints beside it as faster is what `train` does with it.

Recipes, typed settings, budgets and machines are generated. The side of `train` is `plan_run` as `assemble` calls it,
with the device's budget as `plan.device_memory`, on a place that the test makes itself.
"""

import json
import random
from dataclasses import dataclass

import pytest

from tests.contracts.observe import fixed_ceilings
from tests.cover import some
from tilewright.cli.app import run
from tilewright.cli.plan_output import to_json
from tilewright.core.config.load import load_recipe
from tilewright.core.errors import ConfigError, FitError
from tilewright.core.hardware import detect_machine
from tilewright.planner.cost.layer_choices import Links
from tilewright.planner.machine.gpu_specs import LINK_SHARE, find_published
from tilewright.planner.site import Site
from tilewright.training.planning.resolve_plan import plan_run

SAME = 1 + 1e-3
"""Seconds that are equal: the solver's answers are a ten-thousandth apart (`planner.GAP`)."""
HOST = 2**30 * 96
RECIPES = ("default", "cpu_50m", "fp32", "tiny_moe", "slice_cpu", "zero_cpu", "cpu_10m", "fp8_tile", "hybrid_fp16")
PLACES = ("h100", "4090", "a100", "b200", "")
TYPED: dict[str, tuple[str, ...]] = {
    "train.micro_batch_size": ("1", "2", "8"),
    "train.global_batch_size": ("8", "32"),
    "train.activation_checkpoint": ("full", "selective", "none"),
    "memory.executor": ("layer_major", "standard"),
    "memory.loss_chunk_bytes": ("16777216",),
    "memory.plan": ("",),
    "optim.moments": ("bf16", "8bit"),
    "optim.kind": ("muon",),
    "optim.clip": ("delayed",),
    "model.num_layers": ("3", "24"),
    "model.dim": ("512",),
    "data.seq_len": ("256", "2048"),
    "checkpoint.async_save": ("true", "false"),
    "precision.eval_fp32": ("false",),
    "plan.margin": ("0", "0.2"),
}


@pytest.fixture(autouse=True)
def _fixed(monkeypatch):
    monkeypatch.setattr("tilewright.planner.machine.ceilings.measure", fixed_ceilings)


@dataclass(frozen=True)
class Case:
    """A command line: recipe, machine, settings, share of what the recipe takes as it stands."""

    recipe: str
    where: str
    typed: tuple[str, ...]
    share: float


def case(seed: int) -> Case:
    """One that is a recipe: settings that conflict are drawn again."""
    draw = random.Random(seed)
    while True:
        recipe, where, share = draw.choice(RECIPES), draw.choice(PLACES), draw.choice((0.3, 0.5, 0.7, 0.9, 1.3, 4.0))
        names = draw.sample(sorted(TYPED), draw.choice((0, 1, 2, 3)))
        typed = tuple(part for name in names for part in (f"--{name}", draw.choice(TYPED[name])))
        typed += () if where else ("--run.device", "cpu")
        try:
            load_recipe(recipe, list(typed), environ={})
        except ConfigError:
            continue
        return Case(recipe, where, typed, share)


def site_of(loaded, where, folder):
    recipe = loaded.recipe
    if not where:
        return Site(recipe.data.vocab_size, detect_machine("cpu"), fixed_ceilings(), folder, progress=None)
    row = find_published(where)
    machine = row.machine(detect_machine("cpu"), HOST)
    return Site(
        recipe.data.vocab_size, machine, row.ceilings(), folder, links=Links(LINK_SHARE * row.link, None), progress=None
    )


def trained(found, folder, *more, budget):
    """What `train` would execute, and the words of the error where it would not start."""
    loaded = load_recipe(found.recipe, [*found.typed, *more, f"--plan.device_memory={budget}"], environ={})
    try:
        return plan_run(loaded, site_of(loaded, found.where, folder))[1], ""
    except FitError as error:
        return None, str(error)


def budget_of(found, folder):
    loaded = load_recipe(found.recipe, [*found.typed, "--memory.plan", "", "--plan.enforce", "false"], environ={})
    _, priced = plan_run(loaded, site_of(loaded, found.where, folder))
    lost = 0.02 * priced.budget.device if found.where else 0  # a share of the budget, whatever the run
    return int(found.share * (priced.peak_bytes - lost))


def planned(capsys, found, *more):
    where = ["--on", found.where, "--host-memory", str(HOST)] if found.where else []
    capsys.readouterr()
    code = run(["plan", found.recipe, *found.typed, *where, *more, "--json"])
    shown = capsys.readouterr()
    return code, json.loads(shown.out) if shown.out else None, shown.err


QUICK = (0, 2, 3)
"""Seeds that take less than others."""
ON_DISK = 98
"""Fits with bytes on the disk alone, also the fastest plan."""


@pytest.mark.parametrize("seed", some(range(120), *QUICK, ON_DISK))
def test_plan_is_what_train_does_and_the_faster_way_is_one(seed, capsys, tmp_path):
    found = case(seed)
    size = budget_of(found, tmp_path)
    budget = ["--device-memory", str(size)]
    code, told, said = planned(capsys, found, *budget)
    plan, refused = trained(found, tmp_path, budget=size)
    if plan is None:
        assert code == 3, found
        assert "Run does not fit" in said, found
        if told is None:  # nothing fits, and both say the same of it
            assert [line.strip() for line in said.splitlines() if line.startswith("  need")] == [
                line.strip() for line in refused.splitlines() if line.startswith("  need")
            ], found
        else:  # the recipe as it stands, of which nothing is decided
            assert told["state"] == "does not fit"
        return
    assert code == 0, (found, said)
    mine = to_json(plan)
    for name in ("settings", "rows", "phases", "seconds", "host", "step_s", "verdict", "disk_bytes"):
        assert told[name] == mine[name], (found, name)

    out = tmp_path / "plan.toml"
    code, fastest, _ = planned(capsys, found, *budget, "--fastest", "--out", str(out))
    assert code == 0, found
    if plan.recipe.optim.moments == load_recipe(found.recipe, list(found.typed), environ={}).recipe.optim.moments:
        assert fastest["step_s"] <= SAME * plan.step_s or fastest["disk_bytes"] < told["disk_bytes"], found
    if told["faster"] is None:
        return
    assert told["faster"]["step_s"] == pytest.approx(fastest["step_s"], rel=1e-3)
    flags = [f"--{name}={value}" for name, value in told["faster"]["settings"].items()]
    faster, refused = trained(found, tmp_path, *(flags or [f"--memory.plan={out}"]), budget=size)
    assert faster is not None, (found, refused)
    assert faster.step_s <= SAME * told["faster"]["step_s"], found
    assert faster.step_s < plan.step_s, found
