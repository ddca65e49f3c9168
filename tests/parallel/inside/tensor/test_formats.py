"""Cut matrices in 16 and 8 bits: gradients, codes of weights, evaluation, formats that move."""

import contextlib
import dataclasses
import math
from functools import partial

import pytest
import torch

from tests.models.shapes import KERNELS, make_batch
from tests.parallel.inside.tensor import cut as cuts
from tests.parallel.inside.tensor.cut import Case, cut, world_of
from tests.parallel.inside.tensor.cut import whole as whole_of
from tests.parallel.steps import microbatches, run
from tests.ranks import of_one_rank, on_ranks
from tilewright.models.decoder.config import DecoderConfig
from tilewright.models.decoder.decoder import Decoder
from tilewright.parallel.inside.tensor.cut_decoder import on_part
from tilewright.parallel.world import World
from tilewright.precision.convert import evaluating, set_mode
from tilewright.precision.float8.linear import float8_layers
from tilewright.precision.policy.policy import Policy

pytestmark = pytest.mark.dist
TILES = DecoderConfig.of(vocab_size=256, dim=128, num_heads=4, head_dim=64, num_layers=2, ffn_dim=256)
"""Parts of two ranks are whole tiles of 128."""


def least_db(got, want):
    """Signal to noise of the worst gradient."""
    found = {}
    for name, grad in want.items():
        noise = float((got[name] - grad).square().sum())
        found[name] = 10 * math.log10(float(grad.square().sum()) / max(noise, 1e-300))
    name = min(found, key=found.__getitem__)
    return name, found[name]


def _alone(case, ranks):
    """The step of one process: gradients by name, and the result."""
    seen, result = run(
        whole_of(case), World.alone(), [batch for rank in range(ranks) for batch in microbatches(rank, 2)]
    )
    return seen.grads, result


def _grads(rank, modes):
    cuts.CONFIGS["tiles"] = TILES
    found = []
    for mode, shards, settings in modes:
        case = Case(2, shards, kind="tiles", mode=mode, settings=settings)
        world = world_of(case)
        model = cut(case, world)
        seen, result = run(model, world, microbatches(world.data.rank, 2))
        want, alone = of_one_rank(partial(_alone, case, world.data.size))
        assert seen.dtypes == {torch.float32}
        low = {name for name, param in model.named_parameters() if param.itemsize == 2}
        assert bool(low) == (mode in (STORED, "pure_fp16"))
        for name in low:
            rounded = seen.grads[name].to(torch.bfloat16 if mode == STORED else torch.float16)
            assert not torch.equal(rounded.double(), seen.grads[name]), f"{name}: sums are kept in FP32"
        found.append((mode, *least_db(seen.grads, want), abs(result.loss / alone.loss - 1), result.loss))
    return found


STORED = Policy("bf16_mixed", parameters="bf16", device_type="cpu")
"""Weights in BF16, without an FP32 copy."""


MODES = [("tf32", 1, {}), ("hybrid", 1, {}), ("fp8_tile", 1, {})]
FULL = {"activation_checkpoint": "full"}
BOUNDS = {"tf32": 60.0, "bf16_mixed": 34.0, STORED: 34.0, "hybrid": 34.0, "pure_fp16": 34.0, "fp8_tile": 22.0}
"""Decibels: ten bits in TF32, 2 % of the norm in 16 bits; FP8 where a sum has another last bit."""


@pytest.mark.support("bf16", "tensor")
@pytest.mark.support("fp16", "tensor")
@pytest.mark.support("fp8", "tensor")
@pytest.mark.support("inputs", "tensor")
@pytest.mark.parametrize(
    ("world", "modes"),
    [
        (2, [("bf16_mixed", 1, {}), (STORED, 1, {}), ("pure_fp16", 1, FULL), ("fp8_tile", 1, FULL)]),
        pytest.param(2, [*MODES, ("fp8_tile", 1, FULL | {"checkpoint_inputs": "fp8"})], marks=pytest.mark.slow),
        pytest.param(
            4,
            [("bf16_mixed", 2, {}), (STORED, 2, FULL), ("pure_fp16", 2, {}), ("fp8_tile", 2, FULL)],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_gradients_of_narrow_formats(world, modes):
    of_ranks = on_ranks(world, _grads, modes)
    for found in zip(*of_ranks, strict=True):
        assert len({loss for *_, loss in found}) == 1, "all ranks have the same loss"
        for mode, name, decibels, loss, _ in found:
            print(f"{mode}: {name} {decibels:.1f} dB, loss {loss:.2g}")
            assert decibels >= BOUNDS[mode], f"{mode}: {name} has {decibels:.1f} dB"
            assert loss < 2e-3


def _codes(rank):
    cuts.CONFIGS["tiles"] = TILES
    case = Case(2, kind="tiles", mode="fp8_tile")
    model, wholes = cut(case, world_of(case)), float8_layers(whole_of(case))
    layers, found = float8_layers(model), 0
    for name, layer in layers.items():
        with on_part(layer):
            codes = layer.quantized_weight().qdata
            rows, columns = codes.shape
        want = wholes[name].quantized_weight().qdata
        by_rows = rows < want.shape[0]
        part = want[rank * rows : (rank + 1) * rows] if by_rows else want[:, rank * columns : (rank + 1) * columns]
        assert torch.equal(codes.view(torch.uint8), part.contiguous().view(torch.uint8)), name
        found += 1
    return found


@pytest.mark.support("fp8", "tensor")
def test_codes_of_weights_are_those_of_one_process():
    assert on_ranks(2, _codes) == [14, 14]


def _switched(rank, shards):
    """FP32 evaluation, and a switch of formats, between passes; logits and losses of all classes."""
    case = Case(2, shards, mode="fp8_tile")
    model, reference = cut(case, world_of(case)), whole_of(case)
    batch = make_batch(2, 12, seed=7)
    ids, outs = batch["input_ids"], []
    with torch.no_grad():
        for mode in ("fp8_tile", "bf16_mixed", "fp32"):
            for each in (model, reference):
                set_mode(each, mode)
            with evaluating(model), evaluating(reference):
                pairs = [(each.logits_at(ids, ids > 0), each.loss(batch).each) for each in (model, reference)]
                outs += [float((ours - theirs).abs().max()) for ours, theirs in zip(*pairs, strict=True)]
                outs.append(abs(float(model.loss(batch).loss_sum / reference.loss(batch).loss_sum) - 1))
    return outs


@pytest.mark.support("evaluation", "tensor")
@pytest.mark.parametrize(("world", "shards"), [(2, 1), pytest.param(4, 2, marks=pytest.mark.slow)])
def test_formats_move_and_evaluation_is_in_fp32(world, shards):
    for outs in on_ranks(world, _switched, shards):
        assert max(outs) < 2e-6, outs


def test_the_part_is_a_plain_tensor_while_a_layer_runs():
    model = Decoder(dataclasses.replace(TILES, num_layers=1), KERNELS)
    layer = model.model.layers[0].mlp.down_proj
    seen = []
    with contextlib.suppress(ZeroDivisionError), on_part(layer):
        seen.append("weight" in vars(layer))
        raise ZeroDivisionError
    assert seen == [True]
    assert "weight" not in vars(layer)
    assert layer.weight is layer._parameters["weight"]
