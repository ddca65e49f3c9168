"""Weights gathered as codes: those of the whole matrix at any cut; losses and weights of gathers as they are, bit for
bit; bytes; formats that leave 8 bits."""

import logging

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.draws import examples
from tests.models.shapes import KERNELS, make_batch
from tests.parallel.steps import build, groups_of, microbatches, world_of
from tests.ranks import on_ranks
from tilewright.core.config.recipe import ParallelSection
from tilewright.formats.quantize import quantize
from tilewright.formats.tiled import FP8_BLOCK
from tilewright.models.build import init_weights
from tilewright.models.decoder.config import DecoderConfig
from tilewright.models.decoder.decoder import Decoder
from tilewright.optim.clip import GradClip
from tilewright.parallel.communicate import fsdp_exchanges
from tilewright.parallel.communicate.coded_weights import EXACT, GatheredPart
from tilewright.parallel.communicate.gradient_sync import GradientSync
from tilewright.parallel.shard import Sharding, reshard, shard
from tilewright.precision.convert import convert, evaluating, set_mode
from tilewright.precision.policy.policy import Policy
from tilewright.precision.policy.rules import Rule
from tilewright.training.executor.evaluate import evaluate
from tilewright.training.executor.standard import StandardExecutor

AS_READ, CODED = ParallelSection(), ParallelSection(param_gather="fp8")
WIDE = DecoderConfig.of(
    vocab_size=61, dim=128, num_layers=2, num_heads=4, num_kv_heads=2, ffn_dim=256, tie_embeddings=False
)
"""Of two ranks some matrices are cut at a multiple of 128 rows, others inside of a tile."""

# ---- codes ----


def drawn(rows, columns, seed):
    """Tiles of very different sizes, some of zeros, some with an element that is not finite."""
    generator = torch.Generator().manual_seed(seed)
    grid = -(-rows // 128), -(-columns // 128)
    sizes = 2.0 ** torch.randint(-140, 120, grid, generator=generator).double()
    sizes[torch.rand(grid, generator=generator) < 0.1] = 0.0
    sizes = sizes.repeat_interleave(128, 0).repeat_interleave(128, 1)[:rows, :columns]
    x_MK = (torch.randn(rows, columns, generator=generator).double() * sizes).float()
    for _ in range(int(torch.randint(0, 3, (), generator=generator))):
        row, column = (int(torch.randint(0, size, (), generator=generator)) for size in (rows, columns))
        x_MK[row, column] = (torch.nan, torch.inf, -torch.inf)[seed % 3]
    return x_MK


def gathered(x_MK, ranks, dtype):
    """(codes, values) of all rows, as ranks encode their parts and decode each other's."""
    rows, columns = -(-len(x_MK) // ranks), x_MK.shape[1]
    padded = torch.zeros(rows * ranks, columns, dtype=dtype)
    padded[: len(x_MK)] = x_MK
    piece, parts = GatheredPart(rows * columns, dtype, (rows, columns)), padded.split(rows)
    amax = None
    if not piece.is_even:
        amax = torch.stack([piece.amax(part, rank, ranks) for rank, part in enumerate(parts)]).amax(0)
    codes, values = [], []
    for rank, part in enumerate(parts):
        sent = piece.pack(part, rank, amax, KERNELS)
        assert len(sent) == piece.sent_bytes
        values.append(torch.full((rows, columns), 7.0, dtype=dtype))
        piece.unpack(sent, rank, values[-1])
        codes.append(sent[: piece.numel].view(rows, columns))
    return torch.cat(codes)[: len(x_MK)], torch.cat(values)[: len(x_MK)]


@examples(60)
@given(st.integers(1, 700), st.integers(1, 300), st.integers(1, 5), st.sampled_from(EXACT), st.integers(0, 1000))
def test_codes_are_those_of_the_whole_matrix_at_any_cut(rows, columns, ranks, dtype, seed):
    x_MK = drawn(rows, columns, seed).to(dtype)
    want = quantize(x_MK, FP8_BLOCK)
    codes_MK, value_MK = gathered(x_MK, ranks, dtype)
    assert torch.equal(codes_MK, want.qdata)
    value = want.dequantize()
    assert torch.equal(value_MK.float().nan_to_num(nan=-1.0), value.nan_to_num(nan=-1.0)), "also in BF16"
    again = quantize(value_MK, FP8_BLOCK).dequantize()
    assert torch.equal(again.nan_to_num(nan=-1.0), value.nan_to_num(nan=-1.0)), "a layer has these values"


@pytest.mark.parametrize("rows", [128, 256, 129, 127, 1])
def test_scales_are_agreed_on_only_where_a_tile_is_cut(rows):
    piece = GatheredPart(rows * 200, torch.float32, (rows, 200))
    assert piece.is_even == (rows % 128 == 0)
    assert piece.sent_bytes <= rows * 200 + 2 * (rows // 128 + 2)


# ---- runs ----


def made(world, section, kind="gqa", mode="fp8_tile", rules=(), sharding=None, parameters="", settings=()):
    """A sharded model whose gathers are those of the section."""
    if kind == "wide":
        model = Decoder(WIDE, KERNELS)
        init_weights(model, 0)
    else:
        model = build(kind)
    convert(model, Policy(mode, rules, device_type="cpu", parameters=parameters), kernels=KERNELS)
    for name, value in dict(settings).items():
        setattr(model, name, value)
    shard(model.train(), model.layers, world.fsdp_mesh, sharding or Sharding())
    GradientSync.attached(world, section, KERNELS, model)
    return model


def steps(model, world, rank, number=2, **options):
    """Losses of some steps, whole weights after them, and bytes gathered by format."""
    params = [param for param in model.parameters() if param.requires_grad]
    executor = StandardExecutor(
        model, torch.optim.SGD(params, lr=0.1), clip=GradClip(1.0), **groups_of(world), **options
    )
    world.traffic.take()
    losses = [executor.step(microbatches(rank, 2), 0.1).loss for _ in range(number)]
    sent = {}
    for (_, operation, wire), one in world.traffic.take().items():
        if operation == "all_gather":
            sent[wire] = sent.get(wire, 0) + one.sent_bytes
    return losses, {name: param.full_tensor() for name, param in model.named_parameters()}, sent


def same(first, other):
    """Whether losses and weights are, bit for bit."""
    return first[0] == other[0] and all(torch.equal(value, other[1][name]) for name, value in first[1].items())


ODD = (Rule("*q_proj", compute="bf16"), Rule("*o_proj", fprop="fp8_tile", dgrad="bf16", wgrad="fp8_tile"))
CASES = {
    "wide": {"kind": "wide"},
    "hybrid": {"kind": "wide", "mode": "fp8_hybrid"},
    "kept": {"sharding": Sharding(reshard_after_forward=False)},
    "offloaded": {"sharding": Sharding(cpu_offload=True)},
    "several formats": {"kind": "wide", "rules": ODD},
    "recomputed": {"kind": "deepseek", "settings": (("activation_checkpoint", "full"),)},
    "stored in BF16": {"kind": "wide", "parameters": "bf16"},
    "experts": {"kind": "gqa_moe"},
    "llama": {"kind": "llama"},
}


def compared(rank, sizes, cases):
    """Whether a run is that of gathers as they are, and bytes by format of both."""
    world, found = world_of(sizes), {}
    for name, case in cases.items():
        results = [steps(made(world, section, **case), world, rank) for section in (CODED, AS_READ)]
        found[name] = same(*results), results[0][2], results[1][2]
    return found


@pytest.mark.dist
@pytest.mark.support("codes", "shards", "hsdp")
@pytest.mark.parametrize(
    ("sizes", "names"),
    [
        ((1, 2), ("kept", "several formats")),
        pytest.param((1, 3), ("llama",), marks=pytest.mark.slow),
        pytest.param((1, 2), tuple(CASES), marks=pytest.mark.slow),
        pytest.param((1, 3), tuple(CASES), marks=pytest.mark.slow),
        pytest.param((2, 2), ("wide", "several formats", "experts"), marks=pytest.mark.slow),
    ],
)
def test_losses_and_weights_are_those_of_gathers_as_they_are(sizes, names):
    cases = {name: CASES[name] for name in names}
    for found in on_ranks(sizes[0] * sizes[1], compared, sizes, cases):
        for name, (alike, coded, plain) in found.items():
            assert alike, f"{name}: other losses or weights"
            assert coded["fp8"] > 0, name
            assert "fp8" not in plain


@pytest.mark.dist
@pytest.mark.parametrize(
    ("parameters", "wire", "most"), [("", "fp32", 0.26), pytest.param("bf16", "bf16", 0.52, marks=pytest.mark.slow)]
)
def test_a_weight_takes_one_byte(parameters, wire, most):
    """Of matrices of whole tiles: what is left as it is beside them is in both runs."""
    case = {"kind": "wide", "parameters": parameters}
    for found in on_ranks(2, compared, (1, 2), {"wide": case}):
        _, coded, plain = found["wide"]
        share = coded["fp8"] / (plain[wire] - coded.get(wire, 0))
        print(f"{share:.4f} of {wire}")
        assert 1 / {"fp32": 4, "bf16": 2}[wire] < share <= most


def moved(rank):
    """Matmuls that leave 8 bits and come back, FP32 evaluations between steps: against a run of gathers as they are."""
    world, lines = world_of((1, 2)), []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    fsdp_exchanges.log.addHandler(handler)
    batches = {"a": [make_batch(seed=seed) for seed in range(3)]}
    found = []
    for section in (CODED, AS_READ):
        model = made(world, section)
        runs = [steps(model, world, rank, 1)]
        losses = [evaluate(model, batches, fp32=fp32)["a"].loss for fp32 in (False, True, False, True)]
        with torch.no_grad():
            model.loss(make_batch())  # what is left together is of the codes
        with evaluating(model), torch.no_grad():
            losses.append(model.loss(make_batch()).loss_sum.item())
        reshard(model)
        set_mode(model, Policy("bf16_mixed", device_type="cpu"))
        runs.append(steps(model, world, rank, 1))
        set_mode(model, Policy("fp8_tile", device_type="cpu"))
        runs.append(steps(model, world, rank, 1))
        found.append((runs, losses))
    (runs, losses), (want, others) = found
    alike = [same(one, other) for one, other in zip(runs, want, strict=True)]
    return alike, losses == others, [one[2].get("fp8", 0) > 0 for one in runs], lines


@pytest.mark.dist
@pytest.mark.slow
def test_where_matmuls_leave_8_bits_weights_are_gathered_as_they_are_and_it_is_said():
    for alike, evaluations, coded, lines in on_ranks(2, moved):
        assert alike == [True] * 3
        assert evaluations
        assert coded == [True, False, True]
        assert any("their matmuls have left 8 bits" in line for line in lines)


@pytest.mark.dist
def test_a_model_without_such_weights_says_so():
    (lines, sent), *_ = on_ranks(2, without)
    assert "fp8" not in sent
    assert any("No weight is gathered in FP8" in line for line in lines)


def without(rank):
    """A run in BF16 whose recipe asks for codes."""
    world, lines = world_of((1, 2)), []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    fsdp_exchanges.log.addHandler(handler)
    return lines, steps(made(world, CODED, mode="bf16_mixed"), world, rank, 1)[2]
