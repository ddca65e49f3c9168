"""`tilewright data inspect`: a record, a reject, the diff of two builds, or the samples of a training step."""

from pathlib import Path
from typing import Any

import click

from tilewright.cli.common import echo, find_run, json_option, print_json, show_table, verbosity
from tilewright.core.errors import DataError
from tilewright.core.units import format_bytes

_SHOWN_CHARS = 400
_MOST = 5


@click.command("inspect")
@click.argument("folder", required=False, metavar="[DIR]", type=click.Path(path_type=Path))
@click.option("--record", metavar="ID|PATH", help="Show records of this id, its beginning, or part of a file's name.")
@click.option("--reject", metavar="ID|PATH|RULE", help="Show what was dropped: by id, file or rule.")
@click.option("--diff", "other", metavar="DIR", type=click.Path(path_type=Path), help="Compare with another build.")
@click.option("--run", metavar="RUN", help="Show the samples of a step of this run; DIR is not needed.")
@click.option("--step", type=click.IntRange(1), help="The step of --run.")
@click.option("--most", type=click.IntRange(1), default=_MOST, show_default=True, help="Rows to show.")
@json_option
@verbosity
@click.pass_context
def inspect_data(
    ctx: click.Context,
    folder: Path | None,
    record: str | None,
    reject: str | None,
    other: Path | None,
    run: str | None,
    step: int | None,
    most: int,
    as_json: bool,
) -> None:
    """Show what is in a built dataset, what was dropped, or what a step of a run was trained on.

    DIR is the folder of `tilewright data build`. Without an option: its counts, domains and reasons.
    """
    if (run is None) != (step is None):
        raise click.UsageError("--run and --step belong together.", ctx)
    if run is not None and step is not None:
        _step(find_run(run), step, most, as_json)
        return
    if folder is None:
        raise click.UsageError("DIR, the folder of a built dataset, or --run RUN --step N.", ctx)
    from tilewright.data.build.finished.open_built import find_records, read_dataset

    content = read_dataset(folder)
    if other is not None:
        _diff(content, read_dataset(other), as_json)
    elif record is not None:
        _rows(list(find_records(folder, "records", record, most)), f"record {record!r}", as_json)
    elif reject is not None:
        _rows(list(find_records(folder, "rejects", reject, most)), f"reject {reject!r}", as_json)
    elif as_json:
        print_json(content)
    else:
        _overview(content["summary"])


def _overview(summary: dict[str, Any]) -> None:
    from tilewright.data.corpus.account import account_line

    echo(account_line(summary))
    rows = [
        (name, f"{d['docs']:,}", format_bytes(d["bytes"]), f"{d['tokens']:,}", f"{d['holdout_docs']:,}")
        for name, d in summary["domains"].items()
    ]
    show_table(("domain", "records", "text", "tokens", "held out"), rows)


def _rows(found: list[dict[str, Any]], what: str, as_json: bool) -> None:
    if not found:
        raise DataError(f"No such {what}", need="an id, its beginning, or part of a file's name", got="nothing found")
    if as_json:
        print_json(found)
        return
    for row in found:
        for name, value in row.items():
            if value not in (None, "", "{}"):
                text = str(value)
                echo(f"{name}: {text[:_SHOWN_CHARS]}{' ...' if len(text) > _SHOWN_CHARS else ''}")
        echo()


def _diff(here: dict[str, Any], there: dict[str, Any], as_json: bool) -> None:
    from tilewright.data.build.finished.diff import differences

    found = differences(here, there)
    if as_json:
        print_json(found)
        return
    for name, value in found.items():
        if isinstance(value, list):
            show_table(("setting" if name == "settings" else name, "here", "there"), value)
            echo()
        else:
            echo(f"{name}: {value}")


def _step(run: Path, step: int, most: int, as_json: bool) -> None:
    from tilewright.training.components.samples import samples_of_step

    found = samples_of_step(run, step)
    if as_json:
        print_json(found)
        return
    echo(f"step {step}: {len(found)} samples")
    for sample in found[:most]:
        echo(f"sample {sample['sample']}: domain {sample['domain']}, epoch {sample['epoch']}, row {sample['row']}")
        for document in sample["documents"]:
            echo(f"  {document['name']}, tokens {document['start']}-{document['start'] + document['length']}", 4)
            echo(f"    {document['text'][:_SHOWN_CHARS]!r}", 4)
