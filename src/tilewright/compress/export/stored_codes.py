"""Codes that an export writes as they are, in place of those that a converter would find by rounding.

Three sources: the rules of a run that was trained for integers, whose codes are what it trained with; GPTQ and AWQ,
calibrated on the run's own training stream; and rounding with scales of least error, for all matrices that the others
leave. Four bits have groups of 32 with scales that FP16 holds, so a block of Q4_0 and a group of XNNPACK's 8da4w take
them unchanged. Q4_0 takes negative scales too, which lose less; XNNPACK takes none.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from tilewright.compress.quantize.quantize import quantize, round_weight
from tilewright.compress.quantize.spec import QuantSpec
from tilewright.core.config.recipe import Recipe
from tilewright.core.errors import ConfigError
from tilewright.data.batches.stream import Stream
from tilewright.formats.integer import IntegerTensor
from tilewright.precision.assign.conversion_plan import decide_all
from tilewright.precision.integer.compute_formats import COMPUTE_FORMATS
from tilewright.precision.policy.policy import Policy, in_fp32

Method = Literal["auto", "rtn", "gptq", "awq"]
METHODS: tuple[Method, ...] = ("auto", "rtn", "gptq", "awq")
GROUP = 32
"""Of four bits: that of Q4_0, and the smallest of XNNPACK."""
CALIBRATION_ROWS = 64
"""Rows of the run's training stream that GPTQ and AWQ see."""


@dataclass(frozen=True)
class Coded:
    """A model and the codes of some of its matrices.

    Args:
        model: FP32; AWQ's has scaled norms, so that all that is not in `codes` is read from here.
        codes: by the parameter's name in the model's state, a tied matrix under its first name.
        how: where the codes are from, for the record; "" where there are none.
        trained: whether they are those that the run was trained with, of all layers that it rounds.
    """

    model: Any
    codes: Mapping[str, IntegerTensor] = field(default_factory=dict)
    how: str = ""
    trained: bool = False

    def of_net(self) -> dict[str, IntegerTensor]:
        """The stored codes of a model under Hugging Face's names."""
        names = {id(param): name for name, param in self.model.net.named_parameters()}
        return {names[id(self.model.get_parameter(name))]: found for name, found in self.codes.items()}


def trained_codes(model: nn.Module, recipe: Recipe, bits: int) -> Coded:
    """Codes of the weights that a run trained in `bits` bits by its rules, so that the export stores those."""
    policy = in_fp32(Policy.from_section(recipe.precision, "cpu"))
    if not policy.rounds_to_integers:
        return Coded(model)
    codes: dict[str, IntegerTensor] = {}
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for site, decision in decide_all(model, policy).sites:
        if decision.to_integers and (form := COMPUTE_FORMATS[decision.compute]).spec.bits == bits:
            weight = cast(Tensor, site.module.weight)
            codes[names[id(weight)]] = form.quantize(weight)
    how = f"{len(codes)} matrices with the codes that they were trained with" if codes else ""
    return Coded(model, codes, how, trained=bool(codes))


def four_bit_codes(model: nn.Module, recipe: Recipe, data: Any, method: Method, negative: bool = False) -> Coded:
    """Codes to store in four bits, of all linear layers and embeddings whose rows are whole groups.

    Args:
        model: FP32, on the CPU.
        recipe: of the run.
        data: gives the prepared data; called where text is needed.
        method: auto: as trained, else rounded; rtn: rounded.
        negative: whether the format takes negative scales. Trained codes have none.

    Raises:
        ConfigError: GPTQ or AWQ for a model that reads images.
    """
    if method in ("auto", "rtn"):
        return _rounded(trained_codes(model, recipe, 4) if method == "auto" else Coded(model), negative)
    if recipe.model.task == "image_classification":
        raise ConfigError(
            f"{method.upper()} needs text to calibrate on",
            got='model.task = "image_classification"',
            need="a language model",
            try_="--method rtn",
            where="--method",
        )
    batches = calibration(recipe, data())
    found = quantize(model, replace(_spec(negative), method=method), batches)
    codes = {name: weight for name, weight in found.weights.items() if weight.shape[1] % GROUP == 0}
    rows = sum(len(batch["input_ids"]) for batch in batches)
    how = f"{len(codes)} matrices by {method.upper()}, calibrated on {rows} rows of the run's training data"
    return _rounded(Coded(found.model, codes, how), negative)


def _spec(negative: bool) -> QuantSpec:
    return QuantSpec(bits=4, group=GROUP, embedding_bits=0, head_bits=0, half_scales=True, negative_scales=negative)


def _rounded(coded: Coded, negative: bool) -> Coded:
    """Stored codes with those of the linear layers and embeddings that have none yet."""
    names = {id(parameter): name for name, parameter in coded.model.named_parameters()}
    weights = {
        names[id(module.weight)]: module.weight.detach()
        for module in coded.model.modules()
        if isinstance(module, (nn.Linear, nn.Embedding)) and module.weight.shape[1] % GROUP == 0
    }
    spec = _spec(negative)
    rest = {name: round_weight(weight, spec) for name, weight in weights.items() if name not in coded.codes}
    told = [coded.how] if coded.how else []
    told += [f"{len(rest)} matrices rounded with scales of least error"] if rest else []
    return replace(coded, codes={**coded.codes, **rest}, how=", ".join(told))


def calibration(recipe: Recipe, data: Any, rows: int = CALIBRATION_ROWS) -> list[dict[str, Tensor]]:
    """Take micro-batches from the start of the run's training stream, at least `rows` rows, to calibrate the codes."""
    pairs = recipe.data.format == "preferences"
    size = max(1, recipe.train.micro_batch_size // (2 if pairs else 1))
    stream = Stream(
        data, seed=recipe.run.seed, weights=recipe.data.weights, batch_size=size, micro_batch_size=size, prefetch=0
    )
    try:
        found: list[dict[str, Tensor]] = []
        while sum(len(batch["labels"]) for batch in found) < rows:
            for batch in stream.next_step():
                flat = {name: t.flatten(0, 1) for name, t in batch.items() if t.dim() == 3} if pairs else dict(batch)
                found.append(flat)
        return found
    finally:
        stream.close()


def through(model: Any, codes: Mapping[str, IntegerTensor], make: Any) -> dict[str, IntegerTensor]:
    """Stored codes of the linear layers of a graph that is made of a model, whose layers may have been joined.

    The graph is made three times, of values, of codes and of scales: whatever order rows are put in, all three have
    it. Layers whose values are not the product of the other two are left out.

    Args:
        model: its parameters are changed meanwhile, and are what they were afterwards.
        codes: of four bits, by the parameter's name.
        make: model -> graph.

    Returns:
        By the layer's name in the graph.
    """
    # 1. One graph per factor, written into the model's parameters in turn: values = codes * scales.
    named = {name: parameter for name, parameter in model.named_parameters() if name in codes}
    before = {name: parameter.detach().clone() for name, parameter in named.items()}
    graphs = []
    try:
        for value in (
            lambda found: found.dequantize(),
            lambda found: found.codes.float(),
            lambda found: found.scale.repeat_interleave(GROUP, dim=1),
        ):
            for name, parameter in named.items():
                parameter.data = value(codes[name])
            graphs.append(make(model))
    finally:
        for name, parameter in named.items():
            parameter.data = before[name]
    # 2. Layers whose codes came through: whole numbers of 4 bits that give the values bit by bit.
    found = {}
    layers = [{n: m for n, m in graph.named_modules() if isinstance(m, nn.Linear)} for graph in graphs]
    example = next(iter(codes.values()), None)
    for name, layer in layers[0].items():
        steps, scale = layers[1][name].weight.detach(), layers[2][name].weight.detach()
        whole = torch.equal(steps, steps.round()) and bool((steps.abs() <= 8).all()) and layer.in_features % GROUP == 0
        if example is not None and whole and torch.equal(layer.weight.detach(), steps * scale):
            found[name] = IntegerTensor(
                steps.to(torch.int8), scale[:, ::GROUP].contiguous(), None, example.tile, example.spec
            )
    return found
