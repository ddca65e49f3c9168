"""Rows of conversations, or of preferences, to samples: many rows in one request to the process of templates, and a
reason for each that cannot be used.
"""

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np

from tilewright.core.errors import DataError
from tilewright.data.chat.errors import ChatError, TemplateTooMuchError
from tilewright.data.chat.messages import Row
from tilewright.data.chat.template import ChatTemplate
from tilewright.data.chat.tools import TemplateArguments
from tilewright.data.chat.trained_tokens import ChatSample, Rendered, Talk, render_talks
from tilewright.data.common.encoder import Spared
from tilewright.data.common.guarded_tokenizer import TokenizerError

ROWS, ROWS_BYTES = 64, 1 << 18
"""Rows that are rendered together, and bytes of their JSON: more of them take no less time."""
NUM_EXAMPLES = 200
"""Of so many samples, the first ones, one is shown."""
_EXAMPLE_CHARS = 4000
_MAX_HEAVY = 3
"""Rows whose rendering takes more time or memory than it gets and that are set aside."""


class RowRenderer:
    """Renders rows of conversations or preferences by the chat template, and knows how many of them failed.

    Args:
        chat: the template.
        pairs: rows are of preferences.

    Example:
        >>> from tilewright.data.chat.load import CHATML
        >>> from tilewright.data.common.tokenizer import train_tokenizer
        >>> chat = ChatTemplate(CHATML, train_tokenizer(["hello you " * 9], 300))
        >>> talk = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "you"}]
        >>> [one, other] = RowRenderer(chat, pairs=False).render([{"messages": talk}, {"messages": talk[:1]}])
        >>> len(one.samples), other.reason
        (1, 'no answer of the assistant')
    """

    def __init__(self, chat: ChatTemplate, *, pairs: bool):
        self._chat, self._pairs = chat, pairs
        self._heavy, self._spared = 0, Spared()

    def render(self, rows: Sequence[Row]) -> Iterator[Rendered | DataError]:
        """Render rows of conversations: yields the samples of each row (two for preferences), or the reason why it
        cannot be used.

        Args:
            rows: as `chat_rows.read_row` finds them.

        Raises:
            TemplateTooMuchError: more than three rows take too much time or memory, so it is the template.
            TokenizerError: the tokenizer fails on too many.
        """
        found = render_talks(self._chat, [talk for row in rows for talk in self._talks(row)])
        for row in rows:
            self._spared.texts += 1
            rendered = self._of_row(list(islice(found, len(self._talks(row)))))
            if isinstance(rendered, TokenizerError):
                self._spared.fail(rendered)
            self._heavy += isinstance(rendered, TemplateTooMuchError)
            if isinstance(rendered, TemplateTooMuchError) and self._heavy > _MAX_HEAVY:
                raise rendered
            yield rendered

    def _talks(self, row: Row) -> list[Talk]:
        given = TemplateArguments(row.get("tools", ()), row.get("variables", {}))
        if not self._pairs:
            return [Talk(row["messages"], 0, given)]
        prompt = row["prompt"]  # answers in it are not trained
        return [Talk([*prompt, *row[answer]], len(prompt), given) for answer in ("chosen", "rejected")]

    def _of_row(self, found: Sequence[Rendered | DataError]) -> Rendered | DataError:
        samples, left = [], []
        for one in found:
            if isinstance(one, DataError):
                return one
            if self._pairs and len(one.samples) != 1:
                return ChatError("preferences over several answers that the template renders apart")
            samples += one.samples
            left += one.left_out
        if self._pairs and np.array_equal(samples[0].ids_T, samples[1].ids_T):
            return ChatError("chosen and rejected are equal as the template renders them")
        return Rendered(samples, list(dict.fromkeys(left)))


def example_of(samples: Sequence[ChatSample]) -> dict[str, Any]:
    """The text of the rendered sample of middle length, and the ranges of it that are trained; {} if there is none."""
    if not samples:
        return {}
    order = np.argsort([len(sample.ids_T) for sample in samples], kind="stable")
    chosen = samples[int(order[len(samples) // 2])]
    spans = [[a, min(b, _EXAMPLE_CHARS)] for a, b in chosen.spans if a < _EXAMPLE_CHARS]
    return {"text": chosen.text[:_EXAMPLE_CHARS], "spans": spans}
