"""The objects that a client gets: one answer, or the parts of a stream, for both kinds of requests."""

import json
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from tilewright.serving.api.logprobs import TokenTexts, of_chat, of_text
from tilewright.serving.api.tool_calls import FunctionCall
from tilewright.serving.next_token import Drawn

_ARGUMENT_CHARS = 64
"""Of a call's arguments in a part of a stream."""


@dataclass
class Told:
    """One answer of a request as it is told.

    Args:
        index: among the answers of the request.
        reason: why it ended.
        text: all of it.
        calls: of tools.
        tokens: with log-probabilities.
        thought: before the text.
    """

    index: int
    reason: str | None = None
    text: str = ""
    calls: list[FunctionCall] = field(default_factory=list)
    tokens: list[Drawn] = field(default_factory=list)
    thought: str = ""


class Shape:
    """The objects of one answer.

    Args:
        kind: "chat" or "text".
        model: its name.
        texts: of tokens, where log-probabilities are told; else None.
    """

    def __init__(self, kind: str, model: str, texts: TokenTexts | None):
        self.is_chat, self._texts = kind == "chat", texts
        name = ("chatcmpl-" if self.is_chat else "cmpl-") + uuid.uuid4().hex
        self._head = {"id": name, "created": int(time.time()), "model": model}

    def whole(self, choices: Sequence[Told], usage: dict[str, int]) -> dict[str, Any]:
        """The reply object of an answer that is not streamed."""
        return self._object(False) | {"choices": [self._choice(choice) for choice in choices], "usage": usage}

    def _choice(self, choice: Told) -> dict[str, Any]:
        content: dict[str, Any] = {"text": choice.text}
        if self.is_chat:
            said = choice.text if choice.text or not choice.calls else None
            message: dict[str, Any] = {"role": "assistant", "content": said, "refusal": None}
            if choice.thought:
                message["reasoning_content"] = choice.thought
            if choice.calls:
                message["tool_calls"] = [call.to_json() for call in choice.calls]
            content = {"message": message}
        logprobs = self._logprobs(choice.tokens, 0)
        return {"index": choice.index, **content, "logprobs": logprobs, "finish_reason": choice.reason}

    def role(self, index: int) -> dict[str, Any]:
        """The reply object that names the role: the first part of a streamed choice."""
        return self._chunk(index, {"role": "assistant", "content": "", "refusal": None}, None, None)

    def parts(
        self, choice: Told, thought: str, text: str, calls: Sequence[FunctionCall], tokens: Sequence[Drawn]
    ) -> Iterator[dict[str, Any]]:
        """Reply objects as parts of a stream; the choice's own text is what came before. A call comes as OpenAI's API
        tells it: id and name first, then its arguments."""
        if thought:
            yield self._chunk(choice.index, {"reasoning_content": thought}, None, None)
        if text or tokens:
            delta = {"content": text} if text or not calls else {}
            yield self._chunk(choice.index, delta, self._logprobs(tokens, len(choice.text)), None)
        for index, call in enumerate(calls, len(choice.calls)):
            named = {"index": index, "id": call.id, "type": "function"}
            yield self._call(choice, named | {"function": {"name": call.name, "arguments": ""}})
            for at in range(0, len(call.arguments), _ARGUMENT_CHARS):
                piece = call.arguments[at : at + _ARGUMENT_CHARS]
                yield self._call(choice, {"index": index, "function": {"arguments": piece}})

    def _call(self, choice: Told, delta: dict[str, Any]) -> dict[str, Any]:
        return self._chunk(choice.index, {"tool_calls": [delta]}, None, None)

    def last(self, choice: Told) -> dict[str, Any]:
        """The last reply object, part of a choice."""
        return self._chunk(choice.index, {}, None, choice.reason)

    def usage(self, usage: dict[str, int]) -> dict[str, Any]:
        """The reply object with usage: the last part of a stream, if the client asks for it."""
        return self._object(True) | {"choices": [], "usage": usage}

    def _chunk(self, index: int, delta: dict[str, Any], logprobs: Any, reason: str | None) -> dict[str, Any]:
        content = {"delta": delta} if self.is_chat else {"text": delta.get("content", "")}
        choice = {"index": index, **content, "logprobs": logprobs, "finish_reason": reason}
        return self._object(True) | {"choices": [choice]}

    def _logprobs(self, tokens: Sequence[Drawn], offset: int) -> dict[str, Any] | None:
        if self._texts is None:
            return None
        return of_chat(self._texts, tokens) if self.is_chat else of_text(self._texts, tokens, offset)

    def _object(self, streamed: bool) -> dict[str, Any]:
        chat = "chat.completion.chunk" if streamed else "chat.completion"
        return self._head | {"object": chat if self.is_chat else "text_completion"}


def event(value: dict[str, Any]) -> str:
    """Write a reply object as an event: one part of a stream as it is sent."""
    return f"data: {json.dumps(value, ensure_ascii=False)}\n\n"
