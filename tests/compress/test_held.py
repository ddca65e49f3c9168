"""A file for TensorRT holds the matrices of its model: damage of each kind to each is named, and fails a proof."""

import functools

import numpy as np
import pytest

from tests.compress.models import decoder, hf, our_tokenizer, proof, source
from tests.compress.test_damage_graphs import KINDS, one_row, zero
from tilewright.compress.export.onnx import ONNX_QDQ, traced_onnx
from tilewright.compress.graph.trace import graph_of, input_names
from tilewright.compress.onnx.check_matrices import differing_matrices
from tilewright.compress.onnx.qdq import quantize_qdq
from tilewright.compress.prove.tolerance import TOLERANCES, Tolerance

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

MODELS = {
    "decoder": decoder,
    "untied": functools.partial(decoder, tie_embeddings=False),
    "experts": functools.partial(decoder, num_experts=4, num_experts_per_token=2, expert_dim=32),
    "llama": functools.partial(hf, "Llama", tie_word_embeddings=True),
    "qwen3": functools.partial(hf, "Qwen3"),
}


@functools.cache
def written(name, folder):
    """A file, its graph, and the run that both are of."""
    run = source(MODELS[name](), our_tokenizer(), folder / name)
    graph = graph_of(run.model)
    names = zip(input_names(graph)[1:], graph.kept, strict=True)
    kept = [(each, (heads, width)) for each, (_, (heads, _, width)) in names]
    rows = np.random.default_rng(0).integers(0, 390, (4, 24))
    path = folder / f"{name}.onnx"
    onnx.save(quantize_qdq(traced_onnx(run)[0], rows, kept), str(path))
    return path, graph, run


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("held")


def damaged(path, out, kind, place, seed=0):
    """A copy of the file, one of its matrices or codes damaged; the name of that one, "" where there are no more."""
    file = onnx.load(str(path))
    found = [tensor for tensor in file.graph.initializer if len(tensor.dims) == 2 and min(tensor.dims) >= 4]
    if place >= len(found):
        return ""
    tensor, values = found[place], onnx.numpy_helper.to_array(found[place])
    wrong = np.ascontiguousarray(kind(values, np.random.default_rng(seed)))
    tensor.CopyFrom(onnx.numpy_helper.from_array(wrong, tensor.name))
    onnx.save(file, str(out))
    return tensor.name


@pytest.mark.parametrize(
    "name", ["decoder", *(pytest.param(n, marks=pytest.mark.slow) for n in MODELS if n != "decoder")]
)
def test_a_sound_file_holds_all(name, folder):
    path, graph, _ = written(name, folder)
    assert differing_matrices(path, graph) == ""


def swap_both(values, draw):
    """The halves of what a matrix reads and of what it makes."""
    return np.roll(values, [size // 2 for size in values.shape], range(values.ndim))


def other_scale(values, draw):
    return (values // 2).astype(values.dtype) if values.dtype.kind == "i" else values / 2


@pytest.mark.parametrize("kind", [*(kind for kind in KINDS if kind.__name__ != "swap_halves"), swap_both, other_scale])
def test_damage_of_each_matrix_is_found(kind, folder):
    """Whichever it is. (Whole rows that changed places are there, and far away in what the model answers.)"""
    path, graph, _ = written("decoder", folder)
    out, missed, place = folder / "damaged.onnx", [], 0
    while name := damaged(path, out, kind, place):
        if not differing_matrices(out, graph):
            missed.append(name)
        place += 1
    assert place >= 9
    assert not missed


@pytest.mark.parametrize("kind", [pytest.param(zero, marks=pytest.mark.slow), one_row])
def test_a_proof_of_damage_that_limits_let_pass_fails(kind, folder, tmp_path):
    path, graph, run = written("decoder", folder)
    out = tmp_path / "damaged.onnx"
    assert damaged(path, out, kind, 3)
    loose = Tolerance(100.0, 0.0, "none", 100.0)
    asked = proof(tmp_path / "proof", run.model, run.tokenizer)
    differing = functools.partial(differing_matrices, graph=graph)
    row = asked.of(ONNX_QDQ.consumer.module, out, {}, tolerance=loose, differing=differing)
    assert row["state"] == "failed"
    assert "weights that are not those of the model" in row["reason"]
    sound = asked.of(ONNX_QDQ.consumer.module, path, {}, tolerance=TOLERANCES["onnx-qdq"], differing=differing)
    assert "not those of the model" not in sound["reason"]
