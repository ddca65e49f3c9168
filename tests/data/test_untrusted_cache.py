"""Prepared data that somebody changed: arrays of objects are pickles, and are not read."""

import os

import numpy as np
import pytest

from tests.training.tiny import write_text
from tilewright.data.dataset.prepared_text import PreparedData
from tilewright.data.prepare import prepare


class Command:
    def __reduce__(self):
        return os.system, (f"touch {os.environ['MARK']}",)


@pytest.mark.parametrize("name", ["train.npy", "train.starts.npy"])
def test_arrays_of_objects_do_not_run(tmp_path, monkeypatch, name):
    monkeypatch.setenv("MARK", str(tmp_path / "mark"))
    source = str(write_text(tmp_path / "text"))
    data = prepare(source, task="causal_lm", seq_len=32, vocab_size=300, cache_dir=str(tmp_path / "cache"))
    (path,) = (tmp_path / "cache").rglob(name)
    np.save(path, np.array([Command()], object))
    corpus = next(path for path in (tmp_path / "cache").rglob("documents.parquet")).parent
    with pytest.raises(ValueError, match="Python objects"):
        PreparedData(corpus, data.folder)
    assert not (tmp_path / "mark").exists()
    np.load(path, allow_pickle=True)
    assert (tmp_path / "mark").exists()


def test_a_changed_entry_is_made_again(tmp_path, monkeypatch):
    """The way that a run takes: the manifest tells before anything is opened."""
    monkeypatch.setenv("MARK", str(tmp_path / "mark"))
    source = str(write_text(tmp_path / "text"))
    options = {"task": "causal_lm", "seq_len": 32, "vocab_size": 300, "cache_dir": str(tmp_path / "cache")}
    before = prepare(source, **options)
    (path,) = (tmp_path / "cache").rglob("train.npy")
    np.save(path, np.array([Command()], object))
    after = prepare(source, **options)
    assert after.fingerprint == before.fingerprint
    assert after.summary["refused"] == before.summary["refused"]
    assert not (tmp_path / "mark").exists()
