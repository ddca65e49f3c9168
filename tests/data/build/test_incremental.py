"""A build in a folder that holds an older one gives what a build in an empty folder gives, whatever changed between."""

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image

from tests.data.build.corpora import build, digest, prose, settings
from tilewright.core.atomic_io import hash_file
from tilewright.data.engine.build_context import Context
from tilewright.data.engine.build_settings import DataBuild
from tilewright.data.engine.unit_folders import RECEIPT, TOLD
from tilewright.data.stages.all_stages import STAGES
from tilewright.data.stages.chat.render_conversations import RENDER, TEMPLATE

ENCODINGS = ("utf-8", "latin-1", "utf-16", "utf-16-be", "cp1252")
SHARD_BYTES = 1 << 16
"""The least: some files are read in ranges, and a few make several shards."""


def _text(rng: random.Random) -> bytes:
    text = prose(rng.randrange(40), rng.choice((5, 60, 200, 900, 14_000)))
    if rng.random() < 0.4:
        text = text.replace("a", "é")
    if rng.random() < 0.1:
        text = text.encode().decode("cp1252", "replace")  # mojibake
    return text.encode(rng.choice(ENCODINGS), "replace")


def _files(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*") if path.is_file())


def _new_name(root: Path, rng: random.Random) -> Path:
    return root / rng.choice("xyz") / f"{rng.randrange(12)}{rng.choice(('.txt', '.md'))}"


def _write(root: Path, rng: random.Random) -> None:
    path = _new_name(root, rng)
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(_text(rng))


def _remove(root: Path, rng: random.Random) -> None:
    rng.choice(_files(root)).unlink()


def _move(root: Path, rng: random.Random) -> None:
    path = _new_name(root, rng)
    path.parent.mkdir(exist_ok=True)
    rng.choice(_files(root)).replace(path)


def _copy(root: Path, rng: random.Random) -> None:
    path = _new_name(root, rng)
    path.parent.mkdir(exist_ok=True)
    source = rng.choice(_files(root))
    if source != path:
        shutil.copy2(source, path)


def _merge_folders(root: Path, rng: random.Random) -> None:
    """`mv` of the files of a domain into another."""
    source, target = rng.sample([root / name for name in "xyz"], 2)
    for path in _files(source) if source.is_dir() else ():
        target.mkdir(exist_ok=True)
        path.replace(target / path.name)


def _rename_folder(root: Path, rng: random.Random) -> None:
    source, target = rng.sample([root / name for name in "xyz"], 2)
    if source.is_dir() and not target.is_dir():
        source.rename(target)


def _same_size_and_time(root: Path, rng: random.Random) -> None:
    """Other content under the same name, with the same size and modification time."""
    path = rng.choice(_files(root))
    before = path.stat()
    data = bytearray(path.read_bytes())
    for _ in range(20):
        at = rng.randrange(len(data))
        if path.suffix in (".txt", ".md") and chr(data[at]).isalpha() and data[at] < 128:
            data[at] = rng.choice(b"qxj")
    path.write_bytes(bytes(data))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def _swap(root: Path, rng: random.Random) -> None:
    """Two files change places, with their times."""
    files = _files(root)
    if len(files) > 1:
        one, other = rng.sample(files, 2)
        one.rename(root / "swap")
        other.rename(one)
        (root / "swap").rename(other)


def _append(root: Path, rng: random.Random) -> None:
    with rng.choice(_files(root)).open("ab") as file:
        file.write(b"\n" + prose(rng.randrange(40), 50).encode())


def _image(root: Path, rng: random.Random) -> None:
    """An image, in most cases with its text in a file beside it or in a table one folder up."""
    path = root / rng.choice("xyz") / f"{rng.randrange(12)}.png"
    path.parent.mkdir(exist_ok=True)
    pixels = np.random.default_rng(rng.randrange(20)).integers(0, 255, (6, 6, 3), np.uint8)
    Image.fromarray(pixels).resize((40, 40), Image.Resampling.BICUBIC).save(path)
    _caption(root, rng)


def _caption(root: Path, rng: random.Random) -> None:
    """The text of some image, which may be there already, or not at all."""
    name, text = f"{rng.choice('xyz')}/{rng.randrange(12)}.png", prose(rng.randrange(40), 12)
    if rng.random() < 0.5:
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).with_suffix(".txt").write_text(text)
    else:
        with (root / "captions.jsonl").open("a") as file:
            file.write(json.dumps({"file_name": name, "text": text}) + "\n")


CHANGES: tuple[Callable[[Path, random.Random], None], ...] = (
    *(_write, _write, _remove, _move, _copy, _merge_folders, _rename_folder, _same_size_and_time, _swap, _append),
    *(_image, _image, _caption),
)


def _begin(root: Path, rng: random.Random) -> None:
    for _ in range(10):
        _write(root, rng)
    for _ in range(6):
        _image(root, rng)


def _check(folder: Path, seed: int, num_changes: int) -> None:
    rng = random.Random(seed)
    root = folder / "in"
    root.mkdir()
    _begin(root, rng)
    config = settings(root, read={"shard_bytes": SHARD_BYTES}, tokenizer={"vocab_size": 300}, media={"image_size": 8})
    build(config, folder / "out")
    for number in range(num_changes):
        change = rng.choice(CHANGES)
        change(root, rng)
        if len(_files(root)) < 4:
            _begin(root, rng)
        build(config, folder / "out")
        fresh = folder / "fresh"
        build(config, fresh)
        old, new = digest(folder / "out"), digest(fresh)
        differ = sorted(name for name in old | new if old.get(name) != new.get(name))
        assert not differ, f"seed {seed}, change {number}, {change.__name__}: {differ}"
        shutil.rmtree(fresh)


@pytest.mark.parametrize("seed", range(2))
def test_incremental_is_fresh(tmp_path, seed):
    _check(tmp_path, seed, 3)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(100, 120))
def test_incremental_is_fresh_over_500_changes(tmp_path, seed):
    _check(tmp_path, seed, 25)


def test_merged_domains_have_the_split_of_a_fresh_build(tmp_path):
    """The held-out part depends on which domain a record is in, which no text says."""
    root = tmp_path / "in"
    for number in range(24):
        path = root / "ab"[number % 2] / f"{number}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(prose(number, 80))
    config = settings(root)
    before = build(config, tmp_path / "out")
    for path in _files(root / "b"):
        path.rename(root / "a" / path.name)
    after = build(config, tmp_path / "out")
    assert after["fingerprint"] != before["fingerprint"]
    build(config, tmp_path / "fresh")
    assert digest(tmp_path / "out") == digest(tmp_path / "fresh")


FILTER = """
import tilewright

class All(tilewright.RecordFilter):
    def judge(self, record):
        return None
"""


def test_a_stage_reads_nothing_but_what_it_declares(tmp_path):
    """Each stage gives the bytes that it gave in the build where nothing is on disk but what its fingerprint is of.

    Settings that it does not declare are no attributes of what it gets.
    """
    root, out = tmp_path / "in", tmp_path / "out"
    for number in range(40):
        path = root / "ab"[number % 2] / f"{number}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(prose(number, 80))
    for number in range(8):
        pixels = np.random.default_rng(number % 6).integers(0, 255, (6, 6, 3), np.uint8)
        Image.fromarray(pixels).resize((40, 40), Image.Resampling.BICUBIC).save(root / "a" / f"{number}.png")
    sections = {
        "quality": {"good": str(root / "a"), "bad": str(root / "b"), "keep_top": 1.0, "allow_weak": True},
        "noise": {"clean": "corpus", "allow_weak": True},
        "sample": {"reference": "corpus"},
        "repair": {"repeated_lines": 3},
        "media": {"image_size": 8},
        "filters": {"use": {"all": f"{tmp_path}/all.py:All"}},
    }
    (tmp_path / "all.py").write_text(FILTER)
    config = settings(root, **sections)
    ran = stages_run_alone(config, out, tmp_path)
    assert ran == [stage.name for stage in STAGES if stage not in (TEMPLATE, RENDER)]


def stages_run_alone(config: DataBuild, out: Path, tmp_path: Path) -> list[str]:
    """The stages of a build, each of which was run again among nothing but its inputs."""
    build(config, out)
    ran = []
    for stage in STAGES:
        context = TracedContext(config, out)
        if stage.units(context):
            stage.fingerprint(context, 0)
            declared, work, made = context.read, stage.work(context, 0), tmp_path / stage.name
            hidden = (out / "work").rename(tmp_path / "hidden")
            for name, index, told in declared:
                _link_unit(hidden / name / f"{index:05}", out / "work" / name / f"{index:05}", told)
            made.mkdir()
            work(made)
            shutil.rmtree(out / "work", ignore_errors=True)
            hidden.rename(out / "work")
            assert _hashes(made) == _receipt(context.folder(stage.name)), stage.name
            ran.append(stage.name)
    return ran


def _receipt(folder: Path) -> dict[str, str]:
    """Files of a finished unit, and the hash of each."""
    return {name: digest for name, (_, digest) in json.loads((folder / RECEIPT).read_bytes())["files"].items()}


def _hashes(folder: Path) -> dict[str, str]:
    return {path.relative_to(folder).as_posix(): hash_file(path) for path in _files(folder)}


def _link_unit(unit: Path, target: Path, told: bool) -> None:
    """What the unit hands on, or what it tells of itself, in another folder."""
    for name in _receipt(unit):
        if (name in TOLD) == told:
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            os.link(unit / name, target / name)


class TracedContext(Context):
    """Records the units that a fingerprint is taken of."""

    def __init__(self, config: DataBuild, out: Path):
        super().__init__(config, out)
        self.read: set[tuple[str, int, bool]] = set()

    def one(self, stage: str, index: int = 0) -> str:
        self.read.add((stage, index, False))
        return super().one(stage, index)

    def told_one(self, stage: str, index: int) -> str:
        self.read.add((stage, index, True))
        return super().told_one(stage, index)


def test_no_caption_is_in_both_splits(tmp_path):
    """Images that share a caption are held out together, whatever the number of captions."""
    root = tmp_path / "in" / "d"
    root.mkdir(parents=True)
    for number in range(40):
        pixels = np.random.default_rng(number).integers(0, 255, (6, 6, 3), np.uint8)
        Image.fromarray(pixels).resize((40, 40), Image.Resampling.BICUBIC).save(root / f"{number}.png")
        (root / f"{number}.txt").write_text(prose(number % 5, 12))
    build(settings(root.parent, split={"holdout": 0.3}), tmp_path / "out")
    texts = {
        split: [
            row["text"]
            for file in (tmp_path / "out" / "records").glob(f"{split}-*")
            for row in pq.read_table(file, columns=["text"]).to_pylist()
        ]
        for split in ("train", "holdout")
    }
    assert len(texts["train"]) > 10, texts
    assert len(texts["holdout"]) > 5, texts
    assert not set(texts["train"]) & set(texts["holdout"])
