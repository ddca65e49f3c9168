"""`torch.func` transforms through whole models: our decoder and one of transformers, in every mode."""

import itertools

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, jvp, vjp, vmap

from tests.models.shapes import KERNELS, make_batch
from tests.models.test_hf_models import make
from tilewright.core.errors import LabelError
from tilewright.models.build import init_weights
from tilewright.models.decoder.config import DecoderConfig
from tilewright.models.decoder.decoder import Decoder
from tilewright.precision.convert import convert
from tilewright.precision.float8.weight_cache import QuantizedWeights
from tilewright.precision.lora.lora import adapted_layers, add_lora
from tilewright.precision.policy.policy import Policy, Rule

WIDE = ["none", "fp32", "tf32", "bf16_mixed", "hybrid", "pure_fp16", "int8"]
FP8 = ["fp8_tile", "fp8_hybrid", "fp8_tensorwise", "kept_fp8", "lora_fp8"]
EPS = {"none": 2.0**-16, "fp32": 2.0**-16, "tf32": 2.0**-8, "lora_fp8": 2.0**-3}
EPS |= dict.fromkeys(("fp8_tile", "kept_fp8"), 2.0**-4)
"""Distance of gradients, of their norm; sums in another order. Other modes: 16-bit roundings at other places, 2^-5.
With tiles of 8 bits some of these become steps of E4M3, 2^-4. With adapters alone nothing of the weights' gradients
averages them out."""
NETS = {
    "dense": {"num_heads": 2, "num_layers": 2, "ffn_dim": 64},
    "grouped": {"num_heads": 4, "num_kv_heads": 2, "num_layers": 1, "ffn_dim": 64},
    "mla": {
        **{"num_heads": 2, "num_layers": 1, "ffn_dim": 64, "attention": "mla", "kv_lora_rank": 24},
        **{"qk_nope_head_dim": 10, "qk_rope_head_dim": 6, "v_head_dim": 12},
    },
    "moe": {"num_heads": 2, "num_layers": 2, "ffn_dim": 64, "num_experts": 3, "num_experts_per_token": 3},
}
"""All experts are chosen: a choice would flip with the last bit."""


def build(net, mode):
    if net == "llama":
        model = make("llama")
    else:
        model = Decoder(DecoderConfig.of(vocab_size=64, dim=32, **NETS[net]), KERNELS)
        init_weights(model, 0)
    if mode == "lora_fp8":
        add_lora(model, 2, kernels=KERNELS)
        for module in adapted_layers(model).values():
            nn.init.constant_(module.lora_B, 0.01)
    policy = {
        "int8": Policy("bf16_mixed", rules=(Rule("*proj", compute="int8"),)),
        "kept_fp8": "fp8_tile",
        "lora_fp8": "fp8_tile",
    }.get(mode, mode)
    if mode != "none":
        convert(model, policy, kernels=KERNELS)
    if mode == "kept_fp8":
        QuantizedWeights(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return model.eval()


class Loss(nn.Module):
    """The loss of a model as a forward."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, batch):
        return self.model.loss(batch).loss_sum.float()


def loss_of(model, params, batch):
    return functional_call(Loss(model), {f"model.{name}": value for name, value in params.items()}, (batch,))


def trained(model):
    return {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}


def by_autograd(model, batch):
    model.zero_grad()
    model.loss(batch).loss_sum.float().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad}


def assert_near(got, want, mode):
    assert got.keys() == want.keys()
    distance = sum((got[name].double() - value.double()).square().sum() for name, value in want.items()).sqrt()
    size = sum(value.double().square().sum() for value in want.values()).sqrt()
    assert distance <= EPS.get(mode, 2.0**-5) * size, f"off by {float(distance / size):.2e} of the norm"


def batch_of(model, rows=2, packed=False):
    vocab = model.config.vocab_size
    batch = make_batch(rows, 16, vocab=vocab)
    if packed:
        batch["segments"] = torch.arange(16).div(6, rounding_mode="floor").expand(rows, 16)
    return batch


def cases(modes, **few):
    """Every net in every mode; those that `few` does not name are slow."""
    for net, mode in itertools.product([*NETS, "llama"], modes):
        yield pytest.param(net, mode, marks=() if mode in few.get(net, ()) else pytest.mark.slow)


@pytest.mark.parametrize(
    ("net", "mode"),
    cases(
        [*WIDE, *FP8],
        dense=[*WIDE, *FP8],
        grouped=["none"],
        mla=["none", "fp8_tile"],
        moe=["none", "bf16_mixed", "fp8_tile"],
        llama=["tf32", "fp8_tile", "lora_fp8"],
    ),
)
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_gradients_are_those_of_backward(net, mode):
    model = build(net, mode)
    batch = batch_of(model, packed=net == "dense")
    want = by_autograd(model, batch)
    params = trained(model)
    assert_near(grad(lambda params: loss_of(model, params, batch))(params), want, mode)
    loss, pull = vjp(lambda params: loss_of(model, params, batch), params)
    assert_near(pull(torch.ones_like(loss))[0], want, mode)
    leaves = {name: value.clone().requires_grad_() for name, value in params.items()}
    loss_of(model, leaves, batch).backward()
    # The same code; but a 16-bit leaf has a gradient in 16 bits, where a 16-bit parameter has one in FP32.
    assert_near({name: leaf.grad for name, leaf in leaves.items()}, want, mode if mode == "pure_fp16" else "none")
    assert_near(by_autograd(model, batch), want, "none")


@pytest.mark.parametrize(
    ("net", "mode"),
    [case for case in cases([*WIDE, *FP8], dense=["none", "tf32", "bf16_mixed", "int8", "fp8_tile"], llama=["kept_fp8"])
     if case.values[0] != "moe"],  # whose rows of each expert depend on the data
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_gradients_of_each_sample(net, mode):
    model = build(net, mode)
    batch, params = batch_of(model, rows=3), trained(model)
    each = vmap(
        grad(lambda params, row: loss_of(model, params, {name: value[None] for name, value in row.items()})),
        in_dims=(None, 0),
    )(params, batch)
    for index in range(3):
        want = by_autograd(model, {name: value[index : index + 1] for name, value in batch.items()})
        assert_near({name: value[index] for name, value in each.items()}, want, mode)


@pytest.mark.parametrize(
    ("net", "mode"), [("dense", "none"), ("dense", "bf16_mixed"), ("grouped", "fp32"), ("moe", "hybrid")]
)
def test_forward_mode_and_second_derivatives(net, mode):
    """Along one direction, against gradients: d loss = <gradient, direction>, also of the gradient's own norm."""
    model = build(net, mode)
    batch, params = batch_of(model), trained(model)
    direction = {name: torch.randn_like(value) for name, value in params.items()}
    loss, change = jvp(lambda params: loss_of(model, params, batch), (params,), (direction,))
    gradient = grad(lambda params: loss_of(model, params, batch))(params)
    want = sum((gradient[name] * direction[name]).sum() for name in params)
    size = (
        sum(gradient[name].square().sum() for name in params).sqrt()
        * sum(value.square().sum() for value in direction.values()).sqrt()
    )
    assert abs(float(change - want)) <= EPS.get(mode, 2.0**-5) * float(size)
    assert loss.isfinite()
    if mode in ("none", "fp32"):
        twice = grad(lambda params: inner(grad(lambda p: loss_of(model, p, batch))(params), direction))(params)
        step = 2.0**-9
        shifted = [
            grad(lambda p: loss_of(model, p, batch))({n: params[n] + sign * step * direction[n] for n in params})
            for sign in (1, -1)
        ]
        differences = {n: (shifted[0][n] - shifted[1][n]) / (2 * step) for n in params}
        near = sum((twice[n] - differences[n]).square().sum() for n in params).sqrt()
        assert near <= 0.1 * sum(value.square().sum() for value in twice.values()).sqrt(), "of a finite difference"


def inner(one, other):
    return sum((one[name] * other[name]).sum() for name in one)


@pytest.mark.parametrize("bad", [-1, 64])
def test_labels_that_are_no_class_are_found_in_transforms_too(bad):
    model = build("dense", "none")
    batch, params = batch_of(model, rows=3), trained(model)
    batch["labels"][2, 5] = bad
    by_rows = vmap(grad(lambda params, row: loss_of(model, params, {n: v[None] for n, v in row.items()})), (None, 0))
    for way in (lambda: grad(lambda params: loss_of(model, params, batch))(params), lambda: by_rows(params, batch)):
        with pytest.raises(LabelError, match=f"{bad} at 37"):
            way()
