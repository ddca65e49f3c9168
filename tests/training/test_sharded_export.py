"""The Hugging Face folder of a model in shards is, byte for byte, that of one process."""

import weakref

import pytest
import torch
from torch.distributed.fsdp import fully_shard

from tests.ranks import on_ranks
from tests.training.sharded import joined
from tilewright.core.config.recipe import Recipe
from tilewright.core.errors import CheckpointError
from tilewright.models.build import init_weights
from tilewright.models.decoder.config import DecoderConfig
from tilewright.models.decoder.decoder import Decoder
from tilewright.models.decoder.hf_weights import save_decoder
from tilewright.optim.adam import DeepSeekAdam
from tilewright.precision.lora.lora import add_lora
from tilewright.training.checkpoint.checkpoint_state import TrainState
from tilewright.training.components.export import export

SHAPES = {
    "tied": {"tie_embeddings": True},
    "experts": {"tie_embeddings": False, "attention": "mla", "num_experts": 3, "expert_dim": 25},
}


def _decoder(name: str) -> Decoder:
    model = Decoder(DecoderConfig.of(vocab_size=50, dim=36, num_layers=2, num_heads=3, ffn_dim=40, **SHAPES[name]))
    init_weights(model, 0)
    return model


def _foreign():
    import transformers

    from tilewright.models.hf.model import HFModel

    sizes = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 41, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": True}
    torch.manual_seed(3)
    return HFModel(transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)), "causal_lm")


OURS = [("tied", "keep", 0), ("tied", "fp8", 0), ("tied", "keep", 2), ("experts", "bf16", 0)]
"""Model, format, rank of adapters."""
FOREIGN = [("foreign", "bf16", 0), ("foreign", "keep", 0), ("foreign", "fp8", 0)]


def _export(rank, folder, shard, cases):
    world = joined(shard)
    for number, (name, format, lora) in enumerate(cases):
        model = _foreign() if name == "foreign" else _decoder(name)
        if lora:
            torch.manual_seed(5)
            add_lora(model, lora, 4.0, [n for n, m in model.named_modules() if n.endswith("q_proj")], "keep")
        if world.fsdp_mesh is not None:
            fully_shard(model, mesh=world.fsdp_mesh)
        state = TrainState(model, DeepSeekAdam([torch.nn.Parameter(torch.zeros(1))]), {}, world=world)
        recipe = Recipe.model_validate({"checkpoint": {"export_format": format}, "lora": {"rank": lora}})
        yield export(recipe, model, state, None, folder / str(number))


def _exported(rank, folder, shard, cases):
    return list(_export(rank, folder, shard, cases))


@pytest.mark.dist
@pytest.mark.parametrize("cases", [OURS, pytest.param(FOREIGN, marks=pytest.mark.slow)], ids=["ours", "foreign"])
@pytest.mark.support("export", "shards")
def test_the_folder_is_that_of_one_process(tmp_path, cases):
    (tmp_path / "one").mkdir()
    (tmp_path / "three").mkdir()
    said = _exported(0, tmp_path / "one", 1, cases)
    for of_rank in on_ranks(3, _exported, tmp_path / "three", 3, cases):
        assert [text.replace("three", "one") for text in of_rank] == said
    for number, case in enumerate(cases):
        ours, theirs = tmp_path / "three" / str(number), tmp_path / "one" / str(number)
        names = {path.name for path in theirs.iterdir()}
        assert {path.name for path in ours.iterdir()} == names, case
        assert any(name.endswith(".safetensors") for name in names)
        for name in names:
            assert (ours / name).read_bytes() == (theirs / name).read_bytes(), f"{case}: {name}"


def _refused(rank, folder):
    (folder / "0").write_text("a file where the folder should be")
    try:
        _exported(rank, folder, 2, OURS[:1])
    except CheckpointError as error:
        return str(error)
    return None


@pytest.mark.dist
def test_a_folder_that_cannot_be_written_is_an_error_on_all_ranks(tmp_path):
    first, second = on_ranks(2, _refused, tmp_path)
    assert "cannot be written" in first
    assert first == second


@pytest.mark.parametrize("shard_bytes", [1 << 30, 5000])
def test_one_tensor_at_a_time_is_in_memory(tmp_path, shard_bytes):
    """What waits for its file is on the disk."""
    model = _decoder("experts")
    there: list[weakref.ref] = []
    most = 0

    def live(name, tensor):
        nonlocal most
        values = tensor.detach().numpy().copy()  # which the tensor's memory keeps alive
        there.append(weakref.ref(values))
        most = max(most, sum(ref() is not None for ref in there))
        return torch.from_numpy(values)

    save_decoder(model, tmp_path / "live", shard_bytes=shard_bytes, live=live)
    save_decoder(model, tmp_path / "all", shard_bytes=shard_bytes)
    assert len(there) > 20
    assert most <= 2
    kept = [live(name, tensor)[:1].detach() for name, tensor in model.named_parameters()]
    assert most >= len(kept), "the control: views keep the memory"
    names = sorted(path.name for path in (tmp_path / "all").iterdir())
    assert sorted(path.name for path in (tmp_path / "live").iterdir()) == names
    assert (len(names) > 2) == (shard_bytes == 5000)
    for name in names:
        assert (tmp_path / "live" / name).read_bytes() == (tmp_path / "all" / name).read_bytes(), name
