"""Tasks of lm-evaluation-harness on the model of a run, and on the one that it began with."""

import importlib.util
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilewright.cli.common import is_verbose, print_json, show_table
from tilewright.core.errors import ConfigError, HardwareError
from tilewright.core.log import say

if TYPE_CHECKING:
    from tilewright.cli.load_run import Reopened
    from tilewright.integrations.lm_eval.model import TilewrightLM
    from tilewright.training.runlog.task_scores import TaskScore

_LENGTHS = ("n_positions", "max_position_embeddings", "n_ctx")
_LENGTH = 2048
"""Where a model's folder says none (the harness' own number)."""


@dataclass(frozen=True)
class TaskOptions:
    """What the command line asks for; see `commands.eval`."""

    tasks: tuple[str, ...]
    limit: int | None = None
    num_fewshot: int | None = None
    include_path: Path | None = None
    batch_size: int = 8
    chat: bool = False
    base: bool | None = None


def evaluate_run(run: Path, options: TaskOptions, as_json: bool) -> None:
    """Evaluate, record and print.

    Raises:
        HardwareError: the harness is not installed.
        ConfigError, DataError: a task cannot be evaluated, see `integrations.lm_eval.tasks`.
        CheckpointError: the run has no valid checkpoint.
    """
    _require_harness()
    from tilewright.integrations.lm_eval.guard import contained
    from tilewright.training.runlog import task_scores

    before = task_scores.read(run)  # first of all: what cannot be read would be found when the work is done
    with contained(is_verbose()):
        rows, notes = _scores(run, options)
    path = task_scores.write(run, task_scores.merge(before, rows))
    if as_json:
        print_json({"rows": [row.to_json() for row in rows], "notes": notes, "file": str(path)})
        return
    for note in notes:
        say(f"note: {note}", error=True)
    show_table(*score_table(rows))
    say(f"written to {path}; `tilewright report {run}` shows it")


def _scores(run: Path, options: TaskOptions) -> "tuple[list[TaskScore], list[str]]":
    say("loading lm-evaluation-harness and its tasks ...", error=True)
    from tilewright.cli.load_run import reopen
    from tilewright.integrations.lm_eval.run import run_tasks
    from tilewright.integrations.lm_eval.tasks import TaskSet
    from tilewright.training.runlog.task_scores import BASE, RUN

    tasks = TaskSet(options.tasks, options.include_path, options.num_fewshot)
    opened = reopen(run)
    _check_model(run, opened)
    loaded = opened.recipe.model.weights == "load"
    if options.base and not loaded:
        raise ConfigError(
            "Run has no base model",
            got='model.weights = "random"',
            need='a run that began with loaded weights, model.weights = "load"',
            try_="the same command without --base",
            where="--base",
        )
    rows: list[TaskScore] = []
    notes: list[str] = []
    asked: list[tuple[str, str]] = [(RUN, str(opened.checkpoint))]
    if loaded and options.base is not False:
        asked.append((BASE, opened.recipe.model.path))
    for role, name in asked:
        if role == BASE:
            opened = replace(opened, model=_base(opened))
        say(f"evaluating {'the base model ' if role == BASE else ''}{name} ...", error=True)
        adapter = _adapter(run, opened, options)
        rows += run_tasks(adapter, tasks, name=name, role=role, limit=options.limit, chat=options.chat)
        notes += [f"{role}: {note}" for note in adapter.notes]
    return rows, notes


def _adapter(run: Path, opened: "Reopened", options: TaskOptions) -> "TilewrightLM":
    from tilewright.data.chat.template import ChatTemplate
    from tilewright.integrations.lm_eval.model import TilewrightLM
    from tilewright.integrations.lm_eval.text import TextCodec
    from tilewright.models.folder.resolve import local_folder

    recipe = opened.recipe
    folder = Path(local_folder(recipe.model.path)).expanduser() if recipe.model.weights == "load" else None
    chat = ChatTemplate.load(str(run), opened.tokenizer) if options.chat else None
    return TilewrightLM(
        opened.model,
        TextCodec.of(opened.tokenizer, folder),
        device=opened.device,
        max_length=recipe.data.seq_len if folder is None else _context_length(folder),
        batch_size=options.batch_size,
        stop_ids=[*_stop_ids(folder), *(chat.stop_ids if chat else ())],
        chat=chat,
        name=str(run),
    )


def _base(opened: "Reopened") -> Any:
    """The model as the run loaded it, in FP32 and without adapters."""
    from tilewright.core.config.recipe import LoraSection
    from tilewright.training.components.lora_model import build_adapted

    plain = opened.recipe.model_copy(update={"lora": LoraSection()})
    return build_adapted(plain, opened.tokenizer.vocab_size, opened.model.kernels, opened.device).eval()


def _context_length(folder: Path) -> int:
    from tilewright.models.folder.json_file import read_json

    config = read_json(folder)
    config = config.get("text_config") or config
    return next((int(config[name]) for name in _LENGTHS if config.get(name)), _LENGTH)


def _stop_ids(folder: Path | None) -> list[int]:
    """Ids that end an answer, as generation_config.json beside the weights has them."""
    import json

    file = folder / "generation_config.json" if folder else None
    if file is None or not file.is_file():
        return []
    ids = json.loads(file.read_bytes()).get("eos_token_id")
    return ids if isinstance(ids, list) else [] if ids is None else [ids]


def _check_model(run: Path, opened: "Reopened") -> None:
    if opened.recipe.model.task != "causal_lm":
        raise ConfigError(
            "Tasks need a causal language model",
            got=f'model.task = "{opened.recipe.model.task}"',
            need='model.task = "causal_lm"',
            try_="tilewright eval without --tasks, for its loss",
            where=str(run / "run.toml"),
        )


def _require_harness() -> None:
    if importlib.util.find_spec("lm_eval") is None:
        raise HardwareError(
            "lm-evaluation-harness is not installed",
            got="no package lm_eval",
            need="the extra eval",
            try_="pip install 'tilewright[eval]'",
            where="--tasks",
        )


def score_table(rows: "list[TaskScore]") -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Columns and lines: base and run beside each other where both were evaluated."""
    from tilewright.report.run_data.before_after import task_changes

    changes = task_changes(rows)
    with_base = any(change.before for change in changes)
    columns = ("task", "metric", *(("base",) if with_base else ()), "run", "documents", "few-shot", "version")
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
