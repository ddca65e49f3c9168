"""`python -m benchmarks.runs.headlines`: all rows train the same thing, and the table has their numbers."""

import json
import os
import subprocess
import sys

import pytest

from benchmarks.rows.headline_rows import why_not
from benchmarks.rows.headline_table import table

pytestmark = pytest.mark.slow

ROUNDS = 3
ROWS = ("plain", "peer", "standard", "bits8")


@pytest.fixture(scope="module")
def record(tmp_path_factory):
    """The result of a small contest of the eager rows."""
    folder = tmp_path_factory.mktemp("headlines")
    command = [sys.executable, "-m", "benchmarks.runs.headlines", "contest", "--tiny", "--rounds", str(ROUNDS)]
    command += ["--only", *ROWS]
    env = os.environ | {"OUT": str(folder), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, "--modes", "eager"], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "`bits8 against standard`" in (folder / "headlines_tiny.md").read_text()
    return json.loads((folder / "headlines_tiny.json").read_text())


def test_rows_train_the_same_model_on_the_same_tokens(record):
    """Before any update the losses are those of one model in BF16; after three texts all have learned something."""
    rows = {name: record["results"]["eager"][name] for name in ROWS if why_not(name) is None}
    plain = rows["plain"]["losses"]
    assert plain[0] > plain[3], "the fourth step sees the first one's rows again"
    for name, row in rows.items():
        assert row["losses"][0] == pytest.approx(plain[0], rel=1e-4), name
        assert row["losses"] == pytest.approx(plain, rel=5e-3), name


def test_peaks_and_times_are_of_the_row_itself(record):
    for name in ROWS:
        row = record["results"]["eager"][name]
        if why_not(name):
            assert row == {"not_measured": why_not(name)}
            continue
        assert 0 < row["base_bytes"] < row["steps_peak_bytes"] <= row["peak_bytes"], name
        assert all(len(row[key]["samples"]) == ROUNDS for key in ("step_s", "processor_s")), name


def test_a_pair_is_compared_turn_by_turn(record):
    results = record["results"]["eager"]
    pair, one, other = results["bits8 against standard"], results["bits8"], results["standard"]
    turns = zip(one["step_s"]["samples"], other["step_s"]["samples"], strict=True)
    assert pair["step_s_ratio"]["samples"] == pytest.approx([a / b for a, b in turns], rel=1e-3)
    assert pair["peak_change"] == pytest.approx(one["peak_bytes"] / other["peak_bytes"] - 1)


def row(peak_gib, seconds):
    """A row as it is in a result."""
    times = {key: {"median": seconds, "samples": [seconds]} for key in ("step_s", "processor_s")}
    return times | {"peak_bytes": peak_gib * 2**30, "base_bytes": 2**29, "losses": [9.0, 8.5]}


def test_the_table_says_what_was_measured_and_what_was_not():
    ratio = {"median": 0.5}
    pair = {"peak_change": -0.5, "step_s_ratio": ratio, "processor_s_ratio": ratio}
    results = {"eager": {"peer": {"not_measured": "no torchao"}, "plain": row(4, 20.0), "bits8": row(2, 10.0)}}
    results["compiled"] = {"standard": row(4, 18.0), "bits8": row(2, 9.0), "bits8 against standard": pair}
    machine = {"device": "Some CPU", "cores": 2, "cpu_features": ["avx512_bf16"]}
    made = {"results": results | {"tokens_per_step": 4096}, "machine": machine, "command": "it"}
    cap = {"results": {"limit_bytes": 2**31, "plain": {"finished": False}, "bits8": {"finished": True}}}
    lines = table(made, cap)
    assert "2 cores Some CPU AVX-512" in lines[0]
    assert "AMX" not in lines[0]
    by_start = {line.split(" | ")[0]: line for line in lines}
    plain = by_start["| plain PyTorch loop, Hugging Face Llama, FP32 AdamW, no autocast"]
    assert plain.endswith("| 4.00 GiB (0.50) | 20.0 | 20.0 | 8.500 |  |  |  |  | out of memory |")
    low = next(line for line in lines if "slice_cpu" in line)
    assert low.endswith("| 2.00 GiB (0.50) | 10.0 | 10.0 | 8.500 | 2.00 GiB (0.50) | 9.0 | 9.0 | 8.500 | trains |")
    assert sum("not measured" in line for line in lines) == 1
    assert lines[-1] == "| `bits8 against standard` | -50 % | -57 % | 0.50x | 0.50x |"
    widths = {line.count("|") for line in lines[2 : lines.index("", 2)]}
    assert len(widths) == 1, "every row has all columns"
