"""Which tokens of a conversation are trained: the assistant's answers, each with the token that ends it.

A template that has `{% generation %}` blocks says so itself. With others, an answer is what its rendering adds to its
prompt: the conversation up to it with the generation prompt, which is what the model continues when it is used. That
both are true beginnings of the whole rendering is checked for each answer. Where a template rewrites earlier turns
(Qwen3 drops what was thought, Mistral moves the system message), an answer is trained in a rendering of its own, cut
off behind it: there it stands as the model will write it. Nothing is trained at a place that was not verified.

An answer begins with the first token that is not wholly of its prompt, and ends with the token at which a model that
writes it stops (`stop_tokens.Ending`). Where the template writes that token only before the next turn, or not at all,
it is put behind the last answer. Answers of `weight` 0, and messages behind the last answer, are read and not trained.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any

import numpy as np

from tilewright.core.errors import DataError
from tilewright.data.chat.errors import ChatError, TemplateTooMuchError
from tilewright.data.chat.messages import is_trained
from tilewright.data.chat.said_texts import Leaf, RenderedText, leaves_of, leaves_of_tools, left_out, lost
from tilewright.data.chat.sandbox import RenderedTexts, TextsWanted, split_marks
from tilewright.data.chat.template import ChatTemplate, Message
from tilewright.data.chat.tools import NO_ARGUMENTS, TemplateArguments
from tilewright.data.common.guarded_tokenizer import TokenizerError

_VARIANTS = ("\ue0f4", "\ue0f5")
_BLANK = re.compile(r"\s*")


@dataclass(frozen=True)
class ChatSample:
    """A rendered conversation: its token ids, and which tokens are trained. T tokens.

    Args:
        text: the rendering.
        ids: int64 [T].
        trained_T: bool [T].
        spans: character ranges in `text` of what is trained.
        saved: tokens that its earlier answers would take in renderings of their own.
    """

    text: str
    ids_T: np.ndarray
    trained_T: np.ndarray
    spans: tuple[tuple[int, int], ...]
    saved: int = 0


@dataclass(frozen=True)
class Rendered:
    """The samples of a rendered conversation, and the names of what is left out.

    Args:
        samples: the renderings that together train each answer once; usually one.
        left_out: what is in none of them: fields that no format knows and the template does not read, and messages
            behind the last answer where the template would write that one differently before them.
    """

    samples: list[ChatSample]
    left_out: list[str]


@dataclass(frozen=True)
class Talk:
    """A conversation that is to be rendered: messages and the template's arguments.

    Args:
        messages: as `chat_rows.check_messages` accepts them. Answers of `weight` 0 are not trained.
        first: answers before this message are not trained.
        given: tools and variables beside the messages.
    """

    messages: Sequence[Message]
    first: int = 0
    given: TemplateArguments = NO_ARGUMENTS

    @cached_property
    def bare(self) -> list[dict[str, Any]]:
        """The messages of a talk as a template gets them, before tokens are trained."""
        return [{key: value for key, value in message.items() if key != "weight"} for message in self.messages]

    @cached_property
    def weighed(self) -> list[int]:
        """The numbers of the messages whose tokens are trained: answers of the assistant."""
        return [i for i, message in enumerate(self.messages) if i >= self.first and is_trained(message)]

    def asked(self, chat: ChatTemplate) -> list[TextsWanted]:
        """Texts that a talk's rendering needs to find its trained tokens, see `ChatTemplate.wanted`; none where no
        answer is trained."""
        bare, answers = self.bare, self.weighed
        if not answers:
            return []
        prompts = [(i, not chat.marks_answers) for i in answers if i]
        cuts = [(len(bare), False), *((i + 1, False) for i in answers), *prompts]
        others = [(bare, self.without_tools)] if self.given.tools else []
        others += [(without_call(bare, i), self.given) for i, message in enumerate(bare) if message.get("tool_calls")]
        whole = [(len(bare), False)]
        return [chat.wanted(bare, cuts, self.given), *(chat.wanted(one, whole, given) for one, given in others)]

    @property
    def without_tools(self) -> TemplateArguments:
        """This conversation without tools: messages and variables alone."""
        return TemplateArguments((), self.given.variables)


def without_call(messages: Sequence[Message], number: int) -> list[Message]:
    """The messages of a conversation whose tokens are trained, of which one calls no tool."""
    silent = {key: value for key, value in messages[number].items() if key != "tool_calls"}
    return [*messages[:number], silent, *messages[number + 1 :]]


def samples(
    chat: ChatTemplate, messages: Sequence[Message], first: int = 0, given: TemplateArguments = NO_ARGUMENTS
) -> list[ChatSample]:
    """Renderings that together train each answer of a conversation once, with their trained tokens; usually one.

    Args:
        chat: the template.
        messages: as in `Talk`.
        first: as in `Talk`.
        given: as in `Talk`.

    Raises:
        ChatError: no answer in it, or the template raises, leaves something out, or does not show where an answer is.

    Example:
        >>> from tilewright.data.chat.load import CHATML
        >>> from tilewright.data.common.tokenizer import train_tokenizer
        >>> chat = ChatTemplate(CHATML, train_tokenizer(["hello you " * 9], 300))
        >>> talk = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "you"}]
        >>> [sample] = samples(chat, talk)
        >>> [sample.text[a:b] for a, b in sample.spans]
        ['you<|im_end|>\\n<|eos|>']
    """
    return render_answers(chat, messages, first, given).samples


def render_answers(
    chat: ChatTemplate, messages: Sequence[Message], first: int = 0, given: TemplateArguments = NO_ARGUMENTS
) -> Rendered:
    """Samples of a conversation's trained answers as `samples` gives them, with the names of what is left out."""
    [rendered] = render_talks(chat, [Talk(messages, first, given)])
    if isinstance(rendered, DataError):
        raise rendered
    return rendered


def render_talks(chat: ChatTemplate, talks: Sequence[Talk]) -> Iterator[Rendered | DataError]:
    """The rendering of each conversation, or the `ChatError`, `TemplateTooMuchError` or `TokenizerError` of it.

    The process of templates gets them in one request. Where it ends over them, each gets one of its own, with the time
    and the memory that a conversation has, so that one of them takes no other with it.

    Args:
        chat: the template.
        talks: few enough that all of their texts may be in memory.
    """
    asked = [_asked(chat, talk) for talk in talks]
    known = iter(_together(chat, [one for several in asked for one in several]) if len(talks) > 1 else ())
    for talk, wanted in zip(talks, asked, strict=True):
        mine = list(islice(known, len(wanted)))
        try:
            with chat.knowing(mine or (chat.ahead(wanted) if wanted else [])):
                found: Rendered | DataError = _rendered(chat, talk)
        except (ChatError, TemplateTooMuchError, TokenizerError) as error:
            found = error
        yield found


def _asked(chat: ChatTemplate, talk: Talk) -> list[TextsWanted]:
    """Texts that a conversation needs to find its trained tokens; none of one whose error comes when it is rendered."""
    try:
        return talk.asked(chat)
    except ChatError:
        return []


def _together(chat: ChatTemplate, wanted: Sequence[TextsWanted]) -> list[RenderedTexts]:
    """The texts of several conversations together, to find trained tokens; none where they cannot be had in one
    request."""
    try:
        return chat.ahead(wanted)
    except (ChatError, TemplateTooMuchError):
        return []


def _rendered(chat: ChatTemplate, talk: Talk) -> Rendered:
    bare, given, weighed = talk.bare, talk.given, talk.weighed
    if not weighed:
        raise ChatError("no answer of the assistant")
    answers = [_answer(chat, bare, i, given) for i in weighed]
    left = _check_complete(chat, talk, answers)
    open_, found = answers, []
    rendering = _Rendering.of(chat, bare, given)
    whole = len(bare) > weighed[-1] + 1  # it goes on behind the last answer
    while open_:
        here = [answer for answer in open_ if rendering.has(answer)]
        if here:
            found.append(_sample(rendering, [rendering.spans(chat, answer) for answer in here]))
            open_ = [answer for answer in open_ if answer not in here]
        else:
            assert whole, "the last one open is always found"
            left.append("messages behind the last answer")
        whole = False
        if open_:
            rendering = _Rendering.of(chat, bare[: open_[-1].message + 1], given)
    return Rendered(found[::-1], left)


@dataclass(frozen=True)
class _Answer:
    """An answer in the rendering that ends with it: the number of its message, and its character ranges."""

    message: int
    text: str
    spans: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class _Rendering:
    """A text, its ids and the character range of each. Of `text` the template wrote `written` characters, the rest ends
    the last answer."""

    text: str
    written: int
    ids: list[int]
    ranges: list[tuple[int, int]]

    @classmethod
    def of(cls, chat: ChatTemplate, messages: Sequence[Message], given: TemplateArguments) -> "_Rendering":
        """A rendering of messages, whose trained tokens are sought; where an answer is the last of them, with its
        end."""
        text, _, names = split_marks(chat.marked(messages, given=given))
        closed, last = text, messages[-1]
        if last.get("role") == "assistant":
            closed += chat.ending.closing_call if last.get("tool_calls") else chat.ending.closing
        return cls(closed, len(text), *chat.encode_rendered(closed, names))

    @cached_property
    def columns(self) -> np.ndarray:
        """The first and the last character of each id of a rendering, int64 [2, T], to find trained tokens."""
        return np.array(self.ranges, np.int64).reshape(-1, 2).T

    def spans(self, chat: ChatTemplate, answer: "_Answer") -> list[tuple[int, int]]:
        """Character ranges of an answer whose tokens are trained, with its end."""
        *before, (begin, end) = answer.spans
        return [*before, (begin, _with_end(chat, self.text, end))]

    def has(self, answer: _Answer) -> bool:
        """True if a rendering with trained tokens begins with what an answer's own rendering begins with, token by
        token, up to the answer's end."""
        end = answer.spans[-1][1]
        if not self.text.startswith(answer.text[:end]):
            return False
        if self.text[: self.written] == answer.text:
            return True
        first_T, last_T = self.columns
        return not ((first_T < end) & (last_T > end)).any()


def _sample(rendering: _Rendering, answers: Sequence[Sequence[tuple[int, int]]]) -> ChatSample:
    """Make a sample of a rendering in which answers, by the ranges of each, have trained tokens."""
    spans = [span for answer in answers for span in answer]
    first_T, last_T = rendering.columns
    trained_T = np.zeros(len(rendering.ids), bool)
    for begin, end in spans:
        trained_T |= (first_T < end) & (last_T > begin) & (first_T < last_T)
    saved = sum(int((last_T <= answer[-1][1]).sum()) for answer in answers[:-1])
    return ChatSample(rendering.text, np.array(rendering.ids, np.int64), trained_T, tuple(sorted(spans)), saved)


def _answer(chat: ChatTemplate, messages: Sequence[Message], answer: int, given: TemplateArguments) -> _Answer:
    """An answer in its own rendering, whose tokens are trained.

    Raises:
        ChatError: it is not in there, or does not show.
    """
    if not chat.marks_answers:
        text, start, end = _range(chat, messages, answer, given)
        return _Answer(answer, text, ((start, end),))
    text, generated, _ = split_marks(chat.marked(messages[: answer + 1], given=given, answers=True))
    before = [i for i in range(answer) if messages[i].get("role") == "assistant"]
    earlier = 0
    if before:
        earlier = len(split_marks(chat.marked(messages[:answer], given=given, answers=True))[1])
    if len(generated) <= earlier:
        raise ChatError("answer that the template leaves out")
    return _Answer(answer, text, tuple(generated[earlier:]))


def _range(
    chat: ChatTemplate, messages: Sequence[Message], answer: int, given: TemplateArguments
) -> tuple[str, int, int]:
    """The rendering that ends with an answer, and the characters of it whose tokens are trained."""
    text = chat.render(messages[: answer + 1], given=given)
    prompt = chat.render(messages[:answer], True, given) if answer else None
    if prompt is not None and text.startswith(prompt):
        start = len(prompt)
    else:
        start = _content_start(chat, messages, answer, text, given)
    ending, body = chat.ending, text.rstrip()
    whole = ending.tail.strip()
    if whole and text.endswith(ending.tail):
        end = len(text) - len(ending.tail) + ending.end
    else:
        end = len(body) if whole and body.endswith(whole) else len(text)
    if end <= start:
        raise ChatError("answer that the template leaves out")
    return text, start, end


def _with_end(chat: ChatTemplate, text: str, end: int) -> int:
    """Where an answer's trained tokens end with the token behind it, where that ends an answer and nothing does so
    yet."""
    stops = chat.stop_names
    if text.endswith(stops, 0, end):
        return end
    blank = _BLANK.match(text, end)
    behind = blank.end() if blank else end
    return next((behind + len(name) for name in stops if text.startswith(name, behind)), end)


def _content_start(
    chat: ChatTemplate, messages: Sequence[Message], answer: int, text: str, given: TemplateArguments
) -> int:
    """Where the trained content of an answer begins, found by writing two others in its place."""
    before = [*messages[:answer]]
    one, other = (
        chat.render([*before, {**messages[answer], "content": content}], given=given) for content in _VARIANTS
    )
    start = one.find(_VARIANTS[0])
    if start < 0 or start != other.find(_VARIANTS[1]) or text[:start] != one[:start] or one[:start] != other[:start]:
        raise ChatError("template does not show where an answer begins")
    return start


def _check_complete(chat: ChatTemplate, talk: Talk, answers: Sequence[_Answer]) -> list[str]:
    """Check beside the trained tokens that everything that is said is rendered: each trained answer in its own
    rendering, what is before the last of them in that one's, what is behind it in that of the whole conversation.

    Returns:
        Names of what is left out and may be.

    Raises:
        ChatError: something is left out that may not be.
    """
    messages, given = talk.bare, talk.given
    own = {answer.message: answer.text for answer in answers}
    last, text = answers[-1].message, answers[-1].text
    whole = chat.render(messages, given=given) if len(messages) > last + 1 else text
    rendered = {one: RenderedText(one) for one in (*own.values(), whole)}
    by_text: dict[str, list[Leaf]] = {one: [] for one in rendered}
    for leaf in [*leaves_of_tools(given.tools), *leaves_of(messages)]:
        by_text[own.get(leaf.message, text if leaf.message < last else whole)].append(leaf)
    left = []
    for leaf in [leaf for one, leaves in by_text.items() for leaf in lost(leaves, rendered[one])]:
        if not leaf.needed:
            left.append(f"messages[].{leaf.field}")
        elif leaf.role == "assistant" and leaf.message not in own and _alone(chat, messages, leaf, given):
            left.append(f"{leaf.field} of an answer that is not trained")
        else:
            raise left_out(leaf)
    if given.tools and _renders_alike(chat, messages, talk.without_tools, whole):
        raise left_out(leaves_of_tools(given.tools)[0])
    for i in (i for i, message in enumerate(messages) if message.get("tool_calls")):
        if _renders_alike(chat, without_call(messages, i), given, whole):
            raise left_out(next(leaf for leaf in leaves_of(messages[i : i + 1]) if leaf.field == "tool_calls"))
    return list(dict.fromkeys(left))


def _alone(chat: ChatTemplate, messages: Sequence[Message], leaf: Leaf, given: TemplateArguments) -> bool:
    """True if a text of an answer is rendered alone, where the conversation ends with it, to train its tokens."""
    try:
        text = chat.render(messages[: leaf.message + 1], given=given)
    except ChatError:
        return False
    return not lost([leaf], RenderedText(text))


def _renders_alike(chat: ChatTemplate, messages: Sequence[Message], given: TemplateArguments, text: str) -> bool:
    try:
        return chat.render(messages, given=given) == text
    except ChatError:
        return False
