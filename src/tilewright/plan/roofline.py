"""Seconds of an optimizer step: what it computes and moves, over what this machine was measured to reach.

Parts are added up, not overlapped: one operation runs after the other. The first step (which compiles), the data,
evaluations and checkpoints are not in it. Of the precision modes that a run passes through, the last one counts.
"""

from collections.abc import Mapping

from tilewright.models.count import count_flops
from tilewright.plan.ceilings import Ceilings
from tilewright.plan.footprint import activation_bytes, head_shape
from tilewright.plan.probe import ACTIVATION_PASSES
from tilewright.plan.workload import BYTES, Workload

BOUND_BY = {
    "matmul": "compute",
    "attention": "compute",
    "head": "compute",
    "loss": "bandwidth",
    "elementwise": "bandwidth",
    "weights": "bandwidth",
    "optimizer": "bandwidth",
}
"""Which ceiling limits each part."""


def step_seconds(work: Workload, rates: Ceilings) -> dict[str, float]:
    """Seconds of one optimizer step by part.

    matmul: products of the layers. attention: scores and values. head: products of the output projection.
    loss: its softmax. elementwise: norms, SwiGLU, residual. weights: casts and accumulation of gradients.
    optimizer: norm, clipping and update.
    """
    mode = work.modes[-1]
    policy = work.policies[mode]
    fmt = policy.product
    micro = _forward_backward(work, mode, fmt, rates)
    micro["elementwise"] = ACTIVATION_PASSES * activation_bytes(work, mode) / _elementwise_rate(work, fmt, rates)
    casts = 6 if fmt in ("bf16", "fp16") else 0  # read FP32, write 16 bit
    micro["weights"] = (casts + 12) * work.num_parameters / rates.bandwidth  # and read, add, write each gradient
    parts = {name: seconds * work.num_micro for name, seconds in micro.items()}
    clip = 12 * work.num_parameters / rates.bandwidth
    parts["optimizer"] = work.num_parameters / rates.adam[work.recipe.optim.moments] + clip
    return parts


def _elementwise_rate(work: Workload, fmt: str, rates: Ceilings) -> float:
    """Compiled loops run at the speed of memory; eager ones as measured."""
    return rates.bandwidth if work.compiled else rates.elementwise[fmt]


def _loss_rate(work: Workload, fmt: str, rates: Ceilings) -> float:
    """Logits/s: eager as measured; compiled two exponentials and four passes over the logits each."""
    if not work.loss_compiled:
        return rates.loss[fmt]
    return 1 / (2 / rates.exp + 4 * BYTES[fmt] / rates.bandwidth)


def _forward_backward(work: Workload, mode: str, fmt: str, rates: Ceilings) -> dict[str, float]:
    """Seconds of a micro-batch in products, attention and loss."""
    full = work.recipe.train.activation_checkpoint == "full"
    passes = 4 if full else 3  # forward, two products in backward, and forward again where layers are recomputed
    num_tokens = work.num_tokens
    parts = {"matmul": 0.0, "attention": 0.0, "head": 0.0, "loss": 0.0}
    head = head_shape(work)
    if head is not None:
        tokens, dim, vocab_size = head
        parts["head"] = 6 * tokens * dim * vocab_size / rates.matmul_rate(fmt, (dim * vocab_size) ** 0.5)
        parts["loss"] = tokens * vocab_size / _loss_rate(work, fmt, rates)
    if work.trace is not None:
        parts["matmul"] = passes * work.trace.flops / rates.matmul_rate(fmt, _usual_width(work, mode))
        causal = 0.5 if work.recipe.model.task == "causal_lm" else 1.0
        attention = (4.5 if full else 3.5) * causal * work.trace.attention_flops
        parts["attention"] = attention / rates.attention[fmt]
        return parts
    for product in work.products[mode]:
        if product.is_head:
            continue
        flops = 2 * passes * num_tokens * product.share * product.num_weights
        parts["matmul"] += flops / rates.matmul_rate(product.compute, product.num_weights**0.5)
    assert work.config is not None
    flops = count_flops(work.config, work.seq_len).attention * work.config.num_layers * num_tokens
    parts["attention"] = (4.5 if full else 3.5) * flops / rates.attention[fmt]
    return parts


def _usual_width(work: Workload, mode: str) -> float:
    """Width of a square product as large as the mean one."""
    sizes = [product.num_weights for product in work.products[mode]]
    return (sum(sizes) / len(sizes)) ** 0.5 if sizes else 256.0


def binding(parts: Mapping[str, float]) -> tuple[str, str]:
    """The ceiling that most of the step's time waits for, and the largest part under it."""
    by_ceiling: dict[str, float] = {}
    for name, seconds in parts.items():
        by_ceiling[BOUND_BY[name]] = by_ceiling.get(BOUND_BY[name], 0.0) + seconds
    ceiling = max(by_ceiling, key=lambda name: by_ceiling[name])
    return ceiling, max((name for name in parts if BOUND_BY[name] == ceiling), key=lambda name: parts[name])
