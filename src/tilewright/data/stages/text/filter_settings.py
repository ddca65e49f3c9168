"""Settings of the user's own filters: `[filters]` of a data.toml."""

import re
from collections.abc import Iterator

from pydantic import Field

from tilewright.core.config.section import Section
from tilewright.core.errors import Problem

_CLASS = re.compile(r"(.+\.py|[^\W\d]\w*(\.[^\W\d]\w*)*):[^\W\d]\w*")

FilterScalar = bool | int | float | str
FilterValue = FilterScalar | tuple[FilterScalar, ...]


class FiltersSection(Section):
    use: dict[str, str] = Field(default={})
    """Filters of your own by a name of your choice, in the order in which they judge: `FILE.py:Class`, relative to the
    data.toml, or `package.module:Class`. Each is a `tilewright.RecordFilter`."""
    settings: dict[str, dict[str, FilterValue]] = Field(default={})
    """What the constructor of a filter gets: arguments by its name in `use`."""
    files: dict[str, dict[str, str]] = Field(default={})
    """More of its arguments: paths of files whose content decides, relative to the data.toml."""

    @property
    def is_on(self) -> bool:
        return bool(self.use)


def conflicts(filters: FiltersSection) -> Iterator[tuple[str, Problem]]:
    """Conflicts of `[filters]`, as (setting, problem): no class, arguments of no filter, or given twice."""
    for name, use in filters.use.items():
        if not _CLASS.fullmatch(use):
            need = "FILE.py:Class, or package.module:Class"
            yield "filters.use", Problem("Filter has no class", f"{name} = {use!r}", need, f'{name} = "FILE.py:Class"')
    for setting in ("settings", "files") if filters.use else ():
        for name in sorted(set(getattr(filters, setting)) - set(filters.use)):
            need = "some of: " + ", ".join(filters.use)
            yield f"filters.{setting}", Problem("Arguments of no filter", f"filters.{setting}.{name}", need, "")
    for name, files in filters.files.items():
        for key in sorted(set(files) & set(filters.settings.get(name, {}))):
            got = f"{key} in filters.settings.{name} and in filters.files.{name}"
            yield "filters.files", Problem("Argument of a filter is given twice", got, "one of both", "")
