"""A layer reads the input that it is given, however this came to have its values: no copy of an earlier one."""

import copy
import gc
import io
import weakref

import numpy as np
import pytest
import torch
from torch import nn

from tests.cover import covering
from tilewright.ops.kernels import Kernels
from tilewright.precision.convert import convert
from tilewright.precision.float8.frozen_linear import FrozenFloat8Linear
from tilewright.precision.float8.linear import Float8Linear
from tilewright.precision.lora.lora import add_lora
from tilewright.precision.policy.gemm_formats import SCALED_FORMATS

KERNELS = Kernels.default()
KINDS = [*SCALED_FORMATS, "lora"]


class Attention(nn.Module):
    """Three layers side by side; `between` is called between them, with their input."""

    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(136, 40) for _ in range(3))

    def forward(self, x, between=None):
        q = self.q_proj(x)
        if between is not None:
            between(x)
        return q, self.k_proj(x), self.v_proj(x)


def converted(kind):
    torch.manual_seed(0)
    model = Attention()
    if kind == "lora":
        add_lora(model, 2, base="fp8", kernels=KERNELS)
        convert(model, "fp8_tile", kernels=KERNELS)
        assert all(isinstance(layer, FrozenFloat8Linear) for layer in model.children())
    else:
        convert(model, kind, kernels=KERNELS)
        assert all(isinstance(layer, Float8Linear) for layer in model.children())
    return model


def _inference(write):
    def run(x):
        with torch.inference_mode():
            write(x)

    return run


INPUT_WRITES = {
    "in place": lambda x: x.mul_(-2),
    "data": lambda x: x.data.mul_(-2),
    "numpy": lambda x: np.negative(x.numpy(), out=x.numpy()),
    "inference_mode": _inference(lambda x: x.copy_(-2 * x)),
    "a view": lambda x: x[3:].mul_(-2),
    "rows change places": lambda x: x.data.copy_(x.data.flip(0)),
    "storage": lambda x: x.untyped_storage().copy_((-2 * x).untyped_storage()),
    "random": lambda x: x.data.normal_(),
    "to NaN": lambda x: x.data.fill_(float("nan")),
}


@pytest.mark.parametrize(
    ("context", "write", "kind"),
    covering(("enable_grad", "no_grad", "inference_mode"), tuple(INPUT_WRITES), KINDS, pairs=False),
)
def test_one_buffer_for_all_batches(context, write, kind):
    model = converted(kind)
    with torch.inference_mode(context == "inference_mode"):
        buffer = torch.randn(24, 136, generator=torch.Generator().manual_seed(1))
    with getattr(torch, context)():
        for _ in range(3):
            outs = model(buffer)
            for layer, out in zip(model.children(), outs, strict=True):
                assert torch.equal(layer(buffer.clone()), out) or buffer.isnan().any()
            INPUT_WRITES[write](buffer)
            again = [layer(buffer) for layer in model.children()]  # called one by one, not through their parent
            assert not any(torch.equal(new, old) for new, old in zip(again, outs, strict=True)) or buffer.isnan().any()
            for layer, out in zip(model.children(), again, strict=True):
                assert torch.equal(out.nan_to_num(7), layer(buffer.clone()).nan_to_num(7)), f"{write}: a stale copy"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("write", INPUT_WRITES)
def test_a_write_between_layers_side_by_side(write, kind):
    model = converted(kind)
    x = torch.randn(24, 136)
    with torch.no_grad():
        out = model(x, INPUT_WRITES[write])[1]
        assert torch.equal(out.nan_to_num(7), model.k_proj(x.clone()).nan_to_num(7))


def test_training_from_one_numpy_buffer_learns_every_batch():
    """The issue's own case: with stale copies the first batch is learnt for ever."""
    generator = np.random.default_rng(0)
    batches = generator.standard_normal((8, 32, 64)).astype(np.float32)
    target = torch.from_numpy(generator.standard_normal((64, 8)).astype(np.float32)) / 8
    losses = {}
    for reuse in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 8))
        convert(model, "fp8_tile", kernels=KERNELS)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.03)
        buffer = np.empty((32, 64), np.float32)
        for step in range(96):
            np.copyto(buffer, batches[step % 8])
            x = torch.from_numpy(buffer) if reuse else torch.from_numpy(buffer.copy())
            if step == 0 and reuse:
                shared = x
            x = shared if reuse else x
            loss = (model(x) - x @ target).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        losses[reuse] = loss.item()
    assert losses[True] == losses[False]


@pytest.mark.parametrize("kind", KINDS)
def test_copies_die_with_the_forward_of_the_parent(kind):
    model = converted(kind)
    x = torch.randn(24, 136)
    with torch.no_grad():
        model(x)
    assert model.q_proj.share is model.k_proj.share
    assert not model.q_proj.share._by_thread
    with pytest.raises(ZeroDivisionError):
        model(x, lambda _: 1 / 0)
    assert not model.q_proj.share._by_thread
    model.q_proj(x)  # by itself: until the input dies
    alive = weakref.ref(*model.q_proj.share._by_thread.values())
    assert alive() is not None
    del x
    gc.collect()
    assert alive() is None


def _saved(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, _saved])
@pytest.mark.parametrize("kind", KINDS)
def test_a_copied_model_shares_nothing_with_the_first(copied, kind):
    model = converted(kind)
    x = torch.randn(24, 136)
    model.q_proj(x)  # leaves copies behind
    twin = copied(model)
    assert twin.q_proj.share is twin.k_proj.share
    assert twin.q_proj.share is not model.q_proj.share
    assert not twin.q_proj.share._by_thread
    assert all(torch.equal(a, b) for a, b in zip(model(x), twin(x), strict=True))
    assert not twin.q_proj.share._by_thread


def test_a_layer_alone_shares_nothing():
    model = nn.Sequential(nn.Linear(64, 8))
    convert(model, "fp8_tile", kernels=KERNELS)
    assert model[0].share is None
    with torch.inference_mode():
        buffer = torch.ones(4, 64)
        first = model(buffer)
        buffer.copy_(-torch.ones(4, 64))
        assert not torch.equal(model(buffer), first)
