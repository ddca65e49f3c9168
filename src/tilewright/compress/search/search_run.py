"""A run whose layers are searched: library, scores, latency table, integer program, the best shapes trained on.

All is below `out`, and search.json is written after each replacement, score and stage: the same command continues
where it was stopped, and other limits use what was measured.
"""

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from tilewright.compress.budget.call_seconds import machine_clock
from tilewright.compress.budget.compress_record import Record, asked_of, record_of, write_record
from tilewright.compress.budget.held_out_rise import Batches, RowLosses, Say, row_losses_of
from tilewright.compress.budget.stage_runs import OpenRun, follow_moves
from tilewright.compress.export.export_source import ExportSource
from tilewright.compress.export.stored_codes import calibration
from tilewright.compress.export_run import check_finite
from tilewright.compress.search.choose_shapes import (
    ChosenShape,
    Option,
    best_shapes,
    nearest_shape,
    uniform_shapes,
    within,
)
from tilewright.compress.search.library.assemble_decoder import config_with
from tilewright.compress.search.library.layer_parts import PartPlace, places
from tilewright.compress.search.library.replacement_choices import OWN, PartChoice, choices_at, why_whole
from tilewright.compress.search.library.replacement_scores import (
    as_computed,
    mode_of,
    own_losses,
    score_choices,
    scored_rows,
)
from tilewright.compress.search.library.train_replacements import TrainedPart, key_of, train_library
from tilewright.compress.search.recipe_file import recipe_text
from tilewright.compress.search.search_seconds import WIDE, SearchWork, stage_seconds
from tilewright.compress.search.search_settings import IN_WORDS, LayerSearchSettings
from tilewright.compress.search.table.choice_costs import Costs, costs_of, measured_costs, rest_of
from tilewright.compress.search.table.latency import Latency, TimedCalls, model_calls
from tilewright.compress.search.table.latency_table import measure_table
from tilewright.compress.search.trained_shape import ShapeTrainer, shape_name
from tilewright.core.atomic_io import write_whole
from tilewright.core.errors import ConfigError, FitError
from tilewright.models.decoder.config import DecoderConfig
from tilewright.models.decoder.decoder import Decoder
from tilewright.training.components.recipe_data import held_out
from tilewright.training.components.teacher import weights_hash

FILE, RECIPE = "search.json", "search.toml"
STAGES = ("blocks", "shapes")
"""Folders of the library, and of what the best shapes begin with."""
_BLOCK_STEPS = 100
"""Of training for a replacement, at most, unless more are asked for."""
_TOLERANCE = 0.1
"""Of latencies: how far above a limit the measured one may be of a shape whose predicted one holds it."""
_FEW_PLACES = 8
"""Of so few parts shapes differ in one, of more in two."""


@dataclass
class LayerSearch:
    """One command.

    Args:
        source: the run or model, opened.
        settings: what is asked.
        out: folder of the library and the stages.
        open_run: opens the folder of a stage.
        say: told what happens, a line each.
    """

    source: ExportSource
    settings: LayerSearchSettings
    out: Path
    open_run: OpenRun
    say: Say

    def __post_init__(self) -> None:
        _check_source(self.source)
        check_finite(self.source)
        self.model: Any = self.source.model
        self.config: DecoderConfig = self.model.config
        self.batches: Batches = held_out(self.source.recipe, self.source.data).batches
        kinds, seq_len = self.settings.kinds, self.source.recipe.data.seq_len
        self.choices = {place: choices_at(self.config, place, kinds, seq_len) for place in places(self.config)}
        began = time.perf_counter()
        self.mode = mode_of(self.source.recipe)
        self.whole = row_losses_of(as_computed(self.model, self.mode), self.batches)
        self._evaluation_s = time.perf_counter() - began
        if not self.whole.domains:
            raise ConfigError(
                "No held-out text to score replacements on",
                got=f"data.holdout = {self.source.recipe.data.holdout:g}",
                need="held-out rows",
                try_="a run with data.holdout above 0",
                where=str(self.source.run),
            )
        self.settings = replace(self.settings, block_steps=self.block_steps)
        self.scored = scored_rows(self.batches, self.settings.score_rows)
        self.clock_name, self._clock = machine_clock()
        self.record = self._found_record()

    @property
    def steps(self) -> int:
        """Steps of a search of layers for which each of the best shapes is trained."""
        return self.settings.steps or self._quarter

    @property
    def block_steps(self) -> int:
        """Steps of a search of layers for which each replacement is trained."""
        asked = self.settings.block_steps
        return min(_BLOCK_STEPS, self._quarter) if asked is None else asked

    @property
    def _quarter(self) -> int:
        return max(1, self.source.recipe.train.steps // 4)

    def kept_whole(self) -> dict[str, str]:
        """Parts that a layer search keeps because no replacement with weights could be made for them, with the
        reason."""
        kinds = self.settings.kinds
        reasons = {place: why_whole(self.config, place, kinds, found) for place, found in self.choices.items()}
        return {str(place): reason for place, reason in reasons.items() if reason is not None}

    def seconds(self) -> dict[str, float]:
        """Estimated seconds of each stage of a whole search run."""
        recipe = self.source.recipe
        tokens, scored = (
            sum(batch["input_ids"].numel() for rows in batches.values() for batch in rows)
            for batches in (self.batches, self.scored)
        )
        length, step = recipe.data.seq_len, recipe.train.global_batch_size * recipe.data.seq_len
        wide = 1.0 if self.mode == "fp32" else WIDE
        work = SearchWork(self._evaluation_s / tokens, scored, tokens, step, length, wide)
        return stage_seconds(self.config, self.choices, self.settings, self.steps, work)

    def run(self) -> Record:
        """Run all stages of a search of layers; returns the record.

        Raises:
            FitError: no shape is within the limits, as predicted or, of those that were trained on, as measured.
        """
        for place, reason in self.kept_whole().items():
            self.say(f"{place} keeps its shape: {reason}")
        self.measure()
        shapes = self.solve()
        names = [self.train_shape(shape) for shape in shapes]
        best = self._best_uniform() if self.settings.uniform else None
        self.record["best_uniform"] = None if best is None else self.train_shape(best)
        rows = [self.record["candidates"][name] for name in names]
        holding = [row for row in rows if not self._over(row)]
        chosen = min(holding or rows, key=lambda row: row["rise"])
        self.record["tried"], self.record["chosen"] = names, chosen["name"]
        self.record["verdict"] = "within limits" if holding else "over limits"
        self._write_recipe(chosen)
        self._write()
        if not holding:
            raise FitError(
                "No shape that was trained is within the limits, as measured",
                got=f"{chosen['name']}: {'; '.join(self._over(chosen))}",
                need=f"latency at most {100 * _TOLERANCE:g} % above each limit",
                try_="a machine that runs nothing else, or smaller --limits",
                where="--limits",
            )
        return self.record

    def measure(self) -> None:
        """Measure for a search of layers: library, scores and latency table, what is not in the record yet."""
        rows, scores = self.record["library"], self.record["scores"]
        folder, whole = self.out / "blocks", own_losses(self.model, self.scored, self.mode)
        self._write()  # before the first file that it is of

        def trained(key: str, row: TrainedPart) -> None:
            rows[key] = row.to_json()
            scores.pop(key, None)
            self.say(
                f"{key}: {row.begun:.3f} of the run's part is missing, {row.fitted:.3f} with its last layer fitted, "
                f"{row.error:.3f} after training"
            )
            self._write()

        def scored(key: str, losses: RowLosses | None) -> None:
            rise, error = (None, None) if losses is None else losses.rise_over(whole)
            scores[key] = {"rise": rise, "error": error}
            shown = "is not finite; it is left out"
            if rise is not None and error is not None:
                shown = f"{100 * rise:+.2f} % +- {100 * error:.2f}"
            self.say(f"{key}: loss {shown}")
            self._write()

        train_library(
            self.model, calibration(self.source.recipe, self.source.data, self.settings.rows), self.choices, folder,
            steps=self.block_steps, seed=self.source.recipe.run.seed, report=trained,
            done=lambda key: key in rows and (folder / f"{key}.safetensors").is_file(),
        )  # fmt: skip
        score_choices(
            self.model, self.scored, self.choices, folder, mode=self.mode, done=scores.__contains__, report=scored
        )
        self._measure_latency()

    def solve(self) -> list[ChosenShape]:
        """Find the shapes of a layer search with the least predicted loss.

        Raises:
            FitError: none is within the limits; the nearest is named.
        """
        for name in ("nearest", "tried", "chosen", "verdict", "best_uniform"):  # of other limits
            self.record.pop(name, None)
        options, limits, rest = self.options(), self.limits(), self.rest()
        distance = 1 if len(self.choices) < _FEW_PLACES else 2
        shapes = best_shapes(options, rest, limits, self.settings.candidates, distance)
        self.record["shapes"] = [shape.to_json(rest) for shape in shapes]
        self.record["uniform"] = [shape.to_json(rest) for shape in uniform_shapes(options)]
        self.record["run_costs"] = dict(self.run_costs())
        if not shapes:
            raise self._no_shape(*nearest_shape(options, rest, limits))
        self._write()
        return shapes

    def options(self) -> list[Option]:
        """All choices of a search run with what they cost in loss and in running."""
        found = []
        for place, choice in self._all():
            row = {"rise": 0.0} if choice.name == OWN else self.record["scores"][key_of(place, choice)]
            if row["rise"] is not None:
                found.append(Option(place, choice.name, row["rise"], self._costs(place, choice)))
        return found

    def rest(self) -> Costs:
        """Costs of the searched run beside its parts."""
        own = {place: self._costs(place, found[0]) for place, found in self.choices.items()}
        return rest_of(self.run_costs(), own)

    def run_costs(self) -> Costs:
        """Costs of the searched run as it is."""
        row = self.record["latency"]["run"]
        return measured_costs(self.model, Latency.from_json(row), row["cache"], self.settings.context)

    def limits(self) -> dict[str, float]:
        """The limits of a search run in the measures' own units."""
        own = self.run_costs()
        return {name: share * own[name] for name, share in self.settings.limits.items()}

    def _costs(self, place: PartPlace, choice: PartChoice) -> Costs:
        return costs_of(self.config, place, choice, self.record["latency"]["parts"], self.settings.context)

    def _all(self) -> Iterator[tuple[PartPlace, PartChoice]]:
        for place, found in self.choices.items():
            for choice in found:
                yield place, choice

    def _measure_latency(self) -> None:
        """Measure the latency table of a search run: the run, then each distinct shape of a part. What was unsteady is
        measured again, until a shape was chosen by it and trained."""
        found = self.record["latency"]
        if found.get("clock", self.clock_name) != self.clock_name:
            found.clear()  # other threads
        found["clock"] = self.clock_name
        if "run" not in found:  # all others are timed in turns with it
            latency = self._said("the run", self._run_calls.latency(self._clock))
            found["run"] = latency.to_json() | {"cache": self._run_calls.cache}
            self._write()

        def report(key: str, latency: Latency) -> None:
            self._said(key, latency)
            self._write()

        measure_table(
            self.config, self.model.kernels, self.choices, found.setdefault("parts", {}),
            stack_bytes=sum(param.numel() * param.element_size() for param in self.model.blocks.parameters()),
            context=self.settings.context, timed=self.timed, is_known=self._is_known, report=report,
        )  # fmt: skip

    @cached_property
    def _run_calls(self) -> TimedCalls:
        return model_calls(self.model, self.settings.context)

    def timed(self, calls: TimedCalls) -> Latency:
        """Latency of calls in a search of layers, in turns with those of the run."""
        return calls.latency_beside(self._run_calls, Latency.from_json(self.record["latency"]["run"]), self._clock)

    def _is_known(self, row: Mapping[str, Any] | None) -> bool:
        return row is not None and (bool(self.record["candidates"]) or Latency.from_json(row).steady)

    def _said(self, name: str, latency: Latency) -> Latency:
        spread = max(latency.prefill.spread, latency.token.spread)
        doubt = "" if latency.steady else f", unsteady: within {100 * spread:.0f} %"
        self.say(
            f"{name}: {1e3 * latency.token.least:.3f} ms per cached token, {1e3 * latency.prefill.least:.2f} ms "
            f"prefill of {self.settings.context}{doubt}"
        )
        return latency

    def _best_uniform(self) -> ChosenShape | None:
        """The uniform shape of least predicted loss within the limits of a layer search; None if there is none."""
        rest, limits = self.rest(), self.limits()
        found = [shape for shape in uniform_shapes(self.options()) if within(shape, rest, limits)]
        return min(found, key=lambda shape: shape.rise, default=None)

    def train_shape(self, shape: ChosenShape) -> str:
        """Train a shape of a search run with the run as its teacher: the name of its row in the record."""
        rows, rest = self.record["candidates"], self.rest()
        name = shape_name(shape, self.steps)
        if name not in rows:
            trainer = ShapeTrainer(
                self.source, self.out, self.open_run, self.batches, self.whole, self.steps, self.mode
            )
            chosen = self.choices_named({str(option.place): option.name for option in shape.options})
            row, made = trainer.train(name, chosen)
            calls = model_calls(made, self.settings.context)
            latency = self._said(name, self.timed(calls))
            costs = dict(measured_costs(made, latency, calls.cache, self.settings.context))
            rows[name] = {**shape.to_json(rest), "predicted": shape.to_json(rest), **row}
            rows[name] |= {"costs": costs, "steady": latency.steady}
            before, after = (f"{100 * row[key]:+.2f} %" for key in ("rise_before", "rise"))
            self.say(f"{name}: loss {before} as put together, {after} after {self.steps} steps")
            self._write()
        return name

    def choices_named(self, names: Mapping[str, str]) -> dict[PartPlace, PartChoice]:
        """Choices of a search run by their names, by place."""
        return {
            place: next(choice for choice in found if choice.name == names[str(place)])
            for place, found in self.choices.items()
        }

    def _over(self, row: Record) -> list[str]:
        """Limits of a search run that a shape does not hold as measured, in words."""
        found = []
        for name, limit in self.limits().items():
            allowed = 1 + _TOLERANCE if name in ("token", "prefill") else 1 + 1e-9
            if row["costs"][name] > limit * allowed:
                share = self.settings.limits[name] * row["costs"][name] / limit
                found.append(f"{IN_WORDS[name]} {100 * share:.1f} % of the run's")
        return found

    def _no_shape(self, nearest: ChosenShape, shares: Mapping[str, float]) -> FitError:
        self.record["nearest"] = nearest.to_json(self.rest())
        self._write()
        asked = self.settings.limits
        has = ", ".join(f"{IN_WORDS[name]} {100 * share * asked[name]:.1f} %" for name, share in shares.items())
        return FitError(
            "No shape is within the limits",
            got=f"the nearest has {has} of the run's, at {100 * nearest.rise:+.2f} % loss before it is trained",
            need=", ".join(f"{IN_WORDS[name]} {100 * share:g} %" for name, share in asked.items()),
            try_="larger --limits, or more --kinds",
            where="--limits",
        )

    def _write_recipe(self, row: Record) -> None:
        config, own = config_with(self.config, self.choices_named(row["choices"])), self.run_costs()
        measured = (f"{IN_WORDS[name]} {100 * row['costs'][name] / own[name]:.1f} %" for name in own if own[name])
        run = self.source.run.resolve().name
        intro = [
            f"The shape that `tilewright search` found for {run}, to be trained from scratch.",
            f"Of the run's: {', '.join(measured)};",
            f"loss {100 * row['rise']:+.2f} % where it was trained on from the run's weights.",
        ]
        write_whole(self.out / RECIPE, recipe_text(self.source.recipe, config, intro))

    def _write(self) -> None:
        write_record(self.out, self.record, FILE)

    def _found_record(self) -> Record:
        """The record of an earlier search command with the same checkpoint and data; else a new one.

        Raises:
            ConfigError: the folder has a search of something else.
        """
        asked = asked_of(self.source, weights_hash(self.model)) | {"measured": self.settings.measured()}
        need = "the same run or model, data, settings, --rows, --block-steps, --score-rows and --context"
        before = record_of(self.out, FILE, asked, STAGES, what="another search", need=need)
        if before is not None:
            follow_moves(self.source, self.out, before)
        empty: Record = {name: {} for name in ("library", "scores", "latency", "candidates")}
        new = asked | {"loss": self.whole.loss, "domains": self.whole.by_domain()} | empty
        return (before or new) | {"settings": self.settings.to_json(), "kept_whole": self.kept_whole()}


def _check_source(source: ExportSource) -> None:
    recipe, model = source.recipe, source.model
    searched = isinstance(model, Decoder) and model.architecture == "decoder"
    if searched and not recipe.lora.rank and recipe.data.format != "preferences":
        return
    kind = getattr(recipe.model.kind, "name", recipe.model.kind)
    raise ConfigError(
        "Layers of this model are not searched",
        got=f'model.kind = "{kind}", lora.rank = {recipe.lora.rank}, data.format = "{recipe.data.format}"',
        need="tilewright's own decoder without adapters, on text or conversations: it alone has layers of own shapes",
        try_='a run with model.kind = "decoder", or a folder of Llama, Mistral or DeepSeek-V3 layout',
        where=str(source.run),
    )
