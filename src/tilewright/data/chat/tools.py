"""Tools of a conversation: what a template is given beside the messages, and the arguments of calls in either form."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tilewright.data.chat.errors import ChatError


@dataclass(frozen=True)
class TemplateArguments:
    """The arguments of a chat template besides the messages: tools and variables.

    Args:
        tools: descriptions of functions that the model may call, as OpenAI writes them.
        variables: others by name, such as `enable_thinking` (transformers: keywords of `apply_chat_template`).
    """

    tools: Sequence[Mapping[str, Any]] = ()
    variables: Mapping[str, Any] = field(default_factory=dict)


NO_ARGUMENTS = TemplateArguments()


def with_arguments(call: Any, *, text: bool) -> Any:
    """A tool call whose arguments are JSON text, or an object where they are text of one; anything else as it is.

    Args:
        call: an object with `function`, or the function itself.
        text: wanted is the text.

    Example:
        >>> with_arguments({"function": {"name": "f", "arguments": '{"city": "Paris"}'}}, text=False)
        {'function': {'name': 'f', 'arguments': {'city': 'Paris'}}}
    """
    if not isinstance(call, dict):
        return call
    if isinstance(call.get("function"), dict):
        return {**call, "function": with_arguments(call["function"], text=text)}
    given = call.get("arguments")
    if text and isinstance(given, dict):
        return {**call, "arguments": json.dumps(given, ensure_ascii=False)}
    if text or not isinstance(given, str):
        return call
    try:
        found = json.loads(given or "{}")
    except (ValueError, RecursionError):
        return call
    return {**call, "arguments": found} if isinstance(found, dict) else call


def read_call(call: Any) -> dict[str, Any]:
    """Read a tool call as OpenAI writes it; `name` and `arguments` alone are one too.

    Raises:
        ChatError: it is none, or its arguments are not an object.

    Example:
        >>> read_call({"name": "f", "arguments": "{}", "id": None})
        {'type': 'function', 'function': {'name': 'f', 'arguments': '{}'}}
    """
    kept = {key: value for key, value in call.items() if value is not None} if isinstance(call, dict) else {}
    function = kept.pop("function", None)
    if function is None:
        function = {key: kept.pop(key) for key in ("name", "arguments") if key in kept}
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"].strip():
        raise ChatError("tool_calls that are not calls of functions", got=str(call)[:80])
    arguments = function.get("arguments")
    arguments = {} if arguments is None or arguments == "" else arguments
    if not isinstance(with_arguments({"arguments": arguments}, text=False)["arguments"], dict):
        raise ChatError("tool_calls with arguments that are not an object", got=str(arguments)[:80])
    return {"type": "function", **kept, "function": {**function, "arguments": arguments}}


def read_tools(tools: Any) -> list[dict[str, Any]]:
    """Read descriptions of tools as OpenAI writes them, from a list or its JSON text; the functions alone are some too.

    Raises:
        ChatError: they are none.

    Example:
        >>> read_tools('[{"name": "f", "description": "Does it."}]')
        [{'type': 'function', 'function': {'name': 'f', 'description': 'Does it.'}}]
    """
    if isinstance(tools, str):
        try:
            tools = json.loads(tools or "[]")
        except (ValueError, RecursionError):
            raise ChatError("tools that are not descriptions of functions", got=tools[:80]) from None
    found = []
    for tool in [] if tools is None else tools if isinstance(tools, list) else [tools]:
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ChatError("tools that are not descriptions of functions", got=str(tool)[:80])
        if function is tool and "input_schema" in tool:  # Anthropic's
            function = {key: value for key, value in tool.items() if key != "input_schema"}
            function["parameters"] = tool["input_schema"]
        if function.get("type") == "function":  # of OpenAI's Responses: no object of its own
            function = {key: value for key, value in function.items() if key != "type"}
        found.append(tool if "function" in tool else {"type": "function", "function": function})
    return found
