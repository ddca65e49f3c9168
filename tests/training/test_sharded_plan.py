"""What the ranks of a sharded run hold, as measured, and what their plan says; runs that are planned, and refused."""

import json
from pathlib import Path

import pytest

from tests.contracts.observe import fixed_ceilings
from tests.ranks import on_ranks
from tests.training.tiny import rows, tiny
from tilewright.core.errors import FitError
from tilewright.core.hardware import detect_machine
from tilewright.parallel.launch import launched
from tilewright.parallel.mesh import MeshSizes
from tilewright.planner.machine import ceilings
from tilewright.planner.model.constraints import Constraints
from tilewright.planner.simulate.mesh.cluster import Cluster
from tilewright.planner.simulate.mesh.mesh_forecast import _setting as mesh_setting
from tilewright.planner.simulate.mesh.mesh_model import MeshModel
from tilewright.planner.simulate.mesh.rank_memory import rank_memory
from tilewright.planner.simulate.mesh.setting_step import MeshRates
from tilewright.planner.simulate.pass_costs import Link
from tilewright.planner.site import Site
from tilewright.training.assemble import build, set_up
from tilewright.training.session import train

pytestmark = pytest.mark.dist
WITHIN = 0.05
"""Of the plan: the claim of the issue. Most of it is exact."""
OWNERS = ("parameters", "gradients", "optimizer")
CASES = {
    "adamw": {"train__micro_batch_size": 4},
    "8bit": {"optim__moments": "8bit", "train__micro_batch_size": 4},
    "split24": {"optim__moments": "8bit", "optim__master_weights": "split24", "train__micro_batch_size": 4},
    "muon": {"optim__kind": "muon", "optim__moments": "8bit", "train__micro_batch_size": 4},
    "zero2": {"parallel__reshard_after_forward": "false", "train__micro_batch_size": 4},
    "accumulated": {"train__micro_batch_size": 1, "train__global_batch_size": 8},
    "reduced each": {"train__micro_batch_size": 1, "train__global_batch_size": 8, "parallel__reduce_each": "true"},
    "gathered in bf16": {"precision__mode": "bf16_mixed", "ops__linear": "native"},
}


def ran(data, runs, cases):
    """For each case: its name, the run before it took memory, and what this rank's ledger has measured by phase."""
    ceilings.measure = fixed_ceilings  # this process is the test's own
    for name, changes in cases.items():
        loaded = tiny(Path(data), Path(runs), **changes)
        parallel = loaded.recipe.parallel
        with launched(MeshSizes.of(parallel), device="cpu", timeout_s=60) as world:
            setup = set_up(loaded, world=world)
            parts = build(setup, fresh=True)
            for step in range(2):
                parts.modes.enter(step)
                parts.executor.step(parts.stream.next_step(), parts.schedule.lr_at(step))
            memory = parts.memory_tracker.snapshot(parts.model, parts.optimizer)
            parts.close()
            yield name, setup, memory["phase_owners"]


def held(rank, data, runs, cases):
    """For each case: planned phases, what ranks hold by the plan, and what this rank's ledger has measured."""
    return {
        name: (dict(setup.plan.phases), [vars(row) for row in setup.plan.ranks], measured)
        for name, setup, measured in ran(data, runs, cases)
    }


def in_stages(rank, data, runs, cases):
    """For each case: what the mesh plans of this rank in the update, and what its ledger has measured."""
    return {name: (_planned_of_stage(setup), measured["update"]) for name, setup, measured in ran(data, runs, cases)}


def _planned_of_stage(setup):
    recipe, site, world = setup.recipe, setup.site, setup.world
    model = MeshModel(recipe, site.vocab_size, site.machine, site.rates, site.shapes)
    setting = mesh_setting(recipe, world.sizes)
    rates = MeshRates(model, Cluster(1, world.size, Link(1e9), Link(1e9)))
    memory, _ = rank_memory(model, setting, rates.held(setting.pipeline)[1][world.row.rank], 0.0)
    return dict(memory.phases["update"])


STAGES = {"parallel__pp": 2, "parallel__dp_shard": 2, "parallel__ep": 2, "model__num_layers": 4}
STAGES |= {"train__global_batch_size": 8, "train__micro_batch_size": 2}
EXPERTS = {
    "model__num_experts": 4, "model__num_experts_per_token": 2, "model__expert_dim": 48, "model__num_dense_layers": 1,
    "model__dim": 64, "model__num_heads": 4,
}  # fmt: skip
SPREAD = {
    "1f1b": {"model__tie_embeddings": "false"},
    "zbv": {"parallel__schedule": "zbv", "optim__moments": "8bit"},
    "split": {"parallel__split": "[3,1]", "optim__moments": "bf16", "model__tie_embeddings": "true"},
}


@pytest.mark.slow
@pytest.mark.support("plan", "stages", "experts_spread")
def test_bytes_of_stages_with_spread_experts_are_those_of_the_mesh(data, tmp_path):
    cases = {name: STAGES | EXPERTS | UNCOMPILED | more for name, more in SPREAD.items()}
    for rank, found in enumerate(on_ranks(4, in_stages, str(data), str(tmp_path), cases)):
        for name, (planned, measured) in found.items():
            for owner in OWNERS:
                assert measured[owner] == pytest.approx(planned[owner], rel=WITHIN), f"{name}: {owner}, {rank}"


UNCOMPILED = {f"ops__{name}": "ref" for name in ("adam", "low_bit_adam", "rms_norm", "quantize")}


@pytest.mark.parametrize(
    ("replicate", "shards", "names"),
    [
        (1, 2, ("split24", "muon", "zero2", "gathered in bf16")),
        # AdamW's states are those of "zero2"
        pytest.param(1, 2, ("adamw", "8bit", "accumulated", "reduced each"), marks=pytest.mark.slow),
        pytest.param(1, 4, ("adamw", "8bit", "muon"), marks=pytest.mark.slow),
        # gradients that are reduced after each pass are counted below
        pytest.param(2, 2, ("8bit", "accumulated", "reduced each"), marks=pytest.mark.slow),
    ],
)
def test_bytes_of_each_rank_are_those_of_the_plan(replicate, shards, names, data, tmp_path):
    mesh = {"parallel__dp_replicate": replicate, "parallel__dp_shard": shards}
    cases = {name: CASES[name] | mesh | UNCOMPILED for name in names}
    results = on_ranks(replicate * shards, held, str(data), str(tmp_path), cases)
    for name in names:
        for rank, found in enumerate(results):
            phases, shares, measured = found[name]
            (share,) = [row for row in shares if rank in row["ranks"]]
            for owner in OWNERS:
                assert measured["update"][owner] == pytest.approx(share[owner], rel=WITHIN), f"{name}: {owner}, {rank}"
            for owner in ("parameters", "gradients"):  # in the passes: of the largest rank, and what is whole then
                if owner == "gradients" and name not in ("accumulated", "reduced each"):
                    continue  # they come and go inside of a phase
                planned = phases["backward"][owner]
                assert measured["backward"][owner] == pytest.approx(planned, rel=WITHIN), f"{name}: {owner}, {rank}"
    if "accumulated" not in names:
        return
    whole = results[0]["accumulated"][0]["backward"]["gradients"]
    assert whole == pytest.approx(shards * results[0]["reduced each"][0]["backward"]["gradients"], rel=WITHIN)


def counted(rank, data, runs, changes):
    """Planned bytes of gradients in backward, and what the ledger counts after each backward pass of a step."""
    ceilings.measure = fixed_ceilings  # this process is the test's own
    loaded = tiny(Path(data), Path(runs), **changes)
    found = []
    with launched(MeshSizes.of(loaded.recipe.parallel), device="cpu", timeout_s=60) as world:
        setup = set_up(loaded, world=world)
        parts = build(setup, fresh=True)
        tracker = parts.memory_tracker

        def begins(phase):
            moment = tracker._moment()
            found.append((phase, moment.gradients + moment.whole["gradients"]))

        for step in range(2):
            tracker.on_phase = begins if step else None
            parts.modes.enter(step)
            parts.executor.step(parts.stream.next_step(), parts.schedule.lr_at(step))
        parts.close()
    return dict(setup.plan.phases)["backward"]["gradients"], found


def test_gradients_are_counted_after_each_pass(data, tmp_path):
    changes = CASES["reduced each"] | {"parallel__dp_replicate": 2, "parallel__dp_shard": 2} | UNCOMPILED
    for planned, found in on_ranks(4, counted, str(data), str(tmp_path), changes):
        (first, before), *rest = [row for row in found if row[0] in ("forward", "update")]
        assert (first, before) == ("forward", 0)
        assert [phase for phase, _ in rest] == ["forward", "update", "update"]
        for phase, size in rest:
            assert size == pytest.approx(planned, rel=WITHIN), phase


# ---- runs ----

BIG = {
    "model__num_layers": 4, "data__seq_len": 256, "train__global_batch_size": 8, "train__micro_batch_size": 4,
    "train__steps": 4, "train__eval_interval": 0, "train__sample_tokens": 0, "log__report": "false",
    "precision__mode": "fp32", "checkpoint__async_save": "false", "parallel__dp_shard": "-1",
}  # fmt: skip


def run(rank, data, runs, changes):
    """Step, loss and gathered settings of a run; the class and text of the user's error, if there is one."""
    ceilings.measure = fixed_ceilings  # this process is the test's own
    try:
        result = train(tiny(Path(data), Path(runs), **changes))
    except FitError as error:
        return str(error)
    return result.step, result.loss


def budgets(data, runs, ranks):
    """(least with other layers alone, whole) bytes of a rank."""
    loaded = tiny(data, runs, **BIG)
    here = detect_machine("cpu").shared_by(ranks)
    site = Site(300, here, fixed_ceilings(), runs, mesh=MeshSizes(dp_shard=ranks))
    fixed = Constraints(
        executor="standard",
        micro_batch_size=loaded.recipe.train.micro_batch_size,
        loss_chunk_bytes=loaded.recipe.memory.loss_chunk_bytes,
    )
    planner, budget = site.planner(loaded.recipe, fixed), site.budget(loaded.recipe)
    return planner.smallest(budget).peak_bytes, planner.as_it_stands(budget).peak_bytes


@pytest.mark.support("plan", "shards")
def test_a_sharded_run_is_planned_and_its_losses_stay(data, tmp_path):
    least, whole = budgets(data, tmp_path, 2)
    tight = BIG | {"plan__margin": 0.0, "plan__device_memory": int((least + whole) / 2)}
    wide = on_ranks(2, run, str(data), str(tmp_path), BIG | {"run__name": "wide"})
    found = on_ranks(2, run, str(data), str(tmp_path), tight | {"run__name": "tight"})
    assert found[0] == found[1] == wide[0]
    assert not (tmp_path / "wide" / "plan.toml").exists()
    assert (tmp_path / "tight" / "plan.toml").exists()
    (event,) = [row for row in rows(tmp_path / "tight" / "events.jsonl") if row["kind"] == "plan"]
    assert "of each of 2 ranks" in event["message"]
    assert event["peak_bytes"] <= event["budget_bytes"]
    assert "dp_shard = -1" in (tmp_path / "tight" / "run.toml").read_text()  # another number of ranks may continue
    planned = json.loads((tmp_path / "tight" / "plan.json").read_text())
    assert planned["peak_bytes"] == pytest.approx(event["peak_bytes"], rel=0.01)
    ranks = json.loads((tmp_path / "tight" / "ranks.json").read_text())["ranks"]
    assert all(row["planned_bytes"] for row in ranks)


@pytest.mark.slow
def test_a_planned_sharded_run_continues_on_one_process(data, tmp_path):
    least, whole = budgets(data, tmp_path, 2)
    settings = BIG | {"plan__margin": 0.0, "plan__device_memory": int((least + whole) / 2), "checkpoint__interval": 2}
    on_ranks(2, run, str(data), str(tmp_path), settings | {"train__steps": 2})
    (found,) = on_ranks(1, run, str(data), str(tmp_path), settings | {"plan__device_memory": 0})
    assert found[0] == 4


def test_a_rank_that_cannot_fit_is_refused_before_anything_is_built(data, tmp_path):
    settings = BIG | {"plan__device_memory": "64MiB", "memory__plan": ""}
    first, second = on_ranks(2, run, str(data), str(tmp_path), settings)
    assert first == second
    assert "Run does not fit" in first
    assert "of 64.00 MiB on the device of each of 2 ranks" in first
    settings["memory__plan"] = "auto"
    first, second = on_ranks(2, run, str(data), str(tmp_path), settings)
    assert first == second
    assert "64.00 MiB on the device of each of 2 ranks" in first
    assert "for the smallest plan: standard" in first
