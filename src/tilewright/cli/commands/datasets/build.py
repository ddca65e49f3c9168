"""`tilewright data build`: from raw files to a clean, tokenised dataset, in stages that survive a kill."""

import os
from pathlib import Path
from typing import Any

import click

from tilewright.cli.common import PathName, json_option, print_json, verbosity
from tilewright.core import env
from tilewright.core.log import say
from tilewright.core.units import format_bytes, format_count


@click.command()
@click.argument("settings", default="data.toml", metavar="[DATA.TOML]", type=PathName())
@click.option("--out", type=PathName(), help="Folder of the dataset. Default: the TOML's name.")
@click.option("--processes", type=click.IntRange(1), help="Processes of this machine. Default: one per core.")
@click.option(
    "--executor",
    type=click.Choice(["local", "rank", "ray"]),
    default="local",
    show_default=True,
    help="`rank`: this process is one of those that torchrun or a Slurm array started. `ray`: tasks of Ray, on the "
    "cluster that RAY_ADDRESS names, else on this machine.",
)
@json_option
@verbosity
def build(settings: Path, out: Path | None, processes: int | None, executor: str, as_json: bool) -> None:
    """Build a dataset from the files that data.toml names.

    DATA.TOML holds the settings; `data.toml` here if left out. `mixing_data` is a shipped one, of the recipe
    `mixing_cpu`. The same command continues a build that was stopped, and
    after a change of settings makes only what depends on it. OUT then trains with `--data.source OUT`, and holds
    report.html, records and rejects as Parquet.
    """
    from tilewright.cli.app import check_one_process
    from tilewright.data.common.progress import ProgressBar
    from tilewright.data.dataset.account import account_line
    from tilewright.data.engine.build_dataset import build_dataset
    from tilewright.data.engine.build_settings import load_data_toml

    # Processes under torchrun would each build the whole folder; those of `rank` share its units.
    if executor != "rank":
        check_one_process(f"data build --executor {executor}")
    loaded = load_data_toml(settings)
    folder = out or settings.with_suffix("")
    chosen = _executor(executor, processes)
    with ProgressBar("data build") as progress, chosen as running:
        content = build_dataset(loaded, folder, running, progress)
    if not chosen.is_first:
        return
    # The account is read from the folder, so that a continued build reports the units of earlier commands too.
    from tilewright.data.dataset.build_account import build_account
    from tilewright.report.pages.build_page import write_build_page

    account = build_account(folder)
    page = write_build_page(account)
    if as_json:
        print_json(content)
        return
    summary, units = content["summary"], content["units"]
    say(account_line(summary))
    domains = sum(any(n for kind, n in one.items() if kind != "dropped") for one in summary["records"].values())
    exact, near = summary["duplicates"], summary["near_duplicates"]
    say(
        f"{exact:,} exact duplicate{'s' * (exact != 1)} and {near:,} near-cop{'y' if near == 1 else 'ies'} dropped | "
        f"{format_count(summary['tokens'])} tokens, {format_bytes(summary['bytes'])}, "
        f"{domains} domain{'s' * (domains != 1)}"
    )
    failed = sum(stage.counts.get("failed", 0) for stage in account.stages)
    if failed:
        say(f"records on which a filter failed: {failed:,} | tilewright data inspect {folder} --reject '*: failed'")
    for model in account.models:
        say(model.line)
    say(f"{units['made']} units made, {units['finished before']} finished before | {page}")
    rows = f" --data.format {loaded.chat.format}" if loaded.chat.is_on else ""
    click.echo(f"tilewright train --data.source {folder}{rows}")


def _executor(name: str, processes: int | None) -> Any:
    """The executor of `data build` of that name, a context manager."""
    from tilewright.data.engine.executors.local_executor import LocalExecutor
    from tilewright.data.engine.executors.rank_executor import RankExecutor
    from tilewright.data.engine.executors.ray_executor import RayExecutor

    if name == "rank":
        if processes is not None:
            raise click.UsageError("--processes is for --executor local and ray; a rank is one process.")
        ranks = env.job_ranks()
        return RankExecutor(ranks.rank, ranks.world)
    here = processes or len(os.sched_getaffinity(0))
    if name == "local":
        return LocalExecutor(here, apart=True)
    cluster = env.ray_address()
    if cluster and processes is not None:
        raise click.UsageError(f"--processes is for this machine; the Ray cluster {cluster} has its own number.")
    return RayExecutor(cluster, here)
