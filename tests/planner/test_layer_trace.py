"""One pass through a layer tells what three passes keep, what passes of their own would move, and what its token-wise
part is called with."""

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.planner.families import FAMILIES
from tests.planner.rates import make_machine
from tests.planner.test_trace import recipe_of
from tilewright.models.base.checkpointing import CONTEXTS
from tilewright.planner.model.skeleton import skeleton_of
from tilewright.planner.trace.byte_counter import MatmulCounter
from tilewright.planner.trace.fake_model import text_inputs
from tilewright.planner.trace.layer_trace import MLP_NAME, Measures, _run, _Selected, trace_layers
from tilewright.planner.trace.model_trace import Tracer
from tilewright.precision.policy.policy import Policy

pytest.importorskip("transformers")
CASES = [
    ("deepseek_v3", "bf16_mixed"),
    pytest.param("llama", "fp8_tile", marks=pytest.mark.slow),
    pytest.param("gpt2", "bf16_mixed", marks=pytest.mark.slow),
    pytest.param("mixtral", "fp8_tile", marks=pytest.mark.slow),
    pytest.param("gemma3_text", "fp8_tile", marks=pytest.mark.slow),
    pytest.param("qwen3_moe", "pure_fp16", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("name", "mode"), CASES)
def test_one_pass_tells_what_each_mode_keeps(name, mode, tmp_path):
    recipe = recipe_of(FAMILIES[name], tmp_path, precision={"mode": mode}, data={"seq_len": 24})
    skeleton = skeleton_of(recipe, 2)
    policy = Policy.from_section(recipe.precision, "cpu")
    tracer = Tracer(skeleton.model, skeleton.names, recipe, policy, make_machine())
    layers = tracer.trace(1, Measures.MEMORY | Measures.TRAFFIC).layers
    found = layers.memory
    apart, traffic, busy = [], [], []

    def measure(layer, args, kwargs):
        if busy:
            return
        busy.append(layer)
        kept = [
            _run(
                partial(checkpoint, layer, use_reentrant=False, context_fn=CONTEXTS[name]), args, kwargs, work=False
            ).kept
            for name in ("selective", "matmuls", "attention")
        ]
        part = next(child for name, child in layer.named_children() if MLP_NAME.search(name))
        calls = []
        handle = part.register_forward_pre_hook(lambda _, a, k: calls.append((a, k)), with_kwargs=True)
        layer(*args, **kwargs)
        handle.remove()
        alone, plain = _run(part, *calls[0]), _run(layer, args, kwargs)
        size = next(value for value in calls[0][0] if isinstance(value, Tensor)).nbytes
        apart.append([*kept, alone.kept - size, alone.work, plain.kept, plain.work])
        traffic.append(_run(layer, args, kwargs, traffic=True, work=False).traffic)
        busy.clear()

    with tracer._faked():
        for layer in tracer._layers:
            layer.register_forward_pre_hook(measure, with_kwargs=True)
        ids, arguments = text_inputs(tracer.model, 1, 24, torch.device("cpu"), tracer.calls.styles[0])
        with torch.no_grad():
            tracer.model.net(input_ids=ids, **arguments)
    names = ("kept_selective", "kept_matmuls", "kept_attention", "mlp_kept", "mlp_work", "kept", "work")
    assert apart == [[getattr(one, name) for name in names] for one in found]
    assert traffic == list(layers.traffic)
    # Attention with dropout is no fused operation on a CPU, and its products are matmuls like others.
    assert all((one.kept_matmuls < one.kept_selective) == (name != "gpt2") for one in found)


@given(st.lists(st.sampled_from(("linear", "frozen", "silu", "tanh", "twice")), max_size=5))
def test_flops_behind_what_is_saved_are_those_that_checkpoint_does_not_repeat(kinds):
    """Also where backward wants nothing of the end (`twice`), or a result (`tanh`)."""

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.kinds = ("linear", *kinds)
            self.linears = nn.ModuleList(nn.Linear(4, 4).requires_grad_(kind != "frozen") for kind in self.kinds)

        def forward(self, x):
            for kind, linear in zip(self.kinds, self.linears, strict=True):
                x = {"silu": F.silu, "tanh": torch.tanh, "twice": lambda x: 2 * x}.get(kind, linear)(x)
            return x

    layer, x = Layer(), torch.zeros(3, 4)

    def flops(run):
        edge = x.clone().requires_grad_()
        with MatmulCounter() as counter:
            out = run(edge)
            once = counter.flops
            out.backward(torch.empty_like(out), inputs=[edge])
        return once, counter.flops

    (forward, plain), (_, again) = flops(layer), flops(lambda x: checkpoint(layer, x, use_reentrant=False))
    selected = _Selected()
    with selected.dropping():
        _run(layer, (x,), {}, work=False, live=selected)
    assert selected.flops_behind == forward - (again - plain)


def test_a_run_ends_behind_the_last_layer_and_a_layer_is_measured_where_it_comes_first():
    first, second, calls = nn.Linear(4, 4), nn.Linear(4, 4), []

    def run():
        for name, layer in (("first", first), ("again", first), ("second", second), ("behind", first)):
            calls.append(name)
            layer(torch.zeros(2 if name == "first" else 3, 4))

    found = trace_layers([second, first], run, Measures.TRAFFIC)
    assert calls == ["first", "again", "second"]
    assert [len(part) for part in (found.memory, found.traffic, found.flops)] == [0, 2, 0]
    assert found.traffic[1] == _run(first, (torch.zeros(2, 4),), {}, traffic=True).traffic
    with pytest.raises(ValueError, match="does not run"):
        trace_layers([first, nn.Linear(4, 4)], run)
