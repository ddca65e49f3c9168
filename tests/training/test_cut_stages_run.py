"""A run in stages whose matrices are cut is the run of one process: losses, norms, clipping, evaluations, samples,
checkpoints; it goes on elsewhere."""

import pytest
from safetensors.torch import load_file

from tests.training.test_experts_run import MIXED, STOP, Launches, check_same
from tests.training.test_pipeline_run import EXPORT, TIED
from tests.training.test_tensor_run import DENSE
from tests.training.tiny import rows

pytestmark = pytest.mark.dist
SETTINGS = DENSE | TIED | {"model__num_layers": 4, "optim__clip_norm": 0.1}
CUT = {"parallel__pp": 2, "parallel__tp": 2}
ZBV = CUT | {"parallel__schedule": "zbv"}
DOCUMENTS = {"data__rows": "documents", "data__seq_len": 48}
ADAPTERS = EXPORT | {"lora__rank": 2, "lora__base": "keep", "optim__lr": 1e-2, "train__steps": 2}
LATENT = MIXED | {"model__num_layers": 4, "model__num_heads": 4, "model__num_kv_heads": 4}


@pytest.fixture(scope="module")
def ran(data, tmp_path_factory):
    """One process begins, and ranks continue; another run trains adapters."""
    launch = Launches(data, tmp_path_factory.mktemp("cut_stages"), SETTINGS)
    begun = {"cut": STOP | {"train__sample_tokens": 0}}
    launch(1, {"alone": EXPORT, "adapters_alone": ADAPTERS} | begun)
    launch(4, {"cut": ZBV | EXPORT, "adapters": CUT | ADAPTERS})
    return launch


def test_it_is_the_run_of_one_process(ran):
    ran.check("cut", 4, "alone")


def test_it_goes_on_with_other_ranks(ran):
    assert [ran.found["cut", world, 0][0] for world in (1, 4)] == [2, 4]


def test_adapters_are_those_of_one_process(ran):
    """B is zero at first, and Adam's first step of an element is the rate: a last bit of a sum may be a step of B."""
    ran.check("adapters", 4, "adapters_alone", bound=1e-3)
    ours, theirs = (
        load_file(ran.folder / one / "hf/adapter_model.safetensors") for one in ("adapters", "adapters_alone")
    )
    assert ours.keys() == theirs.keys()
    for key, tensor in theirs.items():
        assert (ours[key] - tensor).norm() < 2e-2 * tensor.norm(), key


@pytest.mark.slow
def test_other_ways_on(ran, data):
    """To one process, to shards of stages, without a pass for weight gradients; experts and latent attention."""
    launch = ran
    launch(1, {"mixed_alone": LATENT, "plain": STOP})
    launch(4, {"to_one": ZBV | STOP, "to_stages": CUT | STOP, "plain": CUT, "mixed": ZBV | LATENT})
    launch(1, {"to_one": {}})
    launch(4, {"to_stages": {"parallel__pp": 2, "parallel__schedule": "interleaved_zero_bubble"}})
    launch.check("mixed", 4, "mixed_alone")
    for name in ("to_one", "to_stages", "plain"):
        assert not isinstance(launch.found[name, 4, 0], str), launch.found[name, 4, 0]
        check_same(launch.folder / name, launch.folder / "alone")


def test_gradients_were_clipped(ran):
    assert any(row.get("grad_norm", 0) > 0.1 for row in rows(ran.folder / "alone" / "metrics.jsonl"))


def test_its_folder_is_that_of_one_process(ran):
    ours, theirs = (load_file(ran.folder / one / "hf" / "model.safetensors") for one in ("cut", "alone"))
    assert ours.keys() == theirs.keys()
    for key, tensor in theirs.items():
        assert (ours[key] - tensor).abs().max() < 1e-4, key


WIDE = {"model__dim": 128, "model__num_heads": 4, "model__head_dim": 64, "model__ffn_dim": 256}
KINDS = {
    "bits": (WIDE | {"optim__moments": "8bit"}, 1e-3),
    "muon": ({"optim__kind": "muon", "train__steps": 3}, 1e-3),
    "fp8": (WIDE | {"precision__mode": "fp8_tile"}, 1e-2),
    "bf16": ({"precision__mode": "bf16_mixed"}, 1e-2),
    "documents": (DOCUMENTS | {"parallel__balance": "on"}, 2e-6),
}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_kinds_of_runs(data, tmp_path):
    """Where the order of a sum decides what a number is rounded to, two steps on are others too."""
    launch = Launches(data, tmp_path, SETTINGS)
    launch(1, {f"{kind}_alone": of_kind for kind, (of_kind, _) in KINDS.items()}, seconds=250)
    bad = {"nan": ZBV | {"optim__lr": "1e30"}}
    launch(4, {kind: of_kind | ZBV for kind, (of_kind, _) in KINDS.items()} | bad, seconds=350)
    for rank in range(4):
        assert "Non-finite gradient in 3 steps in a row" in launch.found["nan", 4, rank]
    for kind, (_, bound) in KINDS.items():
        for rank in range(4):
            assert not isinstance(launch.found[kind, 4, rank], str), launch.found[kind, 4, rank]
        assert launch.found[kind, 4, 0] == launch.found[kind, 4, 3]
        check_same(tmp_path / kind, tmp_path / f"{kind}_alone", bound=bound)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_shards_of_parts_of_stages(data, tmp_path):
    launch = Launches(data, tmp_path, SETTINGS)
    launch(1, {"alone": {}, "back": STOP})
    launch(8, {"shards": CUT | {"parallel__dp_shard": 2}, "back": ZBV | {"parallel__dp_shard": 2}}, seconds=400)
    launch.check("shards", 8, "alone")
    check_same(tmp_path / "back", tmp_path / "alone")
