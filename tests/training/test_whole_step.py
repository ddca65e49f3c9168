"""A step that finds no memory at an allocation drawn at random: computed again, it is the step that found some.

Everything that a step changes is compared bit by bit: weights, buffers, codes, optimizer states, generators, clipping,
loss scale, counts of matmuls.
"""

import random

import pytest
import torch

from tests.models.shapes import KERNELS, make_decoder
from tests.training.out_of_memory import Allocator
from tests.training.test_layer_major_step import Dropped, steps
from tilewright.core.hardware import detect_machine
from tilewright.memory.layer_major.rollback import RollbackBuffer
from tilewright.memory.tracking.byte_tables import is_out_of_memory
from tilewright.models.layerwise.layer_view import find_layer_groups
from tilewright.ops.kernels import Kernels
from tilewright.optim.adam import DeepSeekAdam
from tilewright.optim.clip import GradClip
from tilewright.optim.param_groups import decay_groups
from tilewright.precision.controller.controller_settings import ControllerSettings
from tilewright.precision.controller.precision_controller import PrecisionController
from tilewright.precision.convert import convert
from tilewright.precision.float8.weight_cache import QuantizedWeights
from tilewright.precision.loss_scaling.loss_scale import DynamicScaler
from tilewright.precision.policy.policy import Policy
from tilewright.training.executor.layer_major import LayerMajorExecutor
from tilewright.training.executor.standard import StandardExecutor
from tilewright.training.executor.step_transaction import TRIES, PartialUpdateError

DRAWS = 1
TAKES_MEMORY = Kernels(detect_machine("cpu"), {"adam": "ref", "low_bit_adam": "ref"}, compile=False)
"""Updates that allocate: C++ and torch's fused kernel take nothing once they write."""
LR = 1e-3
MICROBATCHES = steps(1)[0][:2]

CASES = {
    "dense": {},
    "experts": {"shape": "gqa_moe"},
    "recomputed": {"shape": "gqa_moe", "checkpoint": "full"},
    "dropout": {"dropout": True, "checkpoint": "selective"},
    "fp16": {"mode": "hybrid"},
    "fp8": {"mode": "fp8_tile"},
    "control": {"mode": "fp8_tile", "control": True},
    "8bit": {"mode": "bf16_mixed", "optim": {"moments": "8bit"}, "bf16": True},
    "stochastic": {"optim": {"moments": "bf16", "master": "stochastic"}, "bf16": True},
    "split24": {"optim": {"moments": "8bit", "master": "split24"}, "bf16": True},
    "exact": {"layer_major": "exact", "shape": "gqa_moe"},
    "tied": {"layer_major": "exact", "shape": "tied", "group": 2},
    "delayed": {"layer_major": "delayed", "dropout": True},
    "journal": {"layer_major": "journal", "shape": "gqa_moe"},
    "exact_fp8": {"layer_major": "exact", "mode": "fp8_tile", "shape": "tied"},
    "lagged_8bit": {"layer_major": "delayed", "optim": {"moments": "8bit", "master": "split24"}, "bf16": True},
}


def make(
    shape="gqa",
    *,
    mode="",
    dropout=False,
    checkpoint="none",
    bf16=False,
    optim=(),
    control=False,
    layer_major="",
    group=1,
):
    """An executor two steps into a run, in the state that a case asks for."""
    model = make_decoder(shape).train()
    if bf16:
        model.to(torch.bfloat16)
    if mode:
        convert(model, Policy(mode, keep="value" if control else "qdata"), kernels=KERNELS)
    if dropout:
        for block in model.blocks:
            block.mlp = Dropped(block.mlp)
    model.activation_checkpoint = checkpoint
    optimizer = DeepSeekAdam(decay_groups(model, 0.1), kernels=TAKES_MEMORY, **dict(optim))
    weights = QuantizedWeights(model, optimizer) if mode == "fp8_tile" else None
    torch.manual_seed(7)
    clip = GradClip(0.5, adaptive=1.1)
    if layer_major:
        rollback_buffer = RollbackBuffer("host", "cpu") if layer_major == "journal" else None
        layer_groups = find_layer_groups(model, model, group)
        delayed = layer_major != "exact"
        return LayerMajorExecutor(
            model,
            model,
            layer_groups,
            optimizer,
            clip=clip,
            delayed=delayed,
            rollback_buffer=rollback_buffer,
            weights=weights,
        )
    scaler = DynamicScaler(init_scale=1024.0, window=2) if mode == "hybrid" else None
    found = PrecisionController(model, ControllerSettings(budget=0.5)) if control else None
    return StandardExecutor(model, optimizer, clip=clip, scaler=scaler, control=found)


def state_of(executor):
    """All that a step changes."""
    model, optimizer = executor.model, executor.optimizer
    found = {f"model.{name}": value for name, value in (*model.named_parameters(), *model.named_buffers())}
    for number, param in enumerate(p for group in optimizer.param_groups for p in group["params"]):
        found |= {f"states.{number}.{name}": value for name, value in optimizer.state[param].items()}
        assert param.grad is None
    if isinstance(executor, StandardExecutor):  # elsewhere pieces that ran twice count twice
        found |= {f"counts.{name}": m.counts for name, m in model.named_modules() if "counts" in vars(m)}
    found["rng"] = torch.get_rng_state()
    found["load"] = torch.zeros(0) if model._load_LE is None else model._load_LE
    small = [executor.clip.state_dict(), executor._bad_steps.in_a_row]
    if isinstance(executor, StandardExecutor):
        small += [part.state_dict() for part in (executor.scaler, executor.control) if part is not None]
    elif executor.delayed is not None:
        small.append(executor.delayed.state_dict())
    return {name: value.clone() for name, value in found.items()}, small


def assert_same(state, expected):
    tensors, small = state
    wanted, wanted_small = expected
    assert tensors.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(tensors[name], value), f"{name} is another one"
    assert small == wanted_small


def started(case):
    executor = make(**CASES[case])
    executor.step(MICROBATCHES, LR)
    return executor


FEW = ("dropout", "control", "exact_fp8", "lagged_8bit")
"""Each executor, with experts, and what an update keeps; the others vary these."""


@pytest.mark.parametrize("draws", [DRAWS, pytest.param(12 * DRAWS, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "case", [case if case in FEW else pytest.param(case, marks=pytest.mark.slow) for case in CASES]
)
def test_no_memory_at_any_allocation(case, draws):
    """Of an error that comes out, the second call is the step; where none does, the step continued by itself."""
    executor = started(case)
    before = state_of(executor)
    with Allocator() as allocator:
        result = executor.step(MICROBATCHES, LR)
    after = state_of(executor)
    draw = random.Random(case)
    last = allocator.count
    places = [*draw.sample(range(last), draws), draw.randrange(max(0, last - 30), last)]
    for place in places:
        executor = started(case)
        assert_same(state_of(executor), before)
        again = None
        with Allocator([place], kind=draw.choice(["device", "cpu", "python"])) as allocator:
            try:
                again = executor.step(MICROBATCHES, LR)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
        assert len(allocator.failed) == 1
        if again is None:
            assert_same(state_of(executor), before)
            again = executor.step(MICROBATCHES, LR)
        assert_same(state_of(executor), after)
        assert (again.loss, again.grad_norm, again.aux) == (result.loss, result.grad_norm, result.aux), place


def test_the_first_step_makes_states_that_are_whole():
    executor = make()
    with Allocator() as allocator:
        executor.step(MICROBATCHES, LR)
    after, places = state_of(executor), range(allocator.count - 40, allocator.count, 5)
    for place in places:
        executor = make()
        with Allocator([place]) as allocator:
            try:
                executor.step(MICROBATCHES, LR)
            except torch.OutOfMemoryError:
                executor.step(MICROBATCHES, LR)
        assert_same(state_of(executor), after)


@pytest.mark.parametrize("case", ["stochastic", "exact", "delayed", "journal"])
def test_what_cannot_be_brought_to_its_end_is_said_or_undone(case):
    """Every allocation fails from some point of the update on: with a rollback buffer the step is undone, without one
    lost."""
    executor = started(case)
    before = state_of(executor)
    middle = _middle_of_updates(executor)
    executor = started(case)
    with Allocator(range(middle, middle + 10_000)) as allocator:
        expected = torch.OutOfMemoryError if case == "journal" else PartialUpdateError
        with pytest.raises(expected) as caught:
            executor.step(MICROBATCHES, LR)
    assert len(allocator.failed) >= TRIES
    if case == "journal":
        assert_same(state_of(executor), before)
        executor.step(MICROBATCHES, LR)
        return
    assert "updated" in str(caught.value)
    assert {"got", "need", "try"} <= {line.split()[0] for line in str(caught.value).splitlines()[1:]}


def _middle_of_updates(executor) -> int:
    """Number of an allocation half-way between the first update of a weight and the end of the step."""
    seen = []
    with Allocator() as allocator:
        real = executor.optimizer.step_params

        def step_params(*args):
            seen.append(allocator.count)
            real(*args)

        executor.optimizer.step_params = step_params
        executor.step(MICROBATCHES, LR)
    return (seen[0] + allocator.count) // 2


def test_other_errors_are_not_swallowed():
    executor = make()
    with pytest.raises(KeyError):
        executor.step([{"labels": MICROBATCHES[0]["labels"]}], LR)
