"""Thoughts in what a model says, `<think>...</think>` before its answer, told apart as the text comes.

They are told as `reasoning_content`, as vLLM's and other servers' clients read it. White space around the marks is
told on neither side.
"""

from dataclasses import dataclass

_OPEN, _CLOSE = THOUGHT_MARKS = ("<think>", "</think>")
_BLANK = " \t\r\n"


def thinks(template: str) -> bool:
    """True where a chat template has thoughts between the marks.

    Args:
        template: its source.
    """
    return _CLOSE in template


def begins_inside(prompt: str) -> bool:
    """True where the text after a prompt is a thought, since the template has opened it.

    Example:
        >>> begins_inside("<|im_start|>assistant\\n<think>\\n"), begins_inside("<think>\\n\\n</think>\\n\\n")
        (True, False)
    """
    return prompt.rstrip(_BLANK).endswith(_OPEN)


@dataclass
class Thought:
    """Parts of a piece of text for the thoughts, and for the answer."""

    thought: str = ""
    text: str = ""


class ThoughtParser:
    """Takes a text piece by piece. Thoughts are at its beginning only; a later mark is text.

    Args:
        inside: the text begins within a thought.

    Example:
        >>> parser = ThoughtParser()
        >>> parser.push("<think>\\nlet me"), parser.push(" see\\n</th")
        (Thought(thought='let me', text=''), Thought(thought=' see', text=''))
        >>> parser.push("ink>\\n\\nYes."), parser.flush()
        (Thought(thought='', text='Yes.'), Thought(thought='', text=''))
    """

    def __init__(self, inside: bool = False):
        self._held = ""
        """Text that may be a mark, or white space beside one."""
        self._inside = inside
        self._begun = inside
        """True where it is known how the text begins."""
        self._edge = inside
        """A mark was just read: white space is dropped."""

    def push(self, text: str) -> Thought:
        """Push the next piece of text to the parser of thoughts."""
        self._held += text
        said = Thought()
        if not self._begun:
            self._begin()
        if self._inside:
            self._think(said)
        if self._begun and not self._inside:
            said.text = self._after_edge(self._held)
            self._held = ""
        return said

    def flush(self) -> Thought:
        """Flush the parser of thoughts at the end of the text; one may have been cut off."""
        held, self._held = self._held, ""
        return Thought(thought=held.rstrip(_BLANK)) if self._inside else Thought(text=held)

    def _begin(self) -> None:
        begin = self._held.lstrip(_BLANK)
        if begin.startswith(_OPEN):
            self._begun = self._inside = self._edge = True
            self._held = begin[len(_OPEN) :]
        elif not _OPEN.startswith(begin):
            self._begun = True

    def _think(self, said: Thought) -> None:
        held = self._after_edge(self._held)
        at = held.find(_CLOSE)
        if at >= 0:
            said.thought = held[:at].rstrip(_BLANK)
            self._held, self._inside, self._edge = held[at + len(_CLOSE) :], False, True
            return
        keep = next((n for n in range(min(len(held), len(_CLOSE) - 1), 0, -1) if held.endswith(_CLOSE[:n])), 0)
        given = held[: len(held) - keep].rstrip(_BLANK)
        said.thought, self._held = given, held[len(given) :]

    def _after_edge(self, text: str) -> str:
        """Text after the edge of a thought, without the white space that follows a mark."""
        if self._edge:
            text = text.lstrip(_BLANK)
            self._edge = not text
        return text
