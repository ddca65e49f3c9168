"""The `installed` source: real text that every installation carries, so that a first run needs no download.

The standard library, and the distributions that tilewright depends on (the whole closure, optional extras where they
are installed), in five domains: code, tests, docs, cpp, notes. Files are listed from the installer's RECORD and are
read only when `read` picks them. The text never leaves the machine; which text it is depends on the versions
installed, and the source's key says so. Docstrings of Python files are documents of their own.
"""

import csv
import importlib.metadata as metadata
import os
import posixpath
import re
import site
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from email import message_from_string
from email.message import Message
from functools import cache, partial
from importlib.util import find_spec
from inspect import cleandoc
from pathlib import Path

import xxhash

from tilewright.core.errors import DataError, is_of_machine
from tilewright.data.common.records import Record, Rejected, rejected, text_of
from tilewright.data.sources.source_parts import Part, Source, decode, printable

_MIN_CHARS = {"code": 64, "cpp": 64, "docs": 200, "notes": 64, "tests": 64}
_DOCSTRING_SHARE = 0.12  # of a source file, measured over torch and transformers; only for size estimates
_HEADERS = {".h", ".hpp", ".hh", ".hxx", ".cuh", ".inl"}
_TEST_FOLDERS = {"test", "tests", "testing", "idle_test"}
_NOTE_NAMES = re.compile(r"(licen[sc]e|copying|notice|readme|authors|changelog|news|thanks)", re.IGNORECASE)
_SHORT_SUFFIX = re.compile(r"\.[a-z][a-z_+-]{0,9}\Z")
_NO_STDLIB = "folder without text of the standard library"
_SKIP_FOLDERS = {"site-packages", "dist-packages", "__pycache__", "lib-dynload"}


# Comments and strings of Python, in reading order, so that quotes inside either are not taken for strings.
_TOKEN = re.compile(
    r"\#[^\n]*"
    r'|"""[^"\\]*(?:(?:\\.|"(?!""))[^"\\]*)*"""'
    r"|'''[^'\\]*(?:(?:\\.|'(?!''))[^'\\]*)*'''"
    r'|"[^"\\\n]*(?:\\.[^"\\\n]*)*"'
    r"|'[^'\\\n]*(?:\\.[^'\\\n]*)*'",
    re.DOTALL,
)


_Listed = tuple[str, int, str]
"""Name of a file, bytes, place on this machine."""


@dataclass(frozen=True)
class InstalledText:
    """The files that the text is in, found without a look at what each gives: `key` alone says whether they are those
    of an earlier run.

    Args:
        key: changes whenever the content may have changed.
        items: files, what was refused while looking, and parts that are no file, in their order.
    """

    key: str
    items: list[_Listed | Rejected | Part]

    def source(self) -> Source:
        """The source over the `installed` text."""
        found: list[Part | Rejected] = []
        files: dict[str, int] = {}
        for item in self.items:
            if isinstance(item, tuple):
                files[item[0]] = item[1]
                found += _parts_of(*item)
            else:
                found.append(item)
        parts = tuple(item for item in found if isinstance(item, Part))
        rejects = tuple(item for item in found if isinstance(item, Rejected))
        return Source("installed", self.key, parts, rejects, files)


def installed_source(project: str = "tilewright") -> Source:
    """The `installed` source over the standard library and the dependency closure of `project` (itself left out).

    Raises:
        DataError: `project` is not installed, so its dependencies are not known.
    """
    return list_installed(project).source()


def list_installed(project: str = "tilewright") -> InstalledText:
    """List the files of the `installed` source.

    Raises:
        DataError: `project` is not installed, so its dependencies are not known.
    """
    if _find(project) is None:
        raise DataError(
            "Installed text cannot be listed",
            got=f"no installed distribution named {project!r}",
            need="tilewright installed, which lists its dependencies",
            try_="pip install -e .   or name your own data: --data.source FOLDER",
        )
    # The key is of names and sizes, and of RECORD's checksums: no file is read for it.
    digest = xxhash.xxh3_128(sys.version.encode())
    found: list[_Listed | Rejected | Part] = []
    for item in _stdlib_files():
        found.append(item)
        if isinstance(item, tuple):
            digest.update(os.fsencode(f"{item[0]}\0{item[1]}\n"))
    found += _topics_part()
    for distribution in dependency_closure(project):
        # A distribution without RECORD is a reject: its files cannot be told from those of others.
        headers = _headers(distribution)
        label = f"{headers['Name']}-{headers['Version']}"
        record = distribution.read_text("RECORD")
        if record is None:
            found.append(rejected(label, "distribution without a RECORD of its files"))
            continue
        files = _record_files(distribution, record)
        lines = [f"{name}\0{size}\0{checksum}\n" for name, size, checksum, _ in files]
        digest.update("".join([label, *lines]).encode())
        found += [(name, size, path) for name, size, _, path in files]
    return InstalledText(digest.hexdigest(), found)


def dependency_closure(project: str) -> list[metadata.Distribution]:
    """Installed distributions that `project` needs, directly or not, sorted by name.

    Extras of `project` count where they are installed; extras of its dependencies do not.
    """
    found: dict[str, metadata.Distribution] = {}
    root = _find(project)
    todo = [(requirement, True) for requirement in (_requires(root) if root else ())]
    while todo:
        requirement, with_extras = todo.pop()
        if "extra ==" in requirement and not with_extras:
            continue
        name = re.sub(r"[._-]+", "-", re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0]).lower()
        if name in found or name == project:
            continue
        distribution = _find(name)
        if distribution is None:
            continue  # an extra that is not installed, or a dependency of another platform
        found[name] = distribution
        todo += [(inner, False) for inner in _requires(distribution)]
    return [found[name] for name in sorted(found)]


def _find(name: str) -> metadata.Distribution | None:
    """Find an installed distribution of this environment. Not by `sys.path`: setuptools, which torch's compiler
    imports, adds packages of its own to it, and the text would depend on what the process has done before."""
    return next(iter(metadata.distributions(name=name, path=_folders())), None)


@cache
def _folders() -> list[str]:
    """Folders where this environment has its installed distributions."""
    user = [site.getusersitepackages()] if site.ENABLE_USER_SITE else []
    folders = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *site.getsitepackages(), *user]
    return list(dict.fromkeys(folders))


def _headers(distribution: metadata.Distribution) -> Message:
    """Read name, version and requirements of an installed distribution. `metadata` of the library also parses the
    description, at each call."""
    text = distribution.read_text("METADATA") or distribution.read_text("PKG-INFO") or ""
    return message_from_string(text.partition("\n\n")[0])


def _requires(distribution: metadata.Distribution) -> list[str]:
    found = _headers(distribution).get_all("Requires-Dist")
    if found is None and distribution.read_text("requires.txt"):  # of an egg
        found = distribution.requires
    return found or []


# Names and places stay text below: objects of pathlib for 80,000 files took most of the time of a listing.


def _stdlib_files() -> Iterator[_Listed | Rejected]:
    """Files of the installed standard library, and folders that are not of it or hold no text."""
    root = Path(sysconfig.get_path("stdlib"))
    for folder, folders, files in os.walk(root):
        skipped = [f for f in folders if f in _SKIP_FOLDERS or f.startswith("config-")]
        yield from (rejected(f"stdlib/{Path(folder, f).relative_to(root).as_posix()}", _NO_STDLIB) for f in skipped)
        folders[:] = sorted(f for f in folders if f not in _SKIP_FOLDERS and not f.startswith("config-"))
        inner = Path(folder).relative_to(root).as_posix()
        for file in sorted(files):
            name = file if inner == "." else f"{inner}/{file}"
            path = os.path.join(folder, file)
            yield printable(f"stdlib/{name}"), os.stat(path).st_size, path


def _record_files(distribution: metadata.Distribution, record: str) -> list[tuple[str, int, str, str]]:
    """Files of an installed distribution with a size; those outside the package folder (scripts) differ from place to
    place and are left out."""
    folder = os.path.join(str(distribution.locate_file("")), "")
    return [
        (name, int(size), checksum, folder + name)
        for name, checksum, size, *_ in csv.reader(record.splitlines())
        if size and not name.startswith(("..", "/"))
    ]


def _parts_of(name: str, size: int, path: str) -> list[Part | Rejected]:
    """Divide an installed file into parts: a Python file gives code and docs, most others a reject."""
    folder, _, file = name.rpartition("/")
    stem, suffix = posixpath.splitext(file)
    suffix = suffix.lower()
    if suffix == ".py":
        if _is_test(folder, stem):
            return [Part("tests", name, size, partial(_read_plain, name, path, "tests"))]
        docstrings = int(size * _DOCSTRING_SHARE)
        return [
            Part("code", name, size - docstrings, partial(_read_code, name, path)),
            Part("docs", name, docstrings, partial(_read_docstrings, name, path)),
        ]
    if suffix in _HEADERS:
        return [Part("cpp", name, size, partial(_read_plain, name, path, "cpp"))]
    if file == "METADATA" and folder.endswith(".dist-info"):
        return [Part("notes", name, size, partial(_read_description, name, path))]
    if _NOTE_NAMES.match(file) and suffix in {"", ".txt", ".md", ".rst"}:
        return [Part("notes", name, size, partial(_read_plain, name, path, "notes"))]
    if suffix in {".md", ".rst"}:
        return [Part("docs", name, size, partial(_read_plain, name, path, "docs"))]
    kind = suffix if _SHORT_SUFFIX.match(suffix) else "without a usual suffix"
    return [rejected(name, f"file type {kind} is not read", num_bytes=size)]


def _is_test(folder: str, stem: str) -> bool:
    return (
        not _TEST_FOLDERS.isdisjoint(folder.split("/"))
        or stem.startswith("test_")
        or stem.endswith("_test")
        or stem == "conftest"
    )


def _topics_part() -> list[Part]:
    """A part of the installed text, Python's own language reference, which `help()` shows."""
    if find_spec("pydoc_data") is None:
        return []  # some systems package it apart from Python
    return [Part("docs", "stdlib/pydoc_data/topics", 480_000, _read_topics)]


def _read_topics() -> Iterator[Record | Rejected]:
    from pydoc_data.topics import topics

    for topic in sorted(topics):
        yield text_of("stdlib/pydoc_data/topics", topics[topic], topic)


def _read_file(name: str, path: str) -> Iterator[Record | Rejected]:
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        if is_of_machine(error):
            raise
        yield rejected(name, "cannot be read", str(error.strerror))
        return
    yield from decode(name, data)


def _long_enough(text: Record, domain: str) -> Record | Rejected:
    """The installed text, or a reject where it is too short to learn from."""
    least = _MIN_CHARS[domain]
    if len(text.text) >= least:
        return text
    size = len(text.text.encode("utf-8", "surrogatepass"))
    return rejected(text.path, f"{domain}: shorter than {least} characters", num_bytes=size)


def _read_plain(name: str, path: str, domain: str) -> Iterator[Record | Rejected]:
    for item in _read_file(name, path):
        yield item if isinstance(item, Rejected) else _long_enough(item, domain)


def _read_code(name: str, path: str) -> Iterator[Record | Rejected]:
    for item in _read_file(name, path):
        if isinstance(item, Rejected):
            yield item
        else:
            yield _long_enough(text_of(name, split_docstrings(item.text)[0]), "code")


def _read_docstrings(name: str, path: str) -> Iterator[Record | Rejected]:
    for item in _read_file(name, path):
        if isinstance(item, Rejected):
            continue  # counted where the file is read for its code
        for line, text in split_docstrings(item.text)[1]:
            yield _long_enough(text_of(name, text, f"line {line}"), "docs")


def _read_description(name: str, path: str) -> Iterator[Record | Rejected]:
    for item in _read_file(name, path):
        if isinstance(item, Rejected):
            yield item
        else:
            yield _long_enough(text_of(name, item.text.partition("\n\n")[2]), "notes")


def split_docstrings(source: str) -> tuple[str, list[tuple[int, str]]]:
    """Split docstrings from installed Python source: (code without them, [(line number, docstring), ...]).

    A docstring is a triple-quoted string that starts a line, at the start of the file or after a line that ends in `:`.
    One that is all there is in its block stays in the code, which would be broken without it. An order of magnitude
    faster than a syntax tree, and it never fails, also on source of another Python version; what it leaves in the
    code are docstrings in single quotes, too.

    Example:
        >>> split_docstrings('def f():\\n    \\"\\"\\"Doc.\\"\\"\\"\\n    return 1\\n')
        ('def f():\\n    return 1\\n', [(2, 'Doc.')])
    """
    kept, found, end = [], [], 0
    for match in _TOKEN.finditer(source):
        if match[0][:3] not in ('"""', "'''"):
            continue
        line_start = source.rfind("\n", 0, match.start()) + 1
        before = source[line_start : match.start()]
        if before.strip(" \trRuU") or not _opens_block(source, line_start):
            continue
        stop = match.end()
        if source[stop : stop + 1] == "\n":
            stop += 1
        indent = len(before) - len(before.lstrip())
        if indent and not _body_goes_on(source, stop, indent):
            continue
        kept.append(source[end:line_start])
        end = stop
        found.append((source.count("\n", 0, match.start()) + 1, cleandoc(match[0][3:-3])))
    kept.append(source[end:])
    return "".join(kept), found


def _opens_block(source: str, line_start: int) -> bool:
    """True if the last line of installed code before `line_start` opens a block: ends in a colon, or there is none."""
    while line_start > 0:
        before = source.rfind("\n", 0, line_start - 1) + 1
        line = source[before : line_start - 1].split("#")[0].rstrip()
        if line:
            return line.endswith(":")
        line_start = before
    return True


def _body_goes_on(source: str, at: int, indent: int) -> bool:
    """True if a block of installed code has more lines: the next one from `at` on is indented by `indent` or more."""
    for line in _lines_from(source, at):
        text = line.lstrip()
        if text and not text.startswith("#"):
            return len(line) - len(text) >= indent
    return False


def _lines_from(source: str, at: int) -> Iterator[str]:
    while at < len(source):
        end = source.find("\n", at)
        end = len(source) if end < 0 else end
        yield source[at:end]
        at = end + 1
