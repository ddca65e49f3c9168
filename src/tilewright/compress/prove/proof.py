"""One proof: a consumer asked about an artefact, its answer compared and judged, all of it as a row of exports.json."""

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from tilewright.compress.prove.compare_answers import AnswerDifference, as_json, compare
from tilewright.compress.prove.consumer_process import ConsumerLimits, ask
from tilewright.compress.prove.consumer_session import Request
from tilewright.compress.prove.graphs.image_question import ImageQuestion
from tilewright.compress.prove.held_out import ReferenceAnswer
from tilewright.compress.prove.question import Question
from tilewright.compress.prove.texts.compare_texts import ReferenceTexts, compare_texts
from tilewright.compress.prove.tolerance import Tolerance, beyond

State = Literal["ran", "lint only", "unavailable", "failed", "not proven"]


@dataclass(frozen=True)
class Proof:
    """Settings of all proofs of an export: one question for all, the same threads and limits.

    Args:
        folder: that holds the question's files, and answers for as long as they are read.
        question: what is asked.
        expected: of the model.
        threads: of each consumer.
        limits: of each consumer.
        texts: what the tokenizer of an artefact should answer.
    """

    folder: Path
    question: Question | ImageQuestion
    expected: ReferenceAnswer
    threads: int
    limits: ConsumerLimits
    texts: ReferenceTexts = field(default_factory=ReferenceTexts)

    def __post_init__(self) -> None:
        self.question.save(self.folder)

    def of(
        self,
        module: str,
        artefact: Path,
        options: Mapping[str, Any],
        on_line: Callable[[str], object] = lambda line: None,
        *,
        tolerance: Tolerance | None = None,
        log_probs: np.ndarray | None = None,
        stored: np.ndarray | None = None,
        differing: Callable[[Path], str] | None = None,
    ) -> dict[str, Any]:
        """Run an artefact's proof in its consumer: state, reason, and what was measured. Never raises for what a
        consumer does.

        Args:
            module: of the consumer.
            artefact: file or folder.
            options: for the consumer.
            on_line: called with each line that it prints.
            tolerance: beyond which the state is "failed"; None judges nothing.
            log_probs: [N, V] of the model to compare with; None: of `expected`.
            stored: [N, V] of a model with the values that the artefact stores.
            differing: says which weights of the artefact are not the model's; see `export.target.Written`.
        """
        with tempfile.TemporaryDirectory(dir=self.folder) as answer:
            request = Request(str(artefact), str(self.folder), answer, self.threads, options=options)
            outcome = ask(module, request, self.limits, on_line)
        if outcome.answer is None or outcome.logits_NV is None:
            return {"state": "failed", "reason": outcome.reason}
        measured = asdict(outcome.answer)
        facts = measured.pop("facts")
        difference = compare(self.expected, outcome.logits_NV, log_probs)
        if isinstance(difference, str):
            return {"state": "failed", "reason": difference, **measured}
        ids = outcome.token_ids or {}
        counts, told = compare_texts(self.texts, ids.get("plain"), ids.get("special"), facts)
        row = {**measured, **as_json(difference), **counts}
        if stored is not None:
            away = compare(self.expected, outcome.logits_NV, stored)
            assert isinstance(away, AnswerDifference)
            row["stored"] = {"kl": away.kl, "top1": away.top1}
        if tolerance is None:
            return {"state": "ran", "reason": "", **row}
        reason = "; ".join(filter(None, [beyond(tolerance, row), differing(artefact) if differing else "", told]))
        return {"state": "failed" if reason else "ran", "reason": reason, **row}
