"""`tilewright data`: a build as a user runs it, its words, its page, what inspect shows, and bad input."""

import importlib.util
import json
import re
import time
from pathlib import Path

import pytest
import transformers

from tests.commands import Command, workers_from_fork_server
from tests.contracts.observe import fixed_ceilings
from tests.data.build.corpora import digest, write_corpus, write_media
from tilewright.cli.app import run
from tilewright.cli.open_model import open_model
from tilewright.core.config.load import load_recipe
from tilewright.core.errors import DataError
from tilewright.data.common.tokenizer import load_tokenizer, train_tokenizer
from tilewright.data.prepare import prepare

TOML = '[read]\nsource = "in"\n[rules]\nmin_words = 20\n[tokenizer]\nvocab_size = 400\n'
SMALL = {
    "model.dim": "16",
    "model.num_layers": "1",
    "model.num_heads": "2",
    "model.ffn_dim": "32",
    "data.seq_len": "32",
}
SMALL |= {"train.steps": "2", "train.global_batch_size": "3", "train.micro_batch_size": "3", "train.compile": "off"}
SMALL |= {"train.eval_batches": "1", "train.sample_tokens": "0", "run.threads": "1", "log.report": "false"}
SMALL |= {"ops.cross_entropy": "ref", "ops.adam": "ref"}


@pytest.fixture(autouse=True)
def _workers(monkeypatch):
    workers_from_fork_server(monkeypatch)


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_corpus(tmp_path / "in")
    (tmp_path / "data.toml").write_text(TOML)
    return tmp_path


def test_build_then_inspect(here, capsys):
    assert run(["data", "build", "--processes", "1"]) == 0
    told = capsys.readouterr().out
    assert "60 of 67 documents" in told
    assert "3 exact duplicates" not in told
    assert "2 exact duplicates and 1 near-copy dropped | " in told
    assert re.search(r"KiB, \d+ domains\n", told)
    assert "tilewright train --data.source data" in told
    assert run(["data", "inspect", "data", "--reject", "short.txt"]) == 0
    shown = capsys.readouterr().out
    assert "rule: min_words" in shown
    assert "value: 2" in shown
    assert "threshold: 20" in shown
    assert run(["data", "inspect", "data", "--record", "prose/07.txt", "--json"]) == 0
    (record,) = json.loads(capsys.readouterr().out)
    assert (here / "in" / record["path"]).read_bytes()[record["start"] : record["stop"]].decode().strip() == record[
        "text"
    ]
    assert run(["data", "inspect", "data", "--reject", record["id"]]) == 2
    assert f"data inspect data --record {record['id']}" in capsys.readouterr().err
    page = (here / "data" / "report.html").read_text()
    for words in (
        "near-copy",
        "min_words",
        "prose/short.txt",
        "too short",
        "Measures and thresholds",
        "finding exact dup",
    ):
        assert words in page
    assert "http" not in page.replace("http://www.w3.org", "")


def test_a_build_that_drops_nothing_says_so(here, capsys):
    (here / "data.toml").write_text('[read]\nsource = "one"\n[tokenizer]\nvocab_size = 300\n')
    (here / "one").mkdir()
    for number, path in enumerate(sorted((here / "in" / "prose").glob("0[4-7].txt"))):
        (here / "one" / f"{number}.txt").write_text(path.read_text())
    assert run(["data", "build", "--processes", "1"]) == 0
    assert "0 exact duplicates and 0 near-copies dropped" in (told := capsys.readouterr().out)
    assert ", 1 domain\n" in told
    page = (here / "data" / "report.html").read_text()
    assert "Nothing was dropped." in page
    assert "0 % of what was read is dropped" in page


def test_text_of_records_is_escaped_in_the_page(here):
    (here / "in" / "prose" / "short.txt").write_text("<script>alert(1)</script>")
    assert run(["data", "build", "--processes", "1"]) == 0
    page = (here / "data" / "report.html").read_text()
    assert "&lt;script&gt;" in page
    assert "<script" not in page


def test_diff_of_two_builds(here, capsys):
    assert run(["data", "build", "--processes", "1", "-q"]) == 0
    (here / "other.toml").write_text(TOML.replace("min_words = 20", "min_words = 1"))
    assert run(["data", "build", "other.toml", "--processes", "1", "-q"]) == 0
    capsys.readouterr()
    assert run(["data", "inspect", "data", "--diff", "other", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["same dataset"] is False
    assert found["first stage that differs"] == "rules"
    assert found["settings"] == [["rules.min_words", "20", "1"]]
    assert ["min_words", "1", "0"] in found["dropped"]


def test_from_a_step_to_its_files(here, capsys):
    assert run(["data", "build", "--processes", "1", "-q"]) == 0
    settings = [argument for name, value in SMALL.items() for argument in (f"--{name}", value)]
    train = ["train", "--data.source", "data", "--data.cache_dir", "cache", "--run.name", "a", *settings]
    assert run([*train, "-q"]) == 0
    capsys.readouterr()
    started = time.process_time()
    assert run(["data", "inspect", "--run", "a", "--step", "2", "--json"]) == 0
    assert time.process_time() - started < 2
    samples = json.loads(capsys.readouterr().out)
    assert [sample["sample"] for sample in samples] == [3, 4, 5]
    for document in (document for sample in samples for document in sample["documents"]):
        data = (here / "in" / document["path"]).read_bytes()[document["file_start"] : document["file_stop"]]
        text = json.loads(data)["text"] if document["part"].startswith("row") else data.decode()
        assert document["text"].strip("\ufffd") in text
    assert run(["data", "inspect", "--run", "a", "--step", "3"]) == 2
    assert "1 to 2" in capsys.readouterr().err


@pytest.mark.slow
def test_a_plan_has_the_vocabulary_of_a_built_dataset(here, capsys, monkeypatch):
    """The parameters that are planned are those of the model that is trained: its embedding has the build's tokens."""
    monkeypatch.setattr("tilewright.planner.machine.ceilings.measure", fixed_ceilings)
    assert run(["data", "build", "--processes", "1", "-q"]) == 0
    settings = [argument for name, value in SMALL.items() for argument in (f"--{name}", value)]
    settings += ["--data.source", "data", "--data.cache_dir", "cache"]
    capsys.readouterr()
    assert run(["plan", "default", *settings, "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)["num_parameters"]
    assert run(["train", "default", *settings, "--run.name", "a", "-q"]) == 0
    model = open_model("a", device="cpu").model
    trained = {id(parameter): parameter.numel() for parameter in model.parameters()}
    assert planned == sum(trained.values())
    assert load_tokenizer(Path("data/tokens/tokenizer")).vocab_size in {p.shape[0] for p in model.parameters()}


def test_an_image_model_trains_on_a_built_folder(tmp_path, monkeypatch, capsys):
    """From image files to a step, and from that step back to the files."""
    monkeypatch.chdir(tmp_path)
    write_media(tmp_path / "in")
    (tmp_path / "data.toml").write_text('[read]\nsource = "in"\n[media]\nimage_size = 32\n')
    assert run(["data", "build", "--processes", "1", "-q"]) == 0
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    transformers.ViTConfig(image_size=32, patch_size=8, num_labels=2, **sizes).save_pretrained("model")
    settings = SMALL | {"model.kind": "hf", "model.path": "model", "model.task": "image_classification"}
    settings |= {"data.source": "data", "data.image_size": "32", "run.name": "a", "run.device": "cpu"}
    of_text = ("model.dim", "model.num_layers", "model.num_heads", "model.ffn_dim", "data.seq_len")
    given = [argument for name, value in settings.items() if name not in of_text for argument in (f"--{name}", value)]
    assert run(["train", *given, "-q"]) == 0
    metrics = [json.loads(line) for line in Path("runs/a/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in metrics if row.get("loss", 0) > 0] == [1, 2]
    capsys.readouterr()
    assert run(["data", "inspect", "--run", "a", "--step", "2", "--json"]) == 0
    samples = json.loads(capsys.readouterr().out)
    assert [sample["sample"] for sample in samples] == [3, 4, 5]
    assert all((tmp_path / "in" / document["name"]).is_file() for s in samples for document in s["documents"])


def test_what_a_run_cannot_have_of_a_built_dataset(here):
    assert run(["data", "build", "--processes", "1", "-q"]) == 0
    notes = load_recipe(None, {"data.source": "data", "data.max_bytes": "5", "data.holdout": "0.1"}, environ={}).notes
    assert [note.partition(" ")[0] for note in notes] == ["data.max_bytes", "data.holdout"]
    assert all("data.source is a built dataset" in note for note in notes)
    cache = {"cache_dir": "cache", "seq_len": 32}
    assert prepare("data", domains=("rows",), **cache).domains == ("rows",)
    with pytest.raises(DataError, match="some of: prose, rows"):
        prepare("data", domains=("none",), **cache)
    with pytest.raises(DataError, match="holds rows of another format"):
        prepare("data", format="chat", **cache)
    own = Path("data/tokens/tokenizer")
    assert prepare("data", tokenizer=str(own), **cache).vocab_size == load_tokenizer(own).vocab_size
    train_tokenizer(["other text " * 50], 300).save("other")
    with pytest.raises(DataError, match="another tokenizer"):
        prepare("data", tokenizer="other", **cache)
    torn = Path("data/tokens/train.npy")
    data = bytearray(torn.read_bytes())
    data[-1] ^= 1
    torn.unlink()
    torn.write_bytes(data)
    with pytest.raises(DataError, match="Built dataset is damaged"):
        prepare("data", **cache)


def test_a_local_build_under_torchrun_is_refused(here, capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert run(["data", "build"]) == 5
    told = " ".join(capsys.readouterr().err.split())
    assert "data build --executor local runs in one process" in told
    assert "data build --executor rank" in told


def test_what_inspect_matches(here, capsys):
    """Names of files, stages and rules as they are or by a glob, never a part of one; else it says what there is."""
    assert run(["data", "build", "--processes", "1"]) == 0
    capsys.readouterr()

    def paths(option: str, wanted: str) -> set[str]:
        assert run(["data", "inspect", "data", option, wanted, "--most", "99", "--json"]) == 0
        return {row["path"] for row in json.loads(capsys.readouterr().out)}

    assert paths("--reject", "min_words") == paths("--reject", "rules") == {"prose/short.txt"}
    assert (
        paths("--reject", "exact dup*") == paths("--reject", "exact duplicate") == {"prose/copy.txt", "rows/more.txt"}
    )
    assert paths("--reject", "copy.txt") == paths("--reject", "prose/c*") == {"prose/copy.txt"}
    assert paths("--record", "1?.txt") == {f"prose/{i}.txt" for i in range(10, 20)}
    for option, wanted, words in (
        (
            "--reject",
            "min_wrods",
            ["No reject matches 'min_wrods'", "min_words (1)", "exact duplicate (2)", "--reject min_words"],
        ),
        ("--reject", "words", ["No reject matches 'words'", "--reject min_words"]),
        ("--record", "prose/0", ["No record matches 'prose/0'", "--record '*prose/0*'"]),
        ("--record", "short.txt", ["No record matches", "data inspect data --reject short.txt"]),
    ):
        assert run(["data", "inspect", "data", option, wanted]) == 2
        told = " ".join(capsys.readouterr().err.split())
        assert all(word in told for word in words), told
    assert run(["data", "inspect", "data", "--record", "prose/*", "--most", "2"]) == 0
    assert "more: --most" in capsys.readouterr().out


@pytest.mark.dist
@pytest.mark.slow
def test_two_ranks_build_what_one_process_builds(here):
    assert run(["data", "build", "--processes", "1", "--out", "one"]) == 0
    command = ["data", "build", "--executor", "rank", "--out", "two"]
    places = [{"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"} for rank in range(2)]
    ranks = [Command(command, environ=place) for place in places]
    for rank in ranks:
        said, _ = rank.communicate(timeout=120)
        assert rank.returncode == 0, said
    assert digest(here / "two") == digest(here / "one")


def test_ray_that_is_not_there(here, capsys, monkeypatch):
    """The missing extra, and a cluster that does not answer: each in four parts, before a unit runs."""
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    assert run(["data", "build", "--executor", "ray", "--processes", "2"]) == 2
    assert "the Ray cluster 127.0.0.1:1 has its own number" in " ".join(capsys.readouterr().err.split())
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "ray" else find(name, *a))
    assert run(["data", "build", "--executor", "ray"]) == 5
    told = capsys.readouterr().err
    for words in ("needs the package ray", "the extra `ray`", "pip install 'tilewright[ray]'"):
        assert words in told
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert run(["data", "build", "--executor", "ray"]) == 5
    assert "data build --executor ray runs in one process" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["build", "none.toml"], "No such data.toml"),
        (["build", "--executor", "rank", "--processes", "2"], "a rank is one process"),
        (["build", "in"], "Settings of a data build are a file, not a folder"),
        (["build", "."], "try tilewright data build data.toml"),
        (["inspect"], "data inspect needs DIR, the folder of a built dataset"),
        (["inspect", "--record", "a"], "data inspect needs DIR, the folder of a built dataset"),
        (["inspect", "in"], "No built dataset at this path where in got no dataset.json"),
        (["inspect", "none"], "No built dataset at this path where none got no such folder"),
        (["inspect", "--step", "3"], "--run and --step belong together: --run RUN is missing"),
        (["inspect", "in", "--run", "a", "--step", "3"], "--run and DIR are each for another question"),
        (["inspect", "in", "--record", "a", "--diff", "b"], "--record and --diff are each for another question"),
        (["skip"], "Missing argument 'RUN'"),
        (["skip", "none"], "Missing option '--steps'"),
        (["skip", "none", "--steps", "3"], "--steps 3 is not A:B"),
        (["skip", "none", "--steps", "3:4"], "No such run"),
        (["inspect", "--run", "nowhere", "--step", "3"], "No such run"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_input(here, capsys, arguments, words):
    assert run(["data", *arguments]) == 2
    assert words in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("group", ["data", "precision"])
def test_a_group_alone_is_its_help(capsys, group):
    assert run([group]) == 0
    said = capsys.readouterr()
    assert said.out.startswith(f"Usage: tilewright {group} ")
    assert said.err == ""
