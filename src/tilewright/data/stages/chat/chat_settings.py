"""Settings of builds of conversations: `[chat]` of a data.toml, and settings of text that mean nothing beside it."""

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Literal

from tilewright.core.config.section import Section
from tilewright.core.errors import Problem
from tilewright.data.chat.load import CHATML_NAME

TEXT = "text"
_OF_TEXT = ("read.text_field", "read.max_chars", "media.image_size", "media.log_mel", "shards.bytes")
"""Settings of records that are text, images or sound, and of shards, which hold text."""


class ChatSection(Section):
    format: Literal["text", "chat", "preferences"] = TEXT
    """`chat` or `preferences`: files hold rows in the shapes of `data.format`; answers alone are trained, in the
    rendering of `template`. `text`: records are trained as they are."""
    template: str = ""
    """Template of the conversations: empty for that of the folder `tokenizer.path`, `chatml` for the built-in one, the
    path of a .jinja file or of a folder with one, or the name of one of several in the folder."""

    @property
    def is_on(self) -> bool:
        return self.format != TEXT


def void(chat: ChatSection) -> Iterator[tuple[bool, str, tuple[str, ...]]]:
    """Settings that `[chat]` makes void: (whether it is so, what, settings)."""
    yield not chat.is_on, 'chat.format = "text"', ("chat.template",)
    yield chat.is_on, f'chat.format = "{chat.format}"', _OF_TEXT


def conflicts(
    chat: ChatSection, sources: Collection[str], masked: tuple[str, ...], repeated_lines: int, window: int
) -> Iterator[tuple[str, Problem]]:
    """Conflicts of settings with `[chat]`: (setting, problem) of sources without conversations, and of settings that
    would change or cut them.

    No stage does that.

    Args:
        chat: the section.
        sources: `read.source`, or those of `read.sources`.
        masked: `repair.mask`.
        repeated_lines: `repair.repeated_lines`.
        window: `chunk.tokens`.
    """
    if not chat.is_on:
        return
    if "installed" in sources:
        what, got = "Installed text holds no conversations", f'format = "{chat.format}", source = "installed"'
        yield "chat.format", Problem(what, got, "a file or folder of rows", 'read.source = "FOLDER"')
    need = "conversations are trained as their rows have them; filters may drop some"
    if masked:
        got = f"mask = {list(masked)}"
        yield "repair.mask", Problem("Conversations are not repaired", got, need, "mask = []")
    if repeated_lines:
        got = f"repeated_lines = {repeated_lines}"
        yield "repair.repeated_lines", Problem("Conversations are not repaired", got, need, "repeated_lines = 0")
    if window:
        what, got = "Conversations are not cut into windows", f"tokens = {window}"
        need = "whole conversations: a run cuts those that are longer than its data.seq_len"
        yield "chunk.tokens", Problem(what, got, need, "tokens = 0")


def absolute(chat: ChatSection, folder: Path) -> ChatSection:
    """The `[chat]` section with the path of a template, relative to `folder`, made absolute; a name of a template
    stays."""
    path = folder / Path(chat.template).expanduser()
    if not chat.template or chat.template == CHATML_NAME or not path.exists():
        return chat
    return chat.model_copy(update={"template": str(path.absolute())})
