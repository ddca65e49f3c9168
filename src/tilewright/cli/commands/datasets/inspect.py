"""`tilewright data inspect`: a record, a reject, the diff of two builds, or the samples of a training step."""

import difflib
import shlex
from itertools import islice
from pathlib import Path
from typing import Any

import click

from tilewright.cli.common import PathName, echo, find_run, json_option, print_json, show_table, verbosity
from tilewright.core.errors import DataError
from tilewright.core.units import format_bytes

_SHOWN_CHARS = 400
_MOST = 5
_MOST_REASONS = 12  # in an error, which is at most a screen


@click.command("inspect")
@click.argument("folder", required=False, metavar="[DIR]", type=PathName())
@click.option("--record", metavar="ID|PATH", help="Show records by id, its beginning, or file; a glob too.")
@click.option("--reject", metavar="ID|PATH|RULE", help="Show what was dropped, by id, file, rule or stage; a glob too.")
@click.option("--diff", "other", metavar="DIR", type=PathName(), help="Compare with another build.")
@click.option("--run", metavar="RUN", help="Show the samples of a step of this run, without DIR.")
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
    given = {"--record": record, "--reject": reject, "--diff": other, "--run": run, "DIR": run and folder}
    several = [name for name, value in given.items() if value is not None]
    if len(several) > 1:
        raise click.UsageError(f"{' and '.join(several)} are each for another question: one of them.", ctx)
    if (run is None) != (step is None):
        lacking = "--step N" if step is None else "--run RUN"
        raise click.UsageError(f"--run and --step belong together: {lacking} is missing.", ctx)
    if run is not None and step is not None:
        _step(find_run(run), step, most, as_json)
        return
    if folder is None:
        raise click.UsageError("data inspect needs DIR, the folder of a built dataset, or --run RUN --step N.", ctx)
    from tilewright.data.dataset.open_built import read_dataset

    content = read_dataset(folder)
    if other is not None:
        _diff(content, read_dataset(other), as_json)
    elif record is not None:
        _rows(folder, "records", record, most, as_json)
    elif reject is not None:
        _rows(folder, "rejects", reject, most, as_json)
    elif as_json:
        print_json(content)
    else:
        _overview(folder, content["summary"])


def _overview(folder: Path, summary: dict[str, Any]) -> None:
    from tilewright.data.dataset.account import account_line
    from tilewright.data.dataset.build_account import MODALITIES, NO_DOMAIN, reasons_of

    echo(account_line(summary))
    rows = []
    for name, records in summary["records"].items():
        text = summary["domains"].get(name)
        of_text = ["", "", ""]
        if text is not None:
            of_text = [format_bytes(text["bytes"]), *_numbers(text, "tokens", "holdout_docs")]
        rows.append((name or NO_DOMAIN, *_numbers(records, *MODALITIES), *of_text, f"{records['dropped']:,}"))
    show_table(("domain", "texts", "images", "sounds", "text", "tokens", "held out", "dropped"), rows)
    echo(f"encoded by {summary['encoder']}")
    for note in summary["notes"]:
        echo(note)
    reasons: dict[tuple[str, str], int] = {}
    for one in reasons_of(folder):
        reasons[one.stage, one.rule] = reasons.get((one.stage, one.rule), 0) + one.count
    if reasons:
        echo()
        show_table(("stage", "reason", "dropped"), [(*names, f"{count:,}") for names, count in reasons.items()])


def _numbers(counts: dict[str, int], *names: str) -> list[str]:
    return [f"{counts.get(name, 0):,}" for name in names]


def _rows(folder: Path, kind: str, wanted: str, most: int, as_json: bool) -> None:
    from tilewright.data.dataset.open_built import find_records

    matching = find_records(folder, kind, wanted)
    found = list(islice(matching, most))
    if not found:
        raise _none(folder, kind, wanted)
    if as_json:
        print_json(found)
        return
    for row in found:
        for name, value in row.items():
            if value not in (None, "", "{}"):
                text = str(value)
                echo(f"{name}: {text[:_SHOWN_CHARS]}{' ...' if len(text) > _SHOWN_CHARS else ''}")
        echo()
    more = sum(1 for _ in matching)
    if more:
        echo(f"{more:,} more: --most {len(found) + more}")


def _none(folder: Path, kind: str, wanted: str) -> DataError:
    """`data inspect` without a match: the reasons that there are, and the one that was meant."""
    from tilewright.data.dataset.build_account import reasons_of
    from tilewright.data.dataset.open_built import find_records

    option, other = ("--reject", "--record") if kind == "rejects" else ("--record", "--reject")
    need = "an id or its beginning, or the name or path of a file; * stands for anything"
    # 1. What could have been named: stages and rules that dropped something, with their counts.
    names: dict[str, int] = {}
    if kind == "rejects":
        for reason in reasons_of(folder):
            for name in dict.fromkeys((reason.stage, reason.rule)):
                names[name] = names.get(name, 0) + reason.count
        listed = "\n".join(f"{name} ({count:,})" for name, count in islice(names.items(), _MOST_REASONS))
        if len(names) > _MOST_REASONS:
            listed += f"\n{len(names) - _MOST_REASONS} others: tilewright data inspect {shlex.quote(str(folder))}"
        need += "; or a stage or rule that dropped something:\n" + listed if names else "; nothing was dropped"
    # 2. What may have been meant: the same text in the other table, else a name that is close to it or holds it.
    near = difflib.get_close_matches(wanted, names, n=1) or [name for name in names if wanted.lower() in name.lower()]
    if next(find_records(folder, "records" if kind == "rejects" else "rejects", wanted), None) is not None:
        option, meant = other, wanted
    else:
        meant = near[0] if near else f"*{wanted}*"
    what = "reject" if kind == "rejects" else "record"
    return DataError(
        f"No {what} matches {wanted!r}",
        where=str(folder),
        got="nothing found",
        need=need,
        try_=f"tilewright data inspect {shlex.quote(str(folder))} {option} {shlex.quote(meant)}",
    )


def _diff(here: dict[str, Any], there: dict[str, Any], as_json: bool) -> None:
    from tilewright.data.dataset.diff_builds import differences

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
    from tilewright.training.components.run_samples import left_out, samples_of_step

    found = samples_of_step(run, step)
    if as_json:
        print_json(found)
        return
    for first, stop, why in left_out(run):
        echo(f"samples {first:,} to {stop - 1:,} are left out ({why})")
    tokens = sum(document["length"] for sample in found for document in sample["documents"])
    echo(f"step {step}: {len(found)} samples, {tokens:,} tokens")
    for sample in found[:most]:
        echo(f"sample {sample['sample']}: domain {sample['domain']}, epoch {sample['epoch']}, row {sample['row']}")
        for document in sample["documents"]:
            echo(f"  {document['name']}, tokens {document['start']}-{document['start'] + document['length']}", 4)
            echo(f"    {document['text'][:_SHOWN_CHARS]!r}", 4)
