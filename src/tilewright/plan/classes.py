"""Layer classes of a model: layers of equal structure, measured once, however many there are.

A model of 671 billion parameters has a dozen kinds of matrices. Its layers are sorted by structure, one of each class
is measured (`layer_trace`, or the decoder's own formulas in `models.activation_bytes`), and `plan.solve` decides how
many of each class are treated how. Everything is a straight line in the rows of a micro-batch. No weights, no GPU.
"""

from dataclasses import fields, replace
from typing import Any

from tilewright.core.config import ModelSection, Recipe
from tilewright.core.errors import ConfigError
from tilewright.core.hardware import Machine
from tilewright.models.activation_bytes import layer_bytes, tile_bytes, weight_copy_bytes
from tilewright.models.config import DecoderConfig
from tilewright.models.count import count_flops, layer_parameters, mlp_weights
from tilewright.plan.footprint import KIND_BYTES, Pages, held_codes, layer_storages, process_bytes
from tilewright.plan.foreign_shape import foreign_shape, trace_classes
from tilewright.plan.layer_trace import TracedLayer
from tilewright.plan.roofline import element_passes, expert_rows
from tilewright.plan.shape import Coding, LayerClass, Line, ModelShape, largest_weight, rule_notes
from tilewright.plan.skeleton import Skeleton, skeleton_of
from tilewright.plan.workload import BYTES, Planner, Workload
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
        self._skeletons: dict[object, Skeleton] = {}
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
            self._skeletons[recipe.model] = skeleton_of(recipe, self.vocab_size)
        skeleton = self._skeletons[recipe.model]
        if skeleton.config is not None:
            return _decoder_shape(skeleton, recipe, policy, mode, self.machine)
        key = (recipe.model, recipe.precision, parameters, recipe.data.seq_len)
        if key not in self._traces:  # seconds for a large model, and most settings change nothing of it
            self._traces[key] = trace_classes(skeleton, recipe, policy, self.machine)
        return foreign_shape(skeleton, recipe, policy, self.machine, self._traces[key])


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


def _decoder_shape(skeleton: Skeleton, recipe: Recipe, policy: Policy, mode: str, machine: Machine) -> ModelShape:
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
                largest_weight=largest_weight((config.dim * width for width in widths), machine),
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
        notes=rule_notes(recipe),
    )


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
