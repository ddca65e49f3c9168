"""Adapters against peft itself: its files are read, ours are read by it, and the logits are the same."""

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from tests.models.shapes import load_decoder
from tilewright.precision.lora.lora import adapted_layers, add_lora
from tilewright.precision.lora.peft_io import load_adapter, save_adapter

SHAPE = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
IDS = torch.arange(24).view(2, 12)
ROUNDING = 1e-5
"""Sums in FP32 in another order, logits of order one."""


@pytest.fixture
def base(tmp_path):
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=False)).save_pretrained(tmp_path / "base")
    return tmp_path / "base"


@torch.no_grad()
def test_peft_reads_our_adapter(base, tmp_path):
    from peft import PeftModel

    ours = load_decoder(base)
    add_lora(ours, rank=4, alpha=8.0, targets=["*.q_proj", "*.down_proj"], base="keep")
    without = ours(IDS)
    for module in adapted_layers(ours).values():
        nn.init.normal_(module.lora_B, std=0.1)
    save_adapter(ours, tmp_path / "adapter", base_model=str(base))
    theirs = PeftModel.from_pretrained(LlamaForCausalLM.from_pretrained(base), tmp_path / "adapter")
    assert (theirs(IDS).logits - ours(IDS)).abs().max() < ROUNDING < (without - ours(IDS)).abs().max()


@torch.no_grad()
def test_we_read_an_adapter_of_peft(base, tmp_path):
    from peft import LoraConfig, get_peft_model

    settings = LoraConfig(
        r=4, lora_alpha=16, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", init_lora_weights=False
    )
    theirs = get_peft_model(LlamaForCausalLM.from_pretrained(base), settings)
    theirs.save_pretrained(tmp_path / "adapter")
    ours = load_decoder(base)
    without = ours(IDS)
    assert len(load_adapter(ours, tmp_path / "adapter", base="keep")) == 4
    assert (theirs(IDS).logits - ours(IDS)).abs().max() < ROUNDING < (without - ours(IDS)).abs().max()
