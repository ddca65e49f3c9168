"""Files of every kind in one build: text of old encodings, documents, archives, images and sound, beside plain text."""

import json
import wave
import zipfile

import numpy as np
import pyarrow.parquet as pq
import pytest

from tests.data.build.corpora import build, prose, settings


def test_all_kinds_are_in_one_dataset(tmp_path):
    image = pytest.importorskip("PIL.Image")
    for package in ("selectolax", "soundfile", "charset_normalizer"):
        pytest.importorskip(package)
    source = tmp_path / "in"
    source.mkdir()
    for i in range(12):
        (source / f"{i}.txt").write_text(prose(i))
    russian = "Все люди рождаются свободными и равными в своём достоинстве и правах. Они наделены разумом и совестью. "
    (source / "old.txt").write_bytes((russian * 20).encode("koi8-r"))
    (source / "page.html").write_text(f"<html><head><title>T</title></head><body><p>{prose(50)}</p></body></html>")
    with zipfile.ZipFile(source / "some.zip", "w") as archive:
        archive.writestr("inside/a.txt", prose(51))
    for name, seed in (("with", 0), ("without", 1)):
        pixels = np.random.default_rng(seed).integers(0, 255, (40, 30, 3), np.uint8)
        image.fromarray(pixels).save(source / f"{name}.png")
    (source / "with.txt").write_text("A caption of some noise, in words.")
    with wave.open(str(source / "tone.wav"), "wb") as file:
        file.setparams((1, 2, 8000, 0, "NONE", ""))
        file.writeframes((8000 * np.sin(np.arange(8000) / 3)).astype("<i2").tobytes())
    (source / "torn.png").write_bytes((source / "with.png").read_bytes()[:60])
    content = build(settings(source), tmp_path / "out")
    found: dict[str, dict] = {}
    for file in sorted((tmp_path / "out" / "records").glob("*.parquet")):
        for row in pq.read_table(file).to_pylist():
            found[row["path"]] = row | {"split": file.name.partition("-")[0]}
    assert russian.strip() in found["old.txt"]["text"]
    assert prose(50).split("\n")[0][:40] in found["page.html"]["text"]
    assert (found["some.zip"]["part"], found["some.zip"]["text"]) == ("inside/a.txt", prose(51).strip("\n"))
    assert found["with.png"]["text"] == "A caption of some noise, in words."
    assert (found["without.png"]["split"], found["without.png"]["modality"]) == ("media", "image")
    facts = json.loads(found["without.png"]["facts"])
    assert (facts["width"], facts["height"]) == (30, 40)
    assert (found["tone.wav"]["split"], found["tone.wav"]["modality"]) == ("media", "audio")
    rejects = {row["path"]: row["rule"] for row in pq.read_table(tmp_path / "out" / "rejects").to_pylist()}
    assert rejects["torn.png"] == "damaged image"
    read = content["summary"]["read"]
    for name, counts in read.items():
        assert counts["found"] == counts["used"] + counts["refused"], name
    assert content["summary"]["media"] == 2
