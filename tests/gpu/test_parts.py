"""`python -m benchmarks.gpu`: parts are cut off at their limit, keep what they had, and are not run twice."""

import json
import os
import subprocess
import sys
import time

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import gpu
from benchmarks.card.fp8_gpu import LAYERS, RATES, TOKENS, Products
from benchmarks.card.memory_gpu import drawn_on_device
from benchmarks.card.step_gpu import StepShape, fitting
from benchmarks.common import Deadline, write_result
from benchmarks.gpu import (
    AROUND_S,
    BEFORE_S,
    CALL_S,
    LOSS,
    NO_GPU,
    PARTS,
    UNDER_WAY,
    Part,
    calls,
    limit_of,
    listing,
    run_in_time,
    run_part,
    within,
)
from benchmarks.rows.gpu_targets import TARGETS
from benchmarks.worker import call_worker
from tests.gpu import test_fp8_cuda, test_ops_cuda
from tilewright.ops.base.dispatch import Op
from tilewright.ops.int8_linear import INT8_LINEAR
from tilewright.ops.kernels import OPS

WRITE = "import os, pathlib; pathlib.Path(os.environ['OUT'], 'some.json').write_text('{\"done\": 1}')"


def test_what_a_part_wrote_and_printed(tmp_path):
    code = ("-c", f"{WRITE}; print('hello'); raise SystemExit(3)")
    record = run_part(Part("some", (), 60, None), code, 60, tmp_path / "now")
    assert (record["exit_code"], record["results"], record["output_tail"]) == (3, {"some": {"done": 1}}, "hello\n")


def test_a_part_that_hangs(tmp_path):
    """Its results so far are kept, and nothing of it lives on."""
    child = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(99)'])"
    code = ("-c", f"{WRITE}; {child}; time.sleep(99)")
    record = run_part(Part("some", (), 60, None), code, 3, tmp_path / "now")
    assert record["exit_code"] == "ended after 3 s"
    assert record["results"] == {"some": {"done": 1}}
    assert record["seconds"] < 30


def test_all_of_it_ended_in_the_middle_of_a_part(tmp_path):
    """By whoever lent the card: parts that are done have their files, the one under way what it had written."""
    code = f"""
from benchmarks.gpu import Part, Path, run_in_time
for name, nap in (("first", 0), ("second", 99)):
    program = {WRITE!r} + f"; import time; time.sleep({{nap}})"
    run_in_time(Part(name, ("-c", program), 60, ()), Path({str(tmp_path)!r}), 60, tiny=False)
"""
    with subprocess.Popen([sys.executable, "-c", code]) as process:
        until = time.monotonic() + 60
        while not (tmp_path / "first.json").exists() or not (tmp_path / UNDER_WAY / "some.json").exists():
            assert time.monotonic() < until
            time.sleep(0.05)
        for one in (*psutil.Process(process.pid).children(recursive=True), process):
            one.kill()
    assert json.loads((tmp_path / "first.json").read_text())["results"] == {"some": {"done": 1}}
    assert json.loads((tmp_path / UNDER_WAY / "some.json").read_text()) == {"done": 1}
    assert not (tmp_path / "second.json").exists()


def test_all_fits_into_three_calls_the_most_valuable_first():
    assert CALL_S <= 9.5 * 60
    assert len(calls()) <= 3
    assert [part for call in calls() for part in call] == list(PARTS)
    for call in calls():
        assert sum(part.limit_s for part in call) <= CALL_S
        assert len(call) <= 8, "files that come back from a device"
        assert all(part.needs_s <= part.limit_s for part in call)
    names = [part.name for part in PARTS]
    assert names[:4] == ["warm", "fp8_gemm", "fp8_step", "attention"]
    assert names.index("largest") < names.index("loss") < names.index("limit")


def test_parts_are_told_the_time_that_they_have():
    assert within(LOSS, 300)[-1] == f"{(300 - AROUND_S) / 60:.2f}"
    assert within(("-m", "some", "--seconds", "{seconds}"), 300)[-1] == f"{300 - BEFORE_S}"
    assert within(("-m", "other"), 300) == ("-m", "other")
    timeless = {part.name for part in PARTS if within(part.arguments, 300) == part.arguments}
    assert timeless == {"tests_fp8", "tests_rest", "tiers"}


def test_a_part_without_time_is_not_begun(tmp_path, capsys):
    assert run_in_time(Part("some", ("-c", "raise SystemExit(3)"), 60, ()), tmp_path, 44, tiny=False)
    assert "some: not run: no time left" in capsys.readouterr().out
    assert not run_in_time(Part("some", ("-c", "raise SystemExit(3)"), 60, ()), tmp_path, 46, tiny=False)


def listed(minutes, folder, **more):
    """Part, begin and end of each line, by call."""
    calls_, left_out = [], []
    for line in listing(PARTS, folder, minutes, **more):
        if line.startswith("call "):
            calls_.append([])
        elif line.startswith("  "):
            begin, _, end, _, name, *_ = line.split()
            calls_[-1].append((name, int(begin), int(end)))
        else:
            left_out.append(line)
    return calls_, left_out


@given(minutes=st.floats(0.2, 60))
def test_what_would_run_is_what_runs(minutes, tmp_path_factory):
    """Call by call, if each part takes all of its time: parts begin and are left out as `run_in_time` has it."""
    folder = tmp_path_factory.getbasetemp() / "nothing"
    calls_, too_short = listed(minutes, folder)
    names = [name for call in calls_ for name, _, _ in call] + [line.split(":")[0] for line in too_short]
    assert sorted(names) == sorted(part.name for part in PARTS), "each once"
    assert all("too short" in line for line in too_short)
    parts = {part.name: part for part in PARTS}
    left = list(PARTS)
    for call in calls_:
        now = 0.0
        for part in list(left):
            given_s = limit_of(part, 60 * minutes - now)
            if given_s is not None:
                assert (part.name, round(now), round(now + given_s)) in call
                now += given_s
                left.remove(part)
        assert now <= 60 * minutes + 1e-6
    assert [part.name for part in left] == [line.split(":")[0] for line in too_short]
    assert all(limit_of(parts[line.split(":")[0]], 60 * minutes) is None for line in too_short)


def test_the_list_of_three_calls(tmp_path):
    calls_, _ = listed(CALL_S / 60, tmp_path)
    assert [[name for name, _, _ in call] for call in calls_] == [[part.name for part in call] for call in calls()]
    (tmp_path / "warm.json").write_text("{}")
    calls_, there = listed(CALL_S / 60, tmp_path)
    assert there == ["warm: there already"]
    assert calls_[0][0] == ("fp8_gemm", 0, 80)
    assert listed(CALL_S / 60, tmp_path, again=True)[0][0][0] == ("warm", 0, 40)


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--list", "--call", "2"], None, "call 1, 535 s at most\n     0 to  215 s  largest"),
        (["--help"], 0, "--list"),
        ([], NO_GPU, ""),
        (["--only", "nothing"], 2, "invalid choice: 'nothing'"),
    ],
)
def test_without_a_gpu_it_lists_helps_and_refuses_in_words(arguments, code, said, monkeypatch, capsys, tmp_path):
    """And writes nothing: a folder of results would be one of a card."""
    monkeypatch.setattr(sys, "argv", ["benchmarks.gpu", *arguments])
    monkeypatch.setenv("OUT", str(tmp_path / "out"))
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    if code is None:
        gpu.main()
    else:
        with pytest.raises(SystemExit) as raised:
            gpu.main()
        assert raised.value.code == code
    printed = capsys.readouterr()
    assert said in printed.out + printed.err
    assert not (tmp_path / "out").exists()


def test_every_part_has_a_target():
    """No target without a part; parts without one are there for comparison."""
    parts = {part.name for part in PARTS}
    judged = {target.part for targets in TARGETS.values() for target in targets}
    assert not judged - parts
    assert parts - judged == {"warm", "ops", "tiers", "throughput"}


# ---- what parts share ----


def test_time_is_shared_among_contenders():
    deadline = Deadline(100)
    assert deadline.share(4) == pytest.approx(50, abs=1)
    assert deadline.share(1) == pytest.approx(100, abs=1)
    assert Deadline(None).share(3) is None
    results = {}
    assert Deadline(0).passed("late", results)
    assert not deadline.passed("early", results)
    assert results == {"not_run_for_time": ["late"]}


def test_a_contender_that_hangs_is_ended_and_named():
    started = time.monotonic()
    found = call_worker("card.step_gpu", "--help", timeout_s=0.05)
    assert found["error"].startswith("ended after 0 s")
    assert time.monotonic() - started < 100


def test_a_result_that_is_being_written_does_not_cost_the_last_one(tmp_path, monkeypatch):
    monkeypatch.setenv("OUT", str(tmp_path))
    write_result("some", "claim", {"number": 1})
    monkeypatch.setattr("pathlib.Path.replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        write_result("some", "claim", {"number": 2})
    assert json.loads((tmp_path / "some.json").read_text())["results"] == {"number": 1}
    assert [path.name for path in tmp_path.glob("*.json")] == ["some.json"]


def test_layers_are_chosen_from_memory():
    """What a card holds, before anything runs: weights, gradients, moments, what layers keep."""
    layers = {gib: fitting(StepShape(), gib * 2**30).layers for gib in (24, 48, 79, 139, 1000)}
    assert layers == {24: 2, 48: 4, 79: 8, 139: 12, 1000: 12}
    shape = StepShape()
    weights = shape.layers * 4096 * (2 * 4096 + 2 * 1024 + 3 * 14336)
    assert shape.peak_bytes() > 16 * weights


def test_values_drawn_on_the_device_are_distributed_as_a_run_s():
    from tests.models.shapes import make_decoder
    from tilewright.models.decoder.init import init_decoder

    ours, theirs = make_decoder("gqa"), make_decoder("gqa")
    drawn_on_device(ours)(dict(ours.state_dict()))
    init_decoder(theirs, 0)
    for (name, got), want in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert got.std().item() == pytest.approx(want.std().item(), rel=0.2, abs=1e-9), name
        assert got.mean().item() == pytest.approx(want.mean().item(), abs=0.2 * want.std().item() + 1e-9), name


def test_every_operation_is_tested_on_a_gpu():
    tested = {
        value.name for module in (test_fp8_cuda, test_ops_cuda) for value in vars(module).values()
        if isinstance(value, Op)
    }  # fmt: skip
    assert tested == {op.name for op in (*OPS, INT8_LINEAR)}


def test_floors():
    """The rooflines, by hand."""
    floor = Products(TOKENS, *LAYERS[0]).floor()
    assert floor["flops"] == 6 * 16384 * 4096 * 16384
    weight = 4096 * 16384
    assert floor["bf16_floor_ms"] == pytest.approx(8.351 + 1e3 * 6 * weight / 4.3e12, abs=1e-3)
    assert floor["quantise_bytes"] == 4 * 16384 * (4096 + 16384) * (1 + 2 / 128) + 10 * weight
    assert floor["fp8_floor_ms"] == pytest.approx(1e3 * (floor["flops"] / 1500e12 + floor["quantise_bytes"] / 4.3e12))
    step = StepShape(layers=1, rows=1, seq=1024)
    weights = 4096 * 4096 * 2 + 4096 * 1024 * 2 + 3 * 4096 * 14336
    assert step.roofline()["linear_flops"] == 6 * 1024 * weights
    assert step.roofline()["attention_flops"] == 3.5 * 2 * 1024**2 * 4096
    copies = 6 * 4096 + 2 * 1024 + 3 * 14336  # elements per token: x of qkv, o, gate and up, down; dy of all seven
    assert step.roofline()["quantise_ms"] == pytest.approx(1e3 * 4 * 1024 * copies / RATES["bytes"])


@pytest.mark.slow
@pytest.mark.parametrize("call", [1, 2, 3])
def test_dry_run(call, tmp_path):
    """Every part runs end to end on a CPU in its small form, with the kernels interpreted, and is not run again."""
    env = {**os.environ, "OUT": str(tmp_path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "benchmarks.gpu", "--call", str(call), "--tiny"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:]
    for part in calls()[call - 1]:
        record = json.loads((tmp_path / f"{part.name}.json").read_text())
        assert record["exit_code"] == 0
        assert record["tiny"]
        assert '"error"' not in json.dumps(record["results"]), part.name
    again = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    assert "exit code" not in again.stdout


@pytest.mark.slow
def test_a_small_part_from_end_to_end(tmp_path):
    """The script's own way, with the part that is quickest on a CPU."""
    env = {**os.environ, "OUT": str(tmp_path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "benchmarks.gpu", "--only", "attention", "--tiny"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stdout[-3000:]
    record = json.loads((tmp_path / "attention.json").read_text())
    assert record["results"]["attention"]["results"]["float32, 4 documents"]["tilewright"]["median"] > 0
    assert [path.name for path in tmp_path.iterdir()] == ["attention.json"]
