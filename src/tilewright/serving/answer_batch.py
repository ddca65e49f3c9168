"""The answers that are drawn side by side: one pass of the model gives a token of each, and prompts run between them.

Memory of their key/value caches is reserved when an answer begins, for its prompt and the most that it may become, out
of a budget: what is reserved is never more. A layer with a window takes room for its window, however long the answer
is. Prompts of new answers run at most a chunk between two passes.

An answer with a seed is the same alone and beside others: passes that it is in are filled up to one width
(`models.continued_rows`).
"""

from collections.abc import Sequence

import psutil
import torch

from tilewright.core.hardware import detect_machine
from tilewright.models.base.protocols import Model
from tilewright.models.continued_rows import Row, RowBatch
from tilewright.serving.answer import AnswerPiece, AnswerStream

Outcome = tuple[AnswerStream, AnswerPiece | BaseException]


class Batch:
    """Draws for answers of one model. All methods but `fits` are called in one thread.

    Args:
        model: in evaluation mode.
        device: of the model.
        width: most answers at a time.
        chunk: tokens of prompts that run between two tokens of the others.
        budget_bytes: of all caches.
    """

    def __init__(self, model: Model, device: torch.device, *, width: int, chunk: int, budget_bytes: int):
        self._rows = RowBatch(model, device, width=width, chunk=chunk)
        self._chunk, self.budget_bytes = chunk, budget_bytes
        self._row_bytes = self._rows.row_bytes()
        self._begun: dict[AnswerStream, Row] = {}
        self._reserved: dict[AnswerStream, float] = {}

    @property
    def most_positions(self) -> int | None:
        """The most tokens of prompt and answer that one answer of a batch may have; None: any number."""
        return self._row_bytes.most_positions(self.budget_bytes)

    @property
    def reserved_bytes(self) -> float:
        """Bytes reserved in the batch for the answers that have begun."""
        return sum(self._reserved.values())

    def fits(self, positions: int) -> bool:
        """True where an answer of so many positions, prompt included, ever fits into the batch."""
        return self._row_bytes.of(positions) <= self.budget_bytes

    def begin(self, answer: AnswerStream) -> bool:
        """Begin an answer in the batch: reserve its memory; False where there is none now."""
        size = self._row_bytes.of(len(answer.ids) + answer.max_tokens)
        if self._reserved and self.reserved_bytes + size > self.budget_bytes:
            return False
        self._reserved[answer] = size
        return True

    def end(self, answer: AnswerStream) -> None:
        """End an answer in the batch: free its memory."""
        self._begun.pop(answer, None)
        self._reserved.pop(answer, None)

    def step(self, answers: Sequence[AnswerStream]) -> list[Outcome]:
        """Run one step of a batch: draw a token of each answer whose prompt has run, and run a chunk of the others'
        prompts.

        Returns:
            Pieces of answers, or what went wrong with them. An error of one answer's own draw is its own; one of the
            model's pass is that of all answers in it.
        """
        drawing = [answer for answer in answers if answer in self._begun and not self._begun[answer].in_prompt]
        outcomes = self._draw(drawing) if drawing else []
        left = self._chunk
        for answer in answers:
            while answer not in self._begun or self._begun[answer].in_prompt:
                size = self._next_size(answer)
                if size > left and left < self._chunk:
                    return outcomes
                left -= size
                outcome = self._run_prompt(answer)
                if outcome is not None:
                    outcomes.append((answer, outcome))
                    break
        return outcomes

    def _draw(self, answers: Sequence[AnswerStream]) -> list[Outcome]:
        try:
            rows = [self._begun[answer] for answer in answers]
            filled = any(answer.has_seed for answer in answers)
            logits_BV = self._rows.step(rows, [answer.last for answer in answers], filled=filled)
        except Exception as error:  # noqa: BLE001  handed to those who wait for the answers
            return [(answer, error) for answer in answers]
        return [(answer, _taken(answer, logits_V)) for answer, logits_V in zip(answers, logits_BV, strict=True)]

    def _next_size(self, answer: AnswerStream) -> int:
        row = self._begun.get(answer)
        return min(self._chunk, len(answer.ids) if row is None else len(row.ids) - row.num_run)

    def _run_prompt(self, answer: AnswerStream) -> AnswerPiece | BaseException | None:
        try:
            if answer not in self._begun:
                self._begun[answer] = self._rows.begin(answer.ids, answer.max_tokens)
            logits_V = self._rows.prefill(self._begun[answer])
        except Exception as error:  # noqa: BLE001  handed to the one who waits for the answer
            return error
        return None if logits_V is None else _taken(answer, logits_V)


def _taken(answer: AnswerStream, logits_V: torch.Tensor) -> AnswerPiece | BaseException:
    try:
        return answer.take(logits_V)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # noqa: BLE001  a panic of a tokenizer or a grammar derives from it
        return error


def free_bytes(device: torch.device) -> int:
    """Free bytes of the memory that holds a model's caches."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    own = psutil.Process().memory_info().rss
    return min(psutil.virtual_memory().available, detect_machine("cpu").host_memory_bytes - own)
