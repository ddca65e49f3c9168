"""Settings that stages of a pipeline (`parallel.pp`) exclude, each by name."""

from collections.abc import Iterator

from tilewright.core.config.model_conflicts import Conflict
from tilewright.core.config.recipe import Recipe
from tilewright.core.config.sections.parallel import DEFERRING
from tilewright.core.config.sections.parallel_conflicts import Refused, refused

REFUSED_WITH_STAGES: tuple[Refused, ...] = (
    (
        lambda r: r.model.kind == "hf" and r.model.task == "image_classification",
        "model.task", "Image classifiers", "a language model", '--model.task causal_lm',
    ),
    (
        lambda r: r.memory.can.offload,
        "memory.executor", "The layer-major executor", "one process that holds all layers",
        '--memory.executor standard',
    ),
    (
        lambda r: bool(r.memory.plan) and r.memory.plan != "auto",
        "memory.plan", "A plan file", "settings that are the same for all layers", '--memory.plan auto',
    ),
    (
        lambda r: r.train.compile == "on" and r.model.kind == "hf" and r.parallel.schedule in DEFERRING,
        "train.compile", "Compiled layers of Hugging Face whose weight gradients wait",
        "tilewright's own decoder, layers in eager mode, or schedule 1f1b", "--train.compile auto",
    ),
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
    """Find conflicts of stages: settings of a recipe with `parallel.pp` above 1 that are not supported yet, and too few
    layers."""
    parallel, model = recipe.parallel, recipe.model
    if parallel.pp == 1:
        return
    yield from refused(recipe, "parallel.pp", REFUSED_WITH_STAGES, "cannot be cut into stages yet")
    stages = parallel.pp * parallel.stages_per_process
    if model.kind != "hf" and not model.path and model.num_layers < stages:
        yield Conflict(
            ("parallel.pp", "parallel.schedule", "parallel.virtual_stages", "model.num_layers"),
            "Fewer layers than stages of the pipeline",
            f"model.num_layers = {model.num_layers}, {stages} stages",
            "at least one layer per stage",
            f"--model.num_layers {stages}, or a smaller parallel.pp",
        )
        return
    # The layers of a folder are counted where it is read; the number of stages is known here.
    split = parallel.split
    known = model.kind != "hf" and not model.path
    if split and (len(split) != stages or min(split) < 1 or (known and sum(split) != model.num_layers)):
        least, more = divmod(model.num_layers, stages)
        even = ",".join(str(least + (stage < more)) for stage in range(stages))
        yield Conflict(
            ("parallel.split", "parallel.pp", "parallel.schedule", "parallel.virtual_stages", "model.num_layers"),
            "Split of layers over stages that is not one of this model",
            f"parallel.split = {list(split)}: {len(split)} stages, {sum(split)} layers",
            f"{stages} stages of at least one layer" + (f", {model.num_layers} layers in all" if known else ""),
            f"--parallel.split [{even}], or [] for one by what layers cost" if known else "--parallel.split []",
        )
