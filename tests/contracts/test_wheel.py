"""`pip install .` without extras: the wheel holds what is needed, and trains where only its dependencies are installed.

The wheel is built without a network. The environment is a new one that sees the dependencies of the installed
tilewright, linked from this one: transformers and the tools of developers are not among them.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "tilewright"
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet")
TINY = {
    "model.dim": 32, "model.ffn_dim": 64, "model.expert_dim": 32, "model.num_layers": 2, "data.source": "text",
    "data.cache_dir": "cache", "data.vocab_size": 300, "data.seq_len": 32, "train.steps": 2, "train.compile": "off",
    "train.sample_tokens": 2, "run.threads": 1, "run.name": "tiny", "run.device": "cpu",
    "ops.cross_entropy": "ref", "ops.adam": "ref",
}  # fmt: skip
IMPORT_ALL = """
import importlib.util, pkgutil, tilewright
serving = ("api.reply", "http_server", "connections", "server_process")
of_extras = ("tilewright.integrations", *(f"tilewright.serving.{name}" for name in serving))
for module in pkgutil.walk_packages(tilewright.__path__, "tilewright."):
    if not module.name.startswith((*of_extras, "tilewright.ops.backends.triton", "tilewright.__main__")):
        importlib.import_module(module.name)
for name in tilewright.__all__:
    getattr(tilewright, name)
assert importlib.util.find_spec("transformers") is None
print(tilewright.__file__, flush=True)
"""
RUN = """
import sys
from tilewright.cli.app import main
main(sys.argv[1:])
"""


def dependencies(name: str, found: dict) -> dict:
    """Installed distributions that a distribution needs without extras, by normalised name; itself too."""
    key = re.sub(r"[-_.]+", "-", name).lower()
    if key not in found:
        try:
            found[key] = distribution(name)
        except PackageNotFoundError:  # of another platform
            return found
        for line in found[key].requires or []:
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                dependencies(requirement.name, found)
    return found


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built from a copy: a build writes beside its sources."""
    folder = tmp_path_factory.mktemp("build")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy2(ROOT / name, folder / name)
    shutil.copytree(ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    offline = ("--no-deps", "--no-build-isolation", "--no-index")
    subprocess.run([*PIP, "wheel", *offline, "-w", str(folder / "dist"), str(folder)], check=True, cwd=folder)
    (built,) = (folder / "dist").glob("*.whl")
    return built


@pytest.fixture(scope="module")
def bare(wheel, tmp_path_factory):
    """Folder of a new environment with the wheel and its dependencies."""
    folder = tmp_path_factory.mktemp("bare") / "env"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    needed = dependencies("tilewright", {})
    del needed["tilewright"]
    for one in needed.values():
        for top in {file.parts[0] for file in one.files or []} - {"..", "__pycache__"}:
            source = Path(str(one.locate_file(top)))
            if source.exists() and not (site / top).exists():
                (site / top).symlink_to(source)
    into = ("--python", str(folder / "bin" / "python"))
    subprocess.run([*PIP, *into, "install", "--no-deps", "--no-index", str(wheel)], check=True)
    return folder


def call(bare, cwd, *command):
    """A program of the environment, away from the sources and from what they put on the path."""
    # Kernels that were compiled are the tester's. Rates are the tests', of the instructions that these may use: to
    # measure a machine takes half a minute.
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(Path.home()), "OMP_NUM_THREADS": "1"}
    same_machine = ("XDG_CACHE_HOME", "ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY")
    environment |= {name: os.environ[name] for name in same_machine if name in os.environ}
    arguments = [str(bare / "bin" / command[0]), *command[1:]]
    return subprocess.run(arguments, cwd=cwd, env=environment, capture_output=True, text=True, check=False, timeout=200)


def test_the_wheel_holds_every_file_of_the_package_and_nothing_else(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    files = {
        str(path.relative_to(PACKAGE.parent))
        for path in PACKAGE.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert {name for name in names if ".dist-info/" not in name} == files
    for pattern in (
        r"recipes/\w+\.toml",
        r"report/templates/.+",
        r"report/watch/pages/.+",
        r"ops/backends/cpu/cpp/\w+\.cpp",
        r"ops/backends/cpu/cpp/\w+\.h",
    ):
        assert any(re.fullmatch(f"tilewright/{pattern}", name) for name in names), pattern


def test_every_module_imports_without_extras_and_it_trains_away_from_its_sources(bare, tmp_path):
    """In one process, since each imports torch for seconds; the command itself answers, too."""
    for domain in ("a", "b"):
        (tmp_path / "text" / domain).mkdir(parents=True)
        for number in range(20):
            lines = (f"{domain} {number} tile scale block layer token matrix sum row {i}" for i in range(40))
            (tmp_path / "text" / domain / f"{number}.txt").write_text("\n".join(lines))
    version = call(bare, tmp_path, "tilewright", "--version")
    assert re.fullmatch(r"tilewright \d+\.\d+\.\d+\n", version.stdout)
    settings = [part for name, value in TINY.items() for part in (f"--{name}", str(value))]
    done = call(bare, tmp_path, "python", "-c", IMPORT_ALL + RUN, "train", "tiny_moe", *settings)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(bare))
    run = tmp_path / "runs" / "tiny"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in rows if "loss" in row]
    assert len(losses) == 2
    assert all(4 < loss < 7 for loss in losses)  # log(300) = 5.7: it has learned nothing yet
    assert (run / "report.html").stat().st_size > 1000


def test_what_needs_an_extra_names_it(bare, tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"model_type": "llama", "vocab_size": 300}')
    found = call(bare, tmp_path, "tilewright", "plan", "--model.kind", "hf", "--model.path", "model")
    assert found.returncode == 5, found.stderr
    parts = [line.split()[0] for line in found.stderr.splitlines()]
    assert parts == ["tilewright:", "where", "got", "need", "try"]
    assert "pip install 'tilewright[hf]'" in found.stderr
