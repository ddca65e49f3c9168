"""Runs with one illness each, at several strengths, and what the rule made for it must say. For `test_verdict`."""

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.report.synthetic import PLAN, RECIPE, eval_rows, read, step_rows
from tilewright.report.run_data.collect_run import RunData
from tilewright.report.verdict.rule import VerdictState

GOOD, LOOK, BAD, NOT_MEASURED = VerdictState.GOOD, VerdictState.LOOK, VerdictState.BAD, VerdictState.NOT_MEASURED
COUNT = 400


def falling(count: int = COUNT, seed: int = 1, scatter: float = 0.05) -> list[float]:
    """Losses of a run that learns: 9 to 2.5 nats, with normal noise."""
    draw = random.Random(seed)
    return [
        2.5 + 5.5 * math.exp(-step / (0.1 * count)) + math.exp(-step / (0.7 * count)) + draw.gauss(0, scatter)
        for step in range(count)
    ]


def held(losses: Sequence[float], **others: Sequence[float]) -> dict[int, dict[str, float]]:
    """Evaluations at equal distances over `COUNT` steps; domain `a`, and `others`."""
    return {
        COUNT * (i + 1) // len(losses): {"a": loss} | {name: values[i] for name, values in others.items()}
        for i, loss in enumerate(losses)
    }


@dataclass(frozen=True)
class Case:
    """A run: its losses, columns, evaluations and files."""

    losses: Sequence[Any] = field(default_factory=falling)
    columns: Mapping[str, Any] = field(default_factory=dict)
    evals: Mapping[int, Mapping[str, Any]] = field(default_factory=lambda: held([5, 4, 3.5, 3.2], b=[6, 5, 4, 3.9]))
    files: Mapping[str, Any] = field(default_factory=dict)

    def read(self, folder) -> RunData:
        return read(folder / "run", step_rows(self.losses, **self.columns) + eval_rows(self.evals), **self.files)


def noisy(level: float, seed: int = 0):
    """A column that scatters by a fifth around a level."""
    draw = random.Random(seed)
    return [level * math.exp(draw.gauss(0, 0.2)) for _ in range(COUNT)]


def saved(*steps: int) -> dict[str, Any]:
    """Events of saves beside training."""
    return {"events": [{"step": step, "kind": "save", "background": True} for step in steps]}


def evaluated(*steps: int) -> dict[str, Any]:
    """Events of evaluations."""
    return {"events": [{"step": step, "kind": "eval"} for step in steps]}


CLEAN = Case(columns={"grad_norm": noisy(0.4)})


def marked(count: int, of: int, yes: Any, no: Any) -> list[Any]:
    """`of` values, `count` of them `yes`, at equal distances."""
    places = {of * i // count for i in range(count)} if count else set()
    return [yes if i in places else no for i in range(of)]


def rise(by: float, slow: int = 20) -> list[float]:
    """Falls from 6 to 3 and stays; in the last twentieth it is `by` above. Without noise."""
    return [6 - 3 * min(1.0, step / 300) for step in range(COUNT - slow)] + [3 + by] * slow


def growing(factor: float) -> list[float]:
    return [0.1] * (3 * COUNT // 4) + [0.1 * factor] * (COUNT // 4)


def spiky(count: int) -> list[float]:
    """Losses with `count` spikes among the 384 that are compared with earlier ones."""
    draw = random.Random(2)
    return [3 - step / COUNT + draw.gauss(0, 0.05) for step in range(16)] + [
        3 - step / COUNT + draw.gauss(0, 0.05) + high
        for step, high in enumerate(marked(count, COUNT - 16, 9.0, 0.0), 16)
    ]


def norms_with_spikes(count: int) -> list[float]:
    return noisy(0.4)[:16] + [
        norm + high for norm, high in zip(noisy(0.4)[16:], marked(count, COUNT - 16, 9.0, 0.0), strict=True)
    ]


def corrected(step_s: float) -> dict[str, Any]:
    """The plan of one second a step, corrected beside the first steps."""
    return PLAN | {"corrected": {"step": 4, "step_s": step_s, "tokens_per_s": 1.0}}


def memory(planned: float) -> dict[str, Any]:
    return {"plan": {"step_phase": "backward", "phases": {"backward": {"activations": planned * 2**30}}}}


# rule -> (what is wrong, the run, its state)
CASES: dict[str, list[tuple[str, Case, VerdictState]]] = {
    "divergence": [
        ("6 to 80", Case([6.0, 5.5] + [80.0 + 0.1 * (i % 7) for i in range(COUNT)]), BAD),
        ("345,341 at the end", Case(falling(380) + [345_341.0] * 20), BAD),
        ("1e300 at the end", Case(falling(380) + [1e300] * 20), BAD),
        ("last loss NaN", Case([*falling(399), math.nan]), BAD),
        ("all NaN", Case([math.nan] * COUNT), BAD),
        ("all infinite", Case([math.inf] * COUNT), BAD),
        ("one step, NaN", Case([math.nan], evals={}), BAD),
        ("second step is far above", Case([6.0, 11.0], evals={}), BAD),
        ("second step is above", Case([6.0, 10.9], evals={}), NOT_MEASURED),
        ("gradients at the end", Case(columns={"grad_norm": [0.5] * 398 + [math.nan] * 2}), BAD),
        ("the last gradient", Case(columns={"grad_norm": [0.5] * 399 + [math.nan]}), GOOD),
        (
            "overflows at the end, with a loss scale",
            Case(columns={"grad_norm": [0.5] * 398 + [math.inf] * 2, "skipped": [None] * 398 + ["overflow"] * 2}),
            GOOD,
        ),
        ("NaN in the middle, skipped", Case([*falling()[:200], math.nan, *falling()[201:]]), GOOD),
        ("held-out NaN", Case(evals=held([5, 4, 3, math.nan])), BAD),
        ("held-out NaN once", Case(evals=held([5, math.nan, 3, 2.9])), GOOD),
        ("rise of 0.09", Case(rise(0.09)), GOOD),
        ("rise of 0.11", Case(rise(0.11)), LOOK),
        ("rise of 0.49", Case(rise(0.49)), LOOK),
        ("rise of 0.51", Case(rise(0.51)), BAD),
        ("a spike that comes back", Case(falling()[:200] + [50.0] * 5 + falling()[205:]), GOOD),
        ("too few", Case(falling(19), evals={}), NOT_MEASURED),
        ("negative losses that fall", Case([-step / 10 for step in range(COUNT)]), GOOD),
        ("negative losses that rise", Case([-50 + abs(step - 200) / 10 for step in range(COUNT)]), BAD),
    ],
    "plateau": [
        ("never fell", Case([5.0 + 0.01 * (i % 3) for i in range(COUNT)], evals={}), BAD),
        ("never fell, nor the held-out loss", Case([5.0] * COUNT, evals=held([5, 5, 5, 4.98])), BAD),
        ("never fell, and the held-out loss does", Case([5.0] * COUNT, evals=held([5, 5, 5, 4.97])), GOOD),
        ("the held-out loss fell long ago", Case([5.0] * COUNT, evals=held([6, 5, 5, 5])), LOOK),
        ("rises slowly", Case([5.0 + 0.001 * i for i in range(60)], evals={}), BAD),
        ("flat and noisy", Case([5.0 + random.Random(i).gauss(0, 0.3) for i in range(COUNT)], evals={}), BAD),
        ("flat in the second half", Case([8 - 5 * min(1.0, i / 200) for i in range(COUNT)], evals={}), LOOK),
        ("flat after three steps", Case([9.0, 8.0, 7.0] + [3.0] * 397, evals={}), LOOK),
        ("flat in the last fifth", Case([8 - 5 * min(1.0, i / 320) for i in range(COUNT)]), GOOD),
        ("too few", Case(falling(19), evals={}), NOT_MEASURED),
    ],
    "memorising": [
        ("held-out rises, training falls", Case(evals=held([5, 4, 3.5, 3.9])), BAD),
        ("by 0.03", Case(evals=held([5, 4, 3.5, 3.53])), LOOK),
        ("by 0.01", Case(evals=held([5, 4, 3.5, 3.51])), GOOD),
        ("both rise", Case([*falling(360), *[6.0] * 40], evals=held([5, 4, 3.5, 5.0])), GOOD),
        ("no evaluation", Case(evals={}), NOT_MEASURED),
        ("one evaluation", Case(evals=held([5])), NOT_MEASURED),
        ("NaN evaluations", Case(evals=held([math.nan, math.nan, 4, math.nan])), NOT_MEASURED),
        ("few steps", Case(falling(5), evals={1: {"a": 4.0}, 5: {"a": 3.0}}), NOT_MEASURED),
    ],
    "forgetting": [
        ("one domain rises", Case(evals=held([5, 4, 3, 2], b=[2, 2, 2.2, 2.4])), BAD),
        ("by 0.06", Case(evals=held([5, 4, 3, 2], b=[2, 2, 2, 2.06])), LOOK),
        ("by 0.04", Case(evals=held([5, 4, 3, 2], b=[2, 2, 2, 2.04])), GOOD),
        ("both rise", Case(evals=held([5, 4, 3, 4], b=[5, 4, 3, 4])), GOOD),
        ("one domain", Case(evals=held([5, 4, 3, 2])), NOT_MEASURED),
        ("one more than once", Case(evals=held([5, 4, 3, 2], b=[math.nan, math.nan, math.nan, 2])), NOT_MEASURED),
        ("no evaluation", Case(evals={}), NOT_MEASURED),
    ],
    "loss spikes": [
        ("one in 384", Case(spiky(1)), GOOD),
        ("two in 384", Case(spiky(2)), LOOK),
        ("19 in 384", Case(spiky(19)), LOOK),
        ("20 in 384", Case(spiky(20)), BAD),
        ("too few", Case(falling(35)), NOT_MEASURED),
    ],
    "gradient spikes": [
        ("one in 384", Case(columns={"grad_norm": norms_with_spikes(1)}), GOOD),
        ("two in 384", Case(columns={"grad_norm": norms_with_spikes(2)}), LOOK),
        ("20 in 384", Case(columns={"grad_norm": norms_with_spikes(20)}), BAD),
        ("none recorded", Case(columns={"grad_norm": [None] * COUNT}), NOT_MEASURED),
    ],
    "gradient growth": [
        ("2.9 times", Case(columns={"grad_norm": growing(2.9)}), GOOD),
        ("3.1 times", Case(columns={"grad_norm": growing(3.1)}), LOOK),
        ("9.9 times", Case(columns={"grad_norm": growing(9.9)}), LOOK),
        ("11 times", Case(columns={"grad_norm": growing(11)}), BAD),
        ("falling", Case(columns={"grad_norm": growing(0.1)}), GOOD),
        ("too few", Case(falling(19)), NOT_MEASURED),
    ],
    "clipping": [
        ("39 of 400", Case(columns={"grad_norm": marked(39, COUNT, 2.0, 0.5)}), GOOD),
        ("40 of 400", Case(columns={"grad_norm": marked(40, COUNT, 2.0, 0.5)}), LOOK),
        ("a third", Case(columns={"grad_norm": marked(133, COUNT, 2.0, 0.5)}), LOOK),
        ("199 of 400", Case(columns={"grad_norm": marked(199, COUNT, 2.0, 0.5)}), LOOK),
        ("200 of 400", Case(columns={"grad_norm": marked(200, COUNT, 2.0, 0.5)}), BAD),
        (
            "only in the warm-up",
            Case(
                columns={"grad_norm": [2.0] * 100 + [0.5] * 300},
                files={"recipe": RECIPE.replace("warmup_steps = 0", "warmup_steps = 100")},
            ),
            GOOD,
        ),
        ("off", Case(files={"recipe": RECIPE.replace("clip_norm = 1.0", "clip_norm = 0.0")}), NOT_MEASURED),
        ("no recipe", Case(files={"recipe": ""}), NOT_MEASURED),
        ("too few", Case(falling(19)), NOT_MEASURED),
    ],
    "skipped steps": [
        ("3 of 400", Case(columns={"skipped": marked(3, COUNT, "overflow", None)[::-1]}), GOOD),
        ("4 of 400", Case(columns={"skipped": marked(4, COUNT, "overflow", None)[::-1]}), LOOK),
        ("39 of 400", Case(columns={"skipped": marked(39, COUNT, "too large", None)}), LOOK),
        ("40 of 400", Case(columns={"skipped": marked(40, COUNT, "too large", None)}), BAD),
        ("looks for the loss scale", Case(columns={"skipped": ["overflow"] * 12 + [None] * 388}), GOOD),
        ("never found the loss scale", Case(columns={"skipped": ["overflow"] * COUNT}), BAD),
        ("one of one", Case([3.0], {"skipped": ["too large"]}, evals={}), BAD),
        ("none of 19", Case(falling(19)), NOT_MEASURED),
    ],
    "time plan": [
        ("as planned", Case(), GOOD),
        ("1.4 times as long", Case(columns={"step_s": noisy(1.4)}), GOOD),
        ("1.4 times as fast", Case(columns={"step_s": noisy(1 / 1.4)}), GOOD),
        ("1.6 times as long", Case(columns={"step_s": noisy(1.6)}), LOOK),
        ("1.6 times as fast", Case(columns={"step_s": noisy(1 / 1.6)}), LOOK),
        ("3.3 times as long", Case(columns={"step_s": noisy(3.3)}), BAD),
        ("3.3 times as fast", Case(columns={"step_s": noisy(1 / 3.3)}), LOOK),
        ("100 times as fast", Case(columns={"step_s": noisy(1 / 100)}), LOOK),
        ("one step that compiles", Case(columns={"step_s": [90.0] + [1.0] * (COUNT - 1)}), GOOD),
        ("three steps", Case(falling(3), {"step_s": [9.0, 2.0, 2.0]}, evals={}), NOT_MEASURED),
        ("four steps", Case(falling(4), {"step_s": [9.0, 2.0, 2.0, 2.0]}, evals={}), LOOK),
        ("corrected to what it takes", Case(columns={"step_s": noisy(3.3)}, files={"plan": corrected(3.0)}), GOOD),
        ("corrected the wrong way", Case(files={"plan": corrected(3.3)}), LOOK),
        ("corrected, and slower still", Case(columns={"step_s": noisy(7.0)}, files={"plan": corrected(2.0)}), BAD),
        ("a correction that is damaged", Case(files={"plan": PLAN | {"corrected": [1]}}), GOOD),
        ("no plan", Case(files={"plan": None}), NOT_MEASURED),
        ("seconds not known", Case(files={"plan": PLAN | {"step_s": None}}), NOT_MEASURED),
        ("no seconds", Case(columns={"step_s": [None] * COUNT}), NOT_MEASURED),
        (
            "planned again",
            Case(columns={"step_s": noisy(2.0)}, files={"events": [{"step": 3, "kind": "replan", "after": "8 x"}]}),
            NOT_MEASURED,
        ),
    ],
    "memory plan": [
        ("9 % above", Case(files=memory(1.09)), GOOD),
        ("11 % above", Case(files=memory(1.11)), LOOK),
        ("11 % below", Case(files=memory(0.89)), LOOK),
        ("26 % above", Case(files=memory(1.26)), BAD),
        ("26 % below", Case(files=memory(0.74)), BAD),
        ("no plan", Case(files={"plan": None}), NOT_MEASURED),
        ("no bytes in the plan", Case(files={"plan": {"phases": {"backward": {"other": None}}}}), NOT_MEASURED),
        ("no memory", Case(columns={"memory_bytes": [None] * COUNT}), NOT_MEASURED),
        (
            "planned again",
            Case(files=memory(2.0) | {"events": [{"step": 3, "kind": "replan", "after": "8 x recompute"}]}),
            NOT_MEASURED,
        ),
    ],
    "memory growth": [
        ("4 %", Case(columns={"memory_bytes": [1e9] * 300 + [1.04e9] * 100}), GOOD),
        ("6 %", Case(columns={"memory_bytes": [1e9] * 300 + [1.06e9] * 100}), LOOK),
        ("26 %", Case(columns={"memory_bytes": [1e9] * 300 + [1.26e9] * 100}), BAD),
        (
            "6 % at the first save",
            Case(columns={"memory_bytes": [1e9] * 250 + [1.06e9] * 150}, files=saved(250, 330)),
            GOOD,
        ),
        (
            "6 % at the second save",
            Case(columns={"memory_bytes": [1e9] * 270 + [1.06e9] * 130}, files=saved(50, 270)),
            LOOK,
        ),
        (
            "6 % at the first evaluation, and as much later",
            Case(columns={"memory_bytes": [1e9] * 100 + [1.06e9] * 200 + [1.12e9] * 100}, files=evaluated(100, 300)),
            LOOK,
        ),
        ("in the first quarter", Case(columns={"memory_bytes": [1e9] * 100 + [2e9] * 300}), GOOD),
        ("seven", Case(falling(7)), NOT_MEASURED),
    ],
    "slowdown": [
        ("9 %", Case(columns={"tokens_per_s": [1000.0] * 300 + [910.0] * 100}), GOOD),
        ("11 %", Case(columns={"tokens_per_s": [1000.0] * 300 + [890.0] * 100}), LOOK),
        ("31 %", Case(columns={"tokens_per_s": [1000.0] * 300 + [690.0] * 100}), BAD),
        ("31 % for a while", Case(columns={"tokens_per_s": [1000.0] * 200 + [690.0] * 100 + [1000.0] * 100}), BAD),
        ("faster", Case(columns={"tokens_per_s": [1000.0] * 300 + [2000.0] * 100}), GOOD),
        ("too few", Case(falling(19)), NOT_MEASURED),
    ],
    "data wait": [
        ("4.9 %", Case(columns={"wait_s": [0.049] * COUNT, "step_s": [0.951] * COUNT}), GOOD),
        ("5.1 %", Case(columns={"wait_s": [0.051] * COUNT, "step_s": [0.949] * COUNT}), LOOK),
        ("26 %", Case(columns={"wait_s": [0.26] * COUNT, "step_s": [0.74] * COUNT}), BAD),
        ("the first step alone", Case(columns={"wait_s": [1000.0] + [0.0] * 399}), GOOD),
        ("some long waits", Case(columns={"wait_s": marked(4, COUNT, 50.0, 0.0)[::-1]}), BAD),
        ("too few", Case(falling(20)), NOT_MEASURED),
    ],
}  # fmt: skip
