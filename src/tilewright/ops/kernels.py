"""The operations of one run, each with its chosen implementation.

One `Kernels` object is made for a machine and handed to the models and the optimizer; there is no
global state. `explain` lists every choice with the reasons against the other candidates.
"""

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from tilewright.core.errors import HardwareError
from tilewright.core.hardware import Machine, detect_machine
from tilewright.ops.adam import ADAM
from tilewright.ops.attention import ATTENTION
from tilewright.ops.dispatch import Case, Choice, choose
from tilewright.ops.linear import LINEAR
from tilewright.ops.loss import LINEAR_CROSS_ENTROPY
from tilewright.ops.norm import RMS_NORM
from tilewright.ops.ref import math as ref

OPS = (LINEAR, RMS_NORM, ATTENTION, LINEAR_CROSS_ENTROPY, ADAM)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

Key = tuple[str, str, torch.dtype]


class Kernels:
    """Chosen implementations of all operations on one machine.

    Args:
        machine: facts about this machine.
        overrides: candidate by operation name, "auto" where absent (recipe section `[ops]`).
        compile: False bars the candidates built by torch.compile.

    Raises:
        ConfigError: an override that does not exist. (One that cannot run a case is a HardwareError at its first use.)

    Example:
        >>> kernels = Kernels.default()
        >>> kernels.rms_norm(torch.ones(2, 4), torch.ones(4), 1e-5).shape
        torch.Size([2, 4])
    """

    def __init__(self, machine: Machine, overrides: Mapping[str, str] | None = None, *, compile: bool = True):
        overrides = dict(overrides or {})
        barred = {} if compile else {"compiled": "compilation is off"}
        devices = ("cpu",) if machine.device == "cpu" else ("cpu", machine.device)
        self.choices: dict[Key, Choice] = {}
        self.impossible: dict[Key, HardwareError] = {}
        for op, device, dtype in itertools.product(OPS, devices, DTYPES):
            try:
                choice = choose(op, machine, Case(device, dtype), overrides.get(op.name, "auto"), barred)
            except HardwareError as error:  # told when, and only if, a run needs this case
                self.impossible[op.name, device, dtype] = error
            else:
                self.choices[op.name, device, dtype] = choice
        self._run = {key: choice.candidate.run for key, choice in self.choices.items()}

    @classmethod
    def default(cls) -> "Kernels":
        """The best implementations for the machine this runs on."""
        return cls(detect_machine())

    def _find(self, op: str, device: str, dtype: torch.dtype) -> Callable[..., Any]:
        run = self._run.get((op, device, dtype))
        if run is None:
            raise self.impossible[op, device, dtype]
        return run

    def linear(self, x: Tensor, weight_MK: Tensor, bias_M: Tensor | None = None) -> Tensor:
        """See `ops.linear`."""
        return self._find("linear", x.device.type, x.dtype)(x, weight_MK, bias_M)

    def rms_norm(self, x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        """See `ops.norm`."""
        return self._find("rms_norm", x.device.type, x.dtype)(x, weight_D, eps)

    def attention(
        self,
        q_BHSD: Tensor,
        k_BHSD: Tensor,
        v_BHSD: Tensor,
        *,
        segments: Tensor | None = None,
        scale: float | None = None,
    ) -> Tensor:
        """See `ops.attention`."""
        return self._find("attention", q_BHSD.device.type, q_BHSD.dtype)(q_BHSD, k_BHSD, v_BHSD, segments, scale)

    def linear_cross_entropy(self, x_ND: Tensor, weight_VD: Tensor, labels_N: Tensor) -> tuple[Tensor, Tensor]:
        """See `ops.loss`."""
        return self._find("cross_entropy", x_ND.device.type, x_ND.dtype)(x_ND, weight_VD, labels_N)

    def adam(self, device_type: str, dtype: torch.dtype):
        """The AdamW update for parameters of this device and dtype. See `ops.adam`."""
        return self._find("adam", device_type, dtype)

    def swiglu(self, gate: Tensor, up: Tensor) -> Tensor:
        """silu(gate) * up, FP32 inside; one form only, fused by the compiler."""
        return ref.swiglu(gate, up)

    def rope(self, x_BSHD: Tensor, cos_BSD: Tensor, sin_BSD: Tensor) -> Tensor:
        """Rotary positions, FP32 inside; one form only, fused by the compiler."""
        return ref.rope(x_BSHD, cos_BSD, sin_BSD)

    def explain(self) -> list[dict[str, object]]:
        """One row an operation and case: op, case, chosen (None: nothing can run it), rejected
        [(candidate, reason)]."""
        rows = [
            {
                "op": choice.op,
                "case": str(choice.case),
                "chosen": choice.candidate.name,
                "rejected": [list(pair) for pair in choice.rejected],
            }
            for choice in self.choices.values()
        ]
        for (op, device, dtype), error in self.impossible.items():
            reasons = [["all", error.problems[0].got]]
            rows.append({"op": op, "case": str(Case(device, dtype)), "chosen": None, "rejected": reasons})
        return rows
