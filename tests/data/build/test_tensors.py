"""Pixels and log-mel frames of a build: those of the files, of what stays, and what image models are trained on."""

import json

import numpy as np
import pyarrow.parquet as pq
import pytest

from tests.data.build.corpora import build, digest, prose, settings, write_media
from tilewright.core.errors import DataError
from tilewright.data.batches.stream import Stream
from tilewright.data.dataset.build_account import build_account
from tilewright.data.dataset.built_images import ShardedPixels
from tilewright.data.engine.executors.local_executor import LocalExecutor
from tilewright.data.prepare import prepare
from tilewright.data.readers.media.images import near_images
from tilewright.data.readers.media.log_mel import log_mel
from tilewright.report.pages.build_page import render_build

PIL = pytest.importorskip("PIL.Image")
NEAR = {"image_distance": 12}  # a smaller JPEG of these images of few points differs in up to ten bits, another in 20
MEDIA = {"image_size": 16, "log_mel": True, "num_mels": 20, "window_ms": 32.0, "hop_ms": 16.0}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write_media(tmp_path_factory.mktemp("media"))


@pytest.fixture(scope="module")
def built(source, tmp_path_factory):
    out = tmp_path_factory.mktemp("out") / "built"
    build(settings(source, media=MEDIA, duplicates=NEAR), out)
    return out


def table(out, kind):
    return [row for row in pq.read_table(out / "media" / "media.parquet").to_pylist() if row["kind"] == kind]


def test_pixels_are_those_of_the_files(source, built):
    """Decoded by Pillow alone; a smaller near-copy is dropped and has none."""
    rows = table(built, "pixels")
    assert sorted(row["path"] for row in rows) == sorted(f"{d}/{i}.png" for d in ("ant", "bee") for i in range(8))
    for row in rows:
        with PIL.open(source / row["path"]) as image:
            width, height = image.size
            side = min(width, height)
            left, top = (width - side) / 2, (height - side) / 2
            square = image.convert("RGB").resize((16, 16), PIL.Resampling.BICUBIC, (left, top, left + side, top + side))
        got = np.load(built / "media" / row["file"])[row["first"]]
        assert row["count"] == 1
        worst = int(np.abs(got.astype(int) - np.asarray(square).transpose(2, 0, 1)).max())
        assert worst <= 1, (row["path"], worst)  # Pillow rounds the middle of the square in its own way


def test_frames_are_those_of_the_sound(built):
    (row,) = table(built, "log_mel")
    frames = np.load(built / "media" / row["file"])[row["first"] : row["first"] + row["count"]]
    samples = (8000 * np.sin(np.arange(8000) / 3)).astype("<i2") / 32768
    assert (frames == log_mel(samples.astype(np.float32), 8000, 20, 32.0, 16.0)).all()
    assert frames.shape == (1 + 8000 // 128, 20)


def test_near_copies_of_images_are_dropped_with_their_distance(built):
    rejects = [row for row in pq.read_table(built / "rejects").to_pylist() if "image" in row["rule"]]
    assert {(row["path"], row["rule"], row["threshold"]) for row in rejects} == {
        (f"{domain}/smaller.jpg", "near-copy of an image", "12") for domain in ("ant", "bee")
    }
    stays = {row["id"]: row["path"] for row in table(built, "pixels")}
    for row in rejects:
        bits, _, of = row["value"].partition(" bits of 64 from ")
        assert 0 < int(bits) <= 12
        assert stays[of] == row["path"].replace("smaller.jpg", "0.png")


def test_a_distance_of_each_kind(source, tmp_path):
    """No two that stay are as near, and each that goes is near one that stays."""
    for distance in (0, 2, 8, 15):
        build(settings(source, duplicates={"image_distance": distance, "keep": "first"}), tmp_path / str(distance))
        media = tmp_path / str(distance) / "records"
        kept = [row for row in pq.read_table(media).to_pylist() if row["modality"] == "image"]
        hashes = [int(json.loads(row["facts"])["phash"], 16) for row in kept]
        assert near_images(hashes, distance) == []
        gone = [row for row in pq.read_table(tmp_path / str(distance) / "rejects").to_pylist() if row["id"]]
        assert len(kept) + len(gone) == 18
        for row in gone:
            bits, _, stays = row["value"].partition(" bits of 64 from ")
            assert int(bits) <= distance
            assert stays in {one["id"] for one in kept}


def test_images_of_one_colour_are_no_near_copies(tmp_path):
    for domain in ("dark", "light"):
        (tmp_path / "in" / domain).mkdir(parents=True)
        for i in range(3):
            shade = 20 + 60 * i + 100 * (domain == "light")
            PIL.new("RGB", (40, 40), (shade % 256, 40 * i, 9)).save(tmp_path / "in" / domain / f"{i}.png")
    content = build(settings(tmp_path / "in", media={"image_size": 8}), tmp_path / "out")
    assert content["summary"]["near_duplicates"] == 0
    assert content["summary"]["tensors"]["pixels"] == {
        "train": 4,
        "holdout": 2,
        "domains": ["dark", "light"],
        "shape": [3, 8, 8],
    }


def test_two_images_of_one_caption_both_stay(source, tmp_path):
    for name in ("0", "1"):
        (tmp_path / "in").mkdir(exist_ok=True)
        (tmp_path / "in" / f"{name}.png").write_bytes((source / "ant" / f"{name}.png").read_bytes())
        (tmp_path / "in" / f"{name}.txt").write_text("a photograph of an ant in the garden behind the house, at noon")
    (tmp_path / "in" / "text.txt").write_text(prose(1))
    build(settings(tmp_path / "in"), tmp_path / "out")
    paths = {row["path"] for row in pq.read_table(tmp_path / "out" / "records").to_pylist()}
    assert {"0.png", "1.png"} <= paths


def test_too_little_text_of_a_domain_takes_no_images_along(tmp_path):
    """A captioned image stays with its caption, without tokens; a text of that domain goes. The notes name both."""
    write_media(tmp_path / "in")
    (tmp_path / "in" / "ant" / "3.txt").write_text("one caption, too short to be held out in part")
    (tmp_path / "in" / "wasp").mkdir()
    (tmp_path / "in" / "wasp" / "a.txt").write_text("one text, too short to be held out in part")
    (tmp_path / "in" / "text").mkdir()
    for i in range(9):
        (tmp_path / "in" / "text" / f"{i}.txt").write_text(prose(i))
    summary = build(settings(tmp_path / "in", media={"image_size": 8}), tmp_path / "out")["summary"]
    counts = summary["tensors"]["pixels"]
    assert (counts["train"], counts["holdout"]) == (16, 2)  # 18 images, of which no two are near by default
    dropped = [row for row in pq.read_table(tmp_path / "out" / "rejects").to_pylist() if row["stage"] == "split"]
    assert [row["path"] for row in dropped] == ["wasp/a.txt"]
    (captioned,) = [row for row in table(tmp_path / "out", "pixels") if row["path"] == "ant/3.png"]
    assert captioned["text"] == "one caption, too short to be held out in part"
    (record,) = [row for row in pq.read_table(tmp_path / "out" / "records").to_pylist() if row["path"] == "ant/3.png"]
    assert record["text"] == captioned["text"]
    assert record["tokens"] is None
    assert [note.partition(" stay")[0] for note in summary["notes"]] == ["ant: 1 captioned images or sounds"]
    assert summary["records"] == {
        "ant": {"audio": 1, "image": 9, "dropped": 1},  # the file of the caption
        "bee": {"image": 9, "dropped": 0},
        "text": {"text": 9, "dropped": 0},
        "wasp": {"dropped": 1},
    }
    assert list(summary["domains"]) == ["text"]
    page = render_build(build_account(tmp_path / "out"))
    for domain, row in (("bee", '0</td><td class="no">9</td><td class="no">0'), ("wasp", '0</td><td class="no">0')):
        assert f'<td>{domain}</td><td class="no">{row}' in page


@pytest.mark.dist
def test_any_number_of_processes_gives_the_same_tensors(source, built, tmp_path):
    with LocalExecutor(2) as executor:
        build(settings(source, media=MEDIA, duplicates=NEAR), tmp_path, executor)
    assert digest(tmp_path) == digest(built)


def test_other_tensors_invalidate_no_text(source, tmp_path):
    build(settings(source, media=MEDIA, duplicates=NEAR), tmp_path)
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "work").rglob("receipt.json")}
    build(settings(source, media=MEDIA | {"image_size": 24}, duplicates=NEAR), tmp_path)
    work = tmp_path / "work"
    made = {p.relative_to(work).parts[0] for p in work.rglob("receipt.json") if before.get(p) != p.stat().st_mtime_ns}
    assert made == {"read", "media", "dataset", "shards"}
    build(settings(source, duplicates=NEAR), tmp_path)
    assert not (tmp_path / "media").exists()


def test_image_models_train_on_a_built_folder(built, tmp_path):
    """Each batch holds the pixels of its class, scaled to [-1, 1]; both splits are apart."""
    prepared = prepare(str(built), task="image_classification", image_size=16, cache_dir=str(tmp_path))
    assert prepared.classes == ("ant", "bee")
    assert prepared.summary["domains"] == {"images": {"rows": 14, "holdout_rows": 2}}
    rows = table(built, "pixels")
    stored = {row["path"]: np.load(built / "media" / row["file"])[row["first"]] for row in rows}
    held = {row["path"] for row in rows if row["split"] == "holdout"}
    stream = Stream(prepared, seed=1, batch_size=7, micro_batch_size=7, prefetch=0)
    seen = set()
    for step in range(2):
        (batch,) = stream.next_step()
        for number in range(7):
            (where,) = stream.explain(7 * step + number)["documents"]
            seen.add(where["name"])
            expected = stored[where["name"]].astype(np.float32) * np.float32(2 / 255) - np.float32(1)
            assert (batch["pixel_values"][number].numpy() == expected).all()
            assert prepared.classes[int(batch["labels"][number])] == where["name"].split("/")[0]
    assert seen == set(stored) - held
    (batch,) = prepared.eval_batches("images", 8, 1)
    assert len(batch["labels"]) == len(held) == 2


def test_what_image_models_cannot_have(built, source, tmp_path):
    load = {"task": "image_classification", "cache_dir": str(tmp_path / "cache")}
    with pytest.raises(DataError, match="another size"):
        prepare(str(built), image_size=32, **load)
    with pytest.raises(DataError, match="no text"):
        prepare(str(built), cache_dir=str(tmp_path / "cache"))
    build(settings(source), tmp_path / "none")
    with pytest.raises(DataError, match="no pixels"):
        prepare(str(tmp_path / "none"), image_size=16, **load)
    build(settings(source / "ant", media={"image_size": 16}), tmp_path / "one")
    with pytest.raises(DataError, match="Too few images"):
        prepare(str(tmp_path / "one"), image_size=16, **load)


def test_shards_of_pixels_are_one_array(tmp_path):
    every = np.random.default_rng(0).integers(0, 255, (9, 3, 4, 4), np.uint8)
    files = []
    for number, part in enumerate(np.split(every, [2, 3])):
        files.append(tmp_path / f"{number}.npy")
        np.save(files[-1], part)
    pixels = ShardedPixels(files)
    wanted = np.array([8, 0, 2, 1, 2, 7])
    assert pixels.shape == every.shape
    assert (pixels[wanted] == every[wanted]).all()
