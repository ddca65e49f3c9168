"""Commands of one process on a run of two ranks: what they give is what they give for a checkpoint of one process."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.ranks import on_ranks
from tests.training.test_ranks_run import run as run_rank
from tests.training.tiny import write_text
from tilewright.cli.app import run
from tilewright.training.checkpoint.checkpoint_meta import read_meta
from tilewright.training.checkpoint.checkpoint_store import CheckpointStore

pytestmark = pytest.mark.dist
STEP = "step_00000006"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run of two ranks in shards, and beside it the same with its checkpoint as one process writes it."""
    folder = tmp_path_factory.mktemp("ranks")
    write_text(folder / "text")
    changes = {"parallel__dp_shard": 2, "checkpoint__interval": 0, "optim__moments": "8bit", "data__seq_len": 64}
    on_ranks(2, run_rank, str(folder), str(folder / "two"), changes)
    two, one = folder / "two" / "tiny", folder / "one" / "tiny"
    shutil.copytree(two, one, symlinks=True)
    _rewritten(one / "checkpoints")
    return two, one


def _rewritten(checkpoints: Path) -> None:
    """By torch's own reader."""
    path = checkpoints / STEP
    assert (path / "__1_0.distcp").is_file()
    found = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    tensors = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in found.items()}
    dcp.load(tensors, checkpoint_id=path, no_dist=True)
    meta = read_meta(path)
    shutil.rmtree(path)
    store = CheckpointStore(checkpoints)
    store.save(6, tensors, meta, now=True)
    assert [save.error for save in store.finished()] == [None]
    store.close()
    assert not (path / "__1_0.distcp").exists()


COMMANDS = {
    "generate": ["generate", "RUN", "--tokens", "30", "--temperature", "0"],
    "sampled": ["generate", "RUN", "--tokens", "30", "--prompt", "alpha"],
    "eval": ["eval", "RUN", "--json"],
    "chat": ["chat", "RUN", "--chat-template", "chatml", "--message", "alpha", "--tokens", "20", "--temperature", "0"],
    "inspect run": ["inspect", "RUN"],
}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.support("commands", "one", "shards")
def test_a_command_says_the_same(command, runs, capsys):
    said = []
    for folder in runs:
        assert run([str(folder) if word == "RUN" else word for word in COMMANDS[command]]) == 0
        said.append(capsys.readouterr().out.replace(str(folder), "RUN"))
    assert said[0] == said[1]
    assert said[0]


def test_inspect_lists_the_tensors_of_all_ranks(runs, capsys):
    listed = []
    for folder in runs:
        assert run(["inspect", str(folder / "checkpoints" / STEP), "--json"]) == 0
        listed.append(json.loads(capsys.readouterr().out)["tensors"])
    assert listed[0] == listed[1]
    assert len(listed[0]) > 20


@pytest.mark.parametrize("command", ["hf", "gguf-f16", "merge"])
def test_what_is_written_has_the_same_bytes(command, runs, tmp_path):
    for name, folder in zip(("two", "one"), runs, strict=True):
        out = tmp_path / name
        if command == "merge":
            assert run(["merge", str(folder), "--out", str(out)]) == 0
        else:
            options = ["--to", command, "--out", str(out), "--no-proof", "--without-tokenizer"]
            assert run(["export", str(folder), *options]) == 0
    written = [{path.relative_to(tmp_path / name): path.read_bytes() for path in (tmp_path / name).rglob("*")
                if path.is_file() and path.suffix in (".gguf", ".safetensors")} for name in ("two", "one")]  # fmt: skip
    assert written[0] == written[1]
    assert written[0]
