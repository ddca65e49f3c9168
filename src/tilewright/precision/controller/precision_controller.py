"""A controller at work on a model: samples are taken, moves carried out, bad steps redone in wider formats.

`controller` decides, `monitor` looks, `schedule` plans; this file connects them to a model.
`training.hooks.precision_hook` calls it for runs from a recipe, `integrations.transformers` for the Trainer; a
plain loop calls `PrecisionController.run`.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tilewright.core.errors import ConfigError
from tilewright.optim.gradients import gradient_values, total_norm
from tilewright.precision.controller.controller import APPLY, REDO, SKIP, Controller
from tilewright.precision.controller.controller_settings import ControllerSettings
from tilewright.precision.controller.groups import LEVELS, GemmSite
from tilewright.precision.controller.layer_statistics import QuantStats
from tilewright.precision.controller.monitor import Monitor, all_reduce_worst, gemms_of
from tilewright.precision.float8.linear import Float8Linear, float8_layers
from tilewright.precision.float8.share_inputs import group_experts
from tilewright.precision.policy.gemm_formats import GEMM_NAMES
from tilewright.precision.policy.schedule import FormatSchedule
from tilewright.precision.snapshot import ModuleSnapshot


@dataclass(frozen=True)
class Outcome:
    """How a step of a plain loop went. `apply`: its gradients are good to use."""

    loss: float
    grad_norm: float
    apply: bool
    redone: str | None = None
    """Why it was computed again in wider formats."""
    skipped: str | None = None
    """Why its gradients must not be used."""


class PrecisionController:
    """Moves the matmuls of a model's `Float8Linear` layers between FP8, BF16 and FP32, on evidence and on schedule.

    Args:
        model: converted to "fp8_tile" with `Policy(..., keep="value")`, so that weight gradients may leave 8 bits.
        settings: how to decide; None moves nothing on evidence, and only the schedule is followed.
        schedule: the least formats by step.
        group: ranks that train together and must decide alike; None on one rank.
        sites: `sites_of` the whole model, where `model` has some of its layers: decisions are on all of them, by name.

    Raises:
        ConfigError: no layer has matmuls in fp8_tile, or some have other 8-bit formats.
        FitError: the budget cannot be kept.

    Example: a plain loop.
        >>> from tilewright.precision.convert import convert
        >>> from tilewright.precision.policy.policy import Policy
        >>> model = nn.Sequential(nn.Linear(128, 128))
        >>> model = convert(model, Policy("fp8_tile", keep="value"))
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> x = torch.randn(64, 128, generator=torch.Generator().manual_seed(0))
        >>> with PrecisionController(model, ControllerSettings(budget=0.25)) as control:
        ...     for _ in range(3):
        ...         outcome = control.run(lambda: model(x).square().mean())
        ...         if outcome.apply:
        ...             optimizer.step()
        >>> outcome.apply, control.controller.share_above_8bit
        (True, 0.0)
    """

    def __init__(
        self,
        model: nn.Module,
        settings: ControllerSettings | None = None,
        schedule: FormatSchedule | None = None,
        *,
        group: dist.ProcessGroup | None = None,
        sites: Sequence[GemmSite] | None = None,
    ) -> None:
        self.model = model
        self._group = group
        self.settings = settings
        self.schedule = schedule or FormatSchedule()
        self.monitor = Monitor(model)
        self.controller = Controller(
            sites_of(model) if sites is None else sites, settings or ControllerSettings(budget=1.0)
        )
        self.steps = 0
        """Steps that `run` was called for."""
        self.told: set[str] = set()
        """Matmuls that the budget refused to move, as far as was reported."""
        self._rows: deque[dict[str, Any]] = deque()
        self._before = [(layer, layer.gemms) for layer in float8_layers(model).values()]

    @property
    def active(self) -> bool:
        """True where the precision controller is active: decides on evidence, besides following the schedule."""
        return self.settings is not None

    def __enter__(self) -> "PrecisionController":
        self.enter(self.steps)
        return self

    def __exit__(self, *_: object) -> None:
        """Restore the formats that layers had before the precision controller."""
        for layer, gemms in self._before:
            if layer.gemms != gemms:
                layer.set_gemms(gemms, power_of_two=layer.power_of_two)
        group_experts(self.model)

    # ---- formats ----

    def enter(self, step: int) -> bool:
        """The precision controller enters `step` (counted from 0): give the layers the formats that the controller
        wants; True if one changed.

        Call it before each step: other code (evaluation in FP32) may have set formats in between.
        """
        self.controller.set_floors(self.schedule.floors(step))
        return self._set(self.controller.formats())

    def _set(self, formats: Mapping[tuple[str, str], str]) -> bool:
        changed = False
        for name, layer in float8_layers(self.model).items():
            gemms = layer.gemms.changed({gemm: formats[name, gemm] for gemm in GEMM_NAMES if (name, gemm) in formats})
            if gemms != layer.gemms:
                layer.set_gemms(gemms, power_of_two=layer.power_of_two)
                changed = True
        if changed:
            group_experts(self.model)
        return changed

    @contextmanager
    def wider_precision(self) -> Iterator[None]:
        """Inside, the precision controller keeps all matmuls at least in BF16; in FP32, where all of them are in BF16
        already."""
        formats = self.controller.formats()
        least = 1 if any(name == LEVELS[0] for name in formats.values()) else 2
        self._set({key: LEVELS[max(LEVELS.index(name), least)] for key, name in formats.items()})
        try:
            yield
        finally:
            self._set(formats)

    # ---- samples ----

    def due(self, step: int) -> bool:
        """True where a sample of the precision controller is due: `step` begins with one."""
        settings = self.settings
        return settings is not None and (step % settings.interval == 0 or self.recalibrates(step))

    def recalibrates(self, step: int) -> bool:
        """True where that sample of the precision controller is one of the larger ones."""
        return self.settings is not None and step > 0 and step % self.settings.recalibrate_interval == 0

    def sample(self, step: int, passes: Iterable[Callable[[], object]]) -> None:
        """Sample by the precision controller from extra passes (see `Monitor.sample`), judge it, and carry the moves
        out."""
        self.decide(step, self.monitor.sample(passes))

    def decide(self, step: int, evidence: QuantStats) -> None:
        """Let the precision controller judge the evidence of all ranks and carry out the moves of formats."""
        names = list(dict.fromkeys(site.layer for site in self.controller.sites))
        evidence = all_reduce_worst(evidence, names, _device_of(self.model), group=self._group)
        why = str(self.controller.suspect) if self.controller.suspect is not None else None
        moves = self.controller.decide(step, evidence, recalibrate=self.recalibrates(step))
        share, noise = self.controller.share_above_8bit, self.controller.noise
        layers = evidence.to_json(digits=5)
        row = {"kind": "sample", "step": step + 1, "above_8bit": share, "noise": noise, "layers": layers}
        self._rows.append(row | ({"after": why} if why else {}))
        self._rows += [{"kind": "move", **vars(move), "step": step + 1} for move in moves]
        self._rows += [{"kind": "refused", **vars(move), "step": step + 1} for move in self.controller.refused]
        self._set(self.controller.formats())

    def take_rows(self) -> list[dict[str, Any]]:
        """Rows of the precision controller since the last call, in JSON types: samples, moves, and moves that the
        budget refused."""
        rows = list(self._rows)
        self._rows.clear()
        return rows

    # ---- steps ----

    def run_guarded(self, compute: Callable[[], tuple[float, float]]) -> tuple[str | None, str | None]:
        """Run a step guarded by the precision controller: again in wider formats where it is bad.

        Args:
            compute: leaves gradients and returns loss and gradient norm, the same on all ranks. Called once or twice; a
                second call starts with no gradients, and with the buffers that the first one found.

        Returns:
            (why it was computed again, why it must not be applied), each None where it is not so. Where it must not be
            applied, buffers and notes of the model are as before.
        """
        if not self.active:
            compute()
            return None, None
        notes = ModuleSnapshot(self.model)
        verdict, spike = self.controller.observe(*compute())
        if verdict == APPLY:
            return None, None
        notes.restore()
        if verdict == SKIP:
            return None, str(spike)
        if spike is None:
            raise AssertionError("a step is redone for a reason")
        for param in self.model.parameters():
            param.grad = None
        with self.wider_precision():
            verdict, still = self.controller.observe_again(*compute(), spike)
        if verdict == APPLY:
            return str(spike), None
        notes.restore()
        return str(spike), f"{still}, also in wider formats"

    def check(self, loss: float, grad_norm: float) -> str | None:
        """The reason why the gradients of a step must not be used, for loops that cannot compute a step again; None if
        they may.

        A step that is out of line makes the next sample a search for what to move: see `Controller.suspect`.
        """
        verdict, spike = self.controller.observe(loss, grad_norm)
        if verdict != REDO or spike is None:
            return str(spike) if verdict == SKIP else None
        verdict, _ = self.controller.observe_again(loss, grad_norm, spike)
        self.controller.suspect = spike
        return None if verdict == APPLY else str(spike)

    def run(self, compute_loss: Callable[[], Tensor]) -> Outcome:
        """Run one step of a plain loop under the precision controller: formats, a sample where one is due, forward,
        backward, and again where it is bad.

        Args:
            compute_loss: runs the forward pass and returns the loss, a scalar. Its gradients are left in the
                parameters, which start without.
        """
        step, self.steps = self.steps, self.steps + 1
        self.enter(step)
        if self.due(step):
            self.sample(step, [lambda: compute_loss().backward()])
        found: list[tuple[float, float]] = []

        def compute() -> tuple[float, float]:
            for param in self.model.parameters():
                param.grad = None
            loss = compute_loss()
            loss.backward()
            found.append(_over_ranks(float(loss.detach()), grad_norm(self.model), _device_of(self.model), self._group))
            return found[-1]

        redone, skipped = self.run_guarded(compute)
        if self.controller.suspect is not None:
            self.sample(step, [lambda: compute_loss().backward()])
        return Outcome(*found[-1], skipped is None, redone, skipped)

    # ---- checkpoints ----

    def state_dict(self) -> dict[str, Any]:
        """The precision controller's state: all that its next decisions depend on, in JSON types."""
        return {"steps": self.steps, "told": sorted(self.told), "controller": self.controller.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the precision controller from `state_dict()`; the formats follow with the next `enter`."""
        self.steps, self.told = int(state["steps"]), set(state["told"])
        self.controller.load_state_dict(state["controller"])


def sites_of(model: nn.Module) -> list[GemmSite]:
    """The matmuls of a model's layers that the precision controller may move, with their present formats, the least
    that they will have.

    The work of a matmul is taken as the number of its weight's elements: right for layers that see every token, too
    much for experts, all by the same factor. Frozen weights, under adapters, have no matmul of their gradient.

    Raises:
        ConfigError: see `PrecisionController`.
    """
    layers = list(float8_layers(model).items())
    others = [(n, str(layer.gemms)) for n, layer in layers if set(_eight_bit(layer)) - {LEVELS[0]}]
    if others or not any(_eight_bit(layer) for _, layer in layers):
        raise ConfigError(
            "No FP8 layer for the controller to move",
            got=f"{others[0][0]} in {others[0][1]}" if others else "no layer with matmuls in fp8_tile",
            need="linear layers in fp8_tile",
            try_='convert(model, Policy("fp8_tile", keep="value")) first',
            where="precision.controller.enabled",
        )
    fixed = [name for name, layer in layers if layer.gemms.wgrad.scaled and not layer.keep_value]
    if fixed:
        raise ConfigError(
            "Weight gradients of this model must stay in FP8, which the controller needs to move",
            got=f"{len(fixed)} layers keep 8-bit codes of their input for backward, the first is {fixed[0]}",
            need="layers that keep the input itself, 2 bytes per element",
            try_='convert(model, Policy("fp8_tile", keep="value"))',
            where="precision.controller.enabled",
        )
    return [
        GemmSite(name, gemm, 0 if layer.gemms[gemm].scaled else LEVELS.index(layer.gemms[gemm].name),
             float(layer.weight.numel()))
        for name, layer in layers for gemm in gemms_of(layer)
    ]  # fmt: skip


def grad_norm(model: nn.Module) -> float:
    """Global norm of the gradients for the precision controller, over all ranks where they are sharded; 0 without
    any."""
    return total_norm(gradient_values(model.parameters()))


def _eight_bit(layer: Float8Linear) -> list[str]:
    return [each.name for each in layer.gemms.formats if each.scaled]


def _device_of(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


def _over_ranks(loss: float, norm: float, device: torch.device, group: dist.ProcessGroup | None) -> tuple[float, float]:
    """Take the worst of each of the precision controller's numbers over ranks, so that all judge alike; NaN counts as
    infinite."""
    if group is None:
        return loss, norm
    numbers = torch.tensor([loss, norm], dtype=torch.float64, device=device).nan_to_num(nan=float("inf"))
    dist.all_reduce(numbers, op=dist.ReduceOp.MAX, group=group)
    loss, norm = numbers.tolist()
    return loss, norm
