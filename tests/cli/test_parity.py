"""`doctor --parallel`: a mesh from text, what differs in order, and the whole check on two processes."""

import json
import os
import time

import numpy as np
import psutil
import pytest
from click.testing import CliRunner

from tests.commands import call_in_fork
from tests.training.tiny import save_tokenizer, settings, write_text
from tilewright.cli.app import cli
from tilewright.cli.commands.outputs import parity
from tilewright.cli.commands.outputs.parity import gaps, parse_sizes, tiny
from tilewright.cli.commands.outputs.parity_limits import ParityLimits
from tilewright.cli.commands.outputs.parity_model import with_small_model
from tilewright.core.config.load import load_recipe
from tilewright.core.errors import ConfigError, HardwareError, TilewrightError
from tilewright.parallel.mesh import MeshSizes


@pytest.mark.parametrize("text", ["", "dp_shard", "dp_shard=0", "cp=2", "dp_shard=1", "dp_shard=x,dp_replicate=2"])
def test_a_mesh_that_cannot_be_read(text):
    with pytest.raises(ConfigError, match="--parallel"):
        parse_sizes(text)


@pytest.mark.parametrize("text", ["dp_shard=4,ep=3", "dp_shard=2,ep=4"])
def test_shards_that_experts_do_not_divide(text):
    with pytest.raises(ConfigError, match="do not come out even over the mesh"):
        parse_sizes(text)


def test_a_dense_model_has_no_experts_to_spread():
    with pytest.raises(ConfigError, match="Dense model has no experts"):
        parity.compare(load_recipe("default", {}, environ={}), parse_sizes("ep=2"))


def test_weights_that_are_gathered_as_codes_are_whole():
    given = load_recipe("default", {"precision.mode": "fp8_tile", "parallel.param_gather": "fp8"}, environ={})
    with pytest.raises(ConfigError, match=r"gathered as codes[^@]*--parallel dp_shard=2"):
        parity.compare(given, parse_sizes("dp_shard=2,tp=2"))


LIMITS = ParityLimits(loss=1e-5, gradient=0.1, expert=0.3, weight=0.01, routing=1.0)


def test_the_worst_of_its_tolerance_is_first():
    one = {"loss/step 1": np.array([2.0]), "gradient/a": np.ones(4), "weight/a": np.ones(4), "weight/b": np.ones(2)}
    other = one | {"gradient/a": np.full(4, 1.5), "weight/a": np.full(4, 1.001)}
    del other["weight/b"]
    found = gaps(one, other, LIMITS)
    assert [(gap.kind, gap.name, gap.ok) for gap in found] == [
        ("weight", "b", False), ("gradient", "a", False), ("weight", "a", True), ("loss", "step 1", True),
    ]  # fmt: skip
    assert found[1].error == pytest.approx(0.5)


def test_nan_is_beyond_every_tolerance():
    (gap,) = gaps({"loss/step 1": np.array([1.0])}, {"loss/step 1": np.array([np.nan])}, LIMITS)
    assert not gap.ok


def test_the_model_is_small_and_each_rank_has_two_rows():
    recipe = tiny(load_recipe("zero_cpu", {}, environ={}).recipe, MeshSizes(dp_shard=4))
    assert (recipe.model.dim, recipe.model.num_layers, recipe.train.global_batch_size) == (64, 2, 8)
    assert recipe.optim.moments == "8bit"


def test_of_stages_each_has_a_layer_and_micro_batches_enough():
    given = load_recipe("default", {"parallel.schedule": "interleaved", "parallel.virtual_stages": "3"}, environ={})
    recipe = tiny(given.recipe, MeshSizes(pp=2, dp_shard=2))
    assert (recipe.model.num_layers, recipe.train.global_batch_size, recipe.model.tie_embeddings) == (6, 8, True)


@pytest.mark.dist
@pytest.mark.parametrize(
    ("mesh", "more"),
    [
        pytest.param("dp_shard=2", {}, marks=pytest.mark.slow),
        pytest.param("pp=2", {"parallel__schedule": "interleaved", "model__num_experts": 4}, marks=pytest.mark.slow),
        ("pp=2", {"data__rows": "documents", "parallel__balance": "on", "train__global_batch_size": 8}),
        pytest.param("ep=2", {"model__num_experts": 4}, marks=pytest.mark.slow),  # as below: in tests/parallel/inside
        pytest.param(
            "tp=2",
            {"ops__cross_entropy": "native", "model__num_kv_heads": 2, "optim__kind": "adamw"},
            marks=pytest.mark.slow,
        ),
        pytest.param("pp=2,dp_shard=2", {}, marks=pytest.mark.slow),
        pytest.param(
            "pp=2,tp=2",
            {"parallel__schedule": "zbv", "ops__cross_entropy": "native", "optim__kind": "adamw"},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "pp=2,dp_shard=2",
            {"data__rows": "documents", "parallel__balance": "on", "parallel__schedule": "zbv"},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "dp_shard=2,tp=2", {"ops__cross_entropy": "native", "optim__kind": "adamw"}, marks=pytest.mark.slow
        ),
        pytest.param("dp_shard=4,ep=2", {"model__num_experts": 4}, marks=pytest.mark.slow),
    ],
)
def test_several_processes_against_one(tmp_path, monkeypatch, mesh, more):
    """Of four ranks in processes that import for themselves, as a user's do."""
    write_text(tmp_path / "text")
    monkeypatch.chdir(tmp_path)
    if parse_sizes(mesh).world == 2:
        monkeypatch.setattr(parity, "call_module", call_in_fork)
    given = settings(tmp_path, tmp_path / "runs", precision__mode="fp32", **more)
    arguments = [f"--{name}={value}" for name, value in given.items()]
    result = CliRunner().invoke(cli, ["doctor", "--json", "--parallel", mesh, "default", *arguments])
    assert result.exit_code == 0, result.output
    documents = ", whole documents, placed by cost, tied ends" in " ".join(result.output.split())
    assert documents == ("parallel__balance" in more)
    found = json.loads(result.output[result.output.index("{") : result.output.rindex("}") + 1])
    assert found["beyond"] == 0
    kinds = {gap["kind"] for gap in found["gaps"]}
    assert kinds == {"loss", "gradient", "weight"} | ({"routing"} if "model__num_experts" in more else set())
    assert max(gap["error"] for gap in found["gaps"] if gap["kind"] == "gradient") < 2e-6


SLEEPER = """
import os
import pathlib
import time

if os.environ.get("RANK") == "1" and os.environ.get("WORLD_SIZE") == "2":
    import {module} as module

    def sleeps(*args, **named):
        pathlib.Path({mark!r}).write_text(str(time.monotonic()))
        time.sleep(600)

    module.{name} = sleeps
"""
"""A `sitecustomize` of the processes of the check: one of two ranks never comes back from a call."""
CALLS = {
    "launch": ("tilewright.parallel.launch", "meet", "Rank 1 of 2 did not come to the start of the run"),
    "data": ("tilewright.training.assemble", "prepare_data", "Rank 1 of 2 hangs in data preparation"),
    "forward": ("tilewright.models.decoder.decoder", "Decoder.loss", "Rank 1 of 2 hangs in forward"),
}


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.timeout(400)
@pytest.mark.parametrize("phase", CALLS)
def test_a_rank_that_hangs_is_named_and_all_end(phase, tmp_path, monkeypatch):
    write_text(tmp_path / "text")
    module, name, words = CALLS[phase]
    (tmp_path / "early").mkdir()
    sleeper = SLEEPER.format(module=module, name=name, mark=str(tmp_path / "mark"))
    (tmp_path / "early" / "sitecustomize.py").write_text(sleeper)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "early"), prepend=os.pathsep)
    monkeypatch.chdir(tmp_path)
    given, before = (
        settings(tmp_path, tmp_path / "runs", precision__mode="fp32", parallel__timeout_minutes=0.2),
        _children(),
    )
    arguments = [f"--{name}={value}" for name, value in given.items()]
    result = CliRunner().invoke(cli, ["doctor", "--parallel", "dp_shard=2", "default", *arguments])
    assert time.monotonic() - float((tmp_path / "mark").read_text()) < 60
    assert isinstance(result.exception, TilewrightError), result.output
    assert words in str(result.exception)
    assert "checkpoint" not in str(result.exception), "there is none to continue from"
    assert _children() <= before, "a process is left"


STAND_IN = """
import os
import time
from tilewright.core.errors import HardwareError
from tilewright.core.subprocess_call import answer

def act(first):
    if first == int(os.environ["RANK"]):
        raise HardwareError("Rank 1 hangs", got="nothing", need="a sign", try_="look")
    time.sleep(600)

answer(act)
"""


@pytest.mark.parametrize("first", [0, 1])
def test_one_process_that_fails_ends_those_that_do_not(first, tmp_path, monkeypatch):
    (tmp_path / "stand_in.py").write_text(STAND_IN)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(parity, "__name__", "stand_in")
    monkeypatch.setattr(parity, "GRACE_S", 0.2)
    before = _children()  # compilers of torch that tests before this one have started
    with pytest.raises(HardwareError, match="Rank 1 hangs"):
        parity._run_side([{"RANK": str(rank)} for rank in range(3)], first=first)
    assert _children() <= before


def _children():
    return {child.pid for child in psutil.Process().children() if "-m" in child.cmdline()}


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize("mesh", ["dp_shard=2", "pp=2", "pp=2,dp_shard=2"])
def test_processes_against_one_of_a_folder(tmp_path, monkeypatch, mesh):
    """Four layers, wider than the check needs, become two narrow ones, with the tokenizer of the folder."""
    transformers = pytest.importorskip("transformers")
    write_text(tmp_path / "text")
    save_tokenizer(tmp_path / "model")
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "head_dim": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    transformers.Qwen3ForCausalLM(transformers.Qwen3Config(vocab_size=300, **sizes, **heads)).save_pretrained(
        tmp_path / "model"
    )
    monkeypatch.chdir(tmp_path)
    given = settings(tmp_path, tmp_path / "runs", precision__mode="fp32", model__kind="hf", model__weights="load")
    given |= {"model.path": str(tmp_path / "model")}
    arguments = [f"--{name}={value}" for name, value in given.items()]
    result = CliRunner().invoke(cli, ["doctor", "--json", "--parallel", mesh, "default", *arguments])
    assert result.exit_code == 0, result.output
    assert "2 narrow layers" in result.output
    found = json.loads(result.output[result.output.index("{") : result.output.rindex("}") + 1])
    names = {gap["name"] for gap in found["gaps"] if gap["kind"] == "weight"}
    assert {name.split("layers.")[1][0] for name in names if "layers." in name} == {"0", "1"}
    assert max(gap["error"] for gap in found["gaps"] if gap["kind"] == "gradient") < 2e-6


def test_sizes_that_do_not_go_together_leave_the_layers_whole(tmp_path):
    """Widths of state spaces are products of others, which the small sizes are not."""
    transformers = pytest.importorskip("transformers")
    config = transformers.Mamba2Config(
        vocab_size=64, hidden_size=128, num_heads=16, head_dim=16, state_size=8, n_groups=2, num_hidden_layers=3
    )
    config.save_pretrained(tmp_path / "model")
    given = {"model.kind": "hf", "model.path": str(tmp_path / "model"), "data.vocab_size": "300"}
    small = with_small_model(load_recipe(None, given, environ={}), tmp_path / "small").recipe
    values = json.loads((tmp_path / "small" / "config.json").read_text())
    assert (values["num_hidden_layers"], values["hidden_size"]) == (2, 128)
    assert small.model.path == str(tmp_path / "small")


@pytest.mark.support("others", "copies", "shards", "hsdp", refused=True)
def test_commands_of_one_process_say_so(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    result = CliRunner().invoke(cli, ["generate"])
    assert isinstance(result.exception, HardwareError)
    assert "Command generate runs in one process" in str(result.exception)
