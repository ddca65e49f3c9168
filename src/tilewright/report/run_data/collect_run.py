"""Everything the report needs, read from the run folder and from nowhere else.

A part that is missing is None, or an empty list where a list is meant; a line of a .jsonl file that cannot be
read is left out and counted. A number that is not finite is None (`clean_rows`): a row that has a loss of None was a
step whose loss was not finite. A run that was resumed may hold a step twice: the later row counts.
"""

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tomlkit
from pydantic import TypeAdapter
from tomlkit.container import Container
from tomlkit.exceptions import TOMLKitError
from tomlkit.items import Table

from tilewright.compress.exports_file import FILE as EXPORTS
from tilewright.core.errors import DataError
from tilewright.core.json_text import from_json
from tilewright.energy.energy_record import ENERGY, EnergyRecord
from tilewright.energy.energy_record import FILE as ENERGY_FILE
from tilewright.parallel.pipeline.balance.measured_step import FILE as PIPELINE
from tilewright.precision.controller.controller_log import History, read_history
from tilewright.report.run_data.clean_rows import Row, clean, eval_row, number, plan_of, step_row
from tilewright.training.runlog import recorded_tables, task_scores
from tilewright.training.runlog.task_scores import TaskScore

MOST_STEPS = 2**53
"""Steps that a double counts; a row of a higher one is no row of a run."""


@dataclass(frozen=True)
class RecordedSetting:
    """One line of the resolved recipe: `section.name`, its value as written, and where the value came from."""

    name: str
    value: str
    source: str


@dataclass(frozen=True)
class RunData:
    """A run folder as read. `trouble` lists what could not be read, in words."""

    path: Path
    name: str
    steps: Sequence[Row] = ()
    evals: Sequence[Row] = ()
    events: Sequence[Row] = ()
    samples: Sequence[Row] = ()
    tasks: Sequence[TaskScore] = ()
    machine: Row | None = None
    plan: Row | None = None
    data: Row | None = None
    precision: Sequence[Row] = ()
    history: History | None = None
    exports: Row | None = None
    ranks: Row | None = None
    pipeline: Row | None = None
    energy: EnergyRecord | None = None
    recipe: Mapping[str, Any] = field(default_factory=dict)
    settings: Sequence[RecordedSetting] = ()
    trouble: Sequence[str] = ()

    def column(self, key: str) -> tuple[list[float], list[float]]:
        """Steps and values of a metric of a run, where it was recorded as a number."""
        rows = [(float(row["step"]), value) for row in self.steps if (value := number(row.get(key))) is not None]
        return [step for step, _ in rows], [value for _, value in rows]

    def number_setting(self, section: str, name: str) -> float | None:
        """A setting of the collected data of a run as a number, of the resolved recipe; None where it is not recorded
        or none."""
        return number(self.setting(section, name))

    def planned(self, key: str) -> float | None:
        """A planned number of the collected data of a run, None where it is not recorded or not known."""
        return number((self.plan or {}).get(key))

    def corrected(self, key: str) -> float | None:
        """A number of the run's plan as it was corrected after the first steps; None if it was not."""
        corrected = (self.plan or {}).get("corrected")
        return number(corrected.get(key)) if isinstance(corrected, Mapping) else None

    def setting(self, section: str, name: str) -> Any:
        """The value of a setting in a run's resolved recipe; None where it is not recorded."""
        values = self.recipe.get(section)
        return values.get(name) if isinstance(values, Mapping) else None

    def kinds(self, *kinds: str) -> list[Row]:
        """Events of these kinds in the collected data of a run, in order."""
        return [row for row in self.events if row.get("kind") in kinds]


def collect(run_dir: Path) -> RunData:
    """Collect everything that the report needs from a run folder.

    Raises:
        FileNotFoundError: there is no such folder.
    """
    if not run_dir.is_dir():
        raise FileNotFoundError(f"no run folder {run_dir}")
    # `trouble` collects what could not be used: a page of a damaged run is made of the rest, and says so.
    trouble: list[str] = []
    rows, samples = (_read_lines(run_dir / name, trouble) for name in ("metrics.jsonl", "samples.jsonl"))
    text, recipe = _read_recipe(run_dir / "run.toml", trouble)
    modules = _read_json(run_dir / "precision.json", trouble)
    machine = _as_dict(_read_json(run_dir / "machine.json", trouble))
    if machine is not None:
        kernels = _usable(recorded_tables.KERNEL, machine.get("kernels"), "machine.json: kernels", trouble)
        machine = machine | {"kernels": kernels}
    return RunData(
        path=run_dir,
        name=run_dir.resolve().name,
        steps=_latest_by_step([step_row(row) for row in rows if "eval" not in row]),
        evals=_latest_by_step([eval_row(row) for row in rows if "step" in row and isinstance(row.get("eval"), dict)]),
        events=_read_lines(run_dir / "events.jsonl", trouble),
        samples=[_sample(row) for row in _usable(recorded_tables.SAMPLE, samples, "samples.jsonl", trouble)],
        tasks=_read_tasks(run_dir, trouble),
        machine=machine,
        plan=plan_of(_as_dict(_read_json(run_dir / "plan.json", trouble))),
        data=_as_dict(_read_json(run_dir / "data.json", trouble)),
        precision=_usable(recorded_tables.MODULE, _as_rows(modules), "precision.json", trouble),
        history=_read_history(run_dir, trouble),
        exports=_as_dict(_read_json(run_dir / EXPORTS, trouble)),
        ranks=_as_dict(_read_json(run_dir / "ranks.json", trouble)),
        pipeline=_as_dict(_read_json(run_dir / PIPELINE, trouble)),
        energy=_read_energy(run_dir, trouble),
        recipe=recipe,
        settings=recorded_settings(text),
        trouble=trouble,
    )


def _read_energy(run_dir: Path, trouble: list[str]) -> EnergyRecord | None:
    table = _read_json(run_dir / ENERGY_FILE, trouble)
    found, bad = recorded_tables.usable(ENERGY, [] if table is None else [table])
    if bad:
        trouble.append(f"{ENERGY_FILE} is not as train writes it and left out")
    return found[0] if found else None


def _usable(declared: TypeAdapter[Any], values: Any, name: str, trouble: list[str]) -> list[Row]:
    """Take the rows of a table that have their declared types, and count the others."""
    found, bad = recorded_tables.usable(declared, values)
    if bad:
        trouble.append(f"{name}: {bad} {'row is' if bad == 1 else 'rows are'} not as train writes them and left out")
    return found


def _sample(row: Row) -> Row:
    return {name: row.get(name, "") for name in ("step", "domain", "prompt", "text", "reference")}


def _as_dict(value: object) -> Row | None:
    return value if isinstance(value, dict) else None


def _as_rows(value: object) -> list[Row]:
    """Collected rows of a table that is a list, or is under "rows"."""
    if isinstance(value, dict):
        value = value.get("rows")
    return [row for row in value if isinstance(row, dict)] if isinstance(value, list) else []


def _read_text(path: Path, trouble: list[str]) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return None
    except OSError as error:
        trouble.append(f"{path.name} cannot be read: {error.strerror}")
        return None


def _read_json(path: Path, trouble: list[str]) -> Any:
    text = _read_text(path, trouble)
    if text is None:
        return None
    try:
        return clean(from_json(text))
    except ValueError as error:
        trouble.append(f"{path.name} is not JSON: {error}")
        return None


def _read_lines(path: Path, trouble: list[str]) -> list[Row]:
    """Collect the objects of a .jsonl file; a corrupt last line is normal after a kill and counts like any other bad
    line."""
    rows, bad = [], 0
    for line in (_read_text(path, trouble) or "").splitlines():
        if not line.strip():
            continue
        try:
            row = from_json(line)
        except ValueError:
            row = None
        if isinstance(row, dict):
            rows.append(clean(row))
        else:
            bad += 1
    if bad:
        trouble.append(f"{path.name}: {bad} {'line is' if bad == 1 else 'lines are'} not JSON objects and left out")
    return rows


def _latest_by_step(rows: Sequence[Row]) -> list[Row]:
    by_step = {row["step"]: row for row in rows if isinstance(row.get("step"), int) and abs(row["step"]) < MOST_STEPS}
    return [by_step[step] for step in sorted(by_step)]


def _read_tasks(run_dir: Path, trouble: list[str]) -> list[TaskScore]:
    try:
        return task_scores.read(run_dir)
    except DataError as error:
        trouble.append(f"{task_scores.FILE} cannot be read: {error.problems[0].got}")
        return []


def _read_history(run_dir: Path, trouble: list[str]) -> History | None:
    """Collect samples and moves of the precision controller; None where there was none."""
    try:
        history = read_history(run_dir)
    except (OSError, ValueError, KeyError, TypeError) as error:
        trouble.append(f"precision.jsonl cannot be read: {error}")
        return None
    return history if history.samples else None


def _read_recipe(path: Path, trouble: list[str]) -> tuple[str, Row]:
    text = _read_text(path, trouble) or ""
    try:
        return text, tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        trouble.append(f"{path.name} is not TOML: {error}")
        return text, {}


def recorded_settings(text: str) -> list[RecordedSetting]:
    """Collect the settings of a recipe with the comment behind each value, which names its source; none where it is no
    TOML.

    Example:
        >>> [found] = recorded_settings('[run]\\nname = "a # b"  # typed')
        >>> found.name, found.value, found.source
        ('run.name', '"a # b"', 'typed')
    """
    try:
        document = tomlkit.parse(text)
    except TOMLKitError:
        return []
    return list(_settings_of(document, ""))


def _settings_of(table: Container, prefix: str) -> Iterator[RecordedSetting]:
    for key, item in table.body:
        if key is None:  # an empty line, or a comment
            continue
        if isinstance(item, Table):
            yield from _settings_of(item.value, f"{prefix}{key.key}.")
        else:
            value = " ".join(item.as_string().splitlines())
            yield RecordedSetting(prefix + key.key, value, item.trivia.comment.lstrip("# "))
