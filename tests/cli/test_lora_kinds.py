"""Fine-tunes with other kinds of adapters, from the command to the merged folder; what is planned of them."""

import json

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from tests.cli.tuned import arguments, logits, make_model, make_talks
from tests.data.chat.families import make_folder
from tests.training.tiny import assert_same_run, rows
from tilewright.cli.app import run
from tilewright.cli.load_run import reopen
from tilewright.models.decoder.decoder import Decoder

IDS = torch.arange(5, 53).view(2, 24)
ROUNDING = 2e-5
"""Sums in FP32 in another order, logits of order one."""
KIND = {
    "lora__rslora": "true",
    "lora__dropout": 0.1,
    "lora__modules_to_save": '["embed_tokens", "lm_head"]',
    "optim__lr": 1e-3,
    "train__eval_interval": 4,
}


@pytest.fixture
def talks(tmp_path):
    return make_talks(tmp_path / "talks.jsonl")


@torch.no_grad()
def our_logits(folder):
    model = reopen(folder, "cpu").model
    return model(IDS) if isinstance(model, Decoder) else model.net(IDS).logits


@pytest.mark.parametrize("name", ["llama", pytest.param("qwen3", marks=pytest.mark.slow)])
def test_dropout_rslora_and_whole_modules_resume_and_merge(tmp_path, talks, name):
    model = make_model(tmp_path / "model", name)
    how = ["finetune", str(model), str(talks)]
    assert run([*how, *arguments(tmp_path, run__name="parts", train__steps=4, **KIND)]) == 0
    assert run([*how, *arguments(tmp_path, run__name="parts", train__steps=8, **KIND)]) == 0
    assert run([*how, *arguments(tmp_path, run__name="straight", train__steps=8, **KIND)]) == 0
    parts, straight = (tmp_path / "runs" / each for each in ("parts", "straight"))
    assert_same_run(parts, straight)
    config = json.loads((straight / "hf" / "adapter_config.json").read_text())
    assert config["use_rslora"]
    assert config["lora_dropout"] == 0.1
    assert len(config["modules_to_save"]) == 2
    assert run(["merge", str(straight), "--out", str(tmp_path / "merged"), "--format", "fp32"]) == 0
    assert (logits(tmp_path / "merged", IDS) - our_logits(straight)).abs().max() < ROUNDING
    assert (logits(tmp_path / "merged", IDS) - logits(model, IDS)).abs().max() > ROUNDING
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), straight / "hf")
    with torch.no_grad():
        assert (theirs(IDS).logits - our_logits(straight)).abs().max() < 64 * torch.finfo(torch.bfloat16).eps


@pytest.mark.slow
def test_gpt2_is_tuned_by_adapters(tmp_path, talks):
    make_folder(tmp_path / "model", "chatml")
    torch.manual_seed(0)
    shape = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 128, "vocab_size": 400}
    GPT2LMHeadModel(GPT2Config(**shape, bos_token_id=0, eos_token_id=0)).save_pretrained(tmp_path / "model")
    settings = arguments(tmp_path, train__steps=20, train__eval_interval=0)
    assert run(["finetune", str(tmp_path / "model"), str(talks), *settings]) == 0
    folder = tmp_path / "runs" / "tuned"
    found = [row["loss"] for row in rows(folder / "metrics.jsonl") if "loss" in row]
    assert sum(found[-3:]) / 3 < 0.97 * found[0], found
    assert run(["merge", str(folder), "--out", str(tmp_path / "merged"), "--format", "fp32"]) == 0
    assert (logits(tmp_path / "merged", IDS) - our_logits(folder)).abs().max() < ROUNDING


def test_gpt2_on_an_fp8_base_is_told(tmp_path, talks, capsys):
    make_folder(tmp_path / "model", "chatml")
    shape = {"n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 128, "vocab_size": 400}
    GPT2LMHeadModel(GPT2Config(**shape, bos_token_id=0, eos_token_id=0)).save_pretrained(tmp_path / "model")
    assert run(["finetune", str(tmp_path / "model"), str(talks), "--how", "lora_fp8", *arguments(tmp_path)]) != 0
    said = capsys.readouterr().err
    assert "Conv1D" in said
    assert "--how lora" in said
