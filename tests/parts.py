"""A part of the tests, so that all slow ones run over days where one day has no time for them."""

import argparse
import zlib
from typing import NamedTuple


class Part(NamedTuple):
    """The tests of one of so many parts. Each test is in one part, which its name alone decides.

    Args:
        number: of the part, from 1.
        of: how many parts there are.
    """

    number: int
    of: int

    def has(self, nodeid: str) -> bool:
        """Whether this test is in it."""
        return zlib.crc32(nodeid.encode()) % self.of == self.number - 1


def part(text: str) -> Part:
    """What is typed after `--part`.

    Raises:
        ArgumentTypeError: the text is no part.

    Example:
        >>> part("3/10")
        Part(number=3, of=10)
    """
    number, _, of = text.partition("/")
    if number.isdecimal() and of.isdecimal() and 1 <= int(number) <= int(of):
        return Part(int(number), int(of))
    raise argparse.ArgumentTypeError(f"{text!r} is no part: 3/10 is the third of ten")
