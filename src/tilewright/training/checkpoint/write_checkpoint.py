"""One checkpoint written into one folder, by one process or by all ranks together, and given its name at the end.

Every rank writes its own parts, in the format of `torch.distributed.checkpoint` (DCP), into `step_N.partial`, and
hashes what it wrote. The first rank adds `meta.json` and `manifest.json`, with the hashes of all, and renames the
folder. A part that several ranks hold is written once. Where one rank fails, all do, and none renames anything.

A state is first copied to the host (`Staging`), in memory that is reused from save to save: the copy is what training
waits for, the disk is not. CUDA tensors are copied into one buffer, registered with the driver, at the speed of the
link: torch's own pinned memory would round each tensor up to a power of two, and small buffers of their own would share
pages, which are registered once. They hold as many bytes as the state itself, from the first save on; of a state in
shards, as many as this rank's.
"""

import math
import os
import warnings
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import DEFAULT_SUFFIX, FileSystem

from tilewright.core.atomic_io import FileEntry, file_entries, fsync_path, publish_folder, remove_folder, write_entries
from tilewright.core.errors import HardwareError
from tilewright.core.log import get_logger
from tilewright.memory.offload.pinned_memory import pinned_empty, unpin
from tilewright.ops.base.tensor_parts import local, place_of
from tilewright.parallel.liveness.checksum import ReplicaDifference, checksum, find_differences
from tilewright.training.checkpoint.checkpoint_meta import META
from tilewright.training.checkpoint.disk_failures import DISK_ERRORS, disk_error, of_dcp, on_all
from tilewright.training.checkpoint.tensor_index import INDEX, index_of
from tilewright.training.executor.summon_tensors import Live


class ReplicasDifferError(RuntimeError):
    """Ranks that hold the same tensors hold different bits: one of them is corrupt, and so is what they train.

    Args:
        differences: the tensors.
    """

    def __init__(self, differences: list[ReplicaDifference]) -> None:
        shown = "; ".join(map(str, differences[:5]))
        more = f"; and {len(differences) - 5} more" if len(differences) > 5 else ""
        super().__init__(f"ranks hold different bits of the same tensors: {shown}{more}")
        self.differences = tuple(differences)


@dataclass(frozen=True)
class Content:
    """Contents of a checkpoint to be written, as one rank has them.

    Args:
        tensors: by name; DTensors of which this rank holds a part, and whole ones.
        meta: JSON. The first rank's is written.
        live: gives the bytes of a tensor when it is its turn; None where `tensors` have them.
        compared: names of the tensors whose copies on other ranks must have the same bits.
    """

    tensors: Mapping[str, Tensor]
    meta: str
    live: Live | None = None
    compared: frozenset[str] = frozenset()

    def part(self, name: str) -> Tensor:
        """The bytes that this rank writes of a tensor into a checkpoint."""
        tensor = self.tensors[name]
        return local(tensor if self.live is None else self.live(name, tensor)).detach()


def write_folder(
    content: Content, final: Path, group: dist.ProcessGroup | None, done: Callable[[], None] = lambda: None
) -> int:
    """Write a checkpoint into its folder; returns its bytes.

    Args:
        content: of this rank.
        final: the folder's name when it is whole.
        group: whose ranks all call this, used by nothing else meanwhile; None for one process.
        done: called at the end of each piece of this rank's work, before it waits for the others.

    Raises:
        OSError, RuntimeError, CheckpointException: it could not be written; nothing is at `final`, the partial folder
            is left. Of several ranks all raise `RanksFailedError` with the same text, unless one has died.
        ReplicasDifferError: nothing was written, since the ranks disagree; on all ranks.
    """
    partial, rank = partial_of(final), 0 if group is None else dist.get_rank(group)
    _check_replicas(content, group, done)
    on_all(group, lambda: _make(partial) if rank == 0 else None, done)
    _write_tensors(content, partial, group, done)
    found = on_all(group, lambda: _own_files(partial, rank, content.meta if rank == 0 else None), done)
    entries = {name: entry for files in found for name, entry in files.items()}
    return on_all(group, lambda: _publish(partial, final, entries) if rank == 0 else 0, done)[0]


def partial_of(final: Path) -> Path:
    """The name of a checkpoint's folder while it is written, until it is whole."""
    return final.with_name(final.name + ".partial")


def quiet_dcp() -> None:
    """Quiet DCP while a checkpoint is written: it warns at each call that one process saves or loads alone, which is
    what we ask for."""
    warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)


def _check_replicas(content: Content, group: dist.ProcessGroup | None, done: Callable[[], None]) -> None:
    if group is None or not content.compared:
        return
    names = [name for name in content.tensors if name in content.compared]
    sums = {place_of(name, content.tensors[name]): checksum(content.part(name)) for name in names}
    done()
    differences = find_differences(group, sums)
    if differences:
        raise ReplicasDifferError(differences)


def _make(partial: Path) -> None:
    partial.parent.mkdir(exist_ok=True)  # no parents: a run folder that was deleted does not come back
    remove_folder(partial)
    partial.mkdir()


def _write_tensors(content: Content, partial: Path, group: dist.ProcessGroup | None, done: Callable[[], None]) -> None:
    quiet_dcp()
    ahead = {} if content.live is None else {"per_thread_copy_ahead": 0}  # tensors in the order in which they come
    writer = _Writer(partial, done, sync_files=False, **ahead)
    planner = None if content.live is None else _LivePlanner(content)
    try:
        dcp.save(
            dict(content.tensors),
            storage_writer=writer,
            planner=planner,
            process_group=group,
            no_dist=group is None,
        )
    except CheckpointException as error:
        if group is None:
            raise
        raise of_dcp(error) from error


def _own_files(partial: Path, rank: int, meta: str | None) -> dict[str, FileEntry]:
    """The entries of the files of a checkpoint that this rank wrote, which are on the disk then."""
    if meta is not None:
        (partial / META).write_text(meta, encoding="utf-8")
    paths = list(partial.glob(f"__{rank}_*{DEFAULT_SUFFIX}"))
    if rank == 0:
        paths += [path for path in partial.iterdir() if path.suffix != DEFAULT_SUFFIX]
    entries = file_entries(partial, paths)
    for path in paths:
        fsync_path(path)
    return entries


def _publish(partial: Path, final: Path, entries: Mapping[str, FileEntry]) -> int:
    size = write_entries(partial, entries)
    publish_folder(partial, final)
    return size


class _MadeFolder(FileSystem):
    """Makes no folder: `write_folder` made it, and that of a run which was deleted meanwhile must not come back."""

    def mkdir(self, path: str | os.PathLike) -> None: ...


class _Writer(dcp.FileSystemWriter):
    """DCP's writer, whose errors are the disk's own: what was behind one is lost on the way to other ranks."""

    def __init__(self, folder: Path, done: Callable[[], None], **kwargs: Any) -> None:
        super().__init__(folder, **kwargs)
        self.fs = _MadeFolder()
        self._done = done

    def finish(self, metadata: Any, results: Any) -> None:
        super().finish(metadata, results)
        (Path(self.path) / INDEX).write_bytes(index_of(metadata))

    def write_data(self, plan: Any, planner: Any) -> Any:
        try:
            return super().write_data(plan, planner)
        except DISK_ERRORS as error:
            behind = disk_error(error)
            if behind is None or behind is error:
                raise
            raise OSError(behind.errno, behind.strerror) from error
        finally:
            self._done()


class _LivePlanner(dcp.DefaultSavePlanner):
    """Asks for each tensor's bytes when it is written."""

    def __init__(self, content: Content) -> None:
        super().__init__()
        self._content = content

    def lookup_object(self, index: Any) -> Tensor:
        return self._content.part(index.fqn)


_ALIGN = 64
"""Bytes between which tensors begin."""
_log = get_logger(__name__)


class Staging:
    """Copies named tensors into host memory. One copy is alive at a time: the next one overwrites it."""

    def __init__(self) -> None:
        self._parts: dict[str, Tensor] = {}
        self._layout: object = None
        self._free = weakref.finalize(self, lambda: None)

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensors that are staged to be written into a checkpoint."""
        return sum(part.nbytes for part in self._parts.values())

    def copy(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copy `tensors` to contiguous host memory under the same names before they are written; of DTensors, this
        rank's shards. Done when this returns.

        Values, dtypes and shapes are those of the tensors at the moment of the call.
        """
        tensors = {name: local(tensor).detach() for name, tensor in tensors.items()}
        on_gpu = [tensor.device for tensor in tensors.values() if tensor.is_cuda]
        layout = [(name, tensor.shape, tensor.dtype) for name, tensor in tensors.items()], bool(on_gpu)
        if layout != self._layout:
            self._make_room(tensors, on_gpu[0] if on_gpu else torch.device("cpu"))
            self._layout = layout
        for name, tensor in tensors.items():
            self._parts[name].copy_(tensor, non_blocking=True)
        if on_gpu:
            torch.cuda.synchronize()
        return dict(self._parts)

    def _make_room(self, tensors: Mapping[str, Tensor], device: torch.device) -> None:
        """Make room to stage these tensors, in the place of what was there before, which is freed first."""
        self._parts, self._layout = {}, None
        self._free()
        if device.type == "cpu":
            self._parts = {name: torch.empty(tensor.shape, dtype=tensor.dtype) for name, tensor in tensors.items()}
            return
        starts, end = {}, 0
        for name, tensor in tensors.items():
            starts[name] = end
            end += math.ceil(tensor.numel() * tensor.element_size() / _ALIGN) * _ALIGN
        try:
            buffer = pinned_empty(end, device)
        except HardwareError as error:  # a state that is saved slowly is better than one that is not
            _log.warning("copies for checkpoints are not registered with the GPU, so they take longer: %s", error)
            device = torch.device("cpu")
            buffer = pinned_empty(end, device)
        self._free = weakref.finalize(self, unpin, buffer, device)
        for name, tensor in tensors.items():
            part = buffer[starts[name] : starts[name] + tensor.numel() * tensor.element_size()]
            self._parts[name] = part.view(tensor.dtype).view(tensor.shape)
