"""Contradictions in the settings that describe a model: shape, attention, experts, adapters, what can be exported."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tilewright.core.config.recipe import Recipe
from tilewright.core.config.sections.model import ModelSection
from tilewright.core.units import ranges


@dataclass(frozen=True)
class Conflict:
    """Settings that cannot be together. `fields` are the ones read to find out."""

    fields: tuple[str, ...]
    what: str
    got: str
    need: str
    try_: str


def _model(recipe: Recipe) -> Iterator[Conflict]:
    model = recipe.model
    if model.kind == "hf" and not model.path:
        yield Conflict(
            ("model.kind", "model.path"),
            'model.kind = "hf" needs the folder of the model',
            "model.path is empty",
            "model.path = a Hugging Face folder with a config.json",
            '--model.path FOLDER, or model.kind = "decoder"',
        )
    if model.weights == "load" and not model.path:
        yield Conflict(
            ("model.weights", "model.path"),
            'model.weights = "load" needs the folder that holds the weights',
            "model.path is empty",
            "model.path = a Hugging Face folder with weights",
            '--model.path FOLDER, or model.weights = "random"',
        )
    if model.kind != "hf" and model.task != "causal_lm":
        yield Conflict(
            ("model.kind", "model.task"),
            f'Task "{model.task}" is not supported by the decoder',
            f'model.kind = "decoder", model.task = "{model.task}"',
            'model.task = "causal_lm" for the decoder',
            f'model.kind = "hf" with a model of that task in model.path, for {model.task}',
        )


def _decoder_shape(recipe: Recipe) -> Iterator[Conflict]:
    """Find contradictions between head counts and widths of our decoder, where they come from the recipe and not from a
    folder."""
    model = recipe.model
    # A folder's shape is checked where it is read; latent attention has head widths of its own.
    if model.kind == "hf" or model.path or model.attention != "gqa":
        return
    if not model.head_dim and model.dim % model.num_heads:
        yield Conflict(
            ("model.dim", "model.num_heads", "model.head_dim"),
            "Model width is not a multiple of the number of heads",
            f"model.dim = {model.dim}, model.num_heads = {model.num_heads}",
            "dim a multiple of num_heads, or head_dim given",
            f"model.dim = {_multiple(model.dim, model.num_heads)}, or model.head_dim = "
            f"{max(2, model.dim // model.num_heads // 2 * 2)}",
        )
    # Rotary positions turn pairs of numbers.
    elif (model.head_dim or model.dim // model.num_heads) % 2:
        yield Conflict(
            ("model.dim", "model.num_heads", "model.head_dim"),
            "Rotary positions need heads of even width",
            f"heads {model.head_dim or model.dim // model.num_heads} wide",
            "an even width",
            "model.head_dim = " + str((model.head_dim or model.dim // model.num_heads) + 1),
        )
    if model.num_kv_heads and model.num_heads % model.num_kv_heads:
        divisors = [str(count) for count in range(1, model.num_heads + 1) if model.num_heads % count == 0]
        yield Conflict(
            ("model.num_heads", "model.num_kv_heads"),
            "Number of query heads is not a multiple of the number of key/value heads",
            f"model.num_heads = {model.num_heads}, model.num_kv_heads = {model.num_kv_heads}",
            "num_heads a multiple of num_kv_heads",
            "model.num_kv_heads = " + " or ".join(divisors),
        )


def _layers(recipe: Recipe) -> Iterator[Conflict]:
    """Conflicts of the model's layers of their own shape, where they come from the recipe and not from a folder."""
    model = recipe.model
    if model.kind == "hf" or model.path or not model.layers:
        return
    if wrong := list(pattern_conflicts(model)):
        yield from wrong
        return
    # The rest compares layers, which only a pattern that adds up gives.
    ranks = [entry for entry in model.layers if entry.q_lora_rank is not None or entry.kv_lora_rank is not None]
    if ranks and model.attention != "mla":
        yield Conflict(
            ("model.layers", "model.attention"),
            "Ranks of latent attention for layers without it",
            f'model.attention = "{model.attention}", ranks in {len(ranks)} entries of model.layers',
            "q_lora_rank and kv_lora_rank where attention is latent",
            'entries of model.layers without ranks, or model.attention = "mla"',
        )
    grouped = [entry for entry in model.layers if entry.num_kv_heads]
    if grouped and model.attention == "mla":
        yield Conflict(
            ("model.layers", "model.attention"),
            "Key/value heads for layers with latent attention",
            f'model.attention = "mla", num_kv_heads in {len(grouped)} entries of model.layers',
            "kv_lora_rank where attention is latent",
            'entries of model.layers without num_kv_heads, or model.attention = "gqa"',
        )
    if other := {entry.attention for entry in model.layers} - {None, "linear", model.attention}:
        yield Conflict(
            ("model.layers", "model.attention"),
            "Layers with two kinds of softmax attention",
            f'model.attention = "{model.attention}", attention = "{other.pop()}" in an entry of model.layers',
            'attention = "linear" in an entry, or the model\'s own: one table of rotary angles serves all layers',
            'entries of model.layers with attention = "linear", or without one',
        )
    # Latent attention has keys and values for each query head.
    groups = "num_heads" if model.attention == "mla" else "num_kv_heads"
    names = ("num_heads", groups, "ffn_dim")
    yield from layer_conflicts([tuple(getattr(entry, name) for name in names) for entry in model.layer_entries()])


def pattern_conflicts(model: ModelSection) -> Iterator[Conflict]:
    """Conflicts between a list of layers and the model's number of them."""
    if model.layers and model.num_layers % model.period:
        yield Conflict(
            ("model.layers", "model.num_layers"),
            "Number of layers is not a multiple of the layers listed",
            f"model.num_layers = {model.num_layers}, model.layers describes {model.period}",
            "a list for all layers, or a pattern that fits a whole number of times",
            f"model.num_layers = {_multiple(model.num_layers, model.period)}",
        )


def layer_conflicts(shapes: Sequence[tuple[int, ...]]) -> Iterator[Conflict]:
    """Conflicts between settings of a model's layers, of which no decoder can be made.

    Args:
        shapes: of each layer query heads, key/value heads (of latent attention as many), and hidden width.

    Example:
        >>> [conflict.got for conflict in layer_conflicts([(4, 3, 8), (4, 4, 8), (0, 0, 0)])]
        ['layer 0: num_heads 4, num_kv_heads 3', 'layer 2: num_heads 0, ffn_dim 0']
    """
    places = ("model.layers", "model.num_heads", "model.num_kv_heads")
    # One report per shape with all its layers: a wrong entry of a pattern is one mistake.
    for heads, groups, ffn_dim in dict.fromkeys(shapes):
        numbers = [layer for layer, shape in enumerate(shapes) if shape == (heads, groups, ffn_dim)]
        named = f"layer{'s' * (len(numbers) > 1)} {ranges(numbers)}"
        if heads and (not groups or heads % groups):
            yield Conflict(
                places,
                "Layer whose query heads are not a multiple of its key/value heads",
                f"{named}: num_heads {heads}, num_kv_heads {groups}",
                "each key/value head serves the same number of query heads",
                "num_kv_heads = " + " or ".join(str(count) for count in range(1, heads + 1) if heads % count == 0),
            )
        if not heads and not ffn_dim:
            yield Conflict(
                places,
                "Layer with neither attention nor FFN",
                f"{named}: num_heads 0, ffn_dim 0",
                "one of them in each layer",
                "fewer layers, or a width for one of them",
            )
    if not any(heads for heads, *_ in shapes):
        yield Conflict(
            places,
            "No layer has attention",
            f"num_heads 0 in all {len(shapes)} layers",
            "attention in at least one layer: nothing else looks at other tokens",
            "num_heads above 0 in one entry of model.layers",
        )


def _mla(recipe: Recipe) -> Iterator[Conflict]:
    model = recipe.model
    if model.kind == "hf" or model.path or model.attention != "mla":
        return
    if model.qk_rope_head_dim % 2:
        yield Conflict(
            ("model.attention", "model.qk_rope_head_dim"),
            "Rotary positions need an even width",
            f"model.qk_rope_head_dim = {model.qk_rope_head_dim}",
            "an even number",
            f"model.qk_rope_head_dim = {model.qk_rope_head_dim + 1}",
        )


def _experts(recipe: Recipe) -> Iterator[Conflict]:
    model = recipe.model
    if model.kind == "hf" or model.path or model.num_experts == 0:
        return
    if model.num_dense_layers > model.num_layers:
        yield Conflict(
            ("model.num_layers", "model.num_dense_layers"),
            "More dense layers than layers",
            f"model.num_dense_layers = {model.num_dense_layers}, model.num_layers = {model.num_layers}",
            "num_dense_layers at most num_layers",
            f"model.num_dense_layers = {min(1, model.num_layers)}",
        )
    # From here on each check relies on the one before, so that one mistake is reported once.
    if model.num_experts % model.num_expert_groups:
        yield Conflict(
            ("model.num_experts", "model.num_expert_groups"),
            "Number of experts is not a multiple of the number of expert groups",
            f"model.num_experts = {model.num_experts}, model.num_expert_groups = {model.num_expert_groups}",
            "num_experts a multiple of num_expert_groups",
            f"model.num_experts = {_multiple(model.num_experts, model.num_expert_groups)}",
        )
        return
    if model.num_limited_groups > model.num_expert_groups:
        yield Conflict(
            ("model.num_expert_groups", "model.num_limited_groups"),
            "More limited groups than expert groups",
            f"model.num_limited_groups = {model.num_limited_groups}, "
            f"model.num_expert_groups = {model.num_expert_groups}",
            "num_limited_groups at most num_expert_groups",
            f"model.num_limited_groups = {model.num_expert_groups}",
        )
        return
    # A token chooses groups, then experts within them.
    reachable = model.num_experts // model.num_expert_groups * model.num_limited_groups
    if model.num_experts_per_token > reachable:
        yield Conflict(
            ("model.num_experts", "model.num_experts_per_token", "model.num_expert_groups", "model.num_limited_groups"),
            "More experts per token than a token can reach",
            f"model.num_experts_per_token = {model.num_experts_per_token}, {reachable} experts within reach",
            "num_experts_per_token at most num_experts / num_expert_groups * num_limited_groups",
            f"model.num_experts_per_token = {min(2, reachable)}",
        )


def _export(recipe: Recipe) -> Iterator[Conflict]:
    """Find shapes that no Hugging Face layout describes, so that the run says it before it starts and not at its
    export."""
    model = recipe.model
    if not recipe.checkpoint.export_hf or model.kind == "hf" or model.path:
        return
    # A pattern that does not add up is reported by `_layers`.
    entries = [] if list(pattern_conflicts(model)) else model.layer_entries()
    # The first reason is enough: a shape has a layout or none.
    if len(set(entries)) > 1:
        has, need = "layers of their own shape", "layers that are alike (model.layers empty)"
    elif model.attention == "mla" and (entries[0].sliding_window if entries else model.sliding_window):
        has, need = "a window", "sliding_window = 0, or grouped-query attention"
    elif (entries[0].attention if entries else model.attention) == "linear":
        has, need = "state in the place of keys", 'attention = "gqa" or "mla"'
    elif model.attention == "gqa" and model.num_experts:
        has, need = "experts", 'attention = "mla" with experts, or none'
    elif model.num_experts and not model.num_shared_experts:
        has, need = "no shared expert", "at least one shared expert"
    elif model.num_experts and model.num_experts // model.num_expert_groups < 2:
        has, need = "one expert a group", "at least two experts a group"
    else:
        return
    yield Conflict(
        (
            "checkpoint.export_hf",
            "model.layers",
            "model.sliding_window",
            "model.attention",
            "model.num_experts",
            "model.num_shared_experts",
            "model.num_expert_groups",
        ),
        "No Hugging Face layout for this shape",
        f'attention = "{model.attention}" with {has}',
        need,
        "checkpoint.export_hf = false, and keep tilewright's own checkpoint",
    )


def _multiple(value: int, of: int) -> int:
    """Round a model's size to the nearest multiple of `of`, at least one, for the advice on a conflict."""
    return max(1, round(value / of)) * of


def _images_of_several(recipe: Recipe) -> Iterator[Conflict]:
    if recipe.model.task == "image_classification" and recipe.data.sources:
        yield Conflict(
            ("model.task", "data.sources"),
            "Images come from one folder",
            f"data.sources = {recipe.data.sources}",
            "data.source = a folder with one sub-folder of images a class",
            "--data.source FOLDER, without data.sources",
        )


def _nothing_held_out(recipe: Recipe) -> Iterator[Conflict]:
    """Find a held-out share of 0 for data that is divided by shares: installed text and images. The user's own text may
    be held out by files."""
    data, images = recipe.data, recipe.model.task == "image_classification"
    if data.holdout == 0 and (images or (data.source == "installed" and not data.sources)):
        yield Conflict(
            ("data.holdout", "data.source", "data.sources"),
            "Images and the installed text need a held-out part",
            "data.holdout = 0",
            "a share above 0",
            "data.holdout = 0.02, or data.source = your own text or conversations",
        )


def _lora(recipe: Recipe) -> Iterator[Conflict]:
    if not recipe.lora.rank:
        return
    if recipe.optim.kind == "muon":
        yield Conflict(
            ("lora.rank", "optim.kind"),
            "Muon does not train adapters",
            f'lora.rank = {recipe.lora.rank}, optim.kind = "muon"',
            "AdamW for adapters: Muon is for whole matrices, and an adapter is two thin factors of one",
            'optim.kind = "adamw", or lora.rank = 0',
        )
    # Codes hold 8 bits: a matmul that moves to BF16 would find no wider weights.
    if recipe.lora.base == "fp8" and recipe.precision.moves_matmuls:
        yield Conflict(
            ("lora.base", "precision.controller.enabled", "precision.fp8_from", "precision.fp8_until"),
            "FP8 switching does not apply to weights that are kept as codes",
            f'lora.rank = {recipe.lora.rank}, lora.base = "fp8", precision.controller, fp8_from or fp8_until',
            "frozen weights that matmuls above 8 bits can read as they are",
            'lora.base = "keep", or precision.controller.enabled = false and no fp8_from and fp8_until',
        )
    if recipe.checkpoint.export_hf and recipe.checkpoint.export_format != "keep":
        yield Conflict(
            ("lora.rank", "checkpoint.export_hf", "checkpoint.export_format"),
            "Export format does not apply to adapters",
            f'checkpoint.export_format = "{recipe.checkpoint.export_format}"',
            'checkpoint.export_format = "keep"',
            "merge the adapter afterwards (precision.lora.merge_lora), and save the model in that format",
        )


MODEL_CHECKS = (_images_of_several, _nothing_held_out, _model, _decoder_shape, _layers, _mla, _experts, _export, _lora)
