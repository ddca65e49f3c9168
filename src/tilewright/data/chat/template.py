"""A model's chat template: conversations to text, to token ids, and to what of them is trained.

Text and ids are those of transformers' `apply_chat_template`, with two differences that are deliberate. A message that
contains the name of a control token ("<|im_end|>") could end its own turn there; here such a name inside of a message
is encoded as plain text (`apply_chat_template` does so with `sanitize_control_tokens`). Control tokens are the special
tokens and those other added tokens that the template itself puts between turns; `<think>` is not one. And the
arguments of a tool call may be an object or its JSON text, as OpenAI sends it: a template gets the one that it takes.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from tilewright.core.errors import DataError
from tilewright.data.chat.errors import ChatError, TemplateTooMuchError
from tilewright.data.chat.load import SETTING, named_tokens, template_source
from tilewright.data.chat.sandbox import (
    TEXT_BEGIN,
    TEXT_END,
    LimitedTemplate,
    RenderedTexts,
    TemplateError,
    TemplateLimitError,
    TextsWanted,
    split_marks,
    without_marks,
)
from tilewright.data.chat.stop_tokens import Ending, Stops, ending
from tilewright.data.chat.tools import NO_ARGUMENTS, TemplateArguments, with_arguments
from tilewright.data.common.guarded_tokenizer import encode_piece, reader_of
from tilewright.data.common.tokenizer import Tokenizer
from tilewright.data.common.tokenizer_folder import CONFIG, declared_stops
from tilewright.data.readers.parser_errors import failure

Message = Mapping[str, Any]

_REASONING = ("reasoning_content", "thinking", "reasoning")
_WORD = "tilewright"  # content of messages that are rendered to see what the template puts around them


class ChatTemplate:
    """A model's chat template, compiled, and the tokenizer that it belongs to.

    Args:
        source: the jinja text.
        tokenizer: makes the ids.
        tokens: what the template may call `bos_token`, `eos_token` and so on.
        where: where the template is from, for messages.
        setting: which names it, for messages.

    Raises:
        DataError: `source` is not a template.

    Example:
    >>> from tilewright.data.chat.load import CHATML
        >>> from tilewright.data.common.tokenizer import train_tokenizer
        >>> chat = ChatTemplate(CHATML, train_tokenizer(["hello you " * 9], 300))
        >>> chat.render([{"role": "user", "content": "hello"}], add_generation_prompt=True)
        '<|im_start|>user\\nhello<|im_end|>\\n<|im_start|>assistant\\n'
    """

    def __init__(
        self,
        source: str,
        tokenizer: Tokenizer,
        tokens: Mapping[str, str] | None = None,
        where: str = "",
        setting: str = SETTING,
    ):
        self.source, self.tokenizer, self.tokens, self.where = source, tokenizer, dict(tokens or {}), where
        self._setting = setting
        try:
            self._template = LimitedTemplate(source)
        except TemplateLimitError as error:
            raise _too_much(error, where, setting) from error
        except TemplateError as error:
            raise DataError(
                "Chat template is not valid jinja",
                where=where or setting,
                got=str(error)[:200],
                need="a template that transformers can read",
                try_=f"{setting} = another .jinja file",
            ) from error
        self._backend = tokenizers.Tokenizer.from_str(tokenizer.backend.to_str())
        self._reader = reader_of(self._backend)  # names in the text are tokens

    @classmethod
    def load(cls, folder: str, tokenizer: Tokenizer, chosen: str = "") -> "ChatTemplate":
        """Load the chat template of a model's folder, or the one `chosen`; see `load.template_source`. What the folder
        declares as the end of a text ends an answer too."""
        source, where = template_source(chosen, folder)
        if not folder:
            return cls(source, tokenizer, {}, where)
        path = Path(folder).expanduser()
        return cls(source, tokenizer.stopping_at(declared_stops(path)), named_tokens(path), where)

    def save(self, folder: Path | str) -> None:
        """Save the chat template, and the names of tokens that it uses, where `load` and transformers find them.

        Args:
            folder: of a saved tokenizer.
        """
        (Path(folder) / "chat_template.jinja").write_text(self.source, encoding="utf-8")
        file = Path(folder) / CONFIG
        config = json.loads(file.read_bytes()) if file.is_file() else {}
        if "bos_token" not in self.tokens:
            config.pop("bos_token", None)  # a template may ask whether there is one
        file.write_text(json.dumps(config | self.tokens, indent=2) + "\n", encoding="utf-8")

    def render(
        self, messages: Sequence[Message], add_generation_prompt: bool = False, given: TemplateArguments = NO_ARGUMENTS
    ) -> str:
        """Render a conversation to text by the chat template.

        Args:
            messages: dicts with role and content, and whatever else the template knows.
            add_generation_prompt: end with what an answer follows.
            given: tools and variables beside the messages.

        Raises:
            ChatError: the template refuses the conversation.
        """
        return split_marks(self.marked(messages, add_generation_prompt, given))[0]

    def encode(
        self, messages: Sequence[Message], add_generation_prompt: bool = False, given: TemplateArguments = NO_ARGUMENTS
    ) -> list[int]:
        """Encode a conversation by the chat template to token ids; see the top of this file for names of control
        tokens.

        Raises:
            ChatError: the template refuses the conversation.
        """
        text, _, names = split_marks(self.marked(messages, add_generation_prompt, given))
        return self.encode_rendered(text, names)[0]

    def wanted(
        self, messages: Sequence[Message], cuts: Sequence[tuple[int, bool]], given: TemplateArguments = NO_ARGUMENTS
    ) -> TextsWanted:
        """Beginnings of a conversation that the chat template will render, for `ahead`.

        Args:
            messages: as in `render`.
            cuts: of each beginning how many messages it has, and whether it ends with what an answer follows.
            given: as in `render`.
        """
        with self._told():
            plain = [_readable(message, self.argument_text) for message in messages]
            clean = TemplateArguments(without_marks(given.tools), without_marks(given.variables))
        marks = (False, True) if self.marks_answers else (False,)
        keys = dict.fromkeys((number, prompt, mark) for number, prompt in cuts for mark in marks)
        parts = [{"messages": number, "add_generation_prompt": prompt, "mark": mark} for number, prompt, mark in keys]
        return TextsWanted(self._variables(plain, False, clean), parts)

    def ahead(self, wanted: Sequence[TextsWanted]) -> list[RenderedTexts]:
        """Render beginnings of several conversations ahead by the chat template, in one request to the process of
        templates.

        Args:
            wanted: what `wanted` gives of each.

        Returns:
            What `knowing` takes of each.

        Raises:
            TemplateTooMuchError: together they take too much.
            ChatError: one of them is no JSON.
        """
        with self._told():
            return self._template.render_all(wanted)

    def knowing(self, texts: Sequence[RenderedTexts]) -> AbstractContextManager[None]:
        """While this lasts, the chat template does not render `texts` again."""
        return self._template.knowing(texts)

    def marked(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = False,
        given: TemplateArguments = NO_ARGUMENTS,
        *,
        answers: bool = False,
    ) -> str:
        """The text of a conversation by the chat template with the marks of `sandbox.split_marks` in it.

        Args:
            messages: as in `render`.
            add_generation_prompt: as in `render`.
            given: as in `render`.
            answers: mark `{% generation %}` blocks too.

        Raises:
            ChatError: the template refuses the conversation, or renders another text where marks are in it.
        """
        with self._told():
            plain = [_readable(message, self.argument_text) for message in messages]
            clean = TemplateArguments(without_marks(given.tools), without_marks(given.variables))
            said = [*plain, *clean.tools, clean.variables]
            names = any(self.control_pattern.search(text) for value in said for text in _texts(value))
            text = self._render(plain, add_generation_prompt, clean)
            if not names and not answers:
                return text
            inner = plain
            if names:
                inner = [self._mark(message) for message in plain]
                clean = TemplateArguments(self._mark(clean.tools), self._mark(clean.variables))
            marked = self._render(inner, add_generation_prompt, clean, answers)
            if split_marks(marked)[0] != text:
                what = "name of a control token in a message" if names else "{% generation %} block"
                raise ChatError(f"{what} that the template takes apart")
            return marked

    def encode_rendered(
        self, text: str, names: Sequence[tuple[int, int]] = ()
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """Token ids of a conversation that the chat template rendered, and the character range of each.

        Args:
            text: with control tokens.
            names: ranges of names of control tokens that stand for themselves.
        """
        ids: list[int] = []
        ranges: list[tuple[int, int]] = []
        start = 0
        for begin, end in [*names, (len(text), len(text))]:
            for a, b, reader in ((start, begin, self._reader), (begin, end, self.tokenizer.reader)):
                if a < b:
                    found = encode_piece(reader, text[a:b], within=a > 0)
                    ids += found[0]
                    ranges += [(a + first, a + last) for first, last in found[1]]
            start = end
        return ids, ranges

    @cached_property
    def marks_answers(self) -> bool:
        """True if the chat template says by `{% generation %}` blocks what the assistant wrote."""
        return bool(re.search(r"\{%-?\s*generation\s*-?%\}", self.source))

    @cached_property
    def argument_text(self) -> bool:
        """True if the chat template writes the arguments of a tool call from their JSON text, and not from an object.

        Found by rendering one: with an object such templates raise, or write it as Python would.
        """
        arguments = {_WORD: f"it's {_WORD}"}
        as_object, as_text = (self._render_call(form) for form in (arguments, json.dumps(arguments)))
        if as_object is None or str(arguments) in as_object:
            return as_text is not None and json.dumps(arguments) in as_text
        return False

    def _render_call(self, arguments: Any) -> str | None:
        function = {"name": _WORD, "description": _WORD, "parameters": {"type": "object", "properties": {}}}
        call = {"id": "call00000", "type": "function", "function": {"name": _WORD, "arguments": arguments}}
        asked = {**_said("assistant", ""), "tool_calls": [call]}
        try:
            return self._render(
                [_said("user"), asked], False, TemplateArguments([{"type": "function", "function": function}])
            )
        except ChatError:
            return None

    def renders_with(self, tokens: Mapping[str, str]) -> bool:
        """True if the chat template renders a conversation the same where it may call tokens by these names."""
        talk = [_said("user"), _said("assistant")]
        other = ChatTemplate(self.source, self.tokenizer, {**self.tokens, **tokens}, self.where)
        try:
            return all(
                other._render(talk[:n], prompt) == self._render(talk[:n], prompt)
                for n, prompt in ((1, True), (2, False))
            )
        except ChatError:
            return False

    @property
    def stops(self) -> Stops:
        """The tokens that end an answer under this chat template."""
        return self.ending.with_stops(self.tokenizer.stop_ids)

    @cached_property
    def stop_names(self) -> tuple[str, ...]:
        """Names of the tokens that end an answer under this chat template, the longest first."""
        added = self._backend.get_added_tokens_decoder()
        return tuple(sorted((added[i].content for i in self.stops.ids if i in added), key=len, reverse=True))

    @cached_property
    def ending(self) -> Ending:
        """How the chat template ends an answer, found by rendering one: as the last, before a question, before a
        result."""
        before = [_said("user"), _said("assistant", _WORD * 2)]
        tail = self._behind(before)
        if tail is None:
            return Ending()
        follows = [self._behind([*before, _said(role)]) or "" for role in ("user", "tool")]
        return ending(self.tokenizer, self.control_pattern, tail, follows[0], follows[1])

    def _behind(self, messages: list[Any]) -> str | None:
        """The text that the chat template renders behind the probe's answer; None where it does not take it."""
        try:
            return self._render(messages, False).rpartition(_WORD * 2)[2]
        except ChatError:
            return None

    @cached_property
    def control_pattern(self) -> re.Pattern[str]:
        """The pattern that finds names of control tokens in a chat template's text; see the top of this file."""
        added = {token.content: token.special for token in self._backend.get_added_tokens_decoder().values()}
        between = ""
        for messages in ([_said("system"), _said("user"), _said("assistant"), _said("user")], [_said("user")]):
            try:
                between += self._render(messages, False)
            except ChatError:
                continue
        names = [name for name, special in added.items() if special or (name in between and not name.isspace())]
        return re.compile("|".join(re.escape(name) for name in sorted(names, key=len, reverse=True)) or "(?!)")

    def _mark(self, message: Any) -> Any:
        if isinstance(message, str):
            return self.control_pattern.sub(f"{TEXT_BEGIN}\\g<0>{TEXT_END}", message)
        if isinstance(message, dict):
            return {self._mark(key): self._mark(value) for key, value in message.items()}
        return [self._mark(value) for value in message] if isinstance(message, list | tuple) else message

    def _render(
        self,
        messages: list[Any],
        add_generation_prompt: bool,
        given: TemplateArguments = NO_ARGUMENTS,
        answers: bool = False,
    ) -> str:
        with self._told():
            return self._template.render(self._variables(messages, add_generation_prompt, given), answers)

    def _variables(self, messages: list[Any], prompt: bool, given: TemplateArguments) -> dict[str, Any]:
        named = {
            "messages": messages,
            "tools": list(given.tools) or None,
            "documents": None,
            "add_generation_prompt": prompt,
        }
        return self.tokens | {**given.variables} | named

    @contextmanager
    def _told(self) -> Iterator[None]:
        """Errors of the process of templates, as errors of a conversation or of the chat template."""
        try:
            yield
        except TemplateLimitError as error:
            raise _too_much(error, self.where, self._setting) from None
        except TemplateError as error:
            raise ChatError("template raises", got=str(error), where=self.where) from None
        except (ValueError, TypeError, RecursionError) as error:  # of JSON, in which it goes to the process
            raise ChatError("conversation that JSON cannot hold", got=failure(error), where=self.where) from None


def _too_much(error: TemplateLimitError, where: str, setting: str) -> TemplateTooMuchError:
    return TemplateTooMuchError(
        "Chat template takes too much time or memory",
        where=where or setting,
        got=str(error),
        need="a template that writes a conversation in a few milliseconds, as published ones do",
        try_=f"{setting} = another .jinja file",
    )


def stops_of(tokenizer: Tokenizer, chat: ChatTemplate | None) -> Stops:
    """The tokens that end an answer by a model's chat template, or a text where it has no template."""
    return Ending().with_stops(tokenizer.stop_ids) if chat is None else chat.stops


def _said(role: str, content: str = _WORD) -> dict[str, str]:
    return {"role": role, "content": content}


def _readable(message: Message, argument_text: bool) -> dict[str, Any]:
    """A message for a chat template as transformers hands it to a template: nothing that is None, reasoning under both
    of its names, and arguments of tool calls in the form that the template takes, whichever they are given in."""
    kept = {key: without_marks(value) for key, value in message.items() if value is not None}
    if isinstance(kept.get("tool_calls"), list):
        kept["tool_calls"] = [with_arguments(call, text=argument_text) for call in kept["tool_calls"]]
    reasoning = next((kept[name] for name in _REASONING if name in kept), None)
    return kept if reasoning is None else {"thinking": reasoning, **kept, "reasoning_content": reasoning}


def _texts(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    inner = [*value, *value.values()] if isinstance(value, dict) else value if isinstance(value, list | tuple) else []
    return [text for item in inner for text in _texts(item)]
