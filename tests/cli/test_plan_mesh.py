"""`plan --world`: what it prints and writes, JSON, and each error with its exit code."""

import json
import re
import tomllib
from xml.etree import ElementTree

import pytest

from tilewright.cli.app import run
from tilewright.cli.commands.machine.mesh_fit import fitting
from tilewright.core.config.load import load_recipe
from tilewright.core.errors import ConfigError
from tilewright.core.units import format_bytes, format_share
from tilewright.planner.simulate.torch_tables import KeptTables

SMALL = [
    *("plan", "default", "--on", "h100", "--model.dim", "4096", "--model.num_layers", "8", "--model.num_heads", "2"),
    *("--data.seq_len", "4096", "--data.source", "", "--train.global_batch_size", "8"),
]
ONE = [*SMALL, "--world", "4", "--nodes", "1x4"]


@pytest.fixture(scope="module", autouse=True)
def _made_once():
    """A table of a schedule is made once for all tests of this file."""
    patch, tables = pytest.MonkeyPatch(), KeptTables()
    patch.setattr("tilewright.planner.simulate.torch_tables.KeptTables", lambda: tables)
    yield
    patch.undo()


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_the_best_are_shown_with_what_binds_and_why_others_lost(capsys):
    assert run(ONE) == 0
    out = capsys.readouterr().out
    assert "h100 x 4: " in out
    assert "MFU" in out
    for text in (
        "2 lost: ",
        "5 lost: ",
        "4 x 700 W",
        "searched: ",
        "published, not measured",
        "nvlink4",
        "guessed: collectives",
    ):
        assert text in out, text


def test_what_is_written_is_a_recipe_that_train_reads(capsys, tmp_path):
    assert run([*ONE, "--json", "--out", "found.toml"]) == 0
    found = json.loads(capsys.readouterr().out)
    best = found["best"][0]
    text = (tmp_path / "found.toml").read_text()
    recipe = load_recipe("found.toml", {}, environ={}).recipe
    assert tomllib.loads(text)["extends"] == "default"
    for name, value in best["settings"].items():
        section, _, field = name.partition(".")
        read = getattr(getattr(recipe, section), field)
        assert (list(read) if isinstance(read, tuple) else read) == value or f"# {name} = " in text, name
    assert len(found["best"]) == 5
    assert sum(best["parts"].values()) == pytest.approx(1)
    assert found["energy"]["boards"] == 4
    assert [one["seconds"] for one in found["best"]] == sorted(one["seconds"] for one in found["best"])


def test_a_line_in_depth_says_where_its_time_goes(capsys):
    assert run([*ONE, "--why", "2"]) == 0
    out = capsys.readouterr().out
    for text in ("lost: ", "(line 1: ", "by owner", "not hidden behind computation", "bytes at the peak of each rank"):
        assert text in out, text


def test_another_recipe_is_compared_under_the_same_settings(capsys):
    assert run([*ONE, "--compare", "fp8_tile", "--json"]) == 0
    other = json.loads(capsys.readouterr().out)["compared"]
    assert other["setting"]
    assert run(["plan", "fp8_tile", *ONE[2:], "--json"]) == 0
    best = json.loads(capsys.readouterr().out)["best"][0]
    assert other["memory"] == format_bytes(best["peak_bytes"])
    assert other["MFU"] == format_share(best["mfu"])


def test_what_would_be_faster_is_accepted_and_as_fast_as_said(capsys):
    asked = [*ONE, "--json"]
    assert run(asked) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["faster"]
    assert [one["gain"] for one in told["faster"]] == sorted((one["gain"] for one in told["faster"]), reverse=True)
    for one in told["faster"]:
        typed = [text for name, value in one["settings"].items() for text in (f"--{name}", str(value))]
        assert run([*asked, *typed]) == 0
        best = json.loads(capsys.readouterr().out)["best"][0]
        assert best["tokens_per_s"] == pytest.approx(one["tokens_per_s"]), one
        assert one["gain"] == pytest.approx(one["tokens_per_s"] / told["best"][0]["tokens_per_s"])


def test_a_page_is_well_formed_and_has_what_the_terminal_says(capsys, tmp_path):
    assert run([*ONE, "--link", "intra=2GB/s", "--html", "page.html"]) == 0
    out, page = capsys.readouterr().out, (tmp_path / "page.html").read_text()
    charts = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    assert len(charts) == (3 if "pp " in out else 2)
    assert ("the update are not drawn: the whole step takes" in page) == ("pp " in out)
    assert '<td class="no">recomputation' not in page, "words are to the left"
    for chart in charts:
        ElementTree.fromstring(chart)
    for text in ("Why the others lost", "given: ", "published, not measured", "GiB", "recomputation"):
        assert text in page, text
    assert "http" not in page.replace("http://www.w3.org", "")


def test_gradients_are_sent_as_the_recipe_says(capsys):
    few = ["--parallel.grad_sync", "bf16", "--json"]
    assert run([*ONE, *few, "--out", "found.toml"]) == 0
    best = json.loads(capsys.readouterr().out)["best"][0]
    assert best["settings"]["parallel.grad_sync"] == "bf16"
    assert load_recipe("found.toml", {}, environ={}).recipe.parallel.grad_sync == "bf16"


def test_nothing_fits(capsys):
    assert run([*ONE, "--device-memory", "3GiB"]) == 3
    error = capsys.readouterr().err
    for text in ("does not fit 4 GPUs in any mesh", "nearest of", "need"):
        assert text in error, text
    advice = re.search("try +(.*)", error)[1].split(" or ")
    assert [one.split()[0] for one in advice] == ["--device-memory", "--world"]
    assert run([*ONE, "--why", "1", *advice[0].split()]) == 0, "as it is typed"
    assert run([*SMALL, "--why", "1", "--device-memory", "3GiB", *advice[1].split()]) == 0, "as it is typed"


def test_what_would_fit_is_tried_before_it_is_named():
    class Finder:
        def __init__(self, world, options):
            self.world, self.on = world, options["on"]

        def fits(self):
            if self.world == 8:
                raise ConfigError("No mesh fills the world", got="8", need="another one", try_="16")
            return small and (self.world >= 16 or self.on == "b200")

    options, small = {"on": "h100", "nodes": "1x4", "device_memory": ""}, True
    assert fitting(Finder, 4, options) == ["--world 16 --nodes 4x4", "--on b200"]
    assert fitting(Finder, 4, options | {"nodes": "", "on": "b200"}) == ["--world 16"]
    small = False
    assert fitting(Finder, 4, options) == []


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ([*SMALL, "--nodes", "2x8"], "--nodes without --world"),
        ([*ONE, "--fastest"], "--fastest is of the plan of one device"),
        ([*ONE, "--disk-memory", "1GiB"], "--disk-memory is of the plan of one device"),
        ([*ONE, "--host-memory", "9GiB"], "--host-memory is of the plan of one device"),
        ([*ONE, "--why", "2", "--compare", "fp32"], "--why and --compare contradict"),
        ([*SMALL, "--why", "layer.1", "--compare", "fp32"], "--why and --compare contradict"),
        ([*SMALL, "--why", "layer.1", "--out", "plan.toml"], "--why and --out contradict"),
        (["plan", "default", "--world", "4"], "--world without the name of a GPU"),
        ([*SMALL, "--world", "4", "--nodes", "3x2"], "Nodes that do not make up the world"),
        ([*ONE, "--link", "inter=quick"], "Unknown link"),
        ([*SMALL, "--world", "11"], "No mesh fills the world"),
        ([*ONE, "--on", "h1000"], "Unknown machine name"),
        ([*ONE, "--why", "6"], "--why names no line"),
        ([*ONE, "--why", "layer.1"], "--why names no line"),
        ([*ONE, "--compare", "gone"], "gone"),
        ([*ONE, "--html", "no/such/folder/page.html"], "cannot be written"),
    ],
)
def test_wrong_options(arguments, what, capsys):
    assert run(arguments) == 2
    error = capsys.readouterr().err
    assert what in error
    assert "try" in error
