"""No number in a run folder stops the report: not finite, beyond a double, negative, absent, of another type."""

import math
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cover import covering
from tests.draws import examples
from tests.report.synthetic import eval_rows, read, step_rows, write
from tests.report.test_page import outline
from tilewright.report.page import render, write_report
from tilewright.report.run_data.collect_run import collect

EXTREMES = (math.nan, math.inf, -math.inf, 345_341.0, 1e300, -1e300, 1.7e308, -1.7e308, 5e-324, 0.0, -2.5, 10**300)
numbers = st.sampled_from(EXTREMES) | st.floats(width=64) | st.integers(-(2**70), 2**70)
anything = numbers | st.none() | st.booleans() | st.just("text") | st.just([1.0]) | st.just({"loss": 1.0})
NAMES = ("loss", "grad_norm", "lr", "loss_scale", "skipped", "tokens", "tokens_per_s", "step_s", "wait_s",
         "wait_share", "memory_bytes", "memory", "memory_phases", "memory_tiers", "time_s")  # fmt: skip


@pytest.mark.parametrize(
    ("strict", "count", "value"), covering((True, False), (1, 2, 30), EXTREMES, pairs=False), ids=str
)
def test_a_run_of_one_value_everywhere(tmp_path, value, count, strict):
    columns = {name: [value] * count for name in ("grad_norm", "lr", "tokens_per_s", "wait_share", "memory_bytes")}
    columns["memory"] = [{"activations": value, "other": value}] * count
    rows = step_rows([value] * count, **columns) + eval_rows({step: {"a": value, "b": value} for step in (1, count)})
    outline(render(read(tmp_path / "run", rows, strict=strict)))


@examples(25)
@given(
    rows=st.lists(st.dictionaries(st.sampled_from(NAMES), anything), max_size=40),
    evals=st.dictionaries(st.integers(1, 40), st.dictionaries(st.sampled_from("ab"), anything), max_size=4),
    clip=st.none() | numbers,
    planned=anything,
)
def test_rows_of_anything(rows, evals, clip, planned):
    steps = [{"step": number, **row} for number, row in enumerate(rows, 1)]
    recipe = f"[optim]\nclip_norm = {clip if isinstance(clip, float) and math.isfinite(clip) else 1.0}\n"
    plan = {"peak_bytes": planned, "tokens_per_s": planned, "phases": {"backward": {"other": planned}}}
    events = [{"step": planned, "kind": "overflow", "message": "m"}, {"step": 1, "time_s": planned, "kind": "skip"}]
    with tempfile.TemporaryDirectory() as folder:
        run = read(
            Path(folder), steps + eval_rows(evals), recipe=recipe, plan=plan | {"peak_phase": "backward"},
            events=events, strict=False,
        )  # fmt: skip
        outline(render(run))


KINDS = ("replan", "mix_eval", "mix", "mix_refused", "eval", "save", "done", "stop", "start", "resume", "redo",
         "fallback", "checkpoint_rejected", "precision_move", "precision_switch", "save_failed")  # fmt: skip
FIELDS = ("step", "message", "time_s", "error", "change", "tokens", "threshold", "trigger", "before", "after",
          "peak_bytes", "step_s", "measured_bytes", "expected_bytes", "budget_bytes", "limit_bytes", "background",
          "domains", "domain", "weights", "rise", "reason", "peak", "ranks", "rank", "seconds", "stall_s", "plan",
          "machine")  # fmt: skip


@examples(25)
@given(st.lists(st.tuples(st.sampled_from(KINDS), st.dictionaries(st.sampled_from(FIELDS), anything)), max_size=12))
def test_events_of_anything(events):
    """A field of an event that is no number is left out of its table."""
    with tempfile.TemporaryDirectory() as folder:
        found = [{"kind": kind, **fields} for kind, fields in events]
        outline(render(read(Path(folder), step_rows([3.0, 2.0]), events=found, strict=False)))


@examples(25)
@given(st.lists(st.sampled_from(EXTREMES) | st.floats(), min_size=1, max_size=60), st.data())
def test_curves_of_any_floats(losses, data):
    norms = data.draw(st.lists(st.sampled_from(EXTREMES) | st.floats(), min_size=len(losses), max_size=len(losses)))
    memory = [{"memory_bytes": norm, "memory": {"activations": norm, "other": 3}} for norm in norms]
    rows = step_rows(losses, grad_norm=norms, tokens_per_s=norms, lr=norms, loss_scale=norms)
    rows = [row | extra for row, extra in zip(rows, memory, strict=True)]
    with tempfile.TemporaryDirectory() as folder:
        outline(render(read(Path(folder), rows + eval_rows({1: {"a": losses[0]}}))))


@pytest.mark.parametrize(
    "line",
    ['{"step": NaN, "loss": 1.0}', '{"step": Infinity, "loss": 1.0}', '{"step": 1e999, "loss": 1.0}',
     '{"step": null, "loss": 1.0}', '{"step": -3, "loss": 1.0}', '{"step": 2, "eval": {"a": 3}}',
     '{"step": 2, "eval": {"a": {"loss": 1.0, "tokens": "many"}}}', '{"step": 2, "eval": {"a": {}}}',
     '{"step": 2, "loss": 1' + "0" * 400 + "}", '{"step": 1' + "0" * 400 + "}",
     '{"step": 2, "eval": {}}', '{"loss": 1.0}', '[1, 2]', '{"step": 2, "memory": {"other": null}}'],
    ids=range(14),
)  # fmt: skip
def test_one_odd_row_among_good_ones(tmp_path, line):
    folder = write(tmp_path / "run", step_rows([3.0, 2.9, 2.8]))
    with open(folder / "metrics.jsonl", "a", encoding="utf-8") as file:
        file.write(line + "\n")
    outline(write_report(folder).read_text(encoding="utf-8"))
    assert len(collect(folder).steps) in (3, 4)
