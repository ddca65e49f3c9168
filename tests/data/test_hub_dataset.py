"""Datasets of the hub: what is downloaded, and what is said where nothing can be."""

import time

import pytest

from tilewright.core.errors import DataError
from tilewright.data.sources.hub import hub_dataset
from tilewright.data.sources.user_files import user_source

huggingface_hub = pytest.importorskip("huggingface_hub")


@pytest.fixture(autouse=True)
def tries_follow_at_once(monkeypatch):
    """huggingface_hub waits 23 s in all between its tries."""
    monkeypatch.setattr(time, "sleep", lambda seconds: None)


def test_without_a_network_the_error_says_what_to_do(tmp_path):
    with pytest.raises(DataError) as caught:
        hub_dataset("hf://some/talks", endpoint="http://127.0.0.1:9", cache=str(tmp_path))
    problem = caught.value.problems[0]
    assert "cannot be downloaded" in problem.what
    assert "hf://some/talks" in problem.got
    assert problem.try_


def test_without_a_network_what_is_cached_is_used(tmp_path):
    commit = "a" * 40
    repo = tmp_path / "datasets--some--talks"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text(commit)
    (repo / "snapshots" / commit / "data").mkdir(parents=True)
    (repo / "snapshots" / commit / "data" / "train.jsonl").write_text('{"text": "hello"}\n')
    folder = hub_dataset("hf://some/talks", endpoint="http://127.0.0.1:9", cache=str(tmp_path))
    assert [part.name for part in user_source(folder).parts] == ["data/train.jsonl@0"]


@pytest.mark.parametrize("name", ["hf://", "hf://a/b/c", "hf://../x", "hf://a b/c"])
def test_what_is_no_name_is_refused(name, tmp_path):
    with pytest.raises(DataError):
        hub_dataset(name, endpoint="http://127.0.0.1:9", cache=str(tmp_path))
