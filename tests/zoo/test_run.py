"""`tilewright train` on each family: a run, its Hugging Face folder, and transformers' own reading of that folder."""

import json
import math
from pathlib import Path

import pytest
import torch

from tests.contracts.observe import fixed_ceilings
from tests.zoo.cases import cases
from tests.zoo.families import TRAINED, VOCAB
from tests.zoo.runs import auto_class, events, logits, train, trained, write_data
from tests.zoo.test_convert import error_of
from tilewright.models.folder.fp8_weights import find_weights, has_even_blocks
from tilewright.models.folder.safetensors import scan_folder
from tilewright.models.hf.load import load_hf

SAMPLE = ("vit", "qwen3_moe", "mamba2", "t5")
FP8_SAMPLE = ("qwen3_moe", "mamba2")
EXPORTED = Path("runs/zoo/hf")
MAY_CHANGE = {"architectures", "dtype", "transformers_version", "quantization_config"}
KEEP = {"precision__mode": "bf16_mixed"}
FP8 = {"precision__mode": "fp8_tile", "checkpoint__export_format": "fp8"}
SHARE = 0.8


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("zoo")
    write_data(folder)
    return folder


@pytest.fixture(scope="module")
def done():
    """Folders in which a family has been trained, by family and settings."""
    return {}


@pytest.fixture
def run(case, data, done, tmp_path, monkeypatch):
    """Goes to a folder in which the family has been trained with these settings; trains it the first time."""
    monkeypatch.setattr("tilewright.planner.machine.ceilings.measure", fixed_ceilings)

    def go(changes):
        key = (case.family.name, *changes)
        monkeypatch.chdir(done.get(key, tmp_path))
        if key not in done:
            train(case.family, data, **changes)
            done[key] = tmp_path

    return go


def read(path):
    return json.loads((Path(path) / "config.json").read_text())


@pytest.mark.parametrize("case", cases("run and export", families=TRAINED, sample=SAMPLE), indirect=True)
def test_transformers_reads_what_a_run_exports(case, run):
    """The folder holds the weights of the run's checkpoint."""
    run(KEEP)
    want = logits(case.family, trained(case.family))
    net, info = auto_class(case.family).from_pretrained(EXPORTED, dtype=torch.float32, output_loading_info=True)
    assert not any(info.values()), info
    assert torch.equal(logits(case.family, net.eval()), want)
    if case.family.kind == "encoder-decoder" or case.family.name == "whisper":
        notes = " ".join(row["message"] for row in events("fallback"))
        assert "decoder" in notes, f"the run does not say that it trains the decoder alone: {notes!r}"


@pytest.mark.parametrize("case", cases("config", families=TRAINED, sample=SAMPLE), indirect=True)
def test_an_exported_model_keeps_its_config(case, run, tmp_path):
    """config.json says what transformers itself would write, whatever data the run had."""
    run(KEEP)
    case.family.model().net.config.save_pretrained(tmp_path / "own")
    before, after = read(tmp_path / "own"), read(EXPORTED)
    names = (before.keys() | after.keys()) - MAY_CHANGE
    lost = {name: (before.get(name), after.get(name)) for name in names if before.get(name) != after.get(name)}
    assert not lost, f"another value than the model's own: {lost}"


@pytest.mark.parametrize("case", cases("FP8 export", families=TRAINED, sample=FP8_SAMPLE), indirect=True)
def test_an_fp8_folder_is_fp8_and_is_read_again(case, run, remark):
    """A folder that claims FP8 holds matrices in FP8, and is a model near to the one that was trained."""
    run(FP8)
    ours = load_hf(EXPORTED, case.family.task, "load").net.eval()
    stored = scan_folder(EXPORTED)
    in_fp8 = [tensor for tensor in stored.values() if tensor.dtype == "F8_E4M3"]
    error = error_of(logits(case.family, ours), logits(case.family, trained(case.family)))
    limit = 2.0**-4 * math.sqrt(len(in_fp8)) + 2.0**-8 * math.sqrt(len(stored))
    assert error <= limit, f"logits of the folder are off by {error:.2g} of their length, {limit:.2g} allowed"
    if "quantization_config" not in read(EXPORTED):
        remark("written in BF16: nothing to quantise")
        return
    matrices = {name: tensor for name, tensor in stored.items() if is_matrix(name, tensor.shape)}
    sizes = {name: math.prod(tensor.shape) for name, tensor in matrices.items()}
    share = sum(sizes[name] for name, tensor in matrices.items() if tensor.dtype == "F8_E4M3") / sum(sizes.values())
    rest = [name for name, tensor in matrices.items() if tensor.dtype != "F8_E4M3"]
    assert share >= SHARE, f"{share:.0%} of the matrices in FP8; not so: {', '.join(rest[:4])}"


def is_matrix(name, shape):
    """Whether a tensor is a weight of a layer: no embedding, head, router, convolution or scale."""
    other = VOCAB in shape or any(word in name for word in ("embed", "position", "wpe", "scale_inv"))
    return len(shape) in (2, 3) and min(shape[-2:]) >= 16 and not other


@pytest.mark.parametrize("case", cases("FP8 in transformers", families=TRAINED, sample=FP8_SAMPLE), indirect=True)
def test_transformers_reads_an_fp8_folder(case, run, remark):
    """The same model as our reader makes of it. Blocks that it cannot read without a GPU are none of ours."""
    from transformers import FineGrainedFP8Config

    run(FP8)
    coded = find_weights(EXPORTED, scan_folder(EXPORTED)).values()
    if not all(has_even_blocks(weight.qdata.shape) for weight in coded):
        remark("sizes whose blocks transformers cannot read without a GPU; the export says so")
        return
    decoded = {"quantization_config": FineGrainedFP8Config(dequantize=True)} if coded else {}
    theirs = auto_class(case.family).from_pretrained(EXPORTED, **decoded).float().eval()
    ours = load_hf(EXPORTED, case.family.task, "load").net.eval()
    error = error_of(logits(case.family, theirs), logits(case.family, ours))
    assert error < 1e-4, f"transformers reads another model: off by {error:.2g}"
