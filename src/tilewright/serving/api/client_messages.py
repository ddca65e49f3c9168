"""Messages of a conversation as clients send them, also those that they got as an answer and play back.

`message.model_dump()` of the `openai` package has all fields, most of them None; `None` is the same as absent.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class Strict(BaseModel):
    """A part of a request that refuses unknown fields and converts no value."""

    model_config = ConfigDict(strict=True, extra="forbid")


class TextPart(Strict):
    """A part of a message; text only."""

    type: Literal["text"]
    text: str


class RefusalPart(Strict):
    """An assistant's words instead of an answer."""

    type: Literal["refusal"]
    refusal: str


class CalledFunction(Strict):
    """A function that the assistant called. `parsed_arguments`, which the package adds, has no effect."""

    name: str
    arguments: str
    parsed_arguments: Any = None

    def to_template(self) -> dict[str, Any]:
        """A message's call of a tool as templates read it, with arguments as an object or as text, whichever they
        take."""
        return {"name": self.name, "arguments": self.arguments or "{}"}


class ToolCall(Strict):
    """One call of an assistant's message. `index` is of a stream's part and has no effect."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None


class ChatMessage(Strict):
    """One turn. `refusal` stands for a content that is missing; `annotations`, `audio` and `parsed` have no effect."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[Annotated[TextPart | RefusalPart, Field(discriminator="type")]] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[ToolCall] | None = None
    function_call: CalledFunction | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    audio: None = None
    parsed: Any = None

    @model_validator(mode="after")
    def _says_something(self) -> "ChatMessage":
        if self.content is None and self.role != "assistant":
            raise ValueError(f"a message of the {self.role} needs a content")
        return self

    def to_template(self, names: dict[str, str]) -> dict[str, Any]:
        """A client's message as templates know it; a developer's instructions are the system's.

        Args:
            names: of the functions that were called so far, by the id of the call; this message's are added.
        """
        role = {"developer": "system", "function": "tool"}.get(self.role, self.role)
        found: dict[str, Any] = {"role": role, "content": self._text()}
        calls = list(self.tool_calls or [])
        if self.function_call is not None:
            calls.append(ToolCall(function=self.function_call))
        if calls:
            found["tool_calls"] = [
                {"type": "function", "function": call.function.to_template()} | ({"id": call.id} if call.id else {})
                for call in calls
            ]
            names |= {call.id: call.function.name for call in calls if call.id}
        name = self.name or (names.get(self.tool_call_id or "") if role == "tool" else None)
        reasoning = self.reasoning_content or self.reasoning
        extra = {"name": name, "tool_call_id": self.tool_call_id, "reasoning_content": reasoning}
        return found | {key: value for key, value in extra.items() if value is not None}

    def _text(self) -> str:
        if self.content is None:
            return self.refusal or ""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text if isinstance(part, TextPart) else part.refusal for part in self.content)


class FunctionDefinition(Strict):
    """A function that may be called."""

    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Strict):
    """A tool; functions only."""

    type: Literal["function"]
    function: FunctionDefinition

    def to_template(self) -> dict[str, Any]:
        """A tool in a client's messages as templates read it."""
        function: dict[str, Any] = {"name": self.function.name}
        if self.function.description is not None:
            function["description"] = self.function.description
        function["parameters"] = self.function.parameters or {"type": "object", "properties": {}}
        return {"type": "function", "function": function}


class NamedFunction(Strict):
    """The name of one."""

    name: str


class NamedTool(Strict):
    """The tool that must be called."""

    type: Literal["function"]
    function: NamedFunction
