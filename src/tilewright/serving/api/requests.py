"""Requests in the shape of OpenAI's API, checked.

A field that is None is as if it were absent. What would change the answer and cannot be followed is refused, unless it
has the value that changes nothing; what cannot change it (`ACCEPTED`) is accepted without effect; any other field is
an error that names it.
"""

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal, cast

from pydantic import Field, ValidationError, model_validator

from tilewright.models.sampling import Sampling
from tilewright.serving.api.client_messages import ChatMessage, NamedTool, Strict, Tool
from tilewright.serving.api.errors import ApiError

ACCEPTED = (
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    "prediction", "verbosity",
)  # fmt: skip
"""Fields without effect."""
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "suffix": ("",),
}
"""Field -> the values that change nothing; any other is refused."""
_MOST_CHOICES = 128
_MOST_STOPS = 16


class StreamOptions(Strict):
    """Options of a stream beside its text."""

    include_usage: bool | None = False
    include_obfuscation: bool | None = False


Stop = Annotated[str, Field(min_length=1, max_length=1000)]
Count = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Penalty = Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)]
Bias = Annotated[float, Field(ge=-100, le=100, allow_inf_nan=False)]


class ApiRequest(Strict):
    """Fields that both kinds of requests have."""

    model: str
    max_tokens: Count | None = None
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None
    min_p: Share | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    n: Annotated[int, Field(ge=1, le=_MOST_CHOICES)] | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    logit_bias: dict[Annotated[str, Field(pattern=r"^[0-9]{1,9}$")], Bias] | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=_MOST_STOPS)] | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None

    @model_validator(mode="after")
    def _streams(self) -> "ApiRequest":
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream = true")
        return self

    def stops(self) -> tuple[str, ...]:
        """The stop strings of a request."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def asked_tokens(self) -> tuple[int | None, str]:
        """The most tokens of an answer, where the request says so, and the field that does."""
        return self.max_tokens, "max_tokens"

    def sampling(self) -> Sampling:
        """How tokens are drawn for a request: temperature, top_k, top_p and min_p."""
        default = Sampling()
        return Sampling(
            default.temperature if self.temperature is None else self.temperature,
            self.top_k or 0,
            default.top_p if self.top_p is None else self.top_p,
            self.min_p or 0.0,
        )

    def biases(self) -> Mapping[int, float]:
        """Biases of logits in a request, by token id."""
        return {int(token): bias for token, bias in (self.logit_bias or {}).items()}

    def num_top(self) -> int | None:
        """The number of likeliest tokens that a request wants reported with each token; None: no log-probabilities."""
        return None


class JsonSchema(Strict):
    """The schema of an answer. Name, description and `strict` have no effect: it is always kept to."""

    name: str | None = None
    description: str | None = None
    json_schema: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class ResponseFormat(Strict):
    """Form of an answer's text."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _has_schema(self) -> "ResponseFormat":
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema belongs to the type json_schema")
        return self

    def schema_text(self) -> dict[str, Any] | None:
        """The JSON schema that a request wants its answer to follow; None: any text."""
        if self.type == "text":
            return None
        if self.json_schema is None:
            return {"type": "object"}
        return self.json_schema.json_schema or {"type": "object"}


class ChatRequest(ApiRequest):
    """A request of /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None

    @model_validator(mode="after")
    def _fits_together(self) -> "ChatRequest":
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs = true")
        if self.tool_choice not in (None, "none", "auto") and not self.tools:
            raise ValueError("tool_choice needs tools")
        return self

    def asked_tokens(self) -> tuple[int | None, str]:
        """The most tokens of a chat request. The newer name first."""
        if self.max_completion_tokens is not None:
            return self.max_completion_tokens, "max_completion_tokens"
        return self.max_tokens, "max_tokens"

    def num_top(self) -> int | None:
        """The number of likeliest tokens to report for a chat request: see `ApiRequest.num_top`."""
        return (self.top_logprobs or 0) if self.logprobs else None

    def conversation(self) -> list[dict[str, Any]]:
        """The messages of a chat request as templates know them."""
        names: dict[str, str] = {}
        return [message.to_template(names) for message in self.messages]


Ids = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]


class TextRequest(ApiRequest):
    """A request of /v1/completions. A prompt is one text, or the ids of one; there may be a list of them."""

    prompt: str | Ids | Annotated[list[str] | list[Ids], Field(min_length=1, max_length=_MOST_CHOICES)]
    best_of: Annotated[int, Field(ge=1, le=_MOST_CHOICES)] | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    @model_validator(mode="after")
    def _fits_together(self) -> "TextRequest":
        if self.best_of not in (None, self.n or 1):
            raise ValueError("best_of is supported only where it is the same as n")
        if self.echo and self.logprobs is not None:
            raise ValueError("logprobs of the prompt are not supported: leave out echo or logprobs")
        return self

    def prompts(self) -> list[str | list[int]]:
        """The prompts of a text request, one by one."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [[int(i) for i in self.prompt]]  # type: ignore[arg-type]
        return list(self.prompt)  # type: ignore[arg-type]

    def num_top(self) -> int | None:
        """The number of likeliest tokens to report for a text request: see `ApiRequest.num_top`."""
        return self.logprobs


def parse(body: bytes, kind: type[ApiRequest]) -> Any:
    """Parse a request from a body.

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
    values = {key: value for key, value in values.items() if key not in ACCEPTED and value is not None}
    for key, allowed in NEUTRAL.items():
        if key in values and (value := values.pop(key)) not in allowed:
            instead = "use tools" if key in ("functions", "function_call") else "leave it out"
            what = f"{key} = {json.dumps(value)[:100]} is not supported; {instead}"
            raise ApiError(400, what, key, "unsupported_value")
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise _as_api_error(error, values) from error
    except RecursionError as error:
        raise ApiError(400, "The body is nested too deeply", code="invalid_json") from error


def _as_api_error(error: ValidationError, values: dict[str, Any]) -> ApiError:
    """Turn a request's fault into an API error: the first wrong field under the client's name for it. Where a value may
    have several types, the one that it came closest to counts."""
    found = [(_path(values, one["loc"], one["type"]), one) for one in error.errors(include_url=False)]
    path, first = min(found, key=lambda pair: (pair[1]["type"] != "extra_forbidden", -len(pair[0])))
    unknown = first["type"] == "extra_forbidden"
    what = "this server knows no such field" if unknown else first["msg"].removeprefix("Value error, ")
    param = ".".join(path) or what.split()[0]
    code = "unknown_parameter" if unknown else "invalid_value"
    return ApiError(400, f"{param[:200]}: {what}", param[:200], code)


def _path(values: Any, loc: tuple[str | int, ...], kind: str) -> list[str]:
    """The path in a request where an error is, without the names that pydantic has for the branches of a union."""
    path: list[str] = []
    for number, part in enumerate(loc):
        inside = isinstance(values, dict) and part in values
        if inside or (isinstance(values, list) and isinstance(part, int) and part < len(values)):
            values = cast(Any, values)[part]
        elif kind != "missing" or number + 1 < len(loc):
            continue
        path.append(str(part))
    return path


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no number of JSON")
