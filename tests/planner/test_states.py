"""Whether a run fits has three answers, and each is reported in every place: verdict, table, JSON, exit code,
training."""

import json

import pytest

from tests.contracts.observe import fixed_ceilings
from tests.planner.rates import GIB, make_machine, make_plan, make_rates, make_recipe
from tests.training.tiny import rows, settings, tiny, write_text
from tilewright.cli.app import run as command_line
from tilewright.core.errors import UnknownFitError
from tilewright.planner.cost.layer_choices import Links
from tilewright.planner.plan import Budget
from tilewright.planner.planner import Planner
from tilewright.training.session import train

pytest.importorskip("transformers")
LLAMA = {
    "model_type": "llama", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip
JETMOE = {
    "model_type": "jetmoe", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_key_value_heads": 2, "kv_channels": 16, "num_local_experts": 4, "num_experts_per_tok": 2,
    "max_position_embeddings": 128,
}  # fmt: skip
"""Rows for each expert are a list of numbers: no shape is known before the values are."""
MAMBA = {
    "model_type": "mamba", "vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 2, "state_size": 8,
    "conv_kernel": 4, "expand": 2, "time_step_rank": 4,
}  # fmt: skip
"""It takes no document masks: each document of a packed row runs as a padded row."""
CASES = {
    "fits": (LLAMA, 0, 0),
    "does not fit": (LLAMA, 2**20, 3),
    "not known": (JETMOE, 0, 6),
    "documents as rows": (MAMBA, 0, 6),
    "not even what is known fits": (JETMOE, 2**20, 3),
}


def state_of(case):
    others = {"not even what is known fits": "does not fit", "documents as rows": "not known"}
    return others.get(case, case)


@pytest.fixture
def folder(tmp_path):
    def make(config):
        (tmp_path / "model").mkdir(exist_ok=True)
        (tmp_path / "model" / "config.json").write_text(json.dumps(config))
        return str(tmp_path / "model")

    return make


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    write_text(folder / "text")
    return folder


@pytest.fixture(autouse=True)
def _rates(monkeypatch):
    monkeypatch.setattr("tilewright.planner.machine.ceilings.measure", fixed_ceilings)


def foreign(folder, config, **changes):
    return {"model__kind": "hf", "model__path": folder(config), "train__steps": 2} | changes


@pytest.mark.parametrize("case", CASES)
def test_a_plan_says_which_of_three_it_is(case, folder):
    config, budget, _ = CASES[case]
    recipe = make_recipe(model={"kind": "hf", "path": folder(config)}, plan={"device_memory": budget})
    plan = make_plan(recipe, 512, make_machine(), make_rates())
    assert (plan.state, plan.to_json()["fits"]) == (state_of(case), case == "fits")
    words = {"fits": "The run fits: ", "not known": "It is not known whether the run fits: "}
    assert plan.verdict.startswith(words.get(plan.state, "The run does not fit: "))
    told = json.loads(json.dumps(plan.to_json()))
    assert told == plan.to_json()
    assert told["state"] == plan.state
    known = config is LLAMA
    for name in ("peak_bytes", "step_s", "tokens_per_s", "step_phase"):
        assert (told[name] is None) != known, name
    assert ("tokens/s" in plan.verdict) == known
    if not known:
        assert ("document masks" if config is MAMBA else "without data") in plan.shape.unknown
        assert "takes more than" in plan.verdict


@pytest.mark.parametrize(
    ("case", "own"),
    [
        # Of our decoder where all is known: what the command offers for a foreign model takes ten times as long.
        *((case, config is LLAMA) for case, (config, _, _) in CASES.items()),
        pytest.param("fits", False, marks=pytest.mark.slow),
        pytest.param("does not fit", False, marks=pytest.mark.slow),
    ],
)
def test_the_command_ends_with_a_code_of_its_own(case, own, folder, tmp_path, capsys):
    config, budget, code = CASES[case]
    model = {} if own else foreign(folder, config)
    values = settings(tmp_path, tmp_path, **model, plan__device_memory=budget)
    arguments = [word for name, value in values.items() for word in (f"--{name}", value)]
    assert command_line(["plan", "default", "--json", *arguments]) == code
    assert json.loads(capsys.readouterr().out)["state"] == state_of(case)


def test_the_joint_planner_refuses_what_it_cannot_trace(folder):
    recipe = make_recipe(model={"kind": "hf", "path": folder(JETMOE)})
    planner, budget = Planner(recipe, 512, make_machine(), make_rates()), Budget(64 * GIB, 0, Links(None, None))
    for decide in (planner.plan, planner.smallest):
        with pytest.raises(UnknownFitError, match="JetMoe"):
            decide(budget)


@pytest.mark.parametrize("plan", ["auto", pytest.param("", marks=pytest.mark.slow)])
def test_training_goes_on_and_says_that_nothing_is_known(plan, folder, data, tmp_path):
    run = tmp_path / "runs" / "tiny"
    assert train(tiny(data, tmp_path / "runs", **foreign(folder, JETMOE, memory__plan=plan))).step == 2
    (event,) = [row for row in rows(run / "events.jsonl") if row["kind"] == "plan"]
    assert "not known whether the run fits" in event["message"]
    assert event["least_bytes"] > 0
    planned = json.loads((run / "plan.json").read_text())
    assert (planned["state"], planned["fits"], planned["peak_bytes"]) == ("not known", False, None)


def test_a_budget_that_must_hold_is_not_taken_on_trust(folder, data, tmp_path):
    budget = {"plan__device_memory": "8GiB"}
    with pytest.raises(UnknownFitError, match="Memory of this run cannot be predicted") as caught:
        train(tiny(data, tmp_path, **foreign(folder, JETMOE, **budget)))
    assert all(problem.got and problem.need and problem.try_ for problem in caught.value.problems)
    trusting = foreign(folder, JETMOE, plan__enforce="false", **budget)
    assert train(tiny(data, tmp_path, **trusting)).step == 2


def test_a_dry_run_measures_what_is_not_known(folder, data, tmp_path, capsys):
    train(tiny(data, tmp_path, **foreign(folder, JETMOE)), dry_run=True)
    text = capsys.readouterr().out
    for name in ("activations", "other", "peak", "step"):
        (line,) = [row for row in text.splitlines() if row.startswith(f"{name}   ")]
        assert "not known" in line, line
    assert "It is not known whether the run fits" in text


def test_a_page_of_what_is_not_known_names_no_seconds(folder, tmp_path, capsys):
    values = settings(tmp_path, tmp_path, **foreign(folder, JETMOE))
    arguments = [word for name, value in values.items() for word in (f"--{name}", value)]
    page = tmp_path / "plan.html"
    assert command_line(["plan", "default", "--html", str(page), *arguments]) == 6
    assert "seconds are not known" in capsys.readouterr().out
    assert "tokens/s" not in page.read_text()
    assert "not known" in page.read_text()
