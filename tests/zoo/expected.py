"""What of the zoo does not work, and why: refusals in words, and known defects, which are strict expected failures.

A defect that is mended makes its test fail until its line here is removed. `check` is a glob on names of checks.
"""

from dataclasses import dataclass
from fnmatch import fnmatchcase

from tests.zoo.families import FAMILIES, TRAINED


@dataclass(frozen=True)
class Expected:
    """`match`: words that the error of a refusal must have."""

    check: str
    families: tuple[str, ...]
    why: str
    match: str = ""

    def meets(self, check: str, family: str) -> bool:
        """Whether it is about this check of this family."""
        return family in self.families and fnmatchcase(check, self.check)


_TEXTS = tuple(family.name for family in TRAINED if family.batch == "text" and family.name != "t5")
_LEARNED_POSITIONS = ("gpt2", "opt", "bert", "roberta", "distilbert", "electra", "deberta-v2", "albert", "bart")
_EXPERTS = tuple(family.name for family in FAMILIES if family.routers)
_CONFIG = "the config gets max_position_embeddings = data.seq_len and the tokenizer's ids (item 6)"

REFUSALS: tuple[Expected, ...] = tuple(
    Expected(check, ("t5",), "a model with an encoder is not trained", match="does not do causal_lm")
    for check in ("layer_major", "packing", "run and export", "config", "FP8 export", "FP8 in transformers")
)
DEFECTS: tuple[Expected, ...] = ()


def refusal(check: str, family: str) -> Expected | None:
    """The refusal that is right."""
    return next((row for row in REFUSALS if row.meets(check, family)), None)


def defect(check: str, family: str) -> Expected | None:
    """The defect that is known."""
    return next((row for row in DEFECTS if row.meets(check, family)), None)
