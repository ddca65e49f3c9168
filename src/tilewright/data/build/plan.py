"""The stages of a build in their order: how many units each has, what a unit reads, which settings it depends on.

A fingerprint is taken from these, so that a change invalidates what comes after it and nothing else. `version` goes up
with every change of a stage's code that changes its output.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers

from tilewright.data.build.context import BuildStage, Context
from tilewright.data.build.finished.remote.index import write_shards
from tilewright.data.build.stages import encode, lines, media
from tilewright.data.build.stages.copies import exact, images, near, sketches
from tilewright.data.build.stages.copies.unique import unique_records
from tilewright.data.build.stages.dataset import TOKENS, Finished, assemble
from tilewright.data.build.stages.read import read_shard
from tilewright.data.build.stages.repair import repair_shard
from tilewright.data.build.stages.rules import apply_rules
from tilewright.data.build.stages.scores.stages import QUALITY_AND_NOISE, SAMPLE, before_copies, last_kept
from tilewright.data.build.stages.split import Refused, split_records
from tilewright.data.common.cache import file_digest
from tilewright.data.common.ranked_bpe import tiktoken_version
from tilewright.data.common.tokenizer_folder import tokenizer_files

_REJECTING = ("read", "repair", "rules", "quality", "noise", "unique", "sample", "encode")


def rejecting(c: Context) -> list[str]:
    """The stages of this build that write rejects, per shard."""
    return [name for name in _REJECTING if stage_named(name).count(c)]


def _kept(c: Context, i: int) -> Path:
    """The side table of the records among which copies are searched."""
    return c.folder(before_copies(c), i)


def _num_records(c: Context) -> int:
    return c.total(before_copies(c), "records")


def _shards(c: Context) -> int:
    return c.num_shards


def _one(c: Context) -> int:
    return 1


def _line_ranges(c: Context) -> int:
    return lines.ranges_for(c.total("read", "bytes")) if c.build.repair.repeated_lines else 0


def _exact_ranges(c: Context) -> int:
    return exact.ranges_for(_num_records(c)) if c.build.duplicates.exact else 0


def _band_ranges(c: Context) -> int:
    return sketches.band_ranges(_num_records(c))


def _pair_ranges(c: Context) -> int:
    return sketches.pair_ranges(_num_records(c))


def _images(c: Context) -> int:
    return int(c.build.duplicates.near and c.total("read", "images") > 0)


def _media_shards(c: Context) -> int:
    return c.num_shards if media.is_wanted(c.build.media) else 0


def _read(c: Context, i: int, folder: Path) -> Mapping[str, Any]:
    return read_shard(c.listing.shards[i], c.build, folder)


def _repair(c: Context, i: int, folder: Path) -> Mapping[str, Any]:
    common = lines.load_common(c.folders("common_lines", _line_ranges(c)))
    return repair_shard(c.folder("read", i), common, c.build.repair, folder)


def _exact_drops(c: Context, i: int):
    return c.drops("exact", _exact_ranges(c), i)


def _by_score(c: Context) -> bool:
    return c.build.duplicates.keep == "score"


def _sketch(c: Context, i: int, folder: Path) -> Mapping[str, Any]:
    rows = near.rows_of(_exact_drops(c, i))
    where = c.folder("repair", i), _kept(c, i), rows, i
    return sketches.sketch_shard(*where, _band_ranges(c), folder, by_score=_by_score(c))


def _pairs(c: Context, i: int, folder: Path) -> Mapping[str, Any]:
    keep = c.build.duplicates.keep
    return sketches.candidate_pairs(c.folders("sketches"), i, _pair_ranges(c), keep, folder)


def _shingles(c: Context, i: int, folder: Path) -> Mapping[str, Any]:
    rows = near.rows_of(_exact_drops(c, i))
    pairs = c.folders("pairs", _band_ranges(c))
    where = c.folder("repair", i), _kept(c, i), rows, pairs, i
    return near.candidate_shingles(*where, folder, by_score=_by_score(c))


def _verify(c: Context, i: int, folder: Path) -> Mapping[str, Any]:
    return near.verify_pairs(c.folders("pairs", _band_ranges(c)), c.folders("shingles"), i, folder)


def _near(c: Context, i: int, folder: Path) -> Mapping[str, Any]:
    settings = c.build.duplicates
    threshold = settings.threshold if settings.near else None
    return near.resolve(c.folders("verify", _pair_ranges(c)), c.folders("shingles"), threshold, settings.keep, folder)


def _image_copies(c: Context, i: int, folder: Path) -> Mapping[str, Any]:
    with_images = [shard for shard in range(c.num_shards) if c.count("read", shard, "images")]
    shards = {s: (c.folder("repair", s), _kept(c, s), _exact_drops(c, s)) for s in with_images}
    return images.image_copies(shards, c.build.duplicates, folder)


def _unique(c: Context, i: int, folder: Path) -> Mapping[str, Any]:
    found = _exact_drops(c, i), c.drops("near", 1, i), c.drops("images", _images(c), i)
    return unique_records(c.folders("repair"), _kept(c, i), i, *found, c.build.duplicates, folder)


def _split(c: Context, i: int, folder: Path) -> Mapping[str, Any]:
    where = c.folders(last_kept(c)), c.folders("repair"), c.listing.domains(), c.folder("near")
    return split_records(*where, c.build.split, folder, lambda: _refused(c))


def _refused(c: Context) -> Refused:
    """What an error says; no output depends on it."""
    before = [name for name in rejecting(c) if name != "encode"]
    return Refused(source_label(c), [c.folder(stage, shard) for stage in before for shard in range(c.num_shards)])


def _media(c: Context, i: int, folder: Path) -> Mapping[str, Any]:
    where = c.folder("read", i), c.folder("repair", i), c.folder(last_kept(c), i), c.folder("split") / f"{i:05}.npy"
    return media.gather_shard(*where, c.build.media, folder)


def _shard(c: Context, i: int) -> encode.Shard:
    return encode.Shard(i, c.folder("repair", i), c.folder(last_kept(c), i), c.folder("split"))


def _tokenizer(c: Context, i: int, folder: Path) -> Mapping[str, Any]:
    shards = [_shard(c, shard) for shard in range(c.num_shards)]
    return encode.make_tokenizer(shards, c.build.tokenizer, c.build.split.seed, folder)


def _encode(c: Context, i: int, folder: Path) -> Mapping[str, Any]:
    tokenizer = c.folder("tokenizer") / "tokenizer"
    encoder = encode.encoder_of(c.folder("encoder"))
    return encode.encode_shard(_shard(c, i), tokenizer, encoder, c.build.chunk, c.folder("near"), folder)


def _encoder(c: Context, i: int, folder: Path) -> Mapping[str, Any]:
    shards = [_shard(c, shard) for shard in range(c.num_shards)]
    return encode.write_encoder(shards, c.folder("tokenizer") / "tokenizer", c.build.split.seed, folder)


def _dataset(c: Context, i: int, folder: Path) -> Mapping[str, Any]:
    rejects = [[c.folder(stage, shard) for stage in rejecting(c)] for shard in range(c.num_shards)]
    copies = {name: c.total("unique", name) for name in ("exact", "near")}
    label = source_label(c)
    where = c.folders("media", _media_shards(c)), c.folders("encode"), rejects, c.folder("tokenizer"), c.folder("split")
    return assemble(Finished(c.listing, *where, copies, c.totals("repair", "changed"), label), folder)


def source_label(c: Context) -> str:
    """The sources of a build, for a person."""
    return ", ".join(c.build.read.sources.values()) or c.build.read.source


def _tokenizer_key(c: Context) -> list[str]:
    path = c.build.tokenizer.path
    files = tokenizer_files(Path(path)) if path else []
    return [f"{file.name}:{file_digest(file)}" for file in files]


SHARDS = "shards"
"""Name of the stage, and of the folder of a dataset."""
STAGES = (
    BuildStage(
        *("read", "reading files", 4, _shards),
        lambda c, i: [
            *(c.listing.keys(i), c.build.read.text_field, c.build.read.max_chars, c.build.limits.model_dump()),
            *(c.build.media.model_dump(), c.build.read.suffixes),
        ],
        _read,
    ),
    BuildStage(
        *("lines", "counting lines", 1, lambda c: c.num_shards if c.build.repair.repeated_lines else 0),
        lambda c, i: [c.one("read", i), c.build.repair.model_dump(), _line_ranges(c)],
        lambda c, i, folder: lines.count_lines(c.folder("read", i), _line_ranges(c), c.build.repair, folder),
    ),
    BuildStage(
        *("common_lines", "finding lines that repeat", 1, _line_ranges),
        lambda c, i: [c.every("lines"), c.build.repair.repeated_lines],
        lambda c, i, folder: lines.common_lines(c.folders("lines"), i, c.build.repair, folder),
    ),
    BuildStage(
        *("repair", "repairing text", 1, _shards),
        lambda c, i: [
            c.one("read", i),
            c.build.repair.model_dump(),
            c.every("common_lines", _line_ranges(c)),
        ],
        _repair,
    ),
    BuildStage(
        *("rules", "applying rules", 2, _shards),
        lambda c, i: [c.one("repair", i), c.build.rules.model_dump()],
        lambda c, i, folder: apply_rules(c.folder("repair", i), c.build.rules, folder),
    ),
    *QUALITY_AND_NOISE,
    BuildStage(
        *("digests", "hashing texts", 1, lambda c: c.num_shards if c.build.duplicates.exact else 0),
        lambda c, i: [c.one(before_copies(c), i), _exact_ranges(c)],
        lambda c, i, folder: exact.digest_keys(_kept(c, i), i, _exact_ranges(c), folder),
    ),
    BuildStage(
        *("exact", "finding exact duplicates", 1, _exact_ranges),
        lambda c, i: c.every("digests"),
        lambda c, i, folder: exact.exact_duplicates(c.folders("digests"), i, folder),
    ),
    BuildStage(
        *("sketches", "sketching texts", 3, _shards),
        lambda c, i: [
            *(c.one("repair", i), c.one(before_copies(c), i), c.every("exact", _exact_ranges(c))),
            *(_band_ranges(c), _by_score(c)),
        ],
        _sketch,
    ),
    BuildStage(
        *("pairs", "pairing sketches", 1, _band_ranges),
        lambda c, i: [c.every("sketches"), c.build.duplicates.keep, _pair_ranges(c)],
        _pairs,
    ),
    BuildStage(
        *("shingles", "reading candidates", 3, _shards),
        lambda c, i: [
            *(c.one("repair", i), c.one(before_copies(c), i), c.every("exact", _exact_ranges(c))),
            *(c.every("pairs", _band_ranges(c)), _by_score(c)),
        ],
        _shingles,
    ),
    BuildStage(
        *("verify", "verifying near-copies", 1, _pair_ranges),
        lambda c, i: [c.every("pairs", _band_ranges(c)), c.every("shingles")],
        _verify,
    ),
    BuildStage(
        *("near", "choosing which copies stay", 1, _one),
        lambda c, i: [c.every("verify", _pair_ranges(c)), c.every("shingles"), c.build.duplicates.model_dump()],
        _near,
    ),
    BuildStage(
        *("images", "comparing images", 1, _images),
        lambda c, i: [
            *(c.every("repair"), c.every(before_copies(c)), c.every("exact", _exact_ranges(c))),
            *(c.build.duplicates.image_distance, c.build.duplicates.keep),
        ],
        _image_copies,
    ),
    BuildStage(
        *("unique", "dropping copies", 3, _shards),
        lambda c, i: [
            *(c.one(before_copies(c), i), c.every("repair"), c.every("exact", _exact_ranges(c)), c.one("near")),
            *(c.every("images", _images(c)), c.build.duplicates.threshold, c.build.duplicates.image_distance),
        ],
        _unique,
    ),
    *SAMPLE,
    BuildStage(
        *("split", "holding out", 7, _one),
        lambda c, i: [
            *(c.every(last_kept(c)), c.every("repair"), c.listing.domains(), c.one("near")),
            c.build.split.model_dump(),
        ],
        _split,
    ),
    BuildStage(
        *("media", "gathering pixels and sounds", 2, _media_shards),
        lambda c, i: [
            *(c.told_one("read", i), c.one("repair", i), c.one(last_kept(c), i), c.one("split")),
            c.build.media.model_dump(),
        ],
        _media,
    ),
    BuildStage(
        *("tokenizer", "training the tokenizer", 1, _one),
        lambda c, i: [
            *(c.every("repair"), c.every(last_kept(c)), c.one("split")),
            *(c.build.tokenizer.vocab_size, c.build.split.seed),
            *(_tokenizer_key(c), tokenizers.__version__),
        ],
        _tokenizer,
    ),
    BuildStage(
        *("encoder", "choosing the encoder", 1, _one),
        lambda c, i: [
            *(c.every("repair"), c.every(last_kept(c)), c.one("split"), c.one("tokenizer")),
            *(c.build.split.seed, tokenizers.__version__, tiktoken_version()),
        ],
        _encoder,
    ),
    BuildStage(
        *("encode", "encoding", 4, _shards),
        lambda c, i: [
            *(c.one("repair", i), c.one(last_kept(c), i), c.one("split"), c.one("tokenizer"), c.one("near")),
            c.one("encoder"),  # the same whichever it is: ids are, too
            *(c.build.chunk.model_dump(), tokenizers.__version__),
        ],
        _encode,
    ),
    BuildStage(
        *("dataset", "joining the dataset", 5, _one),
        lambda c, i: [
            *(c.one("tokenizer"), c.one("split"), source_label(c), c.totals("repair", "changed")),
            *(c.every("encode"), *(c.told(stage) for stage in rejecting(c)), c.every("media", _media_shards(c))),
            c.told("media", _media_shards(c)),
            c.listing.facts(),
        ],
        _dataset,
    ),
    BuildStage(
        *(SHARDS, "publishing shards", 1, lambda c: int(c.build.shards.bytes > 0)),
        lambda c, i: [c.one("dataset"), c.build.shards.bytes],
        lambda c, i, folder: write_shards(c.folder("dataset") / TOKENS, folder, c.build.shards.bytes),
    ),
)
"""In the order in which they run; a stage reads only what stands before it."""


def stage_named(name: str) -> BuildStage:
    """The stage of that name."""
    return next(stage for stage in STAGES if stage.name == name)
