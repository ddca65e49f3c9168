"""Images by Pillow: turned as EXIF says, measured, hashed; pixels on request. Their text is the caption beside them."""

import warnings
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from tilewright.data.common.records import Record, Rejected
from tilewright.data.readers.file_entry import Entry
from tilewright.data.readers.media.captions import caption_of
from tilewright.data.readers.parser_errors import PARSER_ERRORS, damage_of

FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
"""What Pillow may open. Others, such as EPS, start programs."""
_HASH_INPUT = 32
_ORIENTATION = 0x0112
_FLAT = 4  # steps of grey between the darkest and the brightest point: less is what compression leaves of one colour


def read_image(entry: Entry) -> Iterator[Record | Rejected]:
    """Read an image: a record with width, height (after the turn), mode, format, phash; the first frame of several.

    An image of one colour has the fact flat: its perceptual hash says nothing.
    """
    entry.need("PIL")
    from PIL import Image

    size = entry.path.stat().st_size
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of damaged EXIF; the size of images is bounded here
        try:
            with Image.open(entry.path, formats=FORMATS) as image:
                num = image.width * image.height  # of the header: nothing is decoded yet
                item = _facts(image, entry.options.image_size) if num <= entry.limits.pixels else num
        except (Image.DecompressionBombError, *PARSER_ERRORS) as error:
            item = error
    if isinstance(item, int):
        yield entry.reject("pixels", float(item), entry.limits.pixels, num_bytes=size)
    elif isinstance(item, BaseException):
        bomb = isinstance(item, Image.DecompressionBombError)
        rule, threshold = ("pixels", entry.limits.pixels) if bomb else ("damaged image", "")
        yield entry.reject(rule, damage_of(item), threshold, num_bytes=size)
    else:
        facts, arrays = item
        caption = caption_of(entry.path, entry.limits.document_bytes, entry.folders)
        said = {"alt": caption.alt, "caption_from": caption.source}
        facts |= {name: value for name, value in said.items() if value}
        yield entry.record("image", caption.text, stop=size, facts=facts, arrays=arrays)


def _facts(image: Any, size: int) -> tuple[dict[str, int | str], dict[str, np.ndarray]]:
    from PIL import Image, ImageOps

    facts = {"format": str(image.format).lower(), "mode": image.mode}
    if getattr(image, "is_animated", False):
        facts["animated"] = 1
    orientation = image.getexif().get(_ORIENTATION, 1)
    turned = ImageOps.exif_transpose(image)
    facts |= {"width": turned.width, "height": turned.height}
    if orientation in range(2, 9):
        facts["exif_orientation"] = int(orientation)
    rgb = turned.convert("RGB")
    grey = rgb.convert("L").resize((_HASH_INPUT, _HASH_INPUT), Image.Resampling.LANCZOS)
    facts["phash"] = f"{perceptual_hash(np.asarray(grey)):016x}"
    if np.ptp(np.asarray(grey)) < _FLAT:
        facts["flat"] = 1
    if not size:
        return facts, {}
    square = ImageOps.fit(rgb, (size, size), Image.Resampling.BICUBIC)
    return facts, {"pixels": np.asarray(square).transpose(2, 0, 1).copy()}


def perceptual_hash(grey: np.ndarray) -> int:
    """Perceptual hash (pHash, Zauner 2010) of an image: 64 bits, 1 where a low frequency of it is above the median.

    Args:
        grey: [32, 32], any numeric dtype.

    Returns:
        The bits of the 8x8 lowest frequencies of the two-dimensional DCT-II, row by row, the first the highest bit.
    """
    k, x = np.arange(8)[:, None], np.arange(_HASH_INPUT)[None]
    basis_KX = np.cos(np.pi * k * (2 * x + 1) / (2 * _HASH_INPUT))
    low_KK = basis_KX @ grey.astype(np.float64) @ basis_KX.T
    bits = (low_KK > np.median(low_KK)).ravel()
    return int.from_bytes(np.packbits(bits).tobytes(), "big")


def near_images(hashes: Sequence[int], distance: int) -> list[tuple[int, int]]:
    """Pairs (i, j), i < j, of perceptual hashes that differ in at most `distance` bits (under 16), sorted.

    Hashes within d bits agree in one of d + 1 bands at least, so only those that share a band are compared.

    Example:
        >>> near_images([0b0000, 0b0011, 0b1111], 2)
        [(0, 1), (1, 2)]
    """
    assert 0 <= distance < 16
    values = np.array(hashes, np.uint64)
    bounds = np.linspace(0, 64, distance + 2).astype(int)
    pairs: set[tuple[int, int]] = set()
    for low, high in pairwise(bounds):
        band = (values >> np.uint64(low)) & np.uint64((1 << int(high - low)) - 1)
        order = np.argsort(band, kind="stable")
        starts = np.flatnonzero(np.diff(band[order], prepend=band[order][:1] + np.uint64(1)))
        for same in np.split(order, starts[1:]):
            for at, i in enumerate(same[:-1]):
                others = same[at + 1 :]
                near = others[np.bitwise_count(values[others] ^ values[i]) <= distance]
                pairs.update((min(int(i), int(j)), max(int(i), int(j))) for j in near)
    return sorted(pairs)
