"""Foreign models through the whole loop: dropout draws from the saved generators, batch norm's buffers are state."""

import os
import signal

import pytest
import torch

from tests.training.tiny import assert_same_run, rows, tiny
from tilewright.training.runlog.record_files import RunLog
from tilewright.training.session import train

transformers = pytest.importorskip("transformers")


def _bert(folder):
    config = transformers.BertConfig(
        vocab_size=300, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=64, hidden_dropout_prob=0.2, attention_probs_dropout_prob=0.2,
    )  # fmt: skip
    config.architectures = ["BertForMaskedLM"]
    config.save_pretrained(folder)
    return {"model__kind": "hf", "model__path": folder, "model__task": "masked_lm"}


def _resnet(folder):
    image = pytest.importorskip("PIL.Image")
    config = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", num_labels=2
    )
    config.architectures = ["ResNetForImageClassification"]
    config.save_pretrained(folder / "net")
    generator = torch.Generator().manual_seed(0)
    for name, base in (("dark", 40), ("light", 200)):
        (folder / "images" / name).mkdir(parents=True)
        for number in range(20):
            pixels = (base + 30 * torch.randn(16, 16, 3, generator=generator)).clamp(0, 255).byte().numpy()
            image.fromarray(pixels).save(folder / "images" / name / f"{number}.png")
    return {
        "model__kind": "hf", "model__path": folder / "net", "model__task": "image_classification",
        "data__source": folder / "images", "data__image_size": 16,
    }  # fmt: skip


@pytest.mark.parametrize("make", [pytest.param(_bert, marks=pytest.mark.slow), _resnet])
@pytest.mark.support("hf", "one")
@pytest.mark.support("dropout", "one")
def test_resumed_equals_never_stopped_bitwise(make, data, tmp_path, monkeypatch):
    changes = make(tmp_path / "model") | {"optim__lr": 0.01, "train__steps": 8}
    train(tiny(data, tmp_path / "straight", **changes))
    real = RunLog.step

    def recorded(self, counters, *args):
        row = real(self, counters, *args)
        if counters.step == 5:
            os.kill(os.getpid(), signal.SIGTERM)
        return row

    with monkeypatch.context() as patch:
        patch.setattr(RunLog, "step", recorded)
        assert train(tiny(data, tmp_path / "stopped", **changes)).step == 5
    torch.manual_seed(4321)
    train(tiny(data, tmp_path / "stopped", **changes))
    assert_same_run(tmp_path / "stopped" / "tiny", tmp_path / "straight" / "tiny")
    losses = [row["loss"] for row in rows(tmp_path / "straight" / "tiny" / "metrics.jsonl") if "loss" in row]
    assert losses[-1] < losses[0]
