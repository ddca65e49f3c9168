"""Answer to the page: runs with their curves, settings, other runs that it may ask for, and the machine's load."""

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tilewright.report.watch.curves import X_NAMES, downsample, stretch_for
from tilewright.report.watch.run_set import RunSet
from tilewright.report.watch.system_load import SystemLoad
from tilewright.report.watch.watched_run import WatchedRun

MAX_SHOWN = 8
"""Most runs in one view: the report has as many colours."""
DEFAULT_POINTS, MAX_POINTS = 400, 2000
_MAX_KEY = 40


class BadQuery(ValueError):
    """A request that no page of ours makes."""


@dataclass(frozen=True)
class ViewQuery:
    """Request of a page.

    `keys`: runs, None for those of the start. `known`: version of each run that the page already has. `x`: of
    `curves.X_NAMES`. `start`, `end`: range of x. `points`: most per curve, but for two neighbours.
    """

    keys: Sequence[str] | None = None
    known: Mapping[str, str] | None = None
    x: str = "step"
    start: float | None = None
    end: float | None = None
    points: int = DEFAULT_POINTS

    @classmethod
    def parse(cls, fields: Mapping[str, str]) -> "ViewQuery":
        """Read a query of the watching page from the fields of an address.

        Raises:
            BadQuery: a field is not what it must be.
        """
        unknown = set(fields) - {"runs", "known", "x", "from", "to", "points"}
        if unknown:
            raise BadQuery(f"unknown field {sorted(unknown)[0][:_MAX_KEY]}")
        x, points = fields.get("x", "step"), fields.get("points", str(DEFAULT_POINTS))
        if x not in X_NAMES:
            raise BadQuery("x is not step, time or tokens")
        if not (points.isascii() and points.isdigit() and len(points) < 6 and 2 <= int(points) <= MAX_POINTS):
            raise BadQuery(f"points is not between 2 and {MAX_POINTS}")
        keys = [key for key in fields["runs"].split(",") if key] if "runs" in fields else None
        if keys is not None and len(keys) > MAX_SHOWN:
            raise BadQuery(f"over {MAX_SHOWN} runs")
        return cls(keys, _known(fields.get("known", "")), x, _bound(fields, "from"), _bound(fields, "to"), int(points))


def _known(text: str) -> dict[str, str]:
    pairs = [item.partition(":") for item in text.split(",") if item]
    return {key: version for key, _, version in pairs}


def _bound(fields: Mapping[str, str], name: str) -> float | None:
    if name not in fields:
        return None
    try:
        value = float(fields[name])
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise BadQuery(f"{name} is not a number")
    return value


def view(runs: RunSet, load: SystemLoad, query: ViewQuery) -> dict[str, Any]:
    """The view, answer to a query, in JSON types; a double that is not finite means no value."""
    found = [runs.find(key) for key in query.keys] if query.keys is not None else runs.first[:MAX_SHOWN]
    shown = [run for run in found if run is not None]
    for run in shown:
        run.refresh()
    stretches = _stretches(shown, query)
    return {
        "session": runs.session,
        "runs": [_run(run, runs.name(run), query, stretches) for run in shown],
        "offered": [
            {"key": run.key, "name": runs.name(run), "new": runs.is_new(run)} for run in runs.all() if run not in shown
        ],
        "system": load.sample(runs.parents[0]),
        "settings": all_settings(shown),
    }


def _stretches(runs: Sequence[WatchedRun], query: ViewQuery) -> dict[str, int]:
    """Values per point of each metric, the same in all watched runs: a longer run would look smoother than another
    otherwise."""
    counts: dict[str, int] = {}
    for run in runs:
        with run.lock:
            low, high = run.metrics.steps_between(query.x, query.start, query.end)
            for name in run.metrics.names():
                counts[name] = max(counts.get(name, 0), run.metrics.count(name, low, high))
    return {name: stretch_for(count, query.points) for name, count in counts.items()}


def _run(run: WatchedRun, name: str, query: ViewQuery, stretches: Mapping[str, int]) -> dict[str, Any]:
    """The state of a watched run and the content of its files, unless the page has that version."""
    with run.lock:
        names = run.metrics.names()
        version = f"{run.version}-{zlib.crc32(repr([stretches.get(metric) for metric in names]).encode()):x}"
        found: dict[str, Any] = {
            "key": run.key,
            "name": name,
            "path": str(run.folder),
            "status": run.status,
            "version": version,
            "step": run.last_step,
            "steps": run.setting("train.steps"),
            "trouble": run.trouble,
        }
        if (query.known or {}).get(run.key) == version:
            return found
        low, high = run.metrics.steps_between(query.x, query.start, query.end)
        curves = {}
        for metric in names:
            x, y = run.metrics.curve(metric, query.x, low, high)
            if not len(x):  # no time or no tokens are recorded
                continue
            # A run that was refreshed since by another page may have a metric more.
            drawn = downsample(x, y, stretches.get(metric) or stretch_for(len(x), query.points))
            curves[metric] = drawn.to_json(run.metrics.last(metric))
        return found | {"curves": curves, "events": list(run.events)[::-1], "samples": list(run.samples)[::-1]}


def all_settings(runs: Sequence[WatchedRun]) -> list[dict[str, Any]]:
    """Every setting with its value in each watched run, None where a run has none; `differs` where these are not equal.

    The run's own name differs always and says nothing: it is left out.
    """
    tables = [{setting.name: setting for setting in run.settings} for run in runs]
    names = dict.fromkeys(name for table in tables for name in table if name != "run.name")
    rows = []
    for name in names:
        found = [table.get(name) for table in tables]
        values = [None if setting is None else setting.value for setting in found]
        chosen = any(setting is not None and setting.source != "default" for setting in found)
        differs = len(set(values)) > 1
        rows.append({"name": name, "values": values, "differs": differs, "chosen": chosen})
    return rows
