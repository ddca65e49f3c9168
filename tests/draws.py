"""Random numbers of tests: what one draws depends on its name and on TEST_SEED, not on which tests ran before it."""

import os
import random
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from hypothesis import settings

TEST_SEED = os.environ.get("TEST_SEED", "0")
"""`make fuzz` has a new one each time: a claim that holds by luck fails there."""


def examples(number: int, **others: Any) -> settings:
    """The `hypothesis.settings` of a property-based test with so many examples: all of them where the profile has a
    hundred, as many in a hundred as it has elsewhere, and at least ten. `others` are settings as they are."""
    of_profile = round(number * settings.default.max_examples / 100)
    return settings(max_examples=max(of_profile, min(number, 10)), **others)


def draw_from(name: str) -> None:
    """Seed the generators of torch, numpy and Python: equal names and TEST_SEED, equal numbers."""
    seed = zlib.crc32(f"{TEST_SEED} {name}".encode())
    if torch.cuda.is_available():
        torch.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)  # `torch.manual_seed` would write a stack for a GPU of later
    np.random.seed(seed)
    random.seed(seed)


@contextmanager
def aside(name: str) -> Iterator[None]:
    """What is drawn inside depends on this name, and what comes after draws as if nothing had happened."""
    before = torch.get_rng_state(), np.random.get_state(), random.getstate()
    draw_from(name)
    try:
        yield
    finally:
        torch.set_rng_state(before[0])
        np.random.set_state(before[1])
        random.setstate(before[2])
