"""Matmuls that move between formats at run time: nothing is compiled again, and each call does what it was reported."""

import copy
import itertools
import random

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

from tilewright.core.config.sections.model import ModelSection
from tilewright.core.errors import ConfigError, HardwareError
from tilewright.core.hardware import detect_machine
from tilewright.formats.scaling import TENSORWISE
from tilewright.formats.tiled import FP8_BLOCK
from tilewright.models.build import build_model, init_weights
from tilewright.ops.kernels import Kernels
from tilewright.precision.convert import convert, evaluating, set_mode
from tilewright.precision.float8.gemm.input_cache import InputShare
from tilewright.precision.float8.gemm.weight_store import new_store
from tilewright.precision.float8.linear import Float8Linear, new_switch
from tilewright.precision.float8.weight_cache import QuantizedWeights
from tilewright.precision.policy.gemm_formats import GEMM_FORMATS, GEMM_NAMES, Gemms
from tilewright.precision.policy.policy import Policy, Rule

KERNELS = Kernels(detect_machine("cpu"), compile=False)
FORMATS = ("fp8_tile", "bf16", "fp32")
EVERY = [Gemms.of(*names) for names in itertools.product(FORMATS, repeat=3)]


def layers_of(model):
    return [module for module in model.modules() if isinstance(module, Float8Linear)]


def one_layer(gemms, keep="value"):
    torch.manual_seed(0)
    layer = nn.Linear(200, 72)
    rule = Rule(**dict(zip(GEMM_NAMES, gemms.names, strict=True)))
    model = nn.Sequential(layer)
    convert(model, Policy("fp8_tile", (rule,), keep=keep), kernels=KERNELS)
    return model


def gradients(model, x):
    x = x.detach().requires_grad_()
    out = model(x)
    grads = torch.autograd.grad(out.float().square().sum(), [x, *model.parameters()])
    return [out.detach(), *grads]


@pytest.mark.parametrize("gemms", [g for g in EVERY if g.any_scaled], ids=str)
@pytest.mark.parametrize("managed", [False, True])
def test_a_moved_layer_equals_one_converted_so(gemms, managed):
    """Bit for bit, although the converted one keeps its input in another way."""
    x = torch.randn(130, 200, generator=torch.Generator().manual_seed(1)).bfloat16()
    moved, static = one_layer(Gemms.all("fp8_tile")), one_layer(gemms, keep="qdata")
    if managed:
        QuantizedWeights(moved, torch.optim.SGD(moved.parameters()))
    moved[0].set_gemms(gemms, power_of_two=True)
    assert moved[0].gemms == gemms
    assert (moved[0].weight_store is not None) == managed
    for mine, theirs in zip(gradients(moved, x), gradients(static, x), strict=True):
        assert torch.equal(mine, theirs)


def test_an_input_in_fp32_is_kept_so():
    x = torch.randn(130, 200)
    model = one_layer(Gemms.all("fp8_tile"))
    model[0].set_gemms(Gemms.all("fp32"))
    out, dx, dw, _ = gradients(model, x)
    wide = x @ model[0].weight.T + model[0].bias
    assert torch.allclose(out, wide, rtol=2**-8, atol=1e-6)  # the layer's result is BF16
    dy = 2 * out
    assert torch.allclose(dx, dy @ model[0].weight, rtol=1e-4, atol=1e-4)
    assert torch.allclose(dw, dy.T @ x, rtol=1e-4, atol=1e-3)


def test_counts_say_what_ran():
    model = one_layer(Gemms.all("fp8_tile"))
    layer, x = model[0], torch.randn(8, 200, requires_grad=True)
    model(x).sum().backward()
    layer.set_gemms(Gemms.of("bf16", "fp8_tile", "fp32"))
    for _ in range(2):
        model(x).sum().backward()
    with torch.no_grad():
        model(x)
    checkpoint(model, x, use_reentrant=False).sum().backward()  # runs forward twice
    assert layer.executed() == {
        "fprop": {"fp8_tile": 1, "bf16": 5},
        "dgrad": {"fp8_tile": 4},
        "wgrad": {"fp8_tile": 1, "fp32": 3},
    }
    layer.reset_executed()
    model(torch.randn(8, 200)).sum().backward()  # nobody wants dx
    assert layer.executed() == {"fprop": {"bf16": 1}, "dgrad": {}, "wgrad": {"fp32": 1}}


def test_formats_and_counts_are_no_part_of_the_state_and_stay_on_the_host():
    model = one_layer(Gemms.all("fp8_tile"))
    assert list(model.state_dict()) == ["0.weight", "0.bias"]
    twin = copy.deepcopy(model)
    twin[0].set_gemms(Gemms.all("bf16"))
    assert model[0].gemms == Gemms.all("fp8_tile")
    assert model[0].formats.tolist() == [GEMM_FORMATS.index("fp8_tile")] * 3
    assert model.to("meta")[0].formats.device.type == "cpu"
    with torch.device("meta"), torch.inference_mode():
        switch = new_switch(Gemms.all("bf16"))
    assert not switch.counts.is_inference()
    assert switch.formats.device.type == "cpu"


def test_a_layer_that_keeps_codes_cannot_move_its_weight_gradient():
    model = one_layer(Gemms.all("fp8_tile"), keep="qdata")
    model[0].set_gemms(Gemms.of("bf16", "fp32", "fp8_hybrid"))
    with pytest.raises(ConfigError, match="Weight gradient of this layer must stay in FP8") as error:
        model[0].set_gemms(Gemms.of("fp8_tile", "fp8_tile", "bf16"))
    assert 'keep="value"' in str(error.value)
    assert model[0].gemms == Gemms.of("bf16", "fp32", "fp8_hybrid")  # as before
    set_mode(model, Policy("fp8_tile", (Rule(wgrad="bf16"),), device_type="cpu"))  # at conversion it can
    assert model[0].gemms.wgrad.name == "bf16"
    assert model[0].keep_value


def test_the_kind_of_scale_is_settled_at_conversion():
    model = one_layer(Gemms.all("fp8_tile"))
    for gemms, powers in ((Gemms.all("fp8_tensorwise"), True), (Gemms.all("fp8_tile"), False)):
        with pytest.raises(ConfigError, match="Scale kind cannot change after conversion"):
            model[0].set_gemms(gemms, power_of_two=powers)
    whole = one_layer(Gemms.all("fp8_tensorwise"))
    whole[0].set_gemms(Gemms.all("bf16"))
    whole[0].set_gemms(Gemms.all("fp8_tensorwise"))
    assert whole[0].operand_formats.weight.tile == TENSORWISE


def test_a_strict_layer_refuses_to_be_moved_to_what_is_emulated():
    layer = Float8Linear(8, 8)
    layer.kernels = KERNELS
    layer.configure(Gemms.all("bf16"), power_of_two=True, keep="value", strict=True)
    layer.set_gemms(Gemms.all("fp32"))
    with pytest.raises(HardwareError, match=r"precision\.strict"):
        layer.set_gemms(Gemms.of("bf16", "fp8_tile", "bf16"))
    assert layer.gemms == Gemms.all("fp32")


def test_evaluation_gives_moved_layers_their_formats_back():
    model = one_layer(Gemms.all("fp8_tile"))
    layer, formats = model[0], model[0].formats
    layer.set_gemms(Gemms.of("bf16", "fp32", "fp8_tile"))
    with evaluating(model):
        assert not isinstance(model[0], Float8Linear)
    assert layer.gemms == Gemms.of("bf16", "fp32", "fp8_tile")
    assert layer.formats is formats


def test_forced_kernels_are_used_inside_the_operators(monkeypatch):
    seen = []

    def noting(self, a, b, bias_N=None, *, out_dtype):
        seen.append(self.choices["tile_gemm", "cpu", out_dtype, "tiles"].candidate.name)
        return self._find("tile_gemm", "cpu", out_dtype, "tiles")(a, b, bias_N, out_dtype)

    monkeypatch.setattr(Kernels, "tile_gemm", noting)
    model = one_layer(Gemms.all("fp8_tile"))
    model[0].kernels = Kernels(detect_machine("cpu"), {"tile_gemm": "ref"})
    gradients(model, torch.randn(8, 200))
    assert seen == ["ref"] * 3


def test_shared_copies_go_with_their_last_reader():
    share, made = InputShare(readers=2), []
    x = torch.randn(4)
    first = share.copies_of(x, (), lambda: made.append(1) or object())
    assert share.copies_of(x, (), lambda: made.append(1) or object()) is first
    share.copies_of(x, (), lambda: made.append(1) or object())
    assert len(made) == 2


def test_operators_pass_torchs_own_checks():
    """Fake tensors by torch.library.opcheck. Its check of the schema would find that counts are written, which no
    result depends on; so by hand: nothing else is, and the first call is as the second."""
    gemms = Gemms.of("fp8_tile", "bf16", "fp32")
    switch = new_switch(gemms)
    x, weight, bias = torch.randn(70, 200), torch.randn(40, 200), torch.randn(40)
    store = new_store(weight, FP8_BLOCK)
    spec = KERNELS.spec
    state = (store, switch.formats, switch.counts, switch.known)
    forward = (x, weight, bias, None, None, None, *state, torch.bfloat16, spec)
    _check_operator(torch.ops.tilewright.tile_fprop.default, forward, (store, switch.counts))
    for wants in ((True, True), (True, False), (False, True)):
        backward = (
            torch.randn(70, 40), x, None, None, None, weight, *state, torch.bfloat16, *wants, spec,
        )  # fmt: skip
        _check_operator(torch.ops.tilewright.tile_bprop.default, backward, (store, switch.counts))


def _check_operator(operator, args, written):
    tensors = [arg for arg in args if isinstance(arg, torch.Tensor) and not any(arg is other for other in written)]
    before = [tensor.clone() for tensor in tensors]
    torch.library.opcheck(operator, args, test_utils=("test_faketensor",))
    first, second = torch.utils._pytree.tree_leaves(operator(*args)), torch.utils._pytree.tree_leaves(operator(*args))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True))


def decoder(keep):
    model = build_model(ModelSection(dim=128, num_layers=2, num_heads=2), 300, KERNELS, "cpu")
    init_weights(model, 0)
    convert(model, Policy("fp8_tile", keep=keep), kernels=KERNELS)
    QuantizedWeights(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return model.train()


def plain_stack(keep):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 128), nn.LayerNorm(128), nn.Linear(128, 64))
    convert(model, Policy("fp8_tile", keep=keep), kernels=KERNELS)
    return model


def decoder_backward(model):
    ids = torch.randint(0, 300, (3, 65), generator=torch.Generator().manual_seed(0))
    out = model.loss({"input_ids": ids[:, :-1], "labels": ids[:, 1:].contiguous()})
    (out.loss_sum / out.count).backward()
    return out.loss_sum.detach()


def plain_backward(model):
    x = torch.randn(96, 128, generator=torch.Generator().manual_seed(0))
    loss = model(x).float().square().mean()
    loss.backward()
    return loss.detach()


SWITCHES = 24


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("keep", ["qdata", "value"])
def test_blocks_are_compiled_once_for_all_formats(keep, recompute):
    """Layers that keep codes have norms and SwiGLU that quantise; the others quantise for themselves."""
    eager, compiled = decoder(keep), decoder(keep)
    assert (eager.blocks[0].input_layernorm.quantizing is None) == (keep == "value")
    eager.activation_checkpoint = compiled.activation_checkpoint = recompute
    torch.compiler.reset()
    for block in compiled.blocks:
        block.compile(fullgraph=True)
    switch_and_compare(eager, compiled, decoder_backward)


def test_a_plain_model_is_compiled_once_for_all_formats():
    eager, model = plain_stack("value"), plain_stack("value")
    torch.compiler.reset()
    model.compile(fullgraph=True)
    switch_and_compare(eager, model, plain_backward)


def switch_and_compare(eager, compiled, backward):
    """Random formats for every layer, again and again; loss, gradients and counts as in eager mode."""
    backward(compiled)
    draw = random.Random(0)
    for layer in layers_of(compiled):
        layer.reset_executed()
    graphs = counters["stats"]["unique_graphs"]
    assert graphs > 0
    with torch.compiler.set_stance("fail_on_recompile"):
        for _ in range(SWITCHES):
            for layers in zip(layers_of(eager), layers_of(compiled), strict=True):
                names = [draw.choice(FORMATS) for _ in GEMM_NAMES]
                names[2] = names[2] if layers[0].keep_value else "fp8_tile"
                for layer in layers:
                    layer.set_gemms(Gemms.of(*names), power_of_two=True)
            eager.zero_grad()
            compiled.zero_grad()
            assert backward(compiled).item() == pytest.approx(backward(eager).item(), rel=2e-3)
            for (name, mine), theirs in zip(compiled.named_parameters(), eager.parameters(), strict=True):
                # Fused loops round to BF16 in fewer places, so some operands fall on the other side of an 8-bit step.
                assert torch.cosine_similarity(mine.grad.flatten(), theirs.grad.flatten(), dim=0) > 0.98, name
    assert counters["stats"]["unique_graphs"] == graphs
    for mine, theirs in zip(layers_of(compiled), layers_of(eager), strict=True):
        assert mine.executed() == theirs.executed()


def test_experts_that_were_set_apart_run_one_by_one():
    torch.manual_seed(0)
    section = ModelSection(dim=128, num_layers=2, num_heads=2, num_experts=4)
    model = build_model(section, 300, KERNELS, "cpu")
    init_weights(model, 0)
    convert(model, Policy("fp8_tile", keep="value"), kernels=KERNELS)
    model.train()
    together = decoder_backward(model)
    moe = next(block.mlp for block in model.blocks if block.is_moe)
    expert = moe.experts[0]
    for layer in expert.children():
        layer.reset_executed()
    expert.up_proj.set_gemms(Gemms.all("bf16"))
    assert decoder_backward(model).item() == pytest.approx(together.item(), rel=1e-2)
    assert expert.up_proj.executed() == {"fprop": {"bf16": 1}, "dgrad": {"bf16": 1}, "wgrad": {"bf16": 1}}
    expert.up_proj.set_gemms(Gemms.all("fp8_tile"))
    decoder_backward(model)
    assert expert.down_proj.executed() == {name: {"fp8_tile": 2} for name in GEMM_NAMES}
