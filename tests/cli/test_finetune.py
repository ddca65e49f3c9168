"""`finetune` and `merge` end to end, on small models of an architecture that is ours to run and one that is not."""

import shlex

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.cli.tuned import arguments, logits, make_model, make_talks
from tests.training.tiny import assert_same_run, rows
from tilewright.cli.app import run
from tilewright.cli.load_run import reopen
from tilewright.core.config.load import load_recipe
from tilewright.models.decoder.decoder import Decoder

IDS = torch.arange(5, 53).view(2, 24)
ROUNDING = 2e-5
"""Sums in FP32 in another order, logits of order one."""


BOTH = pytest.mark.parametrize("model", ["llama", "qwen3"], indirect=True)
OTHER_SLOW = pytest.mark.parametrize("model", ["llama", pytest.param("qwen3", marks=pytest.mark.slow)], indirect=True)
"""Of the architecture that transformers runs only by -m slow: it takes twice as long."""


@pytest.fixture(scope="module")
def model(request, tmp_path_factory):
    """Of the architecture that is asked for."""
    return make_model(tmp_path_factory.mktemp(request.param) / "model", request.param)


@pytest.fixture
def talks(tmp_path):
    return make_talks(tmp_path / "talks.jsonl")


def finetune(model, talks, how, settings):
    return run(["finetune", str(model), str(talks), "--how", how, *settings])


@torch.no_grad()
def our_logits(folder):
    model = reopen(folder, "cpu").model
    return model(IDS) if isinstance(model, Decoder) else model.net(IDS).logits


def losses(folder):
    return [row["loss"] for row in rows(folder / "metrics.jsonl") if "loss" in row]


@OTHER_SLOW
@pytest.mark.parametrize(
    ("how", "as_users"),
    [
        ("lora", False), pytest.param("lora_fp8", False, marks=pytest.mark.slow), ("full", False),
        # Texts that the run does not learn are evaluated beside it in `training.test_validation` too, and kernels of
        # users' runs train in `training.test_kill`.
        pytest.param("lora_fp8", True, marks=pytest.mark.slow),
    ],
)  # fmt: skip
@pytest.mark.support("lora", "one")
@pytest.mark.support("lora_fp8", "one")
@pytest.mark.support("finetune", "one")
def test_the_loss_falls_and_the_result_is_in_the_run_folder(model, talks, how, as_users, tmp_path, capsys):
    more = {"data__eval_source": "installed", "ops__cross_entropy": "auto", "ops__adam": "auto"} if as_users else {}
    assert finetune(model, talks, how, arguments(tmp_path, train__steps=25, **more)) == 0
    folder = tmp_path / "runs" / "tuned"
    found = losses(folder)
    assert sum(found[-3:]) / 3 < (0.8 if how == "full" else 0.95) * found[0], found
    said = capsys.readouterr().out
    assert "[[Yes, the" in said  # a rendered example, what is trained of it in marks
    assert "plan: " in said
    assert "messages (50)" in said
    evals = [row for row in rows(folder / "metrics.jsonl") if "eval" in row]
    assert evals
    assert all(bool(row.get("eval_other")) == bool(more) for row in evals)
    recipe = load_recipe(folder / "run.toml", environ={}).recipe
    assert recipe.model.kind == ("decoder" if "llama" in str(model) else "hf")
    weights = "adapter_model.safetensors" if how != "full" else "model.safetensors"
    for name in (weights, "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (folder / "hf" / name).is_file()
    for name in ("tokenizer.json", "chat_template.jinja"):
        assert (folder / name).is_file()


@OTHER_SLOW
@pytest.mark.slow
def test_a_resumed_finetune_equals_one_that_never_stopped(model, talks, tmp_path):
    each = {"train__eval_interval": 3}
    assert finetune(model, talks, "lora", arguments(tmp_path, run__name="parts", train__steps=3, **each)) == 0
    assert finetune(model, talks, "lora", arguments(tmp_path, run__name="parts", **each)) == 0
    assert finetune(model, talks, "lora", arguments(tmp_path, run__name="straight", **each)) == 0
    assert_same_run(tmp_path / "runs" / "parts", tmp_path / "runs" / "straight")


@pytest.mark.slow
@BOTH
def test_run_toml_trains_the_same(model, talks, tmp_path):
    assert finetune(model, talks, "lora", arguments(tmp_path)) == 0
    folder = tmp_path / "runs" / "tuned"
    assert run(["train", str(folder / "run.toml"), "--run.dir", str(tmp_path), "--run.name", "again"]) == 0
    assert_same_run(tmp_path / "again", folder)


@OTHER_SLOW
@pytest.mark.parametrize("master", ["fp32", pytest.param("stochastic", marks=pytest.mark.slow)])
def test_the_adapter_loads_in_peft_with_equal_logits(model, talks, tmp_path, master):
    from peft import PeftModel

    assert finetune(model, talks, "lora", arguments(tmp_path, optim__master_weights=master)) == 0
    folder = tmp_path / "runs" / "tuned"
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).requires_grad_(False)
    if master == "stochastic":  # the base that was trained on is the folder's in BF16
        for name, param in base.named_parameters():
            if "norm" not in name:
                param.copy_(param.bfloat16())
    before = base(IDS).logits
    theirs = PeftModel.from_pretrained(base, folder / "hf")(IDS).logits
    mine = our_logits(folder)
    assert (theirs - mine).abs().max() < ROUNDING < (theirs - before).abs().max()


@OTHER_SLOW
@pytest.mark.parametrize("how", [*(pytest.param(how, marks=pytest.mark.slow) for how in ("lora", "lora_fp8")), "full"])
def test_a_merged_folder_loads_in_transformers_with_equal_logits(model, talks, how, tmp_path, capsys):
    assert finetune(model, talks, how, arguments(tmp_path)) == 0
    folder, out = tmp_path / "runs" / "tuned", tmp_path / "merged"
    assert run(["merge", str(folder), "--out", str(out), "--format", "fp32"]) == 0
    ours = our_logits(folder)
    difference = logits(out, IDS) - ours
    if how == "lora_fp8":  # the run rounds operands to four bits (noise of about 3 % each), the merged folder does not
        assert difference.norm() < 0.1 * ours.norm()
    else:
        assert difference.abs().max() < ROUNDING
    tokenizer = AutoTokenizer.from_pretrained(out)
    talk = [{"role": "user", "content": "hello Paris"}]
    before = AutoTokenizer.from_pretrained(model)
    options = {"add_generation_prompt": True, "tokenize": False}
    assert tokenizer.apply_chat_template(talk, **options) == before.apply_chat_template(talk, **options)
    assert run(["merge", str(folder), "--out", str(out)]) == 2
    assert "not empty" in capsys.readouterr().err


@OTHER_SLOW
def test_several_files_are_a_mixture_and_steps_are_passes(model, talks, tmp_path, capsys):
    more = make_talks(tmp_path / "more.jsonl", 20)
    settings = arguments(tmp_path, data__weights="{ talks = 0.5, more = 0.5 }")
    for name in ("optim.warmup_steps", "train.steps", "train.global_batch_size", "train.micro_batch_size"):
        at = settings.index(f"--{name}")
        del settings[at : at + 2]
    assert run(["finetune", str(model), str(talks), str(more), "--passes", "1", *settings]) == 0
    recipe = load_recipe(tmp_path / "runs" / "tuned" / "run.toml", environ={}).recipe
    assert set(recipe.data.sources) == {"talks", "more"}
    assert recipe.train.steps >= 10
    assert recipe.optim.warmup_steps <= recipe.train.steps // 10
    assert recipe.train.micro_batch_size <= recipe.train.global_batch_size
    assert "1 passes over" in capsys.readouterr().out


@OTHER_SLOW
def test_what_is_wrong_is_told_before_anything_is_trained(model, talks, tmp_path, capsys):
    settings = arguments(tmp_path)
    assert run(["finetune", str(model)]) == 2
    assert "No conversations named" in capsys.readouterr().err
    assert run(["finetune", str(tmp_path / "nothing"), str(talks), *settings]) == 2
    assert "Model folder does not exist" in capsys.readouterr().err
    bare = make_model(tmp_path / "bare", "llama", template=False)
    assert run(["finetune", str(bare), str(talks), *settings]) == 2
    assert "chatml" in capsys.readouterr().err
    assert run(["finetune", str(model), str(tmp_path / "no.jsonl"), *settings]) == 2
    assert not (tmp_path / "runs").exists()
    assert (
        run(["finetune", str(bare), str(talks), *settings, "--data.chat_template", "chatml", "--train.steps", "1"]) == 0
    )


@pytest.mark.parametrize("how", ["lora", pytest.param("full", marks=pytest.mark.slow)])
def test_preferences_are_told_the_command_that_learns_them(how, tmp_path, capsys):
    """Which is accepted when it is pasted."""
    file = tmp_path / "my pairs.jsonl"
    file.write_text("".join(f'{{"prompt": "hello {i}", "chosen": "yes", "rejected": "no {i}"}}\n' for i in range(40)))
    model = make_model(tmp_path / "model", "llama")
    settings = arguments(tmp_path, train__steps=2, data__seq_len=64)
    assert run(["finetune", str(model), str(file), "--how", how, *settings]) != 0
    said = capsys.readouterr().err
    (line,) = [line for line in said.replace("\n         ", " ").splitlines() if "tilewright train dpo" in line]
    command = shlex.split(line[line.index("tilewright train") :])
    assert command[1:5] == ["train", "dpo", "--model.path", str(model)]
    assert run(command[1:]) == 0
