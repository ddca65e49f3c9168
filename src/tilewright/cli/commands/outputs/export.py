"""`tilewright export`: the model of a run for other runtimes, each artefact with what its own runtime made of it."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tilewright.cli.common import (
    THREADS,
    FiniteRange,
    PathName,
    echo,
    json_option,
    print_json,
    run_argument,
    show_table,
    verbosity,
)
from tilewright.core.log import say

if TYPE_CHECKING:
    from tilewright.compress.export.stored_codes import Method


@click.command()
@run_argument
@click.option("--to", "to", help="Targets, separated by commas. Default: one each for training, serving and the edge.")
@click.option("--out", type=PathName(), help="Output folder. Default: exports in the run folder.")
@click.option("--no-proof", is_flag=True, help="Write only, and run nothing.")
@click.option(
    "--without-tokenizer", is_flag=True, help="Write GGUF without a tokenizer where llama.cpp knows none equal."
)
@click.option(
    "--normalized-text", is_flag=True, help="Write GGUF of a tokenizer with NFC: callers normalise, llama.cpp does not."
)
@click.option(
    "--method",
    type=click.Choice(["auto", "rtn", "gptq", "awq"]),
    default="auto",
    show_default=True,
    help="Weights in 4 bits: as the run was trained, else rounded; rounded; GPTQ; or AWQ.",
)
@click.option("--threads", type=THREADS, help="Threads of each runtime. Default: those of the run.")
@click.option("--time-limit", type=FiniteRange(1), default=600, show_default=True, help="Seconds per runtime.")
@json_option
@verbosity
def export(
    run: Path,
    to: str | None,
    out: Path | None,
    no_proof: bool,
    without_tokenizer: bool,
    normalized_text: bool,
    method: "Method",
    threads: int | None,
    time_limit: float,
    as_json: bool,
) -> None:
    """Export a run for other runtimes, and run each artefact in its own.

    RUN is a run folder or its name below `runs`; without it `runs/latest`. Its newest checkpoint is exported. Each
    runtime works in a process of its own and is compared with the model on held-out text: exports.json in the run
    folder keeps the table, and `report` shows it. An artefact beyond the limits of its format has failed, and the exit
    code is 4.
    """
    from tilewright.compress.export.targets import default_targets, find_targets

    targets = find_targets(to) if to else None  # a typing error before the model is loaded
    from tilewright.cli.load_run import open_to_export
    from tilewright.compress.export_run import check_proofs, export_run
    from tilewright.compress.prove.consumer_process import ConsumerLimits
    from tilewright.report.run_data.exports_table import COLUMNS, conditions, remarks, table_rows

    source = open_to_export(run, without_tokenizer, method, normalized_text)
    asked = targets if targets is not None else default_targets(source)
    record = export_run(
        source,
        asked,
        out or run / "exports",
        prove=not no_proof,
        threads=threads,
        limits=ConsumerLimits.of_this_machine(time_limit),
        on_row=_say_row,
    )
    if as_json:
        print_json(record)
    else:
        click.echo(conditions(record))
        show_table(COLUMNS, table_rows(record))
        for name, text in remarks(record, run):
            echo(f"{name}: {text}")
    check_proofs(record, asked)


def _say_row(row: dict[str, Any]) -> None:
    name = row.get("target") or row["name"]
    say(f"{name}: {row['state']}" + (f", {row['path']}" if row.get("path") else ""), error=True)
