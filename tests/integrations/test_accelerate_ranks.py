"""Converted models under accelerate on two processes: DDP and FSDP2 take the steps of one process with all rows."""

import math

import pytest
import torch
from torch import nn

from tests.integrations.test_accelerate import FP16, net
from tests.ranks import on_ranks
from tilewright.core.errors import ConfigError
from tilewright.precision.convert import convert
from tilewright.precision.loss_scaling.loss_scale import DynamicScaler

pytestmark = pytest.mark.dist
KINDS, POLICIES, EVERY = ("ddp", "fsdp2"), {"bf16": "bf16_mixed", "fp16": FP16}, (1, 2)
CASES = [(kind, name, every) for kind in KINDS for name in POLICIES for every in EVERY]


def rows(rank, number=4):
    """Batches of one rank."""
    generator = torch.Generator().manual_seed(rank)
    return [
        (torch.randn(6, 8, generator=generator), torch.randint(0, 4, (6,), generator=generator)) for _ in range(number)
    ]


def prepared(kind, policy, *, every=1, scaler=None):
    """(accelerator, model, optimizer) of a run, as a user makes them."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.state import AcceleratorState, GradientState
    from accelerate.utils import DistributedType

    from tilewright.integrations.accelerate import convert_for

    AcceleratorState._reset_state(reset_partial_state=True)  # it keeps its settings for the process
    GradientState._reset_state()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=every)
    if kind == "fsdp2":  # what accelerate itself decides where there are GPUs
        accelerator.state.distributed_type = DistributedType.FSDP
        accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(fsdp_version=2, cpu_ram_efficient_loading=False)
    model = net()
    convert_for(accelerator, model, policy, scaler=scaler)
    return accelerator, *accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))


def trained(accelerator, model, optimizer, batches):
    """Loss of each batch, and norm of each step's gradient as it is clipped."""
    losses, norms = [], []
    for x, labels in batches:
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(x), labels)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
                norms.append(float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm))
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses, norms


def plain(policy, every):
    """The same of one process: a plain loop over the rows of both."""
    model = convert(net(), policy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses, norms = [[], []], []
    for index, batches in enumerate(zip(rows(0), rows(1), strict=True)):
        for rank, (x, labels) in enumerate(batches):
            loss = nn.functional.cross_entropy(model(x), labels)
            (loss / (2 * every)).backward()
            losses[rank].append(loss.item())
        if (index + 1) % every == 0:
            norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
            optimizer.step()
            optimizer.zero_grad()
    return losses, norms


def main(rank, folder):
    from accelerate.utils import DistributedType

    found = {case: trained(*prepared(case[0], POLICIES[case[1]], every=case[2]), rows(rank)) for case in CASES}
    for kind in KINDS:
        scaler = DynamicScaler(2.0**10)
        given = prepared(kind, FP16, scaler=scaler)
        bad = [(x * (math.inf if rank and index == 1 else 1.0), labels) for index, (x, labels) in enumerate(rows(rank))]
        trained(*given, bad)
        weights = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in given[1].parameters()]
        found[kind, "overflow"] = scaler.skipped, scaler.scale_value, all(bool(w.isfinite().all()) for w in weights)
        try:
            prepared(kind, "pure_fp16")
        except ConfigError as error:
            found[kind, "pure_fp16"] = str(error)
    scaler = DynamicScaler(4.0)
    accelerator, *_ = prepared("fsdp2", FP16, scaler=scaler)
    accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.save_state(folder)
    scaler.load_state_dict(DynamicScaler(64.0).state_dict())
    accelerator.load_state(folder)
    found["loaded"] = scaler.scale_value
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """One launch for all questions."""
    return on_ranks(2, main, str(tmp_path_factory.mktemp("state")))


@pytest.mark.parametrize(("kind", "name", "every"), CASES)
def test_ranks_take_the_steps_of_one_process(found, kind, name, every):
    """Also the norms that are clipped: they are those of true gradients, whatever the loss scale. Sums of FP32 have
    another order, and after a step a rounding of matmuls to 8 or 11 bits may fall the other way."""
    losses, norms = plain(POLICIES[name], every)
    for rank in range(2):
        assert found[rank][kind, name, every][0] == pytest.approx(losses[rank], rel=2e-3)
        assert found[rank][kind, name, every][1] == pytest.approx(norms, rel=5e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_an_overflow_of_one_rank_skips_the_step_of_all(found, kind):
    for of_rank in found:
        assert of_rank[kind, "overflow"] == (1, 2.0**9, True)


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_in_16_bits_are_refused_in_words(found, kind):
    for of_rank in found:
        assert "cannot train parameters that are stored in 16 bits" in of_rank[kind, "pure_fp16"]
        assert 'convert(model, "hybrid")' in of_rank[kind, "pure_fp16"]


def test_the_scale_is_in_a_state_of_fsdp2(found):
    assert [of_rank["loaded"] for of_rank in found] == [4.0, 4.0]
