"""What programs of benchmarks share: rows that outlive a call, contenders that take turns, commands of runs."""

import sys
from dataclasses import replace

import pytest

from benchmarks.common import Deadline, machine_kind
from benchmarks.kept_rows import KeptCases, KeptRows
from benchmarks.run_command import TRAIN_ALONE, held_out_loss, step_rows, train, train_command
from benchmarks.worker import TurnTaker, contest
from tilewright.core.config.load import load_recipe
from tilewright.core.hardware import detect_machine


def test_rows_are_there_for_the_next_call(tmp_path):
    path = tmp_path / "runs.jsonl"
    assert KeptRows(path).all() == []
    KeptRows(path).add({"seed": 0, "steps": 5, "loss": 2.0})
    KeptRows(path).add({"seed": 1, "steps": 5, "loss": 3.0})
    assert [row["loss"] for row in KeptRows(path).of(steps=5)] == [2.0, 3.0]
    assert KeptRows(path).of(seed=1, steps=6) == KeptRows(path).of(machine=None) == []


def test_a_line_that_a_kill_cut_short_is_left_out(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        '{"step": 1, "loss": 2.5}\n{"eval": {"a": {"loss": 1.0, "tokens": 1}, "b": {"loss": 4.0, "tokens": 2}}}\n{"st'
    )
    assert [row["step"] for row in step_rows(tmp_path)] == [1]
    assert held_out_loss(tmp_path) == 3.0


def test_a_case_is_measured_once(tmp_path):
    path, calls = tmp_path / "cases.json", []

    def measure():
        calls.append(1)
        return {"loss": 2.0}

    assert KeptCases(path).of("a", measure) == KeptCases(path).of("a", measure) == {"loss": 2.0}
    assert len(calls) == 1


@pytest.mark.parametrize(
    ("features", "kind"),
    [
        (("amx_bf16", "amx_int8", "avx512_bf16", "avx512f", "avx2"), "amx"),
        (("avx512_bf16", "avx512f", "avx2"), "avx512"),
        (("avx_vnni", "avx2", "fma"), "avx2"),
        (("avx2", "fma"), "avx2"),
        (("avx512f", "avx512_vnni", "avx2"), "cpu"),
        (("asimd",), "cpu"),
    ],
)
def test_a_result_is_named_by_the_class_of_its_processor(features, kind):
    """One of AVX2 alone was named as all others without 16-bit products."""
    assert machine_kind(replace(detect_machine("cpu"), cpu_features=frozenset(features))) == kind


class Counting(TurnTaker):
    """A contender without a process."""

    def __init__(self) -> None:
        self.turns, self.ended = 0, False

    def ask(self, line: str = "go") -> dict[str, int]:
        self.turns += 1
        return {"turn": self.turns}

    def end(self) -> None:
        self.ended = True


def test_contenders_take_turns_and_end():
    takers = {"one": Counting(), "other": Counting()}
    after = []
    found = contest(takers, 3, lambda turns: after.append({name: len(rows) for name, rows in turns.items()}))
    assert found == {name: [{"turn": 1}, {"turn": 2}, {"turn": 3}] for name in takers}
    assert after == [{"one": n, "other": n} for n in (1, 2, 3)]
    assert all(taker.ended for taker in takers.values())


def test_no_round_begins_for_which_there_is_no_time():
    takers = {"one": Counting()}
    assert contest(takers, 3, deadline=Deadline(0))["one"] == [{"turn": 1}]
    assert takers["one"].ended


def test_a_contender_that_has_ended_is_named():
    with pytest.raises(SystemExit, match="gone ended with code"):
        TurnTaker("gone", "no_such_program").answer()


def test_settings_of_runs_are_of_the_recipe():
    load_recipe("default", {name: str(value) for name, value in TRAIN_ALONE.items()}, environ={})
    command = train_command("default", {"train.steps": 3}, ["--dry-run"], ranks=2)
    assert command[1:3] == ["-m", "torch.distributed.run"]
    assert command[-5:] == ["tilewright", "train", "default", "--train.steps=3", "--dry-run"]
    assert "torch.distributed.run" not in train_command("default", {})


def test_a_run_that_fails_ends_the_program():
    with pytest.raises(SystemExit, match=r"ended with code 3: .*why"):
        train([sys.executable, "-c", "print('why'); raise SystemExit(3)"])
