"""The settings of a data build: `data.toml`, typed, strict, every problem at once, as recipes are.

Thresholds of rules are off ("none") unless they are written down. Where a paper is named, its rule is meant, and its
value is a good first one: Gopher is Rae et al. 2021 (arXiv 2112.11446, appendix A1.1), C4 is Raffel et al. 2020 (arXiv
1910.10683, section 2.2), FineWeb is Penedo et al. 2024 (arXiv 2406.17557, section 3.6).
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationError

from tilewright.core.config import setting_names
from tilewright.core.config.section import Bytes, Count, Section
from tilewright.core.config.toml import NONE, read_toml
from tilewright.core.config.value_messages import by_line, not_a_section, schema_problems, unknown_setting
from tilewright.core.errors import ConfigError, Problem
from tilewright.core.log import get_logger
from tilewright.data.readers.file_kinds import KINDS, SUFFIX
from tilewright.data.sources.hub import PREFIX
from tilewright.data.sources.path_purpose import no_build_settings
from tilewright.data.stages.chat import chat_settings as chats
from tilewright.data.stages.chat.chat_settings import ChatSection
from tilewright.data.stages.scores import score_settings as scores
from tilewright.data.stages.scores.score_settings import NoiseSection, QualitySection, SampleSection
from tilewright.data.stages.text import filter_settings as own_filters
from tilewright.data.stages.text.filter_settings import FiltersSection

log = get_logger(__name__)

SHIPPED = Path(__file__).with_name("shipped")
_NEAR = ("threshold", "keep", "image_distance")

Share = Annotated[float, Field(ge=0, le=1)] | None
Number = Annotated[int, Field(ge=0, le=2**31 - 1)] | None


class ReadSection(Section):
    source: str = "installed"
    """`installed`: the text that this installation carries. Else a path: a folder of files of any kind that is read,
    or one file. The first sub-folder names the domain. A relative path is relative to the data.toml."""
    sources: dict[str, str] = Field(default={})
    """Several paths, or `installed`, each a domain of the name that it is given, in the place of `source`."""
    text_field: str = "text"
    """Field of .jsonl, .parquet and table rows that holds the text."""
    suffixes: dict[str, str] = Field(default={})
    """What files of a suffix are, in place of what is known of it: `text`, `markdown`, `html`, `jsonl`, `json`, `csv`,
    `tsv`, `parquet`, `arrow`, `pdf`, `notebook`, `docx`, `epub`, `warc`, `image`, `audio`, `zip`, `tar`, or `none` to
    leave them out."""
    domains: tuple[str, ...] = ()
    """Keep only these domains. Empty: all."""
    max_bytes: Bytes = Field(default=0, ge=0)
    """Read files of about this size in all, shared over the domains; which ones, `seed` says. 0: all."""
    seed: int = Field(default=0, ge=0, le=2**63 - 1)
    """Which files are read under `max_bytes`."""
    shard_bytes: Bytes = Field(default=16 * 2**20, ge=1 << 16)
    """Size of the files that one unit of work reads. Larger text files are entered in the middle."""
    max_chars: Annotated[Count, Field(ge=256)] = 65_536
    """Longer texts are cut into records of at most this many characters, at a blank line where there is one."""


class LimitsSection(Section):
    ratio: float = Field(default=256.0, gt=1)
    """Most bytes out of one compressed byte, above 4 MiB that are free."""
    unpacked_bytes: Bytes = Field(default=4 << 30, ge=1)
    """Most bytes that a compressed file, or an archive with all of its members, may unpack to."""
    document_bytes: Bytes = Field(default=32 << 20, ge=1)
    """Most bytes of a document that is in memory whole: HTML, a caption; of a PDF, its text."""
    line_bytes: Bytes = Field(default=16 << 20, ge=1 << 10)
    """Most bytes of a line of text or a row."""
    members: Annotated[Count, Field(ge=1)] = 100_000
    """Most files in an archive."""
    depth: Annotated[Count, Field(ge=1)] = 3
    """Most archives and compressed files inside of each other."""
    pixels: Annotated[Count, Field(ge=1)] = 1 << 26
    """Greatest width times height of an image."""
    audio_s: float = Field(default=7200.0, gt=0)
    """Most seconds of a sound."""
    pages: Annotated[Count, Field(ge=1)] = 5000
    """Most pages of a PDF that are read."""
    parse_s: Annotated[Count, Field(ge=1)] = 60
    """Most processor seconds for one HTML document or PDF, which a process of its own reads."""
    parse_memory_bytes: Bytes = Field(default=1 << 30, ge=1 << 26)
    """Most address space of that process."""


class RepairSection(Section):
    unicode: Literal["nfc", "none"] = "nfc"
    """Unicode normal form of the text."""
    mask: tuple[Literal["email", "ip", "phone"], ...] = ()
    """Personal data that is replaced by a word for it: mail addresses, IP addresses, telephone numbers."""
    repeated_lines: Annotated[Count, Field(ge=0)] = 0
    """Remove lines that occur in at least this many records of a domain, such as menus and footers. 0: keep all."""
    repeated_line_chars: Annotated[Count, Field(ge=1)] = 20
    """Shorter lines are never removed as repeated."""


class RulesSection(Section):
    domains: tuple[str, ...] = ()
    """Rules hold for records of these domains. Empty: all."""
    languages: tuple[str, ...] = ()
    """Keep texts in these languages, as ISO 639-1 codes. Needs py3langid. Empty: all."""
    min_language_score: Share = None
    """Least probability of the language that was found."""
    min_chars: Number = None
    """Least number of characters."""
    max_chars: Number = None
    """Greatest number of characters."""
    min_words: Number = None
    """Least number of words (Gopher: 50)."""
    max_words: Number = None
    """Greatest number of words (Gopher: 100000)."""
    min_mean_word_chars: Annotated[float, Field(ge=0)] | None = None
    """Least mean length of a word (Gopher: 3)."""
    max_mean_word_chars: Annotated[float, Field(ge=0)] | None = None
    """Greatest mean length of a word (Gopher: 10)."""
    max_symbol_share: Annotated[float, Field(ge=0)] | None = None
    """Most hash signs and ellipses per word (Gopher: 0.1)."""
    max_bullet_lines: Share = None
    """Greatest share of lines that begin with a bullet (Gopher: 0.9)."""
    max_ellipsis_lines: Share = None
    """Greatest share of lines that end with an ellipsis (Gopher: 0.3)."""
    min_alphabetic_words: Share = None
    """Least share of words with a letter (Gopher: 0.8)."""
    min_stop_words: Number = None
    """Least number of the, be, to, of, and, that, have, with that occur (Gopher: 2)."""
    max_duplicate_lines: Share = None
    """Greatest share of lines that occurred before in the record (Gopher: 0.3)."""
    max_duplicate_line_chars: Share = None
    """Greatest share of characters in such lines (Gopher: 0.2, FineWeb: 0.1)."""
    max_duplicate_paragraphs: Share = None
    """Greatest share of paragraphs that occurred before in the record (Gopher: 0.3)."""
    max_duplicate_paragraph_chars: Share = None
    """Greatest share of characters in such paragraphs (Gopher: 0.2)."""
    max_top_2gram_chars: Share = None
    """Greatest share of characters in the most frequent pair of words (Gopher: 0.2)."""
    max_top_3gram_chars: Share = None
    """Greatest share of characters in the most frequent three words in a row (Gopher: 0.18)."""
    max_top_4gram_chars: Share = None
    """Greatest share of characters in the most frequent four words in a row (Gopher: 0.16)."""
    max_duplicate_5gram_chars: Share = None
    """Greatest share of characters in runs of five words that occurred before (Gopher: 0.15)."""
    max_duplicate_10gram_chars: Share = None
    """Greatest share of characters in runs of ten words that occurred before (Gopher: 0.1)."""
    min_punctuated_lines: Share = None
    """Least share of lines that end with a mark of punctuation (FineWeb: 0.12, after C4)."""
    max_short_lines: Share = None
    """Greatest share of lines of at most 30 characters (FineWeb: 0.67)."""
    min_sentences: Number = None
    """Least number of sentences (C4)."""
    max_curly_brackets: Number = None
    """Most curly brackets (C4: 0, which drops code)."""


class DuplicatesSection(Section):
    exact: bool = True
    """Keep one of several records with the same text."""
    near: bool = True
    """Keep one of several near-copies: a record goes only if it resembles one that stays."""
    threshold: float = Field(default=0.8, ge=0.5, le=1)
    """Jaccard similarity of the shingles of five words from which a record is a near-copy. A copy with 5 % of its words
    changed has about 0.6."""
    keep: Literal["longest", "score", "first"] = "longest"
    """Which of several near-copies stays; `score`: the one of best quality. Of images that is the one with most pixels;
    of equal ones, the first that was read."""
    image_distance: Annotated[int, Field(ge=0, le=15)] = 4
    """Images are near-copies if at most so many of the 64 bits of their perceptual hashes differ."""


class MediaSection(Section):
    image_size: Annotated[Count, Field(ge=0, le=4096)] = 0
    """Keep the pixels of images, their middle square scaled to a side of so many. 0: no pixels are kept."""
    log_mel: bool = False
    """Keep the log-mel frames of sounds, at the rate of each file."""
    num_mels: Annotated[Count, Field(ge=1, le=512)] = 80
    """Numbers in a log-mel frame: bands of equal width on Slaney's mel scale, up to 8 kHz."""
    window_ms: Annotated[float, Field(ge=2, le=1000)] = 25.0
    """Milliseconds of sound in a log-mel frame."""
    hop_ms: Annotated[float, Field(ge=1, le=1000)] = 10.0
    """Milliseconds from one log-mel frame to the next."""


class SplitSection(Section):
    holdout: float = Field(default=0.02, gt=0, lt=0.5)
    """Share held out for evaluation, by clusters of near-copies (similarity 0.5)."""
    max_bytes: Bytes = Field(default=0, ge=0)
    """Keep at most this much text, shared over the domains: small ones give everything. 0: all that passed."""
    seed: int = Field(default=0, ge=0, le=2**63 - 1)
    """Which clusters are held out, and which records stay under `max_bytes`."""


class ChunkSection(Section):
    tokens: Annotated[Count, Field(ge=0)] = 0
    """Tokens in a window; choose `data.seq_len` of the runs. 0: records are not cut into windows."""
    overlap: float = Field(default=0.125, ge=0, le=0.5)
    """Share of a window that repeats the end of the one before, at most: it begins at a line or sentence."""
    overlap_loss: Literal["context", "train"] = "context"
    """What is repeated is context without a label, so that every token is a target once; or it is trained on again."""


class TokenizerSection(Section):
    path: str = ""
    """A tokenizer.json, or a folder that holds one. Empty: one is trained on the data."""
    vocab_size: Annotated[Count, Field(ge=300)] = 8192
    """Size of the BPE tokenizer that is trained on the data. Not read where `path` is given."""


class ShardsSection(Section):
    bytes: Bytes = Field(default=8 << 20, ge=0)
    """Size of the token shards that runs read from an address, at most: the folder `shards`, as large as the training
    tokens. 0: none, and the dataset is read on this machine alone."""


class DataBuild(Section):
    """A whole data.toml."""

    read: ReadSection = ReadSection()
    chat: ChatSection = ChatSection()
    limits: LimitsSection = LimitsSection()
    repair: RepairSection = RepairSection()
    rules: RulesSection = RulesSection()
    filters: FiltersSection = FiltersSection()
    quality: QualitySection = QualitySection()
    noise: NoiseSection = NoiseSection()
    duplicates: DuplicatesSection = DuplicatesSection()
    media: MediaSection = MediaSection()
    sample: SampleSection = SampleSection()
    split: SplitSection = SplitSection()
    chunk: ChunkSection = ChunkSection()
    tokenizer: TokenizerSection = TokenizerSection()
    shards: ShardsSection = ShardsSection()


def shipped_builds() -> list[str]:
    """Names of the settings of shipped builds: the data.toml files in the package."""
    return sorted(path.stem for path in SHIPPED.glob("*.toml"))


def load_data_toml(path: Path) -> DataBuild:
    """Load the settings of a build: a data.toml, or the shipped one of that name. Paths in it are relative to its
    folder.

    Raises:
        ConfigError: everything that is wrong with it, in one error.
    """
    # A file of that name comes before a shipped one.
    if not path.is_file() and str(path) in shipped_builds():
        path = SHIPPED / f"{path}.toml"
    if not path.is_file():
        raise no_build_settings(path, shipped_builds())
    toml = read_toml(path)
    # 1. Names, with the line of each.
    problems: list[Problem] = []
    values: dict[str, object] = {}
    places: dict[str, str] = {}
    for section, content in toml.data.items():
        if not isinstance(content, dict) or section not in setting_names.sections(DataBuild):
            problems.append(not_a_section(section, content, toml.place(section), DataBuild))
            continue
        for name, value in content.items():
            setting = f"{section}.{name}"
            item = setting_names.find(setting, DataBuild)
            if item is None:
                problems.append(unknown_setting(setting, value, toml.place(setting), DataBuild))
                continue
            values[setting] = None if item.may_be_none and value == NONE else value
            places[setting] = toml.place(setting)
    # 2. Types and bounds. What is wrong is taken out, so that the rest is checked too.
    try:
        build = _strict(values)
    except ValidationError as error:
        for setting, problem in schema_problems(error, values, places, DataBuild):
            problems.append(problem)
            del values[setting]
        build = _strict(values)
    # 3. Contradictions; then one error with everything, by line.
    problems += _conflicts(build, places)
    if problems:
        raise ConfigError.from_problems(sorted(problems, key=by_line))
    # A setting that does nothing is no error: it is reported.
    for setting, why in without_effect(build).items():
        if setting in values:
            log.warning("%s has no effect here: %s (%s)", setting, why, places[setting])
    return _absolute(build, path.parent)


def without_effect(build: DataBuild) -> dict[str, str]:
    """Settings of a build that the others make void, with what does it."""
    void = (
        (bool(build.read.sources), "read.sources are given", ("read.source",)),
        (not build.filters.use, "filters.use is empty", ("filters.settings", "filters.files")),
        (not build.read.max_bytes, "read.max_bytes = 0", ("read.seed",)),
        (not build.repair.repeated_lines, "repair.repeated_lines = 0", ("repair.repeated_line_chars",)),
        (not build.duplicates.near, "duplicates.near = false", tuple(f"duplicates.{n}" for n in _NEAR)),
        (not build.media.log_mel, "media.log_mel = false", ("media.num_mels", "media.window_ms", "media.hop_ms")),
        (not build.chunk.tokens, "chunk.tokens = 0", ("chunk.overlap", "chunk.overlap_loss")),
        (bool(build.tokenizer.path), "tokenizer.path is given", ("tokenizer.vocab_size",)),
        *chats.void(build.chat),
        *scores.void(build.quality, build.noise, build.sample),
    )
    found: dict[str, str] = {}
    for name, why in ((name, why) for is_so, why, names in void if is_so for name in names):
        found.setdefault(name, why)  # the first reason
    return found


def _strict(values: dict[str, object]) -> DataBuild:
    return DataBuild.model_validate_json(json.dumps(setting_names.nested(values), default=str), strict=True)


def _conflicts(build: DataBuild, places: dict[str, str]) -> list[Problem]:
    """Settings of a build that are right one by one and not together."""
    problems = []
    rules = build.rules
    for suffix, kind in build.read.suffixes.items():
        if kind not in KINDS or not SUFFIX.fullmatch(suffix):
            got, need = f'"{suffix}" = "{kind}"', "a suffix in small letters, and one of " + ", ".join(KINDS)
            place = places["read.suffixes"]
            problems.append(Problem("Unknown kind of files", got, need, 'suffixes = { ".dat" = "text" }', place))
    # Minimum and maximum of one measure are two settings, and the schema sees one at a time.
    for name, low in rules:
        high = getattr(rules, name.replace("min_", "max_", 1), None) if name.startswith("min_") else None
        if low is not None and high is not None and low > high:
            setting = f"rules.{name}"
            got = f"{name} = {low}, {name.replace('min_', 'max_', 1)} = {high}"
            problems.append(Problem("No record passes these two rules", got, "min <= max", "", places.get(setting, "")))
    if 0 < build.chunk.tokens < 16:
        got = f"chunk.tokens = {build.chunk.tokens}"
        problems.append(
            Problem("Window of a few tokens", got, "0, or at least 16", "tokens = 512", places["chunk.tokens"])
        )
    # Stages say themselves what contradicts them.
    found = [
        *own_filters.conflicts(build.filters),
        *scores.conflicts(build.quality, build.noise, build.sample, build.duplicates.keep),
    ]
    repair, sources = build.repair, build.read.sources.values() or (build.read.source,)
    found += chats.conflicts(build.chat, sources, repair.mask, repair.repeated_lines, build.chunk.tokens)
    problems += [replace(problem, where=places.get(setting, "")) for setting, problem in found]
    if rules.min_language_score is not None and not rules.languages:
        need = "rules.languages beside it: without, no language is looked for"
        place = places["rules.min_language_score"]
        problems.append(Problem("Score of a language without languages", "", need, 'languages = ["en"]', place))
    return problems


def _absolute(build: DataBuild, folder: Path) -> DataBuild:
    def path(text: str) -> str:
        return str((folder / Path(text).expanduser()).absolute())

    def source(text: str) -> str:
        return text if text == "installed" or text.startswith(PREFIX) else path(text)

    read = build.read
    sources = {domain: source(text) for domain, text in read.sources.items()}
    read = read.model_copy(update={"source": source(read.source), "sources": sources})
    tokenizer = build.tokenizer
    if tokenizer.path:
        tokenizer = tokenizer.model_copy(update={"path": path(tokenizer.path)})
    filters = build.filters
    use = {name: path(text) if ".py:" in text else text for name, text in filters.use.items()}
    files = {name: {key: path(text) for key, text in given.items()} for name, given in filters.files.items()}
    filters = filters.model_copy(update={"use": use, "files": files})
    learned = {name: scores.absolute(getattr(build, name), folder) for name in ("quality", "noise", "sample")}
    chat = chats.absolute(build.chat, folder)
    return build.model_copy(update={"read": read, "chat": chat, "tokenizer": tokenizer, "filters": filters, **learned})
