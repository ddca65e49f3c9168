"""The stages of a build in their order; each is declared beside its function, with what it reads.

A stage reads only what stands before it. What it declares is what it gets and what its fingerprint is taken from, so
that a change invalidates what comes after it and nothing else.
"""

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tilewright.data.dataset.remote.shard_index import write_shards
from tilewright.data.engine.build_context import Context
from tilewright.data.engine.build_stage import BuildStage
from tilewright.data.engine.declared_inputs import Only
from tilewright.data.stages.chat.render_conversations import RENDER, TEMPLATE
from tilewright.data.stages.copies.drop_copies import UNIQUE
from tilewright.data.stages.copies.exact_copies import DIGESTS, EXACT
from tilewright.data.stages.copies.image_copies import IMAGES
from tilewright.data.stages.copies.near_copies import NEAR, SHINGLES, VERIFY
from tilewright.data.stages.copies.sketches import PAIRS, SKETCHES
from tilewright.data.stages.encode_records import ENCODE, ENCODER_CHOICE, TOKENIZER
from tilewright.data.stages.media_tensors import GATHER_MEDIA
from tilewright.data.stages.merge_shards import DATASET_STAGE, TOKENS
from tilewright.data.stages.read_records import READ
from tilewright.data.stages.scores.score_stages import QUALITY_AND_NOISE, SAMPLE
from tilewright.data.stages.split.split_stage import SPLIT
from tilewright.data.stages.text.apply_rules import RULES
from tilewright.data.stages.text.repair_records import REPAIR
from tilewright.data.stages.text.repeated_lines import COMMON_LINES, LINES
from tilewright.data.stages.text.user_filters import FILTERS

SHARDS = "shards"
"""Name of the stage, and of the folder of a dataset."""


def _publish(index: int, settings: SimpleNamespace, folder: Path, *, dataset: Path) -> Mapping[str, Any]:
    return write_shards(dataset / TOKENS, folder, settings.shards.bytes)


def _has_shards(c: Context) -> int:
    return int(c.build.shards.bytes > 0 and not c.build.chat.is_on)


STAGES = (
    *(READ, LINES, COMMON_LINES, REPAIR, RULES, FILTERS, *QUALITY_AND_NOISE),
    *(DIGESTS, EXACT, SKETCHES, PAIRS, SHINGLES, VERIFY, NEAR, IMAGES, UNIQUE),
    *(*SAMPLE, SPLIT, GATHER_MEDIA, TOKENIZER, ENCODER_CHOICE, ENCODE, TEMPLATE, RENDER, DATASET_STAGE),
    BuildStage(
        *(SHARDS, "publishing shards", 1, _has_shards, _publish, ("shards.bytes",)),
        {"dataset": Only("dataset")},
    ),
)
"""In the order in which they run."""


def stage_named(name: str) -> BuildStage:
    """The stage of that name in the build's plan."""
    return next(stage for stage in STAGES if stage.name == name)
