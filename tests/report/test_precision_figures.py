"""No FP8 layer for the controller to move's part of the report: from precision.jsonl to maps, strips, moves with
evidence, and marks."""

import json
import math
import re
from dataclasses import asdict

import pytest

from tests.report.conftest import write_run
from tilewright.precision.controller.groups import Move
from tilewright.precision.controller.layer_statistics import GemmStats, LayerStats, QuantStats, TensorStats
from tilewright.precision.policy.gemm_formats import GEMM_NAMES
from tilewright.report.figures.precision_figures import (
    map_figure,
    move_rows,
    short_names,
    sqnr_figure,
    underflow_figure,
)
from tilewright.report.page import render
from tilewright.report.run_data.collect_run import collect
from tilewright.report.svg.heatmap import Bar, heat_map

LAYERS = ["model.layers.0.up", "model.layers.0.down", "model.layers.1.up"]
MOVE = Move(200, LAYERS[1], "wgrad", "fp8_tile", "bf16", "underflow", 0.25, 0.01)
REFUSED = Move(200, LAYERS[2], "fprop", "fp8_tile", "bf16", "gain", 0.11, 0.02)


def evidence(underflow: float, sqnr: float) -> QuantStats:
    tensor = TensorStats(1.0, 0.0, 0.0, 0.0, 3.0, 30.0)
    tensors = {"input": tensor, "weight": tensor, "gradient": TensorStats(1.0, underflow, 0.0, 0.0, 3.0, 30.0)}
    good = GemmStats(1.0, 1.0, 0.9999, 30.0)
    matmuls = {"fprop.fp8_tile": good, "wgrad.fp8_tile": GemmStats(0.9, 0.9, 0.9, sqnr), "wgrad.bf16": good}
    return QuantStats({name: LayerStats(tensors, matmuls) for name in LAYERS})


@pytest.fixture
def folder(tmp_path):
    """A run without a controller."""
    write_run(tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture
def run(folder):
    """A run of three samples, one move and one that the budget refused."""
    table = [{"fqn": name, "gemms": dict.fromkeys(GEMM_NAMES, "fp8_tile")} for name in LAYERS]
    (folder / "precision.json").write_text(json.dumps(table))
    rows = []
    for step, underflow, sqnr in ((100, 0.0, 28.0), (200, 0.25, 3.0), (300, math.nan, math.inf)):
        found = evidence(underflow, sqnr).to_json()
        rows.append({"kind": "sample", "step": step, "above_8bit": 0.1, "noise": 0.03, "layers": found})
    rows.insert(2, {"kind": "move", **asdict(MOVE)})
    rows.insert(3, {"kind": "refused", **asdict(REFUSED)})
    (folder / "precision.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with (folder / "events.jsonl").open("a") as file:
        file.write(
            json.dumps({"time_s": 1, "step": 200, "kind": "precision_move", "message": "1 matmuls moved"}) + "\n"
        )
    return collect(folder)


def titles(svg: str) -> list[str]:
    return re.findall(r"<title>(.*?)</title>", svg)


def test_the_map_shows_the_format_of_every_product_at_every_sample(run):
    figure = map_figure(run)
    cells = titles(figure.svg)
    assert len(cells) == len(LAYERS) * 3 * len(GEMM_NAMES)
    changed = [cell for cell in cells if "bf16" in cell]
    assert changed == ["0.down, step 200: wgrad bf16", "0.down, step 300: wgrad bf16"]
    assert (1, "bf16", "1 of 9 at the end") in figure.legend
    assert "1 moves; 10 % of the work above 8 bits." in figure.note
    assert "1 moves were refused" in figure.note


def test_the_strips_show_the_worst_number_and_where_it_was(run):
    figure = underflow_figure(run)
    assert "1.up, step 200: gradient 25 %" in titles(figure.svg)
    assert figure.note == "Worst: model.layers.0.up at step 300: gradient nan %."
    figure = sqnr_figure(run)
    assert "0.up, step 200: wgrad 3 dB" in titles(figure.svg)
    assert "0.up, step 300: fprop 30 dB" in titles(figure.svg)
    assert figure.note == "Worst: model.layers.0.up at step 200: wgrad 3 dB."


def test_moves_come_with_evidence_and_threshold(run):
    assert move_rows(run) == [
        ("200", LAYERS[1], "wgrad", "fp8_tile", "bf16", "underflow 0.25, limit 0.01", ""),
        ("200", LAYERS[2], "fprop", "fp8_tile", "bf16", "gain 0.11, limit 0.02", "refused"),
    ]


def test_the_page_has_the_maps_the_moves_and_the_mark(run):
    page = render(run)
    for text in ("Formats by layer", "Underflow: share", "Signal to noise", "underflow 0.25, limit 0.01", "1 made, 1"):
        assert text in page
    assert "step 200: precision_move: 1 matmuls moved" in page


def test_a_run_without_a_controller_has_none_of_it(folder):
    run = collect(folder)
    assert run.history is None
    assert map_figure(run) is underflow_figure(run) is sqnr_figure(run) is None
    assert move_rows(run) == []
    assert "Formats by layer" not in render(run)


def test_a_damaged_history_is_left_out_and_told(folder):
    (folder / "precision.jsonl").write_text('{"kind": "sample"}\n')
    run = collect(folder)
    assert run.history is None
    assert any("precision.jsonl" in text for text in run.trouble)


def test_many_samples_are_thinned_to_what_can_be_seen():
    steps = list(range(1000))
    svg = heat_map([("layer <1>", [[Bar(0, 1.0, "x")] for _ in steps])], steps, label="many")
    assert 40 <= len(titles(svg)) <= 60
    assert "layer &lt;1&gt;" in svg


@pytest.mark.parametrize(
    ("names", "short"),
    [(["a.b.c"], ["a.b.c"]), (["m.0.up", "m.0.down"], ["up", "down"]), (["up", "m.down"], ["up", "m.down"]), ([], [])],
)
def test_short_names(names, short):
    assert short_names(names) == short
