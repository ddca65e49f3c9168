"""Proofs of graph targets find damage in files for onnxruntime and OpenVINO; and, for every target, in what a damaged
model answers."""

import copy

import numpy as np
import pytest
import torch

from tests.compress.models import our_tokenizer, proof, source
from tests.compress.test_damage import model
from tilewright.compress.export.onnx import ONNX, ONNX_INT8
from tilewright.compress.export.openvino import OPENVINO
from tilewright.compress.prove.compare_answers import as_json, compare
from tilewright.compress.prove.held_out import reference
from tilewright.compress.prove.tolerance import TOLERANCES, beyond


def swap_halves(values, draw):
    """Of rows or of columns, as a writer with a wrong offset leaves them."""
    axis = int(draw.integers(values.ndim))
    return np.roll(values, values.shape[axis] // 2, axis)


def zero(values, draw):
    return np.zeros_like(values)


def transposed(values, draw):
    """The bytes of the transpose in the shape of the matrix."""
    return np.ascontiguousarray(values.T).reshape(values.shape)


def one_row(values, draw):
    """Of each four rows one holds what the next should."""
    found = values.copy()
    found[::4] = np.roll(values, -1, 0)[::4]
    return found


KINDS = (swap_halves, zero, transposed, one_row)


# --- in a file --------------------------------------------------------------------------------------------------------


def damage_onnx(path, kind, draw):
    """Of one matrix, as it is stored: FP32 or codes, those of queries, keys and values in one."""
    onnx = pytest.importorskip("onnx")
    file = onnx.load(str(path))
    found = [tensor for tensor in file.graph.initializer if len(tensor.dims) == 2 and min(tensor.dims) >= 32]
    assert len(found) >= 9, "four matrices in each of two layers, and the ids' table"
    tensor = found[draw.integers(len(found))]
    values = onnx.numpy_helper.to_array(tensor)
    damaged = kind(values, draw)
    assert not np.array_equal(damaged, values)
    tensor.CopyFrom(onnx.numpy_helper.from_array(np.ascontiguousarray(damaged), tensor.name))
    onnx.save(file, str(path))
    return tensor.name


def proven(target, tmp_path, damage):
    given = source(model(), our_tokenizer(), tmp_path / "run")
    path = tmp_path / target.file.format(run="model")
    written = target.write(given, path)
    where = damage(path)
    asked = proof(tmp_path / "proof", given.model, given.tokenizer)
    stored = None if written.stored is None else reference(written.stored(), asked.question)
    row = asked.of(target.consumer.module, path, written.options, tolerance=TOLERANCES[target.name], stored=stored)
    print(target.name, where, row["state"], row["reason"], row.get("kl"), row.get("stored"))
    return row


@pytest.mark.slow
@pytest.mark.parametrize("target", [ONNX, ONNX_INT8], ids=lambda target: target.name)
@pytest.mark.parametrize(
    ("kind", "seed"),
    [(swap_halves, 0), *((kind, seed) for kind in KINDS for seed in range(1, 5))],
)
def test_damage_of_an_onnx_file_is_found(target, kind, seed, tmp_path):
    pytest.importorskip("onnxruntime")
    row = proven(target, tmp_path, lambda path: damage_onnx(path, kind, np.random.default_rng(seed)))
    assert row["state"] == "failed", row
    assert "KL" in row["reason"]


def test_damage_of_an_openvino_folder_is_found(tmp_path):
    """Whatever its layout: two quarters of the bytes of its weights are exchanged."""
    pytest.importorskip("openvino")

    def exchange(path):
        (weights,) = [file for file in path.parent.rglob("*.bin") if file.is_file()]
        whole = weights.read_bytes()
        first, second, end = len(whole) // 4, len(whole) // 2, 3 * (len(whole) // 4)
        weights.write_bytes(whole[:first] + whole[second:end] + whole[first:second] + whole[end:])

    assert proven(OPENVINO, tmp_path, exchange)["state"] == "failed"


# --- in answers, where no runtime is needed ---------------------------------------------------------------------------


def judged(name, asked, log_probs, stored):
    """What of a consumer's answers is beyond the limits of a target."""
    row = as_json(compare(asked.expected, log_probs))
    row["stored"] = {"kl": compare(asked.expected, log_probs, stored).kl}
    return beyond(TOLERANCES[name], row)


@pytest.fixture(scope="module")
def asked(tmp_path_factory):
    return proof(tmp_path_factory.mktemp("proof"), model(), our_tokenizer())


SEEN_BY_ALL = (swap_halves, transposed)
"""By the limits of `onnx-qdq` too, 0.1 nats. A matrix of zeros, or a quarter of its rows, may be within these: its
scales of activations are part of no model that it could be compared with. `test_held` finds these in the file."""


@pytest.mark.parametrize("name", TOLERANCES)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", KINDS)
def test_answers_of_a_damaged_model_are_beyond_the_limits(kind, seed, name, asked):
    if name == "onnx-qdq" and kind not in SEEN_BY_ALL:
        pytest.skip("beyond what its limits see")
    draw = np.random.default_rng(seed)
    damaged = copy.deepcopy(model())
    matrices = [param for param in damaged.blocks.parameters() if param.ndim == 2]
    with torch.no_grad():
        param = matrices[draw.integers(len(matrices))]
        param.copy_(torch.from_numpy(np.ascontiguousarray(kind(param.numpy(), draw))))
    assert judged(name, asked, reference(damaged, asked.question), asked.expected.log_probs_NV)


@pytest.mark.parametrize("name", TOLERANCES)
def test_sound_answers_are_within(name, asked):
    """The model's own, and with noise at a tenth of the tighter limit: KL of small noise is half its variance."""
    sound = asked.expected.log_probs_NV
    assert judged(name, asked, sound, sound) == ""
    limit = min(TOLERANCES[name].kl, TOLERANCES[name].stored or 1.0)
    noise = np.random.default_rng(0).standard_normal(sound.shape) * (0.2 * limit) ** 0.5
    assert judged(name, asked, sound + noise, sound) == ""
