"""What of the zoo does not work, and why: refusals in words, and known defects, which are strict expected failures.

A defect that is mended makes its test fail until its line here is removed. `check` is a glob on names of checks.
"""

from dataclasses import dataclass
from fnmatch import fnmatchcase


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


_FP8 = ("FP8 export", "FP8 in transformers")

REFUSALS: tuple[Expected, ...] = (
    *(
        Expected(check, ("t5",), "a model with an encoder is not trained", match="Task causal_lm is not supported")
        for check in ("layer_major", "packing", "run and export", "config", *_FP8)
    ),
    *(
        Expected(
            check,
            ("gpt2", "falcon", "resnet"),
            "no weight of it can be stored so that transformers reads it",
            match="No weight of this model can be stored in FP8",
        )
        for check in _FP8
    ),
    *(
        Expected(
            check,
            ("dinov2",),
            "transformers 5.23 does not read such a folder again",
            match="FP8 folder would be unreadable for transformers",
        )
        for check in _FP8
    ),
)
DEFECTS: tuple[Expected, ...] = (
    Expected("copies/*", ("wav2vec2",), "torch saves parametrized modules by state_dict only, converted or not"),
    Expected("FP8 coverage", ("falcon",), "its own subclass of nn.Linear stays in BF16; strict refuses it"),
    Expected(
        "FP8 coverage", ("jetmoe", "longcat_flash"), "experts in a class of their own stay in BF16; strict refuses them"
    ),
    Expected(
        "FP8 export",
        ("gpt_neox", "bloom", "phi3", "glm4", "modernbert"),
        "matrices that transformers merges when it saves stay in BF16",
    ),
    Expected(
        "FP8 export",
        ("granitemoe", "jetmoe", "longcat_flash", "gpt_oss"),
        "experts that transformers cannot read in FP8 stay in BF16",
    ),
    Expected(
        "FP8 export",
        ("mamba", "mamba2", "falcon_h1", "bamba", "zamba2"),
        "projections that the code of state spaces reads directly stay in BF16",
    ),
    Expected("FP8 in transformers", ("mamba2",), "transformers converts the names of this family on loading"),
)


def refusal(check: str, family: str) -> Expected | None:
    """The refusal that is right."""
    return next((row for row in REFUSALS if row.meets(check, family)), None)


def defect(check: str, family: str) -> Expected | None:
    """The defect that is known."""
    return next((row for row in DEFECTS if row.meets(check, family)), None)
