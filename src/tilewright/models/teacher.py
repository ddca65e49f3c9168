"""Where the teacher of `[distill]` is and what model it is, from its configuration alone."""

from dataclasses import dataclass
from pathlib import Path

from tilewright.core.config.load import load_recipe
from tilewright.core.config.recipe import LoraSection, Recipe
from tilewright.core.config.sections.model import ModelSection
from tilewright.core.errors import ConfigError
from tilewright.models.build import kind_of


@dataclass(frozen=True)
class TeacherFolder:
    """A run, or the folder of a Hugging Face model."""

    path: Path
    run: Recipe | None
    """Of a run; its weights are those of the newest checkpoint."""

    @property
    def model(self) -> ModelSection:
        """What to build."""
        if self.run is not None:
            return self.run.model
        return ModelSection(kind=kind_of(str(self.path)), path=str(self.path), weights="load")  # type: ignore[arg-type]

    @property
    def lora(self) -> LoraSection:
        """Its adapters."""
        return LoraSection() if self.run is None else self.run.lora


def find_teacher(name: str) -> TeacherFolder:
    """The teacher of that name.

    Args:
        name: a run folder or its name below `runs`, or a folder with a config.json.

    Raises:
        ConfigError: there is none, or it is no causal language model.
    """
    path = Path(name).expanduser()
    run = next((place for place in (path, Path("runs") / name) if (place / "run.toml").is_file()), None)
    if run is None:
        if (path / "config.json").is_file():
            return TeacherFolder(path, None)
        raise ConfigError(
            "No such teacher",
            got=name,
            need="a run folder or its name below runs, or a folder with a config.json",
            try_='distill.teacher = "runs/latest"',
            where="distill.teacher",
        )
    recipe = load_recipe(run / "run.toml", environ={}).recipe
    if recipe.model.task != "causal_lm":
        raise ConfigError(
            "Teacher is no causal language model",
            got=f'model.task = "{recipe.model.task}" in {run}',
            need='model.task = "causal_lm"',
            try_="another run",
            where="distill.teacher",
        )
    return TeacherFolder(run, recipe)
