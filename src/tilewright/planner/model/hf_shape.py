"""The shape of a Hugging Face model: its skeleton is traced with one row and with two."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import nn

from tilewright.core.config.recipe import Recipe
from tilewright.core.hardware import Machine
from tilewright.models.base.routers import find_routers
from tilewright.ops.base.compile import compiles_layers
from tilewright.ops.kernels import Kernels
from tilewright.ops.newton_schulz import operand_format
from tilewright.planner.machine.process_bytes import free_pages, process_size
from tilewright.planner.model.gemms import BYTES, DTYPES, LinearGemm, held_qdata, keeps_qdata, matmuls_of, operand_work
from tilewright.planner.model.model_shape import (
    Coding,
    LayerClass,
    Line,
    ModelShape,
    distinct,
    largest_weight,
    rule_notes,
)
from tilewright.planner.model.part_weights import Weights
from tilewright.planner.model.roofline import element_passes, walked
from tilewright.planner.model.skeleton import Skeleton
from tilewright.planner.trace.byte_counter import GemmKind, flops_of
from tilewright.planner.trace.layer_trace import Measures, TracedTraffic
from tilewright.planner.trace.model_trace import ModelCalls, Trace, Tracer, Untraceable
from tilewright.precision.policy.policy import Policy

EAGER = "activations are those of eager layers; compiled ones keep less"

Gemms = Mapping[GemmKind, tuple[int, float]]


def trace_twice(
    skeleton: Skeleton, recipe: Recipe, policy: Policy, machine: Machine, calls: ModelCalls
) -> tuple[Trace, Trace] | str:
    """Trace a Hugging Face model with one row and with two; FLOPs are read of one row alone; why there are no traces.
    `calls`: of the model, in any mode.

    What quantisation moves is priced apart (`model_shape.Coding`): with 8-bit matmuls all that is moved, and called, is
    that of the same model in BF16.
    """
    fp8 = policy.is_fp8
    memory = Measures.MEMORY if fp8 else Measures.MEMORY | Measures.TRAFFIC
    try:
        tracer = Tracer(skeleton.model, skeleton.names, recipe, policy, machine, calls)
        one, two = tracer.trace(1, memory | Measures.FLOPS), tracer.trace(2, memory)
        if not fp8:
            return one, two
        in_bf16 = policy.in_mode("bf16_mixed")
        plain = Tracer(skeleton.model, skeleton.names, recipe, in_bf16, machine, calls)
        return _moving_as(one, plain.trace(1, Measures.TRAFFIC)), _moving_as(two, plain.trace(2, Measures.TRAFFIC))
    except Untraceable as error:
        return str(error)


def _moving_as(found: Trace, plain: Trace) -> Trace:
    """A trace of a Hugging Face model with what another one moves."""
    layers = replace(found.layers, traffic=plain.layers.traffic)
    return replace(found, layers=layers, moved=plain.moved, fresh=plain.fresh, operations=plain.operations)


def foreign_shape(
    skeleton: Skeleton, recipe: Recipe, policy: Policy, machine: Machine, traced: tuple[Trace, Trace] | str
) -> ModelShape:
    """The shape of a Hugging Face model; of one that could not be traced its weights alone."""
    model = skeleton.model
    embedding, layers, head = skeleton.weights(
        policy, ep=recipe.parallel.ep, tp=recipe.parallel.tp, coded=skeleton.gathered_coded(policy, recipe.parallel)
    )
    net = model.net
    images = model.task == "image_classification"
    seq_len = 1 if images else recipe.data.seq_len
    output = None if images else model.head
    plain = not isinstance(traced, str) and traced[0].plain_head
    # What of the model is compiled.
    kernels = Kernels.from_sections(machine, recipe.ops, recipe.memory)
    choice = kernels.choices["cross_entropy", machine.device, DTYPES[policy.activation], ""]
    loss_compiled = plain and choice.candidate.name == "compiled"
    compiled = recipe.train.compile == "on" or compiles_layers(recipe.train.compile, machine, by_default=False)
    free = free_pages(machine, BYTES[policy.matmul])
    # The layers by their traces; without traces, their weights alone.
    if isinstance(traced, str):
        names = zip(skeleton.indices, layers, strict=True)
        classes = distinct(LayerClass(skeleton.class_name(), kind, w, w.count) for i, (kind, w) in enumerate(names))
        rest, backward, notes, unknown = LayerClass("rest", (-1,), Weights(), 0), Line(), (), traced
    else:
        found = _Found(skeleton, recipe, policy, machine, traced, seq_len, free, compiled)
        classes = distinct(found.layer(place, weights) for place, weights in enumerate(layers))
        rest, backward, unknown = found.rest(), found.through("backward"), ""
        notes = (*traced[0].notes, *((EAGER,) if compiled else ()))
    # Both ends of the model.
    width = getattr(net.config.get_text_config(), "hidden_size", 0)
    words = getattr(model.get_submodule(skeleton.embedding), "weight", None) if skeleton.embedding else None
    return ModelShape(
        family=f"{type(net).__name__} ({net.config.model_type})",
        classes=classes,
        rest=rest,
        embedding=embedding,
        head=head,
        tied=words is not None and output is not None and output.weight is words,
        plain_head=plain,
        seq_len=seq_len,
        dim=output.in_features if plain and output is not None else width,
        vocab_size=len(output.weight) if plain and output is not None else 0,
        stream_bytes=BYTES[policy.stream],
        matmul_bytes=BYTES[policy.matmul],
        matmul_format=policy.matmul,
        direction_format=operand_format(machine, recipe.ops.newton_schulz),
        logit_bytes=BYTES[policy.activation],
        compiled=compiled,
        loss_compiled=loss_compiled,
        process_bytes=process_size(machine, compiles=compiled or loss_compiled, foreign=True),
        keeps_freed=machine.device == "cpu",
        gaps=free,
        spread=free,
        rebuilt=1 + free,
        backward=backward,
        notes=(*rule_notes(recipe), *notes),
        unknown=unknown,
    )


class _Found:
    """Layer classes and what is around them, from the traces of one row and of two."""

    def __init__(
        self, skeleton: Skeleton, recipe: Recipe, policy: Policy, machine: Machine,
        traced: tuple[Trace, Trace], seq_len: int, free: float, compiled: bool,
    ) -> None:  # fmt: skip
        self.skeleton, self.machine, self.traced = skeleton, machine, traced
        self.seq_len, self.free, self.compiled = seq_len, free, compiled
        self.kept_codes = keeps_qdata(machine, recipe)
        self.causal = 0.5 if recipe.model.task == "causal_lm" else 1.0
        self.stored = BYTES[policy.activation]
        one = traced[0]
        linears = {name: module for name, module in skeleton.model.named_modules() if isinstance(module, nn.Module)}
        self.layer_gemms = [
            _named(layer.gemms, name) for name, layer in zip(skeleton.names, one.layers.flops, strict=True)
        ]
        self.rest_gemms = _without(one.gemms, self.layer_gemms)
        by_name: dict[str, float] = {}
        for gemms in (*self.layer_gemms, self.rest_gemms):
            for kind, (_, flops) in gemms.items():
                by_name[kind.module] = by_name.get(kind.module, 0.0) + flops
        shares = {}
        for name, flops in by_name.items():
            weight = getattr(linears.get(name), "weight", None) if name else None
            if weight is not None and weight.dim() == 2:
                shares[name] = flops / (2 * seq_len * weight.numel())
        self.matmuls = matmuls_of(skeleton.model, skeleton.decided(policy), shares)

    def through(self, name: str) -> Line:
        """A number of the whole trace of a Hugging Face model."""
        return Line.through(*(getattr(trace, name) for trace in self.traced))

    def layer(self, place: int, weights: Weights) -> LayerClass:
        """The class of a layer of a Hugging Face model."""
        # Two traces, of one row and of two: a line through both gives bytes for any number of rows.
        one, two = (trace.layers.memory[place] for trace in self.traced)
        flops = self.traced[0].layers.flops[place]
        prefix = f"{self.skeleton.names[place]}."
        matmuls = tuple(matmul for matmul in self.matmuls if matmul.fqn.startswith(prefix))
        others = _beside(self.layer_gemms[place], matmuls)
        module = self.skeleton.layers[place]
        # Of experts stacked in one tensor a token uses some: how many, the FLOPs outside of linear layers tell.
        stacked = sum(p.numel() for p in module.parameters() if p.dim() == 3)
        active = weights.count - stacked
        free = 1 + self.free

        def line(name: str) -> Line:
            return Line.through(getattr(one, name), getattr(two, name))

        return LayerClass(
            name=self.skeleton.class_name(experts=stacked > 0),
            indices=self.skeleton.indices[place],
            weights=weights,
            active_parameters=min(weights.count, active + flops_of(others) / (2 * self.seq_len)),
            kept=line("kept"),
            kept_selective=line("kept_selective"),
            kept_matmuls=line("kept_matmuls"),
            kept_attention=line("kept_attention"),
            input=Line(0, one.input),
            routes=next(find_routers(module), None) is not None,
            routed=flops.routed,
            work=line("work").times(free) + self._operands(matmuls),
            moved=self._walked(*(trace.layers.traffic[place] for trace in self.traced)),
            fused=self.compiled,
            mlp_kept=line("mlp_kept"),
            mlp_work=line("mlp_work").times(free),
            matmuls=matmuls,
            matmul_flops=flops.matmuls,
            last_flops=flops.last_matmuls,
            mlp_flops=flops.mlp_matmuls,
            attention_flops=self.causal * flops.attention,
            largest_weight=largest_weight((p.numel() for p in module.parameters()), self.machine),
            others=others,
            operations=0 if self.compiled else self.traced[0].layers.traffic[place].operations,
            buffers=float(held_qdata(matmuls, self.kept_codes)),
            coding=Coding.of(matmuls, self.seq_len, self.machine, self.kept_codes),
        )

    def rest(self) -> LayerClass:
        """The parts of a Hugging Face model's skeleton outside of its layers."""
        one = self.traced[0]
        inside = tuple(f"{name}." for name in self.skeleton.names)
        matmuls = tuple(p for p in self.matmuls if not p.fqn.startswith(inside))
        gradient = self.seq_len * self.skeleton_width * self.stored if one.plain_head else 0.0
        work = Line()
        if not one.plain_head:
            needs = (max(trace.peak, trace.passing) - trace.kept for trace in self.traced)
            work = Line.through(*needs)
        return LayerClass(
            name="rest",
            indices=(-1,),
            weights=Weights(),
            active_parameters=0,
            kept=Line.through(*(_rest(trace, trace.layers.memory, "kept") for trace in self.traced))
            + Line(0, gradient),
            work=work + self._operands(matmuls),
            moved=Line.through(*(walked(self.machine, *_rest_moved(trace)) for trace in self.traced)),
            matmuls=matmuls,
            matmul_flops=flops_of(self.rest_gemms),
            attention_flops=self.causal * _rest(one, one.layers.flops, "attention"),
            others=_beside(self.rest_gemms, matmuls),
            operations=int(_rest(one, one.layers.traffic, "operations")),
            buffers=float(held_qdata(matmuls, self.kept_codes)),
            coding=Coding.of(matmuls, self.seq_len, self.machine, self.kept_codes),
        )

    @property
    def skeleton_width(self) -> int:
        """Features that a plain head of a Hugging Face model reads."""
        return self.skeleton.model.head.in_features

    def _operands(self, matmuls: Sequence[LinearGemm]) -> Line:
        return Line.through(*(operand_work(matmuls, rows * self.seq_len, self.machine) for rows in (1, 2)))

    def _walked(self, one: TracedTraffic, two: TracedTraffic) -> Line:
        """The bytes that loops of a Hugging Face layer move; compiled ones make fewer passes, into memory that is
        there."""
        if self.compiled:
            return Line.through(one.moved, two.moved).times(element_passes(True) / element_passes(False))
        return Line.through(*(walked(self.machine, layer.moved, layer.fresh) for layer in (one, two)))


def _rest(trace: Trace, layers: Sequence[object], name: str) -> float:
    """The part of a traced number that belongs to no layer of a Hugging Face model."""
    return max(0.0, getattr(trace, name) - sum(getattr(layer, name) for layer in layers))


def _rest_moved(trace: Trace) -> tuple[float, float]:
    """Bytes that operations outside the layers of a Hugging Face model move, and those that they write into new
    memory."""
    return _rest(trace, trace.layers.traffic, "moved"), _rest(trace, trace.layers.traffic, "fresh")


def _named(gemms: Gemms, layer: str) -> Gemms:
    """Matmuls of a Hugging Face layer by the names of linear layers in the model."""
    return {_full(kind, layer): found for kind, found in gemms.items()}


def _full(kind: GemmKind, layer: str) -> GemmKind:
    return GemmKind(f"{layer}.{kind.module}" if kind.module else "", kind.dtype, kind.width, kind.groups)


def _without(whole: Gemms, parts: Sequence[Gemms]) -> Gemms:
    """Matmuls of a whole Hugging Face model that are in no part."""
    found = {}
    for kind, (calls, flops) in whole.items():
        of_parts = [part.get(kind, (0, 0.0)) for part in parts]
        left = calls - sum(one for one, _ in of_parts), flops - sum(one for _, one in of_parts)
        if left[0] > 0 and left[1] > 0:
            found[kind] = left
    return found


def _beside(gemms: Gemms, matmuls: Sequence[LinearGemm]) -> Gemms:
    """Matmuls of a Hugging Face model that are no linear layer's."""
    names = {matmul.fqn for matmul in matmuls}
    return {kind: found for kind, found in gemms.items() if kind.module not in names}
