"""`tilewright plan MODEL`: one table of the ways to fine-tune a model on a machine, a command under each row."""

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tilewright.cli.common import echo, print_json
from tilewright.cli.table_layout import lay_out
from tilewright.core import env
from tilewright.core.config.load import shipped_recipes
from tilewright.core.errors import ConfigError, FitError, UnknownFitError
from tilewright.core.units import format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from tilewright.cli.commands.chat_models.finetune_ways import Way
    from tilewright.planner.plan import Plan
    from tilewright.training.planning.plan_request import PlanRequest

_NAMES = {"lora": "LoRA", "lora_fp8": "FP8 LoRA", "full": "all parameters"}
_ANSWERS = {"fits": "yes", "does not fit": "no", "not known": "not known"}
_CONFIG = "config.json"


def named_model(text: str) -> str | None:
    """Find the folder or hub name of the model that a plan is asked for; None where the text means a recipe, which
    comes first.

    Raises:
        ConfigError: a configuration that is not there.

    Example:
        >>> named_model("Qwen/Qwen3-0.6B"), named_model("sft_lora"), named_model("mine.toml")
        ('Qwen/Qwen3-0.6B', None, None)
    """
    path = Path(text).expanduser()
    if text in shipped_recipes() or text.endswith(".toml"):
        return None
    if path.name == _CONFIG:
        if path.is_file():
            return str(path.parent)
        raise ConfigError(
            "No such configuration of a model",
            got=text,
            need=f"a {_CONFIG}, its folder, or a model of the hub as org/name",
            try_="tilewright plan FOLDER",
            where="MODEL",
        )
    if path.is_dir() and (path / _CONFIG).is_file():
        return text
    from tilewright.models.folder.find_model import is_hub_name

    recipes = [str(file.with_suffix("")) for file in path.parent.glob("*.toml")]
    meant = difflib.get_close_matches(text, recipes, n=1, cutoff=0.8)  # the error of recipes then says which
    return text if is_hub_name(text) and not meant else None


def plan_model(model: str, typed: Sequence[str], options: "PlanRequest", *, as_json: bool) -> None:
    """Plan the ways to fine-tune a model, and show them.

    Args:
        model: from `named_model`.
        typed: settings as on a command line.
        options: machine and budgets.
        as_json: instead of a table.

    Raises:
        CheckpointError: the model cannot be had.
        ConfigError: settings or budgets that are not right.
        FitError: no way fits.
        UnknownFitError: of none it is known that it fits.
    """
    from tilewright.cli.commands.chat_models.finetune_ways import lacking, ways
    from tilewright.data.common.progress import ProgressBar
    from tilewright.models.folder.find_model import find_model
    from tilewright.training.planning.plan_request import published_notes

    name = find_model(model, weights=False).name
    found: list[Way] = []
    with ProgressBar("planning") as progress:
        progress.phase(_NAMES["lora"])
        for way in ways(name, model, typed, options):
            found.append(way)
            if len(found) < len(_NAMES):
                progress.phase(list(_NAMES.values())[len(found)])
    first = (*(published_notes(options.on) if options.on else ()), *lacking(found[0].loaded))
    of_plans = (note for way in found if way.plan is not None for note in way.plan.notes)
    notes = list(dict.fromkeys((*first, *of_plans)))
    if as_json:
        print_json(_to_json(name, found, notes))
    else:
        _show(name, found, notes)
    if not any(way.state == "fits" for way in found):
        raise _refused(found)


def _show(name: str, found: "Sequence[Way]", notes: Sequence[str]) -> None:
    fitting = [_NAMES[way.how] for way in found if way.state == "fits"]
    known = next((way.plan for way in reversed(found) if way.plan is not None), None)
    echo(f"Fits: {', '.join(fitting) or 'none of the ways'}.\n")
    if known is not None:
        parameters = format_count(known.shape.num_parameters)
        echo(f"{name}: {known.shape.family}, {parameters} parameters on {known.machine.device_name}\n")
    columns = ["how", "fits", "device", "host", "step", "tokens/s"]
    rows = [[_NAMES[way.how], _ANSWERS[way.state], *_numbers(way)] for way in found]
    lines = lay_out(columns, rows, env.columns())
    under = len(lines) == 1 + len(rows)  # else cells are wrapped, and the commands come last
    click.echo("\n".join(lines[:1] if under else lines))
    for number, (row, way) in enumerate(zip(rows, found, strict=True)):
        click.echo(lines[1 + number] if under else f"\n{row[0]}")
        for line in _below(way):
            echo(f"  {line}", hang=4)
        command = way.command or way.remedy_command
        if command:
            click.echo(f"  {command}")  # never wrapped, so that it can be copied
    recipe = found[0].loaded.recipe
    rows_at_once = recipe.train.global_batch_size
    echo(
        f"\nThe data is not read: rows of {recipe.data.seq_len} tokens, {rows_at_once} of them per step. "
        f"--data.seq_len and --train.global_batch_size change that; with fewer than {10 * rows_at_once} rows of "
        "data, finetune takes fewer per step."
    )
    for note in notes:
        echo(f"note: {note}")


def _numbers(way: "Way") -> list[str]:
    plan = way.plan
    if plan is None:
        return ["-"] * 4
    budget, host = format_bytes(plan.budget.device), format_bytes(plan.host_bytes) if plan.host else "-"
    if plan.shape.unknown:
        return [f"over {format_bytes(plan.peak_bytes)} of {budget}", host, "-", "-"]
    return [
        _of_budget(plan),
        host,
        format_seconds(plan.step_s),
        format_count(plan.tokens_per_s),
    ]


def _of_budget(plan: "Plan") -> str:
    return f"{format_bytes(plan.peak_bytes)} of {format_bytes(plan.budget.device)}"


def _below(way: "Way") -> list[str]:
    """Remarks under a row of a model's plan: changes made by the plan, why it is not known, changes that it would
    need."""
    lines = []
    if way.changes or way.layers:
        settings = [f"{name} = {_value(name, value)}" for name, value in way.changes.items()]
        learned = "; this changes what is learned" if way.plan is not None and way.plan.narrowed else ""
        lines.append(f"to fit: {', '.join([*settings, f'layers: {way.layers}'])}{learned}")
    if way.chosen and way.plain is not None:
        settings = ", ".join(f"{name} = {_value(name, value)}" for name, value in way.chosen.items())
        learned = " (changes what is learned)" if way.changes_learning else ""
        host = f", {format_bytes(way.plain.host_bytes)} of host memory" if way.plain.host else ""
        lines.append(f"faster: {settings}{learned}; without, {format_count(way.plain.tokens_per_s)} tokens/s{host}")
    if way.unknown:
        lines.append(f"not known: {way.unknown}")
    if way.need:
        lines.append(f"needs {way.need}")
    if way.remedy is not None:
        settings = " and ".join(f"{name} = {_value(name, value)}" for name, value in way.remedy.settings.items())
        lines.append(f"fits with {settings}, for more communication: {_of_budget(way.remedy.plan)}")
    return lines


def _value(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return format_bytes(value) if name.endswith("_bytes") else str(value)


def _to_json(name: str, found: "Sequence[Way]", notes: Sequence[str]) -> dict[str, Any]:
    recipe = found[0].loaded.recipe
    return {
        "model": name,
        "seq_len": recipe.data.seq_len,
        "global_batch_size": recipe.train.global_batch_size,
        "ways": [_way_to_json(way) for way in found],
        "notes": list(notes),
    }


def _way_to_json(way: "Way") -> dict[str, Any]:
    from tilewright.cli.plan_output import to_json

    plan = None if way.plan is None else to_json(way.plan)
    remedy = None
    if way.remedy is not None:
        with_it = to_json(way.remedy.plan)
        remedy = {"settings": dict(way.remedy.settings), "command": way.remedy_command, "plan": with_it}
    chosen = {"chosen": dict(way.chosen), "plain": None if way.plain is None else to_json(way.plain)}
    said = {"how": way.how, "state": way.state, "command": way.command, "changes": dict(way.changes)}
    return (
        said | chosen | {"layers": way.layers, "unknown": way.unknown, "need": way.need, "plan": plan, "remedy": remedy}
    )


def _refused(found: "Sequence[Way]") -> FitError | UnknownFitError:
    """The error of the plan of a model that no way fits, or of which that is not known."""
    why = dict.fromkeys(way.need or way.unknown for way in found)
    names = {one: ", ".join(_NAMES[way.how] for way in found if (way.need or way.unknown) == one) for one in why}
    lines = "\n".join(f"{name}: {one}" for one, name in names.items())
    if any(way.state == "not known" for way in found):
        return UnknownFitError(
            "Memory of a fine-tune cannot be predicted",
            got=lines,
            need="a model whose code tilewright or transformers has, and whose step can be traced without data",
            try_="tilewright finetune MODEL DATA --dry-run --plan.enforce false, which measures two steps",
        )
    return FitError(
        "No way to fine-tune this model fits",
        got="\n".join(f"{_NAMES[way.how]}: {' of '.join(_numbers(way)[:1])}" for way in found),
        need=lines,
        try_=_remedies(found) or "a smaller model, --data.seq_len with fewer tokens, or --on NAME for another machine",
    )


def _remedies(found: "Sequence[Way]") -> str:
    """Settings that make ways of a model's plan fit, as the user types them."""
    from tilewright.planner.advice.recipe_changes import words

    typed = dict.fromkeys(words(way.remedy.settings) for way in found if way.remedy is not None)
    return ", or ".join(typed)
