"""The stages that benchmarks of pruning share: a small teacher, its cuts, and runs from them; each kept when it ends.

All is below one folder: a run that was stopped continues where it stood, and a case that has ended is read.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from benchmarks.kept_rows import KeptCases
from tilewright.cli.load_run import open_to_export
from tilewright.compress.budget.budget_rise import rises_of
from tilewright.compress.budget.held_out_rise import Batches, RowLosses, row_losses_of
from tilewright.compress.budget.stage_runs import from_scratch, run_stage, stage_recipe, write_model
from tilewright.compress.export.export_source import ExportSource
from tilewright.compress.export.stored_codes import calibration
from tilewright.core.config.change_recipe import changed
from tilewright.core.config.load import load_recipe
from tilewright.core.config.recipe import Recipe
from tilewright.training.components.recipe_data import held_out
from tilewright.training.session import train

SHAPE = {
    "model.dim": 128, "model.num_layers": 4, "model.num_heads": 4, "model.ffn_dim": 512, "data.vocab_size": 2048,
    "data.max_bytes": 6_000_000, "data.seq_len": 128, "train.global_batch_size": 8, "train.micro_batch_size": 8,
    "train.compile": "off", "train.eval_interval": 0, "train.eval_batches": 12, "train.sample_tokens": 0,
    "precision.mode": "fp32", "optim.lr": 3e-3, "log.report": False, "energy.idle_seconds": 0, "run.threads": 1,
    "checkpoint.interval": 20,
}  # fmt: skip
"""A decoder of 1.3M parameters on installed text."""
CALIBRATION = 8
"""Micro-batches of training text that importance sees."""


class Study:
    """A teacher, and what is made of it.

    Args:
        folder: of this study.
        steps: of each stage after the teacher.
        run: the teacher.
    """

    def __init__(self, folder: Path, steps: int, run: Path) -> None:
        self.folder, self.steps = folder, steps
        folder.mkdir(parents=True, exist_ok=True)
        self.source: ExportSource = open_to_export(run)
        self.batches: Batches = held_out(self.source.recipe, self.source.data).batches
        self.whole: RowLosses = row_losses_of(self.source.model, self.batches)

    @classmethod
    def of_settings(cls, folder: Path, steps: int, settings: Mapping[str, Any]) -> "Study":
        """Of a teacher that is trained first, with these settings."""
        settings = {**settings, "run.dir": folder, "run.name": "teacher"}
        done = train(load_recipe(None, {name: str(value) for name, value in settings.items()}, environ={}))
        assert done.run_dir is not None
        return cls(folder, steps, done.run_dir)

    @classmethod
    def of_text(cls, work: Path, seed: int, teacher_steps: int, steps: int) -> "Study":
        """Of a small decoder.

        Args:
            work: folder of all seeds.
            seed: of the teacher.
            teacher_steps: that it is trained.
            steps: of each stage after it.
        """
        settings = {**SHAPE, "run.seed": seed, "train.steps": teacher_steps}
        return cls.of_settings(work / f"seed-{seed}", steps, settings)

    @cached_property
    def seen(self) -> Sequence[Any]:
        """Training text, for importance."""
        return calibration(self.source.recipe, self.source.data)[:CALIBRATION]

    @cached_property
    def equal(self) -> RowLosses:
        """Losses of the teacher with as many more steps."""
        return self.trained("control", self.source.model, taught=False)

    def facts(self) -> dict[str, Any]:
        """Of the teacher."""
        rows = sum(len(counts) for _, counts in self.whole.domains.values())
        return {"loss": self.whole.loss, "rows": rows, "as many more steps": rises_of(self.equal, self.whole, None)}

    def trained(self, name: str, model: Any, *, taught: bool, cached: bool = True, hidden: bool = False) -> RowLosses:
        """Losses of a model after a stage.

        Args:
            name: of the stage.
            model: that it begins with.
            taught: learns from the teacher too.
            cached: from 32 of its tokens on disk; else from all of them, which it computes again.
            hidden: each layer learns what the same layer of the teacher gives out, too. Not with `cached`.
        """
        recipe = self._recipe(name, model, taught)
        if not cached:
            recipe = changed(recipe, {"distill.cache": ""})
        if hidden:
            recipe = changed(recipe, {"distill.hidden": {str(layer): layer for layer in range(len(model.layers))}})
        return self._losses(run_stage(recipe, self.source))

    def from_random(self, name: str, model: Any) -> RowLosses:
        """Losses of a model's shape from random weights, after as many steps as the teacher and a stage took."""
        steps = self.source.recipe.train.steps + self.steps
        return self._losses(run_stage(from_scratch(self._recipe(name, model, False), name, steps), self.source))

    def _recipe(self, name: str, model: Any, taught: bool) -> Recipe:
        folder = self.folder / "models" / name
        write_model(self.source, model, folder)
        recipe = stage_recipe(self.source, name, self.folder, folder=folder, taught=taught, steps=self.steps)
        return changed(recipe, {"train.eval_batches": 1})  # all rows are measured when it has ended

    def _losses(self, run: Path) -> RowLosses:
        return row_losses_of(open_to_export(run).model, self.batches)

    def rises(self, losses: RowLosses) -> dict[str, float | None]:
        """Of a model, over the teacher and over the teacher with as many more steps."""
        return rises_of(losses, self.whole, self.equal)

    def case(self, name: str, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """What was measured under this name, in this command or one before it."""
        return KeptCases(self.folder / "cases.json").of(name, measure)
