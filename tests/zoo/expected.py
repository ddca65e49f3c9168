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
DEFECTS: tuple[Expected, ...] = (
    *(
        Expected(check, ("wav2vec2",), "parametrized weights cannot be converted (PyTorch citizens)")
        for check in ("numbers/*", "rewritten input/*", "copies/*", "FP8 coverage", "routers")
    ),
    Expected("FP8 coverage", ("gpt2",), "Conv1D stays BF16 (item 8)"),
    Expected("FP8 coverage", ("falcon",), "a subclass of nn.Linear stays BF16 (item 8)"),
    Expected("FP8 coverage", _EXPERTS, "stacked experts stay BF16 (item 8)"),
    Expected(
        "routers",
        ("hunyuan_v1_moe", "jetmoe", "afmoe", "longcat_flash", "ernie4_5_moe"),
        "the router is missed and computes in FP8 (item 7)",
    ),
    Expected(
        "routers",
        ("qwen3_next", "qwen3_5_text", "mamba", "jamba", "recurrent_gemma", "lfm2"),
        "a projection is taken for a router (item 7)",
    ),
    Expected("config", _TEXTS, _CONFIG),
    Expected("run and export", _LEARNED_POSITIONS, f"the folder cannot be loaded: {_CONFIG}"),
    Expected("FP8 [ei]*", _LEARNED_POSITIONS, f"the folder cannot be loaded: {_CONFIG}"),
    Expected("run and export", ("whisper",), "the run does not say that it trains the decoder alone"),
    Expected("FP8 [ei]*", ("vit", "beit", "resnet"), "the folder claims FP8, holds none, and cannot be used (item 5)"),
    Expected("FP8 export", ("dinov2", "swin"), "few of the matrices are in FP8 (item 5)"),
    Expected("FP8 in transformers", ("dinov2",), "names that transformers converts on loading (item 5)"),
    Expected("FP8 export", ("recurrent_gemma",), "projections are taken for routers, and stay BF16 (item 7)"),
    Expected("FP8 export", ("gpt_oss", "granitemoe", "jetmoe"), "stacked experts are not written in FP8 (item 5)"),
)


def refusal(check: str, family: str) -> Expected | None:
    """The refusal that is right."""
    return next((row for row in REFUSALS if row.meets(check, family)), None)


def defect(check: str, family: str) -> Expected | None:
    """The defect that is known."""
    return next((row for row in DEFECTS if row.meets(check, family)), None)
