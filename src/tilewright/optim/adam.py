"""DeepSeekAdam: AdamW with moments in FP32, BF16 or 8 bits, and FP32 masters, 24-bit weights or stochastically rounded
BF16 weights.

Named after the optimizer that the articles ask for; BF16 moments are what DeepSeek-V3 trained with
(section 3.3.3 of its report). With FP32 parameters and FP32 moments it is torch's AdamW.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tilewright.core.errors import ConfigError
from tilewright.ops.backends.native.adam import fused
from tilewright.ops.backends.ref.adam import AdamHyper
from tilewright.ops.backends.ref.low_bit_adam import LowBitTensors
from tilewright.ops.base.tensor_parts import local, numbering, zeros_beside
from tilewright.ops.kernels import Kernels
from tilewright.optim.param_groups import check_settings
from tilewright.optim.states import Layout, Master, Moments, StateFormat, check_formats, loadable, readable
from tilewright.optim.validate import check_not_replaced, check_param, check_update

_OWN = ("kernels", "format", "seed", "num_updates", "_numbers")
"""State of a copy in addition to torch's."""


class DeepSeekAdam(torch.optim.Optimizer):
    """AdamW over parameters of any float dtype.

    Args:
        params: parameters or parameter groups.
        lr: learning rate.
        betas: decay of the first and second moment.
        eps: added to the root of the second moment.
        weight_decay: decoupled decay, as a rate (multiplied by lr).
        moments: storage of both moments. "8bit": codes with a scale for 128 of them, see `ops.adam`.
        master: "fp32" keeps an FP32 copy of every 16-bit parameter in the state (FP32 parameters are their own
            master); "split24" keeps 8 bits more of every BF16 parameter there; "stochastic" keeps nothing. The last two
            round stochastically. "split24" goes with 8-bit moments.
        kernels: implementations to use; the machine's best by default.
        seed: of the stochastic rounding.
        numbers: of parameters in the random streams of the rounding, where these are some of a model's; None: their
            places in the groups.

    Raises:
        ConfigError: a setting out of range or not known, or formats that do not go together or with the parameters.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(3))
        >>> optimizer = DeepSeekAdam([weight], lr=0.1, weight_decay=0.0)
        >>> weight.grad = torch.tensor([1.0, -1.0, 0.5]); optimizer.step(); weight.data
        tensor([0.9000, 1.1000, 0.9000])
    """

    _has_muon = False
    """Groups may be Muon's."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        *,
        moments: Moments = "fp32",
        master: Master = "fp32",
        kernels: Kernels | None = None,
        seed: int = 0,
        numbers: Mapping[Tensor, int] | None = None,
    ):
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        check_settings(defaults, "arguments", muon=self._has_muon)
        check_formats(moments, master)
        self.kernels = kernels or Kernels.default()
        self.format = StateFormat(moments, master)
        self.seed = seed
        self.num_updates = 0
        """Calls of `step` that updated all they had to; hooks may have failed after that."""
        self._numbers = dict(numbers or {})
        self._places: dict[Tensor, _ParamSlot] = {}
        super().__init__(params, defaults)

    def __getstate__(self) -> dict[str, Any]:
        """State of DeepSeekAdam for a copy or a pickle; without hooks, as torch has it."""
        return super().__getstate__() | {name: self.__dict__[name] for name in _OWN}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._places = {}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters to Adam. It may have `lr`, `betas`, `eps` and `weight_decay` of its own.

        Raises:
            ConfigError: a setting out of range or not known (`optim.param_groups`), or a parameter that cannot be
                updated with states of this format; the group is not added.
        """
        super().add_param_group(param_group)
        try:
            self._check_groups([len(self.param_groups) - 1])
            for param in self.param_groups[-1]["params"]:
                if param.requires_grad:
                    check_param(param, self.format_of(param))
        except ConfigError:
            self.param_groups.pop()
            raise

    def _check_groups(self, indices: Iterable[int]) -> None:
        for index in indices:
            check_settings(self.param_groups[index], f"parameter group {index}", muon=self._has_muon)

    def _all_params(self) -> list[Tensor]:
        return list(dict.fromkeys(param for group in self.param_groups for param in group["params"]))

    def _place(self, param: Tensor) -> "_ParamSlot":
        """Place of a parameter in Adam's groups, which other code may have changed."""
        place = self._places.get(param)
        if place is None or not place.holds(param, self.param_groups):
            members = [(g, i, p) for g, group in enumerate(self.param_groups) for i, p in enumerate(group["params"])]
            self._places = {
                p: _ParamSlot(g, i, self._numbers.get(p, number)) for number, (g, i, p) in enumerate(members)
            }
        if param not in self._places:
            raise ConfigError(
                "Parameter that is not in this optimizer",
                got=f"a tensor of shape {tuple(param.shape)} and {param.dtype}",
                need=f"one of the {len(self._places)} parameters in its groups",
                try_='optimizer.add_param_group({"params": [param]})',
            )
        return self._places[param]

    def format_of(self, param: Tensor) -> StateFormat:
        """Format of Adam's states of a parameter, as they are stored."""
        return self.format

    def state_layout(self, param: Tensor) -> Layout:
        """Shape and dtype of each of Adam's states of a parameter but `step`, from its own shape and dtype (meta will
        do)."""
        return self.format_of(param).layout(param.shape, param.dtype)

    def _init_state(self, param: Tensor) -> dict[str, Any]:
        state = self.state[param]
        if not state:
            made = {"step": torch.tensor(0, dtype=torch.int64)}
            for name, (shape, dtype) in self.state_layout(param).items():
                if shape == param.shape:
                    made[name] = torch.zeros_like(param, dtype=dtype, memory_format=torch.preserve_format)
                else:
                    made[name] = zeros_beside(shape, dtype, param)
            if "master" in made:
                local(made["master"]).copy_(local(param.detach()))
            state.update(made)  # all of them or none
        return state

    def init_states(self, params: Iterable[Tensor] | None = None) -> None:
        """Initialise Adam's states of these parameters (of all, by default) now rather than at their first step, so
        that a checkpoint can be loaded into them."""
        for param in self._all_params() if params is None else params:
            self._init_state(param)

    def state_dict(self) -> dict[str, Any]:
        """Adam's state dict, as torch's.

        Raises:
            ConfigError: a parameter has states and is in no group any more.
        """
        stale = {param for param in self.state if isinstance(param, Tensor)} - set(self._all_params())
        if stale:
            raise ConfigError(
                "States of parameters that are no longer in the optimizer",
                got=f"{len(stale)} parameters, the first of shape {tuple(next(iter(stale)).shape)}",
                need="states of the parameters in the groups",
                try_="optimizer.state.pop(param) for each parameter that was taken out or replaced",
            )
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore Adam's state. States have to be of this optimizer's formats; torch would cast them.

        States of torch.optim.AdamW are taken where the moments are those that are kept here (FP32 parameters with FP32
        moments). All of it is loaded or, on an error, nothing.

        Raises:
            CheckpointError: the states are of other formats or shapes, or follow another law, or settings of the groups
                are out of range or not known.
            ValueError: other numbers of groups or parameters (torch's).
        """
        states: dict[Tensor, dict[str, Any]] = {}

        def check(_: torch.optim.Optimizer, loading: dict[str, Any]) -> dict[str, Any]:
            sizes = (
                [len(group["params"]) for group in groups] for groups in (self.param_groups, loading["param_groups"])
            )
            if next(sizes) == next(sizes):  # else torch refuses
                loading["param_groups"] = readable(loading["param_groups"], self.param_groups, has_muon=self._has_muon)
                params = [param for group in self.param_groups for param in group["params"]]
                states.update(loadable(loading, params, [self.format_of(param) for param in params]))
            return {**loading, "state": {}}  # nothing for torch to cast

        # The last hook before, so that it sees what others make of the states, and the first one after.
        handles = [
            self.register_load_state_dict_pre_hook(check),
            self.register_load_state_dict_post_hook(lambda _: self.state.update(states), prepend=True),
        ]
        try:
            super().load_state_dict(state_dict)
        finally:
            for handle in handles:
                handle.remove()

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:
        """Update every parameter that has a gradient once by Adam. Returns the closure's loss, if any.

        Where memory runs out on the way, call it again: see `step_params`.

        Raises:
            ConfigError: a parameter, gradient or state that cannot be updated (`optim.validate`), or
                a setting of its group (`optim.param_groups`). Nothing has changed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        params = self._all_params()
        check_not_replaced(params)
        if not self.state and params and all(param.grad is None for param in params):
            warnings.warn(
                f"DeepSeekAdam.step changed nothing: none of its {len(params)} parameters has a gradient. "
                "Either backward was not called, or the model has other parameters now: make the optimizer after all "
                "that replaces them.",
                stacklevel=2,
            )
        self.step_params(params)
        self.num_updates += 1
        return loss

    @property
    def meets_ranks(self) -> bool:
        """True if ranks meet in an update of Adam: exchange data, so that none can repeat its part alone."""
        return False

    @torch.no_grad()
    def step_params(self, params: Sequence[Tensor], grads: Sequence[Tensor] | None = None) -> None:
        """Update some parameters once by Adam, with the settings of their groups. The result of a step does not depend
        on which parameters are updated together, or in which order. Hooks of `step` are not called.

        Where an error comes out of it, of an allocator say, each parameter was updated whole or not at all, and those
        that were have no gradient any more: called again with what has one still, it continues where it stood.

        Args:
            params: parameters of this optimizer.
            grads: their gradients, FP32; by default what is in `.grad`, and parameters without are left alone.

        Raises:
            ConfigError: see `step`.
        """
        if grads is None:
            params = [param for param in params if param.grad is not None]
            grads = [param.grad for param in params if param.grad is not None]
        groups: set[int] = set()
        for param, grad in zip(params, grads, strict=True):
            groups.add(self._place(param).group)
            check_update(param, grad, self.state.get(param, {}), self.format_of(param))
        self._check_groups(sorted(groups))
        self.init_states(params)
        done: list[Tensor] = []
        try:
            for part in self._updates(params, grads):
                for param in part:
                    self.state[param]["step"] += 1
                done += part
        finally:
            if len(done) < len(params):
                for param in done:
                    param.grad = None

    def _updates(self, params: Sequence[Tensor], grads: Sequence[Tensor]) -> Iterator[list[Tensor]]:
        """Updates by Adam; gives the parameters that were updated as it goes."""
        return self._low_bit(params, grads) if self.format.moments == "8bit" else self._wide(params, grads)

    def _wide(self, params: Sequence[Tensor], grads: Sequence[Tensor]) -> Iterator[list[Tensor]]:
        """Wide updates by Adam with moments in 16 or 32 bits; gives the parameters that were updated as it goes."""
        for alike, pairs in self._batches(params, grads).items():
            update = self.kernels.adam(alike.device_type, alike.narrowest, masters=alike.in_pass)
            hyper = self._hyper(alike.group, alike.step)
            # Torch's kernel allocates nothing once it writes; of the others that is true of one tensor. Gradients of
            # masters may be 16-bit: one at a time is made FP32.
            together = update is fused and not alike.in_pass
            for part in [pairs] if together else [[pair] for pair in pairs]:
                rows = zip(*(self._row(param, grad, alike) for param, grad in part), strict=True)
                targets, values, exp_avgs, exp_avg_sqs, numbers, firsts, skips, weights = map(list, rows)
                masters = weights if alike.in_pass else ()
                update(targets, values, exp_avgs, exp_avg_sqs, numbers, hyper, firsts, masters, skips)
                for target, weight in zip(targets, weights, strict=True):
                    if alike.masters and not alike.in_pass:
                        weight.copy_(target)
                yield [param for param, _ in part]

    def _low_bit(self, params: Sequence[Tensor], grads: Sequence[Tensor]) -> Iterator[list[Tensor]]:
        """Low-bit updates by Adam with moments in 8 bits, one tensor at a time."""
        for param, grad in zip(params, grads, strict=True):
            self._step_low_bit(param, grad)
            yield [param]

    def _hyper(self, group_index: int, step: int) -> AdamHyper:
        group = self.param_groups[group_index]
        beta1, beta2 = group["betas"]
        return AdamHyper(step, float(group["lr"]), beta1, beta2, group["eps"], group["weight_decay"], self.seed)

    def _step_low_bit(self, param: Tensor, grad: Tensor) -> None:
        """Update a parameter by Adam with low-bit states: contiguous tensors in place, others by way of a copy."""
        place, state, weight = self._place(param), self._held_state(param), local(param.data)
        written = {"target": state.get("master", weight), "low": state.get("low")}
        written["weight"] = weight if "master" in state else None
        written |= {name: state[name] for name in self.state_layout(param) if name not in ("master", "low")}
        flat: dict[str, Any] = {name: None if part is None else part.contiguous() for name, part in written.items()}
        grad = local(grad, like=param)
        grad = grad if grad.dtype == torch.bfloat16 else grad.to(torch.float32)
        first, skip = numbering(param)
        tensors = LowBitTensors(**flat, grad=grad.contiguous(), number=place.number, first=first, skip=skip)
        self.kernels.low_bit_adam(tensors, self._hyper(place.group, int(state["step"]) + 1))
        for name, tensor in written.items():
            if tensor is not None and flat[name] is not tensor:
                tensor.copy_(flat[name])

    def _held_state(self, param: Tensor) -> dict[str, Tensor]:
        """This rank's part of Adam's state of a parameter."""
        return {name: local(value) for name, value in self.state[param].items()}

    def _followed_state(self, param: Tensor) -> dict[str, Tensor]:
        """This rank's part of Adam's state, after it has followed writes to the parameter."""
        state = self._held_state(param)
        if "master" in state:
            self.kernels.follow_writes(state["master"], local(param.data))
        return state

    def _batches(
        self, params: Sequence[Tensor], grads: Sequence[Tensor]
    ) -> dict["_Alike", list[tuple[Tensor, Tensor]]]:
        """Batch the parameters and gradients of an Adam update by what a call has in common."""
        batches: dict[_Alike, list[tuple[Tensor, Tensor]]] = {}
        for param, grad in zip(params, grads, strict=True):
            state = self.state[param]
            dtypes = state.get("master", param).dtype, state["exp_avg"].dtype
            narrowest = min(dtypes, key=lambda dtype: dtype.itemsize)
            group, step = self._place(param).group, int(state["step"]) + 1
            alike = _Alike(group, step, param.device.type, narrowest, "master" in state)
            batches.setdefault(alike, []).append((param, grad))
        return batches

    def _row(self, param: Tensor, grad: Tensor, alike: "_Alike") -> tuple[Any, ...]:
        """One row of an Adam update: updated tensor, gradient, moments, its number and its elements', weight."""
        state = self._held_state(param) if alike.in_pass else self._followed_state(param)
        # The data, because the compiler cannot take a parameter whose gradient has another dtype (torch 2.13).
        weight = local(param.data)
        target = state.get("master", weight)
        # A wide target needs a gradient of its own dtype; a BF16 one takes the FP32 gradient as it is, and what updates
        # masters with their weights any.
        wide = target.dtype == torch.promote_types(target.dtype, torch.float32) and not alike.in_pass
        grad = local(grad, like=param)
        grad = grad.to(target.dtype) if wide else grad
        return target, grad, state["exp_avg"], state["exp_avg_sq"], self._place(param).number, *numbering(param), weight


@dataclass(frozen=True)
class _ParamSlot:
    """Group of a parameter, its index there, and its number among all, which stands for it in the random streams of
    its rounding."""

    group: int
    index: int
    number: int

    def holds(self, param: Tensor, groups: Sequence[dict[str, Any]]) -> bool:
        """True if a slot of Adam holds the parameter: it is at this index of this group."""
        members = groups[self.group]["params"] if self.group < len(groups) else ()
        return self.index < len(members) and members[self.index] is param


@dataclass(frozen=True)
class _Alike:
    """Key of the parameters that one Adam call may update: group, number of the update, device, narrowest stored dtype,
    and whether masters are updated."""

    group: int
    step: int
    device_type: str
    narrowest: torch.dtype
    masters: bool

    @property
    def in_pass(self) -> bool:
        """True if the update itself compares FP32 masters with their weights and stores them, as it does on CPUs. On
        GPUs torch's kernel does that before, for all parameters in a few launches."""
        return self.masters and self.device_type == "cpu"
