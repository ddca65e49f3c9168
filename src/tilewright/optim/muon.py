"""Muon: matrices are updated by their momentum with all its singular values made about equal, the rest by AdamW.

Keller Jordan et al. 2024 (kellerjordan.github.io/posts/muon); J. Liu et al., "Muon is Scalable for LLM Training", arXiv
2502.16982. A matrix keeps one momentum, where AdamW keeps two moments. `optim.param_groups.muon_groups` makes the
groups; which weights are matrices of hidden layers says `models.base.hidden_matrices`.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from torch import Tensor
from torch.distributed.tensor import DTensor

from tilewright.core.errors import ConfigError
from tilewright.ops.base.tensor_parts import columns_cut, holds_rows, local, num_cuts, numbering
from tilewright.ops.kernels import Kernels
from tilewright.optim.adam import DeepSeekAdam
from tilewright.optim.muon_shards import Axes, axes_of, directions, rounds
from tilewright.optim.muon_update import AdjustLr, MatrixUpdate, MuonHyper, update_matrix
from tilewright.optim.param_groups import check_settings
from tilewright.optim.states import Master, Moments, StateFormat


class Muon(DeepSeekAdam):
    """Muon for the parameters of groups with `"muon": True`, AdamW for those of all others.

    With FP32 parameters and FP32 moments matrices are updated as `torch.optim.Muon` does, bit for bit, and the rest as
    `torch.optim.AdamW` does. A stack of matrices [E, R, C], such as the experts of a layer, is E matrices; its group
    says `"stacks": True`, since weights of convolutions have three dims too. A sharded matrix is put together on one of
    its ranks in each step (`optim.muon_shards`); all ranks must step together.

    Args:
        params: parameters or parameter groups.
        lr: learning rate of both kinds of groups.
        betas: of AdamW: decay of the first and second moment.
        eps: of AdamW.
        weight_decay: decoupled decay, as a rate (multiplied by lr).
        momentum: share of the momentum that is kept from step to step.
        nesterov: take the momentum as it will be after one more step of the same gradient.
        num_steps: Newton-Schulz iterations.
        adjust_lr: "match_rms_adamw" multiplies the rate of a matrix by 0.2 sqrt(max(R, C)), so that the rate and decay
            that suit AdamW suit both; "original" by sqrt(max(1, R / C)).
        moments: storage of the momentum and of AdamW's moments. See `DeepSeekAdam`.
        master: see `DeepSeekAdam`.
        kernels: implementations to use; the machine's best by default.
        seed: of the stochastic rounding.
        numbers: see `DeepSeekAdam`.

    Raises:
        ConfigError: a setting out of range or not known, formats that do not go together, no group with a "muon", or a
            parameter in a group of Muon that is no matrix, or of which ranks hold no rows and columns.

    Example:
        >>> import torch
        >>> weight, bias = torch.nn.Parameter(torch.eye(2)), torch.nn.Parameter(torch.ones(2))
        >>> groups = [{"params": [weight], "muon": True}, {"params": [bias]}]
        >>> optimizer = Muon(groups, lr=0.1, weight_decay=0.0)
        >>> weight.grad, bias.grad = torch.eye(2), torch.ones(2)
        >>> optimizer.step(); sorted(optimizer.state[weight]), sorted(optimizer.state[bias])
        (['exp_avg', 'step'], ['exp_avg', 'exp_avg_sq', 'step'])
    """

    _has_muon = True

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        *,
        momentum: float = 0.95,
        nesterov: bool = True,
        num_steps: int = 5,
        adjust_lr: AdjustLr = "match_rms_adamw",
        moments: Moments = "fp32",
        master: Master = "fp32",
        kernels: Kernels | None = None,
        seed: int = 0,
        numbers: Mapping[Tensor, int] | None = None,
    ):
        self._muon = {"momentum": momentum, "nesterov": nesterov, "num_steps": num_steps, "adjust_lr": adjust_lr}
        common = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        check_settings(common | self._muon | {"muon": True, "stacks": False}, "arguments", muon=True)
        more = {"moments": moments, "master": master, "kernels": kernels, "seed": seed, "numbers": numbers}
        super().__init__(params, lr, betas, eps, weight_decay, **more)
        if not any("muon" in group for group in self.param_groups):
            raise ConfigError(
                "No group says which parameters are Muon's",
                got=f'{len(self.param_groups)} groups without "muon", {len(self._all_params())} parameters in all',
                need='"muon": True in the groups of hidden matrices; all other groups are AdamW\'s',
                try_="Muon(muon_groups(model, hidden_matrices(model), weight_decay=0.1, stacks=True)), or\n"
                'Muon([{"params": matrices, "muon": True}, {"params": rest}])',
            )

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_muon": self._muon}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters to Muon with settings of their own: see `DeepSeekAdam`. A group with `"muon": True` may have
        `momentum`, `nesterov`, `num_steps` and `adjust_lr` of its own. With `"stacks": True` its parameters of three
        dims are stacks of matrices [E, R, C]."""
        group = param_group
        if group.get("muon"):
            group = {**self._muon, "stacks": False, **group}
            given = group["params"]
            group["params"] = [given] if isinstance(given, Tensor) else list(given)
            for item in group["params"]:
                param = item[1] if isinstance(item, tuple) else item
                if isinstance(param, Tensor):
                    _check_matrix(param, group["stacks"])
        super().add_param_group(group)

    def format_of(self, param: Tensor) -> StateFormat:
        """The format of Muon's states of a parameter: those of a matrix have no second moment."""
        return replace(self.format, second=not self._is_muon(param))

    @property
    def meets_ranks(self) -> bool:
        """True if ranks meet in an update of Muon; see `DeepSeekAdam`: they share out the directions of sharded
        matrices."""
        return any(self._is_muon(param) and bool(axes_of(param)[0]) for param in self._all_params())

    def step_params(self, params: Sequence[Tensor], grads: Sequence[Tensor] | None = None) -> None:
        """Update some parameters once by Muon: see `DeepSeekAdam`."""
        for param in params:
            group = self.param_groups[self._place(param).group]
            if group.get("muon"):
                _check_matrix(param, group.get("stacks", False))
        super().step_params(params, grads)

    def _is_muon(self, param: Tensor) -> bool:
        return bool(self.param_groups[self._place(param).group].get("muon"))

    def _updates(self, params: Sequence[Tensor], grads: Sequence[Tensor]) -> Iterator[list[Tensor]]:
        pairs = list(zip(params, grads, strict=True))
        others = [pair for pair in pairs if not self._is_muon(pair[0])]
        if others:
            yield from super()._updates([param for param, _ in others], [grad for _, grad in others])
        sharded: dict[tuple[Axes, int], list[tuple[DTensor, Tensor]]] = {}
        for param, grad in pairs:
            if not self._is_muon(param):
                continue
            axes, _ = axes_of(param)
            if not axes:
                update_matrix(self._matrix_update(param), local(grad, like=param), self.kernels)
                yield [param]
            else:
                steps = self.param_groups[self._place(param).group]["num_steps"]
                sharded.setdefault((axes, steps), []).append((cast(DTensor, param), grad))
        for (axes, steps), matrices in sharded.items():
            for indices in rounds([param for param, _ in matrices], axes):
                yield self._step_round([matrices[index] for index in indices], steps, axes)

    def _step_round(self, matrices: Sequence[tuple[DTensor, Tensor]], num_steps: int, axes: Axes) -> list[Tensor]:
        params = [param for param, _ in matrices]
        updates = [self._matrix_update(param) for param in params]
        parts = [update.begin(local(grad, like=param)) for update, (param, grad) in zip(updates, matrices, strict=True)]
        shapes, cuts = [param.shape for param in params], [axes_of(param)[1] for param in params]
        found = directions(parts, shapes, cuts, num_steps, axes, self.kernels)
        for update, direction in zip(updates, found, strict=True):
            update.end(direction)
        return list(params)

    def _matrix_update(self, param: Tensor) -> MatrixUpdate:
        place, state = self._place(param), self._followed_state(param)
        group = self.param_groups[place.group]
        hyper = MuonHyper(
            float(group["lr"]),
            group["weight_decay"],
            group["momentum"],
            group["nesterov"],
            group["num_steps"],
            group["adjust_lr"],
            self._hyper(place.group, int(state["step"]) + 1),
        )
        return MatrixUpdate(local(param.detach()), state, place.number, hyper, param.shape, *numbering(param))


def _check_matrix(param: Tensor, stacks: bool) -> None:
    """Check a matrix for Muon: raise where Muon cannot update it.

    Args:
        param: in a group of Muon's.
        stacks: of three dims it is a stack of matrices.

    Raises:
        ConfigError: no matrix, or one of which a rank holds no block of rows and columns; a stack sharded otherwise
            than by matrices along one axis.
    """
    by_rows = columns_cut(param) is not None if param.ndim == 2 else holds_rows(param) and num_cuts(param) <= 1
    if param.ndim in ((2, 3) if stacks else (2,)) and by_rows and param.dtype.is_floating_point:
        return
    placed = f", placements {param.placements}" if isinstance(param, DTensor) else ""
    try_ = 'a group of AdamW for it, without "muon"'
    if param.ndim == 3 and not stacks:
        try_ += ', if it is a convolution\'s\n"stacks": True in its group, if it is a stack of matrices, of experts say'
    raise ConfigError(
        "Parameter that Muon cannot update",
        got=f"a parameter of shape {tuple(param.shape)} and {param.dtype}{placed}",
        need='a float matrix [R, C], or in a group with "stacks": True a stack of them [E, R, C],\n'
        "whole or in parts of rows and columns, even ones where several axes of the mesh cut the same dim; stacks in "
        "whole matrices",
        try_=try_,
    )
