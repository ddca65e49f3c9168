"""Names of modules that differ only by numbers, written as one; ranges of numbers. Without torch."""

import re
from collections.abc import Sequence

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


def pattern_of(name: str) -> str:
    """A module's name with its numbers replaced: names with one pattern are of one kind.

    Example:
        >>> pattern_of("layers.3.mlp.experts.12.up"), pattern_of("conv2d")
        ('layers.*.mlp.experts.*.up', 'conv2d')
    """
    return _NUMBER.sub("*", name)


def collapse_names(names: Sequence[str]) -> str:
    """Names of one pattern as one, each number as the range of its values.

    Args:
        names: at least one; all with the same `pattern_of`. Not every combination of the numbers need be among them.

    Example:
        >>> collapse_names([f"layers.{i}.mlp.up_proj" for i in (0, 1, 2, 5)]), collapse_names(["layers.3.norm"])
        ('layers.{0-2,5}.mlp.up_proj', 'layers.3.norm')
    """
    values = [{int(number) for number in place} for place in zip(*map(_NUMBER.findall, names), strict=True)]
    texts = iter([f"{{{ranges(sorted(found))}}}" if len(found) > 1 else str(*found) for found in values])
    return _NUMBER.sub(lambda match: next(texts).replace(", ", ","), names[0])


def ranges(indices: Sequence[int]) -> str:
    """Layer numbers as people write them.

    Example:
        >>> ranges([0, 1, 2, 5, 7, 8])
        '0-2, 5, 7-8'
    """
    runs: list[list[int]] = []
    for index in sorted(indices):
        if runs and runs[-1][1] == index - 1:
            runs[-1][1] = index
        else:
            runs.append([index, index])
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)
