"""Decides which matmul leaves 8 bits, and when it comes back: a state machine fed with evidence. No torch in here.

    step -> observe (loss, gradient norm): apply | redo -> observe_again: apply | skip
    sample -> judge (evidence): moves one level up or down

It is deterministic: the same observations give the same moves, on each rank and after a resume. `precision_controller`
carries the moves out on a model and takes the samples. Read `Controller.judge` first.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tilewright.precision.controller.controller_settings import ControllerSettings, check_budget
from tilewright.precision.controller.groups import LEVELS, GemmGroup, GemmSite, Move, units_of
from tilewright.precision.controller.layer_statistics import LayerStats, QuantStats
from tilewright.precision.controller.spikes import Spike, SpikeDetector
from tilewright.precision.controller.thresholds import Finding, find

APPLY, REDO, SKIP = "apply", "redo", "skip"
_PATIENCE = 3
"""Bad steps in a row that are skipped though wider formats do not mend them. Then they are applied: data or rate have
moved the loss to another level, and standing still would not help."""
_SUSPECTS = 8
"""A bad step that wider formats mended moves the worst of this many units at least, whatever the limits say."""


@dataclass
class _State:
    """Memory of a unit."""

    level: int = 0
    moved: int | None = None
    """Step of its last move."""
    quiet: int = 0
    """Good samples in a row."""


class Controller:
    """Levels of all matmuls of a model.

    Args:
        sites: the matmuls, in the order of the model.
        settings: see there.

    Raises:
        FitError: the policy itself keeps more work above 8 bits than the budget allows.

    Example:
        >>> from tilewright.precision.controller.layer_statistics import GemmStats
        >>> controller = Controller([GemmSite("up", "wgrad", 0, 1.0)], ControllerSettings(budget=1.0))
        >>> bad = LayerStats(matmuls={"wgrad.fp8_tile": GemmStats(0.9, 0.9, 0.999, 19.0)})
        >>> print(*controller.decide(100, QuantStats({"up": bad})))
        up wgrad fp8_tile -> bf16 (gain_error 0.1, limit 0.02)
    """

    def __init__(self, sites: Sequence[GemmSite], settings: ControllerSettings | None = None) -> None:
        self.sites = tuple(sites)
        self.settings = settings or ControllerSettings()
        self.refused: list[Move] = []
        """Moves that the last judgement wanted and the budget did not allow."""
        self.suspect: Spike | None = None
        """Fault of the last step, where wider formats mended it: take a sample and judge."""
        self.noise = 0.0
        """Mean noise over signal of the matmuls as they are now: 0 for those above 8 bits. From the last sample."""
        self._units = units_of(self.sites, self.settings.granularity)
        self._states = [_State() for _ in self._units]
        self._floors: Mapping[str, int] = {}
        self._detector = SpikeDetector(factor=self.settings.spike_factor)
        self._bad_steps = 0
        self._total = sum(site.flops for site in self.sites) or 1.0
        check_budget(self.sites, self.settings.budget)

    # ---- the formats as they are ----

    def level(self, site: GemmSite, unit_level: int) -> int:
        """The controller's level of a matmul, index in `LEVELS`, of a matmul whose unit is at `unit_level`: never below
        policy or schedule."""
        return max(site.base, self._floors.get(site.gemm, 0), unit_level)

    def formats(self) -> dict[tuple[str, str], str]:
        """The controller's format of each matmul, by (layer, gemm)."""
        return {(site.layer, site.gemm): LEVELS[level] for site, level in self._levels()}

    @property
    def share_above_8bit(self) -> float:
        """Share of the matmuls' work that the controller has above 8 bits now."""
        return sum(site.flops for site, level in self._levels() if level > 0) / self._total

    def set_floors(self, floors: Mapping[str, int]) -> None:
        """Set the controller's floors: lowest level by matmul, from a schedule."""
        self._floors = dict(floors)

    # ---- steps ----

    def observe(self, loss: float, grad_norm: float) -> tuple[str, Spike | None]:
        """Judge a computed step: apply it, or redo it in wider formats; with its fault."""
        self.suspect = None
        spike = self._detector.spike(loss, grad_norm)
        if spike is None or not self.settings.retry_steps:
            self._settle(loss, grad_norm)
            return (SKIP if spike is not None and spike.name == "not_finite" else APPLY), spike
        return REDO, spike

    def observe_again(self, loss: float, grad_norm: float, first: Spike) -> tuple[str, Spike | None]:
        """Judge a step that was redone in wider formats: apply or skip it; with the fault that is left."""
        spike = self._detector.spike(loss, grad_norm)
        if spike is None:
            self.suspect = first
            self._settle(loss, grad_norm)
            return APPLY, None
        self._bad_steps += 1
        if spike.name == "not_finite" or self._bad_steps <= _PATIENCE:
            return SKIP, spike
        self._detector.forget()
        self._settle(loss, grad_norm)
        return APPLY, spike

    def _settle(self, loss: float, grad_norm: float) -> None:
        self._bad_steps = 0
        self._detector.add(loss, grad_norm)

    # ---- samples ----

    def decide(self, step: int, evidence: QuantStats, *, recalibrate: bool = False) -> list[Move]:
        """Decide the moves that a sample calls for, and carry them out in the controller's state.

        Units come down first, which frees budget; then those that need it most go up. After a step that wider formats
        mended (`suspect`) the limits for coming back are those for leaving, and the worst units go up in any case.

        Args:
            step: counted from 0.
            evidence: agreed on by all ranks.
            recalibrate: units that are good come down without waiting for more samples.
        """
        suspect, self.suspect = self.suspect, None
        self.refused = []
        moves = self._come_down(step, evidence, recalibrate) if suspect is None else []
        ranked = self._wanting(step, evidence, suspect)
        for finding, index in ranked:
            moves += self._go_up(step, index, finding)
        self.noise = self._noise(evidence)
        return moves

    def _come_down(self, step: int, evidence: QuantStats, recalibrate: bool) -> list[Move]:
        moves: list[Move] = []
        for unit, state in zip(self._units, self._states, strict=True):
            if state.level == 0:
                continue
            found = [
                find(
                    evidence.layers.get(site.layer, LayerStats()),
                    site.gemm,
                    LEVELS[state.level - 1],
                    dict(self.settings.thresholds),
                    relax=True,
                )
                for site in unit.sites
                if site.base < state.level
            ]
            measured = [finding for finding in found if finding is not None]
            if not measured:
                continue
            worst = max(measured, key=lambda finding: finding.excess)
            state.quiet = state.quiet + 1 if worst.excess < 1 else 0
            enough = 1 if recalibrate else self.settings.patience
            if state.quiet >= enough and self._may_move(state, step):
                moves += self._move(step, unit, state, state.level - 1, worst)
        return moves

    def _wanting(self, step: int, evidence: QuantStats, suspect: Spike | None) -> list[tuple[Finding, int]]:
        """Units that the controller wants up, the worst first, with the finding that says so."""
        scored = []
        for index, unit in enumerate(self._units):
            found = [self._finding(site, index, evidence, relax=suspect is not None) for site in unit.sites]
            measured = [finding for finding in found if finding is not None]
            if measured and self._may_move(self._states[index], step):
                scored.append((max(measured, key=lambda finding: finding.excess), index))
        scored.sort(key=lambda entry: (-entry[0].excess, entry[1]))
        wanting = [entry for entry in scored if entry[0].excess > 1]
        if suspect is not None and not wanting:
            spike = Finding(1.0, f"{suspect.name} spike", suspect.value, suspect.threshold)
            wanting = [(spike, index) for _, index in scored[: max(1, len(self._units) // _SUSPECTS)]]
        return wanting

    def _finding(self, site: GemmSite, index: int, evidence: QuantStats, *, relax: bool) -> Finding | None:
        level = self.level(site, self._states[index].level)
        if level + 1 >= len(LEVELS):
            return None
        layer = evidence.layers.get(site.layer, LayerStats())
        return find(layer, site.gemm, LEVELS[level], dict(self.settings.thresholds), relax=relax)

    def _go_up(self, step: int, index: int, finding: Finding) -> list[Move]:
        unit, state = self._units[index], self._states[index]
        after = min(self.level(site, state.level) for site in unit.sites) + 1
        added = sum(s.flops for s in unit.sites if self.level(s, state.level) == 0 < self.level(s, after))
        if added and self.share_above_8bit + added / self._total > self.settings.budget + 1e-9:
            self.refused += self._moves(step, unit, state.level, after, finding)
            return []
        return self._move(step, unit, state, after, finding)

    def _may_move(self, state: _State, step: int) -> bool:
        return state.moved is None or step - state.moved >= self.settings.cooldown

    def _move(self, step: int, unit: GemmGroup, state: _State, level: int, finding: Finding) -> list[Move]:
        moves = self._moves(step, unit, state.level, level, finding)
        state.level, state.moved, state.quiet = level, step, 0
        return moves

    def _moves(self, step: int, unit: GemmGroup, before: int, after: int, finding: Finding) -> list[Move]:
        changes = [(site, self.level(site, before), self.level(site, after)) for site in unit.sites]
        return [
            Move(
                step,
                site.layer,
                site.gemm,
                LEVELS[old],
                LEVELS[new],
                finding.name,
                finding.value,
                finding.threshold,
                unit.name,
            )
            for site, old, new in changes
            if old != new
        ]

    def _levels(self) -> list[tuple[GemmSite, int]]:
        return [
            (site, self.level(site, state.level))
            for unit, state in zip(self._units, self._states, strict=True)
            for site in unit.sites
        ]

    def _noise(self, evidence: QuantStats) -> float:
        total = 0.0
        for site, level in self._levels():
            matmul = evidence.layers.get(site.layer, LayerStats()).matmuls.get(f"{site.gemm}.fp8_tile")
            total += matmul.noise if matmul is not None and level == 0 else 0.0
        return total / max(len(self.sites), 1)

    # ---- checkpoints ----

    def state_dict(self) -> dict[str, Any]:
        """The controller's state: all that its next decisions depend on, in JSON types."""
        return {
            "units": {unit.name: asdict(state) for unit, state in zip(self._units, self._states, strict=True)},
            "detector": self._detector.state_dict(),
            "bad_steps": self._bad_steps,
            "noise": self.noise,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the controller from `state_dict()`. Units that it does not know (another policy) keep their state."""
        for unit, own in zip(self._units, self._states, strict=True):
            if unit.name in state["units"]:
                vars(own).update(state["units"][unit.name])
        self._detector.load_state_dict(state["detector"])
        self._bad_steps, self.noise = int(state["bad_steps"]), float(state["noise"])
