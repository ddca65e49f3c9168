"""Images for classification: a folder with one sub-folder a class, decoded once into a memory-mapped array.

Speaks the same language to `Stream` as text does, so order, mixture, resume and prefetch are the same code; all images
are one domain. Needs Pillow (extra `hf`).
"""

import json
import os
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from tilewright.core.atomic_io import hash_file
from tilewright.core.errors import DataError
from tilewright.data.batches.mixture_order import Picks, permute
from tilewright.data.batches.tensors import Batch, as_tensors
from tilewright.data.batches.token_rows import IGNORE
from tilewright.data.common.cache_entries import cached
from tilewright.data.common.progress import ProgressBar, timed
from tilewright.data.dataset.account import account_of_files, listed
from tilewright.data.dataset.built_images import BuiltImages, ShardedPixels, built_images
from tilewright.data.dataset.open_built import read_dataset
from tilewright.data.sources.find_files import Found, find_files, stat_key
from tilewright.data.sources.path_purpose import IMAGES
from tilewright.data.stages.merge_shards import TOKENS

DOMAIN = "images"
_FORMAT = 2  # of the cache entry; a change makes old entries unused
_MAX_PIXELS = 1 << 26  # three bytes each once decoded; Pillow itself refuses at 179 million
SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm")


class PreparedImages:
    """Prepared images; see `PreparedData` for the attributes they share. `classes` are the sub-folders, sorted."""

    tokenizer = None
    task = "image_classification"
    domains = eval_domains = (DOMAIN,)
    notes: tuple[str, ...] = ()
    attention_share: float = 1.0
    """See `PreparedData`."""

    def __init__(self, folder: Path, images: BuiltImages, summary: dict[str, Any]):
        self.folder = folder
        self.fingerprint, self.classes, self.summary = images.fingerprint, images.classes, summary
        self._names, self._pixels, self._labels, self._rows = images.names, images.pixels, images.labels, images.rows
        self.num_rows: Mapping[str, int] = {DOMAIN: len(self._rows["train"])}

    @property
    def vocab_size(self) -> int:
        """Classes that a model of prepared images tells apart."""
        return len(self.classes)

    def train_arrays(self, picks: Picks, seed: int) -> dict[str, np.ndarray]:
        """Prepared images of training rows: pixel_values float32 [B, 3, H, W] in [-1, 1] and labels int64 [B]; the seed
        changes nothing."""
        return self._gather(self._rows["train"][picks.row])

    def blank_row(self) -> dict[str, np.ndarray]:
        """A blank row of prepared images: a black image without a label."""
        shape = (1, *self._pixels.shape[1:])
        return {"pixel_values": np.zeros(shape, np.float32), "labels": np.array([IGNORE], np.int64)}

    def eval_batches(self, domain: str, micro_batch_size: int, num: int) -> list[Batch]:
        """Return at most `num` batches of held-out prepared images, the same on every call."""
        size = len(self._rows["holdout"])
        take = min(num * micro_batch_size, size)
        order = permute(np.arange(take), np.full(take, size), np.full(take, 0, np.uint64))
        batches = [order[start : start + micro_batch_size] for start in range(0, take, micro_batch_size)]
        gathered = [self._gather(self._rows["holdout"][rows]) for rows in batches]
        return [as_tensors(batch) for batch in gathered]

    def eval_bytes(self, domain: str, micro_batch_size: int, num: int) -> None:
        """Bytes of text of prepared images: they have none."""
        return

    def compressors(self, domain: str) -> dict[str, float]:
        """Losses of compressors on prepared images: empty, since images have none."""
        return {}

    def _gather(self, images: np.ndarray) -> dict[str, np.ndarray]:
        pixels = self._pixels[images].astype(np.float32) * np.float32(2 / 255) - np.float32(1)
        return {"pixel_values": pixels, "labels": self._labels[images]}

    def describe_row(self, domain: str, row: int) -> list[dict[str, Any]]:
        """The file of a training row of prepared images."""
        return [{"name": self._names[self._rows["train"][row]]}]

    def rejects(self) -> list[dict[str, Any]]:
        """Rejects of prepared images: everything that was set aside: where, reason, count, example."""
        lines = (self.folder / "rejects.jsonl").read_text(encoding="utf-8").split("\n")
        return [json.loads(line) for line in lines if line]


def open_built_images(folder: Path, image_size: int) -> PreparedImages:
    """Prepared images of a built dataset (`data.build`), whose domains are the classes.

    Raises:
        DataError: it has no pixels of this size, or too few of them.
    """
    images = built_images(folder, image_size)
    summary = dict(read_dataset(folder)["summary"])
    rows = {"rows": len(images.rows["train"]), "holdout_rows": len(images.rows["holdout"])}
    summary |= {"images": len(images.names), "classes": len(images.classes), "domains": {DOMAIN: rows}}
    return PreparedImages(folder / TOKENS, images, summary)


def _open_entry(folder: Path) -> PreparedImages:
    meta = json.loads((folder / "meta.json").read_bytes())
    rows = {split: np.array(meta[split], np.int64) for split in ("train", "holdout")}
    labels = np.load(folder / "labels.npy", allow_pickle=False)
    pixels = ShardedPixels([folder / "pixels.npy"])
    images = BuiltImages(pixels, labels, tuple(meta["classes"]), meta["names"], rows, meta["fingerprint"])
    return PreparedImages(folder, images, meta["summary"])


def prepare_images(
    source: str,
    root: Path,
    *,
    image_size: int,
    holdout: float,
    seed: int,
    before: Callable[[], None] | None = None,
) -> PreparedImages:
    """Prepare a folder of images. Arguments as in `prepare`; `root` is the cache folder,
    `before` that of `cached`.

    Raises:
        DataError: no such folder, fewer than two classes with images, or Pillow is missing.
    """
    _need_pillow()
    found = list_images(Path(source).expanduser())
    digest = xxhash.xxh3_64(f"{_FORMAT}\0{image_size}\0{holdout}\0{seed}".encode())
    for name, path, status in found.files:
        digest.update(os.fsencode(f"{path.resolve()}\0{name}\0{stat_key(status)}\n"))
    for reject in found.rejects:
        digest.update(f"{reject.path}\0{reject.rule}\n".encode())

    def build(folder: Path) -> None:
        timed("preparing images", build_images, folder, source, found, image_size, holdout, seed)

    return _open_entry(cached(root, f"images-{digest.hexdigest()}", build, before))


def _need_pillow() -> None:
    try:
        import PIL  # noqa: F401
    except ImportError:
        raise DataError(
            "Images cannot be read",
            got="Pillow is not installed",
            need="Pillow 10 or newer",
            try_='pip install "tilewright[hf]"',
        ) from None


def list_images(root: Path) -> Found:
    """List images to prepare: files two levels below `root`, the first level their class; what lies elsewhere becomes
    rejects.

    Raises:
        DataError: no such folder, or fewer than two folders in it.
    """
    found = find_files(root) if root.is_dir() else Found()
    classes = {name.split("/")[0] for name, _, _ in found.files if "/" in name}
    if len(classes) < 2:
        what = f"with {len(classes)} sub-folders that hold files" if root.is_dir() else "which is not a folder"
        raise IMAGES.absent(root, str(root), what)
    files, found.files = found.files, []
    for name, path, status in files:
        if not stat.S_ISREG(status.st_mode):
            found.refuse(name, "not a regular file")
        elif name.count("/") != 1:
            found.refuse(name, "not directly in the folder of a class", size=status.st_size)
        else:
            found.files.append((name, path, status))
    return found


def build_images(
    folder: Path,
    source: str,
    found: Found,
    image_size: int,
    holdout: float,
    seed: int,
    *,
    progress: ProgressBar,
) -> None:
    """Fill `folder` with prepared images, the files of the entry. Arguments as in `prepare`; `found`: the images, see
    `list_images`.

    Raises:
        DataError: fewer than two classes, or none with two images that can be read.
    """
    progress.phase("decoding", len(found.files))
    names, pixels, labels, seen = [], [], [], {}
    for name, path, status in found.files:
        progress.advance(1)
        image = _decode(path, image_size)
        if isinstance(image, str):
            found.refuse(name, image, size=status.st_size)
            continue
        # Duplicates by pixels, not by the bytes of the file: the same picture saved twice could be held out and
        # trained on.
        digest = xxhash.xxh3_128_digest(image.tobytes())
        if digest in seen:
            found.refuse(name, "duplicate image", seen[digest], status.st_size)
            continue
        seen[digest] = name
        names.append(name)
        pixels.append(image)
        labels.append(name.split("/")[0])
    classes = sorted(set(labels))
    split = _split(names, labels, holdout, seed)
    if len(classes) < 2 or not split["holdout"]:
        raise DataError(
            "Too few usable images",
            where=source,
            got=f"{len(names)} images in {len(classes)} classes"
            + (f"; {found.rejects[-1].rule}" if found.rejects else ""),
            need="two classes, and two images in one of them at least",
            try_=f"images of the types {', '.join(sorted(SUFFIXES))} in two sub-folders of {source}",
        )
    # meta.json comes last, with a fingerprint of the arrays and the split.
    np.save(folder / "pixels.npy", np.stack(pixels))
    np.save(folder / "labels.npy", np.array([classes.index(label) for label in labels], np.int64))
    with (folder / "rejects.jsonl").open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(listed(reject), ensure_ascii=False) + "\n" for reject in found.rejects)
    content = hash_file(folder / "pixels.npy") + hash_file(folder / "labels.npy") + json.dumps(split)
    meta = {"fingerprint": xxhash.xxh3_128_hexdigest(content.encode()), "classes": classes, "names": names, **split}
    meta["summary"] = _summary(source, names, classes, found, split)
    (folder / "meta.json").write_text(json.dumps(meta))


def _decode(path: Path, size: int) -> np.ndarray | str:
    """Decode an image to prepare it as uint8 [3, size, size], its middle square scaled; or why it cannot be read."""
    if path.suffix.lower() not in SUFFIXES:
        return f"file type {path.suffix.lower() or 'without a suffix'} is not an image"
    from PIL import Image, ImageOps

    try:
        with Image.open(path) as image:
            if image.width * image.height > _MAX_PIXELS:  # known from the header, nothing is decoded yet
                return f"more than {_MAX_PIXELS} pixels: {image.width} x {image.height}"
            square = ImageOps.fit(ImageOps.exif_transpose(image).convert("RGB"), (size, size), Image.Resampling.BICUBIC)
            return np.asarray(square).transpose(2, 0, 1).copy()
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        return f"damaged image ({type(error).__name__})"


def _split(names: list[str], labels: list[str], holdout: float, seed: int) -> dict[str, list[int]]:
    """Split prepared images: indices of both splits; each class with two images or more holds out one at least."""
    split: dict[str, list[int]] = {"train": [], "holdout": []}
    for label in sorted(set(labels)):
        members = [i for i, other in enumerate(labels) if other == label]
        members.sort(key=lambda i: xxhash.xxh3_64_intdigest(f"{seed}\0{names[i]}".encode()))
        held = min(len(members) - 1, max(1, round(holdout * len(members))))
        split["holdout"] += members[:held]
        split["train"] += members[held:]
    return split


def _summary(source: str, names: list[str], classes: list[str], found: Found, split: dict) -> dict[str, Any]:
    used = set(names)
    account = account_of_files(found.sizes, used, found.rejects)
    return {
        "source": source,
        "images": len(names),
        "classes": len(classes),
        "duplicates": account["refused"].get("duplicate image", {"files": 0})["files"],
        **account,
        "domains": {DOMAIN: {"rows": len(split["train"]), "holdout_rows": len(split["holdout"])}},
    }
