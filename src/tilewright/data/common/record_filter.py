"""The base of what judges records one by one, filters of the user with it: a reason to drop one, or none."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from tilewright.data.common.records import Modality, Record


@dataclass(frozen=True)
class DropReason:
    """Why a record is dropped.

    Args:
        rule: that it broke.
        value: that was found: a number, or words.
        threshold: that would have passed.

    Example:
        >>> DropReason("min_lines", 2, 4)
        DropReason(rule='min_lines', value=2, threshold=4)
    """

    rule: str
    value: float | str = ""
    threshold: float | str = ""


class RecordFilter(ABC):
    """Judges records. `[filters]` of a data.toml names filters of the user; their settings there are the arguments of
    their constructors.

    What a filter says of a record may depend on the record, the settings and the files that are given to it, and on
    nothing else: units are made in any order, in several processes, and are kept for as long as these are the same. The
    text of the module that the class is in counts with them. `version` is for what that text does not show, such as a
    model or a helper in another module: a change of it makes the stage run again.

    Example:
        >>> class Poems(RecordFilter):
        ...     def __init__(self, min_lines: int):
        ...         self.min_lines = min_lines
        ...
        ...     def judge(self, record):
        ...         lines = record.text.count("\\n") + 1
        ...         return DropReason("min_lines", lines, self.min_lines) if lines < self.min_lines else None
        >>> Poems(min_lines=4).judge(Record("", "text", "poems", "one line"))
        DropReason(rule='min_lines', value=1, threshold=4)
    """

    version: ClassVar[int] = 1
    modalities: ClassVar[tuple[Modality, ...]] = ("text",)
    """Which records it is asked about; others stay. The text of an image or a sound is its caption."""

    @abstractmethod
    def judge(self, record: Record) -> DropReason | None:
        """The filter's reason to drop a record, or None: it stays.

        An error that this raises drops the record, too: it is counted, and listed with the error as its reason.
        Errors of the machine, such as a full disk, end the build.
        """
