"""Every setting of a data.toml is read and has an effect: the dataset with it is another one than without."""

import json
from pathlib import Path

import pytest

from tests.data.build import test_chat, test_rules
from tests.data.build.corpora import build, prose, settings, write_corpus, write_media
from tests.data.build.scores.test_effects import PROBES as SCORED
from tilewright.core.config import setting_names
from tilewright.core.errors import ConfigError
from tilewright.data.engine.build_context import Context
from tilewright.data.engine.build_files import list_inputs
from tilewright.data.engine.build_settings import DataBuild, LimitsSection, load_data_toml
from tilewright.data.readers.limits import ReadLimits
from tilewright.data.stages import read_records
from tilewright.data.stages.split.split_stage import source_label

FILTER = """
import tilewright

class Long(tilewright.RecordFilter):
    def __init__(self, least=600, names=None):
        self.least = least if names is None else 0

    def judge(self, record):
        return tilewright.DropReason("least") if len(record.text) < self.least else None
"""
# setting -> (value that changes the dataset, settings that it needs); HERE is the folder of the corpus
PROBES: dict[str, tuple[object, dict]] = {
    "read.source": ("HERE/in/rows", {}),
    "read.sources": ({"one": "HERE/in/rows"}, {}),
    "read.text_field": ("other", {}),
    "read.suffixes": ({".jsonl": "none"}, {}),
    "read.domains": (("rows",), {}),
    "read.max_bytes": (60_000, {}),
    "read.seed": (4, {"read": {"max_bytes": 60_000}}),
    "read.shard_bytes": (1 << 20, {}),
    "read.max_chars": (512, {}),
    "limits.line_bytes": (1 << 10, {}),
    "repair.unicode": ("none", {}),
    "repair.mask": (("email",), {}),
    "repair.repeated_lines": (2, {}),
    "repair.repeated_line_chars": (100, {"repair": {"repeated_lines": 2}}),
    "rules.domains": (("rows",), {"rules": {"min_words": 20}}),
    "rules.min_chars": (50, {}),
    "rules.max_chars": (50, {}),
    "rules.min_words": (20, {}),
    "rules.max_words": (20, {}),
    "rules.min_mean_word_chars": (4.0, {}),
    "rules.max_mean_word_chars": (5.0, {}),
    "rules.max_symbol_share": (0.01, {}),
    "rules.max_bullet_lines": (0.05, {}),
    "rules.max_ellipsis_lines": (0.5, {}),
    "rules.min_alphabetic_words": (0.9, {}),
    "rules.min_stop_words": (1, {}),
    "rules.max_duplicate_lines": (0.1, {}),
    "rules.max_duplicate_line_chars": (0.1, {}),
    "rules.max_duplicate_paragraphs": (0.1, {}),
    "rules.max_duplicate_paragraph_chars": (0.1, {}),
    "rules.max_top_2gram_chars": (0.1, {}),
    "rules.max_top_3gram_chars": (0.1, {}),
    "rules.max_top_4gram_chars": (0.1, {}),
    "rules.max_duplicate_5gram_chars": (0.1, {}),
    "rules.max_duplicate_10gram_chars": (0.1, {}),
    "rules.min_punctuated_lines": (0.5, {}),
    "rules.max_short_lines": (0.5, {}),
    "rules.min_sentences": (1, {}),
    "rules.max_curly_brackets": (0, {}),
    "filters.use": ({"long": "HERE/long.py:Long"}, {}),
    "filters.settings": ({"long": {"least": 1500}}, {"filters": {"use": {"long": "HERE/long.py:Long"}}}),
    "filters.files": ({"long": {"names": "HERE/long.py"}}, {"filters": {"use": {"long": "HERE/long.py:Long"}}}),
    "duplicates.exact": (False, {"duplicates": {"near": False}}),
    "duplicates.near": (False, {}),
    "duplicates.threshold": (1.0, {}),
    "duplicates.keep": ("first", {}),
    "split.holdout": (0.2, {}),
    "split.seed": (3, {"split": {"holdout": 0.2}}),
    "split.max_bytes": (60_000, {}),
    "duplicates.image_distance": (12, {}),
    "media.image_size": (8, {}),
    "media.log_mel": (True, {}),
    "media.num_mels": (10, {"media": {"log_mel": True}}),
    "media.window_ms": (50.0, {"media": {"log_mel": True}}),
    "media.hop_ms": (50.0, {"media": {"log_mel": True}}),
    "chunk.tokens": (64, {}),
    "chunk.overlap": (0.5, {"chunk": {"tokens": 64}}),
    "chunk.overlap_loss": ("train", {"chunk": {"tokens": 64}}),
    "tokenizer.path": ("HERE/tokenizer.json", {}),
    "tokenizer.vocab_size": (500, {}),
    "shards.bytes": (2000, {}),
}
LIMITS = {item.path for item in setting_names.fields(DataBuild) if item.path.startswith("limits.")} - {
    "limits.line_bytes"
}
"""Of readers, whose tests prove each; here `test_limits_reach_the_readers` shows that they get there."""
ELSEWHERE = {
    "rules.languages": "test_languages",
    "rules.min_language_score": "test_a_language_that_is_not_sure",
    "chat.format": "test_ids_masks_and_reasons_are_those_of_the_other_road",
    "chat.template": "test_a_run_says_what_a_built_dataset_is_not",
}
"""Tests in `test_rules` and `test_chat`."""


@pytest.fixture(scope="module")
def here(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("settings")
    source = write_corpus(folder / "in")
    line = "this line is in several records\n"
    odd = "- 12 34 { } # ... the a@b.example e\u0301 \u2026\n" * 3 + "short\n\nshort\n\n" * 9
    (source / "prose" / "odd.txt").write_text(line + odd)
    (source / "prose" / "other.txt").write_text(line + prose(77))
    (source / "prose" / "ellipsis.txt").write_text("and so on...\n" + line.strip() + "...\n")
    loop = "one two three four five six seven eight nine ten eleven twelve "
    (source / "prose" / "loop.txt").write_text(loop * 20)
    (source / "rows" / "fields.jsonl").write_text(
        "".join(json.dumps({"text": prose(900 + i), "other": prose(800 + i)}) + "\n" for i in range(3))
    )
    for i in range(20):
        (source / "rows" / f"big{i}.txt").write_text(prose(4000 + i, 600))
    write_media(source, ("prose", "rows"), 2)
    build(settings(source), folder / "base")
    from tilewright.data.common.tokenizer import train_tokenizer

    train_tokenizer(["other text " * 50], 300).save(folder / "tokenizer.json")
    (folder / "long.py").write_text(FILTER)
    return folder


def test_every_setting_has_a_probe():
    assert set(PROBES) | set(SCORED) | set(ELSEWHERE) | LIMITS == {
        item.path for item in setting_names.fields(DataBuild)
    }
    assert all(hasattr(test_rules, name) or hasattr(test_chat, name) for name in ELSEWHERE.values())


def test_limits_reach_the_readers(tmp_path, monkeypatch):
    """Every one as it is set."""
    seen = []
    monkeypatch.setattr(
        read_records, "read_file", lambda path, name, domain, limits, *_: seen.append(limits) or iter(())
    )
    values = {name: getattr(LimitsSection(), name) // 2 for name in LimitsSection.model_fields}
    (tmp_path / "a.txt").write_text("text")
    config = settings(tmp_path, limits=values)
    list(read_records.read_item(list_inputs(config.read).shards[0][0], config))
    assert seen == [ReadLimits(**values)]


@pytest.mark.parametrize("setting", PROBES)
def test_every_setting_has_an_effect(here, tmp_path, setting):
    value, needed = PROBES[setting]
    section, _, name = setting.partition(".")
    value, with_needed = (_placed(one, here) for one in (value, needed))
    base = here / "base"
    if needed:
        base = tmp_path / "base"
        build(settings(here / "in", **_placed(needed, here)), base)
    with_needed.setdefault(section, {})[name] = value
    build(settings(here / "in", **with_needed), tmp_path / "out")
    found = [json.loads((folder / "dataset.json").read_bytes()) for folder in (base, tmp_path / "out")]
    names = ("fingerprint", "shards")
    told = [(len(one["stages"]), one["stages"]["read"], *(one[name] for name in names)) for one in found]
    assert told[0] != told[1]


def _placed(value, here: Path):
    """A value, or a copy of a table, with the folder of the corpus in its paths."""
    if isinstance(value, dict):
        return {key: _placed(one, here) for key, one in value.items()}
    return value.replace("HERE", str(here)) if isinstance(value, str) else value


def test_a_setting_without_effect_is_told(tmp_path, caplog):
    (tmp_path / "data.toml").write_text("[chunk]\noverlap = 0.2\n[duplicates]\nnear = false\nkeep = 'first'\n")
    load_data_toml(tmp_path / "data.toml")
    told = [record.getMessage() for record in caplog.records]
    assert [text.partition(" has no effect here: ")[0] for text in told] == ["duplicates.keep", "chunk.overlap"]
    assert "data.toml:2" in told[1]


@pytest.mark.parametrize(
    "wrong", ['{ ".dat" = "words" }', '{ "dat" = "text" }', '{ ".DAT" = "text" }', '{ "" = "text" }']
)
def test_an_unknown_kind_of_files_is_refused(wrong, tmp_path):
    (tmp_path / "data.toml").write_text(f"[read]\nsuffixes = {wrong}\n")
    with pytest.raises(ConfigError, match="Unknown kind of files") as caught:
        load_data_toml(tmp_path / "data.toml")
    (tmp_path / "data.toml").write_text(f"[read]\n{caught.value.problems[0].try_}\n")
    assert load_data_toml(tmp_path / "data.toml").read.suffixes == {".dat": "text"}


def test_sources_are_shown_without_the_folder_of_the_toml(tmp_path):
    """Through links, as the system finds them; paths without `..` and names of the hub stay as they are written."""
    (tmp_path / "far" / "deep").mkdir(parents=True)
    (tmp_path / "far" / "texts").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "far" / "deep")
    (tmp_path / "plain.toml").write_text('[read.sources]\na = "link/../texts"\nb = "link"\nc = "hf://org/name"\n')
    context = Context(load_data_toml(tmp_path / "plain.toml"), tmp_path / "out")
    assert source_label(context) == f"{tmp_path.resolve() / 'far' / 'texts'}, {tmp_path / 'link'}, hf://org/name"
