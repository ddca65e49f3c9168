"""Gradients of replicas in buckets: the sum over ranks, the same bits on all of them, however parameters are used.

The reference gathers each rank's own gradients, of a copy without buckets, and adds them in FP64.
"""

import contextlib
import random
import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.ranks import on_ranks
from tilewright.parallel.agree import OnAllRanksError
from tilewright.parallel.gradients import BUCKET_BYTES, GradientReduction

pytestmark = [pytest.mark.dist, pytest.mark.skipif(sys.platform == "win32", reason="gloo over a file store")]


class Net(nn.Module):
    """Layers of odd sizes; some shared, some frozen, some used at times, one with 16-bit weights, one convolution."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(7, 13)
        self.layers = nn.ModuleList(nn.Linear(13, 13, bias=i % 2 == 0) for i in range(4))
        self.layers[3].weight = self.layers[1].weight
        self.conv = nn.Conv2d(2, 3, 3, padding=1).to(memory_format=torch.channels_last)
        self.narrow = nn.Linear(13, 13).bfloat16()
        self.sometimes = nn.Linear(13, 13)
        self.never = nn.Parameter(torch.ones(5))
        self.frozen = nn.Linear(13, 13).requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(()))
        for param in self.narrow.parameters():
            param.grad_dtype = torch.float32

    def forward(self, ids, use, again):
        x = self.frozen(self.embedding(ids)) * self.scale
        for layer in self.layers:
            x = torch.tanh(layer(x))
        x = x + self.conv(x.T.expand(1, 2, -1, -1)).mean(1)[0].T
        x = x + self.narrow(x.bfloat16()).float()
        if use:
            x = x + self.sometimes(x)
        if again:  # an inner backward pass each: gradients of one parameter come twice
            for _ in range(2):
                x = checkpoint(self.layers[0], x, use_reentrant=True)
        return x.square().mean()


def passes(model, plan, rank, number, begin=lambda last: None):
    """The micro-batches of a step on a rank, each (uses `sometimes`, runs inner backward passes)."""
    for index, (use, again) in enumerate(plan[rank]):
        begin(index + 1 == len(plan[rank]))
        generator = torch.Generator().manual_seed(1000 * number + 10 * rank + index)
        model(torch.randint(7, (9,), generator=generator), use, again).backward()


def gathered(model):
    """For each parameter: gradients of all ranks, None where a rank has none."""
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, [None if p.grad is None else p.grad.clone() for p in model.parameters()])
    return list(zip(*found, strict=True))


def difference(model, mine, own, number):
    """What is wrong with the sums of a step, in words; None if nothing is."""
    for (name, param), sums, parts in zip(model.named_parameters(), mine, own, strict=True):
        present = [part for part in parts if part is not None]
        if not present:
            if param.grad is not None:
                return f"step {number}, {name}: a gradient though no rank used it"
            continue
        if any(total is None or not torch.equal(total, sums[0]) for total in sums):
            return f"step {number}, {name}: not the same on all ranks"
        want = torch.stack([part.double() for part in present]).sum(0)
        reach = torch.stack([part.double().abs() for part in present]).sum(0)
        off = (param.grad.double() - want).abs() - len(parts) * 2.0**-24 * reach  # one rounding for each addition
        if param.grad.dtype != torch.float32 or param.grad.stride() != param.stride() or bool((off > 0).any()):
            return f"step {number}, {name}: off by {float(off.max())}, {param.grad.dtype}, {param.grad.stride()}"
    return None


def steps(rank, plans, bucket_bytes):
    """Steps of plans, the gradients of each against the reference."""
    torch.manual_seed(0)
    model = Net()
    plain = Net()
    plain.load_state_dict(model.state_dict())
    params = sorted((p for p in model.parameters()), key=lambda p: p.ndim < 2)  # as groups of optimizers have them
    reduction = GradientReduction(model, params, dist.group.WORLD, everyone=dist.group.WORLD, bucket_bytes=bucket_bytes)
    for number, plan in enumerate(plans):
        passes(plain, plan, rank, number)
        passes(model, plan, rank, number, lambda last: reduction.begin(last=last))
        reduction.finish()
        if words := difference(model, gathered(model), gathered(plain), number):
            return words
        for param in (*model.parameters(), *plain.parameters()):
            param.grad = None
        if number == 2:  # a stage of training ends
            for found in (model, plain):
                found.layers[2].requires_grad_(False)
    return None


def drawn(ranks, count, seed):
    """Plans of steps: up to three micro-batches on each rank, also none, not as many on each."""
    draw = random.Random(seed)
    return [
        [[(draw.random() < 0.5, draw.random() < 0.3) for _ in range(draw.randrange(4))] for _ in range(ranks)]
        for _ in range(count)
    ]


@pytest.mark.parametrize(("ranks", "bucket_bytes"), [(2, 2000), (3, BUCKET_BYTES), (3, 1)])
def test_sums_are_right_and_the_same_on_all_ranks(ranks, bucket_bytes):
    for found in on_ranks(ranks, steps, drawn(ranks, 12, ranks), bucket_bytes):
        assert found is None, found


def overlapping(rank):
    """Buckets that are gone when the first layer's gradient comes, in the last of two passes; and in the first."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(16, 16) for _ in range(6)])
    reduction = GradientReduction(
        model, list(model.parameters()), dist.group.WORLD, everyone=dist.group.WORLD, bucket_bytes=2000
    )
    gone = []
    model[0].weight.register_hook(lambda grad: gone.append(len(reduction._sent)))
    for last in (False, True):
        reduction.begin(last=last)
        model(torch.randn(3, 16)).sum().backward()
    reduction.finish()
    return gone


def test_buckets_are_sent_during_the_last_backward_pass_alone():
    for gone in on_ranks(2, overlapping):
        assert gone[0] == 0
        assert gone[1] >= 4


def stopping(rank):
    """Rank 1 finds no memory, once before and once in the middle of the last backward pass; then all try again."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(16, 16) for _ in range(4)])
    reduction = GradientReduction(
        model, list(model.parameters()), dist.group.WORLD, everyone=dist.group.WORLD, bucket_bytes=2000
    )

    def fail(grad):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    said = []
    for where in ("backward", "forward", None):
        handle = model[1].weight.register_hook(fail) if rank == 1 and where == "backward" else None
        with contextlib.suppress(OnAllRanksError), reduction.passes(torch.device("cpu")):
            reduction.begin(last=True)
            if rank == 1 and where == "forward":
                raise MemoryError
            model(torch.full((1, 16), rank + 1.0)).sum().backward()
            reduction.passed()
            said.append(where)
        if handle is not None:
            handle.remove()
        if where is not None:
            for param in model.parameters():
                param.grad = None
    reduction.finish()
    return said, model[3].bias.grad.tolist(), len(reduction._sent)


def test_a_rank_without_memory_stops_all_and_the_next_try_is_right():
    for rank, (said, total, left) in enumerate(on_ranks(2, stopping)):
        assert said == ([None] if rank else ["backward", "forward", None])
        assert total == [2.0] * 16, "the sum of both ranks' gradients, of the last try alone"
        assert not left


def by_hand(rank):
    """A loop that tells nothing of its micro-batches."""
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    reduction = GradientReduction(model, list(model.parameters()), dist.group.WORLD, everyone=dist.group.WORLD)
    for _ in range(2):
        model(torch.full((1, 4), rank + 1.0)).sum().backward()
        reduction.finish()
    return model.bias.grad.tolist()


def test_a_loop_may_call_finish_alone():
    for found in on_ranks(2, by_hand):
        assert found == [2 * (2 + 1)] * 4, "what is there, and one pass more, on both ranks"
