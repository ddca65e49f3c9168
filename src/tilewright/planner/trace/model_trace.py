"""Memory and FLOPs of a Hugging Face model in a micro-batch, found by running it on fake tensors.

The model is a skeleton: one layer of each class stands for all of them. Its forward and backward pass run as they
would, operation by operation, and every tensor alive that was not alive before counts; then each layer is measured
where it stands (`layer_trace`). Data-dependent choices are not made: rows are taken as packed, experts as evenly used
(a GEMM over the experts of one tensor takes the same memory and work however rows are spread). A model whose shapes
depend on values (a loop over the experts that were hit) cannot be traced, and the plan then knows its weights alone.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from tilewright.core.config.recipe import Recipe
from tilewright.core.hardware import Machine
from tilewright.models.hf.model import HFModel
from tilewright.models.hf.probe_packing import REFUSALS, Documents
from tilewright.ops.kernels import Kernels
from tilewright.planner.trace.alike_experts import AlikeExperts
from tilewright.planner.trace.byte_counter import EagerLiveBytes, GemmKind, TooLong
from tilewright.planner.trace.fake_model import KERNELS, OF_A_GPU, document_styles, quiet, text_inputs, to_fake
from tilewright.planner.trace.fake_operations import TraceMode, fuse_attention
from tilewright.planner.trace.layer_trace import Measures, TracedLayers, trace_layers
from tilewright.planner.trace.operation_kinds import is_view
from tilewright.precision.convert import convert
from tilewright.precision.float8.third_party import tile_weights
from tilewright.precision.policy.policy import Policy

MASKED_SHARE = 0.15
"""Share of the tokens that a masked language model predicts."""
GROUPED_CONVOLUTIONS = "grouped convolutions are priced as matmuls of their size; backward takes them longer"
DOCUMENTS_AS_ROWS = (
    "the model takes no document masks, and how many padded rows a packed row becomes depends on the data"
)
"""Why memory is not known where documents run as rows of their own: a full row is traced, and several short documents
take up to as many rows, each as long as the longest."""
LIMIT = 100_000
"""Operations of a skeleton's forward pass that are traced; beyond, nothing is known. With backward about three times as
many run, some 0.1 ms each."""
_SHORT = 8
"""Positions of a row that tells how a model makes its logits."""


class Untraceable(Exception):
    """Why a model cannot be traced."""


@dataclass(frozen=True)
class Trace:
    """One micro-batch of a skeleton; bytes beside parameters. Matmuls and loss of a plain head are not in it."""

    kept: int
    """Alive after forward, for backward."""
    peak: int
    """Most alive in forward."""
    backward: int
    """Most alive in backward, gradients of parameters among them."""
    passing: int
    """The same without gradients that are complete: of a micro-batch that adds to gradients that are there."""
    moved: int
    """Read and written, forward and backward, by all but matmuls and attention."""
    fresh: int
    """Of these, written into new memory."""
    gemms: Mapping[GemmKind, tuple[int, float]]
    """Calls and FLOPs of forward's matmuls."""
    attention: float
    """FLOPs of forward's fused attention, all pairs of positions counted."""
    operations: int
    """Calls of operations, forward and backward."""
    plain_head: bool
    """Whether logits are one matmul of hidden states (`has_plain_head`), so that the loss is `ops.loss`."""
    layers: TracedLayers
    notes: tuple[str, ...] = ()


@dataclass
class ModelCalls:
    """How a model is called, found out once: in whatever mode, with adapters or without.

    Args:
        styles: how documents may be kept apart, without those that the model has refused.
        plain_heads: by style, whether logits are one matmul.
    """

    styles: list[Documents] = field(default_factory=list)
    plain_heads: dict[Documents, bool] = field(default_factory=dict)


def trace_model(
    model: HFModel, layers: Sequence[str], recipe: Recipe, policy: Policy, machine: Machine, rows: int
) -> Trace:
    """Trace one micro-batch of `rows` rows through a model on the meta device, which stays as it is.

    Args:
        model: a skeleton.
        layers: names of the layers that are measured; all activations are kept, but of a model without any it is as
            the recipe says.
        recipe: reads the length of rows, image sizes and what is recomputed.
        policy: in one mode.
        machine: where it would run.
        rows: of the micro-batch.

    Raises:
        Untraceable: the model cannot run so.
    """
    return Tracer(model, layers, recipe, policy, machine).trace(rows)


class Tracer:
    """Traces micro-batches of different rows through one model, which is copied and converted once.

    Args:
        model, layers, recipe, policy, machine: see `trace_model`.
        calls: what is known of how the model is called, and becomes known.
    """

    def __init__(
        self,
        model: HFModel,
        layers: Sequence[str],
        recipe: Recipe,
        policy: Policy,
        machine: Machine,
        calls: ModelCalls | None = None,
    ) -> None:
        self.recipe = recipe
        self.model = copy.deepcopy(model)
        self._fake = TraceMode()
        self._layers = [self.model.get_submodule(name) for name in layers]
        self.calls = calls or ModelCalls()
        on_cpu = replace(policy, device_type="cpu")  # the trace's device, whatever the run's
        if not layers:
            self.model.activation_checkpoint = recipe.train.activation_checkpoint
            self.model.checkpoint_inputs = recipe.train.checkpoint_inputs
        with self._faked():
            to_fake(self.model, torch.device("cpu"))
            if machine.device == "cuda":
                fuse_attention([self.model.net, *self.model.layers])
            kernels = KERNELS if machine.device == "cpu" else OF_A_GPU
            convert(self.model, on_cpu, kernels=Kernels(machine, kernels, compile=False))
            for given in tile_weights(self.model).values():
                given.matmuls.expert_loop = AlikeExperts
            self.model.train()

    def trace(self, rows: int, measures: Measures = Measures.ALL) -> Trace:
        """Trace one micro-batch of so many rows through a Hugging Face model.

        Args:
            rows: of the micro-batch.
            measures: what is measured of each layer.

        Raises:
            Untraceable: the model cannot run so.
        """
        with self._faked():
            try:
                return self._traced(rows, measures)
            except TooLong as error:
                raise Untraceable(f"a step is too long to be traced ({error} for one layer of each kind)") from error
            except REFUSALS as error:
                raise Untraceable(f"the model cannot be traced without data ({_culprit(self.model, error)})") from error

    @contextmanager
    def _faked(self) -> Iterator[None]:
        with self._fake, quiet():
            yield

    def _traced(self, rows: int, measures: Measures) -> Trace:
        """Traced rows of the model.

        Raises:
            Untraceable: documents run as rows of their own.
            REFUSALS: the model cannot run so.
            TooLong: more than `LIMIT` operations.
        """
        if self.model.task == "image_classification":
            return self._trace_images(rows, measures)
        calls = self.calls
        if not calls.styles:
            calls.styles = list(document_styles(self.model))
        if calls.styles == ["rows"]:
            raise Untraceable(DOCUMENTS_AS_ROWS)
        while len(calls.styles) > 1:
            try:
                return self._trace_text(rows, calls.styles[0], measures)
            except REFUSALS:  # the run finds that out, too (`probe`), and takes the next one
                self.model.zero_grad()
                calls.styles.pop(0)
        found = self._trace_text(rows, calls.styles[0], measures)
        if calls.styles == ["rows"]:
            raise Untraceable(DOCUMENTS_AS_ROWS)
        return found

    def _trace_images(self, rows: int, measures: Measures) -> Trace:
        side, net = self.recipe.data.image_size, self.model.net
        pixels = torch.empty(rows, 3, side, side)

        def loss() -> Tensor:
            logits = net(pixel_values=pixels).logits
            return F.cross_entropy(logits.float(), torch.empty(rows, dtype=torch.int64), reduction="sum")

        return self._count(loss, measures, plain_head=False)

    def _trace_text(self, rows: int, documents: Documents, measures: Measures) -> Trace:
        model, device = self.model, torch.device("cpu")
        net: Any = model.net
        ids, arguments = text_inputs(model, rows, self.recipe.data.seq_len, device, documents)
        if model.task == "causal_lm" and self._plain_head(documents):
            return self._count(lambda: net.base_model(input_ids=ids, **arguments)[0], measures, plain_head=True)
        wanted = int(ids.numel() * (MASKED_SHARE if model.task == "masked_lm" else 1.0))

        def loss() -> Tensor:
            logits = net(input_ids=ids, **arguments).logits.flatten(0, 1)
            chosen = logits[torch.empty(wanted, dtype=torch.int64)]
            return F.cross_entropy(chosen.float(), torch.empty(wanted, dtype=torch.int64), reduction="sum")

        return self._count(loss, measures, plain_head=False)

    def _plain_head(self, documents: Documents) -> bool:
        """True if the traced model's logits are one matmul, asked once."""
        known = self.calls.plain_heads
        if documents not in known:
            inputs = text_inputs(self.model, 1, _SHORT, torch.device("cpu"), documents)
            known[documents] = has_plain_head(self.model.net, *inputs)
        return known[documents]

    def _count(self, run: Callable[[], Tensor], measures: Measures, *, plain_head: bool) -> Trace:
        """Count in a trace a forward pass, the backward pass from what it returns, and each of the layers."""
        model, live = self.model, EagerLiveBytes(LIMIT)
        with live.watching(model), live:
            out = run()
            kept, peak, gemms, attention = live.live, live.peak, dict(live.gemms), live.attention
            live.peak = live.passing_peak = live.live
            live.limit, live.in_backward = 0, True
            out.backward(torch.empty_like(out))
        del out
        model.zero_grad()
        grouped = any(isinstance(module, nn.modules.conv._ConvNd) and module.groups > 1 for module in model.modules())
        return Trace(
            kept=kept,
            peak=peak,
            backward=live.peak,
            passing=live.passing_peak,
            moved=live.moved,
            fresh=live.fresh,
            gemms=gemms,
            attention=attention,
            operations=live.operations,
            plain_head=plain_head,
            layers=trace_layers(self._layers, run, measures),
            notes=(GROUPED_CONVOLUTIONS,) if grouped else (),
        )


def _culprit(model: HFModel, error: Exception) -> str:
    """The innermost module of the model's own code that the error of a trace came through, and its first line."""
    name, trace = type(model.net).__name__, error.__traceback__
    while trace is not None:
        module = trace.tb_frame.f_locals.get("self")
        if isinstance(module, nn.Module) and not type(module).__module__.startswith("torch."):
            name = type(module).__name__
        trace = trace.tb_next
    first = next(iter(str(error).splitlines()), "") or type(error).__name__
    return f"module {name}: {first}"


@torch.no_grad()
def has_plain_head(net: Any, ids: Tensor, arguments: Mapping[str, Any]) -> bool:
    """True if a traced model has a plain head: its logits are the base model's hidden states times the output
    embedding's weight, and nothing else is computed behind the base model. The run compares bits (`probe`)."""
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
