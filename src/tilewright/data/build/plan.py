"""The stages of a build in their order; each is declared beside its function, with what it reads.

A stage reads only what stands before it. What it declares is what it gets and what its fingerprint is taken from, so
that a change invalidates what comes after it and nothing else.
"""

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tilewright.data.build.engine.declared import Only
from tilewright.data.build.engine.stage import BuildStage
from tilewright.data.build.finished.remote.index import write_shards
from tilewright.data.build.stages.copies.exact import DIGESTS, EXACT
from tilewright.data.build.stages.copies.images import IMAGES
from tilewright.data.build.stages.copies.near import NEAR, SHINGLES, VERIFY
from tilewright.data.build.stages.copies.sketches import PAIRS, SKETCHES
from tilewright.data.build.stages.copies.unique import UNIQUE
from tilewright.data.build.stages.dataset import DATASET_STAGE, TOKENS
from tilewright.data.build.stages.encode import ENCODE, ENCODER_CHOICE, TOKENIZER
from tilewright.data.build.stages.media import GATHER_MEDIA
from tilewright.data.build.stages.read import READ
from tilewright.data.build.stages.scores.stages import QUALITY_AND_NOISE, SAMPLE
from tilewright.data.build.stages.split import SPLIT
from tilewright.data.build.stages.text.lines import COMMON_LINES, LINES
from tilewright.data.build.stages.text.own import FILTERS
from tilewright.data.build.stages.text.repair import REPAIR
from tilewright.data.build.stages.text.rules import RULES

SHARDS = "shards"
"""Name of the stage, and of the folder of a dataset."""


def _publish(index: int, settings: SimpleNamespace, folder: Path, *, dataset: Path) -> Mapping[str, Any]:
    return write_shards(dataset / TOKENS, folder, settings.shards.bytes)


STAGES = (
    *(READ, LINES, COMMON_LINES, REPAIR, RULES, FILTERS, *QUALITY_AND_NOISE),
    *(DIGESTS, EXACT, SKETCHES, PAIRS, SHINGLES, VERIFY, NEAR, IMAGES, UNIQUE),
    *(*SAMPLE, SPLIT, GATHER_MEDIA, TOKENIZER, ENCODER_CHOICE, ENCODE, DATASET_STAGE),
    BuildStage(
        *(SHARDS, "publishing shards", 1, lambda c: int(c.build.shards.bytes > 0), _publish, ("shards.bytes",)),
        {"dataset": Only("dataset")},
    ),
)
"""In the order in which they run."""


def stage_named(name: str) -> BuildStage:
    """The stage of that name."""
    return next(stage for stage in STAGES if stage.name == name)
