"""`tilewright inspect`: a recipe's values and sources, a run's precision, kernels and what was executed, a checkpoint's
contents; `--diff` compares what two runs executed."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from tilewright.cli import run_tables
from tilewright.cli.common import (
    RecipeCommand,
    echo,
    is_verbose,
    json_option,
    overrides,
    print_json,
    show_dicts,
    show_table,
    verbosity,
)
from tilewright.core.config import setting_names
from tilewright.core.config.load import load_recipe
from tilewright.core.config.toml import NONE
from tilewright.core.errors import ConfigError
from tilewright.core.log import say
from tilewright.core.units import format_bytes, format_count
from tilewright.precision.float8 import audit_table
from tilewright.precision.policy.format_shares import recorded_shares, shares_text
from tilewright.training.runlog import recorded_tables

_SHOWN = ("fqn", "op", "compute", "storage", "output", "reason")


@click.command("inspect", cls=RecipeCommand)
@click.argument("target", default="default", metavar="[TARGET]")
@click.option("--schema", "as_schema", is_flag=True, help="Print the JSON schema of recipes, for editors.")
@click.option("--diff", "other", metavar="RUN", help="Show how this run's kernels differ from those of the run TARGET.")
@json_option
@verbosity
@click.pass_context
def inspect_(ctx: click.Context, target: str, as_schema: bool, other: str | None, as_json: bool) -> None:
    """Show the contents of a recipe, a run or a checkpoint.

    TARGET is a recipe (every setting with its value and source), a run folder (what ran in which precision and with
    which kernel, and how often), or a checkpoint folder (its contents, without loading them).
    """
    folder = Path(target)
    if other is not None:
        _diff(folder, Path(other), as_json)
    elif as_schema:
        print_json(setting_names.json_schema())
    elif (folder / "manifest.json").is_file():
        _checkpoint(folder, as_json)
    elif (folder / "run.toml").is_file():
        _run(folder, as_json)
    else:
        _recipe(target, overrides(ctx), as_json)


def _recipe(target: str, settings: list[str], as_json: bool) -> None:
    loaded = load_recipe(target, settings)
    values = setting_names.flat(loaded.recipe.model_dump(mode="json"))
    rows = [(item, values[item.path]) for item in setting_names.fields()]
    if as_json:
        print_json({item.path: {"value": value, "source": loaded.sources[item.path]} for item, value in rows})
        return
    lines = [
        (
            item.path,
            json.dumps(NONE if value is None else value),
            loaded.sources[item.path],
            item.doc or item.wants,
        )
        for item, value in rows
    ]
    show_table(("setting", "value", "source", "meaning"), lines)
    for note in loaded.notes:
        say(f"note: {note}")


def _run(folder: Path, as_json: bool) -> None:
    """`inspect` of a run: precision and kernels, from its folder."""
    # 1. What the folder records. A run that stopped early lacks some of these files.
    precision = recorded_tables.read(folder / "precision.json")
    if precision is not None:
        precision = recorded_tables.checked(recorded_tables.MODULES, precision, folder / "precision.json")
    machine = recorded_tables.read(folder / "machine.json")
    kernels = machine.get("kernels", []) if isinstance(machine, dict) else []
    kernels = recorded_tables.checked(recorded_tables.KERNELS, kernels, folder / "machine.json")
    audit = _audit(folder)
    work = recorded_shares(precision or [])
    if as_json:
        told = None if audit is None else audit | {"rows": [row.to_json() for row in audit["rows"]]}
        print_json({"precision": precision, "work": work, "kernels": kernels, "audit": told})
        return
    # 2. Tables. The recipe names the optimizer's states, which decide the kernel that updates them.
    recipe = load_recipe(folder / "run.toml", environ={})
    echo(f"{folder}: {recipe.name}\n")
    if precision:
        _modules(precision)
        echo(f"matmul work: {shares_text(work)}") if work else None
    else:
        echo("precision: not recorded")
    echo()
    if kernels:
        _kernels(kernels, precision or [], recipe.recipe.optim.moments)
    else:
        echo("kernels: not recorded")
    echo()
    if audit is None:
        echo("executed: not recorded")
        return
    lines, reasons = audit_table.shown(audit["rows"])
    echo(f"executed up to step {audit['step']}:")
    show_table(audit_table.COLUMNS, lines)
    for reason in reasons:
        echo(reason)


def _modules(precision: Sequence[Mapping[str, Any]]) -> None:
    """`inspect` of modules: their kinds; with -v each module."""
    if is_verbose():
        show_dicts([{key: row.get(key, "-") for key in _SHOWN} for row in precision])
        return
    table, reasons = run_tables.module_table(precision)
    show_table(*table)
    for reason in reasons:
        echo(reason, hang=4)


def _kernels(kernels: Sequence[Mapping[str, Any]], precision: Sequence[Mapping[str, Any]], moments: str) -> None:
    """`inspect` of kernels: those that the run uses; with -v all of them, with the reasons against the others."""
    if is_verbose():
        show_table(*run_tables.candidate_table(kernels))
        return
    used = run_tables.kernels_in_use(kernels, precision, moments) if precision else kernels
    show_table(*run_tables.chosen_table(used))
    echo("Every module and kernel, with the reasons: -v")


def _diff(first: Path, second: Path, as_json: bool) -> None:
    """`inspect --diff`: differences between the matmuls of two runs: formats, kernels, shares of calls, fallbacks."""
    found = audit_table.differences(*(_required_audit(folder)["rows"] for folder in (first, second)))
    if as_json:
        print_json({"first": str(first), "second": str(second), "differences": [asdict(item) for item in found]})
        return
    if not found:
        echo(f"no difference: {first} and {second} executed the same matmuls in the same formats and kernels")
        return
    lines = [
        (
            f"{item.layer}  x{item.count}" if item.count > 1 else item.layer,
            item.gemm,
            item.what,
            item.first,
            item.second,
        )
        for item in found
    ]
    show_table(("layer", "gemm", "differs in", str(first), str(second)), lines)


def _audit(folder: Path) -> recorded_tables.RecordedAudit | None:
    """`inspect` of an audit: the matmuls of a run; None where it has not written them yet."""
    value = recorded_tables.read(folder / audit_table.FILE)
    return None if value is None else recorded_tables.checked(recorded_tables.AUDIT, value, folder / audit_table.FILE)


def _required_audit(folder: Path) -> recorded_tables.RecordedAudit:
    audit = _audit(folder)
    if audit is None:
        raise ConfigError(
            "No audit of executed kernels in this run folder",
            got=f"no {audit_table.FILE} in it" if folder.is_dir() else "no such folder",
            need="a run folder that has reached a checkpoint or its end",
            try_="tilewright inspect RUN --diff RUN, with folders below runs/",
            where=str(folder),
        )
    return audit


def _checkpoint(folder: Path, as_json: bool) -> None:
    """`inspect` of a checkpoint: names, shapes and bytes from its own index; no tensor is read."""
    from tilewright.training.checkpoint.checkpoint_meta import read_meta
    from tilewright.training.checkpoint.checkpoint_store import stored_tensors

    meta = read_meta(folder)
    rows = [
        {
            "tensor": name,
            "dtype": str(dtype).removeprefix("torch."),
            "shape": list(shape),
            "bytes": dtype.itemsize * math.prod(shape),
        }
        for name, (dtype, shape) in stored_tensors(folder).items()
    ]
    if as_json:
        print_json({"meta": meta, "tensors": rows})
        return
    echo(f"{folder}: {len(rows)} tensors, {format_bytes(sum(int(row['bytes']) for row in rows))}")
    for group in dict.fromkeys(str(row["tensor"]).partition(".")[0] for row in rows):
        inside = [row for row in rows if str(row["tensor"]).startswith(group + ".")]
        numel = sum(math.prod(row["shape"]) for row in inside)
        echo(f"  {group:<10} {len(inside):>5} tensors, {format_count(numel)} numbers")
    echo()
    show_dicts(rows)
