"""Which tokens of a conversation are trained: the assistant's answers, each with the token that ends it.

A template that has `{% generation %}` blocks says so itself. With others, an answer is what its rendering adds to its
prompt: the conversation up to it with the generation prompt, which is what the model continues when it is used. That
both are true beginnings of the whole rendering is checked for each answer. Where a template rewrites earlier turns
(Qwen3 drops what was thought, Mistral moves the system message), an answer is trained in a rendering of its own, cut
off behind it: there it stands as the model will write it. Nothing is trained at a place that was not verified.

An answer begins with the first token that is not wholly of its prompt. What follows the last answer is left out.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tilewright.data.chat.sandbox import split_marks
from tilewright.data.chat.template import ChatError, ChatTemplate, Message

_VARIANTS = ("\ue0f4", "\ue0f5")


@dataclass(frozen=True)
class ChatSample:
    """One rendering and what of it is trained. T tokens.

    Args:
        text: the rendering.
        ids: int64 [T].
        trained_T: bool [T].
        spans: character ranges in `text` of what is trained.
    """

    text: str
    ids_T: np.ndarray
    trained_T: np.ndarray
    spans: tuple[tuple[int, int], ...]


def samples(chat: ChatTemplate, messages: Sequence[Message], first: int = 0) -> list[ChatSample]:
    """The renderings that together train each answer of a conversation once; usually one.

    Args:
        chat: the template.
        messages: as `rows.check_messages` accepts them.
        first: answers before this message are not trained.

    Raises:
        ChatError: no answer in it, or the template raises, leaves something out, or does not show where an answer is.

    Example:
        >>> from tilewright.data.chat.load import CHATML
        >>> from tilewright.data.common.tokenizer import train_tokenizer
        >>> chat = ChatTemplate(CHATML, train_tokenizer(["hello you " * 9], 300))
        >>> talk = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "you"}]
        >>> [sample] = samples(chat, talk)
        >>> [sample.text[a:b] for a, b in sample.spans]
        ['you<|im_end|>']
    """
    answers = [i for i, message in enumerate(messages) if message.get("role") == "assistant" and i >= first]
    if not answers:
        raise ChatError("no answer of the assistant")
    messages = messages[: answers[-1] + 1]
    text, generated, names = split_marks(chat.marked(messages, answers=chat.marks_answers))
    _check_complete(chat, messages, text)
    if chat.marks_answers:
        return [_sample(chat, text, names, generated[-len(answers) :] if first else generated)]
    found = []
    open_ = [(i, *_range(chat, messages, i)) for i in answers]
    while open_:
        last, rendering, _, _ = open_[-1]
        if last != answers[-1]:
            text, _, names = split_marks(chat.marked(messages[: last + 1]))
        here = [entry for entry in open_ if text.startswith(entry[1])]
        open_ = [entry for entry in open_ if not text.startswith(entry[1])]
        assert text == rendering, "the last one open is always found"
        found.append(_sample(chat, text, names, [(start, end) for _, _, start, end in here]))
    return found[::-1]


def _sample(
    chat: ChatTemplate, text: str, names: Sequence[tuple[int, int]], spans: Sequence[tuple[int, int]]
) -> ChatSample:
    if not any(begin < end for begin, end in spans):
        raise ChatError("answer that the template leaves out")
    ids, ranges = chat.encode_rendered(text, names)
    first_T, last_T = np.array(ranges, np.int64).reshape(-1, 2).T
    trained_T = np.zeros(len(ids), bool)
    for begin, end in spans:
        trained_T |= (first_T < end) & (last_T > begin) & (first_T < last_T)
    return ChatSample(text, np.array(ids, np.int64), trained_T, tuple(spans))


def _range(chat: ChatTemplate, messages: Sequence[Message], answer: int) -> tuple[str, int, int]:
    """The rendering that ends with an answer, and the characters of it that are the answer."""
    text = chat.render(messages[: answer + 1])
    prompt = chat.render(messages[:answer], add_generation_prompt=True) if answer else None
    if prompt is not None and text.startswith(prompt):
        start = len(prompt)
    else:
        start = _content_start(chat, messages, answer, text)
    body = text.rstrip()
    tail = chat.turn_tail
    if tail.strip() and text.endswith(tail):
        end = len(text) - len(tail) + len(tail.rstrip())
    else:
        end = len(body) if tail.strip() and body.endswith(tail.strip()) else len(text)
    if end <= start:
        raise ChatError("answer that the template leaves out")
    return text, start, end


def _content_start(chat: ChatTemplate, messages: Sequence[Message], answer: int, text: str) -> int:
    """Where the content of an answer begins, found by writing two others in its place."""
    before = [*messages[:answer]]
    one, other = (chat.render([*before, {**messages[answer], "content": content}]) for content in _VARIANTS)
    start = one.find(_VARIANTS[0])
    if start < 0 or start != other.find(_VARIANTS[1]) or text[:start] != one[:start] or one[:start] != other[:start]:
        raise ChatError("template does not show where an answer begins")
    return start


def _check_complete(chat: ChatTemplate, messages: Sequence[Message], text: str) -> None:
    """See that the template renders what is asked and every tool call.

    Raises:
        ChatError: it leaves something out without a word.
    """
    for i, message in enumerate(messages):
        if message.get("tool_calls"):
            without = {key: value for key, value in message.items() if key != "tool_calls"}
            if _renders_alike(chat, [*messages[:i], without, *messages[i + 1 :]], text):
                raise ChatError("tool calls that the template does not know")
        content = message.get("content")
        if message.get("role") == "assistant" or not isinstance(content, str) or content.strip() in text:
            continue
        if _renders_alike(chat, [*messages[:i], {**message, "content": ""}, *messages[i + 1 :]], text):
            raise ChatError(f"message of role {str(message.get('role'))[:20]!r} that the template leaves out")


def _renders_alike(chat: ChatTemplate, messages: Sequence[Message], text: str) -> bool:
    try:
        return chat.render(messages) == text
    except ChatError:
        return False
