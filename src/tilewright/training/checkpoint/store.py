"""The checkpoints of one run: written in the background, whole or not at all, the newest sound one found again.

A checkpoint is a folder `step_00000100` with the tensors in the format of `torch.distributed.checkpoint` (DCP),
`meta.json` (everything that is not a tensor) and `manifest.json` (a hash of each file). It is written as
`step_00000100.partial` and renamed at the end, so a crash or a full disk leaves the older ones as they were.
What goes into a checkpoint is `state`'s matter; this file moves names, tensors and JSON. Reading one executes
nothing in it (`index`).
"""

import errno
import json
import shutil
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from tilewright.core.atomic_io import check_manifest, publish_folder, write_manifest
from tilewright.core.errors import CheckpointError
from tilewright.training.checkpoint.index import IndexFormatError, TensorLoadPlanner, TensorReader
from tilewright.training.checkpoint.meta import META
from tilewright.training.checkpoint.staging import Staging

_PREFIX = "step_"
_PARTIAL = ".partial"
_REJECTED = ".rejected"

Live = Callable[[str, Tensor], Tensor]
"""A tensor with its bytes, from its name and one that has its shape and dtype."""


@dataclass(frozen=True)
class SaveRecord:
    """What became of one save: `error` is None where the checkpoint is in place."""

    step: int
    path: Path
    stall_s: float
    """Seconds in which training stood still for it."""
    write_s: float
    """Seconds from the start of writing to the rename, in the background where `background`."""
    bytes: int
    background: bool
    error: str | None
    dropped: tuple[str, ...] = ()
    """Names of older checkpoints that were deleted because the disk was full."""


@dataclass(frozen=True)
class Rejection:
    """A checkpoint that cannot be used, and why."""

    path: Path
    reason: str


class CheckpointStore:
    """Saves and finds the checkpoints of one run folder. One process, one store a folder.

    Args:
        folder: holds the checkpoints; made where it is missing, at the first save, in a folder that is there.
        keep: newest checkpoints kept; older ones are deleted only after a newer one is in place. On a full disk fewer
            are kept: the oldest is deleted while a newer one is valid, and the save tried again.
        background: copy the state into host buffers and write it in a thread while training continues.
    """

    def __init__(self, folder: Path, *, keep: int = 3, background: bool = True) -> None:
        if keep < 1:
            raise AssertionError(f"keep must be at least 1, got {keep}")
        self.folder = Path(folder)
        self.keep = keep
        self.background = background
        self._staging = Staging()
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._running: Future[SaveRecord] | None = None
        self._finished: list[SaveRecord] = []
        self._saved_step: int | None = None

    # ---- saving ----

    def save(
        self,
        step: int,
        tensors: Mapping[str, Tensor],
        meta: Mapping[str, Any],
        *,
        now: bool = False,
        live: Live | None = None,
    ) -> float:
        """Save the state after `step`; returns the seconds that training stood still. Never raises for a bad disk.

        `now` writes it before returning, without a copy, whatever `background` says. So does `live`, which gives each
        tensor's bytes when it is its turn, where `tensors` have only shapes.
        A save that is still being written is waited for first, and that wait counts. What became of the save is
        a `SaveRecord` in `finished()`. A step that is already in place is not written again.
        """
        started = time.perf_counter()
        self.wait()
        if step == self._saved_step:
            return time.perf_counter() - started
        text = json.dumps(meta, allow_nan=False)
        if now or live is not None or not self.background:
            record = self._write(step, tensors, text, live=live)
            stall_s = time.perf_counter() - started
            self._finished.append(replace(record, stall_s=stall_s, background=False))
            return stall_s
        staged = self._staging.copy(tensors)
        stall_s = time.perf_counter() - started
        self._running = self._writer.submit(self._write, step, staged, text, stall_s)
        return stall_s

    def wait(self) -> None:
        """Wait until nothing is being written."""
        if self._running is not None:
            self._finished.append(self._running.result())
            self._running = None

    def finished(self) -> list[SaveRecord]:
        """The saves that ended since the last call, in order. Does not wait."""
        if self._running is not None and self._running.done():
            self.wait()
        records, self._finished = self._finished, []
        return records

    def close(self) -> None:
        """Wait, and end the writing thread."""
        self.wait()
        self._writer.shutdown()

    def _write(
        self, step: int, tensors: Mapping[str, Tensor], meta: str, stall_s: float = 0.0, live: Live | None = None
    ) -> SaveRecord:
        final = self.path_of(step)
        begun = time.perf_counter()
        size, error, dropped = 0, None, []
        while True:
            try:
                size = self._write_folder(final, tensors, meta, live)
                self._saved_step, error = step, None
                self._prune()
            except (OSError, CheckpointException, RuntimeError) as problem:
                # RuntimeError: torch's zip writer reports a failed write that way, not as OSError.
                error = _short_reason(problem)
                shutil.rmtree(_partial(final), ignore_errors=True)
                oldest = self._make_room() if _is_full(problem) else None
                if oldest is not None:
                    dropped.append(oldest.name)
                    if live is None:  # it gives each tensor once: the next save has the room
                        continue
            write_s = time.perf_counter() - begun
            return SaveRecord(step, final, stall_s, write_s, size, True, error, tuple(dropped))

    def _make_room(self) -> Path | None:
        """Delete the oldest checkpoint where the newest is another one and valid; its path, None where it is not."""
        paths = self.paths()
        if len(paths) < 2 or check_manifest(paths[-1]) is not None:
            return None
        shutil.rmtree(paths[0])
        return paths[0]

    @property
    def newest_step(self) -> int | None:
        """Step of the newest checkpoint, unverified; None where there is none."""
        paths = self.paths()
        return int(paths[-1].name.removeprefix(_PREFIX)) if paths else None

    def _write_folder(self, final: Path, tensors: Mapping[str, Tensor], meta: str, live: Live | None) -> int:
        partial = _partial(final)
        self.folder.mkdir(exist_ok=True)  # no parents: a run folder that was deleted does not come back
        if partial.exists():
            shutil.rmtree(partial)
        partial.mkdir()
        _quiet_dcp()
        ahead = {} if live is None else {"per_thread_copy_ahead": 0}  # tensors in the order in which they come
        writer = dcp.FileSystemWriter(partial, sync_files=False, **ahead)
        planner = None if live is None else _SaveLive(live)
        dcp.save(dict(tensors), storage_writer=writer, planner=planner, no_dist=True)
        (partial / META).write_text(meta, encoding="utf-8")
        size = write_manifest(partial)
        publish_folder(partial, final)
        return size

    def _prune(self) -> None:
        """Delete all but the `keep` newest. The newest was just written, so one valid checkpoint always stays."""
        for path in self.paths()[: -self.keep]:
            shutil.rmtree(path)

    # ---- finding ----

    def path_of(self, step: int) -> Path:
        """The folder of the checkpoint after `step`."""
        return self.folder / f"{_PREFIX}{step:08d}"

    def paths(self) -> list[Path]:
        """Finished checkpoint folders, oldest first, unverified."""
        if not self.folder.is_dir():
            return []
        found = [p for p in self.folder.iterdir() if p.name.startswith(_PREFIX) and p.name[len(_PREFIX) :].isdigit()]
        return sorted(found, key=lambda p: int(p.name[len(_PREFIX) :]))

    def newest_sound(self) -> tuple[Path | None, list[Rejection]]:
        """The newest checkpoint whose files are what was written, and the newer ones that are not. Changes nothing."""
        rejected = []
        for path in reversed(self.paths()):
            reason = check_manifest(path)
            if reason is None:
                return path, rejected
            rejected.append(Rejection(path, reason))
        return None, rejected

    def set_aside(self, rejection: Rejection) -> None:
        """Rename a bad checkpoint to `.rejected`, so that its step can be saved again and it can still be looked at."""
        target = rejection.path.with_name(rejection.path.name + _REJECTED)
        if target.exists():
            shutil.rmtree(target)
        rejection.path.rename(target)

    def remove_unfinished(self) -> list[Path]:
        """Delete the `.partial` folders that a killed process left; returns their paths."""
        left = sorted(self.folder.glob(f"{_PREFIX}*{_PARTIAL}")) if self.folder.is_dir() else []
        for path in left:
            shutil.rmtree(path)
        return left


def stored_tensors(path: Path) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Names, dtypes and shapes of the tensors in a checkpoint, without reading them.

    Raises:
        CheckpointError: the index is missing or damaged, or holds something else than tensors.
    """
    try:
        metadata = TensorReader(path).read_metadata()
    except (OSError, IndexFormatError) as error:
        raise _cannot_load(path, error) from error
    return {name: (entry.properties.dtype, tuple(entry.size)) for name, entry in metadata.state_dict_metadata.items()}


def read_tensors(path: Path, targets: Mapping[str, Tensor], live: Live | None = None) -> None:
    """Read tensors of a checkpoint in place into `targets`, one at a time: the model is never held twice.

    Args:
        path: the checkpoint's folder.
        targets: by name.
        live: gives the tensor to read into when it is its turn, where `targets` have only shapes.

    Raises:
        CheckpointError: a tensor cannot be read, or is not in the checkpoint.
    """
    _quiet_dcp()
    try:
        planner = TensorLoadPlanner() if live is None else _LoadLive(live)
        dcp.load(dict(targets), storage_reader=TensorReader(path), planner=planner, no_dist=True)
    except (OSError, CheckpointException, RuntimeError, IndexFormatError) as error:
        raise _cannot_load(path, error) from error


def _cannot_load(path: Path, error: BaseException) -> CheckpointError:
    return CheckpointError(
        f"{path} cannot be loaded",
        got=_short_reason(error),
        need="a whole checkpoint of this model, with tensors alone in it",
        try_="remove the folder to use the checkpoint before it",
    )


class _SaveLive(dcp.DefaultSavePlanner):
    """Asks for each tensor when it is written."""

    def __init__(self, live: Live) -> None:
        super().__init__()
        self._live = live

    def lookup_object(self, index: Any) -> Any:
        return self._live(index.fqn, super().lookup_object(index))


class _LoadLive(TensorLoadPlanner):
    """Asks for each tensor when it is read into."""

    def __init__(self, live: Live) -> None:
        super().__init__()
        self._live = live

    def lookup_tensor(self, index: Any) -> Tensor:
        return self._live(index.fqn, super().lookup_tensor(index))


def _partial(final: Path) -> Path:
    return final.with_name(final.name + _PARTIAL)


def _short_reason(error: BaseException) -> str:
    """The reason in one line: what is inside DCP's wrapper, and the disk's own error where there is one behind it.

    torch's zip writer raises "unexpected pos" while the OSError that caused it is being handled.
    """
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    error = next(iter([link for link in _chain(error) if isinstance(link, OSError)][::-1]), error)
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An error, what is inside DCP's wrapper, and what was being handled when each was raised."""
    if isinstance(error, CheckpointException):
        for inner, _ in error.failures.values():
            yield from _chain(inner)
    link: BaseException | None = error
    while link is not None:
        yield link
        link = link.__cause__ or link.__context__


def _is_full(error: BaseException) -> bool:
    """No room on the disk or in the user's quota."""
    return any(isinstance(link, OSError) and link.errno in (errno.ENOSPC, errno.EDQUOT) for link in _chain(error))


def _quiet_dcp() -> None:
    """DCP warns at each call that one process saves alone, which is what we ask for."""
    warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
