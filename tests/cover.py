"""Which cases of a product run by default: few that have every value, or every pair of values; the rest is `slow`."""

import itertools
import random
import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def covering(*axes: Sequence[Any], pairs: bool = True, name: str = "") -> list[Any]:
    """All cases of a product, of which a sample is left unmarked.

    Args:
        axes: the values of each argument.
        pairs: whether each pair of values of two arguments is in the sample, or each value alone.
        name: another one draws another sample.

    Returns:
        Arguments for `pytest.mark.parametrize`, in the order of `itertools.product`.

    Example:
        >>> cases = covering("abc", "xy", (1, 2))
        >>> len(cases), len([case for case in cases if not case.marks])
        (12, 6)
    """
    cases = list(itertools.product(*(range(len(axis)) for axis in axes)))
    left = {part for case in cases for part in _parts(case, pairs)}
    draw = random.Random(zlib.crc32(f"{name} {[len(axis) for axis in axes]}".encode()))
    order = draw.sample(cases, len(cases))
    kept = set()
    while left:
        best = max(order, key=lambda case: len(left & _parts(case, pairs)))
        kept.add(best)
        left -= _parts(best, pairs)
    return [
        pytest.param(
            *(axis[i] for axis, i in zip(axes, case, strict=True)), marks=() if case in kept else pytest.mark.slow
        )
        for case in cases
    ]


def _parts(case: tuple[int, ...], pairs: bool) -> set[tuple[tuple[int, int], ...]]:
    """What a case covers: values, or pairs of them, each with its argument's number."""
    return set(itertools.combinations(enumerate(case), 2 if pairs and len(case) > 1 else 1))


def some(cases: Iterable[Any], *few: Any) -> list[Any]:
    """All cases, of which `few` are left unmarked.

    Args:
        cases: values of one argument, or tuples of those of several.
        few: which of them run by default.

    Returns:
        Arguments for `pytest.mark.parametrize`, in the order of `cases`.

    Raises:
        ValueError: one of `few` is no case.

    Example:
        >>> [bool(case.marks) for case in some("abc", "b")]
        [True, False, True]
    """
    cases = list(cases)
    if unknown := [one for one in few if one not in cases]:
        raise ValueError(f"no cases: {unknown}")
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=() if case in few else pytest.mark.slow)
        for case in cases
    ]
