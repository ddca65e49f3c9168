"""The words that a user reads: titles of errors, help, settings, events. Forms and phrases that they may not have."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import click
import pytest

from tests.contracts.syntax import statements
from tests.docs.test_typed import OPTION, is_typed, options, settings_of_recipes, wrong
from tilewright.cli.app import COMMANDS, cli
from tilewright.core import errors
from tilewright.core.config import setting_names

PACKAGE = Path(__file__).resolve().parents[2] / "src" / "tilewright"
SOURCES = sorted(PACKAGE.rglob("*.py"))
RAISED = {name for name in vars(errors) if name.endswith("Error")} | {
    *("Problem", "Conflict", "PartialUpdateError", "UnrecoverableStepError", "OutOfTime"),
}
BANNED = {
    r"at home": "stored, on the device",
    r"(is|are|was|were|be) told": "reported",
    r"(go|goes|going|went|gone) on": "continue, resume",
    r"(some|no)body": "user, caller",
    r"anew": "again",
    r"besides": "also, in addition to",
    r"let(s|ting)? go of": "free",
    r"(give|gives|given|giving) back": "return, free",
    r"reckon": "estimate",
    r"foreign": "third-party, Hugging Face",
    r"sound (checkpoint|file)": "valid",
    r"torn|rotten": "truncated, corrupt",
    r"products?": "matmul",
    r"placements?": "memory plan",
    r"journal|arena|ledger|residence": "rollback buffer, pool, memory tracker",
    r"regroup\w*": "re-plan",
    r"per cent": "percent",
    r"what binds": "the bottleneck",
    r"(lie|lies|stand|stands) (in|on|at|there)": "is",
    r"(bytes?|seconds?|tokens?|scales?|bits?) an? (element|second|step|token|layer|tensor|parameter|weight|row)": "per",
}
"""Pattern -> the words to use."""


def words_of(node: ast.expr) -> str:
    """The text of a string in the source; `{}` where it is filled in."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(words_of(part) if isinstance(part, ast.Constant) else "{}" for part in node.values)
    return ""


@cache
def every_call() -> list[tuple[str, str, ast.Call]]:
    """Where each call of the package is, and the name that it calls."""
    return [
        (f"{path.name}:{node.lineno}", getattr(node.func, "id", getattr(node.func, "attr", "")), node)
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
    ]


def calls(names: set[str]) -> Iterator[tuple[str, ast.Call]]:
    for place, name, node in every_call():
        if name in names:
            yield place, node


@cache
def titles() -> dict[str, str]:
    found = {}
    for place, call in calls(RAISED):
        first = call.args[1 if getattr(call.func, "id", "") == "Conflict" else 0 : 2] if call.args else []
        for node in [first[0].body, first[0].orelse] if first and isinstance(first[0], ast.IfExp) else first[:1]:
            if text := words_of(node):
                found[f"{place} {text[:30]}"] = text
    return found


@cache
def events() -> dict[str, str]:
    """Texts of `event(step, kind, text)`."""
    found = {}
    for place, call in calls({"event", "record_event"}):
        for node in call.args:
            text = words_of(node)
            if " " in text:
                found[f"{place} {text[:30]}"] = text
    return found


def helps() -> dict[str, str]:
    context = click.Context(cli)
    found = {}
    for name in COMMANDS:
        command = cli.get_command(context, name)
        assert command is not None
        found[name] = command.help or ""
        found |= {f"{name} {p.name}": p.help for p in command.params if isinstance(p, click.Option) and p.help}
    return found


def settings() -> dict[str, str]:
    return {item.path: item.doc for item in setting_names.fields()}


def lines_of_errors() -> dict[str, str]:
    """What the other lines of an error say: `got`, `need`, `try`."""
    found = {}
    for place, call in calls(RAISED):
        for keyword in call.keywords:
            for node in (
                [keyword.value.body, keyword.value.orelse] if isinstance(keyword.value, ast.IfExp) else [keyword.value]
            ):
                if keyword.arg in {"got", "need", "try_"} and (text := words_of(node)):
                    found[f"{place} {keyword.arg} {text[:30]}"] = text
    return found


def pages() -> dict[str, str]:
    """Lines of README, CHANGELOG and docs, without code. The log is left out: it keeps the words of its day."""
    root = PACKAGE.parents[1]
    found = {}
    for path in [*root.glob("*.md"), *(root / "docs").rglob("*.md")]:
        if path.name != "log.md" and "_build" not in path.parts:
            text = re.sub(
                r"^```.*?^```$", lambda match: "\n" * match[0].count("\n"), path.read_text(), flags=re.M | re.S
            )
            text = re.sub(r"`[^`\n]*`|\]\([^)\n]*\)", "``", text)
            found |= {f"{path.name}:{number}": line for number, line in enumerate(text.splitlines(), 1) if line}
    return found


KINDS = {
    "titles": titles,
    "events": events,
    "help": helps,
    "settings": settings,
    "lines of errors": lines_of_errors,
    "pages": pages,
}
TERMS = {
    "products?": "a mathematical term: the product of two numbers, of sizes",
    "placements?": "torch's word for a DTensor's shards",
    r"(lie|lies|stand|stands) (in|on|at|there)": "of pages: a row stands in a table, a weight lies on two ranks",
    r"regroup\w*": "the name of a benchmark",
}
"""Patterns that may stand in pages and lines of errors, and why."""


@pytest.mark.parametrize("kind", KINDS)
def test_no_banned_phrase(kind):
    texts = KINDS[kind]()
    assert len(texts) >= 5, "the texts are found"
    bad = [
        f"{place}: {match[0]!r} -> {better}: {text}"
        for place, text in texts.items()
        for pattern, better in BANNED.items()
        if not (kind in {"pages", "lines of errors"} and pattern in TERMS)
        if (match := re.search(rf"(?<![\w`-])({pattern})(?![\w`-])", text, re.IGNORECASE))
    ]
    assert not bad, "\n".join(bad)


def test_a_title_is_a_sentence_without_its_period_and_begins_with_its_subject():
    bad = []
    for place, text in titles().items():
        first = text.split()[0]
        names_something = re.search(r"[._={}`\d]", first) or first in LOWER_CASE_NAMES
        if text.endswith("."):
            bad.append(f"{place}: ends with a period")
        if first[0].islower() and not names_something:
            bad.append(f"{place}: begins in lower case: {text}")
        if re.match(r"(A|An|This|These|There is|There are|It is) ", text):
            bad.append(f"{place}: begins with an article or a filler: {text}")
    assert not bad, "\n".join(bad)


LOWER_CASE_NAMES = {"tilewright's", "transformers"}


COMMENTED = ("training", "planner", "parallel")
"""Packages whose docstrings and comments are held to the words below, too."""


def test_docstrings_and_comments_have_a_named_subject():
    paths = [path for path in SOURCES if path.relative_to(PACKAGE).parts[0] in COMMENTED]
    assert len(paths) > 100
    pattern = re.compile(r"\b((some|no|any)body|(some|any) ?one's|anew)\b", re.IGNORECASE)
    rows = [(path, number, line) for path in paths for number, line in enumerate(path.read_text().splitlines(), 1)]
    bad = [
        f"{path.relative_to(PACKAGE)}:{number}: {line.strip()}" for path, number, line in rows if pattern.search(line)
    ]
    assert not bad, "\n".join(bad)


SETTING = re.compile(r"(?<![\w.])([a-z]\w*(?:\.[a-z_]\w*)+) = ")
CODE = re.compile(r"\btilewright((?:\.\w+)+)")
OF_TORCHRUN = {"--nproc-per-node", "--max-restarts"}


def is_code(name: str) -> bool:
    """True if a name below `tilewright` is a module of the package, or is there in one. Nothing is imported."""
    parts = name.strip(".").split(".")
    for count in range(len(parts), -1, -1):
        path = PACKAGE.joinpath(*parts[:count])
        file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        if file.is_file():
            return count == len(parts) or re.search(rf"\b{parts[count]}\b", file.read_text()) is not None
    return False


def test_what_an_error_says_to_try_can_be_typed():
    every = frozenset[str]().union(*options().values()) | OF_TORCHRUN
    sections = {name.partition(".")[0] for name in settings_of_recipes()}
    bad = []
    for place, text in lines_of_errors().items():
        if " try_ " in place:
            bad += [f"{place}: {one}" for one in wrong(text)]
            bad += [f"{place}: {one}" for one in OPTION.findall(text) if not is_typed(one, every)]
            bad += [f"{place}: {one}" for one in CODE.findall(text) if not is_code(one)]
            unknown = set(SETTING.findall(text)) - settings_of_recipes()
            bad += [f"{place}: {one}" for one in unknown if one.partition(".")[0] in sections]
    assert not bad, "\n".join(bad)
    assert is_code(".precision.lora.peft_io.save_adapter")
    assert not is_code(".precision.adapter_io.save_adapter")


@cache
def docstrings() -> list[tuple[str, str, str]]:
    """Where each docstring of the package is, the name that it is of ("" of a module), and its text."""
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    return [
        (f"{path.relative_to(PACKAGE)}:{node.body[0].lineno}", getattr(node, "name", ""), text)
        for path in SOURCES
        for node in statements(ast.parse(path.read_text()))
        if isinstance(node, documented) and (text := ast.get_docstring(node))
    ]


def test_docstrings_say_what_something_is():
    """Of a docstring that begins with "What" or "Whether" a reader has to guess if it is returned, checked or kept."""
    bad = [f"{place}: {text}" for place, _, text in docstrings() if text.startswith(("What ", "Whether "))]
    assert not bad, "\n".join(bad)


BORROWED = re.compile(r"(Of|The same|Those|That|So many|Along|By)\b|See (the module|`[^`]*`)\.?(\n|$)")
"""Beginnings of a docstring whose subject is a name, a class or another docstring: in a list of functions, or in an
editor, it says nothing."""


def test_public_docstrings_can_be_read_alone():
    bad = [
        f"{place}: {text}"
        for place, name, text in docstrings()
        if name and not name.startswith("_") and BORROWED.match(text)
    ]
    assert not bad, "\n".join(bad)


LABEL = re.compile(r"(For|In|At|From|On|With|Without|As|To) [^.:,]{1,45}[,:] ")
"""Beginnings of a docstring that put the owner before the sentence, as a label: "For scores of units, all ..."."""


def test_docstrings_begin_with_a_sentence():
    bad = [f"{place}: {text}" for place, name, text in docstrings() if name and LABEL.match(text)]
    assert not bad, "\n".join(bad)
    assert LABEL.match("In the subprocess: call `function`")
    assert not LABEL.match("In and out features of a layer.")


def test_the_check_can_fail():
    for text in ("a byte an element is kept", "it goes on", "the ledger", "all products"):
        assert any(
            re.search(rf"(?<![\w`-])({p})(?![\w`-])", text, re.IGNORECASE) for p in ("bytes? an? element", *BANNED)
        )
