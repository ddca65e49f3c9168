"""In stages each weight is quantised once per step, whatever the schedule, the number of micro-batches, and what is
recomputed: passes find the codes of the step."""

from collections import Counter
from pathlib import Path

import pytest

from tests.contracts.observe import fixed_ceilings
from tests.ranks import on_ranks
from tests.training.test_pipeline_run import FP8, INTERLEAVED, PIPED, RUN
from tests.training.tiny import tiny
from tilewright.ops.kernels import Kernels
from tilewright.planner.machine import ceilings
from tilewright.precision.float8.linear import float8_layers
from tilewright.training.hooks.step_hook import StepHook
from tilewright.training.session import train

pytestmark = pytest.mark.dist
ZBV = PIPED | {"parallel__schedule": "zbv"}
FULL = {"train__activation_checkpoint": "full"}
CASES = {
    "1f1b of 2": PIPED | {"train__global_batch_size": 4},
    "1f1b of 6": PIPED | FULL,
    "zbv of 6": ZBV | FULL,
    "zbv of 3, documents": ZBV | FULL | {"train__global_batch_size": 6, "data__rows": "documents"},
    "interleaved of 4": INTERLEAVED | {"train__global_batch_size": 8},
    "gpipe of 9": PIPED | {"train__global_batch_size": 18, "parallel__schedule": "gpipe"},
}


class Quantised(StepHook):
    """How often each weight was quantised since the step before, by step."""

    next_step = 1

    def __init__(self, model, counted):
        self._names = {layer.weight.data_ptr(): name for name, layer in float8_layers(model).items()}
        self._counted, self.steps = counted, []

    def after_step(self, step, result):
        self.next_step = step.number + 1
        found = Counter(self._names[address] for address in self._counted if address in self._names)
        self.steps.append({name: found[name] for name in self._names.values()})
        self._counted.clear()


def counts(rank, data, folder, cases):
    """By case what each step counted on a rank."""
    ceilings.measure = fixed_ceilings  # this process is the test's own
    before, counted, found = Kernels.quantize, [], {}

    def quantize(self, x, *args, **named):
        counted.append(x.data_ptr())
        return before(self, x, *args, **named)

    Kernels.quantize = quantize
    for number, (name, changes) in enumerate(cases.items()):
        hooks = []

        def hook(setup, parts, hooks=hooks):
            counted.clear()
            hooks.append(Quantised(parts.model, counted))
            return hooks[0]

        more = {"run__name": str(number), "train__steps": 3, "train__eval_interval": 0, "train__sample_tokens": 0}
        train(tiny(Path(data), Path(folder), **RUN | FP8 | changes | more), hooks=[hook])
        found[name] = hooks[0].steps
    return found


def check(cases, data, folder):
    ranks = on_ranks(2, counts, str(data), str(folder), {name: CASES[name] for name in cases})
    for name in cases:
        for rank, of_rank in enumerate(ranks):
            assert len(of_rank[name]) == 3
            for step, found in enumerate(of_rank[name], 1):
                assert len(found) >= 2 * 7, f"{name}: weights of two layers, {sorted(found)}"
                wrong = {weight: times for weight, times in found.items() if times != 1}
                assert not wrong, f"{name}, rank {rank}, step {step}: {wrong}"


def test_once_per_step(data, tmp_path):
    check(["zbv of 3, documents"], data, tmp_path)


@pytest.mark.slow
def test_whatever_the_schedule_and_the_number_of_micro_batches(data, tmp_path):
    check(list(CASES), data, tmp_path)
