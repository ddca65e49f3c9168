"""`finetune` on two ranks, each way: the losses of one process, and a result that is used like its own."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.cli.tuned import arguments, logits, make_model, make_talks
from tests.contracts.observe import fixed_ceilings
from tests.ranks import on_ranks
from tests.training.tiny import rows
from tilewright.cli.app import run
from tilewright.planner.machine import ceilings

pytestmark = pytest.mark.dist
STEPS = 6


def finetune(rank, words):
    """Exit code of the command on this rank."""
    ceilings.measure = fixed_ceilings
    return run(["finetune", *words])


def losses(folder):
    return [row["loss"] for row in rows(folder / "metrics.jsonl") if "loss" in row]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("llama") / "model", "llama")


@pytest.mark.parametrize(
    ("how", "mesh"),
    [
        ("lora", "dp_shard"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("full", "dp_shard"), ("lora_fp8", "dp_shard"), ("lora", "dp_replicate"), ("full", "dp_replicate"),
                ("lora_fp8", "dp_replicate"),
            )
        ),
    ],
)  # fmt: skip
@pytest.mark.support("lora", "copies", "shards")
@pytest.mark.support("lora_fp8", "copies", "shards")
@pytest.mark.support("finetune", "copies", "shards")
def test_two_ranks_have_the_losses_of_one_and_chat_takes_the_result(how, mesh, model, tmp_path, capsys):
    talks = make_talks(tmp_path / "talks.jsonl")
    settings = {"train__steps": STEPS, "precision__mode": "fp32", "train__eval_interval": 0}
    settings |= {"train__sample_tokens": 0, "data__eval_source": ""}
    other = "dp_replicate" if mesh == "dp_shard" else "dp_shard"
    sizes = {f"parallel__{mesh}": 2, f"parallel__{other}": 1}
    for name, world, more in (("one", 1, {}), ("two", 2, sizes)):
        words = [str(model), str(talks), "--how", how, *arguments(tmp_path / name, **settings | more)]
        assert on_ranks(world, finetune, words) == [0] * world
    one, two = (tmp_path / name / "runs" / "tuned" for name in ("one", "two"))
    assert losses(two) == pytest.approx(losses(one), rel=1e-4)
    assert len(losses(two)) == STEPS
    assert losses(two)[0] == pytest.approx(losses(one)[0], rel=2e-6)
    weights = "model.safetensors" if how == "full" else "adapter_model.safetensors"
    assert (two / "hf" / weights).is_file()
    said = []
    for folder in (one, two):
        asked = ["--device", "cpu", "--message", "hello Paris", "--temperature", "0", "--tokens", "12"]
        assert run(["chat", str(folder), *asked]) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1]
    if how != "lora_fp8":
        merged = [tmp_path / name / "merged" for name in ("one", "two")]
        for folder, out in zip((one, two), merged, strict=True):
            assert run(["merge", str(folder), "--out", str(out), "--format", "fp32"]) == 0
        ids = torch.arange(5, 53).view(2, 24)
        found, expected = (logits(out, ids) for out in reversed(merged))
        worst = (found - expected).abs().max().item()
        assert worst < 1e-2, f"logits are off by {worst}"


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["dp_shard", "dp_replicate"])
@pytest.mark.parametrize("saved", ["embed_tokens, lm_head", "norm"])
def test_modules_that_are_trained_whole_are_the_same_on_two_ranks(mesh, saved, model, tmp_path):
    """Beside the adapters: their losses, and the tensors that the adapter's folder and the merged model hold."""
    talks = make_talks(tmp_path / "talks.jsonl")
    names = "[" + ", ".join(f'"{name}"' for name in saved.split(", ")) + "]"
    settings = {"train__steps": STEPS, "precision__mode": "fp32", "train__eval_interval": 0}
    settings |= {"train__sample_tokens": 0, "data__eval_source": "", "lora__modules_to_save": names}
    other = "dp_replicate" if mesh == "dp_shard" else "dp_shard"
    for name, world, more in (("one", 1, {}), ("two", 2, {f"parallel__{mesh}": 2, f"parallel__{other}": 1})):
        words = [str(model), str(talks), "--how", "lora", *arguments(tmp_path / name, **settings | more)]
        assert on_ranks(world, finetune, words) == [0] * world
    one, two = (tmp_path / name / "runs" / "tuned" for name in ("one", "two"))
    assert losses(two) == pytest.approx(losses(one), rel=1e-4)
    stored = [load_file(folder / "hf" / "adapter_model.safetensors") for folder in (one, two)]
    assert stored[0].keys() == stored[1].keys()
    whole = [key for key in stored[0] if "lora_" not in key]
    assert len(whole) >= 1
    before = load_file(model / "model.safetensors")
    for key in whole:
        expected, found = stored[0][key], stored[1][key]
        assert found.shape == expected.shape
        worst = (found - expected).abs().max().item()
        assert worst < 1e-3, f"{key} is off by {worst}"
        first = before.get(key.removeprefix("base_model.model.").replace(".modules_to_save", ""))
        if first is not None:
            assert (found - first).abs().max() > 1e-3, f"{key} was not trained"
    for name, folder in (("one", one), ("two", two)):
        assert run(["merge", str(folder), "--out", str(tmp_path / name / "merged"), "--format", "fp32"]) == 0
    ids = torch.arange(5, 53).view(2, 24)
    found, expected = (logits(tmp_path / name / "merged", ids) for name in ("two", "one"))
    worst = (found - expected).abs().max().item()
    assert worst < 1e-2, f"logits are off by {worst}"


@pytest.mark.slow
def test_a_fine_tune_of_two_ranks_goes_on_with_one(model, tmp_path):
    talks = make_talks(tmp_path / "talks.jsonl")
    short = {"train__sample_tokens": 0, "data__eval_source": ""}
    words = [str(model), str(talks), *arguments(tmp_path, train__steps=3, **short)]
    assert on_ranks(2, finetune, words) == [0, 0]
    words = [str(model), str(talks), *arguments(tmp_path, train__steps=STEPS, **short)]
    assert on_ranks(1, finetune, words) == [0]
    folder = tmp_path / "runs" / "tuned"
    assert len(losses(folder)) == STEPS
    assert "resume" in [row["kind"] for row in rows(folder / "events.jsonl")]


def test_what_is_wrong_is_the_same_on_all_ranks(model, tmp_path):
    words = [str(model), str(Path(tmp_path) / "no.jsonl"), *arguments(tmp_path)]
    assert on_ranks(2, finetune, words) == [2, 2]
    assert not (tmp_path / "runs").exists()
    assert json.loads((model / "config.json").read_text())["model_type"] == "llama"
