"""A run that classifies images compressed: channels cut, a budget in percentage points, ONNX run on held-out images."""

import json

import numpy as np
import pytest
import torch

from tests.training.tiny import tiny
from tilewright.cli.app import run as cli
from tilewright.cli.load_run import open_to_export
from tilewright.compress.budget.artefacts import judged
from tilewright.compress.budget.compress_run import Compression
from tilewright.compress.budget.compress_settings import CompressSettings
from tilewright.compress.budget.held_out_rise import RowLosses, row_losses_of
from tilewright.compress.export.onnx import ONNX
from tilewright.compress.export.targets import TARGETS, why_not
from tilewright.compress.export_run import BASELINES
from tilewright.compress.graph.trace import graph_of, trace
from tilewright.core.errors import NumericsError
from tilewright.report.pages.compress_page import render_compression
from tilewright.training.session import train

transformers = pytest.importorskip("transformers")
SIZE = 16


def write_images(folder):
    """Dark and light squares of noise, of two classes."""
    image = pytest.importorskip("PIL.Image")
    generator = torch.Generator().manual_seed(0)
    for name, base in (("dark", 90), ("light", 150)):
        (folder / name).mkdir(parents=True)
        for number in range(30):
            pixels = (base + 60 * torch.randn(SIZE, SIZE, 3, generator=generator)).clamp(0, 255).byte().numpy()
            image.fromarray(pixels).save(folder / name / f"{number}.png")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images")
    config = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", num_labels=2
    )
    config.architectures = ["ResNetForImageClassification"]
    config.save_pretrained(folder / "net")
    write_images(folder / "classes")
    changes = {
        "model__kind": "hf", "model__path": folder / "net", "model__task": "image_classification",
        "data__source": folder / "classes", "data__image_size": SIZE, "train__eval_batches": 8, "train__steps": 12,
        "precision__mode": "fp32", "log__report": False, "optim__lr": 3e-3,
    }  # fmt: skip
    return train(tiny(folder, tmp_path_factory.mktemp("runs"), **changes)).run_dir


def test_rises_are_percentage_points():
    """Of two models on the same images the difference of the shares that are wrong, whatever the first one's was."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(20):
        count = int(torch.randint(2, 50, (1,), generator=generator))
        before, after = torch.randint(2, (2, count), generator=generator).double()
        ones = torch.ones(count)
        rise, error = RowLosses({"images": (after, ones)}, points=True).rise_over(
            RowLosses({"images": (before, ones)}, points=True)
        )
        assert rise == pytest.approx(float(after.mean() - before.mean()))
        assert error == pytest.approx(float((after - before).std()) / count**0.5)


def test_what_is_wrong_is_counted_as_transformers_says(run):
    source = open_to_export(run)
    batches = {"images": source.data.eval_batches("images", 4, 8)}
    found = row_losses_of(source.model, batches)
    wrong, images = 0, 0
    with torch.no_grad():
        for batch in batches["images"]:
            wrong += int(
                (source.model.net(pixel_values=batch["pixel_values"]).logits.argmax(-1) != batch["labels"]).sum()
            )
            images += len(batch["labels"])
    assert found.loss == wrong / images
    with torch.no_grad():
        next(source.model.parameters()).fill_(torch.nan)
    with pytest.raises(NumericsError, match="not finite"):
        row_losses_of(source.model, batches)


def test_an_artefact_is_judged_by_what_it_has_right():
    row = {"state": "ran", "loss": {"images": {"fp32": 1.0, "consumer": 9.0}}}
    row["right"] = {"images": {"fp32": 0.75, "consumer": 0.5}}
    made = {"rise": 0.125, "equal_rise": 0.0}
    found = judged(row, made, 0.4, {"images": 8}, points=True)
    assert (found["rise"], found["equal_rise"], found["inside"]) == (0.375, 0.25, True)
    assert not judged(row, made, 0.3, {"images": 8}, points=True)["inside"]


def test_two_targets_hold_a_model_of_images(run):
    source = open_to_export(run)
    reasons = {target.name: why_not(target, source) for target in TARGETS}
    assert reasons.pop("hf") is None
    assert reasons.pop("onnx") is None
    assert all("not images" in str(reason) for reason in reasons.values()), reasons


def test_a_graph_takes_any_number_of_images(run):
    source = open_to_export(run)
    program = trace(graph_of(source.model, SIZE)).module()
    for number in (1, 3, 7):
        pixels = torch.randn(number, 3, SIZE, SIZE)
        with torch.no_grad():
            expected = source.model.image_logits(pixels)
            torch.testing.assert_close(program(pixels)[0], expected, rtol=1e-4, atol=1e-5)


def compression(run, out, **changes):
    settings = CompressSettings.of(
        "60%", "onnx", "channels", **{"steps": 3, "tries": 1, "batches": 2, "controls": "equal"} | changes
    )
    return Compression(open_to_export(run), settings, out, open_to_export, lambda line: None)


def test_channels_are_cut_and_recovered_without_a_teacher(run, tmp_path):
    asked = compression(run, tmp_path)
    plan = asked.plan()[0]
    asked._control("teacher")
    row = asked._recovered(plan)
    source = open_to_export(tmp_path / row["run"])
    assert source.recipe.distill.teacher == ""
    assert source.model.config.hidden_sizes == [units * row["units"]["channels"][1] // 8 for units in (8, 16)]
    again = row_losses_of(source.model, asked.batches)
    assert row["rise"] == pytest.approx(again.loss - asked.whole.loss)
    page = render_compression(asked.record | {"chosen": row["name"], "verdict": "over budget"})
    for text in (
        f"{row['name']}, as it was predicted",
        "Percentage points of images",
        "there is no teacher of images",
        "Share that is wrong",
    ):
        assert text in page


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_an_onnx_file_takes_any_number_of_images(run, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    source = open_to_export(run)
    ONNX.write(source, tmp_path / "net.onnx")
    session = onnxruntime.InferenceSession(str(tmp_path / "net.onnx"), providers=["CPUExecutionProvider"])
    for number in (1, 5):
        pixels = torch.randn(number, 3, SIZE, SIZE)
        (found,) = session.run(None, {"pixels": pixels.numpy()})
        with torch.no_grad():
            np.testing.assert_allclose(found, source.model.image_logits(pixels).numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.timeout(900)  # consumers in processes of their own
def test_the_whole_command(run, tmp_path, monkeypatch):
    """From a run of images to an artefact that is proven, with controls and page."""
    pytest.importorskip("onnxruntime")
    monkeypatch.setattr("tilewright.compress.export_run.BASELINES", BASELINES[:1])
    out = tmp_path / "out"
    options = ["--budget", "60%", "--steps", "3", "--tries", "1", "--out", str(out)]
    assert cli(["compress", str(run), *options]) == 0
    record = json.loads((out / "compress.json").read_text())
    assert record["verdict"] == "inside budget"
    assert {name.partition("-")[0] for name in record["controls"]} == {"teacher", "scratch"}
    (artefact,) = record["artefacts"]
    assert (artefact["target"], artefact["state"]) == ("onnx", "ran")
    assert set(artefact["image_s"]) == {"1", "32"}
    assert [row["state"] for row in record["baselines"]] == ["ran"]
    assert "an image" in (out / "compress.html").read_text()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_folder_that_is_exported_reloads(run, tmp_path, monkeypatch):
    monkeypatch.setattr("tilewright.compress.export_run.BASELINES", ())
    assert cli(["export", str(run), "--to", "hf", "--out", str(tmp_path)]) == 0
    net = transformers.AutoModelForImageClassification.from_pretrained(tmp_path / f"{run.name}-bf16")
    assert net.config.num_labels == 2
