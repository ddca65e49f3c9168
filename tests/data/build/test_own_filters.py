"""Filters of the user: what they drop and why, what their fingerprints are of, and what is said of wrong ones."""

import errno
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.data.build.corpora import build, build_as_ranks, digest, prose, settings
from tests.draws import examples
from tilewright.cli.app import run
from tilewright.core.errors import ConfigError, DataError
from tilewright.data.common.records import Record
from tilewright.data.engine.build_context import Context
from tilewright.data.engine.build_settings import DataBuild, FiltersSection, load_data_toml
from tilewright.data.engine.executors.local_executor import LocalExecutor
from tilewright.data.engine.executors.ray_executor import _paths
from tilewright.data.engine.record_tables import RECORDS, TableWriter, record_row, rows
from tilewright.data.stages.kept_records import KEPT
from tilewright.data.stages.text.user_filters import apply_own, made, own_filters

FILTER = """
from dataclasses import dataclass
from pathlib import Path

from tilewright import DropReason, RecordFilter


@dataclass
class Words(RecordFilter):
    least: int
    names: Path | None = None

    def judge(self, record):
        words = record.text.split()
        if "burst" in words:
            raise ValueError("it burst")
        if self.names and words[0] in self.names.read_text().split():
            return DropReason("names", words[0])
        return DropReason("least", len(words), self.least) if len(words) < self.least else None
"""


def write_filter(folder: Path, text: str = FILTER) -> Path:
    path = folder / "words.py"
    path.write_text(text)
    return path


def section(path: Path, least: int, **files: str) -> FiltersSection:
    found = {"use": {"words": f"{path}:Words"}, "settings": {"words": {"least": least}}, "files": {"words": files}}
    return FiltersSection.model_validate(found)


TEXTS = st.lists(
    st.tuples(
        st.sampled_from(("text", "image")),
        st.lists(st.sampled_from(("river", "stone", "anna", "burst", "otto")), min_size=1, max_size=6).map(" ".join),
        st.booleans(),
    ),
    max_size=12,
)


@examples(40)
@given(texts=TEXTS, least=st.integers(0, 5))
def test_each_record_is_judged_once_and_the_others_stay(tmp_path_factory, texts, least):
    """Of records that stay so far, by the words of each, counted here."""
    folder = tmp_path_factory.mktemp("judged")
    (folder / "names.txt").write_text("anna otto")
    for name in ("records", "kept", "out"):
        (folder / name).mkdir()
    with TableWriter(folder / "records" / "records.parquet", RECORDS) as out:
        for number, (modality, text, _) in enumerate(texts):
            out.append(record_row(Record(str(number), modality, "d", text, path=f"{number}.txt")))
    with TableWriter(folder / "kept" / "kept.parquet", KEPT) as out:
        for number, (_, text, stays) in enumerate(texts):
            if stays:
                out.append({"row": number, "digest": bytes(16), "bytes": len(text), "language": ""})
    filters = own_filters(section(write_filter(folder), least, names=str(folder / "names.txt")))
    where = {"records": folder / "records", "kept": folder / "kept", "filters": filters}
    counts = apply_own(0, SimpleNamespace(), folder / "out", **where)
    kept, gone = [], {}
    for number, (modality, text, stays) in enumerate(texts):
        words = text.split()
        if stays and modality == "text" and "burst" in words:
            gone[str(number)] = ("words: failed", "ValueError: it burst")
        elif stays and modality == "text" and words[0] in ("anna", "otto"):
            gone[str(number)] = ("words: names", words[0])
        elif stays and modality == "text" and len(words) < least:
            gone[str(number)] = ("words: least", str(len(words)))
        elif stays:
            kept.append(number)
    assert [row["row"] for row in rows(folder / "out" / "kept.parquet")] == kept
    rejects = {row["id"]: (row["rule"], row["value"]) for row in rows(folder / "out" / "rejects.parquet")}
    assert rejects == gone
    assert (counts["records"], counts["rejects"]) == (len(kept), len(gone))
    assert counts["failed"] == sum(rule.endswith("failed") for rule, _ in gone.values())


def judged(folder: Path, filters) -> list[tuple[str, str]]:
    """(rule, value) of what the filters drop of two records."""
    for name in ("records", "kept", "out"):
        (folder / name).mkdir(exist_ok=True)
    with (
        TableWriter(folder / "records" / "records.parquet", RECORDS) as records,
        TableWriter(folder / "kept" / "kept.parquet", KEPT) as kept,
    ):
        for number, text in enumerate(("river stone", "anna")):
            records.append(record_row(Record(str(number), "text", "d", text, path=f"{number}.txt")))
            kept.append({"row": number, "digest": bytes(16), "bytes": len(text), "language": ""})
    where = {"records": folder / "records", "kept": folder / "kept", "filters": filters}
    apply_own(0, SimpleNamespace(), folder / "out", **where)
    return [(row["rule"], row["value"]) for row in rows(folder / "out" / "rejects.parquet")]


@pytest.mark.parametrize("kind", ["file", "module"])
def test_filters_of_one_module_share_its_classes(tmp_path, monkeypatch, kind):
    """A class that names itself or another class of its module finds the one that its object is of."""
    name = f"shared_{kind}_{tmp_path.name}".replace("-", "_")
    text = FILTER.replace("        words =", "        assert isinstance(self, Words)\n        words =", 1)
    path = tmp_path / f"{name}.py"
    path.write_text(text + "\n\nclass Few(Words):\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    module = str(path) if kind == "file" else name
    use = {"one": f"{module}:Words", "two": f"{module}:Few", "three": f"{module}:Words"}
    given = {"one": {"least": 0}, "two": {"least": 0}, "three": {"least": 2}}
    filters = own_filters(FiltersSection.model_validate({"use": use, "settings": given}))
    assert judged(tmp_path, filters) == [("three: least", "1")]
    kinds = [type(made(one)) for one in filters]
    assert kinds[0] is kinds[2]
    assert issubclass(kinds[1], kinds[0])


@pytest.mark.parametrize("kind", ["file", "module"])
def test_each_text_of_a_module_judges_by_itself(tmp_path, monkeypatch, kind):
    """Texts of one size and one second, in one process, forth and back: by their own classes and globals."""
    name = f"changed_{kind}_{tmp_path.name}".replace("-", "_")
    path = tmp_path / f"{name}.py"
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    module = str(path) if kind == "file" else name
    for least in (1, 2, 1):
        path.write_text(FILTER.replace("< self.least", "< LEAST") + f"\nLEAST = {least}\n")
        os.utime(path, (10**9, 10**9))
        section = {"use": {"one": f"{module}:Words"}, "settings": {"one": {"least": 0}}}
        found = judged(tmp_path, own_filters(FiltersSection.model_validate(section)))
        assert found == ([("one: least", "1")] if least == 2 else [])


def test_a_file_that_changes_while_units_are_made_is_an_error(tmp_path):
    """The unit would be kept under the digest of another content."""
    names = tmp_path / "names.txt"
    names.write_text("otto")
    filters = own_filters(section(write_filter(tmp_path), 0, names=str(names)))
    assert judged(tmp_path, filters) == []
    names.write_text("anna")
    with pytest.raises(DataError, match="File of a filter changed"):
        judged(tmp_path, filters)
    assert judged(tmp_path, own_filters(section(tmp_path / "words.py", 0, names=str(names)))) == [
        ("words: names", "anna")
    ]


def test_an_error_of_the_machine_drops_no_record(tmp_path):
    raised = f"raise OSError({errno.ENOSPC}, 'No space left on device')"
    filters = own_filters(section(write_filter(tmp_path, FILTER.replace("words = record.text.split()", raised)), 0))
    with pytest.raises(OSError, match="No space left"):
        judged(tmp_path, filters)


@pytest.mark.parametrize("values", [[1, 2], [True, False], [1, 2.5], ["a"], [1, "a"], []])
def test_a_list_reaches_the_constructor_as_it_is_written(tmp_path, values):
    given = section(write_filter(tmp_path), 0).model_dump(mode="json")
    given["settings"]["words"]["names"] = values
    (one,) = own_filters(FiltersSection.model_validate(given))
    found = vars(made(one))["names"]
    assert [(type(value), value) for value in found] == [(type(value), value) for value in values]


def test_an_error_of_the_package_around_a_module_names_the_filter(tmp_path, monkeypatch):
    package = f"broken_{tmp_path.name}".replace("-", "_")
    (tmp_path / package).mkdir()
    (tmp_path / package / "__init__.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="ZeroDivisionError"):
        own_filters(FiltersSection(use={"words": f"{package}.words:Words"}))


def test_nodes_are_asked_for_the_files_of_filters(corpus, tmp_path):
    found = _paths(Context(config(corpus), tmp_path))
    assert {str(corpus / "words.py"), str(corpus / "names.txt")} <= set(found)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("own")
    for number in range(16):
        path = root / "in" / "ab"[number % 2] / f"{number}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(prose(number, 20 if number < 3 else 90))
    (root / "in" / "a" / "odd.txt").write_text("burst " + prose(99, 90))
    write_filter(root)
    (root / "names.txt").write_text("nothing\n")
    return root


def config(corpus: Path, least: int = 50) -> DataBuild:
    filters = section(corpus / "words.py", least, names=str(corpus / "names.txt")).model_dump()
    return settings(corpus / "in", duplicates={"near": False}, tokenizer={"vocab_size": 300}, filters=filters)


@pytest.fixture(scope="module")
def built(corpus, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("built") / "out"
    build(config(corpus), out)
    return out


def test_rejects_have_the_filter_rule_value_and_threshold(built):
    gone = {row["path"]: row for row in pq.read_table(built / "rejects").to_pylist()}
    assert {path: (r["stage"], r["rule"], r["value"], r["threshold"]) for path, r in gone.items()} == {
        "a/0.txt": ("filters", "words: least", "20", "50"),
        "b/1.txt": ("filters", "words: least", "20", "50"),
        "a/2.txt": ("filters", "words: least", "20", "50"),
        "a/odd.txt": ("filters", "words: failed", "ValueError: it burst", ""),
    }
    read = json.loads((built / "dataset.json").read_bytes())["summary"]["read"]
    for name, counts in read.items():
        assert counts["found"] == counts["used"] + counts["refused"], name


def test_two_ranks_give_the_same_bytes(corpus, built, tmp_path):
    build_as_ranks(config(corpus), tmp_path)
    assert digest(tmp_path) == digest(built)


@pytest.mark.slow
@pytest.mark.dist
def test_two_processes_give_the_same_bytes(corpus, built, tmp_path):
    with LocalExecutor(2) as executor:
        build(config(corpus), tmp_path, executor)
    assert digest(tmp_path) == digest(built)


def test_what_a_filter_says_is_kept_until_something_that_it_depends_on_changes(corpus, tmp_path):
    """Its text, its settings and its files. After each change the dataset is that of a fresh build."""
    for name in ("words.py", "names.txt"):
        (tmp_path / name).write_text((corpus / name).read_text())
    (tmp_path / "in").symlink_to(corpus / "in")
    out, first = tmp_path / "out", prose(5, 90).split()[0]

    def made(least: int = 50) -> set[str]:
        before = {path: path.stat().st_mtime_ns for path in out.rglob("receipt.json")}
        build(config(tmp_path, least), out)
        after = {path: path.stat().st_mtime_ns for path in out.rglob("receipt.json")}
        return {path.relative_to(out).parts[1] for path, time in after.items() if before.get(path) != time}

    assert "filters" in made()
    assert made() == set()
    write_filter(tmp_path, FILTER + "# a comment\n")
    assert made() == {"filters"}, "the same bytes as before, so nothing after it runs again"
    (tmp_path / "names.txt").write_text(first)
    assert {"filters", "split", "encode"} <= made()
    assert "b/5.txt" in {row["path"] for row in pq.read_table(out / "rejects").to_pylist()}
    assert {"filters", "split", "encode"} <= made(least=10)
    build(config(tmp_path, 10), tmp_path / "fresh")
    assert digest(out) == digest(tmp_path / "fresh")


WRONG = {
    "no such file": ("none.py:Words", "", {}, "filters.use.words"),
    "No module named 'nowhere'": ("nowhere.at.all:Words", "", {}, "filters.use.words"),
    "has no attribute 'Other'": ("words.py:Other", "", {}, "filters.use.words"),
    "SyntaxError": ("words.py:Words", "def judge(", {}, "filters.use.words"),
    "ZeroDivisionError": ("words.py:Words", "1 / 0", {}, "filters.use.words"),
    "derives from": ("words.py:Words", "class Words: pass", {}, "filters.use.words"),
    "no method judge": (
        *("words.py:Words", "import tilewright\nclass Words(tilewright.RecordFilter): pass", {}),
        "filters.use.words",
    ),
    "unexpected keyword argument 'most'": ("words.py:Words", FILTER, {"most": 3}, "filters.settings.words"),
}


@pytest.mark.parametrize("words", WRONG)
def test_a_wrong_filter_ends_the_build_before_anything_is_read(corpus, tmp_path, words):
    use, text, given, where = WRONG[words]
    write_filter(tmp_path, text)
    use = str(tmp_path / use) if ".py:" in use else use
    wrong = settings(corpus / "in", filters={"use": {"words": use}, "settings": {"words": given}})
    with pytest.raises(ConfigError, match=words) as caught:
        build(wrong, tmp_path / "out")
    (problem,) = caught.value.problems
    assert problem.where == where
    assert problem.need
    assert problem.try_
    assert not (tmp_path / "out" / "work" / "read").exists()


def test_a_filter_that_returns_no_reason_is_an_error(corpus, tmp_path):
    write_filter(tmp_path, FILTER.replace('return DropReason("least", len(words), self.least) if', "return True if"))
    wrong = config(corpus).model_copy(update={"filters": section(tmp_path / "words.py", 50)})
    with pytest.raises(ConfigError, match="does not return a reason"):
        build(wrong, tmp_path / "out")


def test_files_and_classes_are_beside_the_toml(tmp_path, caplog):
    toml = tmp_path / "data.toml"
    toml.write_text(
        '[filters]\nuse = { one = "words.py:Words", two = "package.module:Words" }\n'
        '[filters.files.one]\nnames = "names.txt"\n[filters.settings.one]\nleast = 3\n'
    )
    found = load_data_toml(toml).filters
    assert found.use == {"one": f"{tmp_path}/words.py:Words", "two": "package.module:Words"}
    assert found.files == {"one": {"names": str(tmp_path / "names.txt")}}
    assert found.settings == {"one": {"least": 3}}
    toml.write_text('[filters]\nuse = { one = "words" }\n[filters.settings.other]\nleast = 3\n')
    with pytest.raises(ConfigError, match="Filter has no class") as caught:
        load_data_toml(toml)
    assert "Arguments of no filter" in str(caught.value)
    toml.write_text(
        '[filters]\nuse = { one = "words.py:Words" }\n[filters.files.one]\nnames = "names.txt"\n'
        '[filters.settings.one]\nnames = "anna"\n'
    )
    with pytest.raises(ConfigError, match="given twice"):
        load_data_toml(toml)
    missing = section(write_filter(tmp_path), 3, names=str(tmp_path / "none.txt"))
    with pytest.raises(DataError, match="File of a filter does not exist"):
        own_filters(missing)


def test_the_command_says_on_how_many_records_a_filter_failed(corpus, tmp_path, capsys):
    (tmp_path / "data.toml").write_text(
        f'[read]\nsource = "{corpus}/in"\n[filters]\nuse = {{ words = "{corpus}/words.py:Words" }}\n'
        "[filters.settings.words]\nleast = 1\n[duplicates]\nnear = false\n[tokenizer]\nvocab_size = 300\n"
    )
    assert run(["data", "build", str(tmp_path / "data.toml"), "--executor", "local", "--processes", "1"]) == 0
    assert "records on which a filter failed: 1 | tilewright data inspect" in capsys.readouterr().out
