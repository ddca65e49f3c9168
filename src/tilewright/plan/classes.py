"""Layer classes of a model: layers of equal structure, measured once, however many there are.

A model of 671 billion parameters has a dozen kinds of matrices. Its layers are sorted by structure, one of each class
is measured (`layer_trace`, or the decoder's own formulas in `models.activation_bytes`), and `plan.solve` decides how
many of each class are treated how. Everything is a straight line in the rows of a micro-batch. No weights, no GPU.
"""

import copy
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from tilewright.core.config import ModelSection, Recipe
from tilewright.core.errors import ConfigError, UnknownFitError
from tilewright.core.hardware import Machine
from tilewright.models.activation_bytes import layer_bytes, tile_bytes, weight_copy_bytes
from tilewright.models.build import build_model, decoder_config
from tilewright.models.config import DecoderConfig
from tilewright.models.count import count_flops, layer_parameters, mlp_weights
from tilewright.models.decoder import Decoder
from tilewright.models.hf import HFModel
from tilewright.models.hf_probe import REFUSALS
from tilewright.models.shapes_only import shapes_only
from tilewright.ops.kernels import Kernels
from tilewright.plan.fake_model import KERNELS, document_styles, quiet, text_inputs, to_fake
from tilewright.plan.fake_operations import GroupedGemms, fuse_attention
from tilewright.plan.footprint import KIND_BYTES, Pages, held_codes, layer_storages, process_bytes, process_size
from tilewright.plan.layer_trace import TracedLayer, trace_layers
from tilewright.plan.live_bytes import GemmKind
from tilewright.plan.roofline import FORMAT_OF, element_passes, expert_rows, walked
from tilewright.plan.shape import Coding, LayerClass, Line, ModelShape
from tilewright.plan.stacks import find_stack, keep_layers
from tilewright.plan.traced import free_pages
from tilewright.plan.workload import BYTES, DTYPES, Planner, Workload, products_of
from tilewright.precision.convert import convert
from tilewright.precision.policy import Policy
from tilewright.precision.schedule import ModeSchedule

WORK_GUESS = 0.6
"""Backward's need beyond what a layer keeps, as a share of it, where no trace can tell (experts of tilewright's own
decoder); what traces of dense layers say, rounded up."""


class ShapeFinder:
    """Finds shapes of one model in several settings; keeps the meta model, and what was traced, between them.

    Args:
        vocab_size: of the tokenizer.
        machine: where it would run.
    """

    def __init__(self, vocab_size: int, machine: Machine) -> None:
        self.vocab_size = vocab_size
        self.machine = machine
        self._skeletons: dict[object, _Skeleton] = {}
        self._traces: dict[object, list[list[TracedLayer]]] = {}

    def find(self, recipe: Recipe) -> ModelShape:
        """The shape of a recipe's model.

        Raises:
            ConfigError: not a model that this planner knows.
            UnknownFitError: one whose layer cannot be traced.
            CheckpointError: its folder cannot be read.
        """
        _refuse(recipe)
        mode = ModeSchedule.from_section(recipe.precision, recipe.train.steps).mode
        parameters = "" if recipe.optim.master == "fp32" else "bf16"
        policy = Policy.from_section(recipe.precision, self.machine.device, parameters=parameters).in_mode(mode)
        if recipe.model not in self._skeletons:
            self._skeletons[recipe.model] = _skeleton(recipe, self.vocab_size)
        skeleton = self._skeletons[recipe.model]
        if skeleton.config is not None:
            return _decoder_shape(skeleton, recipe, policy, mode, self.machine)
        key = (recipe.model, recipe.precision, parameters, recipe.data.seq_len)
        if key not in self._traces:  # seconds for a large model, and most settings change nothing of it
            self._traces[key] = _traced(skeleton, recipe, policy, self.machine)
        return _foreign_shape(skeleton, recipe, policy, self.machine, self._traces[key])


@dataclass(frozen=True)
class _Skeleton:
    """A meta model with one layer of each class in the place of all of them."""

    model: nn.Module
    layers: tuple[nn.Module, ...]
    indices: tuple[tuple[int, ...], ...]
    embedding_parameters: int
    head_parameters: int
    config: DecoderConfig | None
    """The whole decoder's; None for a foreign model."""


def _refuse(recipe: Recipe) -> None:
    task = recipe.model.task
    if task != "causal_lm":
        raise ConfigError(
            "The joint planner knows causal language models only.",
            got=f'model.task = "{task}"',
            need='model.task = "causal_lm"',
            try_="tilewright plan without --device-memory, --host-memory and --on",
            where="model.task",
        )
    if recipe.lora.rank:
        raise ConfigError(
            "The joint planner does not know adapters yet.",
            got=f"lora.rank = {recipe.lora.rank}",
            need="lora.rank = 0",
            try_="tilewright plan without --device-memory, --host-memory and --on",
            where="lora.rank",
        )


def _skeleton(recipe: Recipe, vocab_size: int) -> _Skeleton:
    if recipe.model.kind == "decoder":
        return _short_decoder(recipe.model, vocab_size)
    model = build_model(recipe.model.model_copy(update={"weights": "random"}), vocab_size, device="meta")
    assert isinstance(model, HFModel)
    return _foreign_skeleton(model)


def _short_decoder(section: ModelSection, vocab_size: int) -> _Skeleton:
    """A decoder with one layer of each kind."""
    config = decoder_config(section, vocab_size)
    kinds = {config.is_moe(layer): layer for layer in reversed(range(config.num_layers))}
    indices = tuple(
        tuple(layer for layer in range(config.num_layers) if config.is_moe(layer) == moe) for moe in sorted(kinds)
    )
    short = replace(config, num_layers=len(kinds), num_dense_layers=int(False in kinds))
    with shapes_only():
        model = Decoder(short, Kernels.default())
    embedding = config.vocab_size * config.dim
    head = config.dim + (0 if config.tie_embeddings else embedding)
    return _Skeleton(model, tuple(model.blocks), indices, embedding, head, config)


def _foreign_skeleton(model: HFModel) -> _Skeleton:
    """Sort the layers of a foreign model by structure and keep one of each."""
    stack = find_stack(model)
    if stack is None:
        raise ConfigError(
            "The planner finds no layers in this model.",
            got=type(model.net).__name__,
            need="a list of layers (torch's ModuleList)",
            try_="tilewright plan without --device-memory, --host-memory and --on",
            where="model.path",
        )
    layers = model.get_submodule(stack.name)
    assert isinstance(layers, nn.ModuleList)
    inside = {id(p) for p in layers.parameters()}
    net: Any = model.net
    embedding = sum(p.numel() for p in net.get_input_embeddings().parameters())
    total = sum(p.numel() for p in model.net.parameters() if id(p) not in inside)
    first = tuple(layers[indices[0]] for indices in stack.kinds)
    keep_layers(model, stack, [indices[0] for indices in stack.kinds])
    return _Skeleton(model, first, stack.kinds, embedding, total - embedding, None)


def _traced(skeleton: _Skeleton, recipe: Recipe, policy: Policy, machine: Machine) -> list[list[TracedLayer]]:
    """Each class's layer, with one row and with two."""
    numbers = _layer_numbers(skeleton.model, skeleton.layers)
    return [
        _trace_foreign(copy.deepcopy(skeleton.model), numbers, recipe, policy, machine, rows)  # it is used up
        for rows in (1, 2)
    ]


def _foreign_shape(
    skeleton: _Skeleton, recipe: Recipe, policy: Policy, machine: Machine, traced: list[list[TracedLayer]]
) -> ModelShape:
    model = copy.deepcopy(skeleton.model)
    assert isinstance(model, HFModel)
    first = copy.deepcopy(skeleton.layers)  # for shapes
    table = products_of(model, policy, None)
    numbers = _layer_numbers(skeleton.model, skeleton.layers)
    free = free_pages(machine, BYTES[policy.product])
    classes = []
    for place, (indices, one, two) in enumerate(zip(skeleton.indices, *traced, strict=True)):
        products = tuple(p for p in table if p.fqn.startswith(numbers[place] + "."))
        flops = one.products
        num_parameters = sum(p.numel() for p in first[place].parameters())
        active = num_parameters - max(0.0, sum(p.numel() for p in first[place].parameters() if p.dim() == 3))
        linear = sum(p.num_weights for p in products)
        experts = max(0.0, flops / (2 * recipe.data.seq_len) - linear)
        kept, of_mlp = Line.through(one.kept, two.kept), Line.through(one.mlp_kept, two.mlp_kept)
        classes.append(
            LayerClass(
                name=_name(place, skeleton, active < num_parameters),
                indices=indices,
                num_parameters=num_parameters,
                active_parameters=min(num_parameters, active + experts),
                kept=kept,
                kept_selective=Line.through(one.kept_selective, two.kept_selective),
                kept_products=Line.through(one.kept_products, two.kept_products),
                kept_attention=Line.through(one.kept_attention, two.kept_attention),
                input=Line(0, one.input),
                work=Line.through(one.work, two.work).times(1 + free),
                moved=Line.through(*(walked(machine, layer.moved, layer.fresh) for layer in (one, two))),
                fused=False,
                mlp_kept=of_mlp,
                mlp_work=Line.through(one.mlp_work, two.mlp_work).times(1 + free),
                mask=0.0,
                products=products,
                product_flops=flops,
                last_flops=one.last_products,
                mlp_flops=one.mlp_products,
                attention_flops=one.attention / 2,
                largest_weight=_largest((p.numel() for p in first[place].parameters()), machine),
                others=_by_format(one.others),
                operations=one.operations,
                codes=float(held_codes(products, machine)),
                coding=Coding.of(products, recipe.data.seq_len, machine),
            )
        )
    net: Any = model.net
    layer = net.get_output_embeddings()
    kernels = Kernels.from_sections(machine, recipe.ops, recipe.memory)
    ours = isinstance(layer, nn.Linear) and layer.bias is None
    choice = kernels.choices["cross_entropy", machine.device, DTYPES[policy.activation], ""]
    loss_compiled = ours and choice.candidate.name == "compiled"
    return ModelShape(
        family=f"{type(net).__name__} ({net.config.model_type})",
        classes=tuple(classes),
        seq_len=recipe.data.seq_len,
        dim=layer.in_features,
        vocab_size=layer.out_features,
        embedding_parameters=skeleton.embedding_parameters,
        head_parameters=skeleton.head_parameters,
        stored_bytes=2 if recipe.optim.master != "fp32" else BYTES[policy.storage],
        stream_bytes=BYTES[policy.stream],
        product_bytes=BYTES[policy.product],
        product_format=policy.product,
        logit_bytes=BYTES[policy.activation],
        compiled=False,
        loss_compiled=loss_compiled,
        process_bytes=process_size(machine, compiles=loss_compiled, foreign=True),
        gaps=free,
        rebuilt=1 + free,
        notes=_notes(recipe),
    )


def _by_format(others: Mapping[GemmKind, float]) -> dict[str, float]:
    found: dict[str, float] = {}
    for kind, flops in others.items():
        name = FORMAT_OF.get(kind.dtype, "fp32")
        found[name] = found.get(name, 0.0) + flops
    return found


def _name(place: int, skeleton: _Skeleton, experts: bool) -> str:
    if len(skeleton.layers) == 1:
        return "layer"
    many = len(skeleton.layers) > 2
    return ("experts" if experts else "dense") + (f"-{place}" if many else "")


def _layer_numbers(model: nn.Module, layers: Sequence[nn.Module]) -> list[str]:
    names = {id(module): name for name, module in model.named_modules()}
    return [names[id(layer)] for layer in layers]


def _trace_foreign(
    model: nn.Module, names: Sequence[str], recipe: Recipe, policy: Policy, machine: Machine, rows: int
) -> list[TracedLayer]:
    """Trace one layer of each class on a fake CPU; `model` is used up by it."""
    assert isinstance(model, HFModel)
    device, on_cpu = torch.device("cpu"), replace(policy, device_type="cpu")  # the trace's device, whatever the run's
    section = recipe.model
    with FakeTensorMode(), quiet(), GroupedGemms():
        to_fake(model, device)
        layers = [model.get_submodule(name) for name in names]
        if machine.device == "cuda":
            fuse_attention(layers)
        convert(model, on_cpu, kernels=Kernels(machine, KERNELS, compile=False))
        net: Any = model.train().net
        styles = document_styles(model)
        for style in styles:
            ids, arguments = text_inputs(model, rows, recipe.data.seq_len, device, style)
            try:
                return trace_layers(layers, lambda ids=ids, more=arguments: net.base_model(input_ids=ids, **more))
            except REFUSALS as error:
                if style == styles[-1]:
                    raise _untraceable(section, error, layers) from error
    raise AssertionError("a model has a style")


def _untraceable(section: ModelSection, error: Exception, layers: Sequence[nn.Module]) -> UnknownFitError:
    """Which module stopped the trace, as far as the traceback tells, and what to do."""
    culprit, trace = type(layers[0]).__name__, error.__traceback__
    while trace is not None:
        module = trace.tb_frame.f_locals.get("self")
        if isinstance(module, nn.Module) and not type(module).__module__.startswith("torch."):
            culprit = type(module).__name__
        trace = trace.tb_next
    return UnknownFitError(
        "A layer of this model cannot be traced without data.",
        got=f"module {culprit}: {str(error).splitlines()[0]}",
        need="a forward pass whose shapes do not depend on the values of tensors",
        try_='describe the model as a decoder of the same shape (model.kind = "decoder", model.dim, model.num_layers, '
        "model.num_experts, ...): its costs are known by formula",
        where=section.path or "model",
    )


def _decoder_shape(skeleton: _Skeleton, recipe: Recipe, policy: Policy, mode: str, machine: Machine) -> ModelShape:
    assert skeleton.config is not None
    config: DecoderConfig = skeleton.config
    short: Any = skeleton.model
    work = Planner(config.vocab_size, machine).workload(_described(recipe, short.config))
    flops = count_flops(config, recipe.data.seq_len)
    storages, eager = layer_storages(work, mode), layer_storages(replace(work, compiled=False), mode)
    pages = Pages.of(machine, BYTES[policy.product], work.compiled)
    classes = []
    for place, indices in enumerate(skeleton.indices):
        index, moe = indices[0], short.config.is_moe(place)
        kept = {
            name: Line.through(*(_kept(work, short.config, place, storages, name, policy, rows) for rows in (1, 2)))
            for name in ("none", "selective", "products", "attention")
        }
        share = _work_share(config, policy, machine, pages, kept["none"].per_row / recipe.data.seq_len)
        mlp = _mlp_share(short.config, place, storages[place])
        mask = 0.0 if not work.attention_masks else float(recipe.data.seq_len**2 * BYTES[policy.product])
        everything = Line(kept["none"].fixed, kept["none"].per_row + mask)
        of_mlp = Line(0, mlp * kept["none"].per_row)
        fused = work.compiled and not moe  # as in `plan.roofline`
        passed = storages if fused else eager
        walked = [_kept(work, short.config, place, passed, "none", policy, rows) for rows in (1, 2)]
        wide = layer_parameters(config, index)
        widths = (config.expert_dim if moe else config.ffn_dim, config.dim)
        products = tuple(p for p in work.products[mode] if f".layers.{place}." in p.fqn)
        inactive = config.num_experts - config.num_experts_per_token if moe else 0
        classes.append(
            LayerClass(
                name="layer" if len(skeleton.indices) == 1 else "experts" if moe else "dense",
                indices=indices,
                num_parameters=wide,
                active_parameters=wide - inactive * 3 * config.dim * config.expert_dim,
                kept=everything,
                kept_selective=kept["selective"],
                kept_products=kept["products"],
                kept_attention=kept["attention"],
                input=Line(0, recipe.data.seq_len * config.dim * BYTES[policy.stream]),
                work=Line(0, share * kept["none"].per_row),
                moved=Line.through(*walked).times(element_passes(fused)),
                fused=fused,
                mlp_kept=of_mlp,
                mlp_work=Line(0, share * of_mlp.per_row),
                mask=mask,
                products=products,
                product_flops=float(flops.layers[index] * recipe.data.seq_len),
                last_flops=float(flops.last[index] * recipe.data.seq_len),
                mlp_flops=2.0 * mlp_weights(config, index) * recipe.data.seq_len
                - 2.0 * inactive * 3 * config.dim * config.expert_dim * recipe.data.seq_len,
                attention_flops=flops.attention * recipe.data.seq_len,
                largest_weight=_largest((config.dim * width for width in widths), machine),
                called_experts=config.num_experts if moe else 0,
                codes=float(held_codes(products, machine)),
                coding=Coding.of(products, recipe.data.seq_len, machine),
            )
        )
    return ModelShape(
        family="tilewright decoder",
        classes=tuple(classes),
        seq_len=recipe.data.seq_len,
        dim=config.dim,
        vocab_size=config.vocab_size,
        embedding_parameters=skeleton.embedding_parameters,
        head_parameters=skeleton.head_parameters,
        stored_bytes=work.parameter_bytes / work.num_parameters,
        stream_bytes=BYTES[policy.stream],
        product_bytes=BYTES[policy.product],
        product_format=policy.product,
        logit_bytes=BYTES[policy.activation],
        compiled=work.compiled,
        loss_compiled=work.loss_compiled,
        process_bytes=process_bytes(work),
        kind_bytes=KIND_BYTES if work.compiled and machine.device == "cpu" else 0,
        expert_rows=expert_rows(machine),
        gaps=pages.gaps,
        rebuilt=pages.rebuilt,
        notes=_notes(recipe),
    )


def _largest(sizes: Iterable[int], machine: Machine) -> int:
    """Elements of the largest weight on a GPU."""
    return 0 if machine.device == "cpu" else max(sizes, default=0)


def _described(recipe: Recipe, config: DecoderConfig) -> Recipe:
    """The recipe with a decoder of this shape, its checkpoint mode left out."""
    names = {field.name for field in fields(DecoderConfig)} & set(ModelSection.model_fields)
    section = ModelSection(**{name: getattr(config, name) for name in names})
    train = recipe.train.model_copy(update={"activation_checkpoint": "none"})
    return recipe.model_copy(update={"model": section, "train": train})


def _kept(
    work: Workload, config: DecoderConfig, layer: int, storages: Any, name: Any, policy: Policy, rows: int
) -> float:
    """Bytes that a decoder's layer keeps of `rows` rows."""
    kept, tokens = storages[layer], rows * work.seq_len
    total = layer_bytes(config, layer, name, kept) * tokens + tile_bytes(config, layer, name, kept, tokens)
    return total + weight_copy_bytes(config, layer, name, kept, BYTES[policy.storage])


def _mlp_share(config: DecoderConfig, layer: int, kept: Any) -> float:
    """The token-wise part's share of what a layer keeps, found by making that part almost nothing."""
    thin = replace(config, ffn_dim=1, expert_dim=1 if config.num_experts else 0)
    whole, rest = layer_bytes(config, layer, "none", kept), layer_bytes(thin, layer, "none", kept)
    return max(0.0, 1 - rest / whole)


def work_per_token(config: DecoderConfig, product: int, stream: int) -> float:
    """Bytes a token that backward of an eager dense layer has alive beyond what the layer keeps.

    What traces say (tests/plan/test_classes.py): the gradients around SwiGLU, which is computed in FP32, and that of
    the layer's output; where the MLP is thin, attention's.

    Args:
        config: of the decoder.
        product: bytes of a number in the products.
        stream: bytes of a number in the residual stream.
    """
    around_mlp = (10 if product == 2 else 8) * config.ffn_dim + stream * config.dim
    return max(around_mlp, 12.0 * config.dim)


def _work_share(config: DecoderConfig, policy: Policy, machine: Machine, pages: Pages, kept: float) -> float:
    """Backward's need as a share of the `kept` bytes a token of a layer; on a CPU as measured."""
    if machine.device == "cpu":
        return pages.work
    if config.num_experts or policy.is_fp8:
        return WORK_GUESS
    return work_per_token(config, BYTES[policy.product], BYTES[policy.stream]) / kept


def _notes(recipe: Recipe) -> tuple[str, ...]:
    single = [rule.match for rule in recipe.precision.rules if re.search(r"layers?\.\d", rule.match)]
    if not single:
        return ()
    return (f"precision rules of single layers count for the first of their class: {', '.join(single)}",)
