"""Layers that are handed the documents of packed rows, found once for all: the loss and gradients of `segments`.

No GPU: the kernels by documents are those of `tests.ops.varlen_contract`, and chosen for the CPU by hand.
"""

import copy

import pytest
import torch

from tests.models.shapes import make_batch, make_decoder
from tests.ops import varlen_contract
from tests.ops.compare import assert_snr
from tilewright.core.hardware import detect_machine
from tilewright.data.batches.microbatches import to_device
from tilewright.ops.backends.native.varlen_attention import by_efficient
from tilewright.ops.base import documents
from tilewright.ops.base.documents import STARTS, document_starts
from tilewright.ops.kernels import Kernels

KEY = ("attention", "cpu", torch.float32, "")


def kernels_by_documents():
    kernels = Kernels(detect_machine("cpu"), {"attention": "native"}, compile=False)
    kernels._run[KEY] = by_efficient
    kernels._by_documents, kernels._devices_by_documents = frozenset([KEY]), frozenset(["cpu"])
    return kernels


def on(kernels, model):
    model = copy.deepcopy(model)
    for module in model.modules():
        if hasattr(module, "kernels"):
            module.kernels = kernels
    return model


def packed(rows=3):
    batch = make_batch(rows)
    segments = torch.arange(16) // torch.tensor([3, 5, 16])[:rows, None]
    segments[0, -2:] = -1
    return batch | {"segments": segments.int(), "positions": torch.arange(16).expand(rows, -1).contiguous()}


def outcome(model, batch):
    model.zero_grad()
    loss = model.loss(batch).loss_sum
    loss.backward()
    return loss.detach(), [param.grad.clone() for param in model.parameters()]


@pytest.mark.parametrize("kept", ["none", "selective", "attention", "full"])
@pytest.mark.parametrize("name", ["gqa", "deepseek"])
def test_layers_by_documents_have_the_gradients_of_segments(name, kept):
    batch, model = packed(), make_decoder(name)
    model.activation_checkpoint = kept
    want, want_grads = outcome(on(Kernels(detect_machine("cpu"), compile=False), model), batch)
    with varlen_contract.on_cpu() as calls:
        loss, grads = outcome(on(kernels_by_documents(), model), batch)
    assert_snr(loss, want, 100, "loss")
    for (param, _), grad, want_grad in zip(model.named_parameters(), grads, want_grads, strict=True):
        assert_snr(grad, want_grad, 90, param)  # two orders of FP32 sums, behind layers
    forwards = sum(call.endswith("forward") for call, *_ in calls)
    assert forwards == len(model.blocks) * (2 if kept == "full" else 1), "kept with the results of attention"


@pytest.mark.slow
def test_compiled_layers_take_any_number_of_documents_in_few_graphs():
    torch._dynamo.reset()
    model = on(kernels_by_documents(), make_decoder("gqa"))
    compiled = copy.deepcopy(model)
    compiled.compile_blocks()
    with varlen_contract.on_cpu():
        for length in (3, 5, 16, 7, 2, 4):
            batch = packed() | {"segments": (torch.arange(16) // length).int().expand(3, -1).contiguous()}
            (loss, grads), (want, want_grads) = outcome(compiled, batch), outcome(model, batch)
            assert_snr(loss, want, 100, "loss")
            for grad, want_grad in zip(grads, want_grads, strict=True):
                assert_snr(grad, want_grad, 90)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2


def test_documents_are_found_once_and_on_the_host_where_the_batch_says_so(monkeypatch):
    found = []
    monkeypatch.setattr(documents, "document_starts", lambda segments: found.append(1) or document_starts(segments))
    batch, model = packed(), on(kernels_by_documents(), make_decoder("gqa"))
    with varlen_contract.on_cpu():
        model.loss(batch)
        assert len(found) == 1
        model.loss(batch | {STARTS: document_starts(batch["segments"])})
        assert len(found) == 1


def test_a_batch_for_a_gpu_says_where_its_documents_begin(monkeypatch):
    pinned = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: pinned.append(self) or self)
    batch = packed()
    there = to_device(batch, torch.device("meta"))
    assert there.keys() == batch.keys() | {STARTS}
    assert len(pinned) == len(batch)
    assert all(there[name].device.type == "meta" for name in batch)
    assert torch.equal(there[STARTS], document_starts(batch["segments"]))
    assert there[STARTS].device.type == "cpu"
    assert to_device(batch, torch.device("cpu")).keys() == batch.keys()
    pairs = {"input_ids": torch.zeros(2, 2, 4), "segments": torch.zeros(2, 2, 4)}
    assert to_device(pairs, torch.device("meta")).keys() == pairs.keys()
