"""A run on several ranks is the run of one process: data, losses, evaluations, files. Replicas, over gloo."""

import json
import shutil
from pathlib import Path

import pytest
from transformers import Qwen3Config, Qwen3ForCausalLM

from tests.cli.tuned import SHAPE
from tests.contracts.observe import fixed_ceilings
from tests.ranks import on_ranks
from tests.training.tiny import assert_same_run, last_state, rows, tiny
from tilewright.core.errors import TilewrightError
from tilewright.parallel import parallelize
from tilewright.parallel.shard import Sharding
from tilewright.planner.machine import ceilings
from tilewright.training.executor.standard import StandardExecutor
from tilewright.training.session import train

pytestmark = pytest.mark.dist
EVALS = {"train__eval_batches": 3, "train__eval_part_batches": 2, "checkpoint__interval": 4, "precision__mode": "fp32"}


def run(rank, data, runs, changes):
    """One rank of the tiny run; the class and text of the user's error, if there is one."""
    ceilings.measure = fixed_ceilings  # this process is the test's own
    try:
        result = train(tiny(Path(data), Path(runs), **changes))
    except TilewrightError as error:
        return str(error)
    return result.step, result.loss, {name: one.loss for name, one in result.evals.items()}


def on(world, data, runs, **changes):
    mesh = {"parallel__dp_replicate": world, "parallel__dp_shard": 1}
    return on_ranks(world, run, str(data), str(runs), mesh | changes)


@pytest.fixture(scope="module")
def alone(data, tmp_path_factory):
    """The run of one process, in a process of its own."""
    folder = tmp_path_factory.mktemp("alone")
    (found,) = on(1, data, folder, **EVALS)
    return folder / "tiny", found


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.support("run", "copies")
def test_it_is_the_run_of_one_process(world, data, tmp_path, alone):
    """Five rows of a step over 2 and 4 ranks: uneven, the same samples in all. Sums have another order (FP32)."""
    folder, (steps, loss, evals) = alone
    results = on(world, data, tmp_path, **EVALS)
    assert [found[0] for found in results] == [steps] * world
    assert all(found == results[0] for found in results)
    before, now = rows(folder / "metrics.jsonl"), rows(tmp_path / "tiny" / "metrics.jsonl")
    assert [row["step"] for row in now] == [row["step"] for row in before]
    for name in ("loss", "grad_norm"):
        worst = max(abs(a[name] / b[name] - 1) for a, b in zip(now, before, strict=True) if name in b)
        assert worst < 2e-6, f"{name} is off by {worst:.2g}"
    assert results[0][1] == pytest.approx(loss, rel=2e-6)
    assert results[0][2] == pytest.approx(evals, rel=2e-6)
    (tensors, meta), (expected, expected_meta) = last_state(tmp_path / "tiny"), last_state(folder)
    assert meta["parts"]["stream"] == expected_meta["parts"]["stream"]
    assert meta["parts"]["counters"]["targets"] == expected_meta["parts"]["counters"]["targets"]
    for name in (name for name in expected if name.startswith("model.")):
        worst = (tensors[name] - expected[name]).abs().max().item()
        assert worst < 1e-4, f"{name} is off by {worst:.2g}"  # Adam divides small gradients by small ones


@pytest.mark.slow
def test_a_held_out_row_is_evaluated_by_one_rank_and_the_numbers_are_those_of_one_process(data, tmp_path):
    """Before the first step the weights are equal, and so are the losses of each batch: to the last bit."""
    settings = EVALS | {"train__steps": 1, "optim__lr": 1e-30}
    evals = []
    for world in (1, 3):
        found = on(world, data, tmp_path / str(world), **settings)
        assert all(one[2] == found[0][2] for one in found)
        evals.append(found[0][2])
    assert evals[0] == evals[1]


@pytest.mark.parametrize("worlds", [(2, 1), pytest.param((1, 3), marks=pytest.mark.slow)])
@pytest.mark.support("resume", "copies")
@pytest.mark.support("reshard", "one", "copies")
def test_it_continues_with_another_number_of_processes(worlds, data, tmp_path, alone):
    _, (_, loss, _) = alone
    on(worlds[0], data, tmp_path, **EVALS | {"run__seed": 1234, "checkpoint__interval": 3})
    run_folder = tmp_path / "tiny"
    shutil.rmtree(run_folder / "checkpoints" / "step_00000006")  # what a process leaves that was killed after step 5
    found = on(worlds[1], data, tmp_path, **EVALS)
    assert found[0][0] == 6
    assert found[0][1] == pytest.approx(loss, rel=2e-6)
    kinds = [row["kind"] for row in rows(run_folder / "events.jsonl")]
    assert {"resume", "recovered"} <= set(kinds)
    assert [row["step"] for row in rows(run_folder / "metrics.jsonl") if "loss" in row] == list(range(1, 7))


def test_the_first_rank_alone_writes(data, tmp_path):
    found = on(2, data, tmp_path, train__steps=2, checkpoint__interval=0)
    assert found[0] == found[1]
    (run_folder,) = [path for path in tmp_path.iterdir() if not path.is_symlink()]
    assert json.loads((run_folder / "data.json").read_text())["fingerprint"]
    assert len([row for row in rows(run_folder / "events.jsonl") if row["kind"] == "start"]) == 1
    names = {path.name for path in (run_folder / "checkpoints" / "step_00000002").iterdir()}
    assert {"__0_0.distcp", "__1_0.distcp", "meta.json", "manifest.json"} <= names


@pytest.mark.parametrize(
    ("changes", "title"),
    [
        ({"train__global_batch_size": 1, "train__micro_batch_size": 1}, "Fewer samples per step than processes"),
        ({"parallel__dp_replicate": 3}, "Mesh that does not fit the number of processes"),
        ({"data__source": "nowhere"}, "No training data at this path"),
        ({"run__dir": "/proc/nowhere"}, "Run folder cannot be written"),
    ],
)
def test_an_error_is_the_same_on_all_ranks(changes, title, data, tmp_path):
    changes = {name: str(tmp_path / value) if value == "nowhere" else value for name, value in changes.items()}
    first, second = on(2, data, tmp_path, **changes)
    assert first == second
    assert title in first


SHARDS = {"parallel__dp_replicate": 1, "parallel__dp_shard": 2}


@pytest.mark.parametrize(("world", "copies"), [(2, 1), pytest.param(4, 2, marks=pytest.mark.slow)])
@pytest.mark.support("layer_major", "shards", "hsdp", refused=True)
def test_layer_major_in_shards_is_refused(world, copies, data, tmp_path):
    sizes = {"parallel__dp_replicate": copies, "parallel__dp_shard": -1}
    for said in on(world, data, tmp_path, memory__executor="layer_major", **sizes):
        assert "Layer-major executor does not shard" in said
        assert f"--parallel.dp_replicate {world}" in said


WHAT = {
    "adamw": (2e-5, {}),
    "muon": (2e-5, {"optim__kind": "muon"}),
    "integers": (1e-3, {"precision__rules": '[{compute = "int4_a8"}, {op = "head", compute = "int8"}]'}),
}
"""How near losses and evaluations are, and settings."""
MESHES = {
    "shards": (2, {"parallel__dp_shard": 2}),
    "hsdp": (4, {"parallel__dp_replicate": 2, "parallel__dp_shard": 2}),
    "copies": (2, {"parallel__dp_replicate": 2, "parallel__dp_shard": 1}),
}


SHORT = {("hsdp", "muon")}
"""Shards with copies; AdamW is in most other tests of ranks."""


@pytest.fixture(scope="module")
def each_alone(data, tmp_path_factory):
    """The run of one process by name of what it has, each made once: its folder, and what it found."""
    made = {}

    def run_of(what, changes):
        if what not in made:
            folder = tmp_path_factory.mktemp("each")
            made[what] = folder, on_ranks(1, run, str(data), str(folder), changes)[0]
        return made[what]

    return run_of


@pytest.mark.parametrize(
    ("mesh", "what"),
    [
        pytest.param(mesh, what, marks=[pytest.mark.slow] * ((mesh, what) not in SHORT), id=f"{what}-{mesh}")
        for mesh in MESHES
        for what in WHAT
    ],
)
@pytest.mark.support("run", "shards", "hsdp")
@pytest.mark.support("evaluation", "hsdp")
@pytest.mark.support("integers", "copies", "hsdp")
@pytest.mark.support("muon", "copies")
def test_shards_and_shards_with_copies_are_the_run_of_one_process(mesh, what, data, tmp_path, each_alone):
    """Weights that differ in their last bits may be rounded to other integers, so those losses are a little further."""
    near, given = WHAT[what]
    changes = EVALS | {"train__steps": 6, "optim__moments": "8bit"} | given
    world, sizes = MESHES[mesh]
    folder, alone = each_alone(what, changes)
    found = on_ranks(world, run, str(data), str(tmp_path), sizes | changes)
    assert all(each == found[0] for each in found)
    one, many = (
        [row["loss"] for row in rows(at / "tiny" / "metrics.jsonl") if "loss" in row] for at in (folder, tmp_path)
    )
    assert many[0] == pytest.approx(one[0], rel=2e-6)
    assert many == pytest.approx(one, rel=near)
    assert found[0][2] == pytest.approx(alone[2], rel=near)


@pytest.fixture(scope="module")
def teacher(data, tmp_path_factory):
    """A run of one process to learn from."""
    folder = tmp_path_factory.mktemp("teacher")
    on(1, data, folder, precision__mode="fp32", train__steps=6, run__seed=7)
    return folder / "tiny"


TAUGHT = {"train__global_batch_size": 5, "train__steps": 6, "train__log_interval": 1, "log__report": False}
TAUGHT |= {"distill__hidden": "{ 0 = 1, 1 = 1 }", "distill__attention": "{ 1 = 0 }"}


@pytest.fixture(scope="module")
def taught_alone(data, teacher, tmp_path_factory):
    folder = tmp_path_factory.mktemp("taught")
    (found,) = on(1, data, folder, distill__teacher=str(teacher), **EVALS | TAUGHT)
    return rows(folder / "tiny" / "metrics.jsonl"), found


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["shards", "copies", "hsdp"])
@pytest.mark.support("teacher", "copies", "shards", "hsdp")
def test_a_teacher_teaches_ranks_as_it_does_one_process(mesh, data, teacher, taught_alone, tmp_path):
    """Each rank runs the whole teacher on its rows. All parts of the loss are the means over all ranks."""
    world, sizes = MESHES[mesh]
    changes = {"parallel__dp_replicate": 1} | sizes | EVALS | TAUGHT | {"distill__teacher": str(teacher)}
    found = on_ranks(world, run, str(data), str(tmp_path), changes)
    one, (_, loss, evals) = taught_alone
    assert all(each == found[0] for each in found)
    many = rows(tmp_path / "tiny" / "metrics.jsonl")
    one, many = ([row for row in found if "loss" in row] for found in (one, many))
    for before, now in zip(one, many, strict=True):
        assert now["loss"] == pytest.approx(before["loss"], rel=2e-5)
        names = "cross_entropy", "distillation", "hidden", "attention"
        parts = [now[name] for name in names]
        assert parts == pytest.approx([before[name] for name in names], rel=2e-5)
        loss_now = (parts[0] + parts[1]) / 2 + sum(parts[2:])
        assert loss_now == pytest.approx(now["loss"], rel=1e-6)  # five rows: one rank has an empty micro-batch
    assert found[0][1] == pytest.approx(loss, rel=2e-5)
    assert found[0][2] == pytest.approx(evals, rel=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["shards", "copies"])
def test_layers_of_transformers_learn_on_ranks_as_in_one_process(mesh, data, teacher, tmp_path):
    """Hidden values of the same teacher."""
    folder = tmp_path / "qwen3"
    Qwen3ForCausalLM(Qwen3Config(**SHAPE | {"vocab_size": 300})).save_pretrained(folder)
    shutil.copy(teacher / "tokenizer.json", folder)
    world, sizes = MESHES[mesh]
    changes = EVALS | TAUGHT | {"distill__teacher": str(teacher), "train__steps": 3}
    changes |= {"model__kind": "hf", "model__path": str(folder), "model__weights": "load"}
    on(1, data, tmp_path / "one", **changes)
    on_ranks(world, run, str(data), str(tmp_path / "many"), {"parallel__dp_replicate": 1} | changes | sizes)
    one, many = (
        [row for row in rows(tmp_path / name / "tiny" / "metrics.jsonl") if "loss" in row] for name in ("one", "many")
    )
    for before, now in zip(one, many, strict=True):
        for name in ("loss", "cross_entropy", "distillation", "hidden", "attention"):
            assert now[name] == pytest.approx(before[name], rel=5e-5), name


@pytest.mark.parametrize(
    "mesh", [{}, pytest.param({"parallel__dp_shard": 1}, marks=pytest.mark.slow)], ids=["what is left", "one"]
)
@pytest.mark.support("run", "one")
def test_one_process_of_torchrun_is_the_plain_run_bit_for_bit(mesh, data, tmp_path):
    """The environment of torchrun, and a group of one rank that is there already: nothing is put around the model."""
    on_ranks(1, run, str(data), str(tmp_path / "one"), EVALS | mesh)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ceilings, "measure", fixed_ceilings)
        train(tiny(data, tmp_path / "plain", **EVALS))
    assert_same_run(tmp_path / "one" / "tiny", tmp_path / "plain" / "tiny")


def options(rank, data, runs, changes):
    """How the run's model was sharded and its gradients are summed, and the last loss."""
    ceilings.measure = fixed_ceilings  # this process is the test's own
    seen, cut, step = {}, parallelize.shard_from_meta, StandardExecutor.step

    def given(*args, **named):
        seen["sharding"] = args[3]
        cut(*args, **named)

    def stepped(executor, *args):
        seen["each"] = executor._gradients._reduce_each
        return step(executor, *args)

    parallelize.shard_from_meta, StandardExecutor.step = given, stepped
    return train(tiny(Path(data), Path(runs), **changes)).loss, seen["sharding"], seen["each"]


def test_options_of_a_sharded_model(data, tmp_path):
    """`reshard_after_forward`, `cpu_offload` and `reduce_each` say where bytes are (tests of `parallel.shard`), and
    change no loss."""
    settings = {"train__steps": 2, "checkpoint__interval": 0, "precision__mode": "fp32"}
    changed = {f"parallel__{name}": "true" for name in ("cpu_offload", "reduce_each")}
    changed["parallel__reshard_after_forward"] = "false"
    plain = on_ranks(2, options, str(data), str(tmp_path / "plain"), settings)
    other = on_ranks(2, options, str(data), str(tmp_path / "other"), settings | changed)
    assert plain[0][1:] == (Sharding(), False)
    assert other[0][1:] == (Sharding(reshard_after_forward=False, cpu_offload=True), True)
    assert other[0][0] == pytest.approx(plain[0][0], rel=2e-6)
