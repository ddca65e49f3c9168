"""Kinds of adapters against peft: Conv1D, rsLoRA, dropout, modules that train as a whole; files both ways, one step."""

import itertools
import json

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from tilewright.core.errors import CheckpointError, ConfigError
from tilewright.models.hf.model import HFModel
from tilewright.precision.lora.lora import adapted_layers, add_lora, merge_lora
from tilewright.precision.lora.modules_to_save import saved_modules
from tilewright.precision.lora.peft_io import load_adapter, save_adapter

IDS = torch.arange(24).view(2, 12)
ROUNDING = 1e-5
"""Sums of at most 128 products in FP32 in another order, logits of order one."""
SHAPE = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
GPT2 = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 32, "bos_token_id": 0}
MODELS = {
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(**GPT2, eos_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    ),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=False)),
}
TARGETS = {"gpt2": ["c_attn", "c_proj"], "llama": ["q_proj", "v_proj", "down_proj"]}
SAVED = {"gpt2": ["ln_f"], "llama": ["embed_tokens", "lm_head"]}


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    found = {}
    for name, make in MODELS.items():
        torch.manual_seed(1)
        found[name] = tmp_path_factory.mktemp(name)
        make().save_pretrained(found[name])
    return found


def fresh(bases, name):
    return AutoModelForCausalLM.from_pretrained(bases[name], dtype=torch.float32)


def ours_of(bases, name, rslora, dropout, whole):
    net = fresh(bases, name)
    targets = [f"*{target}" for target in TARGETS[name]]
    saved = SAVED[name] if whole else ()
    add_lora(net, 4, 8.0, targets, "keep", rslora=rslora, dropout=dropout, modules_to_save=saved)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for module in adapted_layers(net).values():
            module.lora_B.normal_(std=0.1, generator=generator)
        for module in saved_modules(net).values():
            for param in module.parameters():
                param.add_(torch.randn(param.shape, generator=generator), alpha=0.1)
    return net


KINDS = [
    pytest.param(name, rslora, dropout, whole, id=f"{name}-{'rs' if rslora else 'plain'}-{dropout}-{whole}")
    for name, rslora, dropout, whole in itertools.product(MODELS, (False, True), (0.0, 0.3), (False, True))
]


@pytest.mark.parametrize(("name", "rslora", "dropout", "whole"), KINDS)
def test_peft_reads_ours_and_takes_the_same_step(bases, tmp_path, name, rslora, dropout, whole):
    from peft import PeftModel

    ours = ours_of(bases, name, rslora, dropout, whole)
    save_adapter(ours, tmp_path, base_model=str(bases[name]))
    theirs = PeftModel.from_pretrained(fresh(bases, name), tmp_path, is_trainable=True)
    with torch.no_grad():
        assert (theirs.eval()(IDS).logits - ours.eval()(IDS).logits).abs().max() < ROUNDING
    grads = []
    for net in (ours.train(), theirs.train()):
        torch.manual_seed(7)  # the same zeros: one draw for each layer, in their order
        net(IDS, labels=IDS).loss.backward()
        named = {n.replace(".default", ""): p.grad for n, p in net.named_parameters() if p.grad is not None}
        grads.append({n.removeprefix("base_model.model.").replace(".modules_to_save", ""): g for n, g in named.items()})
    mine, other = grads
    other = {n.removesuffix(".weight") if ".lora_" in n else n: g for n, g in other.items()}
    assert mine.keys() == other.keys()
    worst = max((mine[n] - other[n]).abs().max() for n in mine)
    assert worst < ROUNDING, worst


@pytest.mark.parametrize(("name", "rslora", "dropout", "whole"), KINDS)
@torch.no_grad()
def test_we_read_pefts_and_merge_alike(bases, tmp_path, name, rslora, dropout, whole):
    from peft import LoraConfig, get_peft_model

    settings = LoraConfig(
        r=4, lora_alpha=8, target_modules=TARGETS[name], task_type="CAUSAL_LM", init_lora_weights=False,
        use_rslora=rslora, lora_dropout=dropout, modules_to_save=SAVED[name] if whole else None,
        fan_in_fan_out=name == "gpt2",
    )  # fmt: skip
    theirs = get_peft_model(fresh(bases, name), settings).eval()
    for n, param in theirs.named_parameters():
        if "modules_to_save" in n:
            param.add_(torch.randn(param.shape), alpha=0.1)
    theirs.save_pretrained(tmp_path)
    ours = HFModel(fresh(bases, name), "causal_lm")
    load_adapter(ours, tmp_path, base="keep")
    ours.eval()
    logits = theirs(IDS).logits
    assert (ours.net(IDS).logits - logits).abs().max() < ROUNDING
    save_adapter(ours, tmp_path / "again", base_model=str(bases[name]))
    kept = json.loads((tmp_path / "again" / "adapter_config.json").read_text())
    assert (kept["lora_alpha"], kept["use_rslora"], kept["lora_dropout"]) == (8, rslora, dropout)
    merge_lora(ours)
    assert (ours.net(IDS).logits - logits).abs().max() < ROUNDING
    assert not saved_modules(ours)
    assert all(param.requires_grad for param in ours.parameters())


def test_what_trains(bases):
    net = ours_of(bases, "llama", False, 0.0, whole=True)
    trained = {name for name, param in net.named_parameters() if param.requires_grad}
    assert {"model.embed_tokens.weight", "lm_head.weight"} < trained
    assert all(".lora_" in name for name in trained - {"model.embed_tokens.weight", "lm_head.weight"})


def test_a_module_that_trains_as_a_whole_has_no_adapter(bases):
    net = fresh(bases, "llama")
    names = add_lora(net, 4, base="keep", modules_to_save=["layers.0"])
    assert names
    assert not any("layers.0." in name for name in names)


def test_tied_weights_are_saved_together(tmp_path):
    from peft import PeftModel

    torch.manual_seed(2)
    net = LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=True))
    net.save_pretrained(tmp_path / "base")
    with pytest.raises(ConfigError, match="shares its weight") as caught:
        add_lora(net, 4, base="keep", modules_to_save=["embed_tokens"])
    assert caught.value.problems[0].try_ == 'modules_to_save = ["embed_tokens", "lm_head"]'
    add_lora(net, 4, base="keep", modules_to_save=["embed_tokens", "lm_head"])
    with torch.no_grad():
        net.lm_head.weight.add_(0.1)
        save_adapter(net, tmp_path / "adapter", base_model=str(tmp_path / "base"))
        theirs = PeftModel.from_pretrained(
            AutoModelForCausalLM.from_pretrained(tmp_path / "base"), tmp_path / "adapter"
        )
        assert (theirs(IDS).logits - net(IDS).logits).abs().max() < ROUNDING
        again = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
        load_adapter(again, tmp_path / "adapter", base="keep")
        assert (again(IDS).logits - net(IDS).logits).abs().max() < ROUNDING


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"dropout": 1.0}, "dropout 1.0"),
        ({"modules_to_save": ["embed_token"]}, "'embed_token'"),
        ({"base": "fp8"}, "Conv1D"),
        ({"targets": ["*.q_proj"]}, "'*.q_proj'"),
    ],
)
def test_what_cannot_be_is_told_and_changes_nothing(bases, options, text):
    net = fresh(bases, "gpt2")
    with pytest.raises(ConfigError) as caught:
        add_lora(net, **{"base": "keep"} | options)
    (problem,) = caught.value.problems
    assert text in problem.got
    assert problem.try_
    assert not adapted_layers(net)
    assert all(param.requires_grad for param in net.parameters())
    if "targets" in options:
        assert "*c_attn" in problem.try_


OTHER_KINDS = (
    *(
        {"init_lora_weights": name}
        for name in ("pissa", "pissa_niter_4", "corda", "olora", "OLoRA", "loftq", "lora_ga")
    ),
    *(
        {"alora_invocation_tokens": [5]},
        {"lora_bias": True},
        {"layer_replication": [[0, 2], [1, 2]]},
        {"use_qalora": True},
    ),
    *({"lora_dropout": 2}, {"modules_to_save": "lm_head"}, {"use_dora": True}),
)


@pytest.mark.parametrize("change", OTHER_KINDS, ids=str)
def test_configs_that_cannot_be(bases, tmp_path, change):
    save_adapter(ours_of(bases, "gpt2", False, 0.0, False), tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text()) | change
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="Unsupported kind"):
        load_adapter(fresh(bases, "gpt2"), tmp_path, base="keep")


def test_dropout_leaves_evaluation_alone():
    layer = nn.Sequential(nn.Linear(32, 8))
    add_lora(layer, 4, base="keep", dropout=0.5)
    nn.init.normal_(layer[0].lora_B)
    x = torch.randn(64, 32)
    layer.eval()
    assert (layer(x) == layer(x)).all()
    layer.train()
    assert (layer(x) != layer(x)).any()
