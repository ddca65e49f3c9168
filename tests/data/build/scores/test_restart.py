"""Builds with scores: the same bytes from any processes, ranks and after kills; a change redoes what depends on it."""

import errno
import json
import shutil
from pathlib import Path

import pytest

from tests.data.build.corpora import build, build_as_ranks, digest, settings
from tests.data.build.scores.texts import all_three, shouted, write_scored_corpus
from tests.data.build.test_kill import kill_until_whole
from tilewright.core.errors import DataError
from tilewright.data.dataset.build_account import build_account
from tilewright.data.engine.executors.local_executor import LocalExecutor

pytest.importorskip("sklearn")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    return write_scored_corpus(tmp_path_factory.mktemp("scores"))


@pytest.fixture(scope="module")
def built(corpus, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("built") / "out"
    build(settings(corpus / "in", **all_three(corpus)), out)
    return out


@pytest.mark.dist
@pytest.mark.parametrize("processes", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_any_number_of_processes_gives_the_same_bytes(corpus, built, tmp_path, processes):
    with LocalExecutor(processes) as executor:
        build(settings(corpus / "in", **all_three(corpus)), tmp_path, executor)
    assert digest(tmp_path) == digest(built)


def test_two_ranks_give_the_same_bytes(corpus, built, tmp_path):
    build_as_ranks(settings(corpus / "in", **all_three(corpus)), tmp_path)
    assert digest(tmp_path) == digest(built)


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize("processes", [1, 2])
def test_killed_builds_give_the_same_bytes(corpus, built, tmp_path, processes):
    """Paths in settings are absolute, so the toml of the killed build gives the settings of the other one."""
    (tmp_path / "whole").symlink_to(built)
    sections = "\n".join(
        f"[{name}]\n" + "\n".join(f"{key} = {_toml(value)}" for key, value in values.items())
        for name, values in all_three(corpus).items()
    )
    kill_until_whole(corpus / "in", tmp_path, processes, kills=6, seed=processes, sections=sections)


def _toml(value: object) -> str:
    return json.dumps(list(value) if isinstance(value, tuple) else value)


@pytest.mark.parametrize("stage", ["quality_model", "quality", "noise_scores", "sample_counts"])
def test_a_stop_between_units_changes_nothing(corpus, built, tmp_path, monkeypatch, stage):
    config = settings(corpus / "in", **all_three(corpus))
    rename = Path.rename

    def full(self: Path, target: Path) -> Path:
        if Path(target).parent.name == stage:
            raise OSError(errno.ENOSPC, "No space left on device")
        return rename(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", full)
        with pytest.raises(DataError, match="finished units stay"):
            build(config, tmp_path)
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "work").rglob("receipt.json")}
    assert not list((tmp_path / "work" / stage).glob("*/receipt.json"))
    build(config, tmp_path)
    assert {p: p.stat().st_mtime_ns for p in before} == before, "a finished unit ran again"
    assert digest(tmp_path) == digest(built)


@pytest.mark.parametrize(
    ("change", "again"),
    [
        ({"quality": {"threshold": 0.4}}, ["quality"]),
        ({"noise": {"clean_loss": 0.2}}, ["noise", "noise_threshold"]),
        ({"sample": {"seed": 5}}, ["sample"]),
        ({"sample": {"order": 5}}, ["sample", "sample_counts", "sample_model", "sample_scores"]),
    ],
    ids=str,
)
def test_a_change_makes_only_what_depends_on_it(corpus, built, tmp_path, change, again):
    work = shutil.copytree(built, tmp_path, dirs_exist_ok=True) / "work"
    before = {p: p.stat().st_mtime_ns for p in work.rglob("receipt.json")}
    build(settings(corpus / "in", **all_three(corpus, **change)), tmp_path)
    made = {p.relative_to(work).parts[0] for p in work.rglob("receipt.json") if before.get(p) != p.stat().st_mtime_ns}
    scoring = {"quality", "noise", "sample"} | {p.name for p in work.iterdir() if "_" in p.name}
    found = made & scoring - {"common_lines"}
    assert set(again) <= found
    assert found <= set(again) | _after(again)


def _after(stages: list[str]) -> set[str]:
    """Stages that may run again because their input did change."""
    order = ["quality", "noise_models", "noise_threshold", "noise_scores", "noise", "sample_model", "sample_scores"]
    order += ["sample_counts", "sample"]
    first = min(order.index(stage) for stage in stages if stage in order)
    return set(order[first:])


def test_a_stage_that_is_off_leaves_nothing(corpus, built, tmp_path):
    shutil.copytree(built, tmp_path, dirs_exist_ok=True)
    build(settings(corpus / "in"), tmp_path)
    account = build_account(tmp_path)
    assert account.models == []
    assert not {"quality", "contrast", "bits_per_byte"} & {one.measure for one in account.histograms}
    build(settings(corpus / "in"), tmp_path / "fresh")
    assert digest(tmp_path) == digest(tmp_path / "fresh")


def test_what_references_are_read_as_counts(corpus, tmp_path):
    """`read.suffixes` is how records are read, and examples, too: with another kind the model is learned again."""
    good = shutil.copytree(corpus / "good", tmp_path / "good")
    for number in range(30):
        (good / f"{number}.md").write_text(shouted(7000 + number))
    quality = all_three(corpus)["quality"] | {"good": str(good), "allow_weak": True}
    build(settings(corpus / "in", quality=quality), tmp_path / "out")
    without = settings(corpus / "in", read={"suffixes": {".md": "none"}}, quality=quality)
    build(without, tmp_path / "out")
    build(without, tmp_path / "fresh")
    assert digest(tmp_path / "out") == digest(tmp_path / "fresh")
