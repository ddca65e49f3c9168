"""DeepSeekAdam: AdamW with moments in FP32 or BF16, and FP32 masters or stochastically rounded BF16 weights.

Named after the optimizer that the articles ask for; BF16 moments are what DeepSeek-V3 trained with
(section 3.3.3 of its report). With FP32 parameters and FP32 moments it is torch's AdamW.
"""

from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from torch import Tensor

from tilewright.ops.kernels import Kernels
from tilewright.ops.ref.adam import AdamHyper


class DeepSeekAdam(torch.optim.Optimizer):
    """AdamW over parameters of any float dtype.

    Args:
        params: parameters or parameter groups.
        lr: learning rate.
        betas: decay of the first and second moment.
        eps: added to the root of the second moment.
        weight_decay: decoupled decay, as a rate (multiplied by lr).
        moments: storage of both moments.
        master: "fp32" keeps an FP32 copy of every 16-bit parameter in the state (FP32 parameters are their own
            master); "stochastic" keeps none and rounds the BF16 parameter stochastically.
        kernels: implementations to use; the machine's best by default.
        seed: of the stochastic rounding.

    Raises:
        ValueError: a hyperparameter out of range, or "stochastic" with FP16 parameters.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(3))
        >>> optimizer = DeepSeekAdam([weight], lr=0.1, weight_decay=0.0)
        >>> weight.grad = torch.tensor([1.0, -1.0, 0.5]); optimizer.step(); weight.data
        tensor([0.9000, 1.1000, 0.9000])
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        *,
        moments: Literal["fp32", "bf16"] = "fp32",
        master: Literal["fp32", "stochastic"] = "fp32",
        kernels: Kernels | None = None,
        seed: int = 0,
    ):
        if lr < 0 or eps <= 0 or weight_decay < 0 or not all(0 <= beta < 1 for beta in betas):
            raise ValueError(
                "need lr >= 0, eps > 0, weight_decay >= 0 and betas in [0, 1); "
                f"got {lr=}, {eps=}, {weight_decay=}, {betas=}"
            )
        if moments not in ("fp32", "bf16") or master not in ("fp32", "stochastic"):
            raise ValueError(f"need moments fp32|bf16 and master fp32|stochastic; got {moments=}, {master=}")
        self.kernels = kernels or Kernels.default()
        self.moments_dtype = torch.bfloat16 if moments == "bf16" else None
        self.master = master
        self.seed = seed
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        if master == "stochastic" and any(p.dtype == torch.float16 for p in self._parameters()):
            raise ValueError("stochastic rounding is defined for BF16 parameters; FP16 ones need master='fp32'")

    def _parameters(self) -> Iterable[Tensor]:
        return (param for group in self.param_groups for param in group["params"])

    def _init_state(self, param: Tensor) -> dict[str, Any]:
        state = self.state[param]
        if not state:
            wide = torch.promote_types(param.dtype, torch.float32)
            like = {"dtype": self.moments_dtype or wide, "memory_format": torch.preserve_format}
            state["step"] = torch.tensor(0, dtype=torch.int64)
            state["exp_avg"] = torch.zeros_like(param, **like)
            state["exp_avg_sq"] = torch.zeros_like(param, **like)
            if self.master == "fp32" and param.dtype != wide:
                state["master"] = param.detach().to(wide)
        return state

    def init_states(self) -> None:
        """Make all states now rather than at the first step, so that a checkpoint can be loaded into them."""
        for param in self._parameters():
            self._init_state(param)

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:
        """One update of every parameter that has a gradient. Returns the closure's loss, if one is given."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group_index, group in enumerate(self.param_groups):
            for (step, device, dtype), (params, targets, grads, firsts, seconds) in self._batches(group).items():
                beta1, beta2 = group["betas"]
                hyper = AdamHyper(
                    step, float(group["lr"]), beta1, beta2, group["eps"], group["weight_decay"], self.seed + group_index
                )
                self.kernels.adam(device, dtype)(targets, grads, firsts, seconds, hyper)
                for param, target in zip(params, targets, strict=True):
                    if target.data_ptr() != param.data_ptr():
                        param.copy_(target)
        return loss

    def _batches(self, group: dict[str, Any]) -> dict[tuple[int, str, torch.dtype], tuple[list[Tensor], ...]]:
        """The group's tensors by (step, device, dtype updated): parameters, what is updated, gradients, moments."""
        batches: dict[tuple[int, str, torch.dtype], tuple[list[Tensor], ...]] = {}
        for param in group["params"]:
            if param.grad is None:
                continue
            state = self._init_state(param)
            state["step"] += 1
            # The data, because the compiler cannot take a parameter whose gradient has another dtype (torch 2.13).
            target = state.get("master", param.data)
            # A wide target needs a gradient of its own dtype; a BF16 one takes the FP32 gradient as it is.
            wide = target.dtype == torch.promote_types(target.dtype, torch.float32)
            grad = param.grad.to(target.dtype) if wide else param.grad
            narrowest = min(target.dtype, state["exp_avg"].dtype, key=lambda dtype: dtype.itemsize)
            key = (int(state["step"]), param.device.type, narrowest)
            lists = batches.setdefault(key, ([], [], [], [], []))
            for items, item in zip(lists, (param, target, grad, state["exp_avg"], state["exp_avg_sq"]), strict=True):
                items.append(item)
        return batches
