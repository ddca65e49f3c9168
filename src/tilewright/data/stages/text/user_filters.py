"""Filters of the user: classes of a file or a module that `[filters]` names, after the rules and before all scores.

They run in order, and a record goes by the first that has a reason. One that fails on a record sets that record aside.
"""

import inspect
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.machinery import SourceFileLoader
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from tilewright.core.atomic_io import hash_file
from tilewright.core.errors import ConfigError, DataError, is_of_machine
from tilewright.data.common.record_filter import DropReason, RecordFilter
from tilewright.data.engine.build_context import Context
from tilewright.data.engine.build_settings import FiltersSection
from tilewright.data.engine.build_stage import BuildStage
from tilewright.data.engine.declared_inputs import Same, StageInput
from tilewright.data.engine.record_tables import REJECTS, TableWriter, record_of, rows
from tilewright.data.stages.kept_records import KEPT, reject_of
from tilewright.data.stages.stage_order import before_filters

FAILED = "failed"
"""Rule of a record on which a filter raised an error."""
_ERROR_CHARS = 300
_TRY = "a file beside the data.toml as `FILE.py:Class`, or an installed module as `package.module:Class`"


@dataclass(frozen=True)
class OwnFilter:
    """A filter by its name in the data.toml: where its class is, and what its constructor gets. It can be pickled.

    Args:
        name: in the data.toml.
        use: `FILE.py:Class` or `package.module:Class`.
        digest: of the text of the file or module.
        settings: arguments of the constructor, as JSON.
        files: more arguments: (name, path, digest of the content) of files.
    """

    name: str
    use: str
    digest: str
    settings: str
    files: tuple[tuple[str, str, str], ...]

    def identity(self) -> object:
        """The identity of a user's filter as JSON: what it does, not where on this machine it is."""
        files = {name: digest for name, _, digest in self.files}
        return [self.name, self.use.rpartition(":")[2], self.digest, made(self).version, self.settings, files]


@lru_cache(maxsize=32)
def made(one: OwnFilter) -> RecordFilter:
    """The user's filter itself, made once per process: its constructor may read a large file.

    Raises:
        ConfigError: the class cannot be imported, takes other arguments, or refuses these.
        DataError: its text is another one than when the build began.
    """
    kind = _class(one.name, one.use, one.digest)
    given = json.loads(one.settings) | {name: Path(path) for name, path, _ in one.files}
    try:
        return kind(**given)
    except Exception as error:
        raise ConfigError(
            "Filter does not take its settings",
            where=f"filters.settings.{one.name}",
            got=f"{', '.join(given) or 'no settings'}; {type(error).__name__}: {error}",
            need=f"arguments of {one.use.rpartition(':')[2]}{_signature(kind)}",
            try_=f"[filters.settings.{one.name}] with these names",
        ) from error


def own_filters(section: FiltersSection) -> list[OwnFilter]:
    """The user's filters that a data.toml names, in their order.

    Raises:
        ConfigError: one cannot be imported, is no `RecordFilter`, or does not take its settings.
        DataError: a file that is given to one does not exist.
    """
    found = []
    for name, use in section.use.items():
        files = section.files.get(name, {})
        missing = [path for path in files.values() if not Path(path).is_file()]
        if missing:
            raise DataError(
                "File of a filter does not exist",
                where=f"filters.files.{name}",
                got=", ".join(missing),
                need="a file; a relative path is relative to the data.toml",
                try_="",
            )
        given = tuple((key, path, hash_file(Path(path))) for key, path in files.items())
        settings = json.dumps(section.settings.get(name, {}), sort_keys=True)
        one = OwnFilter(name, use, hash_file(_source_of(name, use)), settings, given)
        made(one)
        found.append(one)
    return found


def _source_of(name: str, use: str) -> Path:
    """The source file that holds the class of a user's filter."""
    module = use.rpartition(":")[0]
    if module.endswith(".py"):
        if not Path(module).is_file():
            raise _cannot_import(name, use, "no such file")
        return Path(module)
    try:
        spec = find_spec(module)
    except Exception as error:  # it imports the packages around the module, which are programs, too
        raise _cannot_import(name, use, f"{type(error).__name__}: {error}") from error
    if spec is None or spec.origin is None or not Path(spec.origin).is_file():
        raise _cannot_import(name, use, f"no module {module} with a file of its own")
    return Path(spec.origin)


@lru_cache(maxsize=64)
def _class(name: str, use: str, digest: str) -> type[RecordFilter]:
    """The class of a user's filter, of a text with this digest: a process that lives on may see the file change between
    builds."""
    path = _source_of(name, use)
    if hash_file(path) != digest:
        raise DataError(
            "Filter changed while the build ran",
            where=f"filters.use.{name}",
            got=f"another text of {path} than when the build began",
            need="the same text for all units",
            try_="the same command again: finished units stay",
        )
    module, _, attribute = use.rpartition(":")
    try:
        found = getattr(_loaded(module, path, digest), attribute)
    except Exception as error:
        raise _cannot_import(name, use, f"{type(error).__name__}: {error}") from error
    if not (isinstance(found, type) and issubclass(found, RecordFilter)):
        raise _cannot_import(name, use, f"{attribute} is no class that derives from tilewright.RecordFilter")
    if inspect.isabstract(found):
        raise _cannot_import(name, use, f"{attribute} has no method judge(self, record)")
    return found


class _TextLoader(SourceFileLoader):
    """Reads no compiled file beside the text: Python knows their texts by size and second."""

    def path_stats(self, path: str) -> Mapping[str, Any]:
        """The times of a user's filter's file: none are known, so importlib compiles it."""
        raise OSError(f"{path} is compiled each time")


@lru_cache(maxsize=64)
def _loaded(module: str, path: Path, digest: str) -> ModuleType:
    """The module of a user's filter in `path`, once for each text, since filters may share its classes. Its globals are
    of that text."""
    is_file = module.endswith(".py")
    spec = spec_from_file_location(f"{path.stem}_{digest}", path) if is_file else find_spec(module)
    assert spec is not None
    assert spec.loader is not None
    loaded = module_from_spec(spec)
    before = sys.modules.get(spec.name)
    sys.modules[spec.name] = loaded  # where dataclasses and pickle look for it
    try:
        loader = _TextLoader(spec.name, str(path)) if isinstance(spec.loader, SourceFileLoader) else spec.loader
        loader.exec_module(loaded)
    except BaseException:
        del sys.modules[spec.name]
        if before is not None:
            sys.modules[spec.name] = before
        raise
    return loaded


def _signature(kind: type) -> str:
    try:
        return str(inspect.signature(kind))
    except ValueError:
        return "(...)"


def _cannot_import(name: str, use: str, why: str) -> ConfigError:
    return ConfigError(
        "Filter cannot be imported",
        where=f"filters.use.{name}",
        got=f"{use}: {why}",
        need="a class that derives from tilewright.RecordFilter, with a method judge(self, record)",
        try_=_TRY,
    )


class OwnFilters(StageInput):
    """The filters of a build, known by the text of their modules, their versions, their settings and their files."""

    def identity(self, c: Context, i: int) -> object:
        return [one.identity() for one in self.value(c, i)]

    def value(self, c: Context, i: int) -> list[OwnFilter]:
        return c.once(FILTERS.name, lambda: own_filters(c.build.filters))


def apply_own(
    index: int, settings: SimpleNamespace, folder: Path, *, records: Path, kept: Path, filters: Sequence[OwnFilter]
) -> Mapping[str, Any]:
    """Judge the records of a shard that stay so far by the user's filters; writes `kept.parquet` and `rejects.parquet`
    into `folder`."""
    judges = [(one.name, made(one)) for one in filters]
    num_bytes = failed = 0
    with (
        TableWriter(folder / "kept.parquet", KEPT) as staying,
        TableWriter(folder / "rejects.parquet", REJECTS) as rejects,
    ):
        sides = rows(kept / "kept.parquet")
        side = next(sides, None)
        for number, row in enumerate(rows(records / "records.parquet")):
            if side is None or side["row"] != number:
                continue
            reason = _first_reason(row | {"language": side["language"]}, judges)
            if reason is None:
                staying.append(side)
                num_bytes += side["bytes"]
            else:
                failed += reason.rule.endswith(f": {FAILED}")
                rejects.append(reject_of(row, FILTERS.name, reason))
            side = next(sides, None)
        counts = {"records": staying.num_rows, "bytes": num_bytes, "rejects": rejects.num_rows}
    _check_files(filters)
    return counts | {"failed": failed}


def _check_files(filters: Sequence[OwnFilter]) -> None:
    """Check files of a user's filter: raise an error where one has other content than when the build began. After the
    records: a filter may read its files at any of them, and the unit is kept under the digests of the beginning."""
    for one in filters:
        for key, path, digest in one.files:
            if not Path(path).is_file() or hash_file(Path(path)) != digest:
                raise DataError(
                    "File of a filter changed while the build ran",
                    where=f"filters.files.{one.name}.{key}",
                    got=f"another content of {path} than when the build began",
                    need="the same content for all units",
                    try_="the same command again: finished units stay",
                )


def _first_reason(row: Mapping[str, Any], judges: Sequence[tuple[str, RecordFilter]]) -> DropReason | None:
    record = record_of(row)
    for name, judge in judges:
        if record.modality not in judge.modalities:
            continue
        try:
            reason = judge.judge(record)
        except Exception as error:  # a filter is a user's program, and raises whatever a program can
            if is_of_machine(error):  # which says nothing of the record, and is another one in the next run
                raise
            return DropReason(f"{name}: {FAILED}", f"{type(error).__name__}: {error}"[:_ERROR_CHARS])
        if reason is None:
            continue
        if not isinstance(reason, DropReason):
            raise ConfigError(
                "Filter does not return a reason",
                where=f"filters.use.{name}",
                got=f"{reason!r:.80} for a record of {record.path}",
                need="a DropReason, or None for a record that stays",
                try_='return DropReason("RULE", VALUE, THRESHOLD)',
            )
        return DropReason(f"{name}: {reason.rule}", reason.value, reason.threshold)
    return None


FILTERS = BuildStage(
    *("filters", "applying own filters", 1, lambda c: c.num_shards if c.build.filters.is_on else 0, apply_own),
    inputs={"records": Same("repair"), "kept": Same(before_filters), "filters": OwnFilters()},
)
