"""`memory.plan`: real runs that are planned, and continue; what a plan may not change; plans for something else."""

import json

import pytest

from tests.contracts.observe import fixed_ceilings
from tests.planner.rates import make_plan
from tests.training.test_regroup_run import failing_at
from tests.training.tiny import assert_same_run, rows, settings
from tilewright.core.config.change_recipe import changed
from tilewright.core.config.load import load_recipe
from tilewright.core.errors import FitError
from tilewright.core.hardware import detect_machine
from tilewright.core.memory_plan import LayerMemory, MemoryPlan
from tilewright.planner.cost.layer_choices import GlobalConfig
from tilewright.planner.decide import stages
from tilewright.planner.model.constraints import Constraints
from tilewright.planner.plan_file import read_plan, to_toml
from tilewright.planner.site import Site
from tilewright.training.planning.resolve_plan import plan_run, replanner_of
from tilewright.training.run import Run
from tilewright.training.runlog.signals import StopRequest
from tilewright.training.session import train

# Big enough that activations show beside the process, small enough that a step takes a tenth of a second.
BIG = {
    "model__num_layers": 4, "data__seq_len": 256, "train__global_batch_size": 4, "train__micro_batch_size": 4,
    "train__steps": 6, "train__eval_interval": 0, "train__sample_tokens": 0, "log__report": "false",
    "precision__mode": "fp32", "checkpoint__async_save": "false",
}  # fmt: skip
OPEN = ("train.micro_batch_size",)


@pytest.fixture(autouse=True)
def _rates(monkeypatch):
    monkeypatch.setattr("tilewright.planner.machine.ceilings.measure", fixed_ceilings)


def load(data, runs, *left_open, **changes):
    """The recipe; `left_open` are not written down, so that they have their defaults."""
    values = settings(data, runs, **(BIG | changes))
    return load_recipe(None, {name: value for name, value in values.items() if name not in left_open}, environ={})


def site(loaded, folder):
    return Site(300, detect_machine("cpu"), fixed_ceilings(), folder)


FOUND: dict[str, tuple[int, int]] = {}
"""Budgets of the recipes that several tests have, whatever their run is called."""


def budgets(loaded, folder):
    """(least with other layers alone, whole) bytes of the recipe as it stands."""
    same = loaded.recipe.model_dump_json(exclude={"run"})
    if same not in FOUND:
        FOUND[same] = _budgets(loaded, folder)
    return FOUND[same]


def _budgets(loaded, folder):
    where = site(loaded, folder)
    fixed = Constraints(
        executor="standard",
        micro_batch_size=loaded.recipe.train.micro_batch_size,
        loss_chunk_bytes=loaded.recipe.memory.loss_chunk_bytes,
    )
    planner = where.planner(loaded.recipe, fixed)
    whole = make_plan(loaded.recipe, 300, where.machine, where.rates).peak_bytes
    return planner.smallest(where.budget(loaded.recipe)).peak_bytes, whole


def tight(data, runs, *left_open, share=0.5, **changes):
    """A recipe that fits only where some layers keep less."""
    loaded = load(data, runs, *left_open, **changes)
    least, whole = budgets(loaded, runs)
    assert least < 0.98 * whole
    size = int(least + share * (whole - least))
    return load(data, runs, *left_open, **changes, plan__margin=0.0, plan__device_memory=size)


def events(run, kind="plan"):
    return [row for row in rows(run / "events.jsonl") if row["kind"] == kind]


def losses_of(run):
    return [row["loss"] for row in rows(run / "metrics.jsonl") if "loss" in row]


def test_a_run_that_fits_is_as_its_recipe_says(data, tmp_path):
    for name, plan in (("auto", "auto"), ("off", "")):
        train(load(data, tmp_path, run__name=name, memory__plan=plan))
    assert_same_run(tmp_path / "auto", tmp_path / "off")
    assert not (tmp_path / "auto" / "plan.toml").exists()
    assert events(tmp_path / "auto") == []


@pytest.mark.support("plan", "one")
def test_layers_keep_less_where_memory_is_short_and_no_number_changes(data, tmp_path):
    train(tight(data, tmp_path, run__name="tight"))
    train(load(data, tmp_path, run__name="wide"))
    assert_same_run(tmp_path / "tight", tmp_path / "wide")
    plan = read_plan(tmp_path / "tight" / "plan.toml")
    assert {choice.activations for choice in plan.layers} != {"keep"}
    (event,) = events(tmp_path / "tight")
    assert event["peak_bytes"] <= event["budget_bytes"]
    assert "The run fits" in event["message"]
    planned = json.loads((tmp_path / "tight" / "plan.json").read_text())
    assert planned["fits"]
    assert planned["peak_bytes"] == pytest.approx(event["peak_bytes"], rel=0.01)


def test_a_planned_run_goes_on_under_its_plan(data, tmp_path, monkeypatch):
    train(tight(data, tmp_path, run__name="whole"))
    train(tight(data, tmp_path, run__name="halves", train__steps=3))
    assert (tmp_path / "halves" / "plan.toml").exists()
    before = (tmp_path / "halves" / "plan.toml").read_text()
    train(tight(data, tmp_path, run__name="halves"))
    assert (tmp_path / "halves" / "plan.toml").read_text() == before
    told = [row["message"] for row in events(tmp_path / "halves", "recipe_change")]
    assert all("train.steps" in text for text in told)
    assert len(losses_of(tmp_path / "halves")) == 6


def stop_after_a_step(patched):
    enter, between, stop = StopRequest.__enter__, Run._between_steps, []

    def entered(self):
        stop.append(self)
        return enter(self)

    def stops(self):
        stop[0].request("a test")
        between(self)

    patched.setattr(StopRequest, "__enter__", entered)
    patched.setattr(Run, "_between_steps", stops)


@pytest.mark.slow
def test_a_stopped_run_goes_on_bitwise(data, tmp_path, monkeypatch):
    train(tight(data, tmp_path, *OPEN, train__global_batch_size=16, run__name="whole", share=-0.2))
    loaded = tight(data, tmp_path, *OPEN, train__global_batch_size=16, run__name="parts", share=-0.2)
    with monkeypatch.context() as patched:
        stop_after_a_step(patched)
        assert train(loaded).step == 1
    train(loaded)
    assert_same_run(tmp_path / "parts", tmp_path / "whole")
    assert read_plan(tmp_path / "parts" / "plan.toml").settings["train.micro_batch_size"] < 8
    assert events(tmp_path / "parts", "recipe_change") == []


def test_a_smaller_micro_batch_is_told_and_written_down(data, tmp_path):
    result = train(tight(data, tmp_path, *OPEN, train__global_batch_size=16, share=-0.2, run__name="small"))
    assert result.step == 6
    told = [row for row in events(tmp_path / "small") if row.get("setting") == "train.micro_batch_size"]
    assert told
    assert told[0]["before"] == 8
    assert told[0]["after"] < 8
    assert told[0]["least_bytes"] > read_plan(tmp_path / "small" / "plan.toml").machine["device_bytes"]
    assert f"train.micro_batch_size 8 -> {told[0]['after']}" in told[0]["message"]
    text = (tmp_path / "small" / "run.toml").read_text()
    assert f"micro_batch_size = {told[0]['after']} # plan auto" in text
    again = load_recipe(tmp_path / "small" / "run.toml", environ={})
    assert again.recipe.train.micro_batch_size == told[0]["after"]


def test_what_was_written_down_stays(data, tmp_path):
    with pytest.raises(FitError, match="does not fit") as caught:
        train(tight(data, tmp_path, share=-0.5, memory__executor="standard", memory__loss_chunk_bytes="64MiB",
                    optim__moments="fp32", optim__master_weights="fp32"))  # fmt: skip
    assert "for the smallest plan" in caught.value.problems[0].need
    assert "micro_batch_size 4" in caught.value.problems[0].need
    assert caught.value.problems[0].try_


def test_a_run_that_need_not_fit_runs_all_the_same(data, tmp_path):
    train(load(data, tmp_path, plan__device_memory="1MB", plan__enforce="false", train__steps=1, run__name="all"))
    assert "nothing fits" in events(tmp_path / "all")[0]["message"]


@pytest.mark.slow
def test_adapters_keep_less_where_memory_is_short_and_no_number_changes(data, tmp_path):
    lora = {"lora__rank": 2, "train__steps": 2}
    train(tight(data, tmp_path, run__name="tight", **lora))
    train(load(data, tmp_path, run__name="wide", **lora))
    assert_same_run(tmp_path / "tight", tmp_path / "wide")
    assert {choice.activations for choice in read_plan(tmp_path / "tight" / "plan.toml").layers} != {"keep"}


@pytest.mark.slow
def test_a_run_whose_layers_are_cut_differently_is_planned_again(data, tmp_path, monkeypatch):
    """Memory runs out in mid-run: tiles stay where they were, something else moves, and no number does."""
    sliced = {"memory__executor": "layer_major", "optim__clip_norm": 0}
    loaded = load(data, tmp_path, **sliced)
    where, recipe = site(loaded, tmp_path), loaded.recipe
    kinds = [LayerMemory(activations=kind, mlp_chunks=n) for kind, n in (("recompute", 2), ("keep", 1)) * 2]
    planner = where.planner(recipe)
    mixed = planner.priced(GlobalConfig.of(recipe), MemoryPlan(layers=tuple(kinds)), where.budget(recipe))
    (tmp_path / "mixed.toml").write_text(to_toml(mixed))
    for name in ("plain", "failed"):
        with monkeypatch.context() as patch:
            # in the second step: after it the plan is held against what was measured, and may change by itself
            met = failing_at(patch, 2, [300] if name == "failed" else [])
            train(load(data, tmp_path, **sliced, run__name=name, memory__plan=str(tmp_path / "mixed.toml")))
        assert len(met) == (name == "failed")
    assert_same_run(tmp_path / "failed", tmp_path / "plain", matmuls=False)
    told = [row for row in events(tmp_path / "failed", "replan") if row["trigger"] == "out_of_memory"]
    assert [row["step"] for row in told] == [2]
    assert "2 keep" in told[0]["before"]
    assert told[0]["after"] != told[0]["before"]


# ---- the order of what is given up ----


def fixed_at_each_stage(explicit=(), *, fused=False, same_numbers=False, **recipe):
    loaded = load_recipe(None, {"checkpoint.interval_minutes": "0"} | recipe, environ={})
    return list(stages(loaded.recipe, frozenset(explicit), fused=fused, same_numbers=same_numbers))


def test_stages_give_up_ever_more():
    found = fixed_at_each_stage()
    assert found[0].fixed.activations is None
    assert found[0].fixed.micro_batch_size == 8
    order = [
        (
            stage.fixed.executor,
            stage.fixed.micro_batch_size,
            stage.fixed.loss_chunk_bytes is None,
            stage.fixed.mlp_chunks,
            stage.disk,
        )
        for stage in found
        if not stage.beside
    ]
    assert order == [
        ("standard", 8, False, 1, False),
        ("standard", None, False, 1, False),
        ("standard", None, True, 1, False),
        ("layer_major", None, True, 1, False),
        ("layer_major", None, True, None, False),
        ("layer_major", None, True, None, True),
        (None, None, True, None, False),
        (None, None, True, None, True),
    ]
    assert [bool(stage.formats) for stage in found] == [False] * 8 + [True] * 2
    assert all(stage.fixed.most_rows == 8 for stage in found[2:])


def test_what_stands_beside_the_steps_is_given_up_before_their_numbers():
    foreground, narrow = {"checkpoint.async_save": False}, {"precision.eval_fp32": False}
    saves = {"checkpoint.interval": "10", "train.steps": "100"}
    found = fixed_at_each_stage(**saves)
    assert [dict(stage.beside) for stage in found[:5]] == [{}, foreground, narrow, foreground | narrow, {}]
    assert {(stage.fixed.executor, stage.fixed.micro_batch_size) for stage in found[:4]} == {("standard", 8)}
    sliced = next(i for i, stage in enumerate(found) if stage.fixed.executor == "layer_major")
    assert [dict(stage.beside) for stage in found[sliced - 3 : sliced]] == [foreground, narrow, foreground | narrow]
    assert not any(stage.beside for stage in found[sliced:])
    going_on = fixed_at_each_stage(same_numbers=True, **saves)  # its evaluations stay comparable
    assert [dict(stage.beside) for stage in going_on] == [{}, foreground]
    for explicit in (("checkpoint.async_save", "precision.eval_fp32"), ("precision.eval_fp32",)):
        found = fixed_at_each_stage(explicit, **({} if len(explicit) == 1 else saves))  # no save beside steps either
        assert not any(stage.beside for stage in found)


def test_stages_of_a_run_that_goes_on_change_no_number():
    (only,) = fixed_at_each_stage(same_numbers=True)
    assert only.fixed.micro_batch_size == 8
    (only,) = fixed_at_each_stage(same_numbers=True, fused=True)
    assert only.fixed.activations == {"keep", "recompute"}
    (only,) = fixed_at_each_stage(same_numbers=True, fused=True, **{"precision.mode": "fp8_tile"})
    assert only.fixed.activations == {"keep"}


def test_what_is_explicit_is_in_no_stage():
    explicit = ("memory.executor", "train.micro_batch_size", "memory.loss_chunk_bytes")
    explicit += ("optim.moments", "optim.master_weights", "precision.eval_fp32")
    assert len(fixed_at_each_stage(explicit)) == 1
    explicit = ("train.activation_checkpoint",)
    for stage in fixed_at_each_stage(explicit, **{"train.activation_checkpoint": "full"}):
        assert stage.fixed.activations == {"recompute"}
        assert stage.fixed.executor == "standard"
    recipe = {"memory.executor": "layer_major", "memory.offload_optimizer": "disk"}
    for stage in fixed_at_each_stage(recipe, **recipe):
        assert stage.fixed.states == "disk"
        assert stage.fixed.activations is None  # an executor says nothing of what layers keep


def test_eight_bits_in_fused_layers_keep_what_layers_keep_at_first():
    found = fixed_at_each_stage(fused=True, **{"precision.mode": "fp8_tile"})
    found = [stage for stage in found if not stage.beside]
    assert found[0].fixed.activations == {"keep"}
    assert found[1].fixed.activations is None
    assert found[1].fixed.micro_batch_size == 8


# ---- further stages, in real runs ----

WIDE = {"model__dim": 128, "model__num_layers": 8, "data__seq_len": 32}
WIDE |= {"train__global_batch_size": 4, "train__steps": 3}
FREE = ("train.micro_batch_size", "memory.loss_chunk_bytes")


def below_standard(data, runs, **changes):
    """A recipe that no plan with the standard executor and its formats fits."""
    loaded = load(data, runs, **(WIDE | changes))
    where = site(loaded, runs)
    planner = where.planner(loaded.recipe)
    budget = where.budget(loaded.recipe)
    least = {
        name: planner.with_fixed(Constraints(executor=name, micro_batch_size=1)).smallest(budget).peak_bytes
        for name in ("standard", "layer_major")
    }
    assert least["layer_major"] < least["standard"]
    size = int((least["layer_major"] + 3 * least["standard"]) / 4)
    return load(
        data,
        runs,
        **(WIDE | changes | {"train__micro_batch_size": 1, "plan__margin": 0.0, "plan__device_memory": size}),
    )


@pytest.mark.slow
def test_checkpoints_are_written_in_the_foreground_before_a_number_changes(data, tmp_path, monkeypatch):
    changes = {"model__dim": 128, "checkpoint__interval": 2, "train__micro_batch_size": 2}
    wide = load(data, tmp_path, "checkpoint.async_save", **changes, run__name="wide")
    tighter = changed(wide.recipe, {"checkpoint.async_save": False})
    where = site(wide, tmp_path)
    fixed = Constraints(executor="standard", micro_batch_size=2, loss_chunk_bytes=wide.recipe.memory.loss_chunk_bytes)
    budget = where.budget(wide.recipe)
    most, least = (where.planner(recipe, fixed).smallest(budget).peak_bytes for recipe in (wide.recipe, tighter))
    assert least < 0.99 * most
    tight_ = changes | {"plan__margin": 0.0, "plan__device_memory": int((most + least) / 2), "run__name": "tight"}
    with monkeypatch.context() as patch:
        stop_after_a_step(patch)
        assert train(load(data, tmp_path, "checkpoint.async_save", **tight_)).step == 1
    train(load(data, tmp_path, "checkpoint.async_save", **tight_))
    train(wide)
    assert_same_run(tmp_path / "tight", tmp_path / "wide")
    (told,) = [row for row in events(tmp_path / "tight") if row.get("setting")]
    assert (told["setting"], told["before"], told["after"]) == ("checkpoint.async_save", True, False)
    assert "async_save = false # plan" in (tmp_path / "tight" / "run.toml").read_text()
    assert {row["background"] for row in events(tmp_path / "tight", "save")} == {False}
    assert True in {row["background"] for row in events(tmp_path / "wide", "save")}


def test_evaluations_in_the_format_of_training_make_room(data, tmp_path):
    """Parameters of 16 bit are widened for an evaluation in FP32, and so are its logits, many of them here."""
    low = {"precision__mode": "bf16_mixed", "optim__master_weights": "stochastic", "optim__moments": "8bit"}
    changes = {"model__dim": 256, "data__seq_len": 2048, "train__micro_batch_size": 4, **low}
    loaded = load(data, tmp_path, "ops.cross_entropy", **changes)
    where = site(loaded, tmp_path)
    fixed = Constraints(executor="standard", micro_batch_size=4, loss_chunk_bytes=loaded.recipe.memory.loss_chunk_bytes)
    narrow = changed(loaded.recipe, {"precision.eval_fp32": False})
    budget = where.budget(loaded.recipe)
    most, least = (where.planner(recipe, fixed).smallest(budget) for recipe in (loaded.recipe, narrow))
    assert most.peak_phase == "evaluate", {name: most.phase_bytes(name) for name in most.phases}
    size = int((most.peak_bytes + least.peak_bytes) / 2)
    decided, plan = plan_run(
        load(data, tmp_path, "ops.cross_entropy", **changes, plan__margin=0.0, plan__device_memory=size), where
    )
    assert decided.recipe.precision.eval_fp32 is False
    assert [numbers["setting"] for _, numbers in plan.events if "setting" in numbers] == ["precision.eval_fp32"]


def test_the_executor_changes_where_nothing_else_helps(data, tmp_path):
    train(below_standard(data, tmp_path, run__name="sliced"))
    told = {row["setting"]: row for row in events(tmp_path / "sliced") if "setting" in row}
    assert told["memory.executor"]["after"] == "layer_major"
    assert not {"optim.moments", "optim.master_weights"} & set(told)
    train(load(data, tmp_path, **WIDE, train__micro_batch_size=1, run__name="standard"))
    losses = [losses_of(tmp_path / name) for name in ("sliced", "standard")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    text = (tmp_path / "sliced" / "run.toml").read_text()
    assert 'executor = "layer_major" # plan auto' in text
    again = load_recipe(
        tmp_path / "sliced" / "run.toml", {"run.name": "again", "checkpoint.resume": "never"}, environ={}
    )
    train(again)
    assert_same_run(tmp_path / "again", tmp_path / "sliced")
    assert read_plan(tmp_path / "again" / "plan.toml").layers == read_plan(tmp_path / "sliced" / "plan.toml").layers


@pytest.mark.slow
def test_states_go_to_disk_before_formats_are_narrowed(data, tmp_path):
    sizes = WIDE | {"model__dim": 256, "train__micro_batch_size": 1}
    loaded = load(data, tmp_path, **sizes)
    where = site(loaded, tmp_path / "runs")
    planner = where.planner(loaded.recipe).with_fixed(Constraints(executor="layer_major", micro_batch_size=1))
    here, disk = (where.budget(loaded.recipe, disk=disk) for disk in (False, True))
    least, on_disk = planner.smallest(here).peak_bytes, planner.smallest(disk).peak_bytes
    assert on_disk < 0.97 * least
    size = int((least + on_disk) / 2)
    train(load(data, tmp_path, **sizes, run__name="disk", plan__margin=0.0, plan__device_memory=size))
    plan = read_plan(tmp_path / "disk" / "plan.toml")
    assert "disk" in {choice.states for choice in plan.layers} | {choice.parameters for choice in plan.layers}
    assert plan.settings["optim.moments"] == "fp32"
    told = {row["setting"] for row in events(tmp_path / "disk") if "setting" in row}
    assert not {"optim.moments", "optim.master_weights"} & told
    assert loaded.recipe.optim.moments == "fp32"


def test_a_recipe_in_slices_recomputes_as_it_says(data, tmp_path):
    loaded = load(data, tmp_path, **WIDE, memory__executor="layer_major")
    where = site(loaded, tmp_path)
    found, plan = plan_run(loaded, where)
    assert not plan.decided
    replanner = replanner_of(found, where, plan)
    assert {layer.activations for layer in replanner.plan(64 * 2**30).memory_plan.layers} == {"recompute"}


def test_the_run_can_be_planned_anew(data, tmp_path):
    loaded = load(data, tmp_path)
    where = site(loaded, tmp_path)
    found, plan = plan_run(loaded, where)
    replanner = replanner_of(found, where, plan)
    wide = replanner.plan(64 * 2**30)
    assert {layer.activations for layer in wide.memory_plan.layers} == {"keep"}
    least = replanner.smallest()
    tighter = replanner.plan(least.step_bytes)
    assert tighter is None or {layer.activations for layer in tighter.memory_plan.layers} != {"keep"}
    off, plan = plan_run(load(data, tmp_path, memory__plan=""), where)
    assert replanner_of(off, where, plan) is None


@pytest.mark.slow
def test_a_foreign_model_is_planned_layer_by_layer(data, tmp_path):
    folder = tmp_path / "llama"
    folder.mkdir()
    shape = {"vocab_size": 300, "hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 256}
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **shape, **heads}
    (folder / "config.json").write_text(json.dumps(config))
    model = {"model__kind": "hf", "model__path": folder, "train__steps": 3}
    model |= {"train__global_batch_size": 8, "train__micro_batch_size": 8}
    taken = ("model.dim", "model.num_layers", "model.num_heads")
    train(tight(data, tmp_path, *taken, **model, run__name="tight"))
    train(load(data, tmp_path, *taken, **model, run__name="wide"))
    assert_same_run(tmp_path / "tight", tmp_path / "wide")
    assert {choice.activations for choice in read_plan(tmp_path / "tight" / "plan.toml").layers} != {"keep"}
