"""Commands on the run folder of somebody else: nothing in it is run, and damage is an error without a traceback."""

import json
import shutil

import pytest

from tests.training.plants import KINDS, change_index, plant_pickle, reseal
from tests.training.tiny import settings, tiny
from tilewright.cli.app import run
from tilewright.core.errors import EXIT_INPUT
from tilewright.training.session import train


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory):
    runs = tmp_path_factory.mktemp("trained")
    train(tiny(data, runs, train__steps=2, checkpoint__interval=1, train__sample_tokens=0))
    return runs / "tiny"


@pytest.fixture
def stranger(trained, tmp_path, monkeypatch):
    """A copy of the run in a folder that is worked in."""
    monkeypatch.chdir(tmp_path)
    return shutil.copytree(trained, tmp_path / "tiny")


def commands(data, folder) -> dict[str, list[str]]:
    """Everything that reads weights or the index, by name."""
    checkpoint = folder / "checkpoints" / "step_00000002"
    wanted = settings(data, folder.parent, train__steps=3, train__sample_tokens=0)
    (folder.parent / "empty.toml").write_text("")
    resume = ["train", "empty.toml", *(f"--{name}={value}" for name, value in wanted.items()), "--log.report=false"]
    return {
        "inspect": ["inspect", str(checkpoint)],
        "generate": ["generate", str(folder), "--tokens", "2"],
        "eval": ["eval", str(folder), "--batches", "1"],
        "resume": resume,
    }


NAMES = ["inspect", "generate", "eval", "resume"]


@pytest.mark.parametrize("name", NAMES)
def test_an_untouched_folder_is_used(data, stranger, name):
    assert run(commands(data, stranger)[name]) == 0


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["nested", "before the real one"])
def test_a_planted_index_does_not_run(data, stranger, name, kind, capsys):
    """DCP's own index is there for other tools, and not read; ours is checked."""
    assert kind in KINDS
    mark = stranger.parent / "mark"
    checkpoints = [stranger / "checkpoints" / f"step_{step:08d}" for step in (1, 2)]
    for checkpoint in checkpoints:
        plant_pickle(checkpoint, kind, mark)
    assert run(commands(data, stranger)[name]) == 0
    assert not mark.exists()
    for checkpoint in (stranger / "checkpoints").iterdir():
        change_index(checkpoint, lambda index: index.update(planted={"dtype": "os.system"}))
    assert run(commands(data, stranger)[name]) == EXIT_INPUT
    said = capsys.readouterr().err
    assert "index.json is not read: planted" in said
    assert "Traceback" not in said


def test_the_checkpoint_before_a_damaged_one_is_used(data, stranger, capsys):
    change_index(stranger / "checkpoints" / "step_00000002", lambda index: index.update(planted=7))
    assert run(commands(data, stranger)["resume"]) == 0
    assert "step_00000002 cannot be used: index.json is not read: planted" in "".join(capsys.readouterr())
    assert (stranger / "checkpoints" / "step_00000002.rejected").is_dir()


@pytest.mark.parametrize("text", ["[]", "7", "null", "{", "[" * 100_000, '"x"', "{}"])
def test_a_damaged_meta_is_an_error(data, stranger, text, capsys):
    for step in (1, 2):
        checkpoint = stranger / "checkpoints" / f"step_{step:08d}"
        (checkpoint / "meta.json").write_text(text)
        reseal(checkpoint)
    assert run(commands(data, stranger)["resume"]) == EXIT_INPUT
    said = capsys.readouterr().err
    assert "meta.json" in said
    assert "Traceback" not in said


def test_code_beside_the_tokenizer_is_not_run(data, stranger):
    """Names that transformers would import from the folder."""
    mark = stranger.parent / "mark"
    (stranger / "tokenization_planted.py").write_text(f"open({str(mark)!r}, 'w')\n")
    config = {"tokenizer_class": "Planted", "auto_map": {"AutoTokenizer": ["tokenization_planted.Planted", None]}}
    path = stranger / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    assert run(commands(data, stranger)["generate"]) == 0
    assert not mark.exists()
