"""Seconds of an optimizer step: what it computes and moves, over what this machine was measured to reach.

Parts are added up, not overlapped: one operation runs after the other. The first step (which compiles), the data,
evaluations and checkpoints are not in it. Of the precision modes that a run passes through, the last one counts.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

import torch

from tilewright.core.config import Recipe
from tilewright.core.hardware import Machine
from tilewright.models.activation_bytes import FP32, head_bytes, layer_bytes, role, tile_bytes, weight_copy_bytes
from tilewright.models.count import count_flops
from tilewright.plan.ceilings import Ceilings
from tilewright.plan.footprint import head_shape, layer_storages, product_bytes, storage
from tilewright.plan.operands import OperandBytes, uncast
from tilewright.plan.trace import Trace
from tilewright.plan.workload import BYTES, Product, Workload, fp8_unit
from tilewright.precision.gemms import FP8_FORMATS

FORWARD_SHARE = 0.39
"""Of the bytes that element-wise work moves, forward and backward, what the forward pass moves; as counted of eager
layers (tests/plan/test_live_bytes.py)."""
_COMPILED_PASSES, _EAGER_PASSES = 5, 11
"""Passes over what backward keeps. Compiled: it is written and read, its gradient too, one more for the rest. Eager:
as counted of a decoder's layer."""

_PIECES_BESIDE_EXPERTS = 4
"""Compiled pieces of a layer with experts besides those (counted)."""
_CALLS_A_PIECE = 9
"""To enter a compiled piece, forward and backward, takes as long as so many eager linear layers on next to nothing
(profiled: 0.7 ms and 0.08)."""

FRESH_PASSES = 4.5
"""Passes that writing into new memory costs a CPU besides: the system clears each page (measured: a Mamba and seven
attention models, user and system time of their steps, `elementwise` from `ceilings`)."""
CALL_SHARE = 0.1
"""Of the seconds that calling a linear layer on almost nothing takes, forward and backward, those of one operation."""

CAST_BYTES = 6
"""A weight is read in FP32 and written in 16 bit, in each micro-batch."""
GRADIENT_BYTES = 12
"""A gradient is read, added to and written in FP32."""
CLIP_BYTES = 12
"""A gradient is read for its norm, and read and written to be clipped."""

_LAST = ("down_proj", "shared_experts.down_proj")
"""Nobody needs their results in backward."""

_TWO_PASSES = {"matmul": 1.75, "attention": 1.78, "elementwise": 1.72, "calls": 1.72}
"""Exact clipping slice by slice takes a second backward pass: of 2 + 2 + 4 operations a product the last 6 again, of
loops that take 0.39 + 0.39 + 0.61 the last two; all else twice."""

FORMAT_OF = {torch.bfloat16: "bf16", torch.float16: "fp16"}
"""Formats by dtype; FP32 for all others."""

BOUND_BY = {
    "matmul": "compute",
    "attention": "compute",
    "head": "compute",
    "loss": "bandwidth",
    "elementwise": "bandwidth",
    "weights": "bandwidth",
    "quantize": "bandwidth",
    "optimizer": "bandwidth",
    "calls": "overhead",
}
"""Which ceiling limits each part."""


def step_seconds(work: Workload, rates: Ceilings) -> dict[str, float]:
    """Seconds of one optimizer step by part.

    matmul: products of the layers. calls: to enter their compiled pieces. attention: scores and values. head: products
    of the output projection. loss: its softmax. elementwise: norms, SwiGLU, residual. weights: casts and accumulation
    of gradients. quantize: making 8-bit operands, and decoding them where no unit multiplies them. optimizer: norm,
    clipping and update.
    """
    mode = work.modes[-1]
    policy = work.policies[mode]
    fmt = policy.product
    micro = _forward_backward(work, mode, fmt, rates)
    micro["elementwise"] = _elementwise_s(work, mode, fmt, rates)
    wide = 1 - work.num_narrow / work.num_parameters
    cast = wide * (work.num_parameters - uncast(work.products[mode]))
    casts = CAST_BYTES * cast if fmt in FORMAT_OF.values() and work.trace is None else 0  # a trace has them
    micro["weights"] = (casts + GRADIENT_BYTES * work.num_trainable) / rates.bandwidth
    two_passes = work.recipe.memory.executor == "layer_major" and backward_passes(work.recipe) == 2
    if two_passes:
        micro = {name: seconds * _TWO_PASSES.get(name, 2.0) for name, seconds in micro.items()}
    coded = OperandBytes.of(work.products[mode], work.num_tokens, work.machine)
    forward = 1 + (1 + two_passes) * recomputes(work)
    micro["quantize"] = (forward * coded.forward + (1 + two_passes) * coded.backward) / rates.bandwidth
    parts = {name: seconds * work.num_micro for name, seconds in micro.items()}
    parts["quantize"] += coded.step / rates.bandwidth
    clip = CLIP_BYTES * work.num_trainable / rates.bandwidth
    parts["optimizer"] = work.num_trainable / rates.adam[work.recipe.optim.moments] + clip
    return parts


def recomputes(work: Workload, what: Literal["products", "attention"] = "products") -> bool:
    """Whether backward computes the layers' products, or their attention, again."""
    modes = {"products": ("full", "attention"), "attention": ("full", "products")}[what]
    return work.recipe.train.activation_checkpoint in modes or work.recipe.memory.executor == "layer_major"


def backward_passes(recipe: Recipe) -> int:
    """Backward passes of a layer-major step: two where clipping by the exact norm comes before the first update."""
    return 2 if recipe.optim.clip == "exact" and recipe.optim.clip_norm > 0 else 1


def _matmul_s(work: Workload, product: Product, flops: float, rates: Ceilings) -> float:
    """Seconds of the products of a linear layer, `flops` each; forward runs twice where layers are recomputed, up to
    their last product, or whole by the layer-major executor."""
    gemms = product.gemms
    last = role(product.fqn) in _LAST and work.config is not None and work.recipe.memory.executor == "standard"
    again = (gemms.fprop,) if recomputes(work) and not last else ()
    wgrad = () if product.frozen else (gemms.wgrad,)
    formats = (gemms.fprop, gemms.dgrad, *wgrad, *again)
    width = product.num_weights**0.5
    flops *= expert_rows(work.machine) if product.share < 1 else 1.0
    return sum(rates.matmul_s(_rate_name(work, fmt, rates), width, flops, compiled=work.compiled) for fmt in formats)


def expert_rows(machine: Machine) -> float:
    """Rows that an expert of our decoder multiplies over rows that it was given: a CPU fills them up to a multiple of a
    quarter of the mean (`models.moe`), by half of that on average."""
    return 1.125 if machine.device == "cpu" else 1.0


def calls_s(num_experts: int, rates: Ceilings) -> float:
    """Seconds to enter the compiled pieces of a layer, forward and backward: one, or its experts and what lies between
    them."""
    pieces = num_experts + _PIECES_BESIDE_EXPERTS if num_experts else 1
    return pieces * _CALLS_A_PIECE * rates.call_s()


def _rate_name(work: Workload, fmt: str, rates: Ceilings) -> str:
    """The ceiling of a format. Without a unit 8-bit operands are decoded and multiplied in BF16."""
    if fmt not in FP8_FORMATS:
        return fmt
    return "fp8" if fp8_unit(work.machine) and "fp8" in rates.matmul else "bf16"


def element_passes(fused: bool) -> float:
    """Passes of element-wise work, forward and backward, over what a layer of our decoder keeps for backward.

    Args:
        fused: it is compiled into loops.
    """
    return _COMPILED_PASSES if fused else _EAGER_PASSES


def walked(machine: Machine, moved: float, fresh: float) -> float:
    """Bytes that take as long as `moved` ones of which `fresh` are written into new memory."""
    return moved + (FRESH_PASSES * fresh if machine.device == "cpu" else 0.0)


def remade_share(fused: bool, operand_bytes: float) -> float:
    """Of the time of forward's loops, what backward takes longer where products are kept and the rest is made again.

    Compiled FP32 loops wait for memory, and making a result again costs no more than loading one that was kept: 0.1 to
    0.2 % of a layer at three widths on a CPU with AMX, where BF16 took what forward takes (rounding between operations
    is arithmetic; docs/log.md, 2026-11-22).
    """
    return 0.05 if fused and operand_bytes == FP32 else 1.0


def _fused(work: Workload, layer: int) -> bool:
    """Whether a layer's element-wise work is compiled into loops. Layers with experts are compiled in pieces; most of
    theirs, the tokens' way to experts and back, lies between."""
    return work.compiled and not (work.config is not None and work.config.is_moe(layer))


def _elementwise_s(work: Workload, mode: str, fmt: str, rates: Ceilings) -> float:
    """Seconds of a micro-batch in all but products and attention."""
    sliced = work.recipe.memory.executor == "layer_major"
    kind = work.recipe.train.activation_checkpoint
    again = FORWARD_SHARE if sliced or kind != "none" else 0.0
    if work.trace is not None:  # with what the standard executor recomputes
        passed = walked(work.machine, work.trace.moved_bytes, work.trace.fresh_bytes)
        return (1 + again if sliced else 1) * passed / rates.elementwise[fmt]
    assert work.config is not None
    storages, eager = layer_storages(work, mode), layer_storages(replace(work, compiled=False), mode)
    total = elementwise_s(head_bytes(work.config, work.num_tokens, storage(work, mode)), work.compiled, fmt, rates)
    for layer, (fused_kept, kept) in enumerate(zip(storages, eager, strict=True)):
        fused = _fused(work, layer)
        makes = 1 + again
        if kind in ("selective", "products") and not sliced:
            makes = 1 + again * remade_share(fused, product_bytes(work))
        found = fused_kept if fused else kept
        size = layer_bytes(work.config, layer, "none", found) * work.num_tokens
        size += tile_bytes(work.config, layer, "none", found, work.num_tokens)
        size += weight_copy_bytes(work.config, layer, "none", found, BYTES[work.policies[mode].storage])
        total += makes * elementwise_s(size, fused, fmt, rates)
    return total


def elementwise_s(kept: float, fused: bool, fmt: str, rates: Ceilings) -> float:
    """Seconds of element-wise work, forward and backward, of a layer of our decoder that keeps so many bytes; compiled
    loops run at the speed of memory, eager ones as measured."""
    return element_passes(fused) * kept / (rates.bandwidth if fused else rates.elementwise[fmt])


def head_s(tokens: float, dim: int, vocab_size: int, fmt: str, rates: Ceilings) -> float:
    """Seconds of the products of the head, forward and backward."""
    return 6 * tokens * dim * vocab_size / rates.matmul_rate(fmt, (dim * vocab_size) ** 0.5)


def loss_s(logits: float, compiled: bool, fmt: str, rates: Ceilings) -> float:
    """Seconds of the loss of so many logits: eager as measured; compiled two exponentials and four passes over each."""
    if not compiled:
        return logits / rates.loss[fmt]
    return logits * (2 / rates.exp + 4 * BYTES[fmt] / rates.bandwidth)


def _forward_backward(work: Workload, mode: str, fmt: str, rates: Ceilings) -> dict[str, float]:
    """Seconds of a micro-batch in products, attention and loss."""
    full = recomputes(work, "attention")
    num_tokens = work.num_tokens
    parts = {"matmul": 0.0, "attention": 0.0, "head": 0.0, "loss": 0.0, "calls": 0.0}
    head = head_shape(work)
    if head is not None:
        tokens, dim, vocab_size = head
        parts["head"] = head_s(tokens, dim, vocab_size, fmt, rates)
        parts["loss"] = loss_s(tokens * vocab_size, work.loss_compiled, fmt, rates)
    if work.trace is not None:
        parts["matmul"] = _traced_matmul_s(work, work.trace, mode, rates)
        causal = 0.5 if work.recipe.model.task == "causal_lm" else 1.0
        attention = (4.5 if full else 3.5) * causal * work.trace.attention_flops
        parts["attention"] = attention / rates.attention[fmt]
        parts["calls"] = CALL_SHARE * work.trace.operations * rates.call_s(fmt)
        return parts
    for product in work.products[mode]:
        if product.is_head:
            continue
        parts["matmul"] += _matmul_s(work, product, 2 * num_tokens * product.share * product.num_weights, rates)
    assert work.config is not None
    if work.compiled:
        again = 1 + FORWARD_SHARE * recomputes(work)
        for i in range(work.config.num_layers):
            parts["calls"] += again * calls_s(work.config.num_experts if work.config.is_moe(i) else 0, rates)
    flops = count_flops(work.config, work.seq_len).attention * work.config.num_layers * num_tokens
    parts["attention"] = (4.5 if full else 3.5) * flops / rates.attention[fmt]
    return parts


def _traced_matmul_s(work: Workload, trace: Trace, mode: str, rates: Ceilings) -> float:
    """Seconds of traced products: a linear layer's in its formats, all others (experts in one tensor, convolutions,
    scores of eager attention) in the format that they ran in, forward once and backward twice."""
    products = {product.fqn: product for product in work.products[mode]}
    passes = 4 if recomputes(work) else 3
    total = 0.0
    for kind, (calls, flops) in trace.gemms.items():
        product, number = products.get(kind.module), calls * kind.groups
        if product is not None:
            total += calls * _matmul_s(work, product, flops / calls, rates)
        else:
            name = FORMAT_OF.get(kind.dtype, "fp32")
            total += passes * number * rates.matmul_s(name, kind.width, flops / number)
    return total


def binding(parts: Mapping[str, float]) -> tuple[str, str]:
    """The ceiling that most of the step's time waits for, and the largest part under it."""
    by_ceiling: dict[str, float] = {}
    for name, seconds in parts.items():
        by_ceiling[BOUND_BY[name]] = by_ceiling.get(BOUND_BY[name], 0.0) + seconds
    ceiling = max(by_ceiling, key=lambda name: by_ceiling[name])
    return ceiling, max((name for name in parts if BOUND_BY[name] == ceiling), key=lambda name: parts[name])
