"""One proof: a consumer asked about an artefact, its answer compared, all of it as a row of exports.json."""

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from tilewright.compress.prove.compare import as_json, compare
from tilewright.compress.prove.held_out import ReferenceAnswer
from tilewright.compress.prove.limits import ConsumerLimits, ask
from tilewright.compress.prove.question import Question
from tilewright.compress.prove.session import Request

State = Literal["ran", "lint only", "unavailable", "failed", "not proven"]


@dataclass(frozen=True)
class Proof:
    """How proofs are made: one question for all, the same threads and limits.

    Args:
        folder: that holds the question's files, and answers for as long as they are read.
        question: what is asked.
        expected: of the FP32 model.
        threads: of each consumer.
        limits: of each consumer.
    """

    folder: Path
    question: Question
    expected: ReferenceAnswer
    threads: int
    limits: ConsumerLimits

    def __post_init__(self) -> None:
        self.question.save(self.folder)

    def of(
        self,
        module: str,
        artefact: Path,
        options: Mapping[str, Any],
        on_line: Callable[[str], object] = lambda line: None,
    ) -> dict[str, Any]:
        """The part of a row that the consumer decides: state, reason, and what was measured. Never raises for what a
        consumer does."""
        with tempfile.TemporaryDirectory(dir=self.folder) as answer:
            request = Request(str(artefact), str(self.folder), answer, self.threads, options=options)
            outcome = ask(module, request, self.limits, on_line)
        if outcome.answer is None or outcome.logits_NV is None:
            return {"state": "failed", "reason": outcome.reason}
        difference = compare(self.expected, outcome.logits_NV, outcome.token_ids)
        measured = asdict(outcome.answer)
        if isinstance(difference, str):
            return {"state": "failed", "reason": difference, **measured}
        return {"state": "ran", "reason": "", **measured, **as_json(difference)}
