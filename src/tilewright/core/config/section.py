"""Base of all sections of a recipe."""

from typing import Annotated, ClassVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from tilewright.core.units import parse_bytes

Bytes = Annotated[int, BeforeValidator(parse_bytes, json_schema_input_type=int | str), Field(le=2**63 - 1)]
"""A size, also as text with a unit."""
Count = Annotated[int, Field(le=2**31 - 1)]
"""A number of things. More than fits 31 bits is a slip, found before anything is multiplied or allocated."""


EVERY = ("*",)


class Section(BaseModel):
    """Base of all sections of a recipe: immutable, unknown keys forbidden, numbers not guessed from text."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)

    changes_numbers: ClassVar[tuple[str, ...]] = ()
    """Settings that decide what numbers a step computes, by name; `EVERY` for all that `keeps_numbers` does not name.
    Of a recipe each setting is in one of the two: a resumed run says which of its changes matter."""
    keeps_numbers: ClassVar[tuple[str, ...]] = ()
    """Settings that change no bit of what steps compute."""
