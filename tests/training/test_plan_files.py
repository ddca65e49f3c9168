"""`memory.plan = FILE`: what `plan --out` wrote is what `train` executes; files for something else or that are none."""

import pytest

from tests.contracts.observe import fixed_ceilings
from tests.training.test_planned import BIG, budgets, events, load
from tests.training.tiny import assert_same_run, settings
from tilewright.cli.app import run as command_line
from tilewright.planner.plan_file import read_plan


@pytest.fixture(autouse=True)
def _rates(monkeypatch):
    monkeypatch.setattr("tilewright.planner.machine.ceilings.measure", fixed_ceilings)


def typed(data, runs, *left_open, **changes):
    values = settings(data, runs, **(BIG | changes))
    return [f"--{name}={value}" for name, value in values.items() if name not in left_open]


@pytest.fixture(scope="module")
def planned_text(data, tmp_path_factory):
    """A plan that the command line made for a tight budget; it recomputes some layers."""
    folder = tmp_path_factory.mktemp("planned")
    least, whole = budgets(load(data, folder), folder)
    path = folder / "made.toml"
    options = ["--memory.executor=standard", "--device-memory", f"{int((least + whole) / 2)}B", "--out", str(path)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tilewright.planner.machine.ceilings.measure", fixed_ceilings)
        assert command_line(["plan", "default", *options, *DEFAULTS, *typed(data, folder), "--plan.margin=0"]) == 0
    return path.read_text()


@pytest.fixture
def plan_file(planned_text, tmp_path):
    """A file with that plan, which a test may change."""
    path = tmp_path / "made.toml"
    path.write_text(planned_text)
    return path


DEFAULTS = ["--model.tie_embeddings=true", "--optim.lr=1e-3"]


def run_plan(data, runs, path, *more, **changes):
    return command_line(["train", "default", *DEFAULTS, *typed(data, runs, **changes), f"--memory.plan={path}", *more])


def test_train_executes_what_plan_wrote(data, tmp_path, plan_file, capsys):
    plan = read_plan(plan_file)
    assert run_plan(data, tmp_path, plan_file, run__name="file") == 0
    assert events(tmp_path / "file")[0]["message"].startswith(str(plan_file))
    mine = read_plan(tmp_path / "file" / "plan.toml")
    assert mine.layers == plan.layers
    assert mine.settings == plan.settings
    assert plan.settings["train.micro_batch_size"] == 4  # it was typed
    assert {choice.activations for choice in plan.layers} != {"keep"}
    assert command_line(["train", "default", *DEFAULTS, *typed(data, tmp_path, run__name="plain")]) == 0
    assert_same_run(tmp_path / "file", tmp_path / "plain")


@pytest.mark.parametrize(
    ("change", "code", "words"),
    [
        ("--model.num_layers=3", 2, "for another model"),
        ("--data.seq_len=128", 2, "for another model"),
        ("--train.micro_batch_size=1", 2, "conflicts with command-line options"),
        ("--plan.device_memory=1MB", 3, "does not fit this machine"),
    ],
)
def test_a_plan_for_something_else(data, tmp_path, plan_file, capsys, change, code, words):
    name = change.partition("=")[0].removeprefix("--")
    arguments = typed(data, tmp_path, name)
    assert command_line(["train", "default", *DEFAULTS, *arguments, f"--memory.plan={plan_file}", change]) == code
    said = capsys.readouterr().err
    assert words in said
    assert all(part in said for part in ("got", "need", "try"))


def test_a_plan_for_a_gpu(data, tmp_path, plan_file, capsys):
    plan_file.write_text(plan_file.read_text().replace('device = "cpu"', 'device = "cuda"'))
    assert run_plan(data, tmp_path, plan_file) == 2
    assert "for another machine" in capsys.readouterr().err


def test_plan_files_that_are_none(data, tmp_path, plan_file, capsys):
    assert run_plan(data, tmp_path, tmp_path / "nowhere.toml") == 2
    assert "cannot be read" in capsys.readouterr().err
    text = plan_file.read_text()
    plan_file.write_text(text.replace("[settings]", '[settings]\n"optim.lr" = 5.0'))
    assert run_plan(data, tmp_path, plan_file) == 2
    assert "which no plan decides" in capsys.readouterr().err
    plan_file.write_text(text.replace('"memory.executor" = "standard"', '"memory.executor" = "quick"'))
    assert run_plan(data, tmp_path, plan_file) == 2
    assert "Plan settings that no recipe has" in capsys.readouterr().err
