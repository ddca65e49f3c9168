"""An answer of a model, piece by piece: the prompt's ids, the draw, the text, and why it ended.

Used by `tilewright chat` and by the server alike.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tilewright.core.errors import ConfigError, DataError
from tilewright.data.chat.template import ChatError, ChatTemplate, Message
from tilewright.data.common.tokenizer import Tokenizer
from tilewright.models.base.protocols import Model
from tilewright.models.generate import stream
from tilewright.models.sampling import Sampling
from tilewright.serving.messages import check_messages, check_text
from tilewright.serving.text import StopFilter, TextStream


class PromptTooLongError(DataError):
    """A prompt that leaves no room for an answer."""


@dataclass(frozen=True)
class AnswerSettings:
    """How an answer is drawn.

    Args:
        max_tokens: at most this many.
        sampling: temperature, top_k, top_p.
        stop: texts that end the answer and are not part of it.
        seed: the same gives the same answer; None draws anew each time.
    """

    max_tokens: int = 512
    sampling: Sampling = field(default_factory=Sampling)
    stop: tuple[str, ...] = ()
    seed: int | None = None


class AnswerStream:
    """The pieces of one answer, drawn as they are asked for; nothing runs before the first.

    `finish_reason` is "stop" (an end of turn, or a stop string) or "length", and None before the end.
    """

    def __init__(self, tokens: Iterator[int], text: TextStream, stop: Sequence[str], max_tokens: int):
        self._tokens, self._text, self._stop = tokens, text, StopFilter(stop)
        self._max_tokens = max_tokens
        self.num_tokens = 0
        """Drawn so far, without the one that ends a turn."""
        self.finish_reason: str | None = None

    def __iter__(self) -> Iterator[str]:
        """One piece per token, "" where a token gives no text yet."""
        for token in self._tokens:
            self.num_tokens += 1
            piece = self._stop.push(self._text.push(token))
            if self._stop.stopped:
                self.finish_reason = "stop"
            yield piece
            if self._stop.stopped:
                return
        last = self._stop.push(self._text.flush())
        last += self._stop.flush()
        ended = self._stop.stopped or self.num_tokens < self._max_tokens
        self.finish_reason = "stop" if ended else "length"
        if last:
            yield last


@dataclass(frozen=True)
class Session:
    """A model that answers.

    Args:
        model: in evaluation mode.
        tokenizer: its tokenizer.
        chat: its template; None: it continues texts only.
        device: of the model.
        max_positions: most tokens of prompt and answer together; None: no limit is known.
    """

    model: Model
    tokenizer: Tokenizer
    chat: ChatTemplate | None
    device: torch.device
    max_positions: int | None = None

    def chat_ids(self, messages: Sequence[Message]) -> list[int]:
        """The ids that an answer to a conversation follows.

        Raises:
            ConfigError: there is no template.
            DataError: no messages, one without role or content, text that is no Unicode, or a conversation that the
                template refuses.
        """
        template = self.template()
        check_messages(messages)
        try:
            return template.encode(messages, add_generation_prompt=True)
        except ChatError as error:
            roles = ", ".join(str(message["role"]) for message in messages[:20])
            raise DataError(
                "Chat template refuses the conversation",
                got=f"{error.problems[0].got or error.reason}; roles {roles}",
                need="roles in an order that the template knows: mostly user and assistant in turn, after at most one "
                "system message",
                try_="the conversation without its system message, or another order of messages",
                where=template.where,
            ) from error

    def template(self) -> ChatTemplate:
        """The chat template.

        Raises:
            ConfigError: there is none.
        """
        if self.chat is None:
            raise ConfigError(
                "Model has no chat template",
                got="a model without one, as base models are",
                need="the layout of turns that it was trained with",
                try_="tilewright generate, which continues a text\nor --chat-template chatml, if it was tuned on that",
            )
        return self.chat

    def text_ids(self, text: str) -> list[int]:
        """The ids of the beginning of a document.

        Raises:
            DataError: the text is no Unicode.
        """
        check_text(text, "prompt")
        return [self.tokenizer.bos_id, *self.tokenizer.encode(text)]

    def room(self, ids: Sequence[int]) -> int | None:
        """Tokens that an answer may have behind a prompt; None: any number."""
        return None if self.max_positions is None else self.max_positions - len(ids)

    def answer(self, ids: Sequence[int], settings: AnswerSettings, *, turn: bool) -> AnswerStream:
        """The answer to a prompt. It is shorter than asked for where the model's positions end before.

        Args:
            ids: the prompt.
            settings: how it is drawn.
            turn: ends where the template says that a turn ends, not only at the end of a document.

        Raises:
            PromptTooLongError: no room for a single token.
        """
        room = self.room(ids)
        if room is not None and room < 1:
            raise PromptTooLongError(
                "Prompt is longer than the model's context",
                got=f"{len(ids)} tokens",
                need=f"at most {(self.max_positions or 1) - 1}, and room for an answer",
                try_="a shorter prompt, or fewer turns of the conversation",
            )
        num_tokens = settings.max_tokens if room is None else min(room, settings.max_tokens)
        stop_ids: Sequence[int] = (self.tokenizer.eos_id,)
        stop: tuple[str, ...] = settings.stop
        if turn:
            stop_ids, stop = self.template().stop_ids, stop + self.template().stop_strings
        ids_S = torch.tensor(list(ids), dtype=torch.int64, device=self.device)
        tokens = stream(
            self.model, ids_S, num_tokens, sampling=settings.sampling, stop_ids=stop_ids, seed=settings.seed
        )
        # An answer is a text of its own; what continues a text keeps the space before its first word.
        text = TextStream(self.tokenizer, () if turn else ids)
        return AnswerStream(tokens, text, stop, num_tokens)


def fitting(session: Session, messages: Sequence[dict[str, Any]], room: int) -> tuple[list[dict[str, Any]], list[int]]:
    """The conversation with its oldest turns dropped until an answer of `room` tokens fits, and its ids.

    A system message at the beginning stays, and so does the last message. What begins behind it is a user's turn.

    Raises:
        DataError: as `Session.chat_ids`.
    """
    kept = list(messages)
    first = 1 if kept and kept[0]["role"] == "system" else 0
    while True:
        ids = session.chat_ids(kept)
        left = session.room(ids)
        if left is None or left >= room or len(kept) <= first + 1:
            return kept, ids
        del kept[first]
        while len(kept) > first + 1 and kept[first]["role"] != "user":
            del kept[first]
