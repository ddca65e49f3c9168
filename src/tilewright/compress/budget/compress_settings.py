"""The settings of `compress`, checked before a model is loaded."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from tilewright.compress.export.target import Target
from tilewright.compress.export.targets import chosen, find_targets
from tilewright.compress.prune.unit_kinds import KINDS, Kind
from tilewright.compress.prune.unit_scores import Method
from tilewright.core.errors import ConfigError
from tilewright.precision.search.loss_model import parse_budget

SHORT = {"int8": "onnx-int8", "edge4": "gguf-q4_0"}
"""Names of targets on this command line beside those of `export`."""
DEFAULTS: Mapping[str, tuple[str, str]] = {
    "causal_lm": ("int8,edge4,fp8", "ffn,heads"),
    "image_classification": ("onnx", "channels"),
}
"""By task, targets and kinds of unit of a command line that names none."""
Goal = Literal["bytes", "latency"]
Controls = Literal["all", "equal", "none"]


@dataclass(frozen=True)
class CompressSettings:
    """Settings of one `compress` command.

    Args:
        budget: largest rise of the held-out loss (`held_out_rise`) over the run's own, and over the run with as many
            more steps (`budget_rise`); above 0.
        targets: that the result is exported to, at least one.
        kinds: of unit that may be cut.
        importance: which units stay.
        steps: of recovery, and of each control.
        tries: cuts that are recovered at most: from the middle of the plans on, by halves.
        goal: what is made small.
        controls: which are run; all: the teacher with as many extra steps, recovery without it, the shape from scratch.
        batches: of training text, for importance and fits; and held-out ones of each domain.
        refit: fit the layers behind each cut before anything is trained (`prune.refit`).
    """

    budget: float
    targets: tuple[Target, ...]
    kinds: tuple[Kind, ...] = ("ffn", "heads")
    importance: Method = "activation"
    steps: int = 200
    tries: int = 3
    goal: Goal = "bytes"
    controls: Controls = "all"
    batches: int = 8
    refit: bool = True

    @classmethod
    def of(cls, budget: str, targets: str, kinds: str, **others: Any) -> "CompressSettings":
        """Settings of `compress` from the words of a command line.

        Raises:
            ConfigError: a budget that is no percentage above 0, or an unknown target or kind.

        Example:
            >>> CompressSettings.of("1%", "int8,fp8", "ffn").kinds
            ('ffn',)
        """
        share = parse_budget(budget)
        if share <= 0:
            raise ConfigError(
                "Loss budget is not above zero",
                got=repr(budget),
                need="how much of the loss may be given up: each cut and each rounding costs some",
                try_='--budget "1%"',
                where="--budget",
            )
        return cls(share, tuple(find_targets(targets, "--targets", SHORT)), _kinds(kinds), **others)

    def to_json(self) -> dict[str, Any]:
        """The settings of `compress` for the record. What was measured is measured again where it was with others."""
        return {
            "budget": self.budget,
            "targets": [target.name for target in self.targets],
            "kinds": list(self.kinds),
            "importance": self.importance,
            "steps": self.steps,
            "tries": self.tries,
            "goal": self.goal,
            "controls": self.controls,
            "batches": self.batches,
            "refit": self.refit,
        }


def _kinds(text: str) -> tuple[Kind, ...]:
    asked = chosen(text, KINDS, what="No such kind of unit", try_="--cut ffn,heads", where="--cut")
    return tuple(kind for kind in KINDS if kind in asked)
