"""Rows that travel to experts in FP8: bytes, what arrives, and gradients against one process that rounds alike."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.draws import examples
from tests.models.shapes import KERNELS
from tests.parallel.inside.experts.spread import Case, compare, world_of
from tests.parallel.inside.experts.test_codes import BOUNDS
from tests.parallel.inside.experts.test_parity import check
from tests.ranks import on_ranks
from tilewright.formats.quantize import quantize
from tilewright.formats.tiled import FP8_ROW
from tilewright.parallel.communicate.wire_messages import pack, unpack
from tilewright.parallel.inside.experts.exchange import ExpertExchange

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
WIDTHS = [128, 576, 64, 1, 200]
EXPERTS = 4


def drawn(rows, width, dtype, seed, spread=6):
    """Rows whose sizes differ by powers of two."""
    generator = torch.Generator().manual_seed(seed)
    sizes = 2.0 ** torch.randint(-spread, spread + 1, (rows, 1), generator=generator)
    return (torch.randn(rows, width, generator=generator) * sizes).to(dtype)


def _exchanged(rank, dtype):
    world = world_of(Case(2))
    found = []
    for width in WIDTHS:
        for counts in (
            [[3, 0, 2, 7], [1, 4, 0, 5]],
            [[0] * 4, [2, 1, 3, 1]],
            [[0] * 4] * 2,
            [[5, 6, 0, 0], [7, 1, 0, 0]],
        ):
            exchange = ExpertExchange(world.experts, EXPERTS, dispatch="fp8", kernels=KERNELS)
            as_it_is = ExpertExchange(world.experts, EXPERTS)
            rows = [drawn(sum(counts[other]), width, dtype, 10 * width + other) for other in range(2)]
            seen = []

            def run(parts, seen=seen, exchange=exchange):
                seen.append([x.detach().clone() for x in parts])
                return [x * (expert + 1) for x, expert in zip(parts, exchange.held, strict=True)]

            counts_E = torch.tensor(counts[rank])
            x_PD = rows[rank].clone().requires_grad_()
            as_it_is(rows[rank], counts_E, lambda parts: list(parts))
            plain = world.experts.traffic.counter.take()
            out_PD = exchange(x_PD, counts_E, run)
            want = quantize(rows[rank], FP8_ROW).dequantize(dtype)
            factor = torch.arange(1, EXPERTS + 1).repeat_interleave(counts_E)[:, None].to(dtype)
            assert torch.equal(out_PD, want * factor), (width, counts)
            for expert, got in zip(exchange.held, seen[0], strict=True):
                parts = [rows[other].split(counts[other])[expert] for other in range(2)]
                assert torch.equal(got, quantize(torch.cat(parts), FP8_ROW).dequantize(dtype)), "whoever sent them"
            out_PD.backward(torch.ones_like(out_PD))
            assert torch.equal(x_PD.grad, factor.expand_as(x_PD)), "gradients pass as they are"
            kinds = world.experts.traffic.counter.take()
            name = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
            there = kinds["ep", "all_to_all", "fp8"].sent_bytes if ("ep", "all_to_all", "fp8") in kinds else 0
            back = plain["ep", "all_to_all", name].sent_bytes
            found.append((width, there, back, kinds["ep", "all_to_all", name].sent_bytes))
    return found


@pytest.mark.dist
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_arrive_rounded_once_and_gradients_pass(dtype):
    for found in on_ranks(2, _exchanged, dtype):
        for width, there, plain, back in found:
            # of a forward pass as it is half goes there; results, and gradients both ways, are as they were
            own = width * dtype.itemsize
            assert there % (width + -(-width // 128)) == 0
            rows = there // (width + -(-width // 128))
            assert plain - back <= rows * own
            if width >= 64:
                assert there <= 0.53 * rows * width * 2, "of BF16"


@examples(40)
@given(st.integers(1, 40), st.sampled_from([128, 64, 200]), st.sampled_from(DTYPES), st.integers(0, 2**30))
def test_codes_made_on_arrival_round_once_but_in_subnormals(rows, width, dtype, seed):
    """An expert's matmuls read row-wise and column-wise copies of what has arrived."""
    sent = drawn(rows, width, dtype, seed)
    arrived = unpack(pack(sent, "fp8", KERNELS), width, "fp8")
    assert torch.equal(quantize(arrived, FP8_ROW).dequantize(), arrived), "rows have the values that were sent"
    column = quantize(arrived.T.contiguous(), FP8_ROW)
    again = column.dequantize().T
    tile = column.scale.repeat_interleave(128, 1)[:, :rows].T
    normal = arrived.abs() >= 2.0**-6 * tile  # E4M3's smallest one
    assert torch.equal(again[normal], arrived[normal])
    assert bool(((again - arrived).abs() <= 2.0**-10 * tile).all()), "half of the smallest step"


FULL = {"activation_checkpoint": "full"}
EXACT = [Case(2, kind="gqa_moe", dispatch="fp8", batches="last"), Case(2, kind="deepseek", dispatch="fp8", number=2)]
ROUNDED = [
    Case(2, kind="gqa_moe", mode="fp8_tile", dispatch="fp8", settings=FULL),
    Case(2, kind="deepseek", mode="bf16_mixed", dispatch="fp8"),
]
MORE = [Case(2, kind="deepseek", dispatch="fp8", number=1), Case(2, kind="deepseek", mode="fp8_tile", dispatch="fp8")]
MORE += [Case(2, kind="gqa_moe", mode=mode, dispatch="fp8", settings=FULL) for mode in ("fp32", "bf16_mixed")]


@pytest.mark.dist
@pytest.mark.support("fp8", "experts_spread")
@pytest.mark.parametrize(
    ("exact", "cases"), [(EXACT, ROUNDED), pytest.param([], MORE, marks=pytest.mark.slow)], ids=["few", "more"]
)
def test_gradients_are_those_of_one_process_that_rounds_alike(exact, cases):
    """The layer that is recomputed sends the same codes to the same experts again."""
    cases = [*exact, *cases]
    of_ranks = on_ranks(2, compare, cases)
    check(exact, [found[: len(exact)] for found in of_ranks])
    for found in of_ranks:
        for case, one in zip(cases, found, strict=True):
            worst = max(one["errors"].values())
            print(case, worst)
            assert worst <= BOUNDS[case.mode], f"{case}: off by {worst:.2g}"
