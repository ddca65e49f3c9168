"""README's "From training to llama.cpp in two commands", as it stands there, on a job made short by the environment."""

import re
import shlex
from pathlib import Path

import pytest

from tests.training.tiny import write_text
from tilewright.cli.app import run
from tilewright.compress.exports_file import read_exports

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
SHORT = {
    "TRAIN_STEPS": "12",
    "TRAIN_EVAL_INTERVAL": "12",
    "TRAIN_SAMPLE_TOKENS": "4",
    "TRAIN_COMPILE": "off",
    "OPS_CROSS_ENTROPY": "ref",
    "RUN_THREADS": "1",
    "DATA_SOURCE": "text",
    "DATA_CACHE_DIR": "cache",
    "DATA_HOLDOUT": "0.2",
    "DATA_VOCAB_SIZE": "300",
    "DATA_SEQ_LEN": "32",
    "MODEL_DIM": "64",
    "MODEL_NUM_LAYERS": "2",
}


def commands() -> list[list[str]]:
    """The section's commands, without the program's name."""
    section = README.split("## From training to llama.cpp in two commands", 1)[1].split("\n## ", 1)[0]
    return [shlex.split(line)[1:] for line in re.findall(r"^\$ (tilewright .*)$", section, re.MULTILINE)]


@pytest.mark.slow
def test_from_training_to_llama_cpp_in_two_commands(tmp_path, monkeypatch):
    write_text(tmp_path / "text")
    monkeypatch.chdir(tmp_path)
    for name, value in SHORT.items():
        monkeypatch.setenv(f"TILEWRIGHT_{name}", value)
    asked = commands()
    assert len(asked) == 2
    for arguments in asked:
        assert run(arguments) == 0, arguments
    (found,) = read_exports(tmp_path / "runs" / "latest")["artefacts"]
    assert (found["consumer"], found["state"]) == ("llama.cpp", "ran"), found["reason"]
    assert found["kl"] < 5e-3
    assert found["token_ids"]["equal"] == found["token_ids"]["documents"] > 5
