"""What layers read beside the stream is tensors, and any stage makes it from the batch: without embedding weights."""

import copy

import pytest
import torch

from tests.cover import covering
from tests.models.shapes import SHAPES, make_batch, make_decoder
from tests.models.test_hf_models import make, make_inputs
from tests.training.test_layer_major_hf import CUT
from tilewright.memory.offload.flat_layout import placeholder
from tilewright.models.build import layered
from tilewright.models.layerwise.hf_view import HFLayers
from tilewright.models.layerwise.layer_calls import LayerCall, LayerCalls
from tilewright.models.layerwise.layer_view import find_layer_groups
from tilewright.ops.base.documents import document_tensors, documents_from, documents_of
from tilewright.precision.convert import convert


def packed(batch):
    """The same rows as three documents each, the last of them padding."""
    rows, length = batch["input_ids"].shape
    first, second = length // 3, 2 * length // 3
    segments = torch.full((rows, length), -1)
    segments[:, :first], segments[:, first:second] = 0, 1
    starts = torch.zeros(length, dtype=torch.long)
    starts[first:second], starts[second:] = first, second
    positions = (torch.arange(length) - starts).expand(rows, length)
    return batch | {"segments": segments, "positions": positions.contiguous()}


def later_stage(view, model):
    """The view of a model that has the layers' weights and no others."""
    groups = find_layer_groups(model, view)
    for part in (groups.prologue, groups.epilogue, groups.shared):
        for param in part.params:
            param.data = placeholder(param.shape, param.dtype, param.device)
            assert not param.isfinite().any()
    return view


def through(view, x, context):
    outs = []
    for index in range(len(view.blocks)):
        x, _ = view.layer(index, x, context)
        outs.append(x)
    return outs


@torch.no_grad()
def check(view, later, batch):
    """Contexts of both stages are tensors, the same ones, and so is what the layers make of them."""
    x, context = view.prologue(batch)
    before = torch.get_rng_state()
    made = later.context(batch)
    assert torch.equal(torch.get_rng_state(), before), "a stage's context draws numbers"
    assert context.keys() == made.keys()
    for name, tensor in context.items():
        assert isinstance(tensor, torch.Tensor)
        assert not tensor.requires_grad
        assert torch.equal(tensor, made[name]), name
    sent = {name: tensor.clone() for name, tensor in made.items()}  # as it would arrive
    for wanted, found in zip(through(view, x, context), through(later, x, sent), strict=True):
        assert wanted.isfinite().all()
        assert torch.equal(wanted, found)


@pytest.mark.parametrize("rows", ["whole", "packed"])
@pytest.mark.parametrize("name", list(SHAPES))
def test_our_decoder(name, rows):
    model = make_decoder(name)
    other = copy.deepcopy(model)
    batch = make_batch(3, 24)
    check(model, later_stage(other, other), packed(batch) if rows == "packed" else batch)


@pytest.mark.parametrize(("name", "mode"), covering(tuple(CUT), ("fp32", "bf16_mixed"), pairs=False))
def test_hugging_face_models(name, mode):
    """In training mode: dropout of the embeddings is drawn, and the layers' own is off, since both stages draw."""
    model = convert(make(name), mode)
    other = convert(make(name), mode)
    views = []
    for each in (model, other):
        views.append(layered(each))
        assert isinstance(views[-1], HFLayers), each.notes
        for block in views[-1].blocks:
            block.eval()
    later_stage(views[1], other)
    batches = [make_inputs(model, rows=2, positions=12)]
    if model.task == "causal_lm":
        batches.append(packed(batches[0]))
    for batch in batches:
        check(*views, batch)


def test_documents_go_through_tensors():
    segments_BS = torch.tensor([[0, 0, 1, 1, -1], [0, 1, 2, 2, 2]])
    found = documents_of(segments_BS)
    for wanted in (found, segments_BS, None):
        tensors = document_tensors(wanted)
        assert all(isinstance(tensor, torch.Tensor) for tensor in tensors.values())
        made = documents_from(tensors)
        assert type(made) is type(wanted)
        pairs = zip(made, wanted, strict=True) if wanted is found else [(made, wanted)]
        assert all(a is b or a == b for a, b in pairs)


def test_a_tensor_of_all_layers_is_sent_once_and_what_is_none_stays():
    mask, angles = torch.ones(2), (torch.zeros(3), torch.ones(3))
    kwargs = [{"angles": angles, "flag": index, "none": None} for index in range(3)]
    calls = [LayerCall((None, mask), each, (False, torch.float32)) for each in kwargs]
    layer_calls = LayerCalls()
    context = layer_calls.pack(calls)
    assert len(context) == 4
    for index in range(3):
        call = layer_calls.call(index, context)
        assert call == calls[index]
        assert call.args[1] is mask
    layer_calls.pack(calls)
    assert len(layer_calls) == 1
    layer_calls.pack([LayerCall((None, None), {}, (False, torch.float32))] * 3)
    assert len(layer_calls) == 2
    assert layer_calls.call(2, context) == calls[2]


def test_a_model_whose_layers_read_objects_is_kept_whole():
    """An object that is made anew for each batch could not be sent."""
    model = make("llama")
    forward = model.net.model.forward

    class Odd:
        pass

    def with_object(*args, **kwargs):
        return forward(*args, odd=Odd(), **kwargs)

    model.net.model.forward = with_object
    assert not isinstance(layered(model), HFLayers)
    assert "another one for each batch" in model.notes[-1]
