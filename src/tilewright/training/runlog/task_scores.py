"""Results of published tasks in a run folder, tasks.json: of the run's model and of the one that it began with.

A row is one metric of one task, with the conditions that it was measured under. All rows of a task have the same
conditions: who measures under others replaces them, so what stands side by side can be compared.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tilewright.core.atomic_io import write_whole
from tilewright.core.errors import DataError
from tilewright.core.json_text import to_json
from tilewright.training.runlog.run_folder import cannot_write

FILE = "tasks.json"
RUN, BASE = "run", "base"


@dataclass(frozen=True)
class Conditions:
    """Conditions that scores of a task must share to be compared.

    Args:
        harness: name and version.
        version: of the task.
        num_fewshot: examples in each prompt; None: of a group, whose tasks differ.
        limit: documents that were asked for; None: all.
        samples: documents that were evaluated.
        chat_template: whether prompts were rendered by the model's chat template.
    """

    harness: str
    version: str
    num_fewshot: int | None
    limit: int | None
    samples: int
    chat_template: bool


@dataclass(frozen=True)
class TaskScore:
    """One metric of one task.

    Args:
        role: "run", or "base" for the model that the run began with.
        model: the checkpoint, or the base model's name.
        task: or group.
        metric: such as acc.
        filter: what the harness does with answers first; "none".
        value: None: not a number.
        stderr: standard error of the value; None: not known.
        higher_is_better: None: the task does not say.
        conditions: under which it was measured.
    """

    role: str
    model: str
    task: str
    metric: str
    filter: str
    value: float | None
    stderr: float | None
    higher_is_better: bool | None
    conditions: Conditions

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> "TaskScore":
        """A score of a task from a row of tasks.json.

        Raises:
            KeyError, TypeError: it is no such row.
        """
        conditions = Conditions(**{name: row[name] for name in Conditions.__dataclass_fields__})
        own = {name: row[name] for name in cls.__dataclass_fields__ if name != "conditions"}
        return cls(**own, conditions=conditions)

    def to_json(self) -> dict[str, Any]:
        """A score of a task as a flat row of tasks.json."""
        row = asdict(self)
        return row | row.pop("conditions")


def merge(old: Sequence[TaskScore], new: Sequence[TaskScore]) -> list[TaskScore]:
    """Merge scores of tasks: new rows after those of `old` that stay: of other tasks, and of the other role under the
    same conditions."""
    fresh = {(row.task, row.role) for row in new}
    conditions = {row.task: row.conditions for row in new}
    kept = [
        row
        for row in old
        if (row.task, row.role) not in fresh and conditions.get(row.task, row.conditions) == row.conditions
    ]
    return [*kept, *new]


def read(folder: Path) -> list[TaskScore]:
    """Read the scores of tasks of a run folder; none where no task was evaluated.

    Raises:
        DataError: the file is not what `write` wrote.
    """
    path = folder / FILE
    if not path.is_file():
        return []
    try:
        return [TaskScore.from_json(row) for row in json.loads(path.read_bytes())["rows"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            "Unreadable file of task results",
            got=f"{type(error).__name__}: {str(error)[:200]}",
            need="the file as `tilewright eval --tasks` wrote it",
            try_=f"delete {path} and evaluate again",
            where=str(path),
        ) from error


def write(folder: Path, rows: Sequence[TaskScore]) -> Path:
    """Write the scores of tasks, whole or not at all; the file's path.

    Raises:
        ConfigError: it cannot be written.
    """
    path = folder / FILE
    try:
        write_whole(path, to_json({"rows": [row.to_json() for row in rows]}, indent=1) + "\n")
    except OSError as error:
        raise cannot_write(path, error) from error
    return path
