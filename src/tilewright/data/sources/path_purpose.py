"""The purpose for which a command reads a path of the user's, and the errors where the path has none of it.

What helps depends on the use: the installed text is no advice for a user who names a file of conversations.
"""

import difflib
import shlex
from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tilewright.core.config.recipe import DataSection
from tilewright.core.errors import ConfigError, DataError

_ROWS = ".jsonl, .json, .csv, .tsv, .parquet or .arrow"
_TALK = '{"messages": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi!"}]}'
_PAIR = '{"prompt": "Hello", "chosen": "Hi!", "rejected": "No."}'
_CLOSE = 0.6
"""Likeness of names, as in difflib, from which one is taken for a slip of the other."""


@dataclass(frozen=True)
class Wanted:
    """The use for which a command reads a path of the user's.

    Args:
        noun: what is looked for.
        nothing: the error where there is none.
        setting: what names the path, as the user writes it.
        need: what the path can be.
        need_files: what has to be in it.
        try_: what to do where nothing better is known.
        format: `data.format` of what is read.
        one_of_several: what to do about one path of `data.sources`; None: `try_`.
    """

    noun: str
    nothing: str
    setting: str
    need: str
    need_files: str
    try_: str
    format: str = "text"
    one_of_several: str | None = None

    def named(self, setting: str, try_: str | None = None) -> "Wanted":
        """This purpose of a path, as another setting names it."""
        return replace(self, setting=setting, try_=self.try_ if try_ is None else try_)

    def absent(self, path: Path, source: str, why: str) -> DataError:
        """The error of a path's purpose where there is nothing at `path`.

        Args:
            path: looked at.
            source: as the user wrote it.
            why: it cannot be had.
        """
        close, got, try_ = _close_names(path), f"{source[:200]!r}, {why}", self.try_
        if not path.is_absolute():
            got += f"; looked for in {Path.cwd()}"
            try_ += f"; or an absolute path, or the command in the folder that {source[:200]!r} is in"
        return DataError(
            f"No {self.noun} at this path",
            where=self.setting,
            got=got,
            need=self.need,
            try_=f"{path.parent / close[0]}   (a similar name in the same folder)" if close else try_,
        )

    def unusable(self, label: str, got: str, better: str = "") -> DataError:
        """The error of a path's purpose where nothing there can be read.

        Args:
            label: the path.
            got: what is there.
            better: what to do, where that is known.
        """
        return DataError(
            self.nothing,
            where=label,
            got=got,
            need=self.need_files,
            try_=better if better and self.setting == _SOURCE else self.try_,
        )


_SOURCE = "data.source"
_TEXT = Wanted(
    "training data",
    "No usable text in the data",
    _SOURCE,
    "a folder or a file of text, a dataset hf://org/name, or 'installed'",
    f"text files in UTF-8, rows in {_ROWS}, or a Hugging Face dataset on disk",
    'data.source = "installed"   (the text that this installation carries)',
    one_of_several="another path, or data.sources without it",
)
_CHAT = Wanted(
    "conversations",
    "No usable conversation in the data",
    _SOURCE,
    f"a folder or a file of conversations, {_ROWS}, or a dataset hf://org/name",
    f"rows of messages, ShareGPT, Alpaca, or prompt and completion in {_ROWS}",
    f"a .jsonl file with lines like {_TALK}",
    "chat",
)
_PREFERENCES = Wanted(
    "pairs of preferences",
    "No usable pair of preferences in the data",
    _SOURCE,
    f"a folder or a file of preferences, {_ROWS}, or a dataset hf://org/name",
    f"rows with chosen and rejected in {_ROWS}",
    f"a .jsonl file with lines like {_PAIR}",
    "preferences",
)
_WANTED = {"text": _TEXT, "chat": _CHAT, "preferences": _PREFERENCES}
IMAGES = Wanted(
    "image classes",
    "No usable image",
    _SOURCE,
    "a folder with one sub-folder of images for each class, two at least",
    "a folder with one sub-folder of images for each class, two at least",
    "data.source = the folder pets of pets/cat/1.jpg, pets/dog/1.jpg",
    "",
)
BUILD = Wanted(
    "files for the data build",
    "No files to read for the data build",
    "read.source",
    "a folder or a file, a dataset hf://org/name, or 'installed'",
    "files with text, rows of text, images or sound",
    'read.source = "installed"   (the text that this installation carries)',
    "",
)
ROW_OF_PREFERENCES, ROW_OF_CHAT = "row of preferences", "row without chosen and rejected"
"""Reasons for which rows of one format are refused in the other."""
_TALKS = {"messages", "conversations", "conversation"}
_TASKS = ({"prompt", "completion"}, {"prompt", "response"}, {"instruction", "output"}, {"instruction", "response"})
_FOUND = {"text": "text is learned as it is", "chat": "rows of conversations", "preferences": "rows of preferences"}
TEXT_SUFFIXES = """
    .txt .md .rst .tex .org .html .htm .xml .py .pyi .c .h .cc .cpp .cxx .hpp .hh .cu .cuh .java .kt .scala .go .rs .js
    .jsx .ts .tsx .css .rb .php .pl .lua .sh .bash .zsh .ps1 .sql .r .jl .m .swift .hs .ml .clj .ex .erl .lisp .el .vim
    .zig .nim .log .f90 .toml .yaml .yml .ini .cfg .cmake .proto .srt
"""
"""Of files that are read as text."""

VALIDATION = "data.holdout = 0.02   (hold out a part of what is trained on)"
INSTEAD_OF_OTHER = 'data.eval_source = ""   (evaluate what is held out of the training data, nothing else)'


def wanted(format: str, setting: str = _SOURCE) -> Wanted:
    """The purpose of a path under a `data.format`: text, chat or preferences.

    Args:
        format: of what is read.
        setting: which names the path, `data.source` or `data.eval_source`.
    """
    instead = 'data.eval_source = ""   (evaluate what is held out of the training data, nothing else)'
    return _WANTED[format].named(setting, None if setting == _SOURCE else instead)


def wanted_validation(format: str) -> Wanted:
    """The purpose of the path `data.eval_source`: what is held out."""
    return _WANTED[format].named("data.eval_source", "data.holdout = 0.02   (hold out a part of what is trained on)")


def wanted_build(format: str) -> Wanted:
    """The purpose of the path `read.source` of a data build.

    Args:
        format: `chat.format`.
    """
    return BUILD if format == "text" else _WANTED[format].named(BUILD.setting)


def existing(root: Path, source: str, want: Wanted) -> Path:
    """The path `root` that a purpose asks for, which is there.

    Raises:
        DataError: it is not.
    """
    try:
        root.stat()
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        absent = isinstance(error, FileNotFoundError | NotADirectoryError)
        why = "which does not exist" if absent else f"which cannot be read: {getattr(error, 'strerror', error)}"
        raise want.absent(root, source, why) from None
    return root


def no_build_settings(path: Path, shipped: Sequence[str]) -> ConfigError:
    """The error of a path where the settings of a data build were looked for, and are not.

    Args:
        path: a folder, or of nothing.
        shipped: names of the settings that come with tilewright.
    """
    file = path / "data.toml" if path.is_dir() else path
    build, write = f"tilewright data build {shlex.quote(str(file))}", f"> {shlex.quote(str(file))}"
    return ConfigError(
        "Settings of a data build are a file, not a folder" if path.is_dir() else "No such data.toml",
        where="DATA.TOML of tilewright data build",
        got=str(path),
        need=f"a TOML file with the settings of a data build, or a shipped one: {', '.join(shipped)}",
        try_=build if file.is_file() else f"echo 'read.source = \"FOLDER\"' {write}",
    )


def check_sources(data: DataSection, *, images: bool, unread: Container[str]) -> None:
    """Check that the paths a run reads its data from are there; addresses are not asked.

    Args:
        data: of the recipe.
        images: the run is on images.
        unread: settings that have no effect.

    Raises:
        DataError: one is not.
    """
    want = IMAGES if images else wanted(data.format)
    named = {f"data.sources.{name}": source for name, source in data.sources.items()} or {want.setting: data.source}
    wants = {name: want.named(name, want.one_of_several) if data.sources else want for name in named}
    if data.eval_source and "data.eval_source" not in unread:
        other = wanted(data.format, "data.eval_source") if data.holdout else wanted_validation(data.format)
        named[other.setting], wants[other.setting] = data.eval_source, other
    for name, source in named.items():
        if source != "installed" and "://" not in source:
            existing(Path(source).expanduser(), source, wants[name])


def better_format(want: Wanted, where: str, reason: str, fields: Sequence[str]) -> str:
    """The setting under which a refused path can be read, "" if none is known.

    Args:
        want: the use that it was refused for.
        where: file that was refused, or that a row is in.
        reason: of the refusal.
        fields: of the row, where it has them.

    Example:
        >>> better_format(wanted("text"), "a.jsonl", "no field 'text'", ["messages", "id"])
        'data.format = "chat"   (rows of conversations)'
        >>> better_format(wanted("text"), "a.jsonl", "no field 'text'", ["content", "id"])
        'data.text_field = one of: content, id'
    """
    names = set(fields)
    if {"chosen", "rejected"} <= names or "preferred_output" in names or reason == ROW_OF_PREFERENCES:
        found = "preferences"
    elif names & _TALKS or any(both <= names for both in _TASKS) or reason == ROW_OF_CHAT:
        found = "chat"
    elif "text" in names or (want.format != "text" and Path(where).suffix.lower() in TEXT_SUFFIXES.split()):
        found = "text"
    else:
        found = ""
    if found and found != want.format:
        return f'data.format = "{found}"   ({_FOUND[found]})'
    return f"data.text_field = one of: {', '.join(fields)}" if want.format == "text" and fields else ""


def _close_names(path: Path) -> list[str]:
    try:
        names = [entry.name for entry in path.parent.iterdir()]
    except (OSError, ValueError):  # ValueError: a NUL in the path
        return []
    return difflib.get_close_matches(path.name, names, 1, _CLOSE)
