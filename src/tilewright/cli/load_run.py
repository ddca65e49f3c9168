"""A finished or stopped run, opened to be used: its recipe, its tokenizer and the weights of its newest checkpoint.

The weights are read as FP32 into a plain model, without optimizer, data or plan. A model's folder is opened alike, with
the recipe of its recovery in place of a run's.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from tilewright.cli.common import find_run, is_run
from tilewright.compress.export.export_source import ExportSource
from tilewright.compress.export.stored_codes import Method
from tilewright.core.config.load import load_recipe
from tilewright.core.config.recipe import Recipe
from tilewright.core.errors import ConfigError
from tilewright.core.hardware import Machine, detect_machine
from tilewright.core.log import say
from tilewright.data.common.tokenizer import Tokenizer, load_tokenizer
from tilewright.data.common.tokenizer_folder import declared_stops, folder_tokenizer
from tilewright.models.base.protocols import Model
from tilewright.models.build import build_model, kind_of
from tilewright.models.folder.find_model import find_model, is_hub_name, local_folder
from tilewright.ops.kernels import Kernels
from tilewright.precision.convert import convert
from tilewright.precision.lora.lora import merge_lora
from tilewright.precision.policy.policy import Policy, in_fp32
from tilewright.training.checkpoint.checkpoint_meta import read_meta
from tilewright.training.checkpoint.checkpoint_state import load_newest
from tilewright.training.components.model import build_adapted
from tilewright.training.components.tokenizer_files import surrounding

FOLDER_LR = 1e-4
"""Rate of training where no run says one: a tenth of the schema's, for weights that were trained."""


@dataclass(frozen=True)
class Reopened:
    """A finished run's recipe, model and tokenizer."""

    recipe: Recipe
    tokenizer: Tokenizer
    model: Model
    checkpoint: Path
    device: torch.device


def reopen(run: Path, device: str = "auto", *, rounded: bool = True, threads: int | None = None) -> Reopened:
    """Load the model of a run folder, in evaluation mode.

    Args:
        run: its folder.
        device: auto, cpu or cuda.
        rounded: where the run rounds weights to integers, so does the model; else it is as plain as any other.
        threads: of the CPU, for torch; None: those of the run.

    Raises:
        CheckpointError: no valid checkpoint is there, or it is of another model than the run's recipe builds.
    """
    recipe = load_recipe(run / "run.toml", environ={}).recipe
    tokenizer = surrounding(load_tokenizer(run / "tokenizer.json"), recipe)
    if recipe.model.weights == "load":  # a run that is older than its generation_config.json
        tokenizer = tokenizer.stopping_at(declared_stops(Path(local_folder(recipe.model.path)).expanduser()))
    machine = detect_machine(device)
    model, checkpoint = _trained_model(run, recipe, machine, tokenizer.vocab_size, rounded=rounded, threads=threads)
    return Reopened(recipe, tokenizer, model, checkpoint, torch.device(machine.device))


def _trained_model(
    run: Path, recipe: Recipe, machine: Machine, vocab_size: int, *, rounded: bool, threads: int | None = None
) -> tuple[Model, Path]:
    """Load the trained model of a run with the weights of the newest checkpoint, in evaluation mode, and that
    checkpoint."""
    torch.set_num_threads(threads or recipe.run.threads or machine.physical_cores)
    section = recipe.model.model_copy(update={"weights": "random"})  # the checkpoint's weights, not the folder's
    plain = recipe.model_copy(update={"model": section})
    kernels = Kernels.from_sections(machine, recipe.ops, recipe.memory)
    model = build_adapted(plain, vocab_size, kernels, machine.device)
    checkpoint = load_newest(run, model)
    policy = Policy.from_section(recipe.precision, machine.device)
    if rounded and policy.rounds_to_integers:
        convert(model, in_fp32(policy), kernels=kernels)
    return model.eval(), checkpoint


def open_to_export(
    run: Path, without_tokenizer: bool = False, method: Method = "auto", normalized_text: bool = False
) -> ExportSource:
    """Load a run as `export` takes it, adapters merged. A run that has not finished is said to be one.

    Args:
        run: its folder.
        without_tokenizer, method, normalized_text: see `ExportSource`.

    Raises:
        CheckpointError: no valid checkpoint is there.
    """
    recipe, tokenizer = load_recipe(run / "run.toml", environ={}).recipe, None
    if recipe.model.task == "image_classification":
        model, checkpoint = _trained_model(run, recipe, detect_machine("cpu"), 0, rounded=False)
    else:
        opened = reopen(run, "cpu", rounded=False)
        recipe, tokenizer, model, checkpoint = opened.recipe, opened.tokenizer, opened.model, opened.checkpoint
    merge_lora(model)
    step, asked = read_meta(checkpoint)["parts"]["counters"]["step"], recipe.train.steps
    if step < asked:
        say(f"note: the run is at step {step} of {asked}; its newest checkpoint is exported", error=True)
    return ExportSource(run, recipe, tokenizer, model, checkpoint, without_tokenizer, method, normalized_text)


def open_to_compress(name: str, typed: Sequence[str] = ()) -> ExportSource:
    """Load a run or a model as `compress` takes it.

    Args:
        name: a run folder or its name below `runs`; else a folder of Hugging Face's layout, or a model of the hub.
        typed: settings of the stages, as on a command line: what of a run's recipe is other, or of the defaults.

    Raises:
        ConfigError: settings that are not right, or that would make another model.
        CheckpointError: weights that cannot be read, or a model that cannot be had.
        DataError: a tokenizer that cannot be read.
    """
    others = ("--model.", "--lora.", "--run.name", "--data.tokenizer")
    given = [text.partition("=")[0] for text in typed if text.startswith(others)]
    if given:
        raise ConfigError(
            "Settings would make another model or run",
            got=", ".join(given),
            need="settings of data, training and distillation: model and tokenizer are those that are compressed",
            try_=f"the same command without {', '.join(given)}",
            where=name,
        )
    if is_run(name):
        run = find_run(name)
        source = open_to_export(run)
        return replace(source, recipe=load_recipe(run / "run.toml", typed, environ={}).recipe) if typed else source
    check_named(name, "config.json")
    return _open_folder(name, typed)


def check_named(name: str, *files: str) -> None:
    """Check a name before a run is loaded: raise where one that is no run is no model either.

    Args:
        name: of a command line.
        files: of which a model's folder has one.

    Raises:
        ConfigError: neither a folder with such a file, nor a repository's name.
    """
    path = Path(name).expanduser()
    if not is_hub_name(name) and not any((path / file).is_file() for file in files):
        raise ConfigError(
            "No such run and no such model",
            got=name,
            need="a run folder or its name below runs, a folder with a config.json, or a model of the hub, org/name",
            try_="ls runs, or the path of a model's folder",
        )


def _open_folder(name: str, typed: Sequence[str]) -> ExportSource:
    found = find_model(name)
    folder, kind = found.folder, kind_of(str(found.folder))
    model = [f"--model.kind={kind}", f"--model.path={found.name}", "--model.weights=load", f"--optim.lr={FOLDER_LR}"]
    recipe = load_recipe(None, [*model, *typed], environ={}).recipe
    machine = detect_machine("cpu")
    torch.set_num_threads(recipe.run.threads or machine.physical_cores)
    tokenizer = load_tokenizer(folder_tokenizer(str(folder))).stopping_at(declared_stops(folder))
    kernels = Kernels.from_sections(machine, recipe.ops, recipe.memory)
    opened = build_model(recipe.model, tokenizer.vocab_size, kernels, machine.device)
    return ExportSource(folder, recipe, tokenizer, opened.eval(), folder)  # type: ignore[attr-defined]
