"""A model folder of somebody else: no code of it is run, no pickle read, no file outside it."""

import json
import os

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from tilewright.core.errors import CheckpointError
from tilewright.models.folder.safetensors import INDEX, scan_folder
from tilewright.models.hf.load import hf_shapes, load_hf

CODE = """
open({mark!r}, "w").close()
from transformers import LlamaConfig, LlamaForCausalLM
class PlantedConfig(LlamaConfig):
    model_type = {kind!r}
class PlantedModel(LlamaForCausalLM):
    config_class = PlantedConfig
"""


@pytest.fixture
def folder(tmp_path):
    config = LlamaConfig(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def change(folder, **values) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def plant_code(folder, model_type: str):
    """Code in the folder that its config.json names; the file that it makes when it runs."""
    mark = folder.parent / "mark"
    (folder / "planted.py").write_text(CODE.format(mark=str(mark), kind=model_type))
    names = {"AutoConfig": "planted.PlantedConfig", "AutoModelForCausalLM": "planted.PlantedModel"}
    change(folder, model_type=model_type, auto_map=names, architectures=["PlantedModel"])
    return mark


def test_code_of_an_unknown_architecture_is_not_run(folder, monkeypatch):
    mark = plant_code(folder, "planted")
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked at the terminal"))
    for weights in ("random", "load"):
        with pytest.raises(CheckpointError) as caught:
            load_hf(folder, "causal_lm", weights)
        assert "never run" in str(caught.value)
    assert not mark.exists()


def test_code_in_place_of_a_known_architecture_is_not_run(folder):
    mark = plant_code(folder, "llama")
    for weights in ("random", "load"):
        load_hf(folder, "causal_lm", weights)
    hf_shapes(folder, "causal_lm")
    assert not mark.exists()


def test_the_planted_code_runs_where_it_is_trusted(folder, monkeypatch, tmp_path):
    """The control of both tests above."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    mark = plant_code(folder, "planted")
    AutoConfig.from_pretrained(folder, trust_remote_code=True)
    assert mark.exists()


class Command:
    def __reduce__(self):
        return os.system, (f"touch {os.environ['MARK']}",)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model.bin.index.json", "model.pt", "weights.ckpt"])
def test_pickled_weights_are_not_read(folder, name, monkeypatch, tmp_path):
    monkeypatch.setenv("MARK", str(tmp_path / "mark"))
    (folder / "model.safetensors").unlink()
    torch.save({"w": Command()}, folder / "pytorch_model.bin")
    if name.endswith(".json"):
        (folder / name).write_text(json.dumps({"weight_map": {"lm_head.weight": "pytorch_model.bin"}}))
    elif name != "pytorch_model.bin":
        (folder / "pytorch_model.bin").rename(folder / name)
    with pytest.raises(CheckpointError) as caught:
        load_hf(folder, "causal_lm", "load")
    (problem,) = caught.value.problems
    assert name.removesuffix(".index.json") in problem.got
    assert "safetensors" in problem.need
    assert "save_pretrained" in problem.try_
    assert not (tmp_path / "mark").exists()
    torch.load(next(path for path in folder.iterdir() if b"touch" in path.read_bytes()), weights_only=False)
    assert (tmp_path / "mark").exists()


@pytest.mark.parametrize(
    "values",
    [
        {"attn_implementation": "someone/kernels"},
        {"_attn_implementation": "someone/kernels@main:run"},
        {"_attn_implementation_internal": "paged|someone/kernels"},
        {"_experts_implementation": "someone/kernels"},
        {"text_config": {"attn_implementation": {"": "someone/kernels"}}},
        {"parts": [{"deep": {"attn_implementation": "someone/kernels"}}]},
    ],
    ids=str,
)
def test_kernels_of_the_hub_are_refused(folder, values):
    change(folder, **values)
    with pytest.raises(CheckpointError, match="Kernels from elsewhere"):
        load_hf(folder, "causal_lm")


def test_an_implementation_of_transformers_is_used(folder):
    change(folder, attn_implementation="eager")
    load_hf(folder, "causal_lm")
    assert AutoModelForCausalLM.from_pretrained(folder).config.model_type == "llama"


@pytest.mark.parametrize("name", ["../out.safetensors", "/etc/passwd", "sub/x.safetensors", "..", "x.bin", 7, None])
def test_an_index_names_only_safetensors_of_its_folder(folder, name):
    (folder / "model.safetensors").rename(folder.parent / "out.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": {"w": name}}))
    with pytest.raises(CheckpointError, match="no safetensors of its folder"):
        scan_folder(folder)


@pytest.mark.parametrize("weight_map", [[], "x", 7, None, ["a.safetensors"]])
def test_an_index_without_a_table_is_refused(folder, weight_map):
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CheckpointError):
        scan_folder(folder)
