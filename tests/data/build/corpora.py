"""Small corpora for tests of the data build, the same on every machine, and how two built datasets are compared."""

import hashlib
import json
import random
import threading
import wave
from pathlib import Path

import numpy as np

from tilewright.data.common.progress import ProgressBar
from tilewright.data.engine.build_dataset import build_dataset
from tilewright.data.engine.build_settings import DataBuild
from tilewright.data.engine.executors.build_executor import UnitExecutor
from tilewright.data.engine.executors.local_executor import LocalExecutor
from tilewright.data.engine.executors.rank_executor import RankExecutor

PARTS = ("records", "rejects", "tokens")
_SYLLABLES = [a + b for a in "bdfgklmnprstvz" for b in "aeiou"]


def words(rng: random.Random, num: int) -> list[str]:
    """Words of an invented language, some far more frequent than others."""
    vocabulary = ["".join(rng.choices(_SYLLABLES, k=rng.randint(1, 4))) for _ in range(2000)]
    weights = [1 / (i + 2) for i in range(len(vocabulary))]
    return rng.choices(vocabulary, weights, k=num)


def prose(seed: int, num_words: int = 200) -> str:
    """Paragraphs of sentences."""
    rng = random.Random(seed)
    text, line = [], 0
    for word in words(rng, num_words):
        line += 1
        text.append(word)
        if line > 8 and rng.random() < 0.15:
            text[-1] += "."
            if rng.random() < 0.3:
                text[-1] += "\n\n"
            line = 0
    return " ".join(text).replace("\n\n ", "\n\n") + ".\n"


def changed(text: str, share: float, seed: int) -> str:
    """The text with a share of its words replaced."""
    rng = random.Random(seed)
    old = text.split(" ")
    for i in rng.sample(range(len(old)), int(share * len(old))):
        old[i] = f"w{rng.randrange(10**6)}"
    return " ".join(old)


def write_corpus(folder: Path) -> Path:
    """Two domains of text files, rows of JSON, exact copies and near-copies, and files that are refused."""
    texts = [prose(i) for i in range(60)]
    for i, text in enumerate(texts[:30]):
        _write(folder / "prose" / f"{i:02}.txt", text)
    _write(folder / "prose" / "copy.txt", texts[3])
    _write(folder / "prose" / "near.txt", changed(texts[4], 0.02, 1) + "and a little more of it.\n")
    rows = [json.dumps({"text": text, "id": i}) for i, text in enumerate(texts[30:])]
    _write(folder / "rows" / "rows.jsonl", "\n".join([*rows, "{not json", json.dumps({"other": 1})]) + "\n")
    _write(folder / "rows" / "more.txt", texts[3])
    (folder / "rows" / "image.bin").write_bytes(bytes(range(256)) * 8)
    _write(folder / "prose" / "empty.txt", "")
    _write(folder / "prose" / "blank.txt", " \n\n \n")
    _write(folder / "prose" / "short.txt", "too short\n")
    return folder


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def write_media(folder: Path, classes: tuple[str, ...] = ("ant", "bee"), each: int = 8) -> Path:
    """Images of classes that differ in brightness, one near-copy of the first image of each, smaller, and a tone."""
    from PIL import Image

    for label, name in enumerate(classes):
        (folder / name).mkdir(parents=True, exist_ok=True)
        for i in range(each):
            smooth = np.random.default_rng(100 * label + i).normal(90 + 80 * label, 25, (6, 5, 3)).clip(0, 255)
            large = Image.fromarray(smooth.astype(np.uint8)).resize((60, 50), Image.Resampling.BICUBIC)
            large.save(folder / name / f"{i}.png")
            if not i:
                large.resize((48, 40), Image.Resampling.BILINEAR).save(folder / name / "smaller.jpg", quality=60)
    with wave.open(str(folder / classes[0] / "tone.wav"), "wb") as file:
        file.setparams((1, 2, 8000, 0, "NONE", ""))
        file.writeframes((8000 * np.sin(np.arange(8000) / 3)).astype("<i2").tobytes())
    return folder


def settings(source: Path, **sections: dict) -> DataBuild:
    """Settings of a build of `source` in several small shards."""
    read = {"source": str(source), "shard_bytes": 1 << 16} | sections.pop("read", {})
    tokenizer = {"vocab_size": 400} | sections.pop("tokenizer", {})
    return DataBuild.model_validate({"read": read, "tokenizer": tokenizer, **sections})


def build(config: DataBuild, out: Path, executor: UnitExecutor | None = None) -> dict:
    """Build in this process, unless an executor is given."""
    with ProgressBar("test") as progress:
        return build_dataset(config, out, executor or LocalExecutor(1), progress)


def build_as_ranks(config: DataBuild, out: Path) -> None:
    """Build as two ranks, each a thread of this process."""
    errors: list[BaseException] = []

    def rank(number: int) -> None:
        try:
            build(config, out, RankExecutor(number, 2))
        except BaseException as error:  # noqa: BLE001  raised below
            errors.append(error)

    threads = [threading.Thread(target=rank, args=(number,)) for number in (1, 0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    if errors:
        raise errors[0]


def digest(out: Path) -> dict[str, str]:
    """Hash of every file of a dataset; not of the work folder, whose receipts hold seconds."""
    files = sorted(path for part in PARTS for path in (out / part).rglob("*") if path.is_file())
    files += [out / "dataset.json", out / "README.md"]
    return {path.relative_to(out).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
