"""Requests in the shape of OpenAI's API, checked, and errors in its shape.

Fields that would change the answer and that tilewright cannot follow are refused unless they have the value that
changes nothing; fields that do not change it (`user`, `metadata`, ...) are ignored; any other field is an error.
"""

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

IGNORED = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "parallel_tool_calls"}
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1, None),
    "best_of": (1, None),
    "echo": (False, None),
    "suffix": ("", None),
    "logprobs": (False, None),
    "top_logprobs": (None,),
    "logit_bias": ({}, None),
    "frequency_penalty": (0, None),
    "presence_penalty": (0, None),
    "tools": ([], None),
    "tool_choice": ("none", None),
    "functions": ([], None),
    "response_format": ({"type": "text"}, None),
    "modalities": (["text"], None),
    "stream_options": (None,),
}
"""Field -> the values that change nothing; any other is refused. `stream_options` is read where `stream` is true."""


class ApiError(Exception):
    """An answer of status 4xx or 5xx.

    Args:
        status: of HTTP.
        message: for people.
        param: the field that is wrong.
        code: for programs.
        retry_after: seconds.
    """

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None, retry_after: int = 0
    ):
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.retry_after = status, message, param, code, retry_after

    def to_json(self) -> dict[str, Any]:
        """OpenAI's object."""
        kinds = {401: "authentication_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")


class TextPart(_Strict):
    """A part of a message; text only."""

    type: Literal["text"]
    text: str


class ChatMessage(_Strict):
    """One turn."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart]
    name: str | None = None
    tool_call_id: str | None = None
    refusal: None = None
    tool_calls: None = None

    def to_template(self) -> dict[str, str]:
        """The message as templates know it; a developer's instructions are the system's."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class StreamOptions(_Strict):
    """What a stream contains beside the text."""

    include_usage: bool = False
    include_obfuscation: bool = False


Stop = Annotated[str, Field(min_length=1, max_length=1000)]


class _Request(_Strict):
    model: str
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=16)] | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None

    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def asked_tokens(self) -> int | None:
        """The most tokens of an answer, where the request says so."""
        return self.max_tokens


class ChatRequest(_Request):
    """Of /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None

    def asked_tokens(self) -> int | None:
        """The newer name first."""
        return self.max_completion_tokens or self.max_tokens


class TextRequest(_Request):
    """Of /v1/completions. The prompt is one text, or the ids of one."""

    prompt: str | Annotated[list[str], Field(min_length=1, max_length=1)] | Annotated[list[int], Field(min_length=1)]


def parse(body: bytes, kind: type[_Request]) -> Any:
    """A request from a body.

    Raises:
        ApiError: status 400 with the first field that is wrong.
    """
    try:
        values = json.loads(body, parse_constant=_no_constant)
        body_text = json.dumps(values, ensure_ascii=False)
        body_text.encode("utf-8")
    except (ValueError, RecursionError) as error:  # also half a surrogate pair, which is no text
        raise ApiError(400, f"The body is not valid JSON: {str(error)[:200]}", code="invalid_json") from error
    if not isinstance(values, dict):
        raise ApiError(400, "The body must be a JSON object", code="invalid_json")
    values = {key: value for key, value in values.items() if key not in IGNORED}
    for key, allowed in NEUTRAL.items():
        if key == "stream_options" and values.get("stream") is True:
            continue
        if key in values and (value := values.pop(key)) not in allowed:
            what = f"{key} = {json.dumps(value)[:100]} is not supported; leave it out"
            raise ApiError(400, what, key, "unsupported_value")
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        param = ".".join(str(part) for part in first["loc"])
        code = "unknown_parameter" if first["type"] == "extra_forbidden" else "invalid_value"
        raise ApiError(400, f"{param}: {first['msg']}", param, code) from error
    except RecursionError as error:
        raise ApiError(400, "The body is nested too deeply", code="invalid_json") from error


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no number of JSON")
