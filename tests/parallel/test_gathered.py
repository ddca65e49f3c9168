"""What shards are gathered as: 16 bits where a layer reads no more of a weight, with the bits of gathers in FP32; FP32
where more is read."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.models.shapes import SHAPES, make_batch
from tests.parallel.steps import groups_of, microbatches, world_of
from tests.ranks import on_ranks
from tilewright.core.hardware import detect_machine
from tilewright.memory.chunked_mlp import chunk_mlps
from tilewright.models.build import init_weights
from tilewright.models.decoder.decoder import Decoder
from tilewright.ops.kernels import Kernels
from tilewright.optim.clip import GradClip
from tilewright.parallel.shard import Sharding, reshard, shard
from tilewright.precision.convert import convert, evaluating, set_mode
from tilewright.precision.lora.lora import add_lora
from tilewright.precision.policy.policy import Policy
from tilewright.precision.policy.rules import Rule
from tilewright.training.executor.evaluate import evaluate
from tilewright.training.executor.standard import StandardExecutor

NATIVE = Kernels(detect_machine("cpu"), {"linear": "native"}, compile=False)
"""Whose linear layers round a weight's gradient to 16 bits anyway, on each CPU."""
NARROW = torch.bfloat16, torch.float16

CASES = {
    "deepseek": {"kind": "deepseek"},
    "kept": {"sharding": Sharding(reshard_after_forward=False)},
    "two formats": {"rules": (Rule("*down_proj", compute="fp16"), Rule("*q_proj", compute="fp32"))},
}
MORE = {
    "gqa": {"kind": "gqa"},
    "offloaded": {"sharding": Sharding(cpu_offload=True)},
    **{f"{kind} {mode}": {"kind": kind, "mode": mode} for kind in ("tied", "gqa_moe", "mla", "mla_q_rank")
       for mode in ("bf16_mixed", "hybrid")},
    **{f"compiled {mode}": {"mode": mode, "compiled": True} for mode in ("bf16_mixed", "hybrid")},
    "reduced each": {"options": {"reduce_each": True}},
    "recomputed": {"settings": {"activation_checkpoint": "full"}},
    "in chunks": {"chunks": 2},
    "under adapters": {"lora": True},
}  # fmt: skip
SOME_WIDE = {"fp32": {"mode": "fp32"}, "fp8": {"mode": "fp8_tile"}, "integers": {"rules": (Rule(compute="int8"),)}}


def _model(world, gathers=True, kind="gqa", mode="bf16_mixed", kernels=NATIVE, **case):
    """A sharded decoder; one that does not say that it uses each parameter gathers them as they are stored."""
    model = Decoder(SHAPES[kind], kernels)
    init_weights(model, 0)
    if case.get("lora"):
        add_lora(model, 4, base="keep", kernels=kernels)
    convert(model, Policy(mode, case.get("rules", ()), device_type="cpu"), kernels=kernels)
    for name, value in case.get("settings", {}).items():
        setattr(model, name, value)
    if case.get("compiled"):
        model.compile_blocks()
    if case.get("chunks"):
        chunk_mlps(model, case["chunks"], print)
    if not gathers:
        model.uses_every_parameter = False
    shard(model.train(), model.layers, world.fsdp_mesh, case.get("sharding", Sharding()))
    return model


class Gathered(TorchDispatchMode):
    """Bytes that are gathered inside."""

    num_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.name == "c10d::_allgather_base_":
            self.num_bytes += args[0].nbytes
        return func(*args, **(kwargs or {}))


def _steps(model, world, rank, number=2, options=None):
    """Losses of some steps, and the weights after them, bit for bit."""
    params = [param for param in model.parameters() if param.requires_grad]
    executor = StandardExecutor(
        model, torch.optim.SGD(params, lr=0.1), clip=GradClip(1.0), **groups_of(world), **(options or {})
    )
    losses = [executor.step(microbatches(rank, 2), 0.1).loss for _ in range(number)]
    return losses, {name: param.full_tensor() for name, param in model.named_parameters()}


def _same(first, other):
    return first[0] == other[0] and all(torch.equal(value, other[1][name]) for name, value in first[1].items())


def _compared(rank, sizes, cases):
    world, found = world_of(sizes), {}
    for name, case in cases.items():
        results, num_bytes = [], []
        for gathers in (True, False):
            model = _model(world, gathers, **{key: value for key, value in case.items() if key != "options"})
            with Gathered() as counted:
                results.append(_steps(model, world, rank, options=case.get("options")))
            num_bytes.append(counted.num_bytes)
        dtypes = {param.dtype for param in model.parameters()}
        found[name] = _same(*results), num_bytes[0] / num_bytes[1], dtypes
    return found


@pytest.mark.dist
def test_gathers_in_16_bits_give_the_bits_of_gathers_in_fp32():
    check(on_ranks(2, _compared, (1, 2), CASES))


def check(results):
    for found in results:
        wrong = {name: result for name, result in found.items() if not result[0] or result[1] >= 0.9}
        assert not wrong, f"other losses or weights, or too many bytes gathered: {wrong}"
        assert {dtype for _, _, dtypes in found.values() for dtype in dtypes} == {torch.float32}


@pytest.mark.slow
@pytest.mark.dist
def test_gathers_of_shards_that_have_copies():
    check(on_ranks(4, _compared, (2, 2), {"reduced each": MORE["reduced each"]}))


@pytest.mark.dist
def test_what_reads_more_than_16_bits_is_gathered_whole():
    """FP8 and integers of a weight in BF16 are not those of the weight in FP32."""
    for found in on_ranks(2, _compared, (1, 2), SOME_WIDE):
        assert all(same and share == 1 for same, share, _ in found.values()), found


@pytest.mark.dist
@pytest.mark.slow
def test_more_shapes_formats_and_compiled_layers():
    check(on_ranks(2, _compared, (1, 2), MORE, seconds=280))


def _on_this_machine(rank):
    """With the machine's own kernels, whose gradients may have more than 16 bits."""
    return _compared(rank, (1, 2), {"own": {"kernels": Kernels(detect_machine("cpu"), compile=False)}})["own"][0]


@pytest.mark.dist
def test_kernels_that_do_not_round_gradients_keep_their_numbers():
    assert all(on_ranks(2, _on_this_machine))


# ---- FP32 stays FP32 ----


def _seen(model):
    """Dtypes in which layers find their matrices in a forward pass."""
    seen = set()
    hooks = [
        module.register_forward_pre_hook(lambda layer, _: seen.add(layer.weight.dtype))
        for name, module in model.named_modules()
        if name.endswith("_proj")
    ]
    with torch.no_grad():
        model.loss(make_batch())
    reshard(model)
    for hook in hooks:
        hook.remove()
    return seen


def _evaluated(rank, sharding):
    """FP32 passes among steps in 16 bits: (dtypes that layers saw), losses against those of one process, and whether
    steps went on as if there had been none."""
    world, found = world_of((1, 2)), {}
    model, other = (_model(world, sharding=sharding) for _ in range(2))
    alone = convert(Decoder(SHAPES["gqa"], NATIVE), "bf16_mixed", kernels=NATIVE)
    batches = {"a": [make_batch(seed=seed) for seed in range(3)]}
    first = _steps(model, world, rank)
    alone.load_state_dict(first[1])
    for fp32 in (True, False):
        losses = [evaluate(each, batches, fp32=fp32)["a"].loss for each in (model, alone)]
        found[f"evaluation, fp32={fp32}"] = losses[0] == losses[1]
    seen = [_seen(model)]
    with evaluating(model):
        seen.append(_seen(model))
    seen.append(_seen(model))
    set_mode(model, "fp32")
    seen.append(_seen(model))
    set_mode(model, "bf16_mixed")
    _steps(other, world, rank)
    found["steps"] = _same(_steps(model, world, rank), _steps(other, world, rank))
    set_mode(model, "fp32"), set_mode(other, "fp32")
    found["steps in fp32"] = _same(_steps(model, world, rank), _steps(other, world, rank))
    return found, seen


@pytest.mark.dist
@pytest.mark.parametrize(
    "sharding",
    [Sharding(), pytest.param(Sharding(reshard_after_forward=False), marks=pytest.mark.slow)],
    ids=["zero3", "zero2"],
)
@pytest.mark.slow
def test_evaluation_in_fp32_reads_fp32(sharding):
    narrow, wide = {torch.bfloat16}, {torch.float32}
    for found, seen in on_ranks(2, _evaluated, sharding):
        assert all(found.values()), found
        assert seen == [narrow, wide, narrow, wide]
