"""`tilewright plan` with budgets: what it prints and writes, and what it refuses."""

import json
import re

import pytest

from tests.contracts.observe import fixed_ceilings
from tilewright.cli.app import run
from tilewright.planner.cost import solve_layers

MODEL = [
    "--model.dim",
    "512",
    "--model.num_layers",
    "8",
    "--model.num_heads",
    "8",
    "--train.global_batch_size",
    "2",
    "--train.micro_batch_size",
    "1",
]
H200 = ["plan", "default", *MODEL, "--on", "h200"]


@pytest.fixture(autouse=True)
def _fixed(monkeypatch):
    monkeypatch.setattr("tilewright.planner.machine.ceilings.measure", fixed_ceilings)


def error_of(capsys, *arguments, code=2):
    assert run([*H200, *arguments]) == code
    return capsys.readouterr().err


def test_the_verdict_comes_first_and_guesses_are_marked(capsys):
    assert run([*H200, "--device-memory", "8GiB"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("The run fits: ")
    assert "of 8.00 GiB on the device" in lines[0]
    assert lines[2].startswith("tilewright decoder")
    assert any(line.startswith("layers ") for line in lines)
    notes = [line for line in lines if line.startswith("note: ")]
    assert any("published, not measured" in note and "data sheet" in note for note in notes)
    assert any("guessed shares of the published peaks" in note for note in notes)


def test_json_holds_what_the_tables_show(capsys, tmp_path):
    out = tmp_path / "plan.toml"
    assert run([*H200, "--device-memory", "8GiB", "--json", "--out", str(out)]) == 0
    shown = capsys.readouterr()
    found = json.loads(shown.out)
    assert "plan.toml" in shown.err
    assert found["num_layers"] == 8
    assert sorted(i for row in found["rows"] for i in row["layers"]) == list(range(8))
    assert found["peak_bytes"] == max(sum(row.values()) for row in found["phases"].values())
    assert found["step_s"] == pytest.approx(sum(found["seconds"].values()))
    assert found["settings"]["memory.executor"] in ("standard", "layer_major")


def test_plan_file_and_page_are_written_and_compared(capsys, tmp_path):
    out, page = tmp_path / "plan.toml", tmp_path / "page.html"
    assert run([*H200, "--device-memory", "2GiB", "--out", str(out), "--html", str(page)]) == 0
    html = page.read_text()
    assert html.count("<svg") == 2
    assert "Device memory through one step" in html
    assert "http://" not in html.replace("http://www.w3.org", "")
    capsys.readouterr()
    assert run([*H200, "--device-memory", "8GiB", "--compare", str(out)]) == 0
    assert "plan.toml" in capsys.readouterr().out
    assert run([*H200, "--device-memory", "8GiB", "--compare", "fp32"]) == 0
    assert "fp32" in capsys.readouterr().out
    assert "Plan was made for another model" in error_of(capsys, "--model.num_layers", "9", "--compare", str(out))


def test_why_and_largest(capsys):
    assert run([*H200, "--why", "layer.7"]) == 0
    assert capsys.readouterr().out.startswith("layer 7 is one of")
    assert "layer.0 to layer.7" in error_of(capsys, "--why", "layer.8")
    assert (
        run(
            [
                *H200,
                "--device-memory",
                "1.5GiB",
                "--host-memory",
                "4.3GiB",
                "--train.global_batch_size",
                "1",
                "--largest",
            ]
        )
        == 0
    )
    assert capsys.readouterr().out.startswith("The deepest model of this shape has ")


@pytest.mark.parametrize("text", ["24 Gib", "24Gb", "0", "-3GiB", "0GiB", "many", "24 GiBs", "", "1e400GiB"])
def test_sizes_that_make_no_sense(capsys, text):
    if not text:
        assert run([*H200, "--device-memory", "8 gib", "--json"]) == 0  # a size all the same
        return
    message = error_of(capsys, f"--device-memory={text}")
    assert "Invalid memory size" in message
    for word in ("where", "got", "need", "try"):
        assert f"  {word} " in message


def test_more_than_the_machine_has(capsys):
    message = error_of(capsys, "--device-memory", "142GiB")
    assert "Memory size exceeds that of the machine" in message
    assert "--on" in message
    assert run(["plan", "default", "--run.device", "cpu", "--device-memory", "900TiB"]) == 2
    assert "Memory size exceeds that of the machine" in capsys.readouterr().err


def test_below_the_smallest_plan(capsys):
    message = error_of(capsys, "--device-memory", "720MiB", code=3)
    assert "Run does not fit" in message
    assert "on the device and" in message
    assert "for the smallest plan: layer_major" in message
    assert "a step" in message
    for word in ("got", "need", "try"):
        assert f"  {word} " in message


def test_an_unknown_machine(capsys):
    assert run(["plan", "default", "--on", "tpu"]) == 2
    assert "one of h100, h200, a100, 4090, b200" in capsys.readouterr().err


def test_adapters_are_planned(capsys):
    assert run([*H200, "--lora.rank", "8", "--optim.kind", "adamw", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    update = found["phases"]["update"]
    assert 0 < update["gradients"] < 0.1 * update["parameters"] < update["parameters"]
    assert update["optimizer"] == pytest.approx(2 * update["gradients"], abs=2)


def test_files_that_cannot_be_written(capsys, tmp_path):
    message = error_of(capsys, "--out", str(tmp_path / "none" / "plan.toml"))
    assert "File of --out cannot be written" in message


def test_on_a_cpu(capsys):
    cpu = ["plan", "default", "--run.device", "cpu"]
    assert run([*cpu, "--device-memory", "2GiB"]) == 0
    assert capsys.readouterr().out.startswith("The run fits")
    assert run([*cpu, "--host-memory", "2GiB"]) == 2
    assert "Two memory sizes for one CPU memory" in capsys.readouterr().err
    assert run(cpu) == 0  # without options, the plan of the recipe as it is
    assert capsys.readouterr().out.startswith("The run fits")


def test_without_a_budget_nothing_is_decided(capsys, tmp_path):
    """Two recipes are compared as they stand, each with its own model, and pages and files are written too."""
    cpu = ["plan", "default", "--run.device", "cpu"]
    page, out = tmp_path / "plan.html", tmp_path / "plan.toml"
    assert run([*cpu, "--compare", "tiny_moe", "--html", str(page), "--out", str(out)]) == 0
    lines = capsys.readouterr().out.splitlines()
    (sizes,) = [line.split()[1:] for line in lines if line.startswith("parameters  ")]
    assert sizes[0] != sizes[1]
    rows = [line.split()[1:] for line in lines if line.startswith("train.micro_batch_size")]
    assert rows == [["8", "8"]]
    html = page.read_text()
    assert html.count("<svg") >= 1
    assert re.search(r"on the device \(at (\w+), .*Not drawn: \1, with ", html, re.DOTALL), "a peak that no moment has"
    assert '"memory.executor" = "standard"' in out.read_text()
    assert run([*cpu, "--why", "layer.0"]) == 0
    assert capsys.readouterr().out.startswith("layer 0 is one of")


def test_what_does_not_fit_as_it_stands_says_what_would(capsys):
    tight = ["plan", "default", "--run.device", "cpu", "--plan.device_memory", "900MiB"]
    assert run(tight) == 0  # as train changes it
    assert capsys.readouterr().out.startswith("The run fits")
    code = run([*tight, "--memory.plan", ""])
    shown = capsys.readouterr()
    assert code == 3
    assert shown.out.startswith("The run does not fit: it takes ")
    assert "checkpoint" in shown.out
    for word in ("got", "need", "try"):
        assert f"  {word} " in shown.err
    assert "--train.micro_batch_size" in shown.err


def test_a_model_far_too_large_is_refused_within_few_programs(capsys, monkeypatch):
    """The smallest plan is said, and a change that fits; whatever is tried takes a second of the solver."""
    solved, minimise = [], solve_layers.minimise
    monkeypatch.setattr(solve_layers, "minimise", lambda *args, **more: solved.append(args) or minimise(*args, **more))
    assert run(["plan", "slice_42b_h200", "--on", "4090", "--fastest"]) == 3
    error = capsys.readouterr().err
    assert "for the smallest plan: layer_major" in error
    assert "twice the host memory" in error
    assert len(solved) <= 30
