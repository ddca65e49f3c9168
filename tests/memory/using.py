"""A slice of an arena for the length of a block."""

from contextlib import contextmanager


@contextmanager
def using(arena, key, *, changed):
    """`fetch`, and `release` at the end of the block, however it ends."""
    tensors = arena.fetch(key)
    try:
        yield tensors
    finally:
        arena.release(key, changed=changed)
