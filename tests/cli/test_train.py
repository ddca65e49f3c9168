"""The commands around a run, on one tiny run: train, continue, report, eval, generate, inspect, plan, bench."""

import json
import re
import shutil
from contextlib import nullcontext

import pytest

from tests.contracts.observe import fixed_ceilings, write_texts
from tests.contracts.test_settings import BASE
from tests.training.test_energy_run import Steady
from tilewright.cli.app import run
from tilewright.cli.commands.machine import bench_step
from tilewright.energy.processors import FoundCounters
from tilewright.training.hooks import energy_hook
from tilewright.training.runlog.run_folder import RunFolder

SETTINGS = BASE | {"data.source": "texts", "data.cache_dir": "cache", "log.report": "true", "train.eval_batches": "2"}


def arguments(**changes: str) -> list[str]:
    """The tiny run's settings as typed."""
    settings = SETTINGS | {name.replace("__", "."): value for name, value in changes.items()}
    return [part for name, value in settings.items() for part in (f"--{name}", value)]


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    """A folder with data, and with a run of three steps in runs/probe."""
    folder = tmp_path_factory.mktemp("commands")
    write_texts(folder / "texts")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr("tilewright.planner.machine.ceilings.measure", fixed_ceilings)
        assert run(["train", *arguments()]) == 0
    return folder


@pytest.fixture(autouse=True)
def _there(here, monkeypatch):
    monkeypatch.chdir(here)
    monkeypatch.setattr("tilewright.planner.machine.ceilings.measure", fixed_ceilings)


def test_report(here, capsys):
    assert (here / "runs" / "probe" / "report.html").stat().st_size > 1000
    assert run(["report", "probe"]) == 0
    assert capsys.readouterr().out.strip().endswith("report.html")
    assert run(["train", *arguments(run__name="silent", log__report="false")]) == 0
    assert not (here / "runs" / "silent" / "report.html").exists()


def test_a_finished_run_goes_on_with_more_steps(here, capsys):
    assert run(["train", *arguments(run__name="longer")]) == 0
    assert run(["train", *arguments(run__name="longer", train__steps="5")]) == 0
    rows = (here / "runs" / "longer" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(row)["step"] for row in rows if "loss" in json.loads(row)] == [1, 2, 3, 4, 5]


REFUSED = {
    "another model": {"model__dim": "32"},
    "data that cannot be used": {"data__domains": '["none"]'},
    "a run under way": {},
    "no valid checkpoint": {},
}
"""Why a run is not continued, and what is typed to have it so."""


@pytest.mark.parametrize("why", REFUSED)
def test_a_run_that_is_not_continued_says_the_error_alone(why, here, capsys):
    """Not the verdict on what it was before."""
    folder = here / "runs" / "refused"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(here / "runs" / "probe", folder)
    page = (folder / "report.html").read_bytes()
    if why == "no valid checkpoint":
        for file in folder.glob("checkpoints/*/meta.json"):
            file.write_text("{}")
    with RunFolder(folder) if why == "a run under way" else nullcontext():
        assert run(["train", *arguments(run__name="refused", train__steps="5", **REFUSED[why])]) == 2
    said = capsys.readouterr()
    assert said.err.count("tilewright: ") == 1
    assert "verdict" not in said.out + said.err
    assert "report" not in said.out
    assert (folder / "report.html").read_bytes() == page


def test_eval_agrees_with_the_runs_own_last_evaluation(here, capsys):
    assert run(["eval", "probe", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    rows = [json.loads(line) for line in (here / "runs" / "probe" / "metrics.jsonl").read_text().splitlines()]
    recorded = [row["eval"] for row in rows if "eval" in row][-1]
    assert found["domains"].keys() == recorded.keys()
    for domain, result in recorded.items():
        assert found["domains"][domain]["loss"] == pytest.approx(result["loss"], rel=1e-6)
        assert found["domains"][domain]["tokens"] == result["tokens"]
    assert run(["eval", "probe"]) == 0
    assert "perplexity" in capsys.readouterr().out


def test_generate_is_the_same_for_the_same_seed(capsys):
    texts = []
    for seed in ("1", "1", "2"):
        assert run(["generate", "probe", "--prompt", "a red", "--tokens", "8", "--seed", seed]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2]
    assert texts[0].startswith("a red")


def test_inspect_run_and_checkpoint(here, capsys):
    assert run(["inspect", "runs/probe"]) == 0
    text = capsys.readouterr().out
    assert "linear" in text
    assert run(["inspect", "runs/probe/checkpoints/step_00000003", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert any(row["tensor"].endswith("embed_tokens.weight") for row in found["tensors"])


def test_dry_run_keeps_nothing(here, capsys):
    assert run(["train", "--dry-run", *arguments(run__name="dry")]) == 0
    assert not (here / "runs" / "dry").exists()
    assert "measured" in capsys.readouterr().out.lower()


def test_plan_says_yes_or_exits_3(capsys):
    assert run(["plan", *arguments()]) == 0
    assert capsys.readouterr().out
    assert run(["plan", "--json", *arguments(plan__device_memory="1MB")]) == 3
    captured = capsys.readouterr()
    assert json.loads(captured.out)
    assert "tilewright: " in captured.err


def test_bench_step(capsys, monkeypatch):
    def measure(*args, progress, **options):
        progress("measuring this machine once")
        return fixed_ceilings(*args, **options)

    monkeypatch.setattr("tilewright.planner.machine.ceilings.measure", measure)  # as on a machine that is new to it
    assert run(["bench", "step", "--steps", "2", "--json", *arguments()]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["tokens_per_s"] > 0
    assert found["step_s"]["min"] <= found["step_s"]["median"] <= found["step_s"]["max"]
    assert found["matmuls"]["share"] == pytest.approx(found["matmuls"]["reached"] / found["matmuls"]["alone"])
    owners = {owner["name"]: owner["seconds"] for owner in found["owners"]}
    assert {"optimizer", "head and loss", "attention", "matmuls forward", "matmuls backward"} <= owners.keys()
    assert owners["rest (Python, waiting)"] < sum(owners.values())
    assert found["planned_s"].keys() >= {"matmuls", "optimizer"}
    assert 0 < found["explained"] < 1
    assert run(["doctor", "--device", "cpu"]) == 0
    share = f"{found['matmuls']['share']:.2f} of its matmuls' rate ("
    assert re.search(rf"^step +{found['recipe']} in fp32: {re.escape(share)}", capsys.readouterr().out, re.M)


def test_bench_step_compares_joules_of_two_modes(capsys, monkeypatch):
    """By a counter of 40 W: joules are 40 times the seconds. Without a counter the reason stands in their place."""
    monkeypatch.setattr(energy_hook, "processor_counters", lambda: FoundCounters((Steady(),)))
    assert run(["bench", "step", "--steps", "2", "--against", "hybrid", "--json", *arguments()]) == 0
    found = json.loads(capsys.readouterr().out)
    other = found["against"]
    assert (found["precision"], other["precision"]) == ("fp32", "hybrid")
    for one in (found, other):
        mean = 40 * (one["step_s"]["min"] + one["step_s"]["max"]) / 2
        assert one["joules_per_step"] > 0.9 * mean  # and what a step waits for its data
        whole = one["joules_per_flop"] * one["matmuls"]["flops"]  # rows' padding is no token
        assert one["joules_per_step"] == pytest.approx(whole, rel=0.5)
    ratio = other["ratios"]["joules_per_token"]
    assert ratio == pytest.approx(found["joules_per_token"] / other["joules_per_token"])
    assert bench_step._joules_beside(other["ratios"]).startswith(f"{ratio:.2f}x (")
    uncounted = {name: None for name in ("joules_per_step", "joules_per_token", "joules_per_flop")}
    second = other | uncounted | {"not_counted": ["no zone of RAPL"]}
    assert bench_step._joules_beside(bench_step._beside(found, second)) == "unavailable: no zone of RAPL"
    assert bench_step._energy_in_words(second) == "unavailable: no zone of RAPL"


def test_bench_step_says_where_owners_are_not_known(capsys):
    assert run(["bench", "step", "--steps", "1", *arguments(memory__executor="layer_major")]) == 0
    assert "owners    not known of an executor that updates weights on the way" in capsys.readouterr().out


def test_a_run_without_a_checkpoint(here, capsys):
    folder = here / "runs" / "empty"
    folder.mkdir()
    for name in ("run.toml", "tokenizer.json", "tokenizer_config.json"):
        source = here / "runs" / "probe" / name
        if source.exists():
            (folder / name).write_bytes(source.read_bytes())
    assert run(["eval", "empty"]) == 2
    assert "No valid checkpoint" in capsys.readouterr().err
    assert run(["generate", "nowhere"]) == 2
    assert "in runs: " in capsys.readouterr().err
