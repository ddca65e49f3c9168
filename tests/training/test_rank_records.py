"""Records of the ranks of work that has no run folder: a temporary folder, which is removed however the ranks end."""

import json
import os
import platform
import tempfile
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.ranks import on_ranks
from tests.training.ranks_that_die import on_ranks_of_which_one_dies
from tests.training.sharded import joined
from tilewright.core.config.load import load_recipe
from tilewright.parallel.liveness.heartbeat import FOLDER
from tilewright.training.planning.rank_watch import facts_of, settings_of, watched

pytestmark = pytest.mark.dist
DEAD = 2**22 + 1
"""No process has this number: Linux gives none above 2^22."""


def _left(parent: Path) -> list[str]:
    return sorted(path.name for path in parent.iterdir() if path.is_dir())


def _work(rank: int, parent: Path, ends: str) -> None:
    tempfile.tempdir = str(parent)
    with watched(joined(2), parent) as world:
        dist.barrier(world.waiting_group)
        (parent / f"begun-{rank}").touch()
        if ends == "killed":
            time.sleep(60 if rank else 2.5)  # the other one leaves after the kill
        if ends == "error" or (ends == "error on one" and rank == 1):
            raise ValueError("planted")


def _caught(rank: int, parent: Path, ends: str) -> str:
    try:
        _work(rank, parent, ends)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("ends", ["well", "error", "error on one"])
def test_the_last_rank_that_leaves_removes_them(tmp_path, ends):
    said = on_ranks(2, _caught, tmp_path, ends)
    assert [bool(text) for text in said] == [ends == "error", ends != "well"]
    assert _left(tmp_path) == []


def test_a_killed_rank_is_not_waited_for(tmp_path):
    on_ranks_of_which_one_dies(2, 1, tmp_path / "begun-1", 0.2, _caught, tmp_path, "killed")
    assert _left(tmp_path) == []


def _record(folder: Path, rank: int, pid: int, host: str = platform.node(), end: str = "") -> None:
    path = folder / FOLDER / f"{rank:05d}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"rank": rank, "host": host, "pid": pid, "end": end}))


def test_the_next_ranks_remove_those_of_ranks_that_were_all_killed(tmp_path):
    cases = {
        "killed": [(0, DEAD), (1, DEAD)],
        "one failed": [(0, DEAD, platform.node(), "RankFailedError: planted"), (1, DEAD)],
        "one runs": [(0, DEAD), (1, os.getpid())],
        "elsewhere": [(0, DEAD), (1, 1, "another machine")],
    }
    for name, records in cases.items():
        for record in records:
            _record(tmp_path / f"tilewright-ranks-{name}", *record)
    (tmp_path / "tilewright-ranks-of another that begins now").mkdir()
    (tmp_path / "other").mkdir()
    on_ranks(2, _caught, tmp_path, "well")
    stay = ["one runs", "elsewhere", "of another that begins now"]
    assert _left(tmp_path) == sorted(["other", *(f"tilewright-ranks-{name}" for name in stay)])


def test_folders_that_are_made_may_differ_between_machines(tmp_path):
    def recipe(**values: object):
        return load_recipe("default", {name.replace("__", "."): str(value) for name, value in values.items()}).recipe

    one, other = recipe(data__cache_dir=tmp_path / "a"), recipe(data__cache_dir=tmp_path / "b")
    assert settings_of(one) == settings_of(other)
    assert facts_of(one) == facts_of(other)
    assert facts_of(one) != facts_of(recipe(data__source=tmp_path))
