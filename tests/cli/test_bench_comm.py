"""`tilewright bench comm`: its own ranks, or those that torchrun has started, and the file that plans read."""

import pytest

from tests.ranks import on_ranks
from tilewright.cli.app import run
from tilewright.planner.machine.exchange_times import OPERATIONS
from tilewright.planner.machine.measured_links import MeasuredLinks

SIZES = "1KiB,40000"
SHARE = {"all_gather": 0.5, "reduce_scatter": 0.5, "all_reduce": 1.0, "all_to_all": 0.5, "send": 1.0}
"""Bytes that one of two ranks sends, of those of the tensor."""
OF_FP32 = {"fp32": 1.0, "bf16": 0.5, "fp8": 0.252}


def check(found):
    """All operations and sizes are there, with the bytes that travel."""
    kinds = [(point.operation, point.format) for point in found.points]
    assert kinds == [kind for kind in OPERATIONS for _ in SIZES.split(",")]
    for point in found.points:
        assert point.tensor_bytes in (1024, 40000)
        want = SHARE[point.operation] * OF_FP32[point.format] * point.tensor_bytes
        # an FP8 share is filled up to a tile of 128 values, and has a byte of scale for each, on each of two ways
        assert want <= point.sent_bytes + 1 <= want + 2 * 130 + 1, point
    assert all(fit.bytes_per_s > 0 for fit in found.fits().values())


@pytest.mark.dist
@pytest.mark.slow  # processes that import everything; `test_a_speed_is_measured_once` starts the same ones
def test_ranks_of_its_own(tmp_path, capsys):
    out = tmp_path / "links.json"
    assert run(["bench", "comm", "--sizes", SIZES, "--out", str(out), "--run.device", "cpu"]) == 0
    text = capsys.readouterr().out
    assert "2 ranks on 1 machine, gloo" in text
    assert f"wrote {out}" in text
    check(MeasuredLinks.read(out))


def _command(rank, out, extra):
    return run(["bench", "comm", "--sizes", SIZES, "--out", out, "--run.device", "cpu", *extra])


def _all(rank, out):
    return [
        _command(rank, out, []),
        _command(rank, out, ["--ranks", "3"]),
        run(["bench", "matmul"]),
        run(["bench", "step"]),
    ]


@pytest.mark.dist
def test_ranks_of_torchrun(tmp_path):
    """And what is for one process says so."""
    out = tmp_path / "links.json"
    assert on_ranks(2, _all, str(out)) == [[0, 2, 5, 5]] * 2
    check(MeasuredLinks.read(out))


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["comm", "--sizes", "4KiB,much"], "--sizes has no size of a tensor"),
        (["comm", "--sizes", ""], "--sizes has no size of a tensor"),
        (["comm", "--sizes", "0"], "--sizes has no size of a tensor"),
        (["comm", "--sizes", "9GiB"], "--sizes has no size of a tensor"),
        (["comm", "--ranks", "1"], "--ranks"),
        (["comm", "--steps", "3"], "--steps is an option of `bench step`"),
        (["matmul", "--ranks", "2"], "--ranks is an option of `bench comm`"),
        (["step", "--out", "x.json"], "--out is an option of `bench comm`"),
    ],
)
def test_bad_options(words, told, capsys):
    assert run(["bench", *words]) == 2
    assert told in " ".join(capsys.readouterr().err.split())
