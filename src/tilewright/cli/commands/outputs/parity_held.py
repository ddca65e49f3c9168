"""Choices that `doctor --parallel` holds still on the ranks, so that it compares sums and not what hangs on their last
bit.

A router whose scores come out in another last bit sends a token to another expert: from there on the two sides compute
different functions, and neither is wrong. So one process writes down what its routers choose, and the ranks take that;
how often they would have chosen otherwise is compared for itself.

Adam divides small gradients by small ones, and Muon makes directions of equal length of large and of small parts of a
gradient, so weights would differ by as much as the smallest part does, and by more with each step. So the gradients of
each step are compared, and then replaced by those of one process: both sides update with the same ones, from the same
weights.

Legend: B rows  S positions  N tokens  K experts a token.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tilewright.memory.layer_major.replay_random import TopKChoices
from tilewright.models.base.preference import rows_of
from tilewright.models.base.routers import find_routers
from tilewright.models.decoder.moe import MoE, Router
from tilewright.ops.base.tensor_parts import beside
from tilewright.parallel.pipeline.stage_base import Staged

Arrays = Mapping[str, np.ndarray]


class HeldChoices:
    """The choices of a model's routers, by step, rows and router: written down, or taken from earlier ones.

    Args:
        model: in the formats and the parts that it is trained in; in stages with layers that run forward once.
        given: what another one has written down; None: this one does.
    """

    def __init__(self, model: Any, given: Arrays | None) -> None:
        self._given = given
        self.step = 0
        """To be set before each one."""
        self.seen: dict[str, np.ndarray] = {}
        """What was written down."""
        self._rows, self._shape = "", torch.Size()
        self._changed: Counter[str] = Counter()
        self._made: Counter[str] = Counter()
        self._calls: Counter[str] = Counter()
        modules = dict(model.named_modules())
        stages = _stages_of(model)
        for stage in stages:  # passes of micro-batches take turns, and not each rank has the embedding
            stage.register_forward_pre_hook(self._begin_stage, with_kwargs=True)
        if not stages:
            tokens = next(module for module in modules.values() if isinstance(module, nn.Embedding))
            tokens.register_forward_pre_hook(self._begin, prepend=True)  # what cuts it reads other numbers
        slices = {module.gate: module.slices for module in modules.values() if isinstance(module, MoE)}
        for name, module in modules.items():
            if isinstance(module, Router):
                module.choices = self._of(name, slices.get(module))
        foreign = {name for name, module in modules.items() if module in set(find_routers(model))}
        around = {name.rpartition(".")[0] for name in foreign if not isinstance(modules[name], Router)} - foreign
        for name in sorted(around):
            self._hold_foreign(name, modules[name])

    def shares(self) -> dict[str, tuple[int, int]]:
        """Count, by router, the choices that this side of the parity check would have made otherwise, and all
        choices."""
        return {name: (self._changed[name], made) for name, made in self._made.items()}

    def _begin(self, _: nn.Module, args: tuple[Any, ...]) -> None:
        self._read(args[0])

    def _begin_stage(self, _: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self._read(rows_of(kwargs["micro_batch"].batch)["input_ids"])

    def _read(self, ids_BS: Tensor) -> None:
        self._rows = ""
        if not torch.is_grad_enabled():  # a model is tried out: the same rows, and documents of several kinds
            return
        ids_BS = ids_BS.detach().cpu().contiguous()
        self._rows, self._shape = hashlib.sha256(ids_BS.numpy().tobytes()).hexdigest()[:16], ids_BS.shape

    def _of(self, name: str, slices: Any) -> Callable[[Callable[[], Tensor]], Tensor]:
        return lambda choose: self._choice(name, 0, slices, choose)

    def _hold_foreign(self, name: str, mixture: nn.Module) -> None:
        """Hold choices of transformers' routers in the parity check: they, or what is around them, choose by `topk`,
        some several times in one call."""
        open_modes: list[TopKChoices] = []

        def next_choice(choose: Callable[[], Tensor]) -> Tensor:
            self._calls[name] += 1
            return self._choice(name, self._calls[name], None, choose)

        def before(*_: Any) -> None:
            self._calls[name] = 0
            open_modes.append(TopKChoices(next_choice))
            open_modes[-1].__enter__()

        def behind(*_: Any) -> None:
            open_modes.pop().__exit__(None, None, None)

        mixture.register_forward_pre_hook(before)
        mixture.register_forward_hook(behind, always_call=True)

    @torch.no_grad()
    def _choice(self, name: str, call: int, slices: Any, choose: Callable[[], Tensor]) -> Tensor:
        key = f"choice/{self.step}/{self._rows}/{name}/{call}"
        own = choose()
        if not self._rows:
            return own
        if self._given is None:
            self.seen[key] = own.cpu().numpy()
            self._made[name] += own.numel()
            return own
        given = torch.from_numpy(self._given[key]).to(own.device)
        if slices is not None:
            given = slices.enter(given.view(*self._shape, -1)).flatten(0, 1)
        self._made[name] += own.numel()
        self._changed[name] += int((own.sort(-1).values != given.sort(-1).values).sum())
        return given


def _stages_of(model: nn.Module) -> Sequence[nn.Module]:
    return model.stages if isinstance(model, Staged) else ()


def hold_gradients(named: Iterable[tuple[str, nn.Parameter]], given: Arrays, suffix: str) -> None:
    """Hold gradients in the parity check: put those of one process in the place of a rank's, each in the part that the
    rank has.

    Args:
        named: parameters of this rank, by their names in the whole model.
        given: whole gradients, under `gradient/NAME` and the suffix.
        suffix: of the step.
    """
    for name, param in named:
        key = f"gradient/{name}{suffix}"
        if param.grad is not None and key in given:
            whole = torch.from_numpy(given[key]).to(param.grad.dtype)
            param.grad = beside(whole, param)
