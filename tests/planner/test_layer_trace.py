"""One pass through a layer tells what three passes keep, and what its token-wise part is called with."""

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
from tilewright.planner.trace.layer_trace import MLP_NAME, Measures, _Checkpointed, _flops_behind_last_saved, _run
from tilewright.planner.trace.trace import Tracer
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
    found = tracer.trace(1, Measures.MEMORY).layers.memory
    apart, busy = [], []

    def measure(layer, args, kwargs):
        if busy:
            return
        busy.append(layer)
        kept = [
            _run(_Checkpointed(layer, CONTEXTS[name]), args, kwargs, backward=False).kept
            for name in ("selective", "matmuls", "attention")
        ]
        part = next(child for name, child in layer.named_children() if MLP_NAME.search(name))
        calls = []
        handle = part.register_forward_pre_hook(lambda _, a, k: calls.append((a, k)), with_kwargs=True)
        layer(*args, **kwargs)
        handle.remove()
        alone = _run(part, *calls[0])
        size = next(value for value in calls[0][0] if isinstance(value, Tensor)).nbytes
        apart.append([*kept, alone.kept - size, alone.work])
        busy.clear()

    with tracer._faked():
        for layer in tracer._layers:
            layer.register_forward_pre_hook(measure, with_kwargs=True)
        ids, arguments = text_inputs(tracer.model, 1, 24, torch.device("cpu"), tracer.calls.styles[0])
        with torch.no_grad():
            tracer.model.net(input_ids=ids, **arguments)
    assert apart == [
        [one.kept_selective, one.kept_matmuls, one.kept_attention, one.mlp_kept, one.mlp_work] for one in found
    ]
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
    assert _flops_behind_last_saved(layer, (x,), {}) == forward - (again - plain)
