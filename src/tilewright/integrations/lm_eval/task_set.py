"""The harness' tasks by name, and an error for each way in which one cannot be had."""

import contextlib
import difflib
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
from lm_eval.api.task import Task
from lm_eval.tasks import TaskManager
from yaml import YAMLError

from tilewright.core.errors import ConfigError, DataError
from tilewright.data.common.progress import ProgressBar

_REFUSALS = (
    OSError,
    ValueError,
    TypeError,
    KeyError,
    IndexError,
    AttributeError,
    RuntimeError,
    AssertionError,
    ImportError,
    YAMLError,
    jinja2.TemplateError,
)
"""How tasks of many authors fail."""


class TaskSet:
    """The tasks that were asked for, each loaded once to see that it can be.

    Args:
        names: of tasks, groups or tags.
        include_path: a folder with task files of the user's; one of the same name takes the harness' place.
        num_fewshot: examples in each prompt; None: what the task says.

    Raises:
        ConfigError: no such folder or task, or one that is not supported.
        DataError: a task cannot be loaded, or its data cannot.
    """

    def __init__(self, names: Sequence[str], include_path: Path | None = None, num_fewshot: int | None = None):
        self.names, self._num_fewshot = list(dict.fromkeys(names)), num_fewshot
        if include_path is not None and not include_path.is_dir():
            raise ConfigError(
                "No folder of tasks at this path",
                got=str(include_path),
                need="a folder with .yaml files of tasks",
                try_="--include-path FOLDER",
            )
        with ProgressBar("tasks") as progress:
            progress.phase("finding")
            self._manager = _manager(self.names, include_path)
            for name in self.names:
                self._check_name(name)
                progress.phase(f"loading {name}")
                for task in _load(self._manager, [name])["tasks"].values():
                    _check_task(task)

    def load(self) -> dict[str, Any]:
        """Load tasks of lm_eval, fresh ones, as the harness' `evaluate` takes them."""
        loaded = _load(self._manager, self.names)
        for task in loaded["tasks"].values():
            given = task.get_config("num_fewshot")
            if given is None:
                task.set_config(key="num_fewshot", value=self._num_fewshot or 0)
            elif self._num_fewshot is not None and given != 0:  # 0 in a task's file means that it has to be so
                task.set_config(key="num_fewshot", value=self._num_fewshot)
            task.set_fewshot_seed(seed=1234)
        return loaded

    def _check_name(self, name: str) -> None:
        known = self._manager.all_tasks
        if name in known:
            return
        near = difflib.get_close_matches(name, known, n=3) or [task for task in known if name in task][:3]
        raise ConfigError(
            "No such task",
            got=name,
            need=f"one of the harness' {len(known)} tasks" + (f", such as {', '.join(near)}" if near else ""),
            try_=f"--tasks {near[0]}" if near else "--include-path FOLDER, for tasks of your own",
            where="--tasks",
        )


def _manager(names: Sequence[str], include_path: Path | None) -> TaskManager:
    """lm_eval's manager of the user's tasks alone where these are enough: to read the harness' own takes half a
    minute."""
    if include_path is not None:
        own = TaskManager(include_path=include_path, include_defaults=False)
        if set(names) <= set(own.all_subtasks):
            return own
    return TaskManager(include_path=include_path)


def _load(manager: TaskManager, names: list[str]) -> Any:
    try:
        loaded = manager.load(names)
        for task in loaded["tasks"].values():
            if not len(task.eval_docs):
                raise ValueError("no documents to evaluate on")
        return loaded
    except _REFUSALS as error:
        raise _cannot_load(", ".join(names), error) from error


def _check_task(task: Task) -> None:
    name = str(task.task_name)
    kinds = {
        "UNSAFE_CODE": "runs code that the model writes",
        "MULTIMODAL": "shows pictures to the model",
    }
    for flag, what in kinds.items():
        if getattr(task, flag, False):
            raise ConfigError(
                "Task is of a kind that is not supported",
                got=f"{name}, which {what}",
                need="text alone",
                try_="tilewright merge RUN --out FOLDER, and the harness' own command on that folder",
                where="--tasks",
            )
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # a progress bar over one document
            task.build_all_requests(limit=1, rank=0, world_size=1)
    except _REFUSALS as error:
        raise _cannot_load(name, error) from error


def _cannot_load(name: str, error: BaseException) -> DataError:
    said = (str(error).splitlines() or [""])[0][:300]
    if isinstance(error, ImportError):
        missing = getattr(error, "name", None) or "what the message names"
        need, ways = "packages that this task imports", f"pip install {missing}"
    elif isinstance(error, ConnectionError) or (isinstance(error, OSError) and "hub" in said.lower()):
        need = "the task's data set, in the cache of the Hugging Face libraries or from the hub"
        ways = "the same command with a network, once\nor --include-path FOLDER with a task whose data is a local file"
    else:
        need, ways = "a task and data that the harness can read", "the task's .yaml and the files that it names"
    return DataError(
        "Task cannot be loaded", got=f"{type(error).__name__}: {said}", need=need, try_=ways, where=f"task {name}"
    )
