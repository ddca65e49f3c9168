"""What a Hugging Face model keeps, needs and computes in a micro-batch, found by running it on fake tensors.

Its forward and backward pass run as they would, operation by operation, and every tensor alive that was not alive
before counts. Data-dependent choices are not made: rows are taken as packed, experts as evenly used (a GEMM over the
experts of one tensor takes the same memory and work however rows are spread). A model whose shapes depend on values
(a loop over the experts that were hit) cannot be traced, and the plan then knows nothing of it.

Legend: N tokens  D model width  V vocabulary.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from tilewright.core.config import Recipe
from tilewright.core.hardware import Machine
from tilewright.models.hf import HFModel
from tilewright.models.hf_probe import REFUSALS
from tilewright.ops.kernels import Kernels
from tilewright.plan.fake_model import KERNELS, document_styles, quiet, text_inputs, to_fake
from tilewright.plan.fake_operations import GroupedGemms, fuse_attention
from tilewright.plan.live_bytes import GemmKind, LiveBytes, TooLong, is_view
from tilewright.plan.stacks import Stack, find_stack, reduced
from tilewright.precision.convert import convert
from tilewright.precision.policy import Policy
from tilewright.precision.schedule import ModeSchedule

MASKED_SHARE = 0.15
"""Share of the tokens that a masked language model predicts."""
GROUPED_CONVOLUTIONS = "grouped convolutions are priced as matrix products of their size; backward takes them longer"
_SHORT = 8
"""Positions of a row that tells how a model makes its logits."""
WHOLE = 10_000
"""Operations of the forward pass of a whole model that is traced; beyond, layers are traced once for each kind of them.
With backward about three times as many run, some 0.1 ms each."""
REDUCED = 100_000
"""The same of one of those traces; beyond, nothing is known."""


@dataclass(frozen=True)
class Trace:
    """One micro-batch of a Hugging Face model; bytes beside parameters. `head`: (tokens, width, vocabulary) where the
    head's loss is `ops.loss`, and not in the other numbers. `trouble`: why nothing is known; empty where all is."""

    kept_bytes: int = 0
    """Alive after forward, for backward."""
    peak_bytes: int = 0
    """Most alive in forward."""
    backward_bytes: int = 0
    """Most alive in backward, gradients of parameters among them."""
    passing_bytes: int = 0
    """The same without gradients that are complete: of a micro-batch that adds to gradients that are there."""
    moved_bytes: int = 0
    """Read and written, forward and backward, by all but matrix products and attention."""
    fresh_bytes: int = 0
    """Of these, written into new memory."""
    gemms: Mapping[GemmKind, tuple[int, float]] = field(default_factory=dict)
    """Calls and FLOPs of forward's matrix products."""
    attention_flops: float = 0.0
    """Of forward's fused attention, all pairs of positions counted."""
    operations: int = 0
    """Calls of operations, forward and backward."""
    head: tuple[int, int, int] | None = None
    trouble: str = ""
    notes: tuple[str, ...] = ()

    @property
    def flops(self) -> float:
        """Of forward's matrix products."""
        return sum(flops for _, flops in self.gemms.values())


DOCUMENTS_AS_ROWS = (
    "the model takes no document masks, and how many padded rows a packed row becomes depends on the data"
)
"""Why memory is not known where documents run as rows of their own: a full row is traced, and several short documents
take up to as many rows, each as long as the longest."""


def trace_model(model: HFModel, recipe: Recipe, machine: Machine, rows: int) -> Trace:
    """Trace one micro-batch of `rows` rows through a model on the meta device, which stays as it is."""
    try:
        try:
            return _traced(copy.deepcopy(model), recipe, machine, rows, WHOLE)
        except TooLong:
            return _by_layers(model, recipe, machine, rows)
    except REFUSALS as error:
        return Trace(trouble=f"the model cannot be traced without data ({_first_line(error)})")
    except TooLong as error:
        return Trace(trouble=f"a step is too long to be traced ({error} for two layers)")


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "") or type(error).__name__


def _by_layers(model: HFModel, recipe: Recipe, machine: Machine, rows: int) -> Trace:
    """The trace of a model whose layers are many or long: of one layer of each kind, and what one more of each adds.

    Raises:
        TooLong: one layer alone has too many operations.
    """
    stack = find_stack(model)
    if stack is None:
        raise TooLong(f"more than {WHOLE:,} operations")

    def of(kept: Sequence[int]) -> Trace:
        found = _traced(reduced(model, stack, kept), recipe, machine, rows, REDUCED)
        return replace(found, gemms=_renamed(found.gemms, stack, kept))

    first = [indices[0] for indices in stack.kinds]
    one = of(first)
    found = one
    for indices in stack.kinds:
        if len(indices) > 1:
            found = _plus(found, one, of(sorted([*first, indices[1]])), len(indices) - 1)
    return found


def _renamed(gemms: Mapping[GemmKind, Any], stack: Stack, kept: Sequence[int]) -> dict[GemmKind, Any]:
    return {replace(kind, module=stack.full_name(kept, kind.module)): count for kind, count in gemms.items()}


def _plus(total: Trace, one: Trace, two: Trace, times: int) -> Trace:
    """`total` and `times` the difference of two traces."""
    numbers = [name for name in (f.name for f in fields(Trace)) if isinstance(getattr(one, name), int | float)]
    found = {name: getattr(total, name) + times * (getattr(two, name) - getattr(one, name)) for name in numbers}
    gemms = dict(total.gemms)
    for kind, (calls, flops) in two.gemms.items():
        had_calls, had = one.gemms.get(kind, (0, 0.0))
        now_calls, now = gemms.get(kind, (0, 0.0))
        gemms[kind] = (now_calls + times * (calls - had_calls), now + times * (flops - had))
    return replace(total, gemms=gemms, **found)


def _traced(model: HFModel, recipe: Recipe, machine: Machine, rows: int, limit: int) -> Trace:
    """Trace a meta model, which is used up.

    Raises:
        REFUSALS: the model cannot run so.
        TooLong: more than `limit` operations.
    """
    mode = ModeSchedule.from_section(recipe.precision, recipe.train.steps).mode
    policy = replace(Policy.from_section(recipe.precision, machine.device).in_mode(mode), device_type="cpu")
    if recipe.memory.executor == "standard":
        model.activation_checkpoint = recipe.train.activation_checkpoint
        model.checkpoint_inputs = recipe.train.checkpoint_inputs
    with ExitStack() as stack:
        stack.enter_context(FakeTensorMode())
        stack.enter_context(quiet())
        stack.enter_context(GroupedGemms())
        to_fake(model, torch.device("cpu"))
        if machine.device == "cuda":
            fuse_attention([model.net, *model.layers])
        convert(model, policy, kernels=Kernels(machine, KERNELS, compile=False))
        model.train()
        if model.task == "image_classification":
            return _run_images(model, recipe, rows, limit)
        styles = document_styles(model)
        for style in styles[:-1]:
            try:
                return _run_text(model, recipe, rows, limit, style)
            except REFUSALS:  # the run finds that out, too (`hf_probe`)
                model.zero_grad()
        found = _run_text(model, recipe, rows, limit, styles[-1])
        return replace(found, trouble=DOCUMENTS_AS_ROWS) if styles[-1] == "rows" else found


def _run_images(model: HFModel, recipe: Recipe, rows: int, limit: int) -> Trace:
    side, net = recipe.data.image_size, model.net
    pixels = torch.empty(rows, 3, side, side)

    def loss() -> Tensor:
        logits = net(pixel_values=pixels).logits
        return F.cross_entropy(logits.float(), torch.empty(rows, dtype=torch.int64), reduction="sum")

    return _count(model, loss, limit)


def _run_text(model: HFModel, recipe: Recipe, rows: int, limit: int, documents: Any) -> Trace:
    net: Any = model.net
    device = torch.device("cpu")
    ids, arguments = text_inputs(model, rows, recipe.data.seq_len, device, documents)
    if model.task == "causal_lm" and has_plain_head(net, *text_inputs(model, 1, _SHORT, device, documents)):
        head = net.get_output_embeddings()
        shape = (ids.numel(), head.in_features, head.out_features)
        return replace(_count(model, lambda: net.base_model(input_ids=ids, **arguments)[0], limit), head=shape)
    wanted = int(ids.numel() * (MASKED_SHARE if model.task == "masked_lm" else 1.0))

    def loss() -> Tensor:
        logits = net(input_ids=ids, **arguments).logits.flatten(0, 1)
        chosen = logits[torch.empty(wanted, dtype=torch.int64)]
        return F.cross_entropy(chosen.float(), torch.empty(wanted, dtype=torch.int64), reduction="sum")

    return _count(model, loss, limit)


def _count(model: HFModel, run: Callable[[], Tensor], limit: int) -> Trace:
    """Count a forward pass, and the backward pass from what it returns."""
    live = LiveBytes(limit)
    with live.watching(model), live:
        out = run()
        kept, peak, gemms, attention = live.live, live.peak, dict(live.gemms), live.attention
        live.peak = live.passing_peak = live.live
        live.limit, live.in_backward = 0, True
        out.backward(torch.empty_like(out))
    grouped = any(isinstance(module, nn.modules.conv._ConvNd) and module.groups > 1 for module in model.modules())
    return Trace(
        notes=(GROUPED_CONVOLUTIONS,) if grouped else (),
        kept_bytes=kept,
        peak_bytes=peak,
        backward_bytes=live.peak,
        passing_bytes=live.passing_peak,
        moved_bytes=live.moved,
        fresh_bytes=live.fresh,
        gemms=gemms,
        attention_flops=attention,
        operations=live.operations,
    )


@torch.no_grad()
def has_plain_head(net: Any, ids: Tensor, arguments: Mapping[str, Any]) -> bool:
    """Whether the logits are the base model's hidden states times the output embedding's weight, and nothing else is
    computed behind the base model. The run compares bits (`hf_probe`)."""
    head = net.get_output_embeddings()
    if not isinstance(head, nn.Linear) or head.bias is not None or net.base_model is net:
        return False
    seen = _Behind()
    hooks = [
        net.base_model.register_forward_hook(lambda *_: setattr(seen, "on", True)),
        head.register_forward_pre_hook(lambda *_: setattr(seen, "on", False)),
        head.register_forward_hook(lambda *_: setattr(seen, "on", True)),
    ]
    with seen:
        net(input_ids=ids, **arguments)
    for hook in hooks:
        hook.remove()
    return not seen.computed


class _Behind(TorchDispatchMode):
    """Sees, while it is `on`, whether anything is computed: all but views and casts."""

    def __init__(self) -> None:
        super().__init__()
        self.on = self.computed = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        harmless = func.namespace == "prim" or is_view(func) or func is torch.ops.aten._to_copy.default
        self.computed |= self.on and not harmless
        return func(*args, **(kwargs or {}))
