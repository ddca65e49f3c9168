"""Where text comes from: every line once, fair shares of a byte limit, whole files sampled, the installed text."""

import argparse
import ast
import inspect
import json
import os
import re
import subprocess
import sys
from importlib import metadata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.data.conftest import write_text
from tests.draws import examples
from tilewright.data.common.progress import ProgressBar
from tilewright.data.common.records import text_of
from tilewright.data.corpus.read import collect
from tilewright.data.sources.file_lines import segment_lines
from tilewright.data.sources.installed_text import (
    _headers,
    _requires,
    dependency_closure,
    installed_source,
    split_docstrings,
)
from tilewright.data.sources.source_parts import Part, Source, cut
from tilewright.data.sources.user_files import SEGMENT_BYTES, user_source


def spool_of(source, tmp_path, max_bytes=0, domains=(), seed=0):
    return collect(
        source, tmp_path / "spool", domains=domains, max_bytes=max_bytes, seed=seed, progress=ProgressBar("test")
    )


def used(spool):
    return {d: int(spool.lengths[spool.domain_of == i].sum()) for i, d in enumerate(spool.domains)}


def made(sizes):
    """A source of documents of the given sizes, a list a domain, all different."""
    parts = []
    for domain, lengths in sizes.items():
        for i, n in enumerate(lengths):
            text = (f"{domain}{i}-" * n)[:n]
            parts.append(Part(domain, f"{domain}/{i}", n, lambda t=text: iter([text_of("x", t)])))
    return Source("made", "key", tuple(parts))


@examples(100)
@given(st.lists(st.binary(max_size=9).filter(lambda b: b"\n" not in b)), st.integers(1, 7), st.booleans())
def test_segments_hold_every_line_once(tmp_path_factory, lines, size, ends):
    path = tmp_path_factory.mktemp("lines") / "x"
    data = b"\n".join(lines) + (b"\n" if ends and lines else b"")
    path.write_bytes(data)
    found = [item for start in range(0, len(data), size) for item in segment_lines(path, start, start + size)]
    assert b"".join(line for _, line in found) == data
    assert all(data[offset:].startswith(line) for offset, line in found)


@examples(100)
@given(st.text("ab \n", max_size=300), st.integers(4, 40))
def test_cut_loses_nothing(text, max_chars):
    pieces = list(cut(text_of("x", text), max_chars))
    assert "".join(p.text for p in pieces) == text
    assert all(0 < len(p.text) <= max_chars for p in pieces) or len(text) <= max_chars


def test_small_domains_give_all_and_large_ones_share(tmp_path):
    source = made({"big": [97] * 900, "huge": [101] * 5000, "small": [50] * 30})
    spool = spool_of(source, tmp_path, max_bytes=60_000)
    sizes = used(spool)
    assert sizes["small"] == 1500
    assert sizes["big"] == pytest.approx(29_250, abs=300)
    assert sizes["huge"] == pytest.approx(29_250, abs=300)
    assert 59_500 < sum(sizes.values()) <= 60_000


@examples(60)
@given(
    st.dictionaries(st.sampled_from("abcd"), st.lists(st.integers(20, 90), min_size=1, max_size=40), min_size=1),
    st.integers(400, 4000),
)
def test_the_limit_holds(tmp_path_factory, sizes, max_bytes):
    spool = spool_of(made(sizes), tmp_path_factory.mktemp("limit"), max_bytes)
    assert spool.lengths.sum() <= max_bytes
    if sum(map(sum, sizes.values())) <= max_bytes / len(sizes):
        assert len(spool) == sum(map(len, sizes.values()))


def test_a_limit_samples_the_whole_and_not_the_beginning(tmp_path):
    """One large .jsonl: rows of all parts of the file, the same on a second reading, others for another seed."""
    path = tmp_path / "big.jsonl"
    with path.open("w") as file:
        for i in range(8 * SEGMENT_BYTES // 500):
            file.write(json.dumps({"text": f"{i} " + "words " * 80}) + "\n")
    size = path.stat().st_size
    first = spool_of(user_source(str(path)), tmp_path, SEGMENT_BYTES * 2)
    again = spool_of(user_source(str(path)), tmp_path, SEGMENT_BYTES * 2)
    other = spool_of(user_source(str(path)), tmp_path, SEGMENT_BYTES * 2, seed=1)
    assert first.names == again.names
    assert first.names != other.names
    offsets = [int(name.split("byte ")[1]) for name in first.names + other.names]
    assert max(offsets) > 0.6 * size
    assert first.available_bytes == pytest.approx(size)


def test_exact_duplicates_count_once(tmp_path):
    (tmp_path / "data").mkdir()
    for name in "abc":
        (tmp_path / "data" / f"{name}.txt").write_bytes(b"the same\r\ntext\r\n")
    (tmp_path / "data" / "d.txt").write_bytes(b"the same\ntext")
    spool = spool_of(user_source(str(tmp_path / "data")), tmp_path)
    assert len(spool) == 1
    assert spool.num_duplicates == 3


def test_sub_folders_are_domains(corpus_folder, tmp_path):
    assert spool_of(user_source(str(corpus_folder)), tmp_path).domains == ("a", "b", "c")
    assert spool_of(user_source(str(corpus_folder)), tmp_path, domains=("a", "c")).domains == ("a", "c")


def test_the_key_follows_the_content(tmp_path):
    (tmp_path / "a.txt").write_text("one")
    before = user_source(str(tmp_path)).key
    assert user_source(str(tmp_path)).key == before
    (tmp_path / "b.txt").write_text("two")
    assert user_source(str(tmp_path)).key != before


def test_the_key_follows_content_of_the_same_size_and_time(tmp_path):
    (tmp_path / "a.txt").write_text("one")
    before, status = user_source(str(tmp_path)).key, (tmp_path / "a.txt").stat()
    (tmp_path / "new").write_text("two")
    (tmp_path / "new").replace(tmp_path / "a.txt")
    os.utime(tmp_path / "a.txt", ns=(status.st_atime_ns, status.st_mtime_ns))
    assert user_source(str(tmp_path)).key != before


def docstrings_by_syntax_tree(source):
    """[(line, text, whether it is all of its block)] of the docstrings in triple quotes."""
    found, lines = [], source.split("\n")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text is not None and re.match(r"""\s*[rR]?(\"{3}|'{3})""", lines[node.body[0].lineno - 1]):
                found.append((node.body[0].lineno, text, len(node.body) == 1))
    return sorted(found)


@pytest.mark.parametrize("module", [ast, inspect, json, metadata, st, argparse], ids=lambda m: m.__name__)
def test_docstrings_agree_with_the_syntax_tree(module):
    """The same docstrings, and the code that is left is whole and has only those that are all of a block."""
    source = inspect.getsource(module)
    code, found = split_docstrings(source)
    expected = docstrings_by_syntax_tree(source)
    lines = {line for line, _ in found}
    assert lines == {line for line, _, alone in expected if not alone}
    plain = {line: text for line, text, _ in expected if "\\" not in text}
    assert all(plain.get(line, text) == text for line, text in found)
    assert all(alone for _, _, alone in docstrings_by_syntax_tree(code))


def test_dependency_closure_is_that_of_the_metadata():
    names = {d.name.lower() for d in dependency_closure("tilewright")}
    assert {"torch", "numpy", "tokenizers", "pydantic", "pydantic_core", "sympy", "mpmath"} <= names
    assert "tilewright" not in names
    assert len(names) == len(dependency_closure("tilewright"))


@pytest.mark.slow
def test_installed_text_does_not_depend_on_what_was_imported():
    """setuptools adds packages of its own to sys.path (torch's compiler imports it)."""
    code = (
        "import sys\n"
        "from tilewright.data.sources.installed_text import installed_source\n"
        "before, known = installed_source().key, list(sys.path)\n"
        "import setuptools\n"
        "assert sys.path != known\n"
        "assert installed_source().key == before"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_headers_of_a_distribution_are_those_that_the_library_reads():
    """All that are installed: name, version and requirements, on which the text depends."""
    for distribution in metadata.distributions():
        assert _headers(distribution)["Name"] == distribution.metadata["Name"]
        assert _headers(distribution)["Version"] == distribution.version
        assert _requires(distribution) == list(distribution.requires or ())


def test_installed_source_lists_without_reading_and_samples(tmp_path):
    source = installed_source()
    assert {part.domain for part in source.parts} <= {"code", "cpp", "docs", "notes", "tests"}
    assert source.key == installed_source().key
    spool = spool_of(source, tmp_path, max_bytes=1_000_000)
    assert 930_000 < spool.lengths.sum() <= 1_000_000
    sizes = used(spool)
    assert set(sizes) >= {"code", "docs", "notes"}
    assert all(150_000 < size < 260_000 for size in sizes.values()), sizes
    packages = {name.split("/")[0] for name in spool.names}
    assert len(packages) > 10, "a sample of the whole has many packages in it"


def test_jsonl_text_is_exact(tmp_path):
    texts = [write_text(i, 30) + "é日🦊\u2028 tab\t" for i in range(20)]
    (tmp_path / "x.jsonl").write_text("".join(json.dumps({"body": t}) + "\n" for t in texts))
    spool = spool_of(user_source(str(tmp_path / "x.jsonl"), text_field="body"), tmp_path)
    data = spool.data()
    assert {spool.text(data, i) for i in range(len(spool))} == {t.strip("\n") for t in texts}
