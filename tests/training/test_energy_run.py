"""Energy of whole runs: beside their steps, over a resume, over ranks, and "unavailable" where there is no counter."""

import json
import re
from itertools import pairwise
from pathlib import Path

import pytest

from tests.contracts.observe import fixed_ceilings
from tests.ranks import on_ranks
from tests.training.tiny import rows, tiny
from tilewright.core.errors import ConfigError
from tilewright.energy.counter import MeteredPart
from tilewright.energy.processors import FoundCounters
from tilewright.planner.machine import ceilings
from tilewright.report.page import write_report
from tilewright.training.hooks import energy_hook
from tilewright.training.session import train

QUIET = {"train__sample_tokens": 0, "log__report": "false", "energy__idle_seconds": 0}


class Steady:
    """A counter of a part that takes 40 W."""

    part = MeteredPart("package-0", "package-0: a processor", "a test")
    wraps_at = None

    def read(self, now):
        return 40.0 * now


@pytest.fixture
def counted(monkeypatch):
    monkeypatch.setattr(energy_hook, "processor_counters", lambda: FoundCounters((Steady(),)))


def energy(folder):
    return json.loads((folder / "energy.json").read_text())


def test_a_run_with_a_counter(data, tmp_path, counted, capsys):
    folder = train(tiny(data, tmp_path, **QUIET)).run_dir
    table = energy(folder)
    assert (table["state"], table["steps"]) == ("measured", 6)
    assert set(table["joules"]) >= {"start", "steps", "evaluation", "checkpoints"}
    assert table["total_j"] == pytest.approx(sum(table["joules"].values()))
    assert table["total_j"] == pytest.approx(40 * sum(table["seconds"].values()), rel=0.02)
    assert table["flops"] > table["tokens"]
    assert table["planned"] is None, "the recipe does not say what this machine takes"
    with_lines = [row for row in rows(folder / "metrics.jsonl") if "energy_j" in row]
    assert [row["step"] for row in with_lines] == [1, 2, 4, 6]
    assert all(later["energy_j"] > row["energy_j"] for row, later in pairwise(with_lines))
    steps = with_lines[-1]["energy_j"] - with_lines[-2]["energy_j"]
    assert with_lines[-1]["energy_j_per_step"] == pytest.approx(steps / 2)
    out = capsys.readouterr().out
    assert "energy: measured: package-0: a processor (a test)" in out
    assert re.search(r"\| [0-9.]+ m?k?J/step", out), out
    page = write_report(folder).read_text()
    assert "Energy" in page
    assert "per token" in page
    assert "per FLOP of its matmuls" in page


def test_without_a_counter_no_number_is_anywhere(data, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(energy_hook, "processor_counters", lambda: FoundCounters(reasons=("no zone of RAPL",)))
    folder = train(tiny(data, tmp_path, **QUIET)).run_dir
    table = energy(folder)
    assert (table["state"], table["total_j"], table["joules"], table["parts"]) == ("unavailable", None, {}, [])
    assert table["estimate"] is table["idle_watts"] is table["own_share"] is table["intensity"] is None
    assert not any("energy" in name or "estimated" in name for row in rows(folder / "metrics.jsonl") for name in row)
    out = capsys.readouterr().out
    assert "energy: unavailable: no zone of RAPL" in out
    assert "J/step" not in out
    page = write_report(folder).read_text()
    assert "unavailable" in page
    assert "no zone of RAPL" in page
    assert "kWh" not in page


def test_an_estimate_is_called_one(data, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(energy_hook, "processor_counters", lambda: FoundCounters(reasons=("no zone of RAPL",)))
    more = {"energy__assume_watts": 65, "energy__intensity": 380, "energy__intensity_source": "grid operator 2025"}
    folder = train(tiny(data, tmp_path, **QUIET, **more)).run_dir
    table = energy(folder)
    assert (table["state"], table["total_j"]) == ("estimated", None)
    assert table["estimate"]["joules"] == pytest.approx(65 * table["machine_s"])
    assert "energy_j" not in json.dumps(rows(folder / "metrics.jsonl"))
    assert "(estimated)" in capsys.readouterr().out
    assert table["planned"]["joules"] > 0
    page = write_report(folder).read_text()
    assert "estimated" in page
    assert "Planned for its steps" in page
    assert "grid operator 2025" in page


def test_the_idle_machine_is_measured_before_the_run(data, tmp_path, counted):
    folder = train(tiny(data, tmp_path, **QUIET | {"energy__idle_seconds": 0.1})).run_dir
    assert energy(folder)["idle_watts"] == pytest.approx(40, rel=0.02)
    assert "The idle machine took 40.0 W" in write_report(folder).read_text()
    other = train(tiny(data, tmp_path, **QUIET, run__name="other")).run_dir
    assert energy(other)["idle_watts"] is None


def test_a_resumed_run_adds_up(data, tmp_path, counted):
    folder = train(tiny(data, tmp_path, **QUIET, train__steps=4)).run_dir
    first = energy(folder)
    assert train(tiny(data, tmp_path, **QUIET, train__steps=8)).run_dir == folder
    second = energy(folder)
    assert second["total_j"] > 1.2 * first["total_j"]
    assert second["joules"]["start"] > first["joules"]["start"]
    assert second["machine_s"] > first["machine_s"]
    assert [part["joules"] for part in second["parts"]] == [pytest.approx(second["total_j"])]


def test_what_was_counted_stays_where_the_run_goes_on_without_a_counter(data, tmp_path, counted, monkeypatch, capsys):
    folder = train(tiny(data, tmp_path, **QUIET, train__steps=4)).run_dir
    first = energy(folder)
    monkeypatch.setattr(energy_hook, "processor_counters", lambda: FoundCounters(reasons=("no zone of RAPL",)))
    train(tiny(data, tmp_path, **QUIET, train__steps=8))
    second = energy(folder)
    assert (second["state"], second["total_j"]) == ("measured", pytest.approx(first["total_j"]))
    assert "no zone of RAPL" in second["reasons"]
    later = [row for row in rows(folder / "metrics.jsonl") if row["step"] > 4]
    assert not any("energy_j_per_step" in row for row in later), "nothing was counted, and that is no zero"
    assert "energy: measured: before this process alone; not counted: no zone of RAPL" in capsys.readouterr().out


@pytest.mark.slow
def test_a_record_that_is_damaged_is_said(data, tmp_path, counted, capsys):
    folder = train(tiny(data, tmp_path, **QUIET, train__steps=4)).run_dir
    (folder / "energy.json").write_text('{"state": "measured", "joules": "many"}')
    train(tiny(data, tmp_path, **QUIET, train__steps=6))
    assert "what the run used before is not counted" in capsys.readouterr().out
    assert energy(folder)["total_j"] > 0


@pytest.mark.slow
def test_it_can_be_left_out_and_changes_no_number(data, tmp_path, counted):
    measured = train(tiny(data, tmp_path, **QUIET)).run_dir
    off = train(tiny(data, tmp_path, **QUIET, energy__measure="false", run__name="off")).run_dir
    assert not (off / "energy.json").exists()
    losses = [[row.get("loss") for row in rows(folder / "metrics.jsonl")] for folder in (measured, off)]
    assert losses[0] == losses[1]


def _run(rank, data, runs):
    """A rank with a counter of the machine's processor, which both ranks could read."""
    energy_hook.processor_counters = lambda: FoundCounters((Steady(),))  # this process is the test's own
    ceilings.measure = fixed_ceilings
    return train(tiny(Path(data), Path(runs), **QUIET, parallel__dp_shard=2)).step


@pytest.mark.dist
@pytest.mark.slow
def test_ranks_of_one_machine_count_it_once(data, tmp_path):
    assert on_ranks(2, _run, str(data), str(tmp_path)) == [6, 6]
    table = energy(tmp_path / "tiny")
    assert len(table["parts"]) == 1
    assert table["total_j"] == pytest.approx(40 * table["machine_s"], rel=0.2)
    assert table["own_share"] > 0


def test_emissions_need_a_source(data, tmp_path):
    for more in ({"energy__intensity": 380}, {"energy__intensity_source": "a guess"}):
        with pytest.raises(ConfigError, match="Carbon intensity and its source go together"):
            tiny(data, tmp_path, **QUIET, **more)
    for wrong in ("-1", "1e9", "nan"):
        with pytest.raises(ConfigError):
            tiny(data, tmp_path, **QUIET, energy__intensity=wrong, energy__intensity_source="x")
