"""Every setting of the stages that score records changes what a build gives."""

import json
from pathlib import Path

import pytest

from tests.data.build.corpora import build, settings
from tests.data.build.scores.texts import all_three, write_scored_corpus

pytest.importorskip("sklearn")

PROBES = {
    "quality.good": "good/1.txt",
    "quality.bad": "in/a",
    "quality.labelled": "labelled.jsonl",
    "quality.model": "model",
    "quality.domains": ("a",),
    "quality.threshold": 0.0,
    "quality.keep_top": 0.5,
    "quality.example_bytes": 3 << 13,
    "quality.allow_weak": True,
    "noise.clean": "good",
    "noise.noisy": "bad",
    "noise.kinds": ("encoded",),
    "noise.domains": ("a",),
    "noise.clean_loss": 0.3,
    "noise.threshold": -0.5,
    "noise.order": 3,
    "noise.reference_bytes": 3 << 14,
    "noise.allow_weak": True,
    "sample.reference": "good",
    "sample.weights": (0.1,),
    "sample.shape": "smooth",
    "sample.domains": ("b",),
    "sample.domain_weights": {"a": 0.2},
    "sample.seed": 9,
    "sample.order": 3,
    "sample.reference_bytes": 1 << 13,
}
PATHS = ("good", "bad", "labelled", "model", "clean", "noisy", "reference")


@pytest.fixture(scope="module")
def here(tmp_path_factory) -> Path:
    root = write_scored_corpus(tmp_path_factory.mktemp("effects"))
    for section, values in all_three(root).items():
        build(settings(root / "in", **{section: values}), root / "base" / section)
    (root / "model").write_bytes((root / "base/quality/work/quality_model/00000/quality.safetensors").read_bytes())
    return root


@pytest.mark.slow
@pytest.mark.parametrize("setting", [name for name in PROBES if not name.endswith(("allow_weak", "quality.good"))])
def test_every_setting_has_an_effect(here, tmp_path, setting):
    """`allow_weak` and too few examples are in `test_classifier` and `test_contrast`."""
    section, _, name = setting.partition(".")
    value = PROBES[setting]
    sections = {section: all_three(here)[section]}
    if name == "bad":
        sections["quality"]["allow_weak"] = True
    if name in ("labelled", "model"):
        sections["quality"] = {"threshold": 0.0} if name == "model" else {}
    if name == "keep_top":
        del sections["quality"]["threshold"]
    sections[section][name] = str(here / str(value)) if name in PATHS else value
    build(settings(here / "in", **sections), tmp_path)
    assert fingerprint(here / "base" / section) != fingerprint(tmp_path)


def fingerprint(built: Path) -> str:
    return json.loads((built / "dataset.json").read_bytes())["fingerprint"]
