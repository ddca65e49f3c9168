"""`tilewright train` on each family: a run, its Hugging Face folder, and transformers' own reading of that folder."""

import json
import math
from pathlib import Path

import pytest
import torch

from tests.contracts.observe import fixed_ceilings
from tests.zoo.cases import cases
from tests.zoo.families import TRAINED
from tests.zoo.runs import auto_class, events, logits, train, trained, write_data
from tests.zoo.test_convert import error_of
from tilewright.models.hf_folder import scan_folder
from tilewright.models.hf_load import load_hf

SAMPLE = ("gpt2", "gemma2", "bert", "vit", "qwen3_moe", "mamba2", "t5")
EXPORTED = Path("runs/zoo/hf")
MAY_CHANGE = {"architectures", "bos_token_id", "dtype", "eos_token_id", "transformers_version"}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("zoo")
    write_data(folder)
    return folder


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tilewright.plan.ceilings.measure", fixed_ceilings)


def read(path):
    return json.loads((Path(path) / "config.json").read_text())


@pytest.mark.parametrize("case", cases("run and export", families=TRAINED, sample=SAMPLE), indirect=True)
def test_a_run_and_what_it_exports(case, data):
    """The folder holds the run's weights and the model's own config."""
    train(case.family, data, precision__mode="bf16_mixed")
    want = trained(case.family)
    net, info = auto_class(case.family).from_pretrained(EXPORTED, dtype=torch.float32, output_loading_info=True)
    assert not any(info.values()), info
    assert torch.equal(logits(case.family, net.eval()), logits(case.family, want))
    before, after = read("model"), read(EXPORTED)
    lost = {name: (value, after.get(name)) for name, value in before.items() if after.get(name) != value}
    assert lost.keys() <= MAY_CHANGE, f"config.json says something else: {lost}"
    if want.config.is_encoder_decoder or case.family.name == "whisper":
        notes = " ".join(row["text"] for row in events("note"))
        assert "decoder" in notes, f"the run does not say that it trains the decoder alone: {notes!r}"


@pytest.mark.parametrize("case", cases("FP8 export", families=TRAINED, sample=SAMPLE), indirect=True)
def test_an_fp8_folder_is_fp8_and_is_read_again(case, data):
    """A folder that claims FP8 holds FP8, and is a model near to the one that was trained."""
    train(case.family, data, precision__mode="fp8_tile", save__export_format="fp8")
    in_fp8 = sum(tensor.dtype == "F8_E4M3" for tensor in scan_folder(EXPORTED).values())
    ours = load_hf(EXPORTED, case.family.task, "load").net.eval()
    error = error_of(logits(case.family, ours), logits(case.family, trained(case.family)))
    limit = 2.0**-4 * math.sqrt(in_fp8)
    assert error <= limit, f"logits of the folder are off by {error:.2g} of their length, {limit:.2g} allowed"
    assert in_fp8, "no tensor is in FP8"


@pytest.mark.parametrize("case", cases("FP8 in transformers", families=TRAINED, sample=SAMPLE), indirect=True)
def test_transformers_reads_an_fp8_folder(case, data, remark, caplog):
    """The same model as our reader makes of it."""
    from transformers import FineGrainedFP8Config

    train(case.family, data, precision__mode="fp8_tile", save__export_format="fp8")
    if "transformers without a GPU misreads" in caplog.text:
        remark("the export says that transformers without a GPU misreads the blocks of these sizes")
        return
    decoded = FineGrainedFP8Config(dequantize=True)
    theirs = auto_class(case.family).from_pretrained(EXPORTED, quantization_config=decoded).float().eval()
    ours = load_hf(EXPORTED, case.family.task, "load").net.eval()
    error = error_of(logits(case.family, theirs), logits(case.family, ours))
    assert error < 1e-4, f"transformers reads another model: off by {error:.2g}"
