"""The images of a built dataset, as training reads them: shards of pixels, labels by domain, and both splits."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tilewright.core.errors import DataError
from tilewright.data.dataset.open_built import read_dataset
from tilewright.data.engine.record_tables import rows


class ShardedPixels:
    """Images of several files as one array, uint8 [N, 3, size, size], memory-mapped."""

    def __init__(self, files: list[Path]):
        self._shards = [np.load(file, mmap_mode="r", allow_pickle=False) for file in files]
        self._starts = np.cumsum([0, *(len(shard) for shard in self._shards)])
        self.shape = (int(self._starts[-1]), *self._shards[0].shape[1:])

    def __getitem__(self, images: np.ndarray) -> np.ndarray:
        """Images of a built dataset, [len(images), 3, size, size], by their numbers."""
        found = np.empty((len(images), *self.shape[1:]), np.uint8)
        shard_of = np.searchsorted(self._starts, images, side="right") - 1
        for shard in np.unique(shard_of).tolist():
            here = np.flatnonzero(shard_of == shard)
            found[here] = self._shards[shard][images[here] - self._starts[shard]]
        return found


@dataclass(frozen=True)
class BuiltImages:
    """Images of a built dataset. `labels` number the `classes`, which are domains; `rows` are the images by split."""

    pixels: ShardedPixels
    labels: np.ndarray
    classes: tuple[str, ...]
    names: list[str]
    rows: dict[str, np.ndarray]
    fingerprint: str


def built_images(folder: Path, image_size: int) -> BuiltImages:
    """The images of the built dataset in `folder`.

    Raises:
        DataError: the dataset has no pixels, others than `image_size` asks for, or no two classes to tell apart.
    """
    content = read_dataset(folder)
    told = content["summary"]["tensors"].get("pixels")
    if told is None:
        raise _unusable("Built dataset holds no pixels of images", folder, "none", f"image_size = {image_size}")
    if told["shape"][-1] != image_size:
        got = f"{told['shape'][-1]} there, data.image_size = {image_size}"
        raise _unusable("Built dataset holds images of another size", folder, got, f"image_size = {image_size}")
    found = [row for row in rows(folder / "media" / "media.parquet") if row["kind"] == "pixels"]
    files = list(dict.fromkeys(row["file"] for row in found))
    classes = tuple(told["domains"])
    splits = np.array([row["split"] for row in found])
    by_split = {split: np.flatnonzero(splits == split) for split in ("train", "holdout")}
    if len(classes) < 2 or not all(len(numbers) for numbers in by_split.values()):
        got = f"{len(classes)} domains with images, {told['train']} to train on, {told['holdout']} held out"
        need = "two domains, which are the classes, and two images in one of them at least"
        raise DataError("Too few images in a built dataset", where=str(folder), got=got, need=need)
    return BuiltImages(
        ShardedPixels([folder / "media" / file for file in files]),
        np.array([classes.index(row["domain"]) for row in found], np.int64),
        classes,
        [row["path"] + (f", {row['part']}" if row["part"] else "") for row in found],
        by_split,
        content["fingerprint"],
    )


def _unusable(what: str, folder: Path, got: str, setting: str) -> DataError:
    need = f"{setting} in [media] of its data.toml"
    return DataError(what, where=str(folder), got=got, need=need, try_="`tilewright data build` again with it")
