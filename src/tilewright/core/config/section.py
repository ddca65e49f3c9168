"""What all sections of a recipe have in common."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """Base of all sections: immutable, unknown keys forbidden, numbers not guessed from text."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)
