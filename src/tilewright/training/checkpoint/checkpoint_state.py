"""Contents of a checkpoint, and their way back: everything that a step changes.

Tensors (model, optimizer, torch's generators) under flat names, the rest (Python's and numpy's generators, loss
scale, clipping, data cursor, counters) as JSON:

    model.<fqn>   optimizer.<fqn>.<state>   rng.cpu   rng.cuda.<i>   rng.rank<r>.<...>
    feedback.<ranks>.<rank>.<...>   what compressed gradients of this rank have lost; another number of ranks has none

Tied parameters are held once, under their first name. Tensors are restored in place, so the model is never in memory
twice. Of several ranks each saves and loads its shards of DTensors, on any mesh whatever the mesh that saved. The JSON
is the first rank's; generators are each rank's own (`random_generators`). Writing and finding checkpoints is
`checkpoint_store`'s matter.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tilewright.core.errors import CheckpointError, Problem
from tilewright.core.log import say
from tilewright.models.distill.hidden import NAME as HIDDEN_LOSS
from tilewright.ops.base.tensor_parts import zeros_beside
from tilewright.parallel.agree import gather
from tilewright.parallel.communicate.feedback import ErrorFeedback
from tilewright.parallel.world import World
from tilewright.precision.snapshot import host_states
from tilewright.training.checkpoint.checkpoint_meta import read_meta
from tilewright.training.checkpoint.checkpoint_store import CheckpointStore, read_tensors, stored_tensors
from tilewright.training.checkpoint.random_generators import (
    Stored,
    generator_tensors,
    set_generators,
    stored_generators,
)
from tilewright.training.executor.step_transaction import Stateful
from tilewright.training.executor.summon_tensors import TensorAccess

_MAX_DIFFERENCES = 5

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class TrainState:
    """References to all that a step changes. Nothing is copied here.

    Args:
        model: parameters and persistent buffers are saved under their fully qualified names.
        optimizer: its states are saved under the names of their parameters.
        parts: components with a small state, by name.
        access: to tensors of both, wherever they are stored.
        world: the processes that train together; each calls `save` and `restore`.
        feedback: what this rank's gradients have lost on their way, if that is kept.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    parts: Mapping[str, Stateful]
    access: TensorAccess = field(default_factory=TensorAccess)
    world: World = field(default_factory=World.alone)
    feedback: ErrorFeedback | None = None

    def save(self, store: CheckpointStore, step: int, meta: Mapping[str, Any], *, now: bool = False) -> float:
        """Save the state of a checkpoint; see `CheckpointStore.save`."""
        with self.access.summon(self.model, self.optimizer) as summoned:
            tensors = summoned.sorted(self.tensors())
            return store.save(step, tensors, meta, live=summoned.live, now=now, compared=self._compared())

    def tensors(self) -> dict[str, Tensor]:
        """The live tensors of a checkpoint's state by name, and copies of the generators' states."""
        kept = {} if self.feedback is None else self.feedback.tensors()
        lost = {self._feedback_prefix + name: tensor for name, tensor in kept.items()}
        return model_tensors(self.model) | self._optimizer_tensors() | generator_tensors(self.world) | lost

    def meta(self) -> dict[str, Any]:
        """The state of a checkpoint that is not tensors, in JSON types. All ranks call it: names of the model are those
        of all."""
        return {
            "model": _fingerprint(self._of_all(self.model.state_dict())),
            "parts": {name: part.state_dict() for name, part in self.parts.items()},
            "rng": host_states(),
        }

    def restore(self, path: Path) -> dict[str, Any]:
        """Restore the state of a checkpoint into the live objects; returns its meta.

        Optimizer states that exist are loaded in place in their own dtype, missing ones are made as stored. A part
        that the checkpoint does not hold (a loss scale that came with another precision) starts afresh.

        Raises:
            CheckpointError: the checkpoint is of another model or optimizer, or cannot be read.
        """
        self.world.waits()
        model, states = (self._of_all(own) for own in (model_tensors(self.model), self._optimizer_tensors()))
        self.world.works()
        with self._together():
            meta = read_meta(path)
            stored = stored_tensors(path)
            _compare(f"{path} is a checkpoint of another model.", "model.", model, stored)
            if states:
                _compare(f"{path} was written by another optimizer.", "optimizer.", states, stored)
            else:
                self._make_optimizer_states(stored)
            targets = model_tensors(self.model) | self._optimizer_tensors()
            rng = {
                name: torch.empty(shape, dtype=dtype) for name, (dtype, shape) in stored_generators(stored, self.world)
            }
            lost = self._stored_feedback(stored)
            with torch.no_grad(), self.access.summon(self.model, self.optimizer, changes=True) as summoned:
                read_tensors(path, summoned.sorted(targets | rng | lost), summoned.live)
        if self.feedback is not None:
            self.feedback.load({name.removeprefix(self._feedback_prefix): tensor for name, tensor in lost.items()})
        for name, part in self.parts.items():
            if name in meta["parts"]:
                part.load_state_dict(meta["parts"][name])
        set_generators(rng, meta["rng"], self.world)
        return meta

    @property
    def _feedback_prefix(self) -> str:
        return f"feedback.{self.world.size}.{self.world.rank}."

    def _stored_feedback(self, stored: Stored) -> dict[str, Tensor]:
        """Memory for what a checkpoint's state has of this rank's error feedback, of as many ranks."""
        if self.feedback is None:
            return {}
        mine = {name: found for name, found in stored.items() if name.startswith(self._feedback_prefix)}
        return {name: torch.empty(shape, dtype=dtype) for name, (dtype, shape) in mine.items()}

    def _of_all(self, tensors: Mapping[str, Tensor]) -> Shapes:
        """Shapes by name of a checkpoint's state, of what this rank has and of what other ranks have, which may hold
        other layers."""
        return {
            name: s for of_rank in gather(self.world.waiting_group, _shapes(tensors)) for name, s in of_rank.items()
        }

    @contextmanager
    def _together(self) -> Iterator[None]:
        """Where one rank cannot read its shards of a checkpoint's state, all ranks raise its error."""
        group = self.world.waiting_group
        if group is None:
            yield
            return
        problems: tuple[Problem, ...] = ()
        own = None
        try:
            yield
        except CheckpointError as error:
            problems, own = error.problems, error
        self.world.waits()
        found = [problem for of_rank in gather(group, problems) for problem in of_rank]
        if found:
            raise CheckpointError.from_problems(list(dict.fromkeys(found))) from own

    def _compared(self) -> frozenset[str]:
        """Names of the state that ranks with the same part of a checkpoint must hold with the same bits. Buffers are
        left out: they may follow each rank's own data, as running means do."""
        params = {f"model.{name}" for name, _ in self.model.named_parameters()}
        return frozenset(params | self._optimizer_tensors().keys())

    def _optimizer_tensors(self) -> dict[str, Tensor]:
        names = {param: name for name, param in self.model.named_parameters()}
        return {
            f"optimizer.{names[param]}.{key}": value
            for group in self.optimizer.param_groups
            for param in group["params"]
            for key, value in self.optimizer.state.get(param, {}).items()
        }

    def _make_optimizer_states(self, stored: Stored) -> None:
        for name, param in self.model.named_parameters():
            prefix = f"optimizer.{name}."
            for key, (dtype, shape) in stored.items():
                if key.startswith(prefix) and "." not in key[len(prefix) :]:
                    self.optimizer.state[param][key[len(prefix) :]] = _empty_state(param, shape, dtype)


def _empty_state(param: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """An empty state of a parameter for a checkpoint, cut as the parameter is where it has rows like it."""
    if isinstance(param, DTensor) and shape[:1] == param.shape[:1]:
        return zeros_beside(shape, dtype, param)
    return torch.empty(shape, dtype=dtype, device=param.device if shape else "cpu")


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The tensors of a model in a checkpoint: parameters and persistent buffers as `model.<fqn>`, detached, each once
    under its first name.

    The same object is the same tensor (tied parameters), and so is the same view of memory that holds its values. A
    DTensor, a tensor on the meta device and the place of a parameter that is stored elsewhere have no such memory.
    """
    named, seen = {}, set()
    for name, value in model.state_dict(keep_vars=True).items():
        if not isinstance(value, Tensor):
            raise AssertionError(f"{name} in the model's state_dict is no tensor: {type(value).__name__}")
        keys = {("object", id(value))} | _memory(value)
        if seen.isdisjoint(keys):
            named[f"model.{name}"] = value.detach()
        seen |= keys
    return named


def _memory(tensor: Tensor) -> set[tuple[Any, ...]]:
    """Key of the memory of a tensor in a checkpoint's state, and its view of it; none where its values are not in
    it."""
    if isinstance(tensor, DTensor) or tensor.is_meta or tensor.untyped_storage().nbytes() < tensor.nbytes:
        return set()
    if not tensor.numel():
        return set()
    return {("memory", tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)}


@torch.no_grad()
def load_model(path: Path, model: nn.Module, *, whole: bool = True) -> None:
    """Load the model's state of a checkpoint into one that is whole on this process, in place.

    Args:
        path: of the checkpoint.
        model: of the same names.
        whole: False where it has some layers of the checkpoint's, under their names in the whole.

    Raises:
        CheckpointError: the checkpoint is of another model, or cannot be read.
    """
    targets, own = model_tensors(model), f"model.{HIDDEN_LOSS}."  # of a run that learns, not of its model
    stored = {name: kind for name, kind in stored_tensors(path).items() if name in targets or not name.startswith(own)}
    there = stored if whole else {name: kind for name, kind in stored.items() if name in targets}
    _compare(f"{path} is a checkpoint of another model.", "model.", _shapes(targets), there)
    read_tensors(path, targets)


def load_newest(run: Path, model: nn.Module, *, whole: bool = True) -> Path:
    """Load the model's state of a run's newest valid checkpoint, as `load_model`; the checkpoint's path.

    Args:
        run: its folder.
        model, whole: see `load_model`.

    Raises:
        CheckpointError: there is none, or it is of another model.
    """
    store = CheckpointStore(run / "checkpoints")
    path, rejected = store.newest_sound()
    store.close()
    for rejection in rejected:
        say(f"note: {rejection.path.name} is not used: {rejection.reason}", error=True)
    if path is None:
        raise CheckpointError(
            "No valid checkpoint in the run folder",
            got=f"{len(rejected)} that are truncated or corrupt" if rejected else "none",
            need="one written by train",
            try_=f"tilewright train {run / 'run.toml'}",
            where=str(run / "checkpoints"),
        )
    load_model(path, model, whole=whole)
    return path


def _compare(what: str, prefix: str, here: Shapes, stored: Stored) -> None:
    """Compare the state of the run (`here`) with that of a checkpoint, by names and shapes.

    Raises:
        CheckpointError: they differ; the first differences are listed.
    """
    there, lines = {name: shape for name, (_, shape) in stored.items() if name.startswith(prefix)}, []
    for name in sorted(here.keys() | there.keys()):
        ours, theirs = here.get(name), there.get(name)
        if ours != theirs:
            lines.append(f"{name.removeprefix(prefix)}: {_shape(theirs)} in the checkpoint, {_shape(ours)} in this run")
    if not lines:
        return
    more = len(lines) - _MAX_DIFFERENCES
    raise CheckpointError(
        what,
        got="\n".join(lines[:_MAX_DIFFERENCES] + ([f"and {more} more"] if more > 0 else [])),
        need="the same names and shapes as the recipe builds",
        try_="train with the recipe of that run (its run.toml), or into another folder: --run.name NEW",
    )


def model_fingerprint(model: nn.Module) -> str:
    """Hash the names and shapes of a model's parameters and persistent buffers: the fingerprint in its checkpoints."""
    return _fingerprint(_shapes(model.state_dict()))


def _fingerprint(shapes: Shapes) -> str:
    rows = sorted(f"{name}:{shape}" for name, shape in shapes.items())
    return xxhash.xxh3_128_hexdigest("\n".join(rows).encode())


def _shapes(tensors: Mapping[str, Tensor]) -> Shapes:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def _shape(shape: tuple[int, ...] | None) -> str:
    return "not there" if shape is None else "x".join(map(str, shape)) or "scalar"
