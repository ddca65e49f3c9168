"""Image folders: one class a sub-folder, bad files set aside, the same stream as text."""

import sys

import numpy as np
import pytest
import torch

from tilewright.core.errors import DataError
from tilewright.data.batches.stream import Stream
from tilewright.data.prepare import prepare

PIL = pytest.importorskip("PIL.Image")


@pytest.fixture
def folder(tmp_path):
    """Three classes of ten images, each class of its own brightness; one damaged, one duplicate, one text file."""
    rng = np.random.default_rng(0)
    for label, name in enumerate(("ant", "bee", "cat")):
        (tmp_path / "data" / name).mkdir(parents=True)
        for i in range(10):
            pixels = np.clip(rng.normal(60 + 80 * label, 9, (20 + i, 30, 3)), 0, 255).astype(np.uint8)
            PIL.fromarray(pixels).save(tmp_path / "data" / name / f"{i}.png")
    bee = tmp_path / "data" / "bee"
    (bee / "torn.png").write_bytes((bee / "0.png").read_bytes()[:200])
    (bee / "twin.png").write_bytes((bee / "1.png").read_bytes())
    (bee / "readme.txt").write_text("no image")
    PIL.new("L", (9, 9), 30).save(tmp_path / "data" / "ant" / "grey.jpg")
    return tmp_path / "data"


def load(folder, tmp_path, **options):
    return prepare(
        str(folder), task="image_classification", image_size=16, cache_dir=str(tmp_path / "cache"), **options
    )


def test_a_process_of_its_own_makes_the_same(folder, tmp_path):
    here = load(folder, tmp_path / "here")
    apart = load(folder, tmp_path / "apart", own_process=True)
    assert apart.fingerprint == here.fingerprint
    assert apart.rejects() == here.rejects()


def test_prepare_and_stream(folder, tmp_path):
    prepared = load(folder, tmp_path, holdout=0.2)
    assert prepared.classes == ("ant", "bee", "cat")
    assert prepared.vocab_size == 3
    assert prepared.summary["images"] == 31
    assert {reason: entry["files"] for reason, entry in prepared.summary["refused"].items()} == {
        "damaged image (OSError)": 1,
        "duplicate image": 1,
        "file type .txt is not an image": 1,
    }
    assert prepared.summary["read"]["files"] == {"found": 34, "used": 31, "refused": 3}
    assert {r["where"] for r in prepared.rejects()} == {"bee/torn.png", "bee/twin.png", "bee/readme.txt"}
    stream = Stream(prepared, seed=1, batch_size=10, micro_batch_size=4, prefetch=2)
    epoch = []
    for _ in range(5):
        batches = stream.next_step()
        assert [len(b["labels"]) for b in batches] == [3, 3, 4]
        for batch in batches:
            assert batch["pixel_values"].shape[1:] == (3, 16, 16)
            assert batch["pixel_values"].dtype == torch.float32
            assert batch["labels"].dtype == torch.int64
            means = batch["pixel_values"].mean((1, 2, 3))
            expected = (60 + 80 * batch["labels"]) / 127.5 - 1
            grey = means.sub(30 / 127.5 - 1).abs() < 0.02
            assert ((means - expected).abs() < 0.1)[~grey].all(), "a label that does not belong to its image"
    for sample in range(prepared.num_rows["images"]):
        epoch.append(stream.explain(sample)["documents"][0]["name"])
    assert len(set(epoch)) == prepared.num_rows["images"] == 25
    stream.close()
    held = torch.cat([b["labels"] for b in prepared.eval_batches("images", 4, 10)])
    assert sorted(held.tolist()) == [0, 0, 1, 1, 2, 2]
    assert load(folder, tmp_path, holdout=0.2).fingerprint == prepared.fingerprint


def test_not_a_folder_of_classes(folder, tmp_path):
    for bad in (tmp_path / "absent", folder / "ant"):
        with pytest.raises(DataError, match="No image classes at this path"):
            load(bad, tmp_path)


def test_no_usable_images(tmp_path):
    for name in "ab":
        (tmp_path / "data" / name).mkdir(parents=True)
        (tmp_path / "data" / name / "x.png").write_bytes(b"nothing")
    with pytest.raises(DataError, match="Too few usable images"):
        load(tmp_path / "data", tmp_path)


def test_without_pillow(folder, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(DataError, match="Pillow") as caught:
        load(folder, tmp_path)
    assert "tilewright[hf]" in caught.value.problems[0].try_
