"""Near-copies of images: those whose perceptual hashes differ in a few bits. One unit for all, 24 bytes an image.

As with text, images are taken in the order of the rule that says which stays, and one goes only if it resembles one
that stays. Images of one colour are not compared: their hash is of noise.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from tilewright.data.engine.build_context import Context
from tilewright.data.engine.build_stage import BuildStage
from tilewright.data.engine.declared_inputs import Every, FoundValue
from tilewright.data.engine.record_tables import batches
from tilewright.data.readers.media.images import near_images
from tilewright.data.stages.copies.exact_copies import DROP, doc_of, drops_of, exact_ranges, row_of
from tilewright.data.stages.copies.near_copies import greedy
from tilewright.data.stages.kept_records import survivors
from tilewright.data.stages.stage_order import before_copies

BITS = 64
_IMAGE = np.dtype([("doc", "<u8"), ("hash", "<u8"), ("pixels", "<u8")])


def image_copies(
    index: int,
    settings: SimpleNamespace,
    folder: Path,
    *,
    records: Sequence[Path],
    kept: Sequence[Path],
    exact: Sequence[Path],
    shards: Sequence[int],
) -> Mapping[str, Any]:
    """Write which copies of images go (`drops.npy`, sorted by record); their `similarity` is the number of bits that
    differ.

    Args:
        index: 0.
        settings: duplicates.
        folder: gets the file.
        records, kept: folders of the records and of the side tables of all shards.
        exact: folders that say which records go already.
        shards: those with images.
    """
    duplicates = settings.duplicates
    found = [_hashes(shard, records[shard], kept[shard], drops_of(exact, shard)) for shard in shards]
    images = np.concatenate([np.zeros(0, _IMAGE), *found])
    by_size = duplicates.keep != "first"
    order = np.lexsort((images["doc"], -images["pixels"].astype(np.int64) * by_size))
    images = images[order]
    values, first, which = np.unique(images["hash"], return_index=True, return_inverse=True)
    same = np.flatnonzero(first[which] != np.arange(len(images)))  # behind the first image of the same hash
    drops = [(images["doc"][i], images["doc"][first[which[i]]], 0.0) for i in same.tolist()]
    pairs = np.array(near_images(values.tolist(), duplicates.image_distance), np.int64).reshape(-1, 2)
    bits = np.bitwise_count(values[pairs[:, 0]] ^ values[pairs[:, 1]]).astype(np.float32)
    gone: dict[int, tuple[int, float]] = {}
    for goes, stays, differ in greedy(np.argsort(first), pairs[:, 0], pairs[:, 1], bits):
        gone[goes] = stays, differ
        drops.append((images["doc"][first[goes]], images["doc"][first[stays]], differ))
    # The copies of an image that goes itself are near-copies of the one that it goes for.
    leaders = {int(images["doc"][first[goes]]): (images["doc"][first[s]], d) for goes, (s, d) in gone.items()}
    drops = [(doc, *leaders.get(int(stays), (stays, differ))) for doc, stays, differ in drops]
    np.save(folder / "drops.npy", np.sort(np.array(drops, DROP), order="doc"))
    return {"images": len(images), "near_duplicates": len(drops)}


def _hashes(shard: int, records: Path, kept: Path, drops: np.ndarray) -> np.ndarray:
    """Perceptual hashes of the images of a shard that stay so far, to find copies."""
    alive = {row["row"] for row in survivors(kept / "kept.parquet", row_of(drops["doc"]))}
    found = []
    for first, batch in batches(records / "records.parquet", ("modality", "facts")):
        for row, (modality, text) in enumerate(zip(batch["modality"], batch["facts"], strict=True), first):
            if modality == "image" and row in alive:
                facts = json.loads(text)
                if not facts.get("flat"):
                    doc = int(doc_of(shard, np.array([row]))[0])
                    found.append((doc, int(facts["phash"], 16), facts["width"] * facts["height"]))
    return np.array(found, _IMAGE)


def image_units(c: Context) -> int:
    """The units that search for copies of images: one if there are images of which copies go, else none."""
    return int(c.build.duplicates.near and c.total("read", "images") > 0)


def _with_images(c: Context, i: int) -> list[int]:
    return [shard for shard in range(c.num_shards) if c.count("read", shard, "images")]


IMAGES = BuildStage(
    *("images", "comparing images", 1, image_units, image_copies),
    ("duplicates.image_distance", "duplicates.keep"),
    {
        "records": Every("repair"),
        "kept": Every(before_copies),
        "exact": Every("exact", exact_ranges),
        "shards": FoundValue(_with_images),
    },
)
