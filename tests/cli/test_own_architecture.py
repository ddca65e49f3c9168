"""An architecture that `model.kind` names by its import path: every command takes it in a process of its own, and
reading a recipe imports nothing."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import tilewright
from tests.serving.served import post
from tests.training.test_architectures import QUICK
from tests.training.tiny import rows, settings, tiny, write_text
from tilewright.cli.app import run
from tilewright.core.config.load import load_recipe
from tilewright.core.errors import ConfigError
from tilewright.models.build import build_model, spec_of, with_architecture
from tilewright.training.session import train

LAB = '''
"""The block of docs/how-to/add-a-model.md, with a folder of its own."""
from tilewright.models.build import decoder_like
from tilewright.models.decoder.config import DecoderConfig
from tilewright.models.decoder.block import Block
from tilewright.models.folder.json_file import read_json

FIELDS = ("vocab_size", "dim", "num_layers", "num_heads", "num_kv_heads", "head_dim", "ffn_dim")


class ParallelBlock(Block):
    def quantized_readers(self):
        yield self.input_layernorm, "norm", [*self.self_attn.readers(), *self.mlp.readers()]

    def _run(self, x, cos, sin, segments, cache=None):
        normed = self.input_layernorm(x)
        attended = self.self_attn(normed, cos, sin, segments, cache)
        return (x + attended + self.mlp(normed) + 0 * self.post_attention_layernorm(x)).to(x.dtype), None


def read(folder):
    raw = read_json(folder)
    return DecoderConfig(architecture=PARALLEL, **{name: raw[name] for name in FIELDS})


def write(config, dtype_name):
    return {"model_type": "parallel", "dtype": dtype_name} | {name: getattr(config, name) for name in FIELDS}


PARALLEL = decoder_like("parallel", ParallelBlock, read_config=read, write_config=write)
DECODER = decoder_like("decoder", ParallelBlock)
NOT_ONE = PARALLEL.name
'''
PATH = "lab_of_parallel.blocks:PARALLEL"


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """A folder with the module, which only those find whose path of imports has it."""
    folder = tmp_path_factory.mktemp("lab")
    package = folder / "lab_of_parallel"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "blocks.py").write_text(LAB)
    (package / "broken.py").write_text("def f(:\n")
    (package / "lacking.py").write_text("import no_such_package_at_all\n")
    return folder


@pytest.fixture
def found(lab, monkeypatch):
    """Here too, for one test."""
    monkeypatch.syspath_prepend(str(lab))
    yield lab
    for name in [name for name in sys.modules if name.startswith("lab_of_parallel")]:
        del sys.modules[name]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    write_text(folder / "text")
    return folder


@pytest.fixture(scope="module")
def trained(data, lab, tmp_path_factory):
    """A run of the architecture, by a process of its own."""
    runs = tmp_path_factory.mktemp("runs")
    options = settings(data, runs, **QUICK | {"model__kind": PATH, "data__seq_len": 128, "checkpoint__export_hf": True})
    done = command(lab, "train", *(f"--{name}={value}" for name, value in options.items()))
    assert done.returncode == 0, done.stderr
    return runs / "tiny"


def environment(lab):
    path = os.pathsep.join((str(lab), str(Path(tilewright.__file__).parents[1])))
    return os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


def command(lab, *args, **more):
    return subprocess.run(
        [sys.executable, "-m", "tilewright", *map(str, args)],
        env=environment(lab), capture_output=True, text=True, timeout=600, **more,
    )  # fmt: skip


def test_a_path_is_the_object_at_its_end(data, found, tmp_path):
    by_path = train(tiny(data, tmp_path / "path", model__kind=PATH, **QUICK)).run_dir
    spec = spec_of(PATH)
    by_object = train(with_architecture(tiny(data, tmp_path / "object", **QUICK), spec)).run_dir
    losses = [[row["loss"] for row in rows(where / "metrics.jsonl") if "loss" in row] for where in (by_path, by_object)]
    assert len(losses[0]) == 3
    assert losses[0] == losses[1]
    again = load_recipe(by_path / "run.toml", {}, {}).recipe
    assert again.model.kind == PATH
    assert build_model(again.model, 61).architecture is spec


def test_reading_a_recipe_imports_nothing(tmp_path, found):
    (tmp_path / "own.toml").write_text(f'[model]\nkind = "{PATH}"\n')
    assert load_recipe(tmp_path / "own.toml", {}, {}).recipe.model.kind == PATH
    assert "lab_of_parallel" not in sys.modules


@pytest.mark.parametrize(
    "word", ["mine", "a.b", "a:b:c", ":x", "a:", "a b:c", "../a:b", "a.:b", "decoder:", "a:b\n", ""]
)
def test_what_is_no_path_is_a_wrong_word(word):
    with pytest.raises(ConfigError) as caught:
        load_recipe(None, {"model.kind": word}, environ={})
    assert 'one of "decoder", "hf", or package.module:NAME' in str(caught.value)


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("no_such_package_at_all.blocks:PARALLEL", "No module named"),
        ("lab_of_parallel.other:PARALLEL", "No module named"),
        ("lab_of_parallel.blocks:OTHER", "OTHER"),
        ("lab_of_parallel.blocks:NOT_ONE", "NOT_ONE is str"),
        ("lab_of_parallel.blocks:ParallelBlock", "ParallelBlock is type"),
        ("lab_of_parallel.blocks:DECODER", "the name of tilewright's own"),
        ("lab_of_parallel.broken:PARALLEL", "broken.py, line 1"),
        ("lab_of_parallel.lacking:PARALLEL", "no_such_package_at_all"),
    ],
)
def test_what_is_not_there_is_refused_in_words(path, said, found, data, tmp_path, capsys):
    options = settings(data, tmp_path, **QUICK | {"model__kind": path})
    assert run(["train", *(f"--{name}={value}" for name, value in options.items())]) == 2
    shown = " ".join(capsys.readouterr().err.split())
    for part in ("Architecture cannot be imported", path, said, "ModelSpec", "PYTHONPATH"):
        assert part in shown, (part, shown)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "args",
    [
        ("plan", "--model.kind", PATH),
        ("generate", "RUN", "--prompt", "alpha", "--tokens", "3"),
        ("chat", "RUN", "--chat-template", "chatml", "--message", "alpha", "--tokens", "3"),
        ("export", "RUN", "--to", "fp8", "--threads", "1"),
        ("eval", "RUN"),
        ("inspect", "RUN"),
        ("report", "RUN"),
    ],
    ids=lambda args: args[0],
)
def test_commands_in_processes_of_their_own(args, trained, lab):
    done = command(lab, *(str(trained) if word == "RUN" else word for word in args))
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_server_of_it_answers(trained, lab):
    line = [sys.executable, "-m", "tilewright", "serve", str(trained), "--port", "0"]
    process = subprocess.Popen(line, env=environment(lab), stdout=subprocess.PIPE, text=True)
    try:
        found = re.search(r":(\d+)/v1", process.stdout.readline())
        body = {"model": "tiny", "prompt": "alpha", "max_tokens": 3}
        assert post(int(found[1]), "/v1/completions", body)[0] == 200
    finally:
        process.terminate()
        assert process.wait(60) == 0


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_where_it_is_not_found_the_command_says_so_and_the_page_is_read(trained, tmp_path):
    done = command(tmp_path, "generate", trained, "--prompt", "alpha")
    assert done.returncode == 2
    for part in ("Architecture cannot be imported", PATH, "PYTHONPATH"):
        assert part in " ".join(done.stderr.split())
    assert command(tmp_path, "report", trained).returncode == 0, "it needs no model"
