"""One answer's next token: penalties, biases, a grammar, then the draw; and how likely it was.

Legend: V vocabulary.
"""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from tilewright.models.sampling import Sampling


class Drawn(NamedTuple):
    """A token, and where asked for its log-probability and the likeliest ones, by the model alone: before temperature,
    penalties, biases and grammar."""

    id: int
    logprob: float = math.nan
    top: tuple[tuple[int, float], ...] = ()


class Constraint(Protocol):
    """Limits on the next token of an answer; see `grammar.GrammarConstraint`."""

    def allowed(self, vocab_size: int) -> Tensor | None:
        """Tokens allowed next by a constraint, bool [V], or None where the text is complete."""
        ...

    def take(self, token: int) -> None:
        """Take into a constraint the token that was drawn next."""
        ...


@dataclass(frozen=True)
class AnswerSettings:
    """How an answer is drawn.

    Args:
        max_tokens: at most this many.
        sampling: temperature, top_k, top_p, min_p.
        stop: texts that end the answer and are not part of it.
        seed: the same seed gives the same tokens; None draws others each time.
        frequency_penalty: taken from a token's logit for each time that it is in the answer already.
        presence_penalty: taken once where it is in the answer already.
        logit_bias: added to logits, by id.
        top_logprobs: number of likeliest tokens reported with each token; None: no log-probabilities at all.
    """

    max_tokens: int = 512
    sampling: Sampling = field(default_factory=Sampling)
    stop: tuple[str, ...] = ()
    seed: int | None = None
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    top_logprobs: int | None = None


class Drawer:
    """The draws of one answer.

    Args:
        settings: how.
        constraint: what may be drawn; None: everything.

    Example:
        >>> drawer = Drawer(AnswerSettings(sampling=Sampling(0), presence_penalty=2.0))
        >>> [drawer.draw(torch.tensor([0.0, 1.5, 1.0])).id for _ in range(3)]
        [1, 2, 0]
    """

    def __init__(self, settings: AnswerSettings, constraint: Constraint | None = None):
        self._settings, self._constraint = settings, constraint
        self._generator = torch.Generator()
        if settings.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(settings.seed)
        self._counts: Counter[int] = Counter()

    def draw(self, logits_V: Tensor) -> Drawn | None:
        """Draw the next token after FP32 logits on the CPU; None where the grammar's text is complete."""
        changed_V = self._changed(logits_V)
        if self._constraint is not None:
            allowed_V = self._constraint.allowed(len(logits_V))
            if allowed_V is None:
                return None
            changed_V = changed_V.masked_fill(~allowed_V, -math.inf)
        token = int(self._settings.sampling.draw(changed_V[None], self._generator))
        self._counts[token] += 1
        if self._constraint is not None:
            self._constraint.take(token)
        if self._settings.top_logprobs is None:
            return Drawn(token)
        logprobs_V = logits_V.log_softmax(-1)
        top = logprobs_V.topk(min(self._settings.top_logprobs, len(logits_V)))
        pairs = zip(top.indices.tolist(), top.values.tolist(), strict=True)
        return Drawn(token, float(logprobs_V[token]), tuple(pairs))

    def _changed(self, logits_V: Tensor) -> Tensor:
        settings = self._settings
        penalised = self._counts and (settings.frequency_penalty or settings.presence_penalty)
        if not penalised and not settings.logit_bias:
            return logits_V
        logits_V = logits_V.clone()
        if penalised:
            ids, counts = torch.tensor(list(self._counts)), torch.tensor(list(self._counts.values()))
            logits_V[ids] -= settings.presence_penalty + settings.frequency_penalty * counts
        if settings.logit_bias:
            logits_V[torch.tensor(list(settings.logit_bias))] += torch.tensor(list(settings.logit_bias.values()))
        return logits_V
