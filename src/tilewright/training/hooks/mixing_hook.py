"""`[data.mixing]` in a run: at each interval held-out and training losses by domain go to the policy, and its weights
to the stream.

What decides are sums over all ranks, and each rank decides by itself: the same numbers give the same weights. An event
`mix_eval` has what was shown and the weights that hold from then on; a move and a refusal are events too.
"""

from collections.abc import Callable, Mapping
from typing import Any

from tilewright.data.batches.rank_sums import SumsOfRanks
from tilewright.data.batches.stream import Stream
from tilewright.data.mixing.fixed_weights import Static
from tilewright.data.mixing.mixer import Mixer
from tilewright.data.mixing.mixing_policy import DomainSeen, MixEvaluation, change_line
from tilewright.training.executor.base import StepResult
from tilewright.training.hooks.step_hook import Step, StepHook

HeldOutLosses = Callable[[int], Mapping[str, float]]
"""Number of a turn of held-out batches -> mean held-out loss by domain, over all ranks."""


class MixingHook(StepHook):
    """Gives held-out and training losses by domain to the policy at each interval, and its weights to the stream.

    Args:
        mixer: decides.
        stream: gets the weights.
        sums: training losses of the steps between evaluations.
        evaluate: see `HeldOutLosses`.
        base: weights that hold before the first move, of all domains.
        steps: of the run.
        interval: steps between evaluations.
    """

    name = "mixing"

    def __init__(
        self,
        mixer: Mixer,
        stream: Stream,
        sums: SumsOfRanks,
        evaluate: HeldOutLosses,
        base: Mapping[str, float],
        *,
        steps: int,
        interval: int,
    ) -> None:
        self.mixer, self.stream, self.sums, self.evaluate = mixer, stream, sums, evaluate
        self.steps, self.interval = steps, interval
        self.weights = dict(base)
        """Of tokens, that hold from the next block of samples on; they sum to 1."""
        self._evaluations = 0
        self._news: list[str] = []
        if isinstance(mixer.policy, Static) and stream.state_dict()["next_sample"] == 0:
            self._begin()

    def _begin(self) -> None:
        """Begin mixing: weights that no loss decides hold from the first sample on."""
        decision = self.mixer.decide(self._seen(0, {}, {}))
        if decision.weights is not None:
            self._news.append(f"{change_line(self.weights, decision.weights)} ({decision.why})")
            self.weights = decision.weights
            self.stream.move(self.weights, decision.why)

    def after_step(self, step: Step, result: StepResult) -> None:
        """Add the step's rows for mixing; at an interval evaluate, decide and move."""
        # 1. News of the start, which had no step to be reported at.
        for text in self._news:
            step.recorder.event(step.number, "mix", text)
        self._news = []
        # 2. Every step counts; only an interval's last one decides.
        self.sums.add(result)
        if step.number % self.interval or step.number >= self.steps:
            return
        trained = self.sums.take().means()
        if not (self._evaluations or self.sums.told):
            text = "the model tells no losses of rows, so training losses by domain are not known to the policy"
            step.recorder.event(step.number, "mix_refused", text)
        held_out = self.evaluate(self._evaluations // self.mixer.policy.turn)
        self._evaluations += 1
        # 3. The policy decides. Refusals are recorded like moves: a weight that stays has a reason, too.
        seen = self._seen(step.number, held_out, trained)
        decision = self.mixer.decide(seen)
        for refusal in decision.refused:
            text = f"{refusal.domain} is not moved: {refusal.why}"
            step.recorder.event(step.number, "mix_refused", text, domain=refusal.domain)
        if decision.weights is not None:
            start = self.stream.move(decision.weights, decision.why)
            text = f"from sample {start}: {change_line(self.weights, decision.weights)} ({decision.why})"
            step.recorder.event(step.number, "mix", text, weights=decision.weights, first_sample=start)
            self.weights = decision.weights
        # 4. What the policy was shown, and the weights from here on.
        row = {
            name: {"weight": self.weights[name], "epochs": one.epochs}
            | ({} if one.held_out is None else {"loss": one.held_out})
            | ({} if one.trained is None else {"train_loss": one.trained})
            for name, one in seen.domains.items()
        }
        step.recorder.log.event(
            step.number, "mix_eval", f"held-out and training loss of {len(row)} domains", domains=row
        )

    def _seen(self, step: int, held_out: Mapping[str, float], trained: Mapping[str, float]) -> MixEvaluation:
        samples, rows = self.stream.num_samples, self.stream.num_rows
        domains = {
            name: DomainSeen(held_out.get(name), trained.get(name), samples[name] / max(1, rows[name]))
            for name in self.weights
        }
        return MixEvaluation(step, self.steps, dict(self.weights), domains)

    def phase(self, name: str) -> None:
        """Sum the losses of mixing over all ranks when a run saves, so that a checkpoint has them."""
        self.sums.phase(name)

    def state_dict(self) -> dict[str, Any]:
        """The state of mixing: weights, the policy's memory, and losses since the last evaluation."""
        return {
            "weights": dict(self.weights),
            "evaluations": self._evaluations,
            "mixer": self.mixer.state_dict(),
            "sums": self.sums.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of mixing; of another policy its weights alone."""
        self.weights = dict(state["weights"])
        self._evaluations = state["evaluations"]
        self._news = []
        if (said := self.mixer.load_state_dict(state["mixer"])) is not None:
            self._news.append(said)
        self.sums.load_state_dict(state["sums"])
