"""Tests do not wait for the disk: they end processes, and what a process has written outlives it without a sync.

A run of six steps syncs 53 times, which on a busy disk takes as long as its steps. That files are on the disk before
they have their names is a test of its own (`tests.core.test_atomic_io`).
"""

import os


def not_waited_for(file: int) -> None:
    """In the place of `os.fsync`: the file must be open.

    Raises:
        OSError: it is not.
    """
    os.fstat(file)
