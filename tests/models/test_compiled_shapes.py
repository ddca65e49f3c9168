"""Compiled layers meet many shapes: documents of each length, evaluations, a smaller last batch. None runs uncompiled.

torch runs code uncompiled once it has compiled it for eight shapes, or what `graph_limit` says, and goes on without an
error; `fail_on_recompile_limit_hit` makes one. What decides how often is compiled is torch's tracing, so the graphs are
run as they are ("eager" in the place of inductor).
"""

import functools
from dataclasses import replace
from itertools import chain

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.models.shapes import KERNELS, SHAPES
from tests.zoo.families import FAMILIES
from tilewright.data.batches.step_samples import NUM_LENGTHS
from tilewright.data.batches.token_rows import starts_of
from tilewright.memory.chunked_mlp import chunk_mlps
from tilewright.models.base.eval_mode import evaluation
from tilewright.models.build import init_weights
from tilewright.models.decoder.decoder import Decoder
from tilewright.models.hf.load import load_hf
from tilewright.ops.base.documents import STARTS

pytestmark = pytest.mark.slow
STEP = 32
LAYERS = 3


@pytest.fixture(autouse=True)
def none_uncompiled(monkeypatch):
    plain = torch.compile

    @functools.wraps(plain)  # with its signature, which `graph_limit` reads
    def traced(*args, options=None, **kwargs):
        return plain(*args, backend="eager", **kwargs)

    monkeypatch.setattr(torch, "compile", traced)
    torch._dynamo.reset()
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        yield
    torch._dynamo.reset()


def of_documents(length: int, number: int) -> dict[str, Tensor]:
    """A micro-batch of some documents behind each other, with padding in one of two."""
    ends = np.sort(np.random.choice(np.arange(1, length), number - 1, replace=False))
    lengths = np.diff(np.concatenate(([0], ends, [length - 3 * (number % 2)])))
    lengths = np.maximum(lengths, 1)
    lengths[-1] = max(1, length - 3 * (number % 2) - lengths[:-1].sum())
    pad = length - int(lengths.sum())
    segments = np.append(np.repeat(np.arange(number), lengths), np.full(pad, -1)).astype(np.int32)
    positions = np.append(np.concatenate([np.arange(one) for one in lengths]), np.zeros(pad, int))
    ids = torch.randint(0, 61, (1, length))
    segments_BS = torch.from_numpy(segments)[None]
    labels = ids.masked_fill(segments_BS < 0, -100)
    starts = torch.from_numpy(starts_of(lengths, length))
    return {"input_ids": ids, "labels": labels, "positions": torch.from_numpy(positions)[None],
            "segments": segments_BS, STARTS: starts}  # fmt: skip


def of_rows(rows: int, length: int) -> dict[str, Tensor]:
    ids = torch.randint(0, 61, (rows, length))
    return {"input_ids": ids, "labels": ids}


def shapes():
    """What a run can meet: each length of documents, some of them with others inside; rows; a smaller last batch."""
    documents = (of_documents(STEP * i, 1 + i % 5) for i in range(1, NUM_LENGTHS + 1))
    return chain(documents, [of_rows(2, 24), of_rows(1, 24), of_rows(4, 24), of_rows(4, 57)])


def train_and_evaluate(model) -> None:
    for batch in shapes():
        model.loss(batch).loss_sum.backward()
        with evaluation(model), torch.no_grad():
            model.loss(batch)


MODES = ("none", "full", "selective", "fp8 inputs")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["gqa", "mla", "deepseek"])
def test_layers_of_the_decoder(kind, mode):
    model = Decoder(replace(SHAPES[kind], num_layers=LAYERS), KERNELS)
    init_weights(model, seed=0)
    model.activation_checkpoint = "full" if mode == "fp8 inputs" else mode
    if mode == "fp8 inputs":
        model.checkpoint_inputs = "fp8"
    model.compile_blocks()
    train_and_evaluate(model)


@pytest.mark.parametrize("mode", MODES)
def test_layers_of_a_foreign_model(mode):
    family = next(one for one in FAMILIES if one.name == "llama")
    model = load_hf(family.config(num_hidden_layers=LAYERS), "causal_lm", kernels=KERNELS).train()
    model.activation_checkpoint = "full" if mode == "fp8 inputs" else mode
    if mode == "fp8 inputs":
        model.checkpoint_inputs = "fp8"
    model.compile_blocks()
    train_and_evaluate(model)


@pytest.mark.parametrize("compiled_layers", [False, True])
def test_mlps_in_chunks(compiled_layers):
    model = Decoder(replace(SHAPES["gqa"], num_layers=LAYERS), KERNELS)
    init_weights(model, seed=0)
    if compiled_layers:
        model.compile_blocks()
    assert chunk_mlps(model, 3, print, compile=True)
    train_and_evaluate(model)
