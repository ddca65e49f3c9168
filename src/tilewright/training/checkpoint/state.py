"""What a checkpoint holds, and how it goes back: everything that a step changes.

Tensors (model, optimizer, torch's generators) under flat names, the rest (Python's and numpy's generators, loss
scale, clipping, data cursor, counters) as JSON:

    model.<fqn>   optimizer.<fqn>.<state>   rng.cpu   rng.cuda.<i>

Parameters that share storage (tied embeddings) are held once, under their first name. Tensors are restored in
place, so the model is never in memory twice. Writing and finding checkpoints is `checkpoint`'s matter.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor, nn

from tilewright.core.errors import CheckpointError
from tilewright.optim.states import update_scales
from tilewright.precision.snapshot import host_states, set_host_states, set_torch_states, torch_states
from tilewright.training.checkpoint.store import CheckpointStore, read_meta, read_tensors, stored_tensors
from tilewright.training.executor.layer_major_setup import LayerMajorParts
from tilewright.training.executor.summon import SummonedParams
from tilewright.training.executor.transaction import Stateful

_MAX_DIFFERENCES = 5

Stored = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]


@dataclass(frozen=True)
class TrainState:
    """References to all that a step changes. Nothing is copied here.

    Args:
        model: parameters and persistent buffers are saved under their fully qualified names.
        optimizer: its states are saved under the names of their parameters.
        parts: components with a small state, by name.
        sliced: the model in layer groups, if it is: while some are stored off the device, one is live at a time.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    parts: Mapping[str, Stateful]
    sliced: LayerMajorParts | None = None

    @contextmanager
    def live(self, *, changes: bool = False) -> Iterator[SummonedParams | None]:
        """What gives the tensors their bytes inside; None where they have them."""
        if self.sliced is None or not self.sliced.is_offloaded:
            yield None
            return
        with SummonedParams(
            self.model, self.optimizer, self.sliced.layer_groups, self.sliced.home, changes=changes
        ) as visit:
            yield visit

    def save(self, store: CheckpointStore, step: int, meta: Mapping[str, Any], *, now: bool = False) -> float:
        """Save everything; see `CheckpointStore.save`."""
        with self.live() as visit:
            if visit is None:
                return store.save(step, self.tensors(), meta, now=now)
            return store.save(step, visit.sorted(self.tensors()), meta, live=visit.tensor)

    def tensors(self) -> dict[str, Tensor]:
        """The live tensors by name, and copies of the generators' states."""
        generators = {f"rng.{name}": state for name, state in torch_states().items()}
        return model_tensors(self.model) | self._optimizer_tensors() | generators

    def meta(self) -> dict[str, Any]:
        """Everything that is not a tensor, in JSON types."""
        return {
            "format": 1,
            "model": model_fingerprint(self.model),
            "parts": {name: part.state_dict() for name, part in self.parts.items()},
            "rng": host_states(),
        }

    def restore(self, path: Path) -> dict[str, Any]:
        """Load a checkpoint into the live objects; returns its meta.

        Optimizer states that exist are loaded in place in their own dtype, missing ones are made as stored. A part
        that the checkpoint does not hold (a loss scale that came with another precision) starts afresh.

        Raises:
            CheckpointError: the checkpoint is of another model or optimizer, or cannot be read.
        """
        meta = read_meta(path)
        stored = stored_tensors(path)
        _check_model(path, self.model, stored)
        self._make_optimizer_states(path, stored)
        targets = model_tensors(self.model) | self._optimizer_tensors()
        rng = {name: torch.empty(shape, dtype=dtype) for name, (dtype, shape) in stored.items() if name[:4] == "rng."}
        with torch.no_grad(), self.live(changes=True) as visit:
            if visit is None:
                read_tensors(path, targets | rng)
            else:
                read_tensors(path, visit.sorted(targets | rng), visit.tensor)
            for param, state in self.optimizer.state.items():
                update_scales(param, state)
        for name, part in self.parts.items():
            if name in meta["parts"]:
                part.load_state_dict(meta["parts"][name])
        set_torch_states({name.removeprefix("rng."): state for name, state in rng.items()})
        set_host_states(meta["rng"])
        return meta

    def _optimizer_tensors(self) -> dict[str, Tensor]:
        names = {param: name for name, param in self.model.named_parameters()}
        return {
            f"optimizer.{names[param]}.{key}": value
            for group in self.optimizer.param_groups
            for param in group["params"]
            for key, value in self.optimizer.state.get(param, {}).items()
        }

    def _make_optimizer_states(self, path: Path, stored: Stored) -> None:
        if any(self.optimizer.state.get(p) for group in self.optimizer.param_groups for p in group["params"]):
            here = {name: tuple(tensor.shape) for name, tensor in self._optimizer_tensors().items()}
            there = {name: shape for name, (_, shape) in stored.items() if name.startswith("optimizer.")}
            raise_on_difference(f"{path} was written by another optimizer.", "optimizer.", here, there)
            return
        for name, param in self.model.named_parameters():
            prefix = f"optimizer.{name}."
            for key, (dtype, shape) in stored.items():
                if key.startswith(prefix) and "." not in key[len(prefix) :]:
                    device = param.device if shape else "cpu"
                    self.optimizer.state[param][key[len(prefix) :]] = torch.empty(shape, dtype=dtype, device=device)


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers as `model.<fqn>`, detached, each storage once under its first name."""
    named, seen = {}, set()
    for name, value in model.state_dict(keep_vars=True).items():
        if not isinstance(value, Tensor):
            raise AssertionError(f"{name} in the model's state_dict is no tensor: {type(value).__name__}")
        key = (value.data_ptr(), value.shape, value.stride()) if value.numel() else name
        if key not in seen:
            seen.add(key)
            named[f"model.{name}"] = value.detach()
    return named


def _check_model(path: Path, model: nn.Module, stored: Stored) -> None:
    here = {name: tuple(tensor.shape) for name, tensor in model_tensors(model).items()}
    there = {name: shape for name, (_, shape) in stored.items() if name.startswith("model.")}
    raise_on_difference(f"{path} is a checkpoint of another model.", "model.", here, there)


def raise_on_difference(
    what: str, prefix: str, here: Mapping[str, tuple[int, ...]], there: Mapping[str, tuple[int, ...]]
) -> None:
    """Compare names and shapes of the run (`here`) with those of a checkpoint (`there`).

    Raises:
        CheckpointError: they differ; the first differences are listed.
    """
    lines = []
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
    """A hash of the names and shapes of parameters and persistent buffers."""
    rows = sorted(f"{name}:{tuple(tensor.shape)}" for name, tensor in model.state_dict().items())
    return xxhash.xxh3_128_hexdigest("\n".join(rows).encode())


def _shape(shape: tuple[int, ...] | None) -> str:
    return "not there" if shape is None else "x".join(map(str, shape)) or "scalar"
