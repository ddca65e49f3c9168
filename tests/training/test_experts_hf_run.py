"""A run of a Hugging Face mixture whose experts are on several ranks is the run of one process."""

import pytest
from safetensors.torch import load_file

from tests.parallel.inside.experts.test_stacked import config_of
from tests.training.test_experts_run import ALONE, SPREAD, STOP, Launches, check_same
from tests.training.test_pipeline_run import EXPORT
from tests.training.tiny import last_state

pytestmark = pytest.mark.dist


def launches(data, folder):
    """Of runs of this mixture."""
    config = config_of("qwen3_moe")
    config.vocab_size, config.architectures = 300, ["Qwen3MoeForCausalLM"]
    config.save_pretrained(folder / "model")
    settings = {"model__kind": "hf", "model__path": folder / "model"} | ALONE
    return Launches(data, folder, settings | {"precision__mode": "fp32"})


@pytest.fixture(scope="module")
def ran(data, tmp_path_factory):
    """One process begins, and ranks continue."""
    launch = launches(data, tmp_path_factory.mktemp("stacked"))
    launch(1, {"alone": EXPORT, "two": STOP | {"train__sample_tokens": 0}})
    launch(2, {"two": SPREAD | EXPORT})
    return launch


@pytest.mark.support("hf", "experts_spread")
def test_it_is_the_run_of_one_process(ran):
    ran.check("two", 2, "alone")
    tensors, _ = last_state(ran.folder / "two")
    stacks = {name: tuple(tensor.shape) for name, tensor in tensors.items() if name.endswith("experts.down_proj")}
    assert set(stacks.values()) >= {(4, 32, 24)}, "checkpoints have whole experts"


def test_it_goes_on_with_other_ranks(ran):
    assert [ran.found["two", world, 0][0] for world in (1, 2)] == [2, 4]


@pytest.mark.slow
def test_it_goes_on_without_spread_experts(data, tmp_path):
    """Checkpoints have whole experts, which is held above; `test_experts_run` reads such files so by default."""
    launch = launches(data, tmp_path)
    launch(1, {"alone": {}})
    launch(2, dict.fromkeys(("to_one", "to_shards"), SPREAD | STOP))
    launch(2, {"to_shards": {}})
    launch(1, {"to_one": {}})
    for name in ("to_one", "to_shards"):
        check_same(tmp_path / name, tmp_path / "alone")


def test_its_folder_is_that_of_one_process(ran):
    files = [load_file(ran.folder / name / "hf" / "model.safetensors") for name in ("two", "alone")]
    assert files[0].keys() == files[1].keys()
    for name, tensor in files[1].items():
        assert (files[0][name] - tensor).abs().max() < 1e-4, name
