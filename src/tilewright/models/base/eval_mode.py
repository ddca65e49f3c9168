"""Evaluation mode for the length of a block, each part's own mode afterwards."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluation(module: nn.Module) -> Iterator[None]:
    """Inside, no part drops values or updates running statistics.

    Example:
        >>> net = nn.Sequential(nn.Dropout(), nn.Linear(2, 2)); net[0] = net[0].eval()
        >>> with evaluation(net): net.training
        False
        >>> net.training, net[0].training, net[1].training
        (True, False, True)
    """
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, training in modes:
            part.training = training
