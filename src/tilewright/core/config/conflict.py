"""Settings that contradict each other, as `conflicts` finds and `load` reports them."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Conflict:
    """Settings that cannot be together. `fields` are the ones read to find out."""

    fields: tuple[str, ...]
    what: str
    got: str
    need: str
    try_: str
