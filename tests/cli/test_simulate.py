"""`simulate`: what it prints, its page, JSON, and each error with its exit code."""

import json
import re
from xml.etree import ElementTree

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.planner.simulate.here import tables_here
from tilewright.cli.app import run
from tilewright.parallel.pipeline.stage_split import Pipeline

SMALL = [
    "simulate",
    *["--pp", "2", "--dp", "2", "--microbatches", "4", "--seeds", "2", "--documents", "2", "--layers", "16"],
]
TABLE = "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"


@pytest.fixture(scope="module", autouse=True)
def _made_once():
    """The tables of all tests of this file."""
    names = [("1f1b", 1), ("zbv", 2), ("interleaved", 2), ("interleaved", 4)]
    names += [("interleaved_zero_bubble", 1), ("interleaved_zero_bubble", 2), ("interleaved_deferred", 2)]
    made = tables_here([(Pipeline(2, *name), 4) for name in names])

    def kept(asked):
        for pipeline, count in asked:
            pipeline.check_count(count)
        return {one: made[one] for one in asked}

    patch = pytest.MonkeyPatch()
    patch.setattr("tilewright.planner.simulate.ladder.torch_tables", kept)
    yield
    patch.undo()


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("value", ["1e-300", "1e6", "1e308"])
@pytest.mark.parametrize(
    "option", ["--attention", "--dgrad", "--wgrad", "--forward", "--data", "--reduce", "--optimizer", "--fail-every"]
)
def test_numbers_at_the_ends_of_doubles_are_taken_or_refused(option, value, capsys):
    """All that is shown of a step is a number then, or the option is named."""
    code = run([*SMALL, option, value, "--json"])
    said = capsys.readouterr()
    assert code == 0 or (code == 2 and option in said.err)
    if not code:
        found = json.loads(said.out)["rungs"][0]
        assert 0 < found["seconds"] < float("inf")
        assert -1e-9 <= found["idle"]["min"] <= found["idle"]["max"] <= 1


def test_one_step_is_told_in_words(capsys):
    assert run([*SMALL, "--schedule", "zbv", "--slow", "3=0.8", "--message", "1MiB", "--link", "inter=1GB/s,5us"]) == 0
    out = capsys.readouterr().out
    assert "pp 2 x dp 2, 4 micro-batches per row, rank 3 at 0.8" in out
    for word in ("idle by cause", "critical path", "exposed by rank", "activations"):
        assert word in out


def test_every_option_has_an_effect(capsys):
    def step(*more):
        assert run([*SMALL, "--json", *more]) == 0
        (rung,) = json.loads(capsys.readouterr().out)["rungs"]
        return rung

    plain = step()
    assert plain == step()
    slow_links = ("--link", "inter=1MB/s", "--message", "1MB")
    for more in (
        ("--schedule", "interleaved"), ("--schedule", "interleaved", "--virtual-stages", "4"),
        ("--lengths", "fixed:100"), ("--lengths", "uniform:64,9000"), ("--max-length", "100"), ("--attention", "100"),
        ("--packing", "fixed"), ("--packing", "padded"), ("--packing", "tokens"), ("--layers", "3"),
        ("--slow", "0=0.5"),
        slow_links, ("--forward", "1s"), ("--dgrad", "2"), ("--wgrad", "0.5"), ("--data", "1s"), ("--reduce", "1s"),
        ("--optimizer", "1s"), ("--seeds", "1"),
    ):  # fmt: skip
        assert step(*more) != plain, more
    assert step(*slow_links, "--node", "2") != step(*slow_links)
    assert step(*slow_links, "--link", "intra=1MB/s", "--node", "4") != step(*slow_links, "--node", "4")
    slow = ("--slow", "0-1=0.5", "--layers", "32")
    assert step(*slow, "--split", "same")["seconds"] < step(*slow)["seconds"]
    assert step("--slow", "0=0.5", "--split", "own")["seconds"] < step("--slow", "0=0.5", "--split", "same")["seconds"]


def test_a_ladder_is_a_table_and_a_page_that_is_well_formed(capsys, tmp_path):
    assert run([*SMALL, "--ladder", "--slow", "1=0.8", "--html", "page.html"]) == 0
    out = capsys.readouterr().out
    levers = ("padded", "long as they are", "by tokens", "by cost", "by their speed", "4 stages", "ZBV", "again")
    for lever in levers:
        assert lever in out
    page = (tmp_path / "page.html").read_text()
    charts = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    assert len(charts) == 13
    for chart in charts:
        ElementTree.fromstring(chart)
    assert "http" not in page.replace("http://www.w3.org", "")


@pytest.mark.parametrize("inside", ["", "tokens"])
def test_lengths_are_those_of_a_prepared_dataset(capsys, tmp_path, inside):
    """Of the documents for training: as if they were in a file."""
    folder = tmp_path / "dataset"
    (folder / inside).mkdir(parents=True)
    table = {"split": ["train"] * 40 + ["holdout"] * 2, "domain": ["a"] * 42, "length": [*range(100, 140), 9000, 9000]}
    pq.write_table(pa.table(table), folder / inside / "documents.parquet")
    (tmp_path / "lengths.txt").write_text("\n".join(map(str, range(100, 140))))
    found = []
    for lengths in ("dataset", "lengths.txt"):
        assert run([*SMALL, "--json", "--lengths", lengths]) == 0
        found.append(json.loads(capsys.readouterr().out))
    assert found[0] == found[1]


def test_goodput_of_a_run_that_fails(capsys, tmp_path):
    failing = ["--fail-every", "2.7h", "--checkpoint-stall", "30s"]
    assert run([*SMALL, *failing, "--html", "page.html"]) == 0
    out = capsys.readouterr().out
    assert "a failure every 2h42m" in out
    assert "15m00s to recover" in out
    assert "best every" in out
    assert "Goodput" in (tmp_path / "page.html").read_text()
    shares = []
    for more in ([], ["--recover", "1m"], ["--checkpoint-every", "2h"], ["--checkpoint-stall", "5m"]):
        assert run([*SMALL, "--json", "--fail-every", "2.7h", *more]) == 0
        shares.append(json.loads(capsys.readouterr().out)["goodput"])
    plain, quick, rare, stalled = shares
    assert quick > plain > max(rare, stalled)


def test_a_table_from_a_file_is_simulated(capsys, tmp_path):
    (tmp_path / "own.csv").write_text(TABLE)
    assert run(["simulate", "--table", "own.csv", "--dp", "1", "--seeds", "1", "--json"]) == 0
    (own,) = json.loads(capsys.readouterr().out)["rungs"]
    assert (own["name"], own["microbatches"]) == ("own.csv", 2)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--ladder", "--schedule", "zbv"], "--ladder and --schedule contradict"),
        (["--ladder", "--split", "own"], "--ladder and --split contradict"),
        (["--microbatches", "1"], "does not take"),
        (["--schedule", "1f1b", "--virtual-stages", "2"], "another number of stages"),
        (["--schedule", "interleaved", "--virtual-stages", "1"], "another number of stages"),
        (["--schedule", "2f2b"], "1f1b"),
        (["--layers", "1"], "Fewer layers than stages"),
        (["--slow", "4=0.5"], "--slow names no rank"),
        (["--link", "inter=50GB/s"], "no effect"),
        (["--message", "1MiB"], "take no time"),
        (["--node", "2"], "take no time"),
        (["--message", "1MiB", "--link", "intra=1GB/s"], "nodes of one rank"),
        (["--seeds", "1", "--html", "no/such/folder/page.html"], "cannot be written"),
        (["--message", "1MiB", "--link", "nvlink=1GB/s"], "--link names no link"),
        (["--message", "much"], "not a size"),
        (["--forward", "0"], "--forward is no time"),
        (["--forward", "soon"], "not a duration"),
        (["--lengths", "gone.txt"], "neither a distribution nor a file"),
        (["--lengths", "three.txt"], "fewer documents than a step"),
        (["--lengths", "empty.txt"], "no lengths"),
        (["--lengths", "."], "no lengths"),
        (["--lengths", "broken"], "no lengths"),
        (["--fail-every", "0"], "--fail-every is no time"),
        (["--fail-every", "2h", "--checkpoint-every", "0"], "--checkpoint-every is no time"),
        (["--fail-every", "often"], "not a duration"),
        (["--recover", "1m"], "--recover without --fail-every"),
        (["--table", "gone.csv"], "cannot be read"),
    ],
)
def test_bad_input_is_refused_in_four_parts(capsys, tmp_path, arguments, says):
    (tmp_path / "three.txt").write_text("1\n2\n3\n")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "documents.parquet").write_text("no table")
    start = SMALL if "--table" not in arguments else ["simulate"]
    assert run([*start, *arguments]) == 2
    error = capsys.readouterr().err
    assert says in error
    assert "Traceback" not in error
    assert "  try " in error


@pytest.mark.parametrize(
    ("table", "says"),
    [
        ("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n", "rank 1 is at 1F1, which waits for 0F1 of rank 0"),
        ("0F0,0B0\n1F0\n", "not a whole step"),
        ("0F0,zero\n", "no pass"),
        ("0F0,0B0,1F0,1B0\n2F0,2B0\n", "different numbers of stages"),
        ("", "not a whole step"),
    ],
)
def test_a_table_that_cannot_be_run_is_named(capsys, tmp_path, table, says):
    (tmp_path / "own.csv").write_text(table)
    assert run(["simulate", "--table", "own.csv", "--dp", "1", "--seeds", "1"]) == 2
    assert says in capsys.readouterr().err


def test_a_table_and_a_schedule_contradict_each_other(capsys, tmp_path):
    (tmp_path / "own.csv").write_text(TABLE)
    assert run(["simulate", "--table", "own.csv", "--pp", "2"]) == 2
    assert "contradict" in capsys.readouterr().err
