"""A CUDA allocator that really finds no memory: the step is computed again. Run with `pytest -m gpu`."""

import pytest
import torch

from tests.gpu.device import ON_A_GPU
from tests.training.test_regroup import looked_at
from tilewright.core.hardware import detect_machine
from tilewright.core.memory_plan import MemoryPlan
from tilewright.models.build import init_weights
from tilewright.models.decoder.config import DecoderConfig
from tilewright.models.decoder.decoder import Decoder
from tilewright.ops.kernels import Kernels
from tilewright.optim.adam import DeepSeekAdam
from tilewright.optim.clip import GradClip
from tilewright.training.executor.activation_policy import ActivationPolicy
from tilewright.training.executor.standard import StandardExecutor
from tilewright.training.hooks.adaptive_replanner import AdaptiveReplanner
from tilewright.training.planning.describe_memory_plan import words

pytestmark = ON_A_GPU
SHAPE = DecoderConfig.of(vocab_size=512, dim=512, num_heads=8, num_layers=8, ffn_dim=1536)
ROWS, LENGTH = 8, 1024


@pytest.fixture(autouse=True)
def _all_of_the_memory():
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)
    torch.cuda.empty_cache()


def make():
    model = Decoder(SHAPE, Kernels(detect_machine("cuda"), compile=False))
    init_weights(model, 0)
    model.to("cuda").train()
    policy = ActivationPolicy(model, MemoryPlan.uniform(SHAPE.num_layers))
    return StandardExecutor(model, DeepSeekAdam(model.parameters()), clip=GradClip(1.0), device="cuda", policy=policy)


def batch(seed):
    ids = torch.randint(0, 512, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(seed))
    return [{"input_ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}]


def test_the_step_is_computed_again_with_less_kept():
    """Losses agree to what the order of sums in CUDA's attention backward leaves open."""
    plain = make()
    expected = [plain.step(batch(seed), 1e-3).loss for seed in range(3)]
    torch.cuda.synchronize()
    peak, held = torch.cuda.max_memory_reserved(), torch.cuda.memory_allocated()
    del plain
    torch.cuda.empty_cache()
    executor, events = make(), []
    replanner = AdaptiveReplanner(
        executor, lambda: None, budget=lambda: float("inf"), peaks=dict,
        record_event=lambda step, text, **numbers: events.append((step, numbers["trigger"])),
    )  # fmt: skip
    losses = [looked_at(replanner, 1, batch(0), 1e-3).loss]
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((held + 0.7 * (peak - held)) / total)
    losses += [looked_at(replanner, 2 + seed, batch(1 + seed), 1e-3).loss for seed in range(2)]
    assert events
    assert {trigger for _, trigger in events} == {"out_of_memory"}
    assert words(executor.memory_plan) != words(MemoryPlan.uniform(SHAPE.num_layers))
    assert losses == pytest.approx(expected, rel=1e-4)
