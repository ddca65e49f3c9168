"""The wire format of gradients is raised where the error of their sum is too large: measured against FP64, decided
alike, recorded, and gone on with."""

from pathlib import Path

import pytest
import torch

from tests.contracts.observe import fixed_ceilings
from tests.models.shapes import KERNELS
from tests.parallel.communicate.exchanges import on_threads
from tests.ranks import on_ranks
from tests.training.tiny import rows, tiny
from tilewright.parallel.communicate.communicator import AsyncCommunicator
from tilewright.parallel.communicate.feedback import ErrorFeedback
from tilewright.parallel.communicate.sum_error import SumError
from tilewright.planner.machine import ceilings
from tilewright.training.hooks import sync_hook
from tilewright.training.session import train

QUIET = {
    "train__eval_interval": 0, "train__sample_tokens": 0, "log__report": "false", "train__global_batch_size": 4,
    "precision__mode": "fp32", "optim__warmup_steps": 0, "train__log_interval": 1, "checkpoint__interval": 5,
}  # fmt: skip
COPIES = {"parallel__dp_replicate": 2, "parallel__dp_shard": 1}


def summed(transport, wire, operation, parts_RN, fed):
    """What a rank gets of a sum that is measured, and what it notes."""
    errors = SumError(["data"])
    errors.measuring = True
    communicator = AsyncCommunicator(
        None, wire=wire, kernels=KERNELS, transport=transport, errors=errors, feedback=ErrorFeedback() if fed else None
    )
    x_N = parts_RN[transport.rank].clone()
    if operation == "all_reduce":
        found = communicator.async_all_reduce(x_N, name="g").wait()
    else:
        found = communicator.async_reduce_scatter(torch.empty(len(x_N) // transport.size), x_N, name="g").wait()
    return found, errors


@pytest.mark.parametrize("fed", [False, True])
@pytest.mark.parametrize("cancelling", [0.0, 0.9, 0.999])
@pytest.mark.parametrize("operation", ["all_reduce", "reduce_scatter"])
@pytest.mark.parametrize("wire", ["bf16", "fp8"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_the_error_that_is_measured_is_that_of_the_sum(ranks, wire, operation, cancelling, fed):
    """Against sums in FP64: also where gradients of ranks cancel, and the error is much of what is left."""
    generator = torch.Generator().manual_seed(ranks)
    parts_RN = torch.randn(ranks, 1536, generator=generator)
    parts_RN[1] -= cancelling * (parts_RN[0] + parts_RN[1])
    results = on_threads(ranks, lambda _, transport: summed(transport, wire, operation, parts_RN, fed))
    exact_N = parts_RN.double().sum(0)
    got_N = results[0][0] if operation == "all_reduce" else torch.cat([found for found, _ in results])
    want = float((got_N.double() - exact_N).norm() / exact_N.norm())
    squares = torch.tensor([errors._squares["data"] for _, errors in results], dtype=torch.float64).sum(0)
    measured = float((squares[0] / squares[1]).sqrt())
    print(f"{measured:.6f} measured, {want:.6f} of FP64")
    assert measured == pytest.approx(want, rel=1e-3), "FP32 sums of errors"
    assert want > 0


def test_a_sum_without_a_value_says_nothing():
    errors = SumError(["data", "dp_shard"])
    errors.add("data", torch.zeros(3), torch.zeros(3))
    assert errors.shares(None) == {}
    errors.add("data", torch.tensor([torch.nan]), torch.ones(1))
    assert str(errors.shares(None)) == "{'data': nan}"


@pytest.mark.parametrize("wire", ["bf16", "fp8"])
def test_widened_exchanges_send_what_they_are_told(wire):
    """FP32 sums are those of FP32, and what was owed is paid."""
    parts_RN = torch.randn(2, 1000, generator=torch.Generator().manual_seed(0))

    def run(transport):
        feedback = ErrorFeedback()
        communicator = AsyncCommunicator(None, wire=wire, kernels=KERNELS, transport=transport, feedback=feedback)
        found = []
        for now in (wire, "bf16", "fp32", "fp32"):
            communicator.widen(now)
            found.append(communicator.async_all_reduce(parts_RN[transport.rank].clone(), name="g").wait())
            feedback.commit()
        return found, {kind[2] for kind in communicator.traffic.total}

    for found, wires in on_threads(2, lambda _, transport: run(transport)):
        assert torch.equal(found[3], parts_RN.sum(0)), "nothing is owed any more"
        assert wires == {wire, "bf16", "fp32"}
        total = torch.stack(found).double().sum(0)
        owed = (total - 4 * parts_RN.double().sum(0)).abs().max()
        assert owed <= 4 * 2.0**-8 * 2.0**-4, "the loss of a loss, which is kept in BF16"


def runs(rank, data, folder, cases):
    """Runs whose format is raised, one that is resumed among them."""
    ceilings.measure = fixed_ceilings  # this process is the test's own
    sync_hook.EVERY = 2
    for name, stretches in cases.items():
        for changes in stretches:
            train(tiny(Path(data), Path(folder), **QUIET | changes | {"run__name": name}))


FP8 = {"parallel__grad_sync": "fp8", "parallel__grad_feedback": "true", "parallel__grad_sync_error": 1e-6}
SHARDS = {"parallel__dp_shard": 2}


RAISES = [(3, "fp8", "bf16"), (7, "bf16", "fp32")]
"""Of a limit that both formats exceed, in a run of ten steps."""


def raised(data, folder, cases):
    """By run, the steps at which its format was raised, and its rows of metrics."""
    on_ranks(2, runs, str(data), str(folder), cases)
    told, sent = {}, {}
    for name in cases:
        events = rows(folder / name / "events.jsonl")
        told[name] = [(e["step"], e["before"], e["now"]) for e in events if e["kind"] == "grad_sync"]
        sent[name] = [row for row in rows(folder / name / "metrics.jsonl") if "loss" in row]
    return told, sent


@pytest.mark.dist
def test_the_format_is_raised_and_stays(data, tmp_path):
    """Two raises, also where the run was stopped between them."""
    steady = COPIES | FP8 | {"optim__schedule": "constant"}
    cases = {
        "resumed": [steady | {"train__steps": 5}, steady | {"train__steps": 8}],
        "loose": [COPIES | FP8 | {"train__steps": 4, "parallel__grad_sync_error": 0.5}],
    }
    told, sent = raised(data, tmp_path, cases)
    assert told == {"resumed": RAISES, "loose": []}
    last = sent["resumed"][-1]
    assert "sent_bytes.dp_replicate.all_reduce.fp32" in last
    assert not any(name.endswith(("fp8", "bf16")) for name in last if name.startswith("sent_bytes."))
    first = sent["loose"][-1]
    assert 0 < first["grad_sync_error.dp_replicate"] < 0.2


@pytest.mark.slow
@pytest.mark.dist
def test_a_run_that_was_stopped_between_raises_is_the_one_that_was_not(data, tmp_path):
    """And shards raise at the same steps."""
    steady = COPIES | FP8 | {"optim__schedule": "constant"}
    cases = {
        "whole": [steady | {"train__steps": 10}],
        "resumed": [steady | {"train__steps": 5}, steady | {"train__steps": 10}],
        "shards": [SHARDS | FP8 | {"train__steps": 10}],
    }
    told, sent = raised(data, tmp_path, cases)
    assert told == dict.fromkeys(cases, RAISES)
    assert [row["loss"] for row in sent["whole"]] == [row["loss"] for row in sent["resumed"]]
