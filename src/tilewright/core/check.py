"""What the schema cannot say: settings that contradict each other.

`conflicts` returns every contradiction with the fields it reads, so that the loader can name their
places and leave out those whose fields are already known to be wrong.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from tilewright.core.config import Recipe


@dataclass(frozen=True)
class Conflict:
    """Settings that cannot be together. `fields` are the ones read to find out."""

    fields: tuple[str, ...]
    what: str
    got: str
    need: str
    try_: str


def conflicts(recipe: Recipe) -> list[Conflict]:
    """Every contradiction in a recipe whose single values are all right."""
    checks = (
        _model,
        _decoder_shape,
        _mla,
        _experts,
        _export,
        _data,
        _precision,
        _precision_control,
        _optim,
        _lora,
        _train,
    )
    return [conflict for check in checks for conflict in check(recipe)]


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
    if model.kind == "decoder" and model.task != "causal_lm":
        yield Conflict(
            ("model.kind", "model.task"),
            f'the decoder does not learn "{model.task}"',
            f'model.kind = "decoder", model.task = "{model.task}"',
            'model.task = "causal_lm" for the decoder',
            f'model.kind = "hf" with a model of that task in model.path, for {model.task}',
        )


def _decoder_shape(recipe: Recipe) -> Iterator[Conflict]:
    """Head counts and widths of our decoder, where they come from the recipe and not from a folder."""
    model = recipe.model
    if model.kind != "decoder" or model.path or model.attention != "gqa":
        return
    if not model.head_dim and model.dim % model.num_heads:
        yield Conflict(
            ("model.dim", "model.num_heads", "model.head_dim"),
            "the width does not divide into the heads",
            f"model.dim = {model.dim}, model.num_heads = {model.num_heads}",
            "dim a multiple of num_heads, or head_dim given",
            f"model.dim = {_multiple(model.dim, model.num_heads)}, or model.head_dim = "
            f"{max(2, model.dim // model.num_heads // 2 * 2)}",
        )
    elif (model.head_dim or model.dim // model.num_heads) % 2:
        yield Conflict(
            ("model.dim", "model.num_heads", "model.head_dim"),
            "rotary positions need heads of even width",
            f"heads {model.head_dim or model.dim // model.num_heads} wide",
            "an even width",
            "model.head_dim = " + str((model.head_dim or model.dim // model.num_heads) + 1),
        )
    if model.num_kv_heads and model.num_heads % model.num_kv_heads:
        divisors = [str(count) for count in range(1, model.num_heads + 1) if model.num_heads % count == 0]
        yield Conflict(
            ("model.num_heads", "model.num_kv_heads"),
            "the query heads do not share the key/value heads evenly",
            f"model.num_heads = {model.num_heads}, model.num_kv_heads = {model.num_kv_heads}",
            "num_heads a multiple of num_kv_heads",
            "model.num_kv_heads = " + " or ".join(divisors),
        )


def _mla(recipe: Recipe) -> Iterator[Conflict]:
    model = recipe.model
    if model.kind != "decoder" or model.path or model.attention != "mla":
        return
    if model.qk_rope_head_dim % 2:
        yield Conflict(
            ("model.attention", "model.qk_rope_head_dim"),
            "rotary positions need an even width",
            f"model.qk_rope_head_dim = {model.qk_rope_head_dim}",
            "an even number",
            f"model.qk_rope_head_dim = {model.qk_rope_head_dim + 1}",
        )


def _experts(recipe: Recipe) -> Iterator[Conflict]:
    model = recipe.model
    if model.kind != "decoder" or model.path or model.num_experts == 0:
        return
    if model.num_dense_layers > model.num_layers:
        yield Conflict(
            ("model.num_layers", "model.num_dense_layers"),
            "more dense layers than layers",
            f"model.num_dense_layers = {model.num_dense_layers}, model.num_layers = {model.num_layers}",
            "num_dense_layers at most num_layers",
            f"model.num_dense_layers = {min(1, model.num_layers)}",
        )
    if model.num_experts % model.num_expert_groups:
        yield Conflict(
            ("model.num_experts", "model.num_expert_groups"),
            "the experts do not divide into the groups",
            f"model.num_experts = {model.num_experts}, model.num_expert_groups = {model.num_expert_groups}",
            "num_experts a multiple of num_expert_groups",
            f"model.num_experts = {_multiple(model.num_experts, model.num_expert_groups)}",
        )
        return
    if model.num_limited_groups > model.num_expert_groups:
        yield Conflict(
            ("model.num_expert_groups", "model.num_limited_groups"),
            "a token cannot route to more groups than there are",
            f"model.num_limited_groups = {model.num_limited_groups}, "
            f"model.num_expert_groups = {model.num_expert_groups}",
            "num_limited_groups at most num_expert_groups",
            f"model.num_limited_groups = {model.num_expert_groups}",
        )
        return
    reachable = model.num_experts // model.num_expert_groups * model.num_limited_groups
    if model.num_experts_per_token > reachable:
        yield Conflict(
            ("model.num_experts", "model.num_experts_per_token", "model.num_expert_groups", "model.num_limited_groups"),
            "a token cannot use more experts than it can reach",
            f"model.num_experts_per_token = {model.num_experts_per_token}, {reachable} experts within reach",
            "num_experts_per_token at most num_experts / num_expert_groups * num_limited_groups",
            f"model.num_experts_per_token = {min(2, reachable)}",
        )


def _export(recipe: Recipe) -> Iterator[Conflict]:
    """Shapes that no Hugging Face layout describes, told before the run instead of at its end."""
    model = recipe.model
    if not recipe.save.export_hf or model.kind != "decoder" or model.path:
        return
    if model.attention == "gqa" and (model.num_experts or model.dim % model.num_heads):
        has = "experts" if model.num_experts else f"dim = {model.dim} and {model.num_heads} heads"
        need = 'attention = "mla" with experts, or none; dim a multiple of num_heads'
    elif model.num_experts and not model.num_shared_experts:
        has, need = "no shared expert", "at least one shared expert"
    elif model.num_experts and model.num_experts // model.num_expert_groups < 2:
        has, need = "one expert a group", "at least two experts a group"
    else:
        return
    yield Conflict(
        (
            "save.export_hf",
            "model.attention",
            "model.num_experts",
            "model.num_shared_experts",
            "model.num_expert_groups",
        ),
        "no Hugging Face layout holds this shape",
        f'attention = "{model.attention}" with {has}',
        need,
        "save.export_hf = false, and keep tilewright's own checkpoint",
    )


def _data(recipe: Recipe) -> Iterator[Conflict]:
    data = recipe.data
    if recipe.model.task == "image_classification" and data.source == "installed":
        yield Conflict(
            ("model.task", "data.source"),
            "the installed corpus holds no images",
            'data.source = "installed", model.task = "image_classification"',
            "a folder with one sub-folder of images a class",
            "--data.source FOLDER",
        )
    if any(not 0 <= weight < float("inf") for weight in data.weights.values()) or (
        data.weights and not sum(data.weights.values())
    ):
        yield Conflict(
            ("data.weights",),
            "mixture weights must be 0 or more, and not all 0",
            f"data.weights = {data.weights}",
            "numbers from 0 up, at least one above 0",
            "leave a domain out with data.domains instead of a negative weight",
        )
    strangers = sorted(set(data.weights) - set(data.domains)) if data.domains else []
    if strangers:
        yield Conflict(
            ("data.weights", "data.domains"),
            "weights for domains that data.domains leaves out",
            ", ".join(strangers),
            f"domains among {', '.join(data.domains)}",
            "add them to data.domains or take their weights away",
        )


def _precision(recipe: Recipe) -> Iterator[Conflict]:
    precision = recipe.precision
    for rule in precision.rules:
        if not any((rule.compute, rule.fprop, rule.dgrad, rule.wgrad, rule.kind)):
            yield Conflict(
                ("precision.rules",),
                "a rule names no format",
                f'{{ match = "{rule.match}", op = "{rule.op}" }}',
                "compute, one of fprop, dgrad, wgrad, or kind",
                'compute = "fp32"',
            )
    if precision.start_mode is not None and precision.start_mode == precision.mode:
        yield Conflict(
            ("precision.mode", "precision.start_mode"),
            "a switch from a mode to itself",
            f'precision.start_mode = precision.mode = "{precision.mode}"',
            "two different modes",
            'precision.start_mode = "none"',
        )
    elif precision.start_mode is not None and "pure_fp16" in (precision.start_mode, precision.mode):
        yield Conflict(
            ("precision.mode", "precision.start_mode"),
            "pure_fp16 cannot be one side of a switch, because its weights are stored in FP16",
            f'precision.start_mode = "{precision.start_mode}", precision.mode = "{precision.mode}"',
            "two modes among fp32, tf32, bf16_mixed, hybrid",
            'precision.mode = "hybrid"',
        )
    if precision.loss_scale_min > precision.loss_scale_max:
        yield Conflict(
            ("precision.loss_scale_min", "precision.loss_scale_max"),
            "the loss scale has no room between its bounds",
            f"precision.loss_scale_min = {precision.loss_scale_min:g}, max = {precision.loss_scale_max:g}",
            "loss_scale_min at most loss_scale_max",
            "precision.loss_scale_min = 1.0",
        )
    elif isinstance(precision.loss_scale, float) and not (
        precision.loss_scale_min <= precision.loss_scale <= precision.loss_scale_max
    ):
        yield Conflict(
            ("precision.loss_scale", "precision.loss_scale_min", "precision.loss_scale_max"),
            "the first loss scale is outside its bounds",
            f"precision.loss_scale = {precision.loss_scale:g}",
            f"{precision.loss_scale_min:g} to {precision.loss_scale_max:g}",
            'precision.loss_scale = "auto"',
        )


def _precision_control(recipe: Recipe) -> Iterator[Conflict]:
    """The controller, and schedules of single products."""
    precision = recipe.precision
    until = precision.fp8_until
    if not all(0 <= share <= 1 for share in precision.fp8_from):
        yield Conflict(
            ("precision.fp8_from",),
            "shares of the steps lie between 0 and 1",
            f"precision.fp8_from = {list(precision.fp8_from)}",
            "three numbers from 0 to 1: for fprop, wgrad and dgrad",
            "precision.fp8_from = [0.0, 0.1, 0.2]",
        )
    elif precision.fp8_from != (0.0, 0.0, 0.0) and max(precision.fp8_from) >= until:
        yield Conflict(
            ("precision.fp8_from", "precision.fp8_until"),
            "8 bits would end before all products have begun with them",
            f"precision.fp8_from = {list(precision.fp8_from)}, fp8_until = {until:g}",
            "shares in fp8_from below fp8_until",
            "precision.fp8_until = 1.0",
        )
    if not precision.moves_products:
        return
    asked = "precision.controller = true" if precision.controller else "precision.fp8_from or fp8_until"
    if precision.mode != "fp8_tile":
        yield Conflict(
            ("precision.mode", "precision.controller", "precision.fp8_from", "precision.fp8_until"),
            "only products in 8-bit tiles can be moved while training",
            f'{asked}, precision.mode = "{precision.mode}"',
            'precision.mode = "fp8_tile"',
            'precision.mode = "fp8_tile", or precision.controller = false and no fp8_from and fp8_until',
        )
    elif precision.start_mode is not None:
        yield Conflict(
            ("precision.start_mode", "precision.controller", "precision.fp8_from", "precision.fp8_until"),
            "a start mode and moves of single products cannot be together",
            f'{asked}, precision.start_mode = "{precision.start_mode}"',
            "one of them; fp8_from starts the products in BF16, too",
            f'precision.start_mode = "none", precision.fp8_from = {[precision.start_fraction] * 3}',
        )
    if precision.controller and precision.controller_recalibrate < precision.controller_every:
        yield Conflict(
            ("precision.controller_every", "precision.controller_recalibrate"),
            "large samples would be more frequent than small ones",
            f"precision.controller_recalibrate = {precision.controller_recalibrate}, "
            f"controller_every = {precision.controller_every}",
            "controller_recalibrate at least controller_every",
            f"precision.controller_recalibrate = {10 * precision.controller_every}",
        )


def _optim(recipe: Recipe) -> Iterator[Conflict]:
    optim = recipe.optim
    if not all(0 <= beta < 1 for beta in optim.betas):
        yield Conflict(
            ("optim.betas",),
            "AdamW's betas must be at least 0 and below 1",
            f"optim.betas = {list(optim.betas)}",
            "two numbers from 0 up to below 1",
            "optim.betas = [0.9, 0.95]",
        )
    if optim.master == "split24" and optim.moments != "8bit":
        yield Conflict(
            ("optim.master", "optim.moments"),
            "weights in 24 bits go with moments in 8 bits",
            f'optim.master = "split24", optim.moments = "{optim.moments}"',
            'optim.moments = "8bit", or another master',
            'optim.moments = "8bit"',
        )
    if optim.master != "fp32" and recipe.precision.mode == "pure_fp16":
        yield Conflict(
            ("optim.master", "precision.mode"),
            "stochastic rounding keeps the weights in BF16, pure_fp16 in FP16",
            f'optim.master = "{optim.master}", precision.mode = "pure_fp16"',
            "one storage format for the weights",
            'precision.mode = "bf16_mixed", or optim.master = "fp32"',
        )


def _lora(recipe: Recipe) -> Iterator[Conflict]:
    if not recipe.lora.rank:
        return
    if recipe.memory.executor != "standard":
        yield Conflict(
            ("lora.rank", "memory.executor"),
            "adapters need no slices: the base is frozen and has no optimizer states",
            f'lora.rank = {recipe.lora.rank}, memory.executor = "{recipe.memory.executor}"',
            'memory.executor = "standard"',
            'memory.executor = "standard" with train.activation_checkpoint = "full"',
        )
    if recipe.save.export_hf and recipe.save.export_format != "keep":
        yield Conflict(
            ("lora.rank", "save.export_hf", "save.export_format"),
            "an adapter is written in FP32",
            f'save.export_format = "{recipe.save.export_format}"',
            'save.export_format = "keep"',
            "merge the adapter afterwards (precision.lora.merge_lora), and save the model in that format",
        )


def _train(recipe: Recipe) -> Iterator[Conflict]:
    train, run = recipe.train, recipe.run
    if train.micro_batch > train.batch_size:
        yield Conflict(
            ("train.micro_batch", "train.batch_size"),
            "one forward pass holds more rows than the whole step",
            f"train.micro_batch = {train.micro_batch}, train.batch_size = {train.batch_size}",
            "micro_batch at most batch_size",
            f"train.micro_batch = {train.batch_size}, or train.batch_size = {train.micro_batch}",
        )
    slices = recipe.memory.executor == "layer_major"
    if train.checkpoint_inputs == "fp8" and train.activation_checkpoint != "full" and not slices:
        yield Conflict(
            ("train.checkpoint_inputs", "train.activation_checkpoint"),
            "only layers that are recomputed whole keep nothing but their inputs",
            f'train.checkpoint_inputs = "fp8", train.activation_checkpoint = "{train.activation_checkpoint}"',
            'train.activation_checkpoint = "full" with FP8 inputs',
            'train.activation_checkpoint = "full", or train.checkpoint_inputs = "exact"',
        )
    if slices and train.activation_checkpoint != "none":
        yield Conflict(
            ("train.activation_checkpoint", "memory.executor"),
            "the layer-major executor recomputes every layer anyway",
            f'train.activation_checkpoint = "{train.activation_checkpoint}", memory.executor = "layer_major"',
            'train.activation_checkpoint = "none"',
            'train.activation_checkpoint = "none"; memory.group for coarser recomputation',
        )
    if slices and recipe.precision.moves_products:
        yield Conflict(
            ("precision.controller", "precision.fp8_from", "precision.fp8_until", "memory.executor"),
            "products cannot be moved between formats where a step updates its layers on the way",
            'precision.controller, fp8_from or fp8_until with memory.executor = "layer_major"',
            "formats that stay",
            'memory.executor = "standard", or precision.controller = false and no fp8_from and fp8_until',
        )
    if recipe.optim.clip == "lagged" and not slices:
        yield Conflict(
            ("optim.clip", "memory.executor"),
            "the standard executor knows the whole gradient before it updates, so it clips exactly",
            'optim.clip = "lagged", memory.executor = "standard"',
            'optim.clip = "exact"',
            'optim.clip = "exact", or memory.executor = "layer_major"',
        )
    if any(mark in run.name for mark in "/\\") or run.name in (".", ".."):
        yield Conflict(
            ("run.name",),
            "the run's name must be a single folder name",
            f'run.name = "{run.name}"',
            "a name without a slash",
            "run.dir = the folder to put it in",
        )


def _multiple(value: int, of: int) -> int:
    """The multiple of `of` nearest to `value`, at least one."""
    return max(1, round(value / of)) * of
