"""Tasks of lm-evaluation-harness on a model, or on that of a run and the one that it began with."""

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tilewright.cli.common import is_verbose, print_json, show_table
from tilewright.core.errors import ConfigError, HardwareError
from tilewright.core.log import say

if TYPE_CHECKING:
    from tilewright.cli.open_model import OpenModel
    from tilewright.data.chat.template import ChatTemplate
    from tilewright.integrations.lm_eval.model import TilewrightLM
    from tilewright.training.runlog.task_scores import TaskScore

_LENGTH = 2048
"""Where a model's folder says none (the harness' own number)."""


@dataclass(frozen=True)
class TaskOptions:
    """Request of the command line; see `commands.eval`."""

    tasks: tuple[str, ...]
    limit: int | None = None
    num_fewshot: int | None = None
    include_path: Path | None = None
    batch_size: int = 8
    chat: bool = False
    base: bool | None = None


def evaluate_tasks(name: str, options: TaskOptions, as_json: bool) -> None:
    """Evaluate tasks on a run or a model and print; results of a run are recorded in its folder.

    Raises:
        HardwareError: the harness is not installed.
        ConfigError, DataError: a task cannot be evaluated, see `integrations.lm_eval.task_set`; or see `open_model`.
        CheckpointError: see `open_model`.
    """
    _require_harness()
    from tilewright.integrations.lm_eval.guard import contained
    from tilewright.training.runlog import task_scores

    folder = next((path for path in (Path(name), Path("runs") / name) if (path / "run.toml").is_file()), None)
    before = task_scores.read(folder) if folder else []  # now: what cannot be read would else be found after the work
    with contained(is_verbose()):
        rows, notes = _scores(name, options)
    path = task_scores.write(folder, task_scores.merge(before, rows)) if folder else None
    if as_json:
        print_json({"rows": [row.to_json() for row in rows], "notes": notes, "file": path and str(path)})
        return
    for note in notes:
        say(f"note: {note}", error=True)
    show_table(*score_table(rows))
    if path:
        say(f"written to {path}; `tilewright report {folder}` shows it")


def _scores(name: str, options: TaskOptions) -> "tuple[list[TaskScore], list[str]]":
    say("loading lm-evaluation-harness and its tasks ...", error=True)
    from tilewright.cli.open_model import OpenModel, open_model
    from tilewright.integrations.lm_eval.run_tasks import run_tasks
    from tilewright.integrations.lm_eval.task_set import TaskSet
    from tilewright.training.runlog.task_scores import BASE, RUN

    tasks = TaskSet(options.tasks, options.include_path, options.num_fewshot)
    opened = open_model(name, dtype="fp32")
    chat = _chat(opened, name) if options.chat else None
    base = _base(opened, options.base)
    rows: list[TaskScore] = []
    notes: list[str] = []

    def run(model: OpenModel, role: str, shown: str) -> None:
        say(f"evaluating {'the base model ' if role == BASE else ''}{shown} ...", error=True)
        adapter = _adapter(model, chat, options)
        rows.extend(run_tasks(adapter, tasks, name=shown, role=role, limit=options.limit, chat=options.chat))
        notes.extend(f"{role}: {note}" for note in adapter.notes)

    run(opened, RUN, str(opened.checkpoint or opened.name))
    del opened  # two models at once may not fit
    if base:
        run(open_model(base, dtype="fp32"), BASE, base)
    return rows, notes


def _base(opened: "OpenModel", wanted: bool | None) -> str:
    """The folder or hub name of the base model that is evaluated on the tasks too; "" for none."""
    section = opened.recipe.model if opened.recipe else None
    if section is not None and section.weights == "load":
        return "" if wanted is False else section.path
    if wanted:
        raise ConfigError(
            "No base model",
            got='model.weights = "random"' if section else "a model, not a run",
            need='a run that began with loaded weights, model.weights = "load"',
            try_="the same command without --base",
            where="--base",
        )
    return ""


def _chat(opened: "OpenModel", name: str) -> "ChatTemplate":
    if opened.chat is None:
        raise ConfigError(
            "Model has no chat template",
            got=f"{name} without chat_template.jinja and without chat_template in tokenizer_config.json",
            need="a model that was trained on conversations",
            try_="the same command without --apply-chat-template",
            where="--apply-chat-template",
        )
    return opened.chat


def _adapter(opened: "OpenModel", chat: "ChatTemplate | None", options: TaskOptions) -> "TilewrightLM":
    from tilewright.data.chat.template import stops_of
    from tilewright.integrations.lm_eval.model import TilewrightLM
    from tilewright.integrations.lm_eval.text_codec import TextCodec

    return TilewrightLM(
        opened.model,
        TextCodec.of(opened.tokenizer, opened.files),
        device=opened.device,
        max_length=opened.max_positions or _LENGTH,
        batch_size=options.batch_size,
        stop_ids=stops_of(opened.tokenizer, opened.chat).ids,
        chat=chat,
        name=opened.name,
    )


def _require_harness() -> None:
    if importlib.util.find_spec("lm_eval") is None:
        raise HardwareError(
            "Package lm_eval is not installed",
            got="no package lm_eval",
            need="the extra eval",
            try_="pip install 'tilewright[eval]'",
            where="--tasks",
        )


def score_table(rows: "list[TaskScore]") -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Columns and lines of the table of task scores, base and run beside each other if both were evaluated."""
    from tilewright.report.run_data.before_after import task_changes

    changes = task_changes(rows)
    with_base = any(change.before for change in changes)
    columns = ("task", "metric", *(("base", "run") if with_base else ("value",)), "documents", "few-shot", "version")
    lines = []
    for change in changes:
        under = change.either.conditions
        values = [change.shown(change.before)] if with_base else []
        lines.append(
            (
                change.either.task,
                change.metric,
                *values,
                change.shown(change.after),
                f"{under.samples}",
                "" if under.num_fewshot is None else f"{under.num_fewshot}",
                under.version,
            )
        )
    return columns, lines
