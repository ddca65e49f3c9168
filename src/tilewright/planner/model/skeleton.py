"""A model with one layer of each kind in the place of all of them, on the meta device."""

import itertools
from collections.abc import Collection, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from torch import nn

from tilewright.core.config.recipe import LoraSection, ParallelSection, Recipe
from tilewright.core.errors import ConfigError
from tilewright.models.base.hidden_matrices import hidden_matrices
from tilewright.models.base.stacks import find_stack, keep_layers
from tilewright.models.build import build_model, decoder_config, spec_of
from tilewright.models.decoder.config import DecoderConfig
from tilewright.models.decoder.moe import MoE
from tilewright.ops.kernels import Kernels
from tilewright.parallel.inside.experts.stacked import stacked_experts
from tilewright.parallel.inside.tensor.cut_hf_model import cut_shapes
from tilewright.parallel.inside.tensor.matrix_cuts import config_on_rank
from tilewright.planner.model.part_weights import Weights
from tilewright.precision.assign.conversion_plan import ConversionPlan, decide_all
from tilewright.precision.assign.gather_dtype import coded_weights, narrow_weights
from tilewright.precision.lora.lora import add_lora
from tilewright.precision.lora.match_targets import matching
from tilewright.precision.policy.policy import Policy


@dataclass(frozen=True)
class Skeleton:
    """A meta model with one layer of each class in the place of all of them."""

    model: Any
    """A `protocols.Model`."""
    names: tuple[str, ...]
    """Of those layers in the model; none for a model without a list of layers."""
    indices: tuple[tuple[int, ...], ...]
    """Numbers of the layers that each stands for."""
    embedding: str
    """Name of the module before the layers; empty where the model names none."""
    config: DecoderConfig | None
    """The whole decoder's; None for a Hugging Face model."""
    _decided: dict[Policy, ConversionPlan] = field(default_factory=dict, repr=False, compare=False)

    def decided(self, policy: Policy) -> ConversionPlan:
        """Formats of the skeleton's parts under a policy that names its device: decided once, for the model stays."""
        if policy not in self._decided:
            self._decided[policy] = decide_all(self.model, policy)
        return self._decided[policy]

    @property
    def serves_all(self) -> bool:
        """True if the skeleton is the same for all executors."""
        return bool(self.model.layers)

    @property
    def layers(self) -> list[nn.Module]:
        """The skeleton's layers, one of each class."""
        return [self.model.get_submodule(name) for name in self.names]

    def class_name(self, *, experts: bool = False) -> str:
        """The name of the class of a layer of the skeleton."""
        return "layer" if len(self.names) == 1 else "experts" if experts else "dense"

    def outside(self) -> Iterator[nn.Module]:
        """Modules of the skeleton around the layers."""
        inside = tuple(f"{name}." for name in self.names)
        for name, module in self.model.named_modules():
            if name not in self.names and not name.startswith(inside):
                yield module

    def gathered_narrow(self, policy: Policy, kernels: Kernels) -> Collection[nn.Module]:
        """Linear layers of the skeleton whose weights ranks would gather in 16 bits; see
        `precision.assign.gather_dtype`."""
        if not getattr(self.model, "uses_every_parameter", False):
            return ()
        found = narrow_weights(self.decided(policy).sites, kernels.machine.device, kernels)
        inside = {module for layer in self.layers for module in layer.modules()}
        return found.keys() & inside

    def gathered_coded(self, policy: Policy, parallel: ParallelSection) -> Collection[nn.Module]:
        """Linear layers of the skeleton whose weights ranks send as codes; see `parallel.communicate.coded_weights`."""
        if parallel.param_gather != "fp8":
            return ()
        return coded_weights(self.decided(policy).sites, power_of_two=policy.power_of_two)

    def weights(
        self,
        policy: Policy,
        narrow: Collection[nn.Module] = (),
        ep: int = 1,
        tp: int = 1,
        coded: Collection[nn.Module] = (),
        redundant: int = 0,
    ) -> tuple[Weights, list[Weights], Weights]:
        """The skeleton's weights before the layers, in each layer, and behind them; tied ones count where they come
        first. `narrow`, `coded`: see `gathered_narrow`, `gathered_coded`. `ep`: ranks that hold different experts, with
        `redundant` copies; `tp`: ranks that hold different parts of matrices."""
        storage, seen = self.decided(policy).storage(), set[int]()
        matrices = set(hidden_matrices(self.model))
        first = self.model.get_submodule(self.embedding).modules() if self.embedding else ()
        before = Weights.of(first, storage, seen, matrices)
        mixtures = [module for module in self.model.modules() if isinstance(module, MoE)]
        spread = {
            module: (ep, Fraction(redundant, mixture.num_experts), tp, 1)
            for mixture in mixtures
            for module in mixture.experts.modules()
        }
        if ep > 1 or tp > 1:
            spread |= {module: (ep, Fraction(0), tp, _number(module)) for _, module in stacked_experts(self.model)}
        layers = [Weights.of(layer.modules(), storage, seen, matrices, narrow, spread, coded) for layer in self.layers]
        return before, layers, Weights.of(self.outside(), storage, seen, matrices, coded=coded)


def skeleton_of(recipe: Recipe, vocab_size: int) -> Skeleton:
    """The skeleton of a recipe's model, with its adapters.

    Raises:
        ConfigError: the model cannot be built, or its matrices not be cut (`parallel.tp`).
        CheckpointError: its folder cannot be read.
    """
    if spec_of(recipe.model.kind).formulas is not None:
        return _short_decoder(recipe, vocab_size)
    model: Any = build_model(recipe.model.model_copy(update={"weights": "random"}), vocab_size, device="meta")
    _adapt(model, recipe.lora, recipe.lora.targets)
    whole = recipe.memory.can.whole_model and not model.layers  # its layers cannot be checkpointed one by one
    found = Skeleton(model, (), (), _embedding(model, ()), None) if whole else _foreign_skeleton(model)
    if recipe.parallel.tp > 1:
        cut_shapes(model, recipe.parallel.tp, max(1, recipe.parallel.dp_shard))
    return found


def _number(module: nn.Module) -> int:
    """Number of experts in a stack of the skeleton."""
    assert isinstance(module.num_experts, int), "that is how it was found"
    return module.num_experts


def check_checkpointing(skeleton: Skeleton, recipe: Recipe) -> None:
    """Raise ConfigError where a model's skeleton cannot keep what a recipe says that its layers keep."""
    if recipe.memory.can.activation_checkpoint:
        skeleton.model.activation_checkpoint = recipe.train.activation_checkpoint
        skeleton.model.activation_checkpoint = "none"


def _adapt(model: Any, lora: LoraSection, targets: Sequence[str]) -> Sequence[str]:
    """Give the skeleton its adapters: names of the layers that have them now."""
    if not lora.rank:
        return ()
    more = {"dropout": lora.dropout, "rslora": lora.rslora, "modules_to_save": lora.modules_to_save}
    return add_lora(model, lora.rank, lora.alpha, targets, lora.base, **more)


def _short_decoder(recipe: Recipe, vocab_size: int) -> Skeleton:
    """Make the skeleton of our decoder: one layer of each kind. Where ranks hold parts of its matrices (`parallel.tp`),
    it is that of one rank."""
    section, parallel, lora = recipe.model, recipe.parallel, recipe.lora
    config, spec = decoder_config(section, vocab_size), spec_of(section.kind)
    if parallel.tp > 1:
        config = config_on_rank(config, parallel.tp, max(1, parallel.dp_shard))
    assert spec.formulas is not None
    assert spec.meta_model is not None
    kinds: dict[Any, list[int]] = {}
    for layer in range(config.num_layers):
        kind = config.shapes[layer], spec.formulas.kind(config.at(layer), layer)
        kinds.setdefault(kind, []).append(layer)
    model: Any = spec.meta_model(config, Kernels.default(), section.task, [first for first, *_ in kinds.values()])
    _check_counts(model, [first for first, *_ in kinds.values()])
    indices, targets = tuple(map(tuple, kinds.values())), lora.targets
    if lora.rank:
        indices, targets = _by_targets(model, lora, indices)
        if len(indices) > len(kinds):
            model = spec.meta_model(config, Kernels.default(), section.task, [first for first, *_ in indices])
        _adapt(model, lora, targets)
    names = _names(model)
    return Skeleton(model, tuple(names), indices, _name_of(model, model.model.embed_tokens), config)


def _by_targets(
    model: Any, lora: LoraSection, indices: tuple[tuple[int, ...], ...]
) -> tuple[tuple[tuple[int, ...], ...], list[str]]:
    """Layers of a skeleton's kind divided by which of their linear layers get adapters, and the names of these layers
    in a model that has the first layer of each.

    Args:
        model: with one layer of each kind, without adapters.
        lora: whose targets name layers as the whole model does.
        indices: the layers of each kind.

    Raises:
        ConfigError: a target that matches no linear layer of the whole model.
    """
    every, places = list(_adapt(deepcopy(model), lora, ["*"])), _names(model)
    stack = places[0].rpartition(".")[0]
    inside = [[name[len(place) :] for name in every if name.startswith(f"{place}.")] for place in places]
    outside = [name for name in every if not name.startswith(f"{stack}.")]
    of_layer = {
        layer: [f"{stack}.{layer}{end}" for end in ends]
        for ends, layers in zip(inside, indices, strict=True)
        for layer in layers
    }
    taken = set(matching([*itertools.chain(*of_layer.values()), *outside], lora.targets))
    divided: dict[tuple[int, frozenset[str]], list[int]] = {}
    for kind, layers in enumerate(indices):
        for layer in layers:
            ends = frozenset(name[len(f"{stack}.{layer}") :] for name in of_layer[layer] if name in taken)
            divided.setdefault((kind, ends), []).append(layer)
    targets = [f"{stack}.{place}{end}" for place, (_, ends) in enumerate(divided) for end in sorted(ends)]
    return tuple(map(tuple, divided.values())), [*targets, *(name for name in outside if name in taken)]


def _names(model: Any) -> list[str]:
    """Names of the blocks of a decoder's skeleton."""
    return [_name_of(model, block) for block in model.blocks]


def _name_of(model: Any, part: Any) -> str:
    return next(name for name, module in model.named_modules() if module is part)


def _check_counts(model: Any, numbers: Sequence[int]) -> None:
    """Raise ConfigError where the formulas of an architecture are those of another one than the skeleton's."""
    spec = spec_of(model.architecture)
    assert spec.formulas is not None
    for layer, block in zip(numbers, model.blocks, strict=True):
        real, said = (
            sum(param.numel() for param in block.parameters()),
            spec.formulas.parameters(model.config.at(layer), layer),
        )
        if real != said:
            raise ConfigError(
                "Formulas of an architecture do not count its layers",
                got=f"{said} parameters in {spec.name}'s layer of this kind, {real} in its modules",
                need="formulas of the same layer (ModelSpec.formulas)",
                try_="Formulas(parameters=..., mlp_weights=..., flops=..., layer_bytes=...)",
                where="model.kind",
            )


def _foreign_skeleton(model: Any) -> Skeleton:
    """Make the skeleton of a third-party model: sort its layers by structure and keep one of each."""
    stack = find_stack(model)
    if stack is not None:
        keep_layers(model, stack, stack.firsts)
    kinds = stack.kinds if stack is not None else ()
    names = tuple(f"{stack.name}.{place}" for place in range(len(kinds))) if stack is not None else ()
    return Skeleton(model, names, kinds, _embedding(model, names), None)


def _embedding(model: Any, layers: Sequence[str]) -> str:
    """Name of the skeleton's module before the layers; empty where the model names none outside of them."""
    net: Any = model.net
    try:
        first = net.get_input_embeddings()
    except (NotImplementedError, AttributeError):  # models of images may name none
        return ""
    name = next((name for name, module in model.named_modules() if module is first), "")
    return "" if any(name.startswith(f"{layer}.") for layer in layers) else name
