"""Tables that a run writes as JSON and other commands read again: what their columns hold, checked when they are read.

A run folder is copied, edited and damaged. `checked` refuses a table, for a command that is about it; `usable` leaves
rows out, for one that shows what there is. Columns that are not declared here pass as they are. Without torch.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, NotRequired, TypeVar

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, with_config
from typing_extensions import TypedDict

from tilewright.core.errors import DataError
from tilewright.core.json_text import from_json
from tilewright.precision.float8.audit_table import AuditRow

_OPEN = ConfigDict(extra="allow", strict=True)
_Count = Annotated[int, Field(ge=0, le=2**53)]
Row = TypeVar("Row")


@with_config(_OPEN)
class RecordedModule(TypedDict):
    """A module in precision.json: its formats, and its matmuls' FLOPs."""

    fqn: str
    op: NotRequired[str]
    compute: str
    storage: NotRequired[str]
    output: NotRequired[str | None]
    reason: NotRequired[str]
    gemms: NotRequired[dict[str, str] | None]
    work: NotRequired[Annotated[float, Field(ge=0, allow_inf_nan=False)]]


@with_config(_OPEN)
class RecordedKernel(TypedDict):
    """An operation and case in machine.json; a case is a device, a dtype and perhaps a kind."""

    op: str
    case: Annotated[str, Field(pattern=r"^\S+ \S+( \S+)?$")]
    chosen: str
    rejected: list[Annotated[list[str], Field(min_length=2, max_length=2)]]


@with_config(_OPEN)
class RecordedSample(TypedDict):
    """A text of samples.jsonl."""

    step: Annotated[int, Field(ge=0, le=2**53)]
    domain: NotRequired[str]
    prompt: str
    text: str
    reference: NotRequired[str]


@with_config(ConfigDict(extra="allow"))  # strict, it would want rows that are `AuditRow` already
class RecordedAudit(TypedDict):
    """audit.json: what each matmul executed, up to a step."""

    step: _Count
    rows: list[AuditRow]


MODULES, KERNELS = TypeAdapter(list[RecordedModule]), TypeAdapter(list[RecordedKernel])
AUDIT = TypeAdapter(RecordedAudit)
MODULE, KERNEL, SAMPLE = TypeAdapter(RecordedModule), TypeAdapter(RecordedKernel), TypeAdapter(RecordedSample)


def read(path: Path) -> Any:
    """Read a recorded table, a JSON file of a run folder; None where the run has not written it.

    Raises:
        DataError: it cannot be read, or is no JSON.
    """
    try:
        return from_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise _unreadable(path, str(error)) from error


def checked(table: TypeAdapter[Row], value: Any, path: Path) -> Row:
    """A recorded table whose every row is checked to be as declared.

    Args:
        table: its declaration.
        value: as read.
        path: of the file, for the error.

    Raises:
        DataError: it is not as declared; the first place is named.
    """
    try:
        return table.validate_python(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=True)[0]
        place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"]).lstrip(".")
        got = f"{place or 'the whole'}: {first['msg']}, found {_short(first['input'])}"
        raise _unreadable(path, got) from error


def usable(row: TypeAdapter[Row], values: Any) -> tuple[list[Row], int]:
    """The usable rows of a recorded table that are as declared, and how many are not. What is no list counts as one
    that is not."""
    if not isinstance(values, list):
        return [], int(values is not None)
    found = []
    for value in values:
        try:
            found.append(row.validate_python(value))
        except ValidationError:
            continue
    return found, len(values) - len(found)


def _short(value: Any) -> str:
    text = repr(dict(value) if isinstance(value, Mapping) else value)
    return text if len(text) <= 40 else f"{text[:40]}..."


def _unreadable(path: Path, got: str) -> DataError:
    return DataError(
        "Unreadable file in the run folder",
        got=got,
        need="the file as train wrote it",
        try_="a copy of the file; without it the command shows the rest of the run",
        where=str(path),
    )
