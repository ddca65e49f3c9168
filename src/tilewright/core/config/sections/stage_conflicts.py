"""What stages of a pipeline (`parallel.pp`) cannot be together with, each by name."""

from collections.abc import Callable, Iterator

from tilewright.core.config.model_conflicts import Conflict
from tilewright.core.config.recipe import Recipe


def _in_8_bits(recipe: Recipe) -> bool:
    precision = recipe.precision
    modes = [mode for mode in (precision.mode, precision.start_mode) if mode is not None]
    formats = [format for rule in precision.rules for format in (rule.compute, rule.fprop, rule.dgrad, rule.wgrad)]
    wide = ("", "fp32", "tf32", "bf16", "fp16")
    return precision.enabled and (
        any(mode.startswith("fp8") for mode in modes) or any(format not in wide for format in formats)
    )


# (is it so here?, field, what it is called, what it is said to be, what would do)
_REFUSED: tuple[tuple[Callable[[Recipe], bool], str, str, str, str], ...] = (
    (
        lambda r: r.model.kind == "hf",
        "model.kind", "Hugging Face models", "tilewright's own decoder", 'model.kind = "decoder"',
    ),
    (
        lambda r: not r.model.path and r.model.tie_embeddings,
        "model.tie_embeddings", "Tied embeddings", "a head of its own: the embedding is on another process",
        "--model.tie_embeddings false",
    ),
    (
        lambda r: r.memory.executor == "layer_major",
        "memory.executor", "The layer-major executor", "one process that holds all layers",
        '--memory.executor standard',
    ),
    (
        lambda r: bool(r.memory.plan) and r.memory.plan != "auto",
        "memory.plan", "A plan file", "settings that are the same for all layers", '--memory.plan auto',
    ),
    (
        lambda r: bool(r.distill.teacher),
        "distill.teacher", "A teacher", "a loss of labels alone: the teacher's scores are nowhere sent",
        '--distill.teacher ""',
    ),
    (_in_8_bits, "precision.mode", "Formats of 8 bits and fewer", "16 bits or more", "--precision.mode bf16_mixed"),
    (
        lambda r: r.parallel.cpu_offload,
        "parallel.cpu_offload", "Shards in host memory", "shards on the device", "--parallel.cpu_offload false",
    ),
    (
        lambda r: r.parallel.reduce_each,
        "parallel.reduce_each", "Gradients summed after each micro-batch", "sums at the end of the step",
        "--parallel.reduce_each false",
    ),
)  # fmt: skip


def stage_conflicts(recipe: Recipe) -> Iterator[Conflict]:
    """What a recipe with `parallel.pp` above 1 asks for and cannot have yet, and layers that are too few."""
    parallel, model = recipe.parallel, recipe.model
    if parallel.pp == 1:
        return
    for found, field, what, need, try_ in _REFUSED:
        if found(recipe):
            section, name = field.split(".")
            value = getattr(getattr(recipe, section), name)
            yield Conflict(
                ("parallel.pp", field),
                f"{what} cannot be cut into stages yet",
                f"parallel.pp = {parallel.pp}, {field} = {value}",
                need,
                f"{try_}, or --parallel.pp 1",
            )
    stages = parallel.pp * (parallel.virtual_stages if parallel.schedule == "interleaved" else 1)
    if model.kind == "decoder" and not model.path and model.num_layers < stages:
        yield Conflict(
            ("parallel.pp", "parallel.schedule", "parallel.virtual_stages", "model.num_layers"),
            "Fewer layers than stages of the pipeline",
            f"model.num_layers = {model.num_layers}, {stages} stages",
            "at least one layer per stage",
            f"--model.num_layers {stages}, or a smaller parallel.pp",
        )
