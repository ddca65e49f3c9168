"""Guard around lm-evaluation-harness: undoes what it changes in this process, when it is through.

It sets a variable at import, seeds three generators, and logs and warns as a program of its own.
"""

import logging
import random
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from tilewright.core import env

_LOGGERS = ("lm_eval", "datasets", "huggingface_hub", "httpx", "fsspec")
SEEDS = (0, 1234, 1234)
"""Of Python, numpy and torch: the harness' own defaults."""


@contextmanager
def contained(verbose: bool = False) -> Iterator[None]:
    """Guard the lm_eval harness: it runs inside this context, seeded as its own command line seeds it.

    Args:
        verbose: show what it and the libraries below it log and warn.
    """
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    levels = [(logger, logger.level) for logger in loggers]
    states = random.getstate(), np.random.get_state(), torch.random.get_rng_state()
    try:
        with env.unchanged(), warnings.catch_warnings():
            if not verbose:
                warnings.simplefilter("ignore")
                for logger in loggers:
                    logger.setLevel(logging.CRITICAL)
            random.seed(SEEDS[0])
            np.random.seed(SEEDS[1])
            torch.manual_seed(SEEDS[2])
            yield
    finally:
        for logger, level in levels:
            logger.setLevel(level)
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.random.set_rng_state(states[2])
