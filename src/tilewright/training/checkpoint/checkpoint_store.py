"""The checkpoints of one run: written in the background, whole or not at all, the newest sound one found again.

A checkpoint is a folder `step_00000100` with the tensors in the format of `torch.distributed.checkpoint` (DCP),
`meta.json` (everything that is not a tensor) and `manifest.json` (a hash of each file). It is written as
`step_00000100.partial` and renamed at the end (`write_checkpoint`), so a crash or a full disk leaves the older ones as
they were. What goes into a checkpoint is `checkpoint_state`'s matter; this file moves names, tensors and JSON. Reading
one executes nothing in it (`tensor_index`), and takes any number of processes, whatever number wrote it.
"""

import json
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import DEFAULT_SUFFIX
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from tilewright.core.atomic_io import check_manifest, listed_files, remove_folder
from tilewright.core.errors import CheckpointError
from tilewright.parallel.world import World
from tilewright.training.checkpoint.checkpoint_meta import checkpoints_in, name_of, step_of
from tilewright.training.checkpoint.disk_failures import (
    DISK_ERRORS,
    RanksFailedError,
    is_full,
    on_all,
    short_reason,
)
from tilewright.training.checkpoint.tensor_index import (
    INDEX,
    IndexFormatError,
    TensorLoadPlanner,
    TensorReader,
    read_index,
)
from tilewright.training.checkpoint.write_checkpoint import (
    Content,
    Live,
    ReplicasDifferError,
    Staging,
    partial_of,
    quiet_dcp,
    write_folder,
)

T = TypeVar("T")
_PARTIAL = ".partial"
_REJECTED = ".rejected"
_PATIENCE = timedelta(days=1)
"""For which ranks that have written wait for one that has not. A rank that dies ends the wait at once; one that neither
computes nor writes is seen in its record (`liveness.rank_failure`), once training waits for the save too."""


@dataclass(frozen=True)
class SaveRecord:
    """Outcome of one save: `error` is None where the checkpoint is in place."""

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
    """Saves and finds the checkpoints of one run folder. One store per folder and process.

    The ranks of a run have one each, for the same folder, on a disk that all of them see. `save` is called by all of
    them, with the same step; what became of it is the same on all. Finding, setting aside and removing concern the
    folder, and are for one rank.

    Args:
        folder: holds the checkpoints; made where it is missing, at the first save, in a folder that is there.
        keep: newest checkpoints kept; older ones are deleted only after a newer one is in place. On a full disk fewer
            are kept: the oldest is deleted while a newer one is valid, and the save tried again.
        background: copy the state into host buffers and write it in a thread while training continues.
        world: the processes that save together. They make a group of their own at the first save, so that writing and
            training never wait in each other's collectives.
    """

    def __init__(self, folder: Path, *, keep: int = 3, background: bool = True, world: World | None = None) -> None:
        if keep < 1:
            raise AssertionError(f"keep must be at least 1, got {keep}")
        self.folder = Path(folder)
        self.keep = keep
        self.background = background
        self.world = world or World.alone()
        self._group: dist.ProcessGroup | None = None
        self._staging = Staging()
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._running: Future[SaveRecord] | None = None
        self._finished: list[SaveRecord] = []
        self._saved_step: int | None = None
        self._lost: str | None = None
        """Why nothing is saved any more."""

    # ---- saving ----

    def save(
        self,
        step: int,
        tensors: Mapping[str, Tensor],
        meta: Mapping[str, Any],
        *,
        now: bool = False,
        live: Live | None = None,
        compared: Collection[str] = (),
    ) -> float:
        """Save a checkpoint of the state after `step`; returns the seconds that training stood still. Never raises for
        a bad disk.

        `now` writes it before returning, without a copy, whatever `background` says. So does `live`, which gives each
        tensor's bytes when it is its turn, where `tensors` have only shapes.
        A save that is still being written is waited for first, and that wait counts. What became of the save is
        a `SaveRecord` in `finished()`. A step that is already in place is not written again.

        Args:
            step: number of steps done.
            tensors: by name; of DTensors each rank writes its shards. Whole tensors of the same name are the same on
                all ranks, and written by one.
            meta: JSON; the first rank's is written.
            now: see above.
            live: see above.
            compared: names of tensors whose copies on other ranks have to have the same bits, or the save fails.
        """
        started = time.perf_counter()
        self.wait()
        if step == self._saved_step:
            return time.perf_counter() - started
        if self._lost is not None:
            self._finished.append(SaveRecord(step, self.path_of(step), 0.0, 0.0, 0, False, self._lost))
            return time.perf_counter() - started
        if self.world.size > 1 and self._group is None:
            self._group = cast(dist.ProcessGroup, dist.new_group(backend="gloo", timeout=_PATIENCE))
        text = json.dumps(meta, allow_nan=False)
        content = Content(tensors, text, live, frozenset(compared))
        if now or live is not None or not self.background:
            record = self._write(step, content)
            stall_s = time.perf_counter() - started
            self._finished.append(replace(record, stall_s=stall_s, background=False))
            return stall_s
        staged = self._staging.copy(tensors)
        if self._group is None:
            content = Content(staged, text)
        else:  # DTensors say where the staged parts belong
            content = replace(content, live=lambda name, _: staged[name])
        stall_s = time.perf_counter() - started
        self._running = self._writer.submit(self._write, step, content, stall_s, again=True)
        return stall_s

    def wait(self) -> None:
        """Wait until no checkpoint is being written."""
        if self._running is not None:
            self._finished.append(self._running.result())
            self._running = None

    def finished(self) -> list[SaveRecord]:
        """The checkpoints whose saves ended since the last call, in order. Does not wait."""
        if self._running is not None and self._running.done():
            self.wait()
        records, self._finished = self._finished, []
        return records

    def close(self) -> None:
        """Close the store of checkpoints: wait, and end the writing thread."""
        self.wait()
        self._writer.shutdown()

    def _write(self, step: int, content: Content, stall_s: float = 0.0, *, again: bool | None = None) -> SaveRecord:
        """Write a checkpoint of the store, `again` where that made room on a full disk: by default, where nothing is
        given once."""
        final = self.path_of(step)
        again = content.live is None if again is None else again
        begun = time.perf_counter()
        size, error, dropped = 0, None, []
        while True:
            try:
                size = write_folder(content, final, self._group, partial(self.world.aside, f"save of step {step}"))
                self._saved_step, error = step, None
                self._on_first(self._prune)
            except DISK_ERRORS as problem:
                error, oldest = short_reason(problem), None
                if self._group is None or isinstance(problem, RanksFailedError | ReplicasDifferError):
                    full = is_full(problem)
                    oldest = self._on_first(lambda: self._clear_up(final, full))  # noqa: B023 - called before it ends
                else:
                    self._leave(error)
                if oldest is not None:
                    dropped.append(oldest)
                    if again:
                        continue
            write_s = time.perf_counter() - begun
            return SaveRecord(step, final, stall_s, write_s, size, True, error, tuple(dropped))

    def _on_first(self, work: Callable[[], T]) -> T | None:
        """The result of the first rank's work on the store of checkpoints, on all ranks."""
        return on_all(self._group, lambda: work() if self.world.is_first else None, partial(self.world.aside, "save"))[
            0
        ]

    def _clear_up(self, final: Path, full: bool) -> str | None:
        """Clear up the store after a save that failed; the name of the checkpoint that was deleted because the disk is
        full."""
        shutil.rmtree(partial_of(final), ignore_errors=True)
        oldest = self._make_room() if full else None
        return None if oldest is None else oldest.name

    def _leave(self, error: str) -> None:
        """Leave the store's group, in which a rank has died, so that none waits for this one. Nothing is saved any
        more."""
        self._lost = f"the ranks cannot save together any more ({error})"
        group, self._group = self._group, None
        dist.destroy_process_group(group)

    def _make_room(self) -> Path | None:
        """Make room for a checkpoint: delete the oldest one where the newest is another one and valid; its path, None
        where it is not."""
        paths = self.paths()
        if len(paths) < 2 or check_manifest(paths[-1]) is not None:
            return None
        remove_folder(paths[0])
        return paths[0]

    @property
    def newest_step(self) -> int | None:
        """Step of the newest checkpoint of the store, unverified; None where there is none."""
        paths = self.paths()
        return step_of(paths[-1]) if paths else None

    def _prune(self) -> None:
        """Delete all checkpoints but the `keep` newest. The newest was just written, so one valid checkpoint always
        stays."""
        for path in self.paths()[: -self.keep]:
            remove_folder(path)

    # ---- finding ----

    def path_of(self, step: int) -> Path:
        """The folder of the store's checkpoint after `step`."""
        return self.folder / name_of(step)

    def paths(self) -> list[Path]:
        """Finished checkpoint folders of the store, oldest first, unverified."""
        return checkpoints_in(self.folder)

    def newest_sound(self) -> tuple[Path | None, list[Rejection]]:
        """The newest checkpoint of the store whose files are what was written, and the newer ones that are not. Changes
        nothing; one that goes away meanwhile is neither."""
        rejected = []
        for path in reversed(self.paths()):
            reason = why_unsound(path)
            if reason is None:
                return path, rejected
            if path.exists():
                rejected.append(Rejection(path, reason))
        return None, rejected

    def set_aside(self, rejection: Rejection) -> None:
        """Rename a bad checkpoint of the store to `.rejected`, so that its step can be saved again and it can still be
        looked at; one that was removed meanwhile is gone."""
        target = rejection.path.with_name(rejection.path.name + _REJECTED)
        remove_folder(target)
        with suppress(FileNotFoundError):
            rejection.path.rename(target)

    def remove_unfinished(self) -> list[Path]:
        """Delete the `.partial` folders that a killed process left in the store of checkpoints; returns their paths."""
        try:
            left = sorted(path for path in self.folder.iterdir() if _is_unfinished(path))
        except (FileNotFoundError, NotADirectoryError):
            return []
        for path in left:
            remove_folder(path)
        return left


def _is_unfinished(path: Path) -> bool:
    return path.suffix == _PARTIAL and step_of(path.with_suffix("")) is not None


def stored_tensors(path: Path) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Names, dtypes and shapes of the tensors stored in a checkpoint, without reading them.

    Raises:
        CheckpointError: the index is missing or damaged, or holds something else than tensors.
    """
    try:
        metadata = TensorReader(path).read_metadata()
    except (OSError, IndexFormatError) as error:
        raise _cannot_load(path, error) from error
    entries = metadata.state_dict_metadata.items()
    tensors = ((name, entry) for name, entry in entries if isinstance(entry, TensorStorageMetadata))
    return {name: (entry.properties.dtype, tuple(entry.size)) for name, entry in tensors}


def read_tensors(path: Path, targets: Mapping[str, Tensor], live: Live | None = None) -> None:
    """Read tensors of a stored checkpoint in place into `targets`, one at a time: the model is never held twice.

    Args:
        path: the checkpoint's folder.
        targets: by name.
        live: gives the tensor to read into when it is its turn, where `targets` have only shapes.

    Raises:
        CheckpointError: a tensor cannot be read, or is not in the checkpoint.
    """
    quiet_dcp()
    try:
        planner = TensorLoadPlanner() if live is None else _LoadLive(live)
        dcp.load(dict(targets), storage_reader=TensorReader(path), planner=planner, no_dist=True)
    except (OSError, CheckpointException, RuntimeError, IndexFormatError) as error:
        raise _cannot_load(path, error) from error


def _cannot_load(path: Path, error: BaseException) -> CheckpointError:
    return CheckpointError(
        f"{path} cannot be loaded",
        got=short_reason(error),
        need="a whole checkpoint of this model, with tensors alone in it",
        try_="remove the folder to use the checkpoint before it",
    )


class _LoadLive(TensorLoadPlanner):
    """Asks for each tensor when it is read into."""

    def __init__(self, live: Live) -> None:
        super().__init__()
        self._live = live

    def lookup_tensor(self, index: Any) -> Tensor:
        return self._live(index.fqn, super().lookup_tensor(index))


def why_unsound(folder: Path) -> str | None:
    """The first fault of a stored checkpoint, None where there is none.

    Every file has the hash that the manifest says; the index names no file that the manifest does not, which a rank
    whose part is missing would leave; and no tensors are there that belong to another save.
    """
    return check_manifest(folder) or next(_misfits(folder), None)


def _misfits(folder: Path) -> Iterator[str]:
    try:
        listed, index = listed_files(folder), read_index(folder)
    except (OSError, IndexFormatError) as error:
        yield str(error)
        return
    named = {place.relative_path for place in index.storage_data.values()}
    for name in sorted(named - listed):
        yield f"{INDEX} needs {name}, which the manifest does not list: a rank's part is missing"
    for path in sorted(folder.glob(f"*{DEFAULT_SUFFIX}")):
        if path.name not in listed:
            yield f"{path.name} belongs to another save: the manifest does not list it"
