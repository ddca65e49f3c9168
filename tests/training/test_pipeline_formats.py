"""Formats that move in the middle of a run, whose layers are on ranks in a row: by schedule, by mode, and by a
controller that decides on the evidence of all of them. The decisions and their record are those of one process."""

import json
import re

import pytest

from tests.ranks import on_ranks
from tests.training.test_controller_run import CONTROLLED, WILD
from tests.training.test_pipeline_run import FP8, HALF, runs
from tests.training.tiny import rows

pytestmark = pytest.mark.dist
WILD = CONTROLLED | WILD | {"train__steps": 6, "train__eval_interval": 0, "optim__lr": 0.3}
"""Nothing is clipped: the norm is a sum of several ranks' sums, and in FP8 its last bit is seen a step later."""
RUNS = {
    "controlled": WILD,
    "scheduled": FP8 | {"precision__fp8_from": "[0,0.3,0.5]", "precision__fp8_until": 0.8},
    "started": FP8 | {"precision__start_mode": "bf16_mixed", "precision__start_fraction": 0.5},
    "levels": WILD | {"precision__controller__granularity": "three_level", "precision__controller__budget": 1.0},
}
PIPED = {"parallel__pp": 2}
INTERLEAVED = PIPED | {"parallel__schedule": "interleaved", "parallel__virtual_stages": 2}
ZBV = PIPED | {"parallel__schedule": "zbv"}
CASES = [("controlled", 2, PIPED)]
MORE = [
    ("scheduled", 2, ZBV),
    ("started", 2, PIPED),
    ("controlled", 2, ZBV),
    ("controlled", 2, INTERLEAVED),
    ("levels", 2, PIPED),
    ("started", 2, ZBV),
    ("scheduled", 4, PIPED | {"parallel__dp_shard": 2}),
    ("started", 4, ZBV | {"parallel__dp_shard": 2}),
]
EVENTS = ("precision_switch", "precision_move", "precision_budget", "redo", "skip")


def _check(data, folder, cases):
    on_ranks(1, runs, str(data), str(folder), {name: RUNS[name] for name, _, _ in cases})
    for world in sorted({world for _, world, _ in cases}):
        piped = {f"{name}{i}": RUNS[name] | more for i, (name, ranks, more) in enumerate(cases) if ranks == world}
        for found in on_ranks(world, runs, str(data), str(folder), piped):
            for name in piped:
                assert not isinstance(found[name], str), found[name]
        for name in piped:
            _same_decisions(folder / name, folder / name.rstrip("0123456789"), data_ranks=world // 2)


def _same_decisions(run, alone, data_ranks=1):
    losses = [[row["loss"] for row in rows(of / "metrics.jsonl") if "loss" in row] for of in (run, alone)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    told = [
        [
            (row["step"], row["kind"], _without_values(row["message"]))
            for row in rows(of / "events.jsonl")
            if row["kind"] in EVENTS
        ]
        for of in (run, alone)
    ]
    assert told[0] == told[1]
    assert told[0], "something moved"
    for name in ("precision.json", "audit.json"):
        tables = [json.loads((of / name).read_text()) for of in (run, alone)]
        for row in tables[0]["rows"] if name == "audit.json" else ():
            row["calls"] = row["calls"] and row["calls"] * data_ranks  # of the first one, on its share of the rows
        assert tables[0] == tables[1], name
    if (alone / "precision.jsonl").exists():
        ours, theirs = (rows(of / "precision.jsonl") for of in (run, alone))
        decided = [[{key: row.get(key) for key in ("kind", "step", "layer", "gemm", "before", "after", "evidence")}
                    for row in of] for of in (ours, theirs)]  # fmt: skip
        assert decided[0] == decided[1]
        assert {row["layer"].split(".")[2] for row in ours if row["kind"] == "move"} & {"2", "3"}, "of the other rank"
        for a, b in zip(ours, theirs, strict=True):
            assert list(a.get("layers", ())) == list(b.get("layers", ())) or a["layers"].keys() == b["layers"].keys()


@pytest.mark.support("controller", "stages")
@pytest.mark.support("fp8", "stages")
@pytest.mark.timeout(600)
def test_decisions_are_those_of_one_process(data, tmp_path):
    _check(data, tmp_path, CASES)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_more_of_them(data, tmp_path):
    _check(data, tmp_path, MORE)


@pytest.mark.slow
def test_a_controlled_run_goes_on_in_stages(data, tmp_path):
    run = RUNS["controlled"] | HALF
    on_ranks(1, runs, str(data), str(tmp_path), {"whole": run, "goes_on": run | {"train__steps": 4}})
    found = on_ranks(2, runs, str(data), str(tmp_path), {"goes_on": run | ZBV})
    assert found[0]["goes_on"][0] == 6, found[0]["goes_on"]
    _same_decisions(tmp_path / "goes_on", tmp_path / "whole")


def _without_values(text):
    return re.sub(r"\(.*?\)", "", text)
