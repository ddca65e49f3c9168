"""Modules and kernels of a run in few rows: nothing is lost, and what a run calls is among what is shown."""

import json
from collections import Counter

import pytest

from tests.training.tiny import tiny, write_text
from tilewright.cli.app import run
from tilewright.cli.run_tables import candidate_table, chosen_table, kernels_in_use, module_table
from tilewright.core.hardware import detect_machine
from tilewright.ops.kernels import Kernels
from tilewright.training.session import train

MODES = {
    "bf16_mixed": {},
    "fp32": {},
    "fp8_tile": {"optim__moments": "bf16"},
    "fp8_tensorwise": {"optim__moments": "8bit"},
    "mxfp8": {},
    "hybrid": {},
}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    write_text(folder / "text")
    return folder


@pytest.fixture(scope="module", params=MODES)
def called(request, data, tmp_path_factory):
    """A run folder, and the (operation, case) of each kernel that the run called."""
    found = set()
    find = Kernels._find

    def spy(self, op, device, dtype, kind=""):
        found.add((op, f"{device} {str(dtype).removeprefix('torch.')} {kind}".rstrip()))
        return find(self, op, device, dtype, kind)

    changes = {"precision__mode": request.param, "train__steps": 1, **MODES[request.param]}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Kernels, "_find", spy)
        folder = train(tiny(data, tmp_path_factory.mktemp("runs"), **changes)).run_dir
    return folder, found, changes


def read(folder, name):
    return json.loads((folder / name).read_text())


def test_every_kernel_that_a_step_calls_is_in_use(called):
    folder, found, changes = called
    kernels = read(folder, "machine.json")["kernels"]
    used = kernels_in_use(kernels, read(folder, "precision.json"), changes.get("optim__moments", "fp32"))
    shown = {(row["op"], row["case"]) for row in used}
    assert found
    assert found <= shown, found - shown
    assert len(used) < len(kernels) / 2
    assert not [case for _, case in shown if "float64" in case]
    quantises = {op for op, _ in shown} & {"quantize", "tile_gemm", "swiglu_quantize"}
    assert bool(quantises) == ("fp8" in changes["precision__mode"])


def test_a_run_is_inspected_in_few_rows_and_with_v_in_all(called, capsys):
    folder, *_ = called
    modules = read(folder, "precision.json")
    assert run(["inspect", str(folder)]) == 0
    short = capsys.readouterr().out
    assert "model.layers.{0-1}.mlp.up_proj" in short
    assert "model.layers.0." not in short
    assert run(["inspect", str(folder), "-v"]) == 0
    long = capsys.readouterr().out
    assert not [row["fqn"] for row in modules if row["fqn"] not in long]
    assert "float64" not in short + long
    assert "fp64" in long.replace(short, "")
    assert len(short.splitlines()) < len(long.splitlines())


def test_rows_of_one_kind_add_up():
    row = {"op": "linear", "compute": "bf16", "storage": "fp32", "output": "bf16", "reason": "so"}
    rows = [row | {"fqn": f"layers.{i}.{name}", "work": 2.0} for i in range(4) for name in ("up", "down")]
    rows[2] |= {"compute": "fp32", "reason": "but"}
    (_, lines), reasons = module_table(rows)
    assert [(line[0], line[1], line[3], line[6], line[7]) for line in lines] == [
        ("layers.{0,2-3}.up", "3", "bf16", "37.5 %", "[1]"),
        ("layers.{0-3}.down", "4", "bf16", "50.0 %", "[1]"),
        ("layers.1.up", "1", "fp32", "12.5 %", "[2]"),
    ]
    assert reasons == ["[1] so", "[2] but"]


def test_every_case_of_every_operation_is_in_both_tables():
    kernels = Kernels(detect_machine("cpu")).explain()
    cases = Counter((row["op"], str(row["chosen"])) for row in kernels)
    for columns, rows in (chosen_table(kernels), candidate_table(kernels)):
        counted = Counter()
        for line in rows:
            cells = dict(zip(columns, line, strict=True))
            counted[cells["operation"].partition(",")[0], cells["kernel"]] += len(cells["formats"].split())
        assert counted == cases
    assert "device" not in chosen_table(kernels)[0]
    both = chosen_table([*kernels, {"op": "adam", "case": "cuda float32", "chosen": "native", "rejected": []}])
    assert both[0][1] == "device"
