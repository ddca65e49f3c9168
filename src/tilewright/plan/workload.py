"""What a recipe asks of a machine, resolved: model shapes, formats, micro-batches, what is compiled. No weights.

Made once for each plan from a model on the meta device; `footprint` turns it into bytes and `roofline` into seconds.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tilewright.core.config import Recipe
from tilewright.core.hardware import Machine
from tilewright.formats.squares import num_blocks
from tilewright.models.build import build_model
from tilewright.models.config import DecoderConfig
from tilewright.models.decoder import Decoder
from tilewright.models.hf import HFModel
from tilewright.ops.inductor import compiles_layers
from tilewright.ops.kernels import Kernels
from tilewright.plan.fixes import changed
from tilewright.plan.trace import Trace, trace_model
from tilewright.precision.convert import explain
from tilewright.precision.fp8_linear import Fp8Linear
from tilewright.precision.gemms import Gemms
from tilewright.precision.lora import add_lora
from tilewright.precision.policy import Policy
from tilewright.precision.schedule import ModeSchedule
from tilewright.precision.weight_store import store_bytes

BYTES = {"fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2}
DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Product:
    """A linear layer: its shape, the share of tokens that pass it, the formats of its products."""

    fqn: str
    num_in: int
    num_out: int
    share: float
    gemms: Gemms
    is_head: bool
    frozen: bool = False
    """The weight is kept in 8 bits alone: it counts as a parameter, and has no gradient."""

    @property
    def num_weights(self) -> int:
        """Elements of the weight."""
        return self.num_in * self.num_out

    @property
    def code_bytes(self) -> int:
        """Bytes kept of the quantised weight between passes; 0 without 8-bit GEMMs, and on a GPU (`weight_store`)."""
        if self.frozen or not self.gemms.any_fp8:
            return 0
        return store_bytes((self.num_out, self.num_in), tensorwise=self.gemms.tensorwise)


@dataclass(frozen=True)
class Workload:
    """One optimizer step in numbers. Bytes are of the whole model; `rows` and `num_micro` describe the batch."""

    recipe: Recipe
    machine: Machine
    config: DecoderConfig | None
    """Shape of tilewright's own decoder; None for a Hugging Face model."""
    trace: Trace | None
    """What a Hugging Face model's forward pass keeps and computes."""
    layer_kept: int
    """Bytes that a layer of it keeps of one micro-batch where the executor is layer-major; else 0."""
    modes: tuple[str, ...]
    """Precision modes that the run passes through."""
    policies: Mapping[str, Policy]
    products: Mapping[str, tuple[Product, ...]]
    """Products by mode."""
    num_parameters: int
    """All weights, frozen ones included."""
    num_trainable: int
    """Those that have gradients and optimizer states."""
    num_blocks: int
    """Scales that a moment of them has in 8 bits."""
    num_narrow: int
    """Those that are stored in 16 bit."""
    parameter_bytes: int
    width: int
    """Of the residual stream."""
    layer_parameters: tuple[int, ...]
    """Elements of each layer."""
    outer_weights: tuple[int, ...]
    """Elements of each embedding and head around the layers, tied ones once."""
    compiled: bool
    loss_compiled: bool
    attention_masks: bool
    """Whether each layer's attention keeps a mask of all pairs of positions for backward."""
    rows: int
    num_micro: int

    @property
    def num_layers(self) -> int:
        """Layers, 1 at least."""
        return max(len(self.layer_parameters), 1)

    @property
    def seq_len(self) -> int:
        """Tokens in a row; 1 for images."""
        return 1 if self.recipe.model.task == "image_classification" else self.recipe.data.seq_len

    @property
    def num_tokens(self) -> int:
        """Tokens of one micro-batch."""
        return self.rows * self.seq_len

    @property
    def step_tokens(self) -> int:
        """Tokens of one optimizer step."""
        return self.recipe.train.batch_size * self.seq_len


class Planner:
    """Makes workloads of one model family; keeps what is slow to find (meta models, traces) between them."""

    def __init__(self, vocab_size: int, machine: Machine) -> None:
        self.vocab_size = vocab_size
        self.machine = machine
        self._models: dict[object, nn.Module] = {}
        self._traces: dict[object, Trace] = {}

    def workload(self, recipe: Recipe) -> Workload:
        """The workload of a recipe.

        Raises:
            ConfigError, CheckpointError: the model cannot be built.
        """
        model = self._model(recipe)
        config = model.config if isinstance(model, Decoder) else None
        kernels = Kernels.from_sections(self.machine, recipe.ops, recipe.memory)
        schedule = ModeSchedule.from_section(recipe.precision, recipe.train.steps)
        modes = tuple(dict.fromkeys(mode for mode in (schedule.start_mode, schedule.mode) if mode))
        parameters = "" if recipe.optim.master == "fp32" else "bf16"
        policy = Policy.from_section(recipe.precision, self.machine.device, parameters=parameters)
        policies = {mode: policy.in_mode(mode) for mode in modes}
        rows = min(recipe.train.micro_batch, recipe.train.batch_size)
        head = DTYPES[policies[modes[-1]].activation]
        choice = kernels.choices["cross_entropy", self.machine.device, head, ""]
        attention = kernels.choices["attention", self.machine.device, head, ""]
        layers = list(model.blocks if isinstance(model, Decoder) else _longest_stack(model))
        stored = list(_stored(model, policies[modes[-1]]))
        whole = changed(recipe, {"train.activation_checkpoint": "none"})
        foreign = model if isinstance(model, HFModel) else None
        sliced = recipe.memory.executor == "layer_major"
        return Workload(
            recipe=recipe,
            machine=self.machine,
            config=config,
            trace=self._trace(foreign, recipe, rows) if foreign else None,
            layer_kept=self._trace(foreign, whole, rows).kept_bytes // max(len(layers), 1) if foreign and sliced else 0,
            modes=modes,
            policies=policies,
            products={mode: products_of(model, policies[mode], config) for mode in modes},
            num_parameters=sum(weight.numel() for weight in _weights(model)),
            num_trainable=sum(p.numel() for p in model.parameters() if p.requires_grad),
            num_blocks=sum(num_blocks(p.numel()) for p in model.parameters() if p.requires_grad),
            num_narrow=sum(p.numel() for p, size in stored if size == 2),
            parameter_bytes=sum(p.numel() * size for p, size in stored) + _frozen_bytes(model),
            width=config.dim if config else _width(model),
            layer_parameters=tuple(sum(p.numel() for p in layer.parameters()) for layer in layers),
            outer_weights=_outer_weights(model, layers),
            compiled=_compiles(recipe, self.machine),
            loss_compiled=choice.candidate.name == "compiled",
            attention_masks=not _compiles(recipe, self.machine) and attention.candidate.name != "amx",
            rows=rows,
            num_micro=-(-recipe.train.batch_size // rows),
        )

    def _model(self, recipe: Recipe) -> nn.Module:
        key = (recipe.model, recipe.lora)
        if key not in self._models:
            kernels, lora = Kernels(self.machine), recipe.lora
            model = build_model(recipe.model, self.vocab_size, kernels, "meta")
            assert isinstance(model, nn.Module)
            if lora.rank:
                add_lora(model, lora.rank, lora.alpha, lora.targets, lora.base, kernels=kernels)
            self._models[key] = model
        return self._models[key]

    def _trace(self, model: HFModel, recipe: Recipe, rows: int) -> Trace:
        kept = (recipe.train.activation_checkpoint, recipe.train.checkpoint_inputs, recipe.memory.executor)
        key = (recipe.model, recipe.lora, recipe.precision, kept, recipe.data.model_dump_json(), rows)
        if key not in self._traces:
            self._traces[key] = trace_model(model, recipe, self.machine, rows)
        return self._traces[key]


def fp8_unit(machine: Machine) -> bool:
    """Whether matrix units multiply 8-bit operands."""
    return machine.capability is not None and machine.capability >= (8, 9)


def _compiles(recipe: Recipe, machine: Machine) -> bool:
    """Whether layers are compiled, where they can be."""
    wanted = recipe.train.compile
    return wanted == "on" or compiles_layers(wanted, machine, by_default=recipe.model.kind == "decoder")


def products_of(model: nn.Module, policy: Policy, config: DecoderConfig | None) -> tuple[Product, ...]:
    """Linear layers and the router, in the model's order, with the formats that the policy gives them."""
    rows = {row.fqn: row for row in explain(model, policy)}
    found = []
    for fqn, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if fqn not in rows or weight is None or weight.dim() != 2 or isinstance(module, nn.Embedding):
            continue
        share = config.num_experts_per_token / config.num_experts if config and ".experts." in fqn else 1.0
        row = rows[fqn]
        gemms = row.gemms or Gemms.all(row.compute)
        frozen = isinstance(module, Fp8Linear)
        found.append(Product(fqn, weight.shape[1], weight.shape[0], share, gemms, row.op == "head", frozen))
    return tuple(found)


def _weights(model: nn.Module) -> Iterator[Tensor]:
    """Parameters, and the weights of frozen 8-bit layers."""
    yield from model.parameters()
    yield from (module.weight for module in model.modules() if isinstance(module, Fp8Linear))


def _stored(model: nn.Module, policy: Policy) -> Iterator[tuple[Tensor, int]]:
    """Parameters and the bytes that an element of each is stored in; tied ones once."""
    storage = {row.fqn: row.storage for row in explain(model, policy)}
    seen: set[int] = set()
    for fqn, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield parameter, BYTES.get(storage.get(fqn, "fp32"), 4)


def _frozen_bytes(model: nn.Module) -> int:
    """Codes and scales of frozen 8-bit weights."""
    return sum(m.weight.nbytes + m.weight_scale_inv.nbytes for m in model.modules() if isinstance(m, Fp8Linear))


def _longest_stack(model: nn.Module) -> Iterable[nn.Module]:
    """Layers of a model that we did not make: its longest list of modules, or all of it as one."""
    stacks = (module for module in model.modules() if isinstance(module, nn.ModuleList))
    return max(stacks, key=len, default=(model,))


def _outer_weights(model: nn.Module, layers: Sequence[nn.Module]) -> tuple[int, ...]:
    """Matrices outside of the layers: embeddings and heads."""
    inside = {id(p) for layer in layers for p in layer.parameters()}
    return tuple(p.numel() for p in model.parameters() if id(p) not in inside and p.dim() > 1)


def _width(model: nn.Module) -> int:
    """Of the residual stream of a model that we did not make; 0 where its config does not tell."""
    config: Any = model.config
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return getattr(text, "hidden_size", 0)
