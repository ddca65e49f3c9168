"""Converters say little that a user can act on: their warnings are held back while one of them writes."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

_LOGGERS = ("torch", "torchao", "executorch", "onnxscript", "onnxruntime", "openvino")
"""torch's exporter warns of each absent library that it could translate, torchao of kernels for other machines."""


@contextmanager
def quiet_converters(*, show: bool = False) -> Iterator[None]:
    """Inside, libraries that convert models log errors only, and warn of nothing; afterwards all is as it was.

    Args:
        show: change nothing.

    Example:
        >>> with quiet_converters():
        ...     logging.getLogger("torchao").isEnabledFor(logging.WARNING)
        False
        >>> logging.getLogger("torchao").isEnabledFor(logging.WARNING)
        True
    """
    if show:
        yield
        return
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    levels = [logger.level for logger in loggers]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for logger in loggers:
                logger.setLevel(logging.ERROR)
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
