"""Files with something planted in them that leaves a mark when it runs."""

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tilewright.core.atomic_io import MANIFEST, write_manifest
from tilewright.training.checkpoint.tensor_index import INDEX


class Command:
    """Unpickled, it runs a shell command: it makes the file `mark`."""

    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self):
        return os.system, (f"touch '{self.mark}'",)


def reseal(folder: Path) -> None:
    """The manifest of a checkpoint as whoever planted something would write it."""
    (folder / MANIFEST).unlink()
    write_manifest(folder)


def plant_pickle(checkpoint: Path, kind: str, mark: Path) -> bytes:
    """DCP's own index of a checkpoint, `.metadata`, as one that DCP's reader would run, with the manifest to match.

    Args:
        checkpoint: of one tensor at least; its own index is the base.
        kind: a key of `KINDS`.
        mark: the file that running it makes.
    """
    path = checkpoint / ".metadata"
    data = KINDS[kind](pickle.loads(path.read_bytes()), mark)
    path.write_bytes(data)
    reseal(checkpoint)
    return data


def change_index(checkpoint: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """The index of a checkpoint, changed in place, with the manifest to match."""
    index = json.loads((checkpoint / INDEX).read_text())
    change(index)
    (checkpoint / INDEX).write_text(json.dumps(index))
    reseal(checkpoint)


def _instead(_, mark):
    return pickle.dumps(Command(mark))


def _nested(metadata, mark):
    metadata.planner_data = {"w": ("w", [{"deep": (Command(mark),)}])}
    return pickle.dumps(metadata)


def _in_a_tensor(metadata, mark):
    name = next(iter(metadata.state_dict_metadata))
    metadata.state_dict_metadata[name].chunks = Command(mark)
    return pickle.dumps(metadata)


def _in_storage(metadata, mark):
    next(iter(metadata.storage_data.values())).relative_path = Command(mark)
    return pickle.dumps(metadata)


def _old_protocol(_, mark):
    return f"cposix\nsystem\n(S'touch {mark}'\ntR.".encode()


def _inst(_, mark):
    return f"(S'touch {mark}'\niposix\nsystem\n.".encode()


def _object(_, mark):
    return f"(cposix\nsystem\nS'touch {mark}'\no.".encode()


def _text(value: str) -> bytes:
    return pickle.SHORT_BINUNICODE + bytes([len(value.encode())]) + value.encode()


def _dotted(_, mark):
    """A module that DCP's own indexes name, and from there to another."""
    call = _text("torch.serialization") + _text("os.system") + pickle.STACK_GLOBAL
    return pickle.PROTO + b"\x04" + call + _text(f"touch {mark}") + pickle.TUPLE1 + pickle.REDUCE + pickle.STOP


def _after_the_real_one(metadata, mark):
    """The object that is returned is the real one; the planted one is dropped from the stack before."""
    real = pickle.dumps(metadata, protocol=3)
    return real[:2] + pickle.dumps(Command(mark), protocol=3)[2:-1] + pickle.POP + real[2:]


KINDS = {
    "instead of it": _instead,
    "nested": _nested,
    "in a tensor": _in_a_tensor,
    "in the storage": _in_storage,
    "GLOBAL": _old_protocol,
    "INST": _inst,
    "OBJ": _object,
    "dotted name": _dotted,
    "before the real one": _after_the_real_one,
}


def copy_of(folder: Path, target: Path) -> Path:
    """A copy of a folder to plant something in."""
    shutil.copytree(folder, target)
    return target
