"""An answer of a model, piece by piece: the prompt's ids, the draw, the text, and why it ended.

Used by `tilewright chat` and by the server alike.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tilewright.core.errors import ConfigError, DataError
from tilewright.data.chat.errors import ChatError
from tilewright.data.chat.template import ChatTemplate, Message, stops_of
from tilewright.data.chat.tools import NO_ARGUMENTS, TemplateArguments
from tilewright.data.common.tokenizer import Tokenizer
from tilewright.models.base.protocols import Model
from tilewright.models.continued_rows import RowBatch
from tilewright.serving.answer import AnswerStream
from tilewright.serving.check_messages import check_messages, check_text
from tilewright.serving.next_token import AnswerSettings, Constraint
from tilewright.serving.token_text import TextStream, ThoughtGate, keeping


class PromptTooLongError(DataError):
    """A prompt that leaves no room for an answer."""


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

    def chat_ids(self, messages: Sequence[Message], given: TemplateArguments = NO_ARGUMENTS) -> list[int]:
        """The session's ids that an answer to a conversation follows.

        Args:
            messages: the conversation.
            given: what the template gets beside it.

        Raises:
            ConfigError: there is no template.
            DataError: no messages, one without role or content, text that is no Unicode, or a conversation that the
                template refuses.
        """
        template = self.template()
        check_messages(messages)
        try:
            return template.encode(messages, add_generation_prompt=True, given=given)
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
        """The session's chat template.

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
        """The session's ids of a text that is continued; see `Tokenizer.prompt_ids`.

        Raises:
            DataError: the text is no Unicode.
        """
        check_text(text, "prompt")
        return self.tokenizer.prompt_ids(text)

    @property
    def stop_ids(self) -> Sequence[int]:
        """The session's tokens that end an answer."""
        return stops_of(self.tokenizer, self.chat).ids

    def room(self, ids: Sequence[int]) -> int | None:
        """The most tokens that an answer to a prompt may have; None: any number."""
        return None if self.max_positions is None else self.max_positions - len(ids)

    def answer(
        self,
        ids: Sequence[int],
        settings: AnswerSettings,
        *,
        turn: bool,
        constraint: Constraint | None = None,
        keep: Sequence[str] = (),
        gate: ThoughtGate | None = None,
    ) -> AnswerStream:
        """The session's answer to a prompt. It is shorter than asked for where the model's positions end before.

        Args:
            ids: the prompt.
            settings: how it is drawn.
            turn: it answers a conversation. It ends at the text that ends a turn too, where the layout has no token
                for that; the tokens of `stops_of` end both.
            constraint: what its text may be; None: everything.
            keep: names of special tokens that stand in its text; others give none.
            gate: tells its thoughts, see `AnswerStream`.

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
        stops = stops_of(self.tokenizer, self.chat)
        turn_stop = stops.texts if turn else ()
        # An answer is a text of its own; what continues a text keeps the space before its first word.
        text = TextStream(keeping(self.tokenizer, keep), () if turn else ids)
        return AnswerStream(
            *(RowBatch(self.model, self.device), ids, text, settings),
            stop=settings.stop, turn_stop=turn_stop, gate=gate, stop_ids=stops.ids, max_tokens=num_tokens,
            constraint=constraint,
        )  # fmt: skip


def fitting(session: Session, messages: Sequence[dict[str, Any]], room: int) -> tuple[list[dict[str, Any]], list[int]]:
    """A conversation fitting a session, with its oldest turns dropped until an answer of `room` tokens fits, and its
    ids.

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
