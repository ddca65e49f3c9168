"""What a Hugging Face model keeps for backward and computes, found by running its forward pass on fake tensors.

Fake tensors have shapes and dtypes but no data, so a model of any size is traced in about a second with no weights.
Every tensor alive after forward that was not alive before it counts. Data-dependent choices (how documents of a row are
kept apart, which labels count) are not made here: rows are taken as packed, with an attention mask where the model has
one. Called by `plan.workload`.
"""

import inspect
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    FakeTensorMode,
    UnsupportedFakeTensorException,
)

from tilewright.core.config import Recipe
from tilewright.core.hardware import Machine
from tilewright.models.build import build_model
from tilewright.models.hf import HFModel
from tilewright.models.hf_packing import forward_arguments
from tilewright.ops.kernels import Kernels
from tilewright.plan.live_bytes import ATTENTION, LiveBytes, flop_counter
from tilewright.precision.convert import convert
from tilewright.precision.policy import Policy
from tilewright.precision.schedule import ModeSchedule

MASKED_SHARE = 0.15
"""Share of the tokens that a masked language model predicts."""


@dataclass(frozen=True)
class Trace:
    """One micro-batch of a Hugging Face model.

    `kept_bytes`: alive after forward, for backward. `peak_bytes`: most alive inside forward. `moved_bytes`: read and
    written in forward by all but products and attention. `flops`: of forward's products. `attention_flops`: of its
    fused attention, all pairs of positions counted. `head`: (tokens, width, vocabulary) where the head's loss is ours,
    and not in the other numbers. `trouble`: why nothing is known; empty where all went well.
    """

    kept_bytes: int
    peak_bytes: int
    moved_bytes: int
    flops: float
    attention_flops: float
    head: tuple[int, int, int] | None
    trouble: str = ""


KERNELS = {"linear": "native", "quantize": "ref", "tile_gemm": "dequant"}
"""What runs 8-bit products in a trace: operations that need no unit and no library, whatever the machine has."""


def trace_model(recipe: Recipe, vocab_size: int, machine: Machine, rows: int) -> Trace:
    """Trace one micro-batch of `rows` rows.

    Raises:
        ConfigError, CheckpointError: the model cannot be built, or cannot do what the recipe asks.
    """
    mode = ModeSchedule.from_section(recipe.precision, recipe.train.steps).mode
    policy = Policy.from_section(recipe.precision, machine.device).in_mode(mode)
    section = recipe.model.model_copy(update={"weights": "random"})
    model = build_model(section, vocab_size, device="meta")
    assert isinstance(model, HFModel)
    model.activation_checkpoint = recipe.train.activation_checkpoint
    model.checkpoint_inputs = recipe.train.checkpoint_inputs
    device = torch.device(machine.device)
    with FakeTensorMode(), quiet():
        to_fake(model, device)
        convert(model, policy, kernels=Kernels(machine, KERNELS, compile=False))
        try:
            return _run(model.train(), recipe, rows, device)
        except (RuntimeError, UnsupportedFakeTensorException, DataDependentOutputException) as error:
            reason = str(error).splitlines()[0]
            return Trace(0, 0, 0, 0.0, 0.0, None, f"the forward pass cannot be traced without data ({reason})")


@contextmanager
def quiet() -> Iterator[None]:
    """What fake tensors cannot do is told by `Trace.trouble`; torch would print a traceback besides."""
    logger = logging.getLogger(fake_tensor.__name__)
    before = logger.disabled
    logger.disabled = True
    try:
        yield
    finally:
        logger.disabled = before


def to_fake(model: nn.Module, device: torch.device) -> None:
    """Replace meta parameters and buffers by fake ones on `device`, ties kept."""
    made: dict[int, Tensor] = {}

    def fake(tensor: Tensor) -> Any:
        if id(tensor) not in made:
            empty = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
            made[id(tensor)] = nn.Parameter(empty) if isinstance(tensor, nn.Parameter) else empty
        return made[id(tensor)]

    for module in model.modules():
        groups: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for group in groups:
            for name, tensor in group.items():
                if tensor is not None:
                    group[name] = fake(tensor)


def _run(model: HFModel, recipe: Recipe, rows: int, device: torch.device) -> Trace:
    live, flops = LiveBytes(), flop_counter()
    net: Any = model.net
    head = None
    if recipe.model.task == "image_classification":
        side = recipe.data.image_size
        pixels = torch.empty(rows, 3, side, side, device=device)
        with flops, live:
            out = net(pixel_values=pixels)  # held until the bytes are counted
        kept, peak = live.live, live.peak
    else:
        ids, arguments = text_inputs(model, rows, recipe.data.seq_len, device)
        layer = net.get_output_embeddings()
        ours = recipe.model.task == "causal_lm" and isinstance(layer, nn.Linear) and layer.bias is None
        with flops, live:
            out = (net.base_model if ours else net)(input_ids=ids, **arguments)
        kept, peak = live.live, live.peak
        if ours:
            head = (ids.numel(), layer.in_features, layer.out_features)
        else:  # all logits are let go; of the predicted tokens the FP32 softmax stays, made from an FP32 copy
            wanted = MASKED_SHARE if recipe.model.task == "masked_lm" else 1.0
            rows_wide = int(wanted * ids.numel()) * out.logits.shape[-1] * 4
            kept, peak = kept - out.logits.nbytes + rows_wide, peak + 3 * rows_wide
    counts = flops.get_flop_counts().get("Global", {})
    attention = sum(count for op, count in counts.items() if op in ATTENTION)
    return Trace(kept, peak, live.moved, flops.get_total_flops() - attention, attention, head)


def text_inputs(model: HFModel, rows: int, seq_len: int, device: torch.device) -> tuple[Tensor, dict[str, Any]]:
    """Packed rows: with positions and a block mask where the model takes positions, else plain rows."""
    ids = torch.zeros(rows, seq_len, dtype=torch.int64, device=device)
    if "position_ids" not in inspect.signature(model.net.forward).parameters:
        return ids, forward_arguments(model.net)
    causal = model.task == "causal_lm"
    return ids, forward_arguments(model.net, "blocks", causal, ids, torch.zeros_like(ids))
