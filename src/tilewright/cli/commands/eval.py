"""`tilewright eval`: the held-out loss of a run, by domain, or tasks; in FP32 whatever the run's precision."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from tilewright.cli.common import (
    LATEST,
    PathName,
    find_run,
    json_option,
    print_json,
    run_or_model,
    show_table,
    verbosity,
)
from tilewright.cli.error_text import told_without_settings
from tilewright.core.log import say
from tilewright.core.units import format_bits, format_loss, format_perplexity
from tilewright.data.dataset.compressors import COMPRESSORS, pooled_bits
from tilewright.models.folder.json_file import read_json

if TYPE_CHECKING:
    from tilewright.training.executor.evaluate import DomainLoss

_TASK_OPTIONS = ("limit", "num_fewshot", "include_path", "batch_size", "apply_chat_template", "base")


@click.command("eval")
@click.argument("run", default=LATEST, metavar="[RUN|MODEL]", callback=run_or_model)
@click.option("--batches", type=click.IntRange(1), help="Micro-batches per domain. Default: the run's eval_batches.")
@click.option("--tasks", metavar="NAME,...", help="Tasks of lm-evaluation-harness instead of the held-out text.")
@click.option("--limit", type=click.IntRange(1), help="Documents of each task. Default: all.")
@click.option("--num-fewshot", type=click.IntRange(0), help="Examples in each prompt. Default: what the task says.")
@click.option("--include-path", type=PathName(), help="Folder with .yaml files of your own tasks.")
@click.option("--batch-size", type=click.IntRange(1), default=8, show_default=True, help="Rows that run together.")
@click.option("--apply-chat-template", is_flag=True, help="Put each prompt into the model's chat template.")
@click.option(
    "--base/--no-base",
    default=None,
    help="Evaluate the model that the run began with, too. Default: where it began with loaded weights.",
)
@json_option
@verbosity
def eval_(run: str, batches: int | None, tasks: str | None, as_json: bool, **options: Any) -> None:
    """Evaluate a run on its held-out text, or a run or a model on tasks, in FP32.

    Results of tasks are written to tasks.json in the run folder, and the report shows them.

    Bits per byte of held-out text do not depend on the tokenizer: what gzip and xz need for it stands beside them.

    RUN is a run folder or its name below `runs`; without it `runs/latest`. MODEL, for tasks: a Hugging Face folder,
    an adapter's folder, or a model of the hub, org/name.
    """
    _check_options(batches, tasks)
    if tasks is not None:
        from tilewright.cli.task_eval import TaskOptions, evaluate_tasks

        names = tuple(name.strip() for name in tasks.split(",") if name.strip())
        chat = options.pop("apply_chat_template")
        evaluate_tasks(run, TaskOptions(names, chat=chat, **options), as_json)
        return
    folder = find_run(run)  # before torch is imported, which takes seconds
    from tilewright.cli.load_run import reopen
    from tilewright.training.components.recipe_data import held_out, prepare_data
    from tilewright.training.executor.evaluate import evaluate, pooled

    opened = reopen(folder)
    file = folder / "run.toml"
    with told_without_settings(f"put it back there, or write its new path into {file}", str(file)):
        data = prepare_data(opened.recipe)
    _say_other_data(folder, data.fingerprint)
    rows = held_out(opened.recipe, data, batches)
    # The model is plain FP32: nothing was converted, so there is no other precision to leave.
    results = evaluate(opened.model, rows.batches, num_bytes=rows.num_bytes, device=opened.device, fp32=False)
    whole = pooled(results)
    marks = {name: data.compressors(name) for name in results}
    if as_json:
        rows = {name: result.to_json() | {"compressors": marks[name]} for name, result in results.items()}
        print_json({"checkpoint": str(opened.checkpoint), "domains": rows, "all": whole and whole.to_json()})
        return
    click.echo(f"{opened.checkpoint}")
    rows = [*results.items(), *([("all", whole)] if whole else [])]
    if any(result.bits_per_byte is None for result in results.values()):
        columns = ("domain", "loss", "perplexity", "targets")
        show_table(columns, [(name, *_losses(result), f"{result.tokens}") for name, result in rows])
        return
    marks["all"] = pooled_bits(marks, {name: result.bytes or 0 for name, result in results.items()})
    show_table(
        ("domain", "bits per byte", *(f"{name} -9" for name in COMPRESSORS), "loss", "perplexity", "targets"),
        [
            (name, format_bits(result.bits_per_byte or 0.0), *_marks(marks[name]), *_losses(result), f"{result.tokens}")
            for name, result in rows
        ],
    )


def _check_options(batches: int | None, tasks: str | None) -> None:
    """Raise UsageError if `eval` was given options that belong to its other kind of evaluation."""
    context = click.get_current_context()
    given = [
        f"--{name.replace('_', '-')}"
        for name in _TASK_OPTIONS
        if context.get_parameter_source(name) is not ParameterSource.DEFAULT
    ]
    if tasks is None and given:
        raise click.UsageError(f"{given[0]} needs --tasks NAME,...", context)
    if tasks is not None and batches is not None:
        raise click.UsageError("--batches is for held-out text, and --tasks for tasks: one of them.", context)
    if tasks is not None and not tasks.strip(" ,"):
        raise click.UsageError("--tasks needs the name of a task.", context)


def _say_other_data(folder: Path, fingerprint: str) -> None:
    """Say where `eval` reads other data than the run was trained on: a changed folder, or, of a relative path, one of
    the same name."""
    record = folder / "data.json"
    if record.is_file() and read_json(folder, record.name).get("fingerprint", fingerprint) != fingerprint:
        say(f"note: the data is not what the run was trained on: see [data] in {folder / 'run.toml'}", error=True)


def _losses(result: "DomainLoss") -> tuple[str, str]:
    return format_loss(result.loss), format_perplexity(result.loss)


def _marks(bits: Mapping[str, float]) -> list[str]:
    return [format_bits(bits[name]) if name in bits else "" for name in COMPRESSORS]
