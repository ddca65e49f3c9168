"""A run whose experts are on several ranks is the run of one process: losses, evaluations, samples, checkpoints."""

import json

import pytest
from safetensors.torch import load_file

from tests.ranks import on_ranks
from tests.training.test_pipeline_run import EXPORT, runs
from tests.training.tiny import WORDS, last_state, rows

pytestmark = pytest.mark.dist
MIXED = {
    "model__num_layers": 2, "model__num_dense_layers": 1, "model__num_experts": 4, "model__num_experts_per_token": 2,
    "model__num_shared_experts": 1, "model__expert_dim": 16, "model__attention": "mla", "model__kv_lora_rank": 16,
    "model__qk_nope_head_dim": 8, "model__qk_rope_head_dim": 8, "model__v_head_dim": 8,
}  # fmt: skip
ALONE = {"optim__schedule": "constant", "train__steps": 4, "train__eval_interval": 2, "checkpoint__interval": 2}
SPREAD, FULL = {"parallel__ep": 2}, {"train__activation_checkpoint": "full"}
COPIES = {"parallel__dp_replicate": 2}
REDUNDANT = SPREAD | {"parallel__redundant_experts": 1, "parallel__place_experts": "on"}
STOP = {"train__steps": 2}
ADAPTED = {"lora__rank": 2, "lora__base": "keep", "optim__lr": 1e-2}


class Launches:
    """Runs in one folder, and what each returned on each rank."""

    def __init__(self, data, folder, settings=MIXED | ALONE):
        self.data, self.folder, self.found, self.settings = data, folder, {}, settings

    def __call__(self, world, changes, seconds=120):
        changes = {name: self.settings | of_run for name, of_run in changes.items()}
        for rank, of_rank in enumerate(
            on_ranks(world, runs, str(self.data), str(self.folder), changes, seconds=seconds)
        ):
            self.found.update({(name, world, rank): value for name, value in of_rank.items()})

    def check(self, name, world, other, **bounds):
        """It is the run of one process, on all ranks."""
        first = self.found[name, world, 0]
        for rank in range(world):
            assert not isinstance(first, str), first
            assert self.found[name, world, rank] == first, "all ranks have the same numbers"
        check_same(self.folder / name, self.folder / other, **bounds)
        assert first[2] == pytest.approx(self.found[other, 1, 0][2], rel=1e-5)
        run, alone = (rows(self.folder / one / "samples.jsonl") for one in (name, other))
        assert [(row["prompt"], row["text"]) for row in run] == [(row["prompt"], row["text"]) for row in alone]

    def check_told(self, name, world, other, told, **close):
        """Losses, norms and weights are those of the other run, on all ranks, and so is what the loss tells beside
        itself, as close as that."""
        for rank in range(world):
            found = self.found[name, world, rank]
            assert not isinstance(found, str), found
            assert found == self.found[name, world, 0], "all ranks have the same numbers"
        check_same(self.folder / name, self.folder / other)
        run, alone = ([row for row in rows(self.folder / one / "metrics.jsonl") if "loss" in row]
                      for one in (name, other))  # fmt: skip
        for ours, theirs in zip(run, alone, strict=True):
            for key in told:
                assert ours[key] == pytest.approx(theirs[key], **close), f"{name}, step {ours['step']}: {key}"
        assert any(row[key] for row in alone for key in told)


@pytest.fixture(scope="module")
def ran(data, tmp_path_factory):
    """One process begins and ranks continue, or the other way."""
    launch = Launches(data, tmp_path_factory.mktemp("spread"))
    begun = {"two": STOP | {"train__sample_tokens": 0}}
    launch(1, {"alone": EXPORT, "adapted_alone": ADAPTED | EXPORT} | begun)
    dispatched = SPREAD | {"parallel__dispatch": "fp8"} | STOP
    launch(2, {"two": SPREAD | EXPORT, "to_one": SPREAD | STOP, "dispatched": dispatched,
               "adapted": SPREAD | ADAPTED | EXPORT, "redundant": REDUNDANT | EXPORT})  # fmt: skip
    assert launch.found["to_one", 2, 0][0] == 2
    launch(1, {"to_one": {}})
    return launch


@pytest.fixture(scope="module")
def more(data, tmp_path_factory):
    """Other ways on. By default one process goes on with spread experts of transformers' (`test_experts_hf_run`)."""
    launch = Launches(data, tmp_path_factory.mktemp("more"))
    launch(1, {"alone": {}, "from_one": STOP})
    launch(2, {"from_two": SPREAD | STOP, "to_shards": SPREAD | STOP, "from_shards": STOP, "from_one": SPREAD,
               "fewer": REDUNDANT | STOP, "more": SPREAD | STOP})  # fmt: skip
    launch(2, {"to_shards": {}, "from_shards": SPREAD, "fewer": SPREAD,
               "more": REDUNDANT | {"parallel__redundant_experts": 2}})  # fmt: skip
    launch(4, {"from_two": SPREAD | FULL})
    return launch


def check_same(run, alone, bound=2e-6):
    """Losses, norms and weights of two runs. In 8 bits a moment whose sum differs in the last bit is another code."""
    before, now = rows(alone / "metrics.jsonl"), rows(run / "metrics.jsonl")
    assert [row["step"] for row in now] == [row["step"] for row in before]
    for name in ("loss", "grad_norm"):
        worst = max(abs(a[name] / b[name] - 1) for a, b in zip(now, before, strict=True) if name in b)
        print(f"{run.name}: {name} {worst:.2g}")
        assert worst < bound, f"{run.name}: {name} is off by {worst:.2g}"
    (tensors, meta), (expected, expected_meta) = last_state(run), last_state(alone)
    assert meta["parts"]["stream"] == expected_meta["parts"]["stream"]
    assert meta["model"] == expected_meta["model"], "names and shapes of all ranks"
    named = {name for name in expected if not name.startswith("rng.")}
    assert named == {name for name in tensors if not name.startswith("rng.")}
    for name in (name for name in expected if name.startswith("model.")):
        worst = (tensors[name].float() - expected[name].float()).abs().max().item()
        assert worst < 50 * bound, f"{name} is off by {worst:.2g}"  # Adam divides small gradients by small ones


@pytest.mark.support("run", "experts_spread")
@pytest.mark.support("evaluation", "experts_spread")
@pytest.mark.parametrize("name", ["two", "redundant"])
def test_it_is_the_run_of_one_process(ran, name):
    ran.check(name, 2, "alone")


@pytest.mark.support("resume", "experts_spread")
@pytest.mark.support("reshard", "experts_spread")
@pytest.mark.parametrize("name", ["to_one"])
def test_it_goes_on_with_other_ranks(ran, name):
    ends = {key: value for key, value in ran.found.items() if key[0] == name}
    assert 4 in {value if isinstance(value, str) else value[0] for value in ends.values()}
    check_same(ran.folder / name, ran.folder / "alone")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["from_two", "to_shards", "from_one", "from_shards", "fewer", "more"])
def test_it_goes_on_with_more_ranks_and_without_spread_experts(more, name):
    test_it_goes_on_with_other_ranks(more, name)


@pytest.mark.support("export", "experts_spread")
@pytest.mark.parametrize("name", ["two", "redundant"])
def test_its_folder_is_that_of_one_process(ran, name):
    ours, theirs = (load_file(ran.folder / one / "hf" / "model.safetensors") for one in (name, "alone"))
    assert ours.keys() == theirs.keys()
    for key, tensor in theirs.items():
        assert (ours[key] - tensor).abs().max() < 1e-4, key


@pytest.mark.support("lora", "experts_spread")
def test_adapters_are_those_of_one_process(ran):
    """On all layers, experts among them, and exported whole. B is zero at first, and Adam's first step of an element is
    the rate, however small its gradient is: some last bits are a step of B."""
    check_same(ran.folder / "adapted", ran.folder / "adapted_alone", bound=1e-3)
    ours, theirs = (
        load_file(ran.folder / name / "hf" / "adapter_model.safetensors") for name in ("adapted", "adapted_alone")
    )
    assert ours.keys() == theirs.keys()
    assert any(".experts.3." in name for name in ours)
    for name, tensor in theirs.items():
        assert (ours[name] - tensor).norm() < 2e-2 * tensor.norm(), name


def test_rows_travel_in_fp8(ran):
    found, plain = (
        [row for row in rows(ran.folder / name / "metrics.jsonl") if "loss" in row] for name in ("dispatched", "to_one")
    )
    worst = max(abs(a["loss"] / b["loss"] - 1) for a, b in zip(found, plain[:2], strict=True))
    print(f"{worst:.2g}")
    assert 0 < worst < 1e-2, f"inputs of experts are rounded by 2^-4 of them at most; the loss is off by {worst:.2g}"
    there, back = (f"sent_bytes.ep.all_to_all.{wire}" for wire in ("fp8", "fp32"))
    for ours, theirs in zip(found, plain[:2], strict=True):
        assert there not in theirs
        # A byte per value and a scale for each row of 32. What is sent there has other rows than what is sent back, and
        # a value that is rounded may go elsewhere.
        assert ours[there] % 33 == 0
        num_rows = ours[there] / 33 + ours[back] / (4 * 32)
        assert num_rows == pytest.approx(theirs[back] / (4 * 32), rel=0.1)


def test_parameters_are_told_of_all_ranks(ran):
    starts = [
        next(row for row in rows(ran.folder / name / "events.jsonl") if row["kind"] == "start")
        for name in ("two", "alone")
    ]
    assert starts[0]["parameters"] == starts[1]["parameters"]


KINDS = {
    "bits": {"optim__moments": "8bit"}, "muon": {"optim__kind": "muon"}, "bf16": {"precision__mode": "bf16_mixed"},
    "fp16": {"precision__mode": "pure_fp16"}, "fp8": {"precision__mode": "fp8_tile"},
    "compiled": {"train__compile": "on"}, "tiled": {"memory__mlp_chunks": 2},
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.support("adam", "experts_spread")
@pytest.mark.support("muon", "experts_spread")
@pytest.mark.support("bf16", "experts_spread")
@pytest.mark.support("fp16", "experts_spread")
@pytest.mark.support("compiled", "experts_spread")
@pytest.mark.parametrize("kind", KINDS)
def test_it_is_the_run_of_shards(data, tmp_path, kind):
    """Where the order of a sum decides what a number is rounded to, two steps on are others too."""
    launch = Launches(data, tmp_path)
    launch(2, {"spread": SPREAD | KINDS[kind], "shards": KINDS[kind]}, seconds=280)
    assert not isinstance(launch.found["spread", 2, 0], str), launch.found["spread", 2, 0]
    check_same(tmp_path / "spread", tmp_path / "shards", bound=1e-3)
    told = [
        [row.get("moe_max_violation", 0) for row in rows(tmp_path / run / "metrics.jsonl")]
        for run in ("spread", "shards")
    ]
    assert any(told[0])
    if kind in ("tiled", "muon"):
        assert told[0] == pytest.approx(told[1], rel=1e-6), "of each micro-batch, which are others on one process"


def write_pairs(path):
    """Two answers to each prompt."""
    words = [WORDS[number % len(WORDS)] for number in range(200)]
    told = [{"prompt": f"{a} {b}?", "chosen": f"yes {b}", "rejected": f"no {a}"} for a, b in zip(words, words[3:])]  # noqa: B905
    path.write_text("".join(json.dumps(row) + "\n" for row in told))


TEACHER = {"distill__teacher": "teacher"}
PAIRS = {
    "data__format": "preferences", "data__source": "pairs.jsonl", "data__chat_template": "chatml", "data__seq_len": 128,
    "data__holdout": 0, "train__eval_interval": 0, "train__sample_tokens": 0,
}  # fmt: skip
STARTS = {"precision__mode": "bf16_mixed", "precision__start_mode": "fp32", "precision__start_fraction": 0.5}
UNTIL = {"precision__mode": "fp8_tile", "precision__fp8_until": 0.5}
USES = {
    "documents": ({"data__rows": "documents", "data__seq_len": 48}, 2e-6), "teacher": (TEACHER, 2e-6),
    "pairs": (PAIRS, 2e-6), "starts": (STARTS, 1e-3), "until": (UNTIL, 1e-3),
}  # fmt: skip
"""What a recipe has beside its experts, and how far two runs may be apart: in 16 and 8 bits sums in another order are
rounded to other numbers."""


@pytest.mark.slow
@pytest.mark.support("teacher", "experts_spread")
@pytest.mark.support("pairs", "experts_spread")
@pytest.mark.parametrize("use", USES)
def test_whatever_it_learns_from_it_is_the_run_of_one_process(data, tmp_path, use):
    """Whole documents, a teacher, preferences, formats that change on the way."""
    changes, bound = USES[use]
    write_pairs(tmp_path / "pairs.jsonl")
    places = {"distill__teacher": tmp_path / "teacher", "data__source": tmp_path / "pairs.jsonl"}
    given = {name: str(places.get(name, value)) for name, value in changes.items()}
    launch = Launches(data, tmp_path)
    launch(1, ({"teacher": {"train__steps": 2}} if use == "teacher" else {}) | {"alone": given})
    launch(2, {"spread": SPREAD | given})
    for key in (("alone", 1, 0), ("spread", 2, 0), ("spread", 2, 1)):
        assert not isinstance(launch.found[key], str), f"{key}: {launch.found[key]}"
    check_same(tmp_path / "spread", tmp_path / "alone", bound=bound)


@pytest.mark.slow
@pytest.mark.support("clip", "experts_spread")
def test_other_meshes(data, tmp_path):
    launch = Launches(data, tmp_path)
    bad = {"optim__lr": "1e30"}
    launch(1, {"alone": {}, "back": STOP})
    launch(2, {"back": {}, "nan": SPREAD | bad})
    uneven = {"parallel__ep": 3, "model__num_experts": 6}
    launch(4, {"copies": SPREAD | COPIES, "all": {"parallel__ep": 4}, "uneven": uneven, "nan4": SPREAD | bad})
    for name in ("copies", "all"):
        launch.check(name, 4, "alone")
    for rank in range(4):
        refused = launch.found["uneven", 4, rank]
        assert "Experts that do not come out even over the mesh" in refused
        assert "--parallel.ep 1" in refused
        assert "Non-finite gradient in 3 steps in a row" in launch.found["nan4", 4, rank]
    assert all("Non-finite gradient in 3 steps in a row" in launch.found["nan", 2, rank] for rank in range(2))
