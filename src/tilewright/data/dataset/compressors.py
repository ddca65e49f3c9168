"""The size of the held-out text under general compressors: the marks that a model's bits per byte are compared with.

A language model is a compressor (Shannon 1951): its loss in bits per byte is the size that an arithmetic coder would
reach with it. A model above `gzip -9` has learned little but which words there are.
"""

import lzma
import zlib
from collections.abc import Iterable, Mapping

COMPRESSORS = ("gzip", "xz")
"""Each at its strongest level, -9."""

_XZ_DICTIONARY = 64 << 20  # of xz -9
_XZ_LEAST_DICTIONARY = 4096


def pooled_bits(bits: Mapping[str, Mapping[str, float]], num_bytes: Mapping[str, float]) -> dict[str, float]:
    """Bits per byte by compressor, pooled over several domains; one that a domain has no number of is left out.

    Args:
        bits: by domain, see `compressor_bits`.
        num_bytes: bytes of each domain, the weights.

    Example:
        >>> pooled_bits({"code": {"gzip": 1.0, "xz": 0.5}, "prose": {"gzip": 2.0}}, {"code": 3, "prose": 1})
        {'gzip': 1.25}
    """
    total = sum(num_bytes.values())
    names = [name for name in COMPRESSORS if total and all(name in bits.get(domain, {}) for domain in num_bytes)]
    return {name: sum(bits[domain][name] * size for domain, size in num_bytes.items()) / total for name in names}


def compressor_bits(texts: Iterable[bytes | bytearray]) -> dict[str, float]:
    """Bits per byte of all `texts` in one compressed file, by compressor; empty without text.

    Example:
        >>> bits = compressor_bits([b"to be or not to be"] * 1000)
        >>> sorted(bits), all(0 < value < 0.2 for value in bits.values())
        (['gzip', 'xz'], True)
    """
    text = b"".join(texts)
    if not text:
        return {}
    gzip = zlib.compressobj(9, wbits=31)
    # A dictionary above the text's size changes no byte, and xz -9 would take 674 MB for it.
    size = min(_XZ_DICTIONARY, max(_XZ_LEAST_DICTIONARY, len(text)))
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 9, "dict_size": size}]
    sizes = {
        "gzip": len(gzip.compress(text)) + len(gzip.flush()),
        "xz": len(lzma.compress(text, format=lzma.FORMAT_XZ, filters=filters)),
    }
    return {name: round(8 * size / len(text), 4) for name, size in sizes.items()}
