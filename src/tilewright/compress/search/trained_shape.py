"""A shape put together from the library and trained on with the run as its teacher: a run folder of its own."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import xxhash

from tilewright.compress.budget.compress_record import Record
from tilewright.compress.budget.held_out_rise import Batches, RowLosses, row_losses_of
from tilewright.compress.budget.stage_runs import OpenRun, run_stage, stage_recipe, write_model
from tilewright.compress.export.export_source import ExportSource
from tilewright.compress.search.choose_shapes import ChosenShape
from tilewright.compress.search.library.assemble_decoder import assembled
from tilewright.compress.search.library.layer_parts import PartPlace
from tilewright.compress.search.library.replacement_choices import PartChoice
from tilewright.compress.search.library.replacement_scores import as_computed
from tilewright.core.config.change_recipe import changed
from tilewright.models.decoder.hf_weights import save_decoder

_BRIEF = {"train.compile": "off", "train.eval_batches": 1}
"""Settings of the training of a shape: layers of many shapes take longer to compile than a few steps of them, and what
is held out is evaluated here, row by row."""


def shape_name(shape: ChosenShape, steps: int) -> str:
    """Name the stage that trains a shape, after the choices and the number of steps.

    Example:
        >>> shape_name(ChosenShape(()), 10)
        'shape-37ab56'
    """
    return f"shape-{xxhash.xxh3_64_hexdigest(repr((shape.names, steps)).encode())[:6]}"


@dataclass(frozen=True)
class ShapeTrainer:
    """Trains shapes of one search.

    Args:
        source: the run.
        out: folder of the search.
        open_run: opens the folder of a stage.
        batches: held-out rows by domain.
        whole: the run's losses of these.
        steps: of training.
        mode: of precision, that losses are computed in.
    """

    source: ExportSource
    out: Path
    open_run: OpenRun
    batches: Batches
    whole: RowLosses
    steps: int
    mode: str

    def train(self, name: str, chosen: Mapping[PartPlace, PartChoice]) -> tuple[Record, Any]:
        """Train a shape from the library: its row, and the decoder as it was put together.

        Args:
            name: of its stage and its folder.
            chosen: at each place.

        Raises:
            CheckpointError: the stage was stopped before its end, or a folder cannot be written.
        """
        source, folder = self.source, self.out / "shapes" / name
        made = assembled(source.model, chosen, self.out / "blocks")
        before, _ = row_losses_of(as_computed(made, self.mode), self.batches).rise_over(self.whole)
        write_model(source, made, folder, partial(save_decoder, made, extra=source.config_keys, own_layout=True))
        recipe = stage_recipe(source, name, self.out, folder=folder, taught=True, steps=self.steps)
        run = run_stage(changed(recipe, _BRIEF), source)
        losses = row_losses_of(as_computed(self.open_run(run).as_trained, self.mode), self.batches)
        rise, error = losses.rise_over(self.whole)
        row: Record = {"name": name, "run": run.name, "layers": made.config.num_layers, "steps": self.steps}
        row |= {"rise_before": before, "rise": rise, "error": error, "domains": losses.by_domain()}
        return row, made
