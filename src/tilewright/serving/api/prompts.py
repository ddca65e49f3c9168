"""A request as the model gets it: ids, and the form and limits of its answer."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tilewright.core.errors import TilewrightError
from tilewright.data.chat.tools import TemplateArguments
from tilewright.serving.api.client_messages import NamedTool
from tilewright.serving.api.errors import ApiError
from tilewright.serving.api.requests import ChatRequest, TextRequest
from tilewright.serving.api.thoughts import THOUGHT_MARKS, begins_inside, thinks
from tilewright.serving.api.tool_calls import ENFORCED, Kind, format_of
from tilewright.serving.grammar import Grammars
from tilewright.serving.next_token import Constraint
from tilewright.serving.session import PromptTooLongError, Session
from tilewright.serving.token_text import keeping

_OURS = ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "tokenize")
"""Variables of a template that the request has other fields for."""

_TAIL = 16
"""Tokens at the end of a prompt, in which a thought may have been opened."""


@dataclass(frozen=True)
class Calls:
    """Calls of tools that an answer may have.

    Args:
        kind: how the model writes them.
        names: of the functions.
        only_one: at most one call.
        schemas: of their parameters, by name.
    """

    kind: Kind
    names: tuple[str, ...]
    only_one: bool
    schemas: Mapping[str, Any]


@dataclass(frozen=True)
class Prompt:
    """One prompt.

    Args:
        ids: of it.
        prefix: its text where the answer repeats it.
        calls: of tools; None: there are none.
        constraint: makes what one answer may be; None: everything.
        thoughts: None: an answer has none; else whether it begins within one.
    """

    ids: list[int]
    prefix: str = ""
    calls: Calls | None = None
    constraint: Callable[[], Constraint] | None = None
    thoughts: bool | None = None


def chat_prompt(session: Session, grammars: Grammars, asked: ChatRequest) -> Prompt:
    """The prompt of a conversation's request.

    Raises:
        ApiError: there is no template, it refuses the conversation, or it cannot do what is asked.
    """
    if session.chat is None:
        what = "The model has no chat template: use /v1/completions, or start the server with --chat-template"
        raise ApiError(400, what, code="no_chat_template")
    # 1. Variables for the template: the client's, unless the request has a field of its own for them.
    variables = dict(asked.chat_template_kwargs or {})
    for name in _OURS:
        if name in variables:
            what = f"chat_template_kwargs.{name}: the request has another field for it"
            raise ApiError(400, what, f"chat_template_kwargs.{name}", "invalid_value")
    if asked.reasoning_effort is not None:
        variables = {"reasoning_effort": asked.reasoning_effort} | variables
        if asked.reasoning_effort == "none":
            variables = {"enable_thinking": False} | variables
    # 2. The form in which this model writes calls, found in its template.
    tools = _tools(asked)
    kind = format_of(session.chat.source) if tools else None
    if tools and kind is None:
        what = "The model's chat template takes no tools, or writes calls in a form that is not known"
        raise ApiError(400, what, "tools", "unsupported_value")
    # 3. The prompt, and whether it ends inside a thought.
    given = TemplateArguments(tools, variables)
    ids = refused_as_400(lambda: session.chat_ids(asked.conversation(), given), "messages")
    free = thoughts_of(session, ids)
    if kind is None:
        constraint = _of_format(grammars, asked)
        return Prompt(ids, constraint=constraint, thoughts=free if constraint is None else None)
    schemas = {tool["function"]["name"]: tool["function"].get("parameters") for tool in tools}
    calls = Calls(kind, tuple(schemas), asked.parallel_tool_calls is False, schemas)
    # 4. With "auto" the model decides whether it calls; a call that is asked for is enforced by a grammar.
    if asked.tool_choice in (None, "auto"):
        constraint = _of_format(grammars, asked)
        return Prompt(ids, calls=calls, constraint=constraint, thoughts=free if constraint is None else None)
    wanted = [tool for tool in tools if _is_wanted(asked.tool_choice, tool)]
    if not wanted:
        raise ApiError(400, "tool_choice: no tool has this name", "tool_choice", "invalid_value")
    if kind not in ENFORCED:
        what = f"tool_choice: a call as this model writes them ({kind}) cannot be enforced; use auto"
        raise ApiError(400, what, "tool_choice", "unsupported_value")
    return Prompt(ids, "", calls, lambda: refused_as_400(lambda: grammars.of_calls(kind, wanted), "tool_choice"))


def thoughts_of(session: Session, ids: Sequence[int]) -> bool | None:
    """True if the answer to a prompt begins within a thought; None if the template has none. Answers in a given form
    have none either."""
    if session.chat is None or not thinks(session.chat.source):
        return None
    return begins_inside(keeping(session.tokenizer, THOUGHT_MARKS).decode(list(ids)[-_TAIL:]))


def _tools(asked: ChatRequest) -> list[dict[str, Any]]:
    if asked.tool_choice == "none":
        return []
    return [tool.to_template() for tool in asked.tools or []]


def _is_wanted(choice: Any, tool: dict[str, Any]) -> bool:
    return not isinstance(choice, NamedTool) or tool["function"]["name"] == choice.function.name


def _of_format(grammars: Grammars, asked: ChatRequest) -> Callable[[], Constraint] | None:
    schema = asked.response_format.schema_text() if asked.response_format is not None else None
    if schema is None:
        return None
    return lambda: refused_as_400(lambda: grammars.of_schema(schema), "response_format")


def text_prompts(session: Session, asked: TextRequest) -> Sequence[Prompt]:
    """The prompts of texts in a request.

    Raises:
        ApiError: ids that the model does not have, or a text that is none.
    """
    return [_text_prompt(session, prompt, bool(asked.echo)) for prompt in asked.prompts()]


def _text_prompt(session: Session, prompt: str | list[int], echo: bool) -> Prompt:
    if isinstance(prompt, str):
        ids = refused_as_400(lambda: session.text_ids(prompt), "prompt")
        if not ids:
            raise ApiError(400, "prompt: it is empty, and the model has no token that begins a text", "prompt")
        return Prompt(ids, prompt if echo else "")
    if any(token >= session.tokenizer.vocab_size for token in prompt):
        what = f"prompt: ids must be from 0 to {session.tokenizer.vocab_size - 1}"
        raise ApiError(400, what, "prompt", "invalid_value")
    return Prompt(prompt, session.tokenizer.decode(prompt) if echo else "")


def refused_as_400(make: Callable[[], Any], param: str) -> Any:
    """Make a prompt by `make`; an error of the user becomes status 400 with the field concerned."""
    try:
        return make()
    except TilewrightError as error:
        first = error.problems[0]
        code = "context_length_exceeded" if isinstance(error, PromptTooLongError) else "invalid_value"
        what = ": ".join(part for part in (first.what, first.got) if part)
        hint = f"; {first.need}" if first.need else ""
        raise ApiError(400, f"{what}{hint}", param, code) from error
