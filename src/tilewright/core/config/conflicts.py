"""Settings that contradict each other, which the schema cannot express.

`conflicts` returns every contradiction with the fields it reads, so that the loader can name their
places and leave out those whose fields are already known to be wrong.
"""

import itertools
import re
from collections.abc import Iterator

from tilewright.core.config.executors import Capabilities, capabilities_of
from tilewright.core.config.model_conflicts import MODEL_CHECKS, Conflict
from tilewright.core.config.recipe import Recipe
from tilewright.core.config.sections.data_conflicts import DATA_CHECKS
from tilewright.core.config.sections.expert_conflicts import expert_conflicts
from tilewright.core.config.sections.stage_conflicts import stage_conflicts
from tilewright.core.config.sections.sync_conflicts import sync_conflicts
from tilewright.core.config.sections.tensor_conflicts import tensor_conflicts

_LAYER = re.compile(r"0|[1-9][0-9]{0,8}")


def conflicts(recipe: Recipe) -> list[Conflict]:
    """Find every contradiction between settings of a recipe whose single values are all valid."""
    of_recipe = (check(recipe) for check in _CHECKS)
    return [*itertools.chain(*of_recipe), *executor_conflicts(recipe, capabilities_of(recipe.executor))]


def executor_conflicts(recipe: Recipe, can: Capabilities, named: str = "") -> Iterator[Conflict]:
    """Find settings of a recipe that its executor does not support.

    Args:
        recipe: of the run.
        can: what the executor can do.
        named: how errors name it; empty: as the recipe does.
    """
    train, executor = recipe.train, named or f'memory.executor = "{recipe.memory.executor}"'
    if recipe.data.format == "preferences" and not can.whole_model and not can.stages:  # see `stage_conflicts`
        yield Conflict(
            ("data.format", "memory.executor"),
            "Preferences need the standard executor",
            f'{executor}, data.format = "preferences"',
            "both answers of a pair through the whole model before its loss",
            'memory.executor = "standard", and lora.rank = 16 where memory is short',
        )
    if recipe.lora.rank and not can.adapters:
        yield Conflict(
            ("lora.rank", "memory.executor"),
            "LoRA needs the standard executor",
            f"lora.rank = {recipe.lora.rank}, {executor}",
            'memory.executor = "standard"',
            'memory.executor = "standard" with train.activation_checkpoint = "full"',
        )
    if can.activation_checkpoint and train.checkpoint_inputs == "fp8" and train.activation_checkpoint != "full":
        yield Conflict(
            ("train.checkpoint_inputs", "train.activation_checkpoint"),
            "FP8 layer inputs need full activation checkpointing",
            f'train.checkpoint_inputs = "fp8", train.activation_checkpoint = "{train.activation_checkpoint}"',
            'train.activation_checkpoint = "full" with FP8 inputs',
            'train.activation_checkpoint = "full", or train.checkpoint_inputs = "exact"',
        )
    if not can.activation_checkpoint and train.activation_checkpoint != "none":
        yield Conflict(
            ("train.activation_checkpoint", "memory.executor"),
            "Activation checkpointing has no effect with the layer-major executor",
            f'train.activation_checkpoint = "{train.activation_checkpoint}", {executor}',
            'train.activation_checkpoint = "none"',
            'train.activation_checkpoint = "none"; memory.layers_per_group for coarser recomputation',
        )
    if not can.whole_gradient and recipe.precision.moves_matmuls:
        yield Conflict(
            ("precision.controller.enabled", "precision.fp8_from", "precision.fp8_until", "memory.executor"),
            "FP8 switching needs a separate optimizer step",
            f"precision.controller, fp8_from or fp8_until with {executor}",
            "formats that stay",
            'memory.executor = "standard", or precision.controller.enabled = false and no fp8_from and fp8_until',
        )
    if can.whole_gradient and recipe.optim.clip == "delayed":
        yield Conflict(
            ("optim.clip", "memory.executor"),
            "Delayed clipping needs the layer-major executor",
            f'optim.clip = "delayed", {executor}',
            'optim.clip = "two_pass"',
            'optim.clip = "two_pass", or memory.executor = "layer_major"',
        )
    if recipe.parallel.dp_shard > 1 and not can.shard:
        yield Conflict(
            ("parallel.dp_shard", "memory.executor"),
            "Layer-major executor does not shard",
            f"parallel.dp_shard = {recipe.parallel.dp_shard}, {executor}",
            "copies of the model, each on a process: its layers travel between memories anyhow",
            "--parallel.dp_shard 1 --parallel.dp_replicate N, or --memory.executor standard",
        )


def _distill(recipe: Recipe) -> Iterator[Conflict]:
    if not recipe.distill.teacher:
        return
    if recipe.data.format == "preferences" or recipe.model.task != "causal_lm":
        yield Conflict(
            ("distill.teacher", "data.format", "model.task"),
            "Teacher needs a causal language model and one answer per row",
            f'model.task = "{recipe.model.task}", data.format = "{recipe.data.format}"',
            'model.task = "causal_lm" and data.format = "text" or "chat"',
            'distill.teacher = ""',
        )
    if recipe.distill.cache and recipe.data.rows == "documents":
        yield Conflict(
            ("distill.cache", "data.rows"),
            "Cache of a teacher needs rows that come again",
            'data.rows = "documents"',
            "rows of one length: whole documents stand behind others each time they come",
            'distill.cache = "", or data.rows = "packed"',
        )


def _hidden(recipe: Recipe) -> Iterator[Conflict]:
    """Find settings that do not go with a teacher's hidden values."""
    section, parallel = recipe.distill, recipe.parallel
    maps = {"hidden": section.hidden, "attention": section.attention} if section.teacher else {}
    for name, pairs in ((f"distill.{name}", pairs) for name, pairs in maps.items() if pairs):
        if wrong := [layer for layer in pairs if not _LAYER.fullmatch(layer)]:  # "01" would be layer 1 once more
            yield Conflict(
                (name,),
                "Layer is not a number",
                f"{name} names {', '.join(map(repr, wrong))}",
                "numbers of layers, counted from 0, without other digits before",
                f"{name} = {{ 2 = 5 }}",
            )
        if section.cache:
            yield Conflict(
                (name, "distill.cache"),
                "Hidden values of a teacher are not kept on disk",
                f'distill.cache = "{section.cache}"',
                "a teacher that runs on each row",
                'distill.cache = ""',
            )
        for axis, size in (("tp", parallel.tp), ("pp", parallel.pp), ("ep", parallel.ep)):
            if size > 1:
                yield Conflict(
                    (name, f"parallel.{axis}"),
                    "Hidden values of a teacher need whole layers on each process",
                    f"parallel.{axis} = {size}",
                    "copies or shards of the model",
                    f"--parallel.{axis} 1, or {name} = {{}}",
                )
        if recipe.lora.rank:
            yield Conflict(
                (name, "lora.rank"),
                "Hidden values of a teacher are not learned by adapters",
                f"lora.rank = {recipe.lora.rank}",
                "all parameters trained",
                f"lora.rank = 0, or {name} = {{}}",
            )
    if maps.get("attention") and recipe.model.kind == "hf" and recipe.train.compile == "on":
        yield Conflict(
            ("distill.attention", "train.compile"),
            "Attention of compiled layers of transformers is not seen",
            'train.compile = "on", model.kind = "hf"',
            "layers that are not compiled, or tilewright's own decoder",
            'train.compile = "off"',
        )


def _integers(recipe: Recipe) -> Iterator[Conflict]:
    """Find an adapter beside training for integers: it would be merged into weights that were never rounded with it,
    and nothing of what was trained would be kept."""
    rounded = [rule.compute for rule in recipe.precision.rules if rule.compute.startswith("int")]
    if rounded and recipe.lora.rank and recipe.precision.enabled:
        yield Conflict(
            ("precision.rules", "lora.rank"),
            "Adapters cannot be trained for integers",
            f'compute = "{rounded[0]}" in precision.rules, lora.rank = {recipe.lora.rank}',
            "all parameters trained: what is exported is the base with the adapter in it, rounded a second time",
            "lora.rank = 0",
        )


def _precision(recipe: Recipe) -> Iterator[Conflict]:
    precision = recipe.precision
    # 1. Rules: one without a format matches modules and changes nothing.
    for rule in precision.rules:
        if not any((rule.compute, rule.fprop, rule.dgrad, rule.wgrad, rule.kind)):
            yield Conflict(
                ("precision.rules",),
                "Precision rule without a format",
                f'{{ match = "{rule.match}", op = "{rule.op}" }}',
                "compute, one of fprop, dgrad, wgrad, or kind",
                'compute = "fp32"',
            )
    # 2. A start mode is a switch during the run, for which parameters must keep their format.
    if precision.start_mode is not None and precision.start_mode == precision.mode:
        yield Conflict(
            ("precision.mode", "precision.start_mode"),
            "Start mode equals the mode",
            f'precision.start_mode = precision.mode = "{precision.mode}"',
            "two different modes",
            'precision.start_mode = "none"',
        )
    elif precision.start_mode is not None and "pure_fp16" in (precision.start_mode, precision.mode):
        yield Conflict(
            ("precision.mode", "precision.start_mode"),
            "Mode pure_fp16 cannot be combined with a start mode",
            f'precision.start_mode = "{precision.start_mode}", precision.mode = "{precision.mode}"',
            "two modes among fp32, tf32, bf16_mixed, hybrid",
            'precision.mode = "hybrid"',
        )
    # 3. The loss scale's bounds, then its first value between them.
    if precision.loss_scale_min > precision.loss_scale_max:
        yield Conflict(
            ("precision.loss_scale_min", "precision.loss_scale_max"),
            "Loss scale bounds leave no room",
            f"precision.loss_scale_min = {precision.loss_scale_min:g}, max = {precision.loss_scale_max:g}",
            "loss_scale_min at most loss_scale_max",
            "precision.loss_scale_min = 1.0",
        )
    elif isinstance(precision.loss_scale, float) and not (
        precision.loss_scale_min <= precision.loss_scale <= precision.loss_scale_max
    ):
        yield Conflict(
            ("precision.loss_scale", "precision.loss_scale_min", "precision.loss_scale_max"),
            "Initial loss scale is outside its bounds",
            f"precision.loss_scale = {precision.loss_scale:g}",
            f"{precision.loss_scale_min:g} to {precision.loss_scale_max:g}",
            'precision.loss_scale = "auto"',
        )


def _precision_control(recipe: Recipe) -> Iterator[Conflict]:
    """Conflicts of the precision controller, and schedules of single matmuls."""
    precision = recipe.precision
    until = precision.fp8_until
    # 1. The schedule by itself.
    if not all(0 <= share <= 1 for share in precision.fp8_from):
        yield Conflict(
            ("precision.fp8_from",),
            "Share of the steps outside 0 to 1",
            f"precision.fp8_from = {list(precision.fp8_from)}",
            "three numbers from 0 to 1: for fprop, wgrad and dgrad",
            "precision.fp8_from = [0.0, 0.1, 0.2]",
        )
    elif precision.fp8_from != (0.0, 0.0, 0.0) and max(precision.fp8_from) >= until:
        yield Conflict(
            ("precision.fp8_from", "precision.fp8_until"),
            "FP8 schedule ends before it begins",
            f"precision.fp8_from = {list(precision.fp8_from)}, fp8_until = {until:g}",
            "shares in fp8_from below fp8_until",
            "precision.fp8_until = 1.0",
        )
    # 2. Switching, by a schedule or by the controller, needs a mode that has both formats.
    if not precision.moves_matmuls:
        return
    asked = "precision.controller.enabled = true" if precision.controller else "precision.fp8_from or fp8_until"
    if precision.mode != "fp8_tile":
        yield Conflict(
            ("precision.mode", "precision.controller.enabled", "precision.fp8_from", "precision.fp8_until"),
            "FP8 switching needs mode fp8_tile",
            f'{asked}, precision.mode = "{precision.mode}"',
            'precision.mode = "fp8_tile"',
            'precision.mode = "fp8_tile", or precision.controller.enabled = false and no fp8_from and fp8_until',
        )
    elif precision.start_mode is not None:
        yield Conflict(
            ("precision.start_mode", "precision.controller.enabled", "precision.fp8_from", "precision.fp8_until"),
            "Start mode cannot be combined with FP8 switching",
            f'{asked}, precision.start_mode = "{precision.start_mode}"',
            "one of them; fp8_from starts the matmuls in BF16, too",
            f'precision.start_mode = "none", precision.fp8_from = {[precision.start_fraction] * 3}',
        )
    # 3. A recalibration is a larger sample, not more frequent than the others.
    if precision.controller.enabled and precision.controller.recalibrate_interval < precision.controller.interval:
        yield Conflict(
            ("precision.controller.interval", "precision.controller.recalibrate_interval"),
            "Controller's recalibrate_interval is below its interval",
            f"precision.controller.recalibrate_interval = {precision.controller.recalibrate_interval}, "
            f"precision.controller.interval = {precision.controller.interval}",
            "recalibrate_interval at least interval",
            f"precision.controller.recalibrate_interval = {10 * precision.controller.interval}",
        )


def _optim(recipe: Recipe) -> Iterator[Conflict]:
    optim = recipe.optim
    if not all(0 <= beta < 1 for beta in optim.betas):
        yield Conflict(
            ("optim.betas",),
            "AdamW betas outside [0, 1)",
            f"optim.betas = {list(optim.betas)}",
            "two numbers from 0 up to below 1",
            "optim.betas = [0.9, 0.95]",
        )
    if optim.master_weights == "split24" and optim.moments != "8bit":
        yield Conflict(
            ("optim.master_weights", "optim.moments"),
            "24-bit weights need 8-bit moments",
            f'optim.master_weights = "split24", optim.moments = "{optim.moments}"',
            'optim.moments = "8bit", or another master',
            'optim.moments = "8bit"',
        )
    if optim.master_weights != "fp32" and recipe.precision.mode == "pure_fp16":
        yield Conflict(
            ("optim.master_weights", "precision.mode"),
            "Stochastic rounding to BF16 contradicts pure_fp16",
            f'optim.master_weights = "{optim.master_weights}", precision.mode = "pure_fp16"',
            "one storage format for the weights",
            'precision.mode = "bf16_mixed", or optim.master_weights = "fp32"',
        )


def _train(recipe: Recipe) -> Iterator[Conflict]:
    train, run = recipe.train, recipe.run
    if train.micro_batch_size > train.global_batch_size:
        yield Conflict(
            ("train.micro_batch_size", "train.global_batch_size"),
            "Micro-batch is larger than the global batch",
            f"train.micro_batch_size = {train.micro_batch_size}, train.global_batch_size = {train.global_batch_size}",
            "micro_batch_size at most global_batch_size",
            f"train.micro_batch_size = {train.global_batch_size}, "
            f"or train.global_batch_size = {train.micro_batch_size}",
        )
    if not train.steps and not train.minutes:
        yield Conflict(
            ("train.steps", "train.minutes"),
            "Run without a length",
            "train.steps = 0, train.minutes = 0.0",
            "a number of steps, or of minutes",
            "train.steps = 400, or train.minutes = 5",
        )
    # The name becomes a folder below run.dir.
    if any(mark in run.name for mark in "/\\") or run.name in (".", ".."):
        yield Conflict(
            ("run.name",),
            "Run name is not a single folder name",
            f'run.name = "{run.name}"',
            "a name without a slash",
            "run.dir = the folder to put it in",
        )


def _parallel(recipe: Recipe) -> Iterator[Conflict]:
    parallel = recipe.parallel
    if parallel.dp_shard == 0:
        yield Conflict(
            ("parallel.dp_shard",),
            "No process would hold the model",
            "parallel.dp_shard = 0",
            "a number of processes, or -1 for as many as dp_replicate leaves",
            "--parallel.dp_shard -1",
        )


def _energy(recipe: Recipe) -> Iterator[Conflict]:
    """Find a carbon intensity without its source, or the reverse: a figure of emissions needs the user's number."""
    energy = recipe.energy
    if bool(energy.intensity) != bool(energy.intensity_source.strip()):
        yield Conflict(
            ("energy.intensity", "energy.intensity_source"),
            "Carbon intensity and its source go together",
            f'energy.intensity = {energy.intensity:g}, energy.intensity_source = "{energy.intensity_source}"',
            "both, or none: without them no emissions are given",
            '--energy.intensity 380 --energy.intensity_source "grid operator, mean of 2025"',
        )
    if not energy.measure and (energy.assume_watts or energy.intensity):
        yield Conflict(
            ("energy.measure", "energy.assume_watts", "energy.intensity"),
            "Energy is neither measured nor estimated, and has figures",
            f"energy.measure = false, energy.assume_watts = {energy.assume_watts:g}, "
            f"energy.intensity = {energy.intensity:g}",
            "energy.measure = true",
            "--energy.measure true",
        )


_CHECKS = (
    *MODEL_CHECKS,
    *DATA_CHECKS,
    _distill,
    _hidden,
    _integers,
    _precision,
    _precision_control,
    _optim,
    _train,
    _parallel,
    stage_conflicts,
    expert_conflicts,
    _energy,
    tensor_conflicts,
    sync_conflicts,
)
