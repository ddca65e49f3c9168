"""The tokens that end an answer: one set, which training teaches, generation stops at, and every folder and file says.

It is the union of what the template writes behind an answer, the tokenizer's end of a text, and the ids that the
model's folder declares (`eos_token_id` of generation_config.json). Layouts end an answer in three ways:

- by a token behind it: `<|im_end|>`, `<|eot_id|>`. Where several follow, the first that is declared counts.
- by the token that begins the next turn: GLM's `<|user|>`, after a tool call `<|observation|>`. The template writes it
  only where a turn follows, so training puts it behind the last answer (`Ending.closing`).
- by text that is no token of the tokenizer: the answer ends there, and training puts the end of a text behind it, at
  which programs that know nothing of the layout stop.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from tilewright.data.common.tokenizer import Tokenizer


@dataclass(frozen=True)
class Stops:
    """The set of stop tokens, which end an answer.

    Args:
        ids: tokens; the first is the one that the template teaches.
        texts: of a layout whose end is no token.
    """

    ids: tuple[int, ...]
    texts: tuple[str, ...] = ()


@dataclass(frozen=True)
class Ending:
    """How a chat template ends an answer.

    Args:
        id: the token that ends it; None where that is a text, or nothing.
        tail: all that the template writes behind the last answer.
        end: characters of `tail` that belong to the answer: up to and with its end.
        closing: what training puts behind the last answer, because the template does not write it there.
        closing_call: the same where the answer calls a tool.
        text: ends an answer where no token does; "" where one does.
    """

    id: int | None = None
    tail: str = ""
    end: int = 0
    closing: str = ""
    closing_call: str = ""
    text: str = ""

    def with_stops(self, ids: Iterable[int]) -> Stops:
        """All stop tokens, which end an answer, with what the tokenizer and its folder declare."""
        own = () if self.id is None else (self.id,)
        return Stops(tuple(dict.fromkeys((*own, *ids))), (self.text,) if self.text else ())


def ending(tokenizer: Tokenizer, control: re.Pattern[str], tail: str, question: str, result: str) -> Ending:
    """How a layout ends an answer, by which stops.

    Args:
        tokenizer: of the model.
        control: finds names of control tokens.
        tail: what the template writes behind the last answer.
        question: what it writes between an answer and the question after it, and further.
        result: the same of a tool's result; "" where it takes none.
    """
    found = [(tokenizer.backend.token_to_id(name[0]), name.end()) for name in control.finditer(tail)]
    if found:
        declared = [entry for entry in found if entry[0] in tokenizer.stop_ids]
        special = [entry for entry in found if entry[0] in tokenizer.special_ids]
        token, end = (declared or special or found)[0]
        return Ending(token, tail, end)
    whole = tail.strip()
    if not whole:
        token, closing = _next_turn(tokenizer, control, tail, question)
        if token is not None:
            return Ending(token, tail, len(tail), closing, _next_turn(tokenizer, control, tail, result)[1] or closing)
    token = tokenizer.backend.token_to_id(whole)
    if token is not None:
        return Ending(token, tail, len(tail.rstrip()))
    closing = _end_of_text(tokenizer)
    return Ending(None, tail, len(tail.rstrip()), closing, closing, whole)


def _next_turn(tokenizer: Tokenizer, control: re.Pattern[str], tail: str, follows: str) -> tuple[int | None, str]:
    """The stop token that begins the next turn, and what is written behind `tail` up to and with it."""
    blank = len(follows) - len(follows.lstrip())
    name = control.match(follows, blank)
    if name is None or not follows.startswith(tail):
        return None, ""
    token = tokenizer.backend.token_to_id(name[0])
    if token == tokenizer.bos_id and token not in tokenizer.stop_ids:
        return None, ""
    return token, follows[len(tail) : name.end()]


def _end_of_text(tokenizer: Tokenizer) -> str:
    """The name of a stop, the end of a text, where a text that has it is encoded as it; "" else."""
    added = tokenizer.backend.get_added_tokens_decoder().get(tokenizer.eos_id)
    return added.content if added is not None else ""
