"""Layer classes of a Hugging Face model: one layer of each class is traced with one row and with two.

Called by `plan.classes`.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from tilewright.core.config import ModelSection, Recipe
from tilewright.core.errors import UnknownFitError
from tilewright.core.hardware import Machine
from tilewright.models.hf import HFModel
from tilewright.models.hf_probe import REFUSALS
from tilewright.ops.kernels import Kernels
from tilewright.plan.fake_model import KERNELS, document_styles, quiet, text_inputs, to_fake
from tilewright.plan.fake_operations import GroupedGemms, fuse_attention
from tilewright.plan.footprint import held_codes, process_size
from tilewright.plan.layer_trace import TracedLayer, trace_layers
from tilewright.plan.live_bytes import GemmKind
from tilewright.plan.roofline import FORMAT_OF, walked
from tilewright.plan.shape import Coding, LayerClass, Line, ModelShape, largest_weight, rule_notes
from tilewright.plan.skeleton import Skeleton
from tilewright.plan.traced import free_pages
from tilewright.plan.workload import BYTES, DTYPES, products_of
from tilewright.precision.convert import convert
from tilewright.precision.policy import Policy


def foreign_shape(
    skeleton: Skeleton, recipe: Recipe, policy: Policy, machine: Machine, traced: list[list[TracedLayer]]
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
                largest_weight=largest_weight((p.numel() for p in first[place].parameters()), machine),
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
        notes=rule_notes(recipe),
    )


def _by_format(others: Mapping[GemmKind, float]) -> dict[str, float]:
    found: dict[str, float] = {}
    for kind, flops in others.items():
        name = FORMAT_OF.get(kind.dtype, "fp32")
        found[name] = found.get(name, 0.0) + flops
    return found


def _name(place: int, skeleton: Skeleton, experts: bool) -> str:
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


def trace_classes(skeleton: Skeleton, recipe: Recipe, policy: Policy, machine: Machine) -> list[list[TracedLayer]]:
    """Each class's layer, with one row and with two."""
    numbers = _layer_numbers(skeleton.model, skeleton.layers)
    return [
        _trace_foreign(copy.deepcopy(skeleton.model), numbers, recipe, policy, machine, rows)  # it is used up
        for rows in (1, 2)
    ]
