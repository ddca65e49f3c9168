"""The model that a recipe trains: the base as `models.build` makes it, the adapters of `[lora]` on it, first values.

    model = build_trained(recipe, ..., "meta" if is_vacant(recipe, world, can) else device)
    values = first_values(recipe, model)  # of a vacant one
    convert(model, policy)
    fill_whole(recipe, model, device, values, world)
    parallelize(model, world, recipe.parallel, device=device, values=values)  # each rank fills its parts

A vacant model has no memory yet: it is filled in the pieces in which it is kept.

A model of the hub is downloaded, and named by its revision from then on (`pinned`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tilewright.core.config.change_recipe import changed
from tilewright.core.config.executors import Capabilities
from tilewright.core.config.load import Loaded, load_recipe
from tilewright.core.config.recipe import Recipe
from tilewright.core.errors import ConfigError, Problem
from tilewright.memory.offload.lazy_params import fill_buffers, to_placeholders
from tilewright.models.base.protocols import ALL_WHOLE, InitialValues, Model
from tilewright.models.build import (
    build_model,
    in_folder,
    init_weights,
    random_values,
    spec_of,
    stored_values,
    untrained_notes,
)
from tilewright.models.decoder.decoder import Decoder
from tilewright.models.distill.hidden import NAME as HIDDEN_LOSS
from tilewright.models.distill.hidden import HiddenLoss, Pair, Target, pairs_of, with_projections
from tilewright.models.folder.find_model import find_model, is_hub_name, is_pinned, local_folder, split_name
from tilewright.models.hf.model import HFModel
from tilewright.models.teacher_folder import find_teacher, stream_width
from tilewright.ops.kernels import Kernels
from tilewright.parallel.world import World
from tilewright.precision.lora.lazy_load import can_fill, fill_adapted
from tilewright.precision.lora.lora import add_lora, load_fp8_weights, load_lora_decoder


def build_adapted(
    recipe: Recipe,
    vocab_size: int,
    kernels: Kernels,
    device: torch.device | str,
    *,
    fresh: bool = False,
    lazy: bool = False,
) -> Model:
    """The recipe's model with its adapters, if it has any, built.

    Args:
        recipe: reads `[model]`, `[lora]` and the seed.
        vocab_size: of the tokenizer; classes for image classification.
        kernels: implementations of the operations.
        device: where the model is made.
        fresh: give random weights their initial values, which freezing them needs to see. False where a checkpoint
            overwrites them.
        lazy: leave a Hugging Face model that gets adapters on the meta device where `fill_whole` can fill it.

    Raises:
        ConfigError: the section's values do not fit together, or a target matches no layer.
        CheckpointError: the folder cannot be read.
    """
    model, lora = in_folder(recipe.model), recipe.lora
    adapters, more = _adapters(recipe)
    coded = lora.base == "fp8" and model.weights == "load"
    if lora.rank and coded and model.kind != "hf":  # never decoded: a byte per weight from the first moment on
        build_model(model, vocab_size, kernels, "meta")  # raises where folder and tokenizer do not fit
        more |= {"seed": recipe.run.seed, "read": spec_of(model.kind).read_folder}
        return load_lora_decoder(model.path, *adapters, **more, kernels=kernels, device=device)
    if lazy and lora.rank and model.kind == "hf" and model.weights == "load":
        shapes = build_model(model, vocab_size, kernels, "meta")
        if can_fill(shapes, model.path):
            shapes.notes += untrained_notes(model)
            add_lora(shapes, *adapters, **more, kernels=kernels, seed=recipe.run.seed)
            return shapes
    built = build_model(model, vocab_size, kernels, device)
    if fresh and model.weights == "random":
        init_weights(built, recipe.run.seed)
    if lora.rank:
        add_lora(built, *adapters, **more, kernels=kernels, seed=recipe.run.seed)
        if coded:
            load_fp8_weights(built.net, model.path)
    return built


def build_trained(recipe: Recipe, vocab_size: int, kernels: Kernels, device: torch.device | str, **how: bool) -> Model:
    """Build the recipe's model that trains, with what it learns hidden values of its teacher by.

    Args:
        recipe, vocab_size, kernels, device, how: see `build_adapted`; `[distill]` is read too.

    Raises:
        ConfigError: see `build_adapted`; pairs of layers that are not there, or too unlike.
    """
    model = build_adapted(recipe, vocab_size, kernels, device, **how)
    section, pairs = recipe.distill, pairs_of(recipe.distill)
    if not section.teacher or not pairs:
        return model
    teacher = find_teacher(section.teacher).on_meta()
    learned = section.hidden_projection == "learned"
    _check_pairs(pairs, model, teacher, learned=learned)
    assert isinstance(model, (Decoder, HFModel))
    widths = stream_width(model), stream_width(teacher)
    weights: dict[Target, float] = {"hidden": section.hidden_weight, "attention": section.attention_weight}
    model.hidden_loss = found = HiddenLoss(pairs, widths, weights, learned=learned, device=device)
    if torch.device(device).type != "meta":
        fill = with_projections(_nothing_else, recipe.run.seed, alike=found.alike)
        fill({f"{HIDDEN_LOSS}.{name}": param for name, param in found.named_parameters()})
    return model


def _nothing_else(tensors: Mapping[str, Tensor], first_rows: Mapping[str, int] = ALL_WHOLE) -> None:
    raise AssertionError("projections alone")


def _check_pairs(pairs: Sequence[Pair], model: Model, teacher: Model, *, learned: bool) -> None:
    """Raise where a recipe's model cannot learn these hidden values as a student."""
    problems: list[Problem] = []
    # 1. The layers of both models, by number; and where attention is learned, that they show it.
    for whose, one, numbers in (
        ("student", model, [(pair.target, pair.ours) for pair in pairs]),
        ("teacher", teacher, [(pair.target, pair.theirs) for pair in pairs]),
    ):
        layers = one.layers
        last = f"{len(model.layers) - 1} = {len(teacher.layers) - 1}"
        for target in dict.fromkeys(target for target, _ in numbers):
            asked = [number for name, number in numbers if name == target]
            beyond = [number for number in asked if number >= len(layers)]
            if not layers:
                problems.append(
                    Problem(
                        f"Layers of the {whose} were not found",
                        got="no list of layers that transformers can checkpoint",
                        need="one list of all layers, as Llama, Qwen, GPT-2 and others have",
                        try_=f"distill.{target} = {{}}, which learns the teacher's distributions alone",
                        where=f"distill.{target}",
                    )
                )
            elif beyond:
                problems.append(
                    Problem(
                        f"No such layer of the {whose}",
                        got=", ".join(map(str, beyond)),
                        need=f"0 to {len(layers) - 1}",
                        try_=f"distill.{target} = {{ {last} }}, which pairs the last layers",
                        where=f"distill.{target}",
                    )
                )
            elif target == "attention":
                without = [number for number in asked if one.attention_of(layers[number]) is None]
                problems += [_no_attention(whose, one, without)] if without else []
    # 2. Equal widths, unless a projection is learned.
    own, width = stream_width(model), stream_width(teacher)
    if not learned and own != width:
        problems.append(
            Problem(
                "Hidden values of student and teacher are not equally wide",
                got=f"{own} and {width} numbers, without a projection",
                need="equal widths, or projections",
                try_='distill.hidden_projection = "learned"',
                where="distill.hidden_projection",
            )
        )
    if problems:
        raise ConfigError.from_problems(problems)


def _no_attention(whose: str, model: Model, layers: Sequence[int]) -> Problem:
    able = [number for number, layer in enumerate(model.layers) if model.attention_of(layer) is not None]
    return Problem(
        f"Layer of the {whose} has no attention that can be learned",
        got=f"layers {', '.join(map(str, layers))} of {type(model.net).__name__}",
        need=f"layers with one attention, as {', '.join(map(str, able))}"
        if able
        else "a model whose class names its attention, as Llama, Qwen, GPT-2 and others do",
        try_="distill.hidden for these layers, which learns what they give out as a whole",
        where="distill.attention",
    )


def meta_like(recipe: Recipe, model: Model) -> Model | None:
    """The recipe's model as one process would have it, with its adapters, without memory; None where its configuration
    alone does not make it.

    Args:
        recipe: reads `[lora]`.
        model: of which this rank may have some layers.
    """
    meta_model = spec_of(model.architecture).meta_model
    made = None if meta_model is None else meta_model(model.config, model.kernels, model.task)
    if made is not None and recipe.lora.rank:
        adapters, more = _adapters(recipe)
        add_lora(made, *adapters, **more, kernels=model.kernels)
    return made


def _adapters(recipe: Recipe) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of `add_lora` for the recipe's model."""
    lora = recipe.lora
    more = {"dropout": lora.dropout, "rslora": lora.rslora, "modules_to_save": lora.modules_to_save}
    return (lora.rank, lora.alpha, lora.targets, lora.base), more


def is_vacant(recipe: Recipe, world: World, can: Capabilities) -> bool:
    """True where the recipe's model is vacant: built on the meta device, and filled in the pieces in which it is kept:
    layer groups in their tiers, parts on ranks.

    A sharded model with adapters is not: its base is read and encoded as on one rank, and its FP8 codes, which are no
    parameters, stay whole on each.
    """
    return can.offload or (world.holds_parts and not recipe.lora.rank)


def first_values(recipe: Recipe, model: Model) -> InitialValues:
    """The first values that fill a vacant model of a recipe.

    Raises:
        CheckpointError: the folder is not whole, or not of this model.
    """
    seed, stored = recipe.run.seed, recipe.model.weights == "load"
    values = stored_values(model, local_folder(recipe.model.path)) if stored else random_values(model, seed)
    found = model.hidden_loss if isinstance(model, (Decoder, HFModel)) else None
    return values if found is None else with_projections(values, seed, alike=found.alike)


def fill_whole(recipe: Recipe, model: Model, device: torch.device, values: InitialValues | None, world: World) -> None:
    """Fill all of the recipe's model that neither ranks fill in their shards nor an executor layer group by layer
    group.

    Args:
        recipe: reads `[model]` and the seed.
        model: converted. Its parameters are new objects afterwards: make the optimizer later.
        device: where the model computes.
        values: of a vacant model.
        world: who holds what.

    Raises:
        CheckpointError: the folder cannot be read.
    """
    if values is None and next(model.parameters()).is_meta:  # `build_adapted` left it so
        fill_adapted(model, in_folder(recipe.model).path, device, recipe.run.seed)
    elif values is not None and not world.holds_parts:
        to_placeholders(model, device)
        fill_buffers(model, values)


def pinned(loaded: Loaded, run: Path | None = None, *, weights: bool = True) -> Loaded:
    """Pin the model of a recipe on this machine: `model.path` gets the hash of its revision.

    Args:
        loaded: a recipe; one that names a folder, or nothing, is returned as it is.
        run: folder of a run. It keeps the revision that it began with, whatever the hub's main branch is now.
        weights: False: the configuration is enough, whatever the recipe does with the weights.

    Raises:
        CheckpointError, HardwareError: see `models.folder.find_model.find_model`.
    """
    section = loaded.recipe.model
    if not is_hub_name(section.path):
        return loaded
    name = _begun_with(run, section.path) if run is not None else section.path
    found = find_model(name, weights=weights and section.weights == "load")
    return replace(loaded, recipe=changed(loaded.recipe, {"model.path": found.name}))


def _begun_with(run: Path, name: str) -> str:
    """The revision of a model's repository that a run folder names; the name itself where it does not, or names
    another."""
    file = run / "run.toml"
    if split_name(name)[1] or not file.is_file():
        return name
    try:
        before = load_recipe(file, environ={}).recipe.model.path
    except ConfigError:  # `resume.find` says so
        return name
    return before if is_pinned(before) and split_name(before)[0] == name else name
