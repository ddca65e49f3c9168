"""What all sections of a recipe have in common."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Count = Annotated[int, Field(le=2**31 - 1)]
"""A number of things. More than fits 31 bits is a slip, found before anything is multiplied or allocated."""


class Section(BaseModel):
    """Base of all sections: immutable, unknown keys forbidden, numbers not guessed from text."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)
