"""Which implementation of an operation runs, and why not the others.

An operation is an ordered tuple of candidates. Each candidate answers `why_not(machine, case)` with
a reason or None; the first None wins. There is no registry: the tuples are in the operations'
own files, and `ops.kernels.Kernels` asks here once for each case.
"""

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tilewright.core.errors import ConfigError, HardwareError
from tilewright.core.hardware import Machine
from tilewright.ops.base.compile import why_no_compile


@dataclass(frozen=True)
class Case:
    """The facts on which the choice of a kernel depends: device type, dtype of the main operand, kind of call where the
    operation has kinds."""

    device_type: str
    dtype: torch.dtype
    kind: str = ""

    def __str__(self) -> str:
        return f"{self.device_type} {str(self.dtype).removeprefix('torch.')} {self.kind}".rstrip()


@dataclass(frozen=True)
class Candidate:
    """One implementation. `why_not` returns the reason why it cannot run a case, or None."""

    name: str
    run: Callable[..., Any]
    why_not: Callable[[Machine, Case], str | None]


@dataclass(frozen=True)
class Knows:
    """Kinds of call that a candidate has code for, where those are not all of its operation's.

    Args:
        kinds: of `Op.kinds`.
        what: the same in words.
    """

    kinds: tuple[str, ...]
    what: str

    def why_not(self, rest: Callable[[Machine, Case], str | None]) -> Callable[[Machine, Case], str | None]:
        """Dispatch's `why_not` of a candidate, of which `rest` is about the machine."""
        return lambda machine, case: rest(machine, case) if case.kind in self.kinds else f"knows {self.what}"

    def check(self, kind: str) -> None:
        """Dispatch's check of the kind of a call for its `run`: an AssertionError in any other kind, where it would
        have to compute by another's code."""
        if kind not in self.kinds:
            raise AssertionError(f"called for {kind!r}, and knows {self.what}")


@dataclass(frozen=True)
class Op:
    """An operation and its implementations, best first; the last one is the reference and always runs.

    Args:
        name: its name.
        candidates: implementations.
        kinds: what a choice depends on besides device and dtype; a case for each.
        gpu_kinds: more of them, on GPUs alone.
        setting: field of the recipe section `[ops]` that forces a candidate; empty: the name.
        in_transforms: what runs inside of `torch.func` transforms, made of torch's own differentiable operations; None:
            the chosen candidate.
        instead: what callers do where only the reference could run, in words; empty: they run it.
    """

    name: str
    candidates: tuple[Candidate, ...]
    kinds: tuple[str, ...] = ("",)
    gpu_kinds: tuple[str, ...] = ()
    setting: str = ""
    in_transforms: Callable[..., Any] | None = None
    instead: str = ""

    @property
    def field(self) -> str:
        """Name of an operation's field in `[ops]`, for dispatch."""
        return self.setting or self.name

    def kinds_on(self, device_type: str) -> tuple[str, ...]:
        """Kinds of call that dispatch knows on a device."""
        return self.kinds + (self.gpu_kinds if device_type != "cpu" else ())


@dataclass(frozen=True)
class Choice:
    """The outcome for one operation and case. `rejected` holds (candidate, reason) in the order tried."""

    op: str
    case: Case
    candidate: Candidate
    rejected: tuple[tuple[str, str], ...]


def always(machine: Machine, case: Case) -> str | None:
    """Dispatch's `why_not` of a candidate that runs everywhere."""
    return None


def needs_compiler(machine: Machine, case: Case) -> str | None:
    """Dispatch's `why_not` of candidates built by torch.compile."""
    return why_no_compile(machine) if case.device_type == "cpu" else None


def choose(
    op: Op, machine: Machine, case: Case, forced: str = "auto", barred: Mapping[str, str] | None = None
) -> Choice:
    """Choose by dispatch the first candidate that can run `case`, or the forced one.

    Args:
        op: the operation.
        machine: facts about this machine.
        case: device type and dtype.
        forced: a candidate's name, or "auto".
        barred: reason by candidate name, for candidates that a setting rules out.

    Raises:
        ConfigError: `forced` names no candidate of this operation.
        HardwareError: the forced candidate, or every candidate, cannot run the case.
    """
    names = [candidate.name for candidate in op.candidates]
    if forced != "auto" and forced not in names:
        close = difflib.get_close_matches(forced, names, n=1)
        raise ConfigError(
            f"Kernel of ops.{op.field}: no candidate {forced!r}",
            got=repr(forced),
            need=f"auto or one of {', '.join(names)}",
            try_=f'ops.{op.field} = "{close[0] if close else "auto"}"',
        )
    rejected = []
    for candidate in op.candidates:
        if forced not in ("auto", candidate.name):
            rejected.append((candidate.name, f'ops.{op.field} = "{forced}" was asked for'))
            continue
        reason = (barred or {}).get(candidate.name) or candidate.why_not(machine, case)
        if reason is None:
            return Choice(op.name, case, candidate, tuple(rejected))
        rejected.append((candidate.name, reason))
    reasons = "; ".join(f"{name}: {reason}" for name, reason in rejected)
    raise HardwareError(
        f"Kernel ops.{op.name} cannot run on this machine",
        got=f"{case}: {reasons}",
        need="a candidate that can run this device and dtype",
        try_=f'ops.{op.field} = "auto"',
    )
