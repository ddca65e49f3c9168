"""Bytes that operations keep and move, against sums by hand, and the shares that plans take of them."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.planner.rates import make_machine
from tilewright.models.decoder.block import Block
from tilewright.models.decoder.config import DecoderConfig
from tilewright.models.decoder.layers import rope_angles
from tilewright.ops.kernels import Kernels
from tilewright.planner.model.roofline import FORWARD_SHARE, element_passes
from tilewright.planner.trace.byte_counter import LiveBytes
from tilewright.precision.convert import convert
from tilewright.precision.policy.policy import Policy


def moved(run):
    counted = LiveBytes()
    with counted:
        run()
    return counted.moved


def test_each_operation_counts_what_it_reads_and_writes():
    x, y, halves = torch.ones(10, 4), torch.ones(10, 4), torch.ones(10, 4, dtype=torch.bfloat16)
    assert moved(lambda: x + y) == 3 * 160
    assert moved(lambda: x.add_(y)) == 3 * 160  # its result is read before
    assert moved(lambda: halves.float()) == 80 + 160
    assert moved(lambda: x.exp()) == 2 * 160


def test_views_products_and_empty_tensors_move_nothing():
    x = torch.ones(10, 4)
    assert moved(lambda: x.t().reshape(2, 20)[0].unsqueeze(0)) == moved(lambda: x.t().reshape(2, 20))
    assert moved(lambda: x.view(4, 10)[1:].transpose(0, 1)) == 0
    assert moved(lambda: x @ x.t()) == 0
    assert moved(lambda: torch.empty_like(x)) == 0


def test_a_table_counts_as_much_as_is_taken_from_it():
    table, ids = torch.ones(1000, 4), torch.tensor([3, 5])
    assert moved(lambda: nn.functional.embedding(ids, table)) == 2 * 2 * 4 * 4


def test_an_expanded_tensor_counts_once():
    assert moved(lambda: torch.ones(4).expand(1000, 4).sum()) == moved(lambda: torch.ones(4)) + 16 + 4


def test_attention_moves_nothing_forward_and_backward():
    q = torch.ones(1, 2, 8, 4, requires_grad=True)
    upstream = torch.ones(1, 2, 8, 4)

    def attend():
        out = nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
        torch.autograd.grad(out, q, upstream)

    assert moved(attend) <= 2 * 3 * q.nbytes  # the three gradients are added up


@pytest.mark.parametrize("experts", [0, 8])
def test_an_eager_layer_moves_what_plans_say(experts):
    more = (
        {"num_experts": experts, "num_experts_per_token": 2, "expert_dim": 256, "num_dense_layers": 0}
        if experts
        else {}
    )
    config = DecoderConfig(
        vocab_size=512, dim=320, num_layers=1, num_heads=5, num_kv_heads=5, head_dim=64, ffn_dim=864, **more
    )
    kernels = Kernels(make_machine(), {"linear": "native"}, compile=False)
    layer = nn.ModuleDict({"layers": nn.ModuleList([Block(config, 0, kernels)])})
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.02)
    convert(layer, Policy(mode="bf16_mixed", device_type="cpu"), kernels=kernels)
    positions = torch.arange(512).expand(2, -1)
    cos, sin = rope_angles(positions, config.rope_dim, config.rope_theta)
    x = torch.randn(2, 512, config.dim, dtype=torch.bfloat16, requires_grad=True)
    counted = LiveBytes()
    with counted:
        out = layer["layers"][0](x, cos, sin, torch.zeros_like(positions, dtype=torch.int32))[0]
        kept, forward = counted.live, counted.moved
        torch.autograd.grad(out, [x, *layer.parameters()], torch.ones_like(out), allow_unused=True)
    assert forward / counted.moved == pytest.approx(FORWARD_SHARE, rel=0.15)
    assert counted.moved / kept == pytest.approx(element_passes(fused=False), rel=0.15)


@pytest.mark.slow
def test_what_is_compiled_counts_as_it_does_eagerly_and_the_counter_itself_is_not_compiled(recwarn):
    def layer(x):
        return (x.sin() + 1).exp()

    compiled, x = torch.compile(layer, backend="eager"), torch.ones(512, 64)
    assert moved(lambda: compiled(x)) == moved(lambda: layer(x))
    assert not [warning for warning in recwarn if "byte_counter" in str(warning.message)]


def test_checkpointing_moves_the_forward_pass_again():
    weight = torch.ones(64, requires_grad=True)

    def layer(x):
        return (x * weight).sin().exp()

    x = torch.ones(512, 64)
    once = moved(lambda: layer(x))
    plain = moved(lambda: layer(x).sum().backward())
    again = moved(lambda: checkpoint(layer, x, use_reentrant=False).sum().backward())
    assert plain + once <= again <= plain + 1.1 * once
