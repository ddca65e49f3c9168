"""hubert and wavlm themselves: convolutions with a parametrized weight (weight norm), positions of a kind of their own,
raw audio. Converted, copied, adapted, trained a step."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from tilewright.optim.adam import DeepSeekAdam
from tilewright.precision.convert import convert, evaluating
from tilewright.precision.lora.lora import add_lora, merge_lora
from tilewright.precision.lora.uncalled_layers import never_called

FAMILIES = ("Hubert", "WavLM")
SHAPE = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96, "vocab_size": 32,
    "conv_dim": (16, 16), "conv_kernel": (10, 3), "conv_stride": (5, 2), "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4, "hidden_dropout": 0.0, "feat_proj_dropout": 0.0,
    "attention_dropout": 0.0, "activation_dropout": 0.0, "final_dropout": 0.0, "layerdrop": 0.0,
    "apply_spec_augment": False, "num_buckets": 16, "max_bucket_distance": 32, "ctc_loss_reduction": "mean",
}  # fmt: skip
MODES = ("fp32", "bf16_mixed", "hybrid", "pure_fp16", "fp8_tile")
"""Relative difference of logits from FP32 that a mode may have: formats of 8, 11 and 4 bits through two layers."""
NEAR = {"fp32": 1e-5, "bf16_mixed": 0.05, "hybrid": 0.02, "pure_fp16": 0.05, "fp8_tile": 0.25}


def build(family):
    hf = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = getattr(hf, f"{family}Config")(**SHAPE)
    return getattr(hf, f"{family}ForCTC")(config).train()


def audio():
    generator = torch.Generator().manual_seed(1)
    return {
        "input_values": torch.randn(2, 640, generator=generator),
        "labels": torch.randint(1, 32, (2, 5), generator=generator),
    }


def step(model):
    """The loss, and how many parameters moved."""
    before = [param.detach().clone() for param in model.parameters()]
    optimizer = DeepSeekAdam([param for param in model.parameters() if param.requires_grad], lr=1e-2)
    loss = model(**audio()).loss
    loss.backward()
    optimizer.step()
    moved = sum(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    return float(loss), moved


def weight_norms(model):
    return [module for module in model.modules() if parametrize.is_parametrized(module)]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", FAMILIES)
def test_converted_it_computes_the_same_and_learns(family, mode):
    model = build(family)
    assert weight_norms(model), "what the test is about"
    names = [name for name, _ in model.named_parameters()]
    want = model(**audio()).logits.detach()
    convert(model, mode)
    got = model(**audio()).logits.detach().float()
    assert float((got - want).norm() / want.norm()) < NEAR[mode]
    assert [name for name, _ in model.named_parameters()] == names
    losses = [step(model) for _ in range(6)]
    assert losses[0][1] > 0.8 * len(names)
    assert losses[-1][0] < losses[0][0]
    with evaluating(model), torch.no_grad():
        assert model(**audio()).logits.isfinite().all()


@pytest.mark.parametrize("mode", ["bf16_mixed", "fp8_tile"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_copy_is_a_model_of_its_own(family, mode):
    """Pickles of parametrized modules are refused by torch itself, which names `state_dict`."""
    model = convert(build(family), mode)
    step(model)
    other, third = copy.deepcopy(model), convert(build(family), mode)
    third.load_state_dict(model.state_dict())
    before = model(**audio()).logits.detach()
    for one in (other, third):
        assert torch.equal(one(**audio()).logits, before)
        step(one)
        assert torch.equal(model(**audio()).logits, before)
        assert not torch.equal(one(**audio()).logits, before)
    for module in weight_norms(model):
        parametrize.remove_parametrizations(module, "weight")
    assert float((model(**audio()).logits - before).abs().max()) < 1e-2 * float(before.abs().max())


@pytest.mark.parametrize("base", ["keep", "fp8"])
@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_train_and_merge(family, base, caplog):
    model = build(family)
    frozen = {name: param.detach().clone() for name, param in model.named_parameters()}
    with caplog.at_level("WARNING", "tilewright"):
        names = add_lora(model, rank=4, alpha=8.0, base=base)
    apart = family == "WavLM"  # whose attention calls none of its projections
    assert not any("_proj" in name and "attention" in name for name in names) if apart else True
    assert ("takes their weights without calling them" in caplog.text) == apart
    with torch.no_grad():
        for name, param in model.named_parameters():
            if "lora_B" in name:
                param.normal_(std=0.05)
    _, moved = step(model)
    assert moved == sum(param.requires_grad for param in model.parameters())
    want = model.eval()(**audio()).logits.detach()
    merge_lora(model)
    got = model(**audio()).logits.detach()
    assert float((got - want).norm() / want.norm()) < (1e-5 if base == "keep" else 0.1)
    assert set(dict(model.named_parameters())) == set(frozen)
    changed = [name for name, param in model.named_parameters() if not torch.equal(param, frozen[name])]
    assert changed
    assert all(isinstance(model.get_submodule(name.rpartition(".")[0]), nn.Linear) for name in changed)


class Reader(nn.Module):
    """Takes a weight, calls a layer, does both, asks for a dtype, and writes at the start."""

    def __init__(self):
        super().__init__()
        for name in ("taken", "called", "both", "asked"):
            setattr(self, name, nn.Linear(4, 4))
        self.reset_parameters()

    def reset_parameters(self):
        nn.init.zeros_(self.called.weight)

    def forward(self, x):
        x = nn.functional.linear(x, self.taken.weight)
        x = self.both(x) if self.training else nn.functional.linear(x, self.both.weight)
        return self.asked(self.called(x.to(self.asked.weight.dtype)))


class Inherits(Reader):
    def forward(self, x):
        return super().forward(x)


@pytest.mark.parametrize("kind", [Reader, Inherits])
@pytest.mark.parametrize("mode", [None, "bf16_mixed", "fp8_tile"])
def test_layers_that_are_never_called_get_no_adapter(kind, mode):
    model = nn.Sequential(kind(), nn.Linear(4, 4))
    if mode is not None:
        convert(model, mode)
    assert never_called(model) == {"0.taken": kind.__name__}
    assert sorted(add_lora(model, rank=2, base="keep")) == ["0.asked", "0.both", "0.called", "1"]
