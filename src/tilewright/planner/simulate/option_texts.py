"""The texts of `tilewright simulate`'s options, read: slow ranks, links, durations, sizes, a table from a file."""

import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from tilewright.core.config.sections.parallel import INTERLEAVED, V_SCHEDULES, ScheduleName
from tilewright.core.errors import ConfigError, DataError
from tilewright.core.units import parse_bytes
from tilewright.parallel.pipeline.stage_split import Pipeline
from tilewright.planner.simulate.pass_costs import Link, Network
from tilewright.planner.simulate.schedule_formulas import Failures
from tilewright.planner.simulate.schedule_table import ScheduleTable
from tilewright.planner.simulate.step_case import SimulatedCase

_SECONDS = re.compile(r"([0-9]*\.?[0-9]+(?:e-?[0-9]+)?)\s*(us|ms|s|m|h)?")
_UNITS = {None: 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "m": 60.0, "h": 3600.0}


_LONGEST = 1e9
"""Seconds: 30 years. Sums of as many as doubles hold are none any more."""


def seconds_of(text: str, option: str) -> float:
    """Seconds from the text of an option: `100ms`, `5us`, `0.1s`, `15m`, `2.7h` or a plain number.

    Raises:
        ConfigError: no duration.

    Example:
        >>> seconds_of("250ms", "--forward"), seconds_of("2", "--data")
        (0.25, 2.0)
    """
    match = _SECONDS.fullmatch(text.strip().lower())
    seconds = math.nan if match is None else float(match[1]) * _UNITS[match[2]]
    if not seconds <= _LONGEST:
        raise ConfigError(
            f"{option} is not a duration",
            got=text,
            need=f"a number and us, ms, s, m or h, at most {_LONGEST:g} seconds",
            try_=f"{option} 100ms",
            where=option,
        )
    return seconds


def failures_of(every: str, checkpoint: str, stall: str, recover: str) -> Failures | None:
    """Failures from the texts of the options `--fail-every` and its companions; None where nothing fails.

    Raises:
        ConfigError: no durations, or no time between failures or checkpoints.
    """
    if not every:
        return None
    found = Failures(
        seconds_of(every, "--fail-every"),
        seconds_of(checkpoint, "--checkpoint-every"),
        seconds_of(stall, "--checkpoint-stall"),
        seconds_of(recover, "--recover"),
    )
    for option, seconds in (("--fail-every", found.every_s), ("--checkpoint-every", found.interval_s)):
        if not seconds:
            raise ConfigError(f"{option} is no time", got="0", need="above 0", try_=f"{option} 1h", where=option)
    return found


def size_of(text: str, option: str) -> int:
    """Bytes from the text of an option, such as `16MiB`.

    Raises:
        ConfigError: no size.
    """
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise ConfigError(
            f"{option} is not a size", got=text, need="a number and a unit", try_=f"{option} 16MiB", where=option
        ) from error


def speeds_of(texts: Sequence[str], world: int) -> tuple[float, ...]:
    """Speeds of all ranks from the text of an option, `13=0.8` or `8-15=0.8`; other ranks have 1.

    Raises:
        ConfigError: no such rank, one that is named twice, or a speed that is not above zero.

    Example:
        >>> speeds_of(["1-2=0.5"], world=4)
        (1.0, 0.5, 0.5, 1.0)
    """
    found: dict[int, float] = {}
    for text in texts:
        match = re.fullmatch(r"(\d+)(?:-(\d+))?=([0-9]*\.?[0-9]+)", text.strip())
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, -1)
        ranks = range(first, last + 1)
        again = any(rank in ranks for rank in found)
        if not match or float(match[3]) <= 0 or not ranks or last >= world or again:
            twice = " once" if again else ""
            raise ConfigError(
                "--slow names no rank and its speed",
                got=text,
                need=f"RANK=SPEED or FIRST-LAST=SPEED, ranks from 0 to {world - 1}{twice}, a speed above 0",
                try_=f"--slow {world // 2}=0.8",
                where="--slow",
            )
        found |= dict.fromkeys(ranks, float(match[3]))
    return tuple(found.get(rank, 1.0) for rank in range(world)) if found else ()


def network_of(texts: Sequence[str], ranks_per_node: int, message: int) -> Network:
    """Links from the text of an option, `inter=50GB/s` or `intra=400GB/s,5us` (with latency). Others take no time.

    Raises:
        ConfigError: no such link, a rate that is none, links over which nothing travels, or nodes and messages that
            no link makes take time.
    """
    links: dict[str, Link] = {}
    # 1. Each link by itself.
    for text in texts:
        match = re.fullmatch(r"(\w+)=([^,]+?)/s(?:,(.+))?", text.strip())
        if match is None or match[1] not in ("inter", "intra") or match[1] in links:
            raise ConfigError(
                "--link names no link and its rate",
                got=text,
                need="inter=RATE (out of a node, shared by its ranks) or intra=RATE (between two ranks of a node), "
                "each once, such as 50GB/s; a latency may follow",
                try_="--link inter=50GB/s,5us",
                where="--link",
            )
        rate = size_of(match[2], "--link")
        if rate == 0:
            raise ConfigError(
                "--link has no rate",
                got=text,
                need="bytes per second above 0",
                try_="--link inter=50GB/s",
                where="--link",
            )
        links[match[1]] = Link(float(rate), seconds_of(match[3], "--link") if match[3] else 0.0)
    # 2. Links, messages and nodes together: what would change nothing is a mistake.
    if links and not message:
        raise ConfigError(
            "Links without messages have no effect",
            got=f"--link {texts[0]}, and messages of 0 bytes",
            need="how many bytes a micro-batch sends from stage to stage",
            try_="--message 64MiB",
            where="--message",
        )
    idle = ["--message"] if message and not links else ["--node"] if ranks_per_node > 1 and not links else []
    if idle or ("intra" in links and ranks_per_node == 1):
        option, link = ("--node", "intra") if not idle else (idle[0], "inter")
        raise ConfigError(
            "Messages between stages take no time" if idle else "Link inside of nodes of one rank has no effect",
            got=f"{option} and no --link" if idle else f"--link intra and --node {ranks_per_node}",
            need="the rate of a link" if idle else "how many ranks share a node",
            try_=f"--link {link}=50GB/s with {option}" if idle else "--node 8",
            where=option,
        )
    return Network(ranks_per_node, links.get("intra", Link()), links.get("inter", Link()))


def pipeline_of(pp: int, schedule: str, virtual: int | None) -> Pipeline:
    """A schedule's pipeline from the texts of options.

    Args:
        pp: ranks in a row.
        schedule: its name.
        virtual: stages per rank; None: one, or two where the schedule needs them.

    Raises:
        ConfigError: the schedule has another number of stages per rank.
    """
    names: dict[str, ScheduleName] = {name: name for name in get_args(ScheduleName)}
    name = names[schedule]
    interleaved = name in INTERLEAVED
    least = 2 if name in V_SCHEDULES or name in ("interleaved", "interleaved_deferred") else 1
    stages = virtual if virtual is not None else 2 if interleaved else least
    if stages < least or (stages > least and not interleaved):
        raise ConfigError(
            f'Schedule "{schedule}" has another number of stages per rank',
            got=f"--virtual-stages {stages}",
            need=f"{least}{' or more' if interleaved else ''}",
            try_=f"--virtual-stages {least}",
            where="--virtual-stages",
        )
    return Pipeline(pp, name, stages)


def check_case(case: SimulatedCase) -> None:
    """Raise where a case cannot be simulated, in the words of the options.

    Raises:
        ConfigError: fewer layers than stages, or a number of micro-batches that the schedule does not take.
    """
    pipeline, count, stages = case.pipeline, case.count, case.pipeline.num_stages
    if case.layers < stages:
        raise ConfigError(
            "Fewer layers than stages of the pipeline",
            got=f"--layers {case.layers}, {stages} stages: {pipeline.virtual} on each of {pipeline.pp} ranks",
            need="at least one layer per stage",
            try_=f"--layers {stages}",
            where="--layers",
        )
    if not pipeline.takes(count):
        fit = next(one for one in itertools.count(count + 1) if pipeline.takes(one))
        raise ConfigError(
            f'Number of micro-batches that schedule "{pipeline.schedule}" does not take',
            got=f"--microbatches {count}, --pp {pipeline.pp}",
            need=f"{fit}, or --schedule gpipe, which takes any number",
            try_=f"--microbatches {fit}",
            where="--microbatches",
        )


@dataclass(frozen=True)
class FileTable:
    """A table from a file, and a pipeline with its ranks and stages."""

    table: ScheduleTable
    pipeline: Pipeline


def table_from(path: Path) -> FileTable:
    """The table of an option's CSV file, one line per rank, as torch's `_dump_csv` writes it.

    Raises:
        DataError: no such file, or no text.
        ConfigError: the table is not a whole step, or ranks have different numbers of stages.
    """
    try:
        rows = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            "Schedule table cannot be read",
            got=str(error),
            need="a text file with one line of passes per rank",
            try_="schedule._dump_csv(FILE) of a schedule of torch's",
            where=str(path),
        ) from error
    table = ScheduleTable.parse(rows, str(path))
    stages, ranks = table.num_stages, table.num_ranks
    counts = {sum(of == rank for of in table.rank_of) for rank in range(ranks)}
    if len(counts) > 1:
        raise ConfigError(
            "Schedule table has ranks with different numbers of stages",
            got=f"{stages} stages on {ranks} ranks, {min(counts)} to {max(counts)} each",
            need="as many stages on each rank",
            try_="a table of torch's: `schedule._dump_csv(FILE)`",
            where=str(path),
        )
    virtual = stages // ranks
    return FileTable(table, Pipeline(ranks, "1f1b" if virtual == 1 else "interleaved", virtual))
