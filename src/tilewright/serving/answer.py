"""An answer as it grows: a token is drawn from the model's logits, and gives a piece of text or the end."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from tilewright.models.continued_rows import RowBatch
from tilewright.serving.next_token import AnswerSettings, Constraint, Drawer, Drawn
from tilewright.serving.token_text import StopFilter, TextStream, ThoughtGate


@dataclass(frozen=True)
class AnswerPiece:
    """Part of an answer that one token adds.

    Args:
        text: "" where the token gives none yet.
        token: the token; None for one that ends the answer and is not part of it.
    """

    text: str
    token: Drawn | None = None


class AnswerStream:
    """One answer, drawn token by token from logits that `serving.answer_batch` or its own iterator computes.

    `finish_reason` is "stop" (an end of turn, or a stop string) or "length", and None before the end.

    Args:
        rows: rows of the model; this answer takes one.
        ids: token ids of the prompt.
        text: turns tokens into text.
        settings: temperature and limits of the draws.
        stop: texts that end the answer.
        turn_stop: texts that end a turn.
        gate: separates thoughts from the answer; `stop` is not looked for in thoughts. None: no thoughts.
        stop_ids: tokens that end the answer.
        max_tokens: most tokens of the answer.
        constraint: which tokens may be drawn; None: all.
    """

    def __init__(
        self,
        rows: RowBatch,
        ids: Sequence[int],
        text: TextStream,
        settings: AnswerSettings,
        *,
        stop: Sequence[str] = (),
        turn_stop: Sequence[str] = (),
        gate: ThoughtGate | None = None,
        stop_ids: Collection[int] = (),
        max_tokens: int,
        constraint: Constraint | None = None,
    ):
        self._rows, self._text, self._stop_ids, self._gate = rows, text, frozenset(stop_ids), gate
        # Where all of it is looked for in the same text, the one that is complete first counts.
        self._turn_stop = StopFilter(turn_stop if gate else ())
        self._stop = StopFilter(stop if gate else (*stop, *turn_stop))
        self._drawer = Drawer(settings, constraint)
        self.ids, self.max_tokens = list(ids), max_tokens
        self.has_seed = settings.seed is not None
        self.num_tokens = 0
        """Drawn so far, without the one that ends a turn."""
        self.last = -1
        """The token that was drawn last."""
        self.finish_reason: str | None = None

    def take(self, logits_V: Tensor) -> AnswerPiece:
        """Take the next token of an answer, drawn from FP32 logits on the CPU."""
        drawn = self._drawer.draw(logits_V)
        if drawn is None or drawn.id in self._stop_ids:
            return AnswerPiece(self._ended("stop"))
        self.num_tokens, self.last = self.num_tokens + 1, drawn.id
        text = self._told(self._text.push(drawn.id))
        if self._stopped:
            self.finish_reason = "stop"
        elif self.num_tokens == self.max_tokens:
            text += self._ended("length")
        return AnswerPiece(text, drawn)

    def end(self) -> None:
        """End the answer here: what was drawn so far is it."""
        self.finish_reason = self.finish_reason or "stop"

    def _ended(self, reason: str) -> str:
        last = self._told(self._text.flush(), is_last=True)
        self.finish_reason = "stop" if self._stopped else reason
        return last

    def _told(self, piece: str, is_last: bool = False) -> str:
        """The part of the answer's text so far that can be sent."""
        piece = self._turn_stop.push(piece)
        ends = is_last or self._turn_stop.stopped
        piece += self._turn_stop.flush() if ends else ""
        thought = ""
        if self._gate is not None:
            thought, piece = self._gate.push(piece)
            more = self._gate.flush() if ends else ("", "")
            thought, piece = thought + more[0], piece + more[1]
        return thought + self._stop.push(piece) + (self._stop.flush() if ends else "")

    @property
    def _stopped(self) -> bool:
        return self._stop.stopped or self._turn_stop.stopped

    def __iter__(self) -> Iterator[str]:
        """The pieces of the answer's text, one per token, drawn as they are asked for; nothing runs before the
        first."""
        row = self._rows.begin(self.ids, self.max_tokens)
        while self.finish_reason is None:
            logits_V = self._rows.prefill(row) if row.in_prompt else self._rows.step([row], [self.last])[0]
            if logits_V is not None:
                piece = self.take(logits_V)
                if piece.text or piece.token is not None:
                    yield piece.text
