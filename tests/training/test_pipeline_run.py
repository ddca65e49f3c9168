"""A run whose layers are on ranks in a row is the run of one process: losses, evaluations, samples, checkpoints."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.contracts.observe import fixed_ceilings
from tests.ranks import on_ranks
from tests.training.tiny import last_state, rows, tiny
from tilewright.core.errors import TilewrightError
from tilewright.planner.machine import ceilings
from tilewright.training.hooks.step_hook import StepHook
from tilewright.training.session import train

pytestmark = pytest.mark.dist
RUN = {
    "model__num_layers": 4, "model__tie_embeddings": "false", "precision__mode": "fp32", "train__global_batch_size": 8,
    "train__micro_batch_size": 2, "train__eval_batches": 3, "train__eval_part_batches": 2, "checkpoint__interval": 3,
}  # fmt: skip
EXPERTS = {"model__num_experts": 4, "model__num_experts_per_token": 2, "model__expert_dim": 16}
PIPED = {"parallel__pp": 2}
INTERLEAVED = PIPED | {"parallel__schedule": "interleaved", "parallel__virtual_stages": 2}
TIED = {"model__tie_embeddings": "true"}
FP8 = {"precision__mode": "fp8_tile"}
EXPORT = {"checkpoint__export_hf": "true"}
HALF = {"optim__schedule": "constant", "checkpoint__interval": 0}
STOP = {"train__steps": 3, "train__sample_tokens": 0}


class Told(StepHook):
    """What the last step told of its rows."""

    rows = None

    def after_step(self, step, result):
        self.rows = None if result.rows is None else [part.tolist() for part in result.rows]


def runs(rank, data, folder, changes):
    """One rank of several runs, one after the other; what each returns, or the text of the user's error."""
    ceilings.measure = fixed_ceilings  # this process is the test's own
    found = {}
    for name, of_run in changes.items():
        try:
            told = Told()
            result = train(
                tiny(Path(data), Path(folder), **RUN | {"run__name": name} | of_run), hooks=[lambda *_, told=told: told]
            )
            found[f"{name} rows"] = told.rows
            found[name] = result.step, result.loss, {one: value.loss for one, value in result.evals.items()}
        except TilewrightError as error:
            found[name] = str(error)
    return found


@pytest.fixture(scope="module")
def ran(data, tmp_path_factory):
    """The folder of all runs, and what each returned on each rank. One process begins, or stages do."""
    folder, found = tmp_path_factory.mktemp("piped"), {}

    def launch(world, changes):
        for rank, of_rank in enumerate(on_ranks(world, runs, str(data), str(folder), changes)):
            found.update({(name, world, rank): value for name, value in of_rank.items()})

    stop = HALF | STOP
    begun = {"experts": EXPERTS | stop, "tied_shards": TIED | stop}
    launch(1, {"experts_alone": EXPERTS | HALF, "tied_alone": EXPORT | TIED | HALF} | begun)
    split = {"parallel__split": "[1,3]"}
    launch(2, {"experts": INTERLEAVED | EXPERTS | HALF, "to_one": PIPED | TIED | stop | split})
    launch(1, {"to_one": TIED | HALF})
    zbv = {"parallel__dp_shard": 2, "parallel__schedule": "zbv"}
    launch(4, {"tied_shards": PIPED | TIED | EXPORT | HALF | zbv})
    return folder, found


SHARDS = {
    "1f1b": PIPED | EXPORT,
    "copies": PIPED | {"parallel__dp_replicate": 2},
    "shards": PIPED | {"parallel__dp_shard": 2, "parallel__split": "[3,1]"},
    "bubbles": PIPED | {"parallel__dp_shard": 2, "parallel__schedule": "interleaved_zero_bubble"},
    "fp8": PIPED | FP8 | {"parallel__schedule": "dualpipe_v"},
    "fp8_alone": FP8,
}


@pytest.mark.slow
def test_other_stages_in_shards(ran, data):
    """Uneven ones, a gradient in two parts on more than two stages; copies; ends of their own; 8 bits."""
    folder, found = ran
    launches = {1: ("alone", "fp8_alone"), 2: ("1f1b", "fp8"), 4: ("copies", "shards", "bubbles")}
    for world, names in launches.items():
        given = {name: SHARDS.get(name, EXPORT) for name in names}
        for rank, of_rank in enumerate(on_ranks(world, runs, str(data), str(folder), given)):
            found = found | {(name, world, rank): value for name, value in of_rank.items()}
    for world in (2, 4):
        for name in launches[world]:
            test_it_is_the_run_of_one_process((folder, found), name, world, "fp8_alone" if name == "fp8" else "alone")
    check_folder(folder, "1f1b", "alone")
    for name, other in (("1f1b", "alone"), ("fp8", "fp8_alone")):
        check_audit(folder, name, other)


@pytest.mark.support("run", "stages")
@pytest.mark.support("evaluation", "stages")
@pytest.mark.parametrize(
    ("name", "world", "other"),
    [("experts", 2, "experts_alone"), ("tied_shards", 4, "tied_alone")],
)
def test_it_is_the_run_of_one_process(ran, name, world, other):
    folder, found = ran
    first = found[name, world, 0]
    for rank in range(world):
        assert not isinstance(found[name, world, rank], str), found[name, world, rank]
        assert found[name, world, rank] == first, "all ranks have the last stage's numbers"
    _same(folder / name, folder / other)
    assert first[2] == pytest.approx(found[other, 1, 0][2], rel=2e-6)
    samples = [[(row["prompt"], row["text"]) for row in rows(folder / run / "samples.jsonl")] for run in (name, other)]
    assert samples[0] == samples[1]


@pytest.mark.support("resume", "stages")
@pytest.mark.support("reshard", "stages")
def test_it_goes_on_with_other_stages(ran):
    """Tied ends: one parameter of two ranks is saved once, and read by both."""
    folder, found = ran
    for name in ("experts", "tied_shards", "to_one"):
        assert {value[0] for (run, _, _), value in found.items() if run == name} == {3, 6}
    _same(folder / "to_one", folder / "tied_alone")


@pytest.mark.support("export", "stages")
def test_its_folder_is_that_of_one_process(ran):
    check_folder(ran[0], "tied_shards", "tied_alone")


def check_folder(folder, run, alone):
    ours, theirs = (rows_of_export(folder / name / "hf") for name in (run, alone))
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert (ours[name] - tensor).abs().max() < 1e-4, name


def rows_of_export(folder):
    return load_file(folder / "model.safetensors")


def test_each_rank_knows_the_losses_of_its_rows(ran):
    sums, counts = ran[1]["tied_alone rows", 1, 0]
    ranks = [ran[1]["tied_shards rows", 4, rank] for rank in range(4)]
    assert ranks[:2] == ranks[2:], "ranks in a row read the same rows"
    rows = [row for of_rank in ranks[:2] for row in zip(*of_rank, strict=True)]
    assert len(rows) == len(sums)
    assert sorted(count for _, count in rows) == sorted(counts)
    assert sorted(each for each, _ in rows) == pytest.approx(sorted(sums), rel=1e-5)


def test_the_audit_is_of_all_stages(ran):
    check_audit(ran[0], "experts", "experts_alone")


def check_audit(folder, name, other):
    ours, theirs = (json.loads((folder / run / "audit.json").read_text())["rows"] for run in (name, other))
    assert [(row["layer"], row["gemm"], row["format"]) for row in ours] == [
        (row["layer"], row["gemm"], row["format"]) for row in theirs
    ]
    assert [row["calls"] for row in ours] == [row["calls"] for row in theirs]
    counts = [last_state(folder / run)[1]["parts"]["audit"] for run in (name, other)]
    assert counts[0] == counts[1]


def test_what_a_user_is_told(ran):
    starts = [
        next(row for row in rows(ran[0] / run / "events.jsonl") if row["kind"] == "start")
        for run in ("tied_shards", "tied_alone")
    ]
    assert starts[0]["parameters"] == starts[1]["parameters"], "of all stages"


def _same(run, alone):
    before, now = rows(alone / "metrics.jsonl"), rows(run / "metrics.jsonl")
    assert [row["step"] for row in now] == [row["step"] for row in before]
    for name in ("loss", "grad_norm", "moe_max_violation"):
        pairs = [(a[name], b[name]) for a, b in zip(now, before, strict=True) if name in b]
        worst = max((abs(a / b - 1) for a, b in pairs), default=0.0)
        assert worst < 2e-6, f"{name} is off by {worst:.2g}"
    (tensors, meta), (expected, expected_meta) = last_state(run), last_state(alone)
    assert meta["parts"]["stream"] == expected_meta["parts"]["stream"]
    assert meta["parts"]["counters"]["targets"] == expected_meta["parts"]["counters"]["targets"]
    named = {name for name in expected if not name.startswith("rng.")}
    assert named == {name for name in tensors if not name.startswith("rng.")}
    for name in (name for name in expected if name.startswith("model.")):
        worst = (tensors[name].float() - expected[name].float()).abs().max().item()
        assert worst < 1e-4, f"{name} is off by {worst:.2g}"  # Adam divides small gradients by small ones


MODES = {
    "bf16": {"precision__mode": "bf16_mixed"},
    "fp16": {"precision__mode": "pure_fp16"},
    "start": {"precision__mode": "bf16_mixed", "precision__start_mode": "fp32", "precision__start_fraction": 0.5},
    "nan": {"optim__lr": "1e30"},
}


@pytest.mark.slow
@pytest.mark.support("bf16", "stages")
@pytest.mark.support("fp16", "stages")
def test_modes_and_bad_numbers(data, tmp_path):
    """Formats that change in the middle, a loss scale, and a run that ends in its third bad step."""
    (alone,) = on_ranks(1, runs, str(data), str(tmp_path), MODES)
    piped = on_ranks(2, runs, str(data), str(tmp_path), {f"{name}_2": PIPED | given for name, given in MODES.items()})
    for name in MODES:
        assert piped[0][f"{name}_2"] == piped[1][f"{name}_2"] or name == "nan"
        losses = [
            [row["loss"] for row in rows(tmp_path / run / "metrics.jsonl") if "loss" in row]
            for run in (name, f"{name}_2")
        ]
        assert losses[1] == pytest.approx(losses[0], rel=1e-5), name  # FP16: a sum in another order is rounded to 2^-11
    for told in (alone["nan"], *(of_rank["nan_2"] for of_rank in piped)):
        assert "Non-finite gradient in 3 steps in a row" in told


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_compiled_layers_whose_weight_gradients_wait(data, tmp_path):
    """Of a loss after six steps relative 1e-5, in FP32: sums in another order, and what Adam makes of them."""
    waits = PIPED | {"train__compile": "on", "parallel__schedule": "zbv"}
    more = {"zbv": waits, "recomputed": waits | {"train__activation_checkpoint": "full"}}
    on_ranks(1, runs, str(data), str(tmp_path), {"alone": {}})
    found = on_ranks(2, runs, str(data), str(tmp_path), more, seconds=900)
    losses = [row["loss"] for row in rows(tmp_path / "alone" / "metrics.jsonl") if "loss" in row]
    for name in more:
        assert found[0][name][0] == 6, found[0][name]
        ours = [row["loss"] for row in rows(tmp_path / name / "metrics.jsonl") if "loss" in row]
        assert ours == pytest.approx(losses, rel=1e-5), name
