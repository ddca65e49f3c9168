"""Who owns a step's seconds: every microsecond has one owner, and every operation of ours one by name."""

from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

from tilewright.models.build import init_weights
from tilewright.models.decoder.config import DecoderConfig
from tilewright.models.decoder.decoder import Decoder
from tilewright.optim.adam import DeepSeekAdam
from tilewright.planner.trace.step_owners import BACKWARD, CLIP, FORWARD, OTHER, REST, STEP, explained, owners, watched


@dataclass
class Event:
    """As the profiler's."""

    name: str
    self_cpu_time_total: float
    cpu_children: list["Event"] = field(default_factory=list)
    start: float = 0.0

    @property
    def time_range(self):
        return SimpleNamespace(start=self.start, end=self.start + self.cpu_time_total)

    @property
    def cpu_time_total(self):
        return self.self_cpu_time_total + sum(child.cpu_time_total for child in self.cpu_children)


def seconds(event):
    return {one.name: round(1e6 * one.seconds) for one in owners([event])}


def test_the_outermost_owner_takes_all_that_runs_inside():
    update = Event("Optimizer.step#Muon.step", 1, [Event("aten::mm", 20), Event("aten::copy_", 300)])
    loss = Event("_ChunkedLoss", 4000, [Event("aten::addmm", 50000)])
    assert seconds(Event(STEP, 7, [loss, update])) == {"head and loss": 54000, "optimizer": 321, REST: 7}


def test_matmuls_of_backward_passes_are_told_apart_and_what_comes_behind_is_checks():
    forward = Event("aten::linear", 1, [Event("aten::addmm", 10), Event("aten::as_strided", 3)])
    mm = Event("autograd::engine::evaluate_function: MmBackward0", 100, [Event("aten::mm", 1000)], start=50)
    norm = Event("aten::linalg_vector_norm", 40000, start=5000)
    assert seconds(Event(STEP, 2, [forward, mm, norm])) == {
        FORWARD: 14,
        BACKWARD: 1000,
        OTHER: 100,
        CLIP: 40000,
        REST: 2,
    }


def test_what_goes_by_elements_is_told_from_other_calls():
    names = ["mul", "add_", "add", "silu", "silu_backward", "pow", "rsqrt", "mean", "sum", "cat", "gelu"]
    names += ["_softmax_backward_data", "linalg_vector_norm", "_fused_rms_norm", "native_layer_norm_backward"]
    names += ["embedding_dense_backward"]
    for name in names:
        assert seconds(Event(STEP, 0, [Event(f"aten::{name}", 5)])) == {
            "element-wise (norm, activation, residual)": 5,
            REST: 0,
        }, name
    for name in ("aten::view", "aten::as_strided", "aten::item", "Mul", "MulBackward0"):
        assert seconds(Event(STEP, 0, [Event(name, 5)])) == {OTHER: 5, REST: 0}, name


def test_without_a_step_it_is_an_error():
    with pytest.raises(ValueError, match="no event"):
        owners([Event("aten::mm", 1)])


@pytest.mark.parametrize("compiled", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_real_step_adds_up(compiled):
    model = Decoder(DecoderConfig.of(vocab_size=64, dim=64, num_heads=4, num_layers=2))
    init_weights(model, seed=0)
    if compiled:
        model.compile_blocks()
    optimizer = DeepSeekAdam(model.parameters())
    ids = torch.randint(64, (2, 33))
    batch = {"input_ids": ids[:, :-1], "labels": ids[:, 1:]}

    def step():
        model.loss(batch).loss_sum.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    step()
    with watched() as profile:
        step()
    events = profile.function_events
    found = {one.name: one for one in owners(events)}
    whole = next(event for event in events if event.name == STEP).cpu_time_total / 1e6
    assert sum(one.seconds for one in found.values()) == pytest.approx(whole, rel=1e-3)
    # 7 linear layers in each of 2; the head is in the loss
    assert found[FORWARD].calls >= 14
    assert found[BACKWARD].calls >= 28
    for name in ("head and loss", "attention", "optimizer", CLIP):
        assert found[name].seconds > 0, (name, found)
    assert ("compiled loops (norm, SwiGLU, residual)" in found) == compiled
    unnamed = sum(found[name].seconds for name in (OTHER, REST) if name in found)
    assert explained(list(found.values())) == pytest.approx(1 - unnamed / whole, abs=1e-3)


def test_every_operator_of_ours_has_an_owner():
    from tilewright.ops.backends import document_attention  # noqa: F401  registers
    from tilewright.ops.backends.cpu import attention, fp8, wgrad  # noqa: F401
    from tilewright.ops.backends.native import dequant_gemm, int8, scaled_mm, varlen_attention, wide_ops  # noqa: F401
    from tilewright.ops.backends.ref import fp8 as ref_fp8  # noqa: F401
    from tilewright.ops.backends.triton import fused, gemm, quantize  # noqa: F401
    from tilewright.precision.float8.gemm import gemm_ops  # noqa: F401

    names = {n.split(".")[0] for n in torch._C._dispatch_get_all_op_names() if n.startswith("tilewright::")}
    assert len(names) > 15
    unowned = [name for name in names if OTHER in seconds(Event(STEP, 0, [Event(name, 1)]))]
    assert not unowned


def test_attention_of_torch_is_attention():
    q_BHSD = torch.randn(1, 2, 16, 8)
    with watched() as profile:
        F.scaled_dot_product_attention(q_BHSD, q_BHSD, q_BHSD, is_causal=True)
    found = owners(profile.function_events)
    assert {one.name for one in found} == {"attention", REST}
