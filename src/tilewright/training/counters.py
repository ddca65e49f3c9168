"""Where a run is: steps, tokens and skips so far. Part of every checkpoint. Called by `loop`."""

from dataclasses import asdict, dataclass
from typing import Any

from tilewright.training.step import StepResult


@dataclass
class Counters:
    """Totals of a run up to and including `step`; skipped steps count as steps."""

    step: int = 0
    tokens: int = 0
    targets: int = 0
    num_skips: int = 0
    elapsed_s: float = 0.0
    """Seconds of training, those before a resume included; set when a checkpoint is taken."""

    def add(self, result: StepResult) -> None:
        """Count a step."""
        self.step += 1
        self.tokens += result.num_tokens
        self.targets += result.num_targets
        self.num_skips += result.skipped is not None

    def state_dict(self) -> dict[str, Any]:
        """The totals, in JSON types."""
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` gave."""
        for name, value in state.items():
            setattr(self, name, value)
