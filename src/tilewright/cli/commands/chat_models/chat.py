"""`tilewright chat`: a conversation with a run or a model, at the terminal or through a pipe."""

import io
import sys
import unicodedata
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from tilewright.cli.common import SEED, FiniteRange, verbosity
from tilewright.cli.error_text import print_error
from tilewright.cli.model_options import model_argument, model_options, sampling_options
from tilewright.core.errors import DataError
from tilewright.core.log import say

if TYPE_CHECKING:
    from tilewright.serving.next_token import AnswerSettings
    from tilewright.serving.session import Session

_HELP = "/reset forgets the conversation, /quit or Ctrl-D ends, Ctrl-C stops an answer"


@click.command()
@model_argument
@click.option("--message", help="Print the answer to this message and end.")
@click.option("--system", help="Instructions for the model, before the conversation.")
@click.option("--tokens", default=512, show_default=True, type=click.IntRange(1), help="Maximum tokens per answer.")
@sampling_options(temperature=0.7, top_k=0)
@click.option(
    "--top-p",
    default=0.95,
    show_default=True,
    type=FiniteRange(0, 1, min_open=True),
    help="Sample among the most likely tokens whose probabilities sum to this; 1 is off.",
)
@click.option("--seed", type=SEED, help="Random seed. Default: another one each time.")
@click.option("--stop", multiple=True, help="Text that ends an answer and is not printed; may be repeated.")
@model_options
@verbosity
def chat(
    name: str,
    message: str | None,
    system: str | None,
    tokens: int,
    temperature: float,
    top_k: int,
    top_p: float,
    seed: int | None,
    stop: tuple[str, ...],
    **opening: Any,
) -> None:
    """Talk to the model of a run, or to any model with a chat template.

    RUN_OR_MODEL is a run folder or its name below `runs`, a Hugging Face folder, or a model of the hub,
    org/name[@revision]; without it `runs/latest`. Through a pipe, each line of standard input is one message.
    """
    from tilewright.cli.open_model import open_model
    from tilewright.models.sampling import Sampling
    from tilewright.serving.next_token import AnswerSettings
    from tilewright.serving.session import Session

    opened = open_model(name, **opening)
    session = Session(opened.model, opened.tokenizer, opened.chat, opened.device, opened.max_positions)
    session.template()
    settings = AnswerSettings(tokens, Sampling(temperature, top_k, top_p), tuple(text for text in stop if text), seed)
    interactive = message is None and sys.stdin.isatty()
    talk = _Talk(session, settings, system, interactive)
    if message is not None:
        talk.answer(message)
        return
    if interactive:
        say(f"{opened.name}. {_HELP}.")
    for line in _lines(interactive):
        if line.strip() == "/quit":
            return
        if line.strip() == "/reset":
            talk.reset()
            say("The conversation starts from the beginning.", error=True)
        elif line.strip():
            _answer(talk, line, interactive)


def _answer(talk: "_Talk", line: str, interactive: bool) -> None:
    """Answer one message of a chat. A message that cannot be answered ends a script, but not a conversation at the
    terminal."""
    try:
        talk.answer(line)
    except DataError as error:
        if not interactive:
            raise
        print_error(error)
        say("The conversation continues without this message.", error=True)


def _lines(interactive: bool) -> Iterator[str]:
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(encoding="utf-8", errors="surrogateescape")  # which the session tells as its own error
    if not interactive:
        yield from (line.rstrip("\r\n") for line in sys.stdin)
        return
    import contextlib

    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  arrow keys and history
    while True:
        try:
            yield input("> ")
        except EOFError:
            click.echo()
            return


class _Talk:
    """The conversation so far. A message that cannot be answered is left out."""

    def __init__(self, session: "Session", settings: "AnswerSettings", system: str | None, interactive: bool):
        self._session, self._settings, self._interactive = session, settings, interactive
        self._system = [{"role": "system", "content": system}] if system else []
        self._messages: list[dict[str, Any]] = list(self._system)
        self._said_drop = False

    def reset(self) -> None:
        """Reset the chat: forget all but the system's message."""
        self._messages = list(self._system)

    def answer(self, text: str) -> None:
        """Print the answer to a chat message as it is drawn, and add both to the conversation."""
        from tilewright.serving.session import fitting

        asked = [*self._messages, {"role": "user", "content": text}]
        limit = self._session.max_positions
        room = self._settings.max_tokens if limit is None else min(self._settings.max_tokens, max(1, limit // 4))
        kept, ids = fitting(self._session, asked, room)
        answer = self._session.answer(ids, self._settings, turn=True)
        if len(kept) < len(asked) and not self._said_drop:
            self._said_drop = True
            say(f"note: the context of {limit} tokens is full; the oldest turns are dropped from now on", error=True)
        pieces: list[str] = []
        try:
            for piece in answer:
                pieces.append(piece)
                click.echo(_shown(piece) if sys.stdout.isatty() else piece, nl=False)
                sys.stdout.flush()
        except KeyboardInterrupt:
            if not self._interactive:
                raise
            say("\nstopped", error=True)
        click.echo()
        if answer.finish_reason == "length":
            say(f"note: the answer was cut after {answer.num_tokens} tokens", error=True)
        self._messages = [*kept, {"role": "assistant", "content": "".join(pieces)}]


def _shown(text: str) -> str:
    """A chat's text shown without what would steer the terminal."""
    return "".join(c for c in text if c in "\n\t" or not unicodedata.category(c).startswith("Cc"))
