"""The content of a GGUF file by its own header. Without torch, so that a consumer starts at once."""

from collections import Counter
from pathlib import Path


def read_formats(path: Path) -> dict[str, int]:
    """Read a GGUF file's formats: number of tensors by format, such as {"q8_0": 43, "f32": 13}."""
    from gguf import GGUFReader

    return dict(Counter(tensor.tensor_type.name.lower() for tensor in GGUFReader(path).tensors))
