"""Where the teacher of `[distill]` is, what model it is, and whether a run needs it, from files alone."""

import json
import os
from dataclasses import dataclass
from pathlib import Path

import xxhash

from tilewright.core.config.load import load_recipe
from tilewright.core.config.recipe import LoraSection, Recipe
from tilewright.core.config.sections.model import ModelSection
from tilewright.core.errors import ConfigError
from tilewright.models.base.protocols import Model
from tilewright.models.build import build_model, kind_of
from tilewright.models.decoder.config import DecoderConfig
from tilewright.models.folder.find_model import teacher_at


@dataclass(frozen=True)
class TeacherFolder:
    """A run, or the folder of a Hugging Face model."""

    path: Path
    run: Recipe | None
    """Of a run; its weights are those of the newest checkpoint."""

    @property
    def model(self) -> ModelSection:
        """The teacher's model to build."""
        if self.run is not None:
            return self.run.model
        return ModelSection(kind=kind_of(str(self.path)), path=str(self.path), weights="load")  # type: ignore[arg-type]

    @property
    def lora(self) -> LoraSection:
        """The adapters (LoRA) of the teacher."""
        return LoraSection() if self.run is None else self.run.lora

    def on_meta(self) -> Model:
        """The teacher without its weights, on meta, and with one token."""
        return build_model(self.model.model_copy(update={"weights": "random"}), 1, device="meta")


def stream_width(model: Model) -> int:
    """The width of a teacher's stream between layers; the head of a language model may read fewer numbers (as OPT's
    does)."""
    config = model.config
    return config.dim if isinstance(config, DecoderConfig) else config.get_text_config().hidden_size


def find_teacher(name: str) -> TeacherFolder:
    """Find the teacher of that name.

    Args:
        name: a run folder or its name below `runs`, or a folder with a config.json.

    Raises:
        ConfigError: there is none, or it is no causal language model.
    """
    found = teacher_at(name)
    if not (found / "run.toml").is_file():
        return TeacherFolder(found, None)
    recipe = load_recipe(found / "run.toml", environ={}).recipe
    if recipe.model.task != "causal_lm":
        raise ConfigError(
            "Teacher is no causal language model",
            got=f'model.task = "{recipe.model.task}" in {found}',
            need='model.task = "causal_lm"',
            try_="another run",
            where="distill.teacher",
        )
    return TeacherFolder(found, recipe)


READ = "read.json"
"""In the folder of `distill.cache`: steps of a stream of rows that are all there, by the stream."""


def stream_of(recipe: Recipe) -> str:
    """Hash all settings that a recipe's rows and their order follow from: the stream that a teacher's rows are kept by;
    "" if they depend on the run itself."""
    if recipe.data.mixing.policy not in ("off", "static"):
        return ""
    data = recipe.data.model_dump_json(exclude={"cache_dir"})
    rest = (recipe.run.seed, recipe.train.global_batch_size, recipe.data.tokenizer or recipe.model.path)
    return xxhash.xxh3_64_hexdigest(f"{data} {rest} {recipe.distill.teacher}".encode())


def all_rows_are_kept(recipe: Recipe) -> bool:
    """True if the teacher's rows are all kept: `distill.cache` has each row of the recipe's steps: a run on the same
    stream read as many."""
    section, steps = recipe.distill, recipe.train.steps
    if not section.cache or not steps:
        return False
    return _streams(Path(section.cache).expanduser()).get(stream_of(recipe), 0) >= steps


def note_rows(folder: Path, stream: str, steps: int) -> None:
    """Record that a folder has a teacher's rows of so many steps of a stream.

    Raises:
        OSError: it cannot be written.
    """
    before = _streams(folder)
    if stream and before.get(stream, 0) < steps:
        own = folder / f"{READ}.{os.getpid()}"  # ranks write the same
        own.write_text(json.dumps(before | {stream: steps}) + "\n", encoding="utf-8")
        own.replace(folder / READ)


def _streams(folder: Path) -> dict[str, int]:
    """Count the steps of a teacher's kept rows by stream; none if the file is missing or damaged."""
    try:
        found = json.loads((folder / READ).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    rows = found.items() if isinstance(found, dict) else ()
    return {name: steps for name, steps in rows if isinstance(steps, int)}
