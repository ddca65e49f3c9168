"""Models by name: a folder, a repository of a hub that is there, refuses, breaks off, or cannot be reached."""

import json
import sys
import time

import pytest

from tests.models.hub_server import FakeHub, serving
from tilewright.core.errors import CheckpointError, HardwareError
from tilewright.models.folder.find_model import find_model, is_hub_name, missing_files, split_name

pytest.importorskip("huggingface_hub")

REPO = "some-org/Model-1.5"
NOWHERE = "http://127.0.0.1:1"
INDEX = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "tokenizer.json": b"{}",
    "tokenizer_config.json": b"{}",
    "chat_template.jinja": b"{{ messages }}",
    "additional_chat_templates/tools.jinja": b"{{ tools }}",
    "model.safetensors.index.json": json.dumps(INDEX).encode(),
    "model-00001-of-00002.safetensors": b"first" * 1000,
    "model-00002-of-00002.safetensors": b"second" * 1000,
    "consolidated.safetensors": b"all of it again",
    "pytorch_model.bin": b"a pickle",
    "training_args.bin": b"a pickle",
    "original/params.json": b"{}",
    "onnx/model.json": b"{}",
    "tokenizer.model": b"not needed where there is a tokenizer.json",
    "README.md": b"# Model",
}
NEEDED = {
    "config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja",
    "additional_chat_templates/tools.jinja", "model.safetensors.index.json",
    "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors",
}  # fmt: skip


@pytest.fixture
def hub():
    with serving(FakeHub({REPO: FILES})) as there:
        yield there


def files_of(folder):
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_what_is_needed_is_downloaded_and_nothing_else(hub, tmp_path):
    found = find_model(REPO, endpoint=hub.url, cache=str(tmp_path))
    assert files_of(found.folder) == NEEDED
    assert found.name == f"{REPO}@{hub.commit(REPO)}"
    assert not [line for line in hub.asked if ".bin" in line or "README" in line or "consolidated" in line]


def test_without_weights_the_configuration_alone(hub, tmp_path):
    folder = find_model(REPO, weights=False, endpoint=hub.url, cache=str(tmp_path)).folder
    assert files_of(folder) == {name for name in NEEDED if not name.endswith(".safetensors")}
    assert files_of(find_model(REPO, endpoint=hub.url, cache=str(tmp_path)).folder) == NEEDED


def test_a_pinned_model_that_is_there_asks_nobody(hub, tmp_path):
    name = find_model(REPO, endpoint=hub.url, cache=str(tmp_path)).name
    hub.asked.clear()
    again = find_model(name, endpoint=hub.url, cache=str(tmp_path))
    assert (again.name, hub.asked) == (name, [])
    assert find_model(name, endpoint=NOWHERE, cache=str(tmp_path)) == again


def test_offline_the_cache_is_used_and_that_is_said(hub, tmp_path, capsys):
    online = find_model(REPO, endpoint=hub.url, cache=str(tmp_path))
    assert find_model(REPO, endpoint=NOWHERE, cache=str(tmp_path)) == online
    assert "cannot be reached" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("status", "code", "first", "advice"),
    [
        (404, "RepoNotFound", "No such model", "hf auth login"),
        (401, "RepoNotFound", "No such model", "hf auth login"),
        (401, "", "No such model", "hf auth login"),  # what the hub says of a missing one to who is not logged in
        (401, "GatedRepo", "gated", "hf auth login"),
        (403, "GatedRepo", "gated", "agree to the terms"),
        (404, "RevisionNotFound", "No such revision", "main"),
        (403, "", "cannot be downloaded", "copy the model"),
    ],
)
def test_a_refusal_is_an_error_in_four_parts(hub, tmp_path, status, code, first, advice):
    hub.refused[REPO] = status, code
    with pytest.raises(CheckpointError) as caught:
        find_model(REPO, endpoint=hub.url, cache=str(tmp_path))
    [problem] = caught.value.problems
    assert first in problem.what
    assert advice in problem.try_
    assert problem.got
    assert problem.need
    assert problem.where == REPO


def test_a_gated_model_shows_its_list_and_refuses_its_files(hub, tmp_path):
    hub.files_refused[REPO] = 403, "GatedRepo"
    with pytest.raises(CheckpointError, match="gated"):
        find_model(REPO, endpoint=hub.url, cache=str(tmp_path))


def test_no_network_and_nothing_cached(tmp_path):
    with pytest.raises(CheckpointError, match="is not in the cache"):
        find_model(REPO, endpoint=NOWHERE, cache=str(tmp_path))


def test_an_unknown_revision(hub, tmp_path):
    with pytest.raises(CheckpointError, match="No such revision"):
        find_model(f"{REPO}@v7", endpoint=hub.url, cache=str(tmp_path))


def test_half_a_download_is_not_a_model_and_the_same_call_completes_it(hub, tmp_path, monkeypatch):
    sleep = time.sleep
    monkeypatch.setattr(time, "sleep", lambda seconds: sleep(min(seconds, 0.01)))  # it tries again five times
    hub.cut_after = 100
    with pytest.raises(CheckpointError, match="stopped"):
        find_model(REPO, endpoint=hub.url, cache=str(tmp_path))
    hub.cut_after = None
    with pytest.raises(CheckpointError, match="not complete") as caught:
        find_model(REPO, endpoint=NOWHERE, cache=str(tmp_path))
    assert "model-0000" in caught.value.problems[0].got
    found = find_model(REPO, endpoint=hub.url, cache=str(tmp_path))
    assert missing_files(found.folder, True) == []
    assert (found.folder / "model-00001-of-00002.safetensors").read_bytes() == b"first" * 1000


def test_a_repository_without_safetensors_is_refused_before_anything_is_downloaded(hub, tmp_path):
    hub.repos["org/old"] = {"config.json": b"{}", "pytorch_model.bin": b"a pickle"}
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin"):
        find_model("org/old", endpoint=hub.url, cache=str(tmp_path))
    assert not [line for line in hub.asked if "resolve" in line]


def test_huggingface_hub_is_not_installed(tmp_path):
    before = sys.modules.pop("huggingface_hub", None)
    sys.modules["huggingface_hub"] = None  # what Python does with an import that it may not do
    try:
        with pytest.raises(HardwareError, match=r"tilewright\[hf\]"):
            find_model(REPO)
        assert find_model(str(tmp_path)).folder == tmp_path
    finally:
        del sys.modules["huggingface_hub"]
        if before is not None:
            sys.modules["huggingface_hub"] = before


@pytest.mark.parametrize("name", ["a/b/c", "/a/b", "~/a", "a", "a--b/c", "a/b..c", "a/-b", "a/b@", "../a", "a/b c", ""])
def test_names_that_are_no_repositories(name):
    assert not is_hub_name(name)


@pytest.mark.parametrize("name", ["a/b", "Qwen/Qwen3-0.6B", "a/b@main", "a_b/c.d-e@refs/pr/1"])
def test_names_of_repositories(name):
    assert is_hub_name(name)
    assert split_name(name)[0].count("/") == 1


def test_a_folder_of_that_name_comes_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "model").mkdir(parents=True)
    assert not is_hub_name("org/model")
    assert str(find_model("org/model").folder) == "org/model"
