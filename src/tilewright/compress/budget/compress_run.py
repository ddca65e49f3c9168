"""A run made small inside a loss budget: sensitivities, cuts, recovery, controls, exports, verdict.

Each stage is a run folder of its own below `out`, and compress.json is written after each: the same command continues
where it was stopped. First the run is trained as many steps further, which is the control that the budget is over too
(`budget_rise`). Cuts are recovered and compared with the budget by halves: after one that is inside a larger one, else
a smaller one. What the artefacts round away counts too; where that is too much, the recovered run is trained for the
integers. A cut whose numbers are not finite, before or after recovery, is left out.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

from tilewright.compress.budget.artefacts import judged, missed, still_stand, unproven
from tilewright.compress.budget.budget_rise import in_words, rises_of, ruling
from tilewright.compress.budget.compress_record import FILE, Record, asked_of, record_of, write_record
from tilewright.compress.budget.compress_settings import CompressSettings
from tilewright.compress.budget.cut_candidates import CutPlan, by_halves, cut_plans
from tilewright.compress.budget.held_out_rise import Batches, RowLosses, Say, parameters, row_losses_of, seconds_beside
from tilewright.compress.budget.not_finite import stage_named, unless_not_finite
from tilewright.compress.budget.sensitivity import CutCost, sensitivities
from tilewright.compress.budget.stage_runs import (
    OpenRun,
    check_source,
    follow_moves,
    from_scratch,
    rows_are_kept,
    run_stage,
    stage_recipe,
    trained_steps,
    write_model,
)
from tilewright.compress.budget.stage_seconds import EXPORTS, MEASURING, pace_of, predicted_seconds, timed
from tilewright.compress.export.export_source import ExportSource
from tilewright.compress.export.stored_codes import calibration
from tilewright.compress.export.target import Target
from tilewright.compress.export_run import UNROUNDED, check_finite, export_run
from tilewright.compress.prove.consumer_process import ConsumerLimits
from tilewright.compress.prune.prune import prune
from tilewright.compress.prune.tensors_of_units import parameters_left
from tilewright.core.errors import ConfigError, FitError, NumericsError
from tilewright.training.components.recipe_data import held_out
from tilewright.training.components.teacher import weights_hash


@dataclass
class Compression:
    """One command.

    Args:
        source: the run or model, opened.
        settings: what is asked.
        out: folder of the stages.
        open_run: opens the folder of a stage.
        limits: of the runtimes that artefacts are proven in; None: of this machine.
        say: told what happens, a line each.
    """

    source: ExportSource
    settings: CompressSettings
    out: Path
    open_run: OpenRun
    say: Say
    limits: ConsumerLimits | None = None

    def __post_init__(self) -> None:
        check_source(self.source, self.settings.kinds)
        check_finite(self.source)
        self.source.model.check_save_hf(torch.bfloat16)
        self.model: Any = self.source.model
        self.batches: Batches = held_out(self.source.recipe, self.source.data).batches
        self.stored = row_losses_of(self.model, self.batches)
        """Of the weights as they are stored, with which cuts are compared before recovery."""
        is_rounded = self.source.as_trained is not self.model
        self.whole = row_losses_of(self.source.as_trained, self.batches) if is_rounded else self.stored
        if not self.whole.domains:
            raise ConfigError(
                "No held-out rows to measure the budget on",
                got=f"data.holdout = {self.source.recipe.data.holdout:g}",
                need="held-out text, or images",
                try_="a run with data.holdout above 0",
                where=str(self.source.run),
            )
        self.taught = not self.source.reads_images  # `[distill]` teaches language models alone
        for name, reason in unproven(self.settings.targets, self.source).items():
            self.say(f"{name} cannot be inside the budget: {reason}")
        self.record = self._found_record()

    def plan(self) -> list[CutPlan]:
        """Plan a compression: sensitivities and the cuts to try. They are measured once, then read from the record.

        Raises:
            ConfigError: nothing of the model can be cut.
            FitError: no cut is within the widest limit before recovery.
            NumericsError: no cut has finite losses.
        """
        if "sensitivity" not in self.record:
            with timed(self.record, MEASURING):
                found = sensitivities(
                    self.model, self.stored, self.batches, self.settings.kinds, self.settings.importance,
                    self._training_batches(), self.say, self.record, refit=self.settings.refit,
                )  # fmt: skip
            self.record["sensitivity"] = [cost.to_json() for cost in found]
        if "seconds" not in self.record:
            self.record["seconds"] = seconds_beside(self.model, self.model)[1]
        costs = [CutCost.of_json(row) for row in self.record["sensitivity"]]
        if not costs and "left_out" in self.record:
            raise self._not_finite()
        plans = cut_plans(costs, self.settings.budget, self.settings.goal)
        if not plans:
            least = min(costs, key=lambda cost: cost.rise, default=None)
            raise FitError(
                "No cut is near the loss budget",
                got="nothing to cut"
                if least is None
                else f"{least.kind} -> {least.units} alone costs {100 * least.rise:.2f} %",
                need=f"a cut that recovery could bring to {100 * self.settings.budget:g} %",
                try_="a larger --budget, or tilewright export, which quantises without cutting",
                where="--budget",
            )
        left = lambda plan: parameters_left(self.model, {cut.kind: cut.units for cut in plan.cuts})  # noqa: E731
        self.record["plans"] = [plan.to_json() | {"parameters": left(plan)} for plan in plans]
        self._predict_seconds(plans, len(costs))
        write_record(self.out, self.record)
        return plans

    def _predict_seconds(self, plans: Sequence[CutPlan], cuts: int) -> None:
        """Predict the seconds of a compression's stages, once: into the record."""
        times = self.record.setdefault("time", {})
        if "predicted" in times:
            return
        pace = pace_of(self.source, self._training_batches()[0])
        began = time.perf_counter()
        row_losses_of(self.model, self.batches)  # the first time, when a model was opened, may have prepared kernels
        held_out_s = time.perf_counter() - began
        times["step"] = {"seconds": pace.step_s, "how": pace.how}
        times["predicted"] = predicted_seconds(
            plans, self.settings, pace,
            cut_s=times.get("measured", {}).get(MEASURING, 0.0) / max(cuts, 1),
            held_out_s=held_out_s,
            run_steps=trained_steps(self.source),
            taught=self.taught,
            reads_kept=rows_are_kept(self.source.recipe),
        )  # fmt: skip

    def run(self) -> Record:
        """Run all stages of a compression; returns the record.

        Raises:
            FitError: no cut that was tried, or no artefact of the one that was kept, is inside the budget. The record
                has the best.
            NumericsError: losses of all cuts that were tried, or of the run with more steps, are not finite.
        """
        plans = self.plan()
        if self.settings.controls != "none":
            with timed(self.record, "control-teacher"):
                self._control("teacher")
            write_record(self.out, self.record)
        chosen, rows = by_halves(plans, self.settings.tries, self._inside), self.record["recovered"]
        if not rows:
            raise self._not_finite()
        best = min(rows.values(), key=ruling) if chosen is None else rows[chosen.name]
        self.record["chosen"] = best["name"]
        self._controls(best)
        if chosen is None:
            self.record["verdict"] = "over budget"
            write_record(self.out, self.record)
            raise self._over(f"{best['name']} after recovery: {in_words(best)}", plans)
        self._export(best)
        inside = [row["target"] for row in self.record["artefacts"] if row["inside"]]
        self.record["verdict"] = "inside budget" if inside else "over budget"
        write_record(self.out, self.record)
        if not inside:
            raise self._over("; ".join(f"{row['target']}: {row['reason']}" for row in self.record["artefacts"]), plans)
        return self.record

    def _inside(self, plan: CutPlan) -> bool:
        """True if a cut of the compression is inside the budget after recovery."""
        with timed(self.record, f"recovered-{plan.name}"):
            row = unless_not_finite(self.record, plan.name, self.say, partial(self._recovered, plan))
        write_record(self.out, self.record)
        if row is None:
            return False
        rise = ruling(row)
        if rise > self.settings.budget:
            self.say(f"{plan.name}: {100 * rise:+.2f} % is above the budget")
        return rise <= self.settings.budget

    def _recovered(self, plan: CutPlan) -> Record:
        """The row of a cut of the compression and its recovery."""
        rows = self.record.setdefault("recovered", {})
        if plan.name in rows:
            return rows[plan.name]
        folder = self.out / "cut" / plan.name
        with stage_named(f"{plan.name}, before recovery"):
            made = prune(
                self.model, {cut.kind: cut.share for cut in plan.cuts}, importance=self.settings.importance,
                batches=self._training_batches(), refit=self.settings.refit,
            )  # fmt: skip
            before = row_losses_of(made.model, self.batches)
        for kind in (kind for kind, fitted in made.fitted.items() if not fitted):
            self.say(f"{plan.name}: layers behind {kind} are not fitted, which would cost more than it brings")
        write_model(self.source, made.model, folder)
        seconds, whole_s = seconds_beside(made.model, self.model)
        self.say(f"{plan.name}: {100 * before.rise_over(self.stored)[0]:+.2f} % before recovery")
        run = self._stage(f"recovered-{plan.name}", folder, taught=self.taught)
        after = self._losses(run)
        rows[plan.name] = {
            "name": plan.name,
            "folder": str(folder.relative_to(self.out)),
            "run": run.name,
            "kept": {
                kind: {str(list(p)): units.tolist() for p, units in kept.items()} for kind, kept in made.kept.items()
            },
            "units": {kind: [made.before[kind], made.after[kind]] for kind in made.before},
            "fitted": made.fitted,
            "parameters": parameters(made.model),
            "speed": seconds / whole_s,
            "predicted_speed": plan.speed,
            "seconds": {"predicted": plan.speed * self.record["seconds"], "measured": seconds},
            "rise_before": before.rise_over(self.stored)[0],
            **self._rises(after),
            "domains": after.by_domain(),
        }
        self.say(f"{plan.name}: {in_words(rows[plan.name])}, after {self.settings.steps} steps of recovery")
        write_record(self.out, self.record)
        return rows[plan.name]

    def _controls(self, best: Mapping[str, Any]) -> None:
        """Rows of the controls of a compression: other uses of the training steps that the best cut got."""
        names = ("alone", "scratch") if self.taught else ("scratch",)  # recovery without a teacher is the same stage
        for name in names if self.settings.controls == "all" else ():
            key = f"{name}-{best['name']}"
            with timed(self.record, f"control-{name}"):
                unless_not_finite(self.record, key, self.say, partial(self._control, name, best))
            write_record(self.out, self.record)

    def _control(self, name: str, best: Mapping[str, Any] | None = None) -> None:
        """Train and measure one control of a compression, unless its row is there: of the run itself, or of a cut."""
        rows = self.record.setdefault("controls", {})
        key = name if best is None else f"{name}-{best['name']}"
        if key in rows:
            return
        run = self._train_control(name, key, self.out / ("cut/whole" if best is None else best["folder"]))
        losses = self._losses(run)
        rows[key] = {"run": run.name, **self._rises(losses, equal=best is not None), "domains": losses.by_domain()}
        self.say(f"control {key}: {in_words(rows[key])}")
        write_record(self.out, self.record)

    def _train_control(self, name: str, key: str, folder: Path) -> Path:
        if name == "teacher":
            write_model(self.source, self.model, folder)
        if name != "scratch":
            return self._stage(f"control-{key}", folder, taught=False)
        recipe = stage_recipe(self.source, key, self.out, folder=folder, taught=False, steps=1)
        steps = trained_steps(self.source) + self.settings.steps
        return run_stage(from_scratch(recipe, f"control-{key}", steps), self.source)

    def _rises(self, losses: RowLosses, *, equal: bool = True) -> dict[str, float | None]:
        return rises_of(losses, self.whole, self._equal if equal else None)

    @cached_property
    def _equal(self) -> RowLosses | None:
        """Losses of a compression's control, the run with as many more steps; None without controls."""
        if self.settings.controls == "none":
            return None
        return self._losses(self.out / self.record["controls"]["teacher"]["run"])

    def _export(self, best: Record) -> None:
        """A compression's artefacts of the recovered run; where rounding leaves the budget, of it trained for that."""
        targets = self.settings.targets
        with timed(self.record, EXPORTS):
            rows = self._artefacts(best, targets)
        for integers, outside in missed(rows, targets).items():
            name = f"{integers}-{best['name']}"
            with timed(self.record, f"trained-{integers}"):
                made = unless_not_finite(self.record, name, self.say, partial(self._trained, best, integers))
            if made is not None:
                with timed(self.record, f"{EXPORTS}-{integers}"):
                    self._artefacts(made, outside)

    def _artefacts(self, made: Record, targets: Sequence[Target]) -> list[Record]:
        """A compression's artefacts of a run, each with its loss; those proven earlier are not made again if nothing
        has changed."""
        rows = self.record.setdefault("artefacts", [])
        own, run = [row for row in rows if row["of"] == made["run"]], self.out / made["run"]
        if still_stand(own, targets, self.source, run):
            return own
        source = self.open_run(run)
        record = export_run(source, targets, self.out / "artefacts", limits=self.limits)
        names = {target.name for target in targets}
        budget, counts, points = self.settings.budget, self.whole.counts(), self.whole.points
        stored = made
        if source.as_trained is not source.model:
            stored = self._rises(row_losses_of(source.model, self.batches))
        found = [
            row
            | {"of": made["run"], "integers": made.get("integers", "")}
            | judged(row, stored if row.get("compared_with") == UNROUNDED else made, budget, counts, points=points)
            for row in record["artefacts"]
            if row["target"] in names
        ]
        if not made.get("integers"):
            self.record["baselines"] = record["baselines"]
            self.record["fp32_bytes"] = {"whole": 4 * parameters(self.model), "cut": record["fp32_bytes"]}
        self.record["artefacts"] = [row for row in rows if row["of"] != made["run"]] + found
        write_record(self.out, self.record)
        return found

    def _trained(self, best: Record, integers: str) -> Record:
        """A compression's row of the recovered run, trained further under the run while weights are rounded."""
        rows = self.record.setdefault("trained", {})
        name = f"{integers}-{best['name']}"
        if name in rows:
            return rows[name]
        self.say(f"{best['name']}: rounding is above the budget; trained for {integers}")
        folder = self.out / "cut" / f"{best['name']}-recovered"
        write_model(self.source, self.open_run(self.out / best["run"]).model, folder)
        run = self._stage(name, folder, taught=self.taught, integers=integers)
        losses = self._losses(run)
        rows[name] = {"run": run.name, "integers": integers, **self._rises(losses), "domains": losses.by_domain()}
        self.say(f"{best['name']} in {integers}: {in_words(rows[name])}, after {self.settings.steps} steps")
        write_record(self.out, self.record)
        return rows[name]

    def _stage(self, name: str, folder: Path, *, taught: bool, integers: str = "") -> Path:
        recipe = stage_recipe(
            self.source, name, self.out, folder=folder, taught=taught, steps=self.settings.steps, integers=integers
        )
        return run_stage(recipe, self.source)

    def _losses(self, run: Path) -> RowLosses:
        """Losses of a stage of a compression in FP32, on the rows of the run; rounded where it was trained to be."""
        with stage_named(run.name):
            return row_losses_of(self.open_run(run).as_trained, self.batches)

    def _training_batches(self) -> list[Any]:
        return calibration(self.source.recipe, self.source.data)[: self.settings.batches]

    def _found_record(self) -> Record:
        """A compression's record of an earlier command with the same checkpoint and settings; else a new one.

        Raises:
            ConfigError: the folder has stages of something else.
        """
        asked = asked_of(self.source, weights_hash(self.model)) | {"settings": self.settings.to_json()}
        need = "the same run or model, data, settings and options"
        before = record_of(self.out, FILE, asked, what="stages of another compression", need=need)
        if before is not None:
            follow_moves(self.source, self.out, before)
            return before
        return asked | {
            "points": self.whole.points,
            "loss": self.whole.loss,
            "domains": self.whole.by_domain(),
            "parameters": parameters(self.model),
        }

    def _over(self, best: str, plans: list[CutPlan]) -> FitError:
        smallest = [plan.name for plan in plans if plan.name in self.record["recovered"]][-1]
        more = "" if self.settings.controls == "none" else ", and over the run with as many more steps"
        return FitError(
            "Loss budget was not reached",
            got=f"best {best}",
            need=f"at most {100 * self.settings.budget:+g} % over the run{more}",
            try_=f"a larger --budget, --steps or --tries and a new --out: the smallest cut tried is {smallest}",
            where="--budget",
        )

    def _not_finite(self) -> NumericsError:
        return NumericsError(
            "No cut has finite losses",
            got="; ".join(self.record["left_out"].values()),
            need="a cut whose held-out loss is a number, before and after recovery",
            try_="--no-refit, another --importance, or --optim.lr lower, each with a new --out; else an earlier "
            "checkpoint of the run",
            where=str(self.source.run),
        )
