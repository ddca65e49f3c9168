"""Base of all sections of a recipe, and the kinds of values that more than one of them has."""

import os
from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from tilewright.core.errors import LONGEST_NAME, LONGEST_PATH
from tilewright.core.units import parse_bytes

Bytes = Annotated[int, BeforeValidator(parse_bytes, json_schema_input_type=int | str), Field(le=2**63 - 1)]
"""A size, also as text with a unit."""
Count = Annotated[int, Field(le=2**31 - 1)]
"""A number of things. More than fits 31 bits is a slip, found before anything is multiplied or allocated."""


def is_too_long(path: str) -> bool:
    """True if no file can be at a path that a user gave: an error, whatever is done with it. Python's own tests of
    paths raise an OSError for it, and say False for one that is not there.

    Example:
        >>> is_too_long("a" * 255 + "/" + "b" * 255), is_too_long("é" * 128)
        (False, True)
    """
    raw = os.fsencode(path)
    return len(raw) >= LONGEST_PATH or max(map(len, raw.split(b"/"))) > LONGEST_NAME


@dataclass(frozen=True)
class Place:
    """Mark of a section's setting whose text may name a file or a folder. A relative path means the folder in which the
    command runs; loading makes it absolute, so that a run's settings mean the same wherever they are read.

    Args:
        words: values that are no paths, whatever is here by that name.
        made: what is not there yet is made there. Else a text that is no path here stays as it is: it is an address, a
            name of the hub, or a slip.
        bare: a word without a separator or a suffix may be a path.
        run: a run's folder, or its name below `runs`. A link to one, such as `runs/latest`, is followed.
    """

    words: tuple[str, ...] = ()
    made: bool = False
    bare: bool = True
    run: bool = False

    def absolute(self, text: str) -> str:
        """The place that a text names, as an absolute path; the text itself where it is none."""
        path = os.path.expanduser(text)
        is_word = text in self.words or not (self.bare or os.path.dirname(path) or os.path.splitext(path)[1])
        if not text or is_word or "://" in text:
            return text
        if self.run:
            runs = (path, os.path.join("runs", text))
            if found := next((one for one in runs if os.path.isfile(os.path.join(one, "run.toml"))), ""):
                return os.path.realpath(found)
        return os.path.abspath(path) if self.made or os.path.exists(path) else text


PathText = Annotated[str, Place()]
"""A file or folder that is there, or a name that means something else."""
MadePath = Annotated[str, Place(made=True)]
"""A folder, made where it is missing."""

EVERY = ("*",)


class Section(BaseModel):
    """Base of all sections of a recipe: immutable, unknown keys forbidden, numbers not guessed from text."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)

    changes_numbers: ClassVar[tuple[str, ...]] = ()
    """Settings that decide what numbers a step computes, by name; `EVERY` for all that `keeps_numbers` does not name.
    Of a recipe each setting is in one of the two: a resumed run says which of its changes matter."""
    keeps_numbers: ClassVar[tuple[str, ...]] = ()
    """Settings that change no bit of what steps compute."""
