"""Conflicts of each way of spreading a model over processes: one table for each, from which the errors come, and
the lists in the how-tos (`tools/write_layers.py`).
"""

import functools
from collections.abc import Callable, Iterator, Sequence

from tilewright.core.config.model_conflicts import Conflict
from tilewright.core.config.recipe import Recipe

Refused = tuple[Callable[[Recipe], bool], str, str, str, str]
"""(is it so here?, field, what it is called, what is asked for instead, what would do)."""


def refused(recipe: Recipe, setting: str, rows: Sequence[Refused], cannot: str) -> Iterator[Conflict]:
    """The refused rows of a table of conflicts, those that hold in a recipe.

    Args:
        recipe: whose `setting` is above 1.
        setting: the axis, such as `parallel.pp`.
        rows: what does not go with it.
        cannot: said of each.
    """
    for found, field, what, need, try_ in rows:
        if found(recipe):
            here, value = (functools.reduce(getattr, name.split("."), recipe) for name in (setting, field))
            yield Conflict(
                (setting, field),
                f"{what} {cannot}",
                f"{setting} = {here}, {field} = {value}",
                need,
                try_ if setting in try_ else f"{try_}, or --{setting} 1",
            )
