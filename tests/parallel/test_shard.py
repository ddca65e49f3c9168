"""Sharded models: the gradients of one process, whatever the mesh, the model, and what is done to save memory."""

import functools

import pytest

from tests.parallel.steps import Case, compare
from tests.ranks import on_ranks
from tilewright.parallel.shard import Sharding

KINDS = ("gqa", "mla", "deepseek", "llama", "qwen3", "bert")
KEPT, OFFLOADED = Sharding(reshard_after_forward=False), Sharding(cpu_offload=True)
EACH = {"reduce_each": True}

TWO_SHARDS = {
    **{kind: Case(kind) for kind in KINDS},
    "own-fp8_tile": Case("own_moe", "fp8_tile"),
    # FP8 against FP8, operand by operand; parameters in FP16 have gradients in FP32.
    **{f"{kind}-{mode}": Case(kind, mode) for kind, mode in (
        ("gqa", "fp8_tile"), ("deepseek", "fp8_tile"), ("llama", "fp8_tile"), ("gqa", "bf16_mixed"),
        ("gqa", "pure_fp16"), ("deepseek", "pure_fp16"), ("bert", "pure_fp16"),
    )},
    **{f"{kind}-{mode}": Case(kind, settings={"activation_checkpoint": mode})
       for kind in ("gqa", "llama") for mode in ("full", "selective", "matmuls", "attention")},
    **{f"{kind}-8bit-inputs": Case(kind, settings={"checkpoint_inputs": "fp8", "activation_checkpoint": "full"})
       for kind in ("gqa", "llama")},
    "gqa-by-layer": Case("gqa", settings={"checkpointing": ("full", "none")}),
    **{f"{kind}-tiled-{mode}": Case(kind, mode, chunks=2)
       for kind, mode in (("gqa", "fp32"), ("llama", "fp32"), ("gqa", "fp8_tile"))},
    **{f"{kind}-{compute}": Case(kind, compute=compute) for kind, compute in (
        ("gqa", "int4_a8"), ("llama", "int4_a8"), ("deepseek", "int8"), ("mla", "int4"),
    )},
    "gqa-kept": Case("gqa", sharding=KEPT),
    "llama-kept": Case("llama", number=1, sharding=KEPT),
    "gqa-offloaded": Case("gqa", sharding=OFFLOADED),
    "gqa-reduce-each": Case("gqa", number=3, options=EACH),
    "gqa-reduce-each-16-bit": Case("gqa", "pure_fp16", number=3, options=EACH),
    **{f"{kind}-lora-{base}": Case(kind, mode, lora=base) for kind, mode, base in (
        ("gqa", "fp8_tile", "fp8"), ("llama", "fp8_tile", "fp8"), ("gqa", "bf16_mixed", "keep"),
    )},
}  # fmt: skip


TWINS = (
    "mla", "llama-full", "gqa-matmuls", "deepseek-int8",
    "gqa", "llama", "qwen3", "gqa-fp8_tile", "deepseek-fp8_tile", "llama-fp8_tile", "gqa-pure_fp16", "bert-pure_fp16",
    "gqa-full", "llama-selective", "llama-matmuls", "llama-attention", "llama-8bit-inputs", "gqa-tiled-fp32",
    "gqa-tiled-fp8_tile", "llama-int4_a8", "mla-int4", "gqa-kept", "gqa-reduce-each", "llama-lora-fp8",
)  # fmt: skip
"""Features, each of which another case has."""
FEW = tuple(name for name in TWO_SHARDS if name not in TWINS)


@functools.cache
def results(sizes, names):
    """By name, of one start of the ranks for all cases."""
    cases = [TWO_SHARDS[name] for name in names]
    return dict(zip(names, on_ranks(sizes[0] * sizes[1], compare, sizes, cases)[0], strict=True))


def check(name, found, bound=2e-6):
    worst, error, loss, norm = found
    print(f"{name}: gradient {error:.2g} of {worst}, loss {loss:.2g}, norm {norm:.2g}")
    assert error <= bound, f"{name}: {worst} is off by {error} of its largest element"
    assert loss <= 1e-6
    assert norm <= 1e-6


@pytest.mark.dist
@pytest.mark.parametrize("name", [*FEW, *(pytest.param(name, marks=pytest.mark.slow) for name in TWINS)])
@pytest.mark.support("decoder", "shards")
@pytest.mark.support("experts", "shards")
@pytest.mark.support("hf", "shards")
@pytest.mark.support("bf16", "shards")
@pytest.mark.support("fp16", "shards")
@pytest.mark.support("fp8", "shards")
@pytest.mark.support("integers", "shards")
@pytest.mark.support("checkpointing", "shards")
@pytest.mark.support("inputs", "shards")
@pytest.mark.support("tiled", "shards")
@pytest.mark.support("offload", "shards")
@pytest.mark.support("accumulation", "shards")
def test_two_shards_have_the_gradient_of_one_process(name):
    check(name, results((1, 2), TWINS if name in TWINS else FEW)[name])


@pytest.mark.dist
@pytest.mark.parametrize(
    ("sizes", "names"),
    [
        ((2, 1), ("gqa",)),
        ((2, 2), ("deepseek", "gqa-reduce-each-16-bit")),
        pytest.param((2, 1), (*KINDS, "gqa-fp8_tile", "gqa-pure_fp16"), marks=pytest.mark.slow),
        pytest.param((2, 2), tuple(TWO_SHARDS), marks=pytest.mark.slow),
        pytest.param((1, 4), tuple(TWO_SHARDS), marks=pytest.mark.slow),
        pytest.param((1, 8), KINDS, marks=pytest.mark.slow),
        pytest.param((4, 2), (*KINDS, "gqa-fp8_tile"), marks=pytest.mark.slow),
    ],
    ids=str,
)
@pytest.mark.support("decoder", "copies", "hsdp")
@pytest.mark.support("experts", "hsdp")
@pytest.mark.support("hf", "copies", "hsdp")
@pytest.mark.support("fp8", "copies", "hsdp")
@pytest.mark.support("fp16", "copies", "hsdp")
@pytest.mark.support("bf16", "hsdp")
@pytest.mark.support("lora", "hsdp")
@pytest.mark.support("lora_fp8", "hsdp")
@pytest.mark.support("checkpointing", "hsdp")
@pytest.mark.support("inputs", "hsdp")
@pytest.mark.support("tiled", "hsdp")
@pytest.mark.support("offload", "hsdp")
@pytest.mark.support("accumulation", "hsdp")
def test_any_mesh_has_the_gradient_of_one_process(sizes, names):
    for name, found in results(sizes, names).items():
        check(f"{sizes} {name}", found)


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.support("compiled", "shards")
def test_compiled_layers():
    modes = {"gqa": "none", "llama": "full", "deepseek": "full"}
    cases = [Case(kind, compiled=True, settings={"activation_checkpoint": mode}) for kind, mode in modes.items()]
    for case, found in zip(cases, on_ranks(2, compare, (1, 2), cases, seconds=280)[0], strict=True):
        check(f"{case.kind} compiled", found, 2e-5)
