"""`tilewright export`: the model of a run for other runtimes, each artefact with what its own runtime made of it."""

from pathlib import Path
from typing import Any

import click

from tilewright.cli.common import json_option, print_json, run_argument, show_table, verbosity
from tilewright.core.log import say
from tilewright.core.units import format_bytes, format_share


@click.command()
@run_argument
@click.option("--to", "to", help="Targets, separated by commas. Default: one each for training, serving and the edge.")
@click.option("--out", type=click.Path(path_type=Path), help="Output folder. Default: exports in the run folder.")
@click.option("--no-proof", is_flag=True, help="Write only, and run nothing.")
@click.option(
    "--without-tokenizer", is_flag=True, help="Write GGUF without a tokenizer where llama.cpp knows none equal."
)
@click.option("--threads", type=click.IntRange(1), help="Threads of each runtime. Default: those of the run.")
@click.option("--time-limit", type=click.FloatRange(1), default=600, show_default=True, help="Seconds per runtime.")
@json_option
@verbosity
def export(
    run: Path,
    to: str | None,
    out: Path | None,
    no_proof: bool,
    without_tokenizer: bool,
    threads: int | None,
    time_limit: float,
    as_json: bool,
) -> None:
    """Export a run for other runtimes, and run each artefact in its own.

    RUN is a run folder or its name below `runs`; without it `runs/latest`. Its newest checkpoint is exported. Each
    runtime works in a process of its own and is compared with the FP32 model on held-out text: exports.json in the run
    folder keeps the table, and `report` shows it.
    """
    from tilewright.compress.export.targets import default_targets, find_targets

    targets = find_targets(to) if to else None  # a typing error before the model is loaded
    from tilewright.cli.load_run import open_to_export
    from tilewright.compress.export_run import export_run
    from tilewright.compress.prove.limits import Limits

    source = open_to_export(run, without_tokenizer)
    record = export_run(
        source,
        targets if targets is not None else default_targets(source),
        out or run / "exports",
        prove=not no_proof,
        threads=threads,
        limits=Limits.of_this_machine(time_limit),
        on_row=_say_row,
    )
    if as_json:
        print_json(record)
        return
    machine = record["machine"]
    clock = f" at {machine['clock_mhz']} MHz" if machine["clock_mhz"] else ""
    click.echo(f"{machine['cpu']}{clock}, {machine['threads']} threads; {record['checkpoint']}")
    show_table(*export_table(record))
    for row in record["artefacts"]:
        for note in [row["reason"]] * bool(row["reason"]) + row.get("notes", []):
            click.echo(f"{row['target']}: {note}")


def _say_row(row: dict[str, Any]) -> None:
    name = row.get("target") or row["name"]
    say(f"{name}: {row['state']}" + (f", {row['path']}" if row.get("path") else ""))


def export_table(record: dict[str, Any]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Columns and rows, the baselines first."""
    columns = (
        "target",
        "state",
        "bytes",
        "of FP32",
        "KL",
        "worst domain",
        "ids",
        "prefill 32",
        "256",
        "cached token",
        "memory",
    )
    rows = [_cells({**row, "target": row["name"]}, record["fp32_bytes"]) for row in record["baselines"]]
    return columns, rows + [_cells(row, record["fp32_bytes"]) for row in record["artefacts"]]


def _cells(row: dict[str, Any], fp32_bytes: int) -> tuple[str, ...]:
    size, ids = row.get("bytes"), row.get("token_ids")
    prefill = sorted((int(n), s) for n, s in (row.get("prefill_s") or {}).items())
    return (
        row["target"],
        row["state"],
        format_bytes(size) if size else "",
        f"{size / fp32_bytes:.3f}x" if size else "",
        f"{row['kl']:.1e}" if row.get("kl") is not None else "",
        _worst(row.get("loss") or {}),
        f"{ids['equal']}/{ids['documents']}" if ids else "",
        _milliseconds(prefill[0][1] if prefill else None),
        _milliseconds(prefill[-1][1] if len(prefill) > 1 else None),
        _milliseconds(row.get("cached_token_s")),
        format_bytes(row["peak_bytes"]) if row.get("peak_bytes") else "",
    )


def _worst(loss: dict[str, dict[str, float]]) -> str:
    """The largest relative change of a domain's loss."""
    changes = [(both["consumer"] / both["fp32"] - 1, name) for name, both in loss.items() if both["fp32"]]
    if not changes:
        return ""
    change, name = max(changes)
    return f"{'+' if change > 0 else ''}{format_share(change)} {name}"


def _milliseconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1000:.2f} ms"
