"""AdamW with 8-bit moments: the law against FP64 AdamW, and the C++ against the law, bit for bit."""

from dataclasses import replace

import pytest
import torch

from tests.cover import covering
from tests.ops.compare import assert_snr
from tests.ops.low_bit import HALF, KINDS, ROWS, SIZES, LowBitCase, assert_same, hyper, written_masters, written_pairs
from tilewright.core.hardware import detect_machine
from tilewright.formats import quadratic_map
from tilewright.formats.rounding import join24
from tilewright.ops.backends.cpu import low_bit_adam as cpu
from tilewright.ops.backends.ref.adam import hash32
from tilewright.ops.backends.ref.low_bit_adam import low_bit_adam

needs_compiler = pytest.mark.skipif(detect_machine("cpu").cxx_compiler is None, reason="no C++ compiler here")


def value_of(tensors):
    """FP32 values of the target."""
    if tensors.weight is not None:
        master, weight = tensors.target.clone(), tensors.weight
        master[master.to(weight.dtype) != weight] = weight.float()[master.to(weight.dtype) != weight]
        return master
    return tensors.target.float() if tensors.low is None else join24(tensors.target, tensors.low)


@pytest.mark.parametrize("kind", KINDS)
def test_first_step_is_that_of_adamw(kind):
    """From zero moments nothing but the target is rounded before it is used."""
    case = LowBitCase(kind, 1000)
    tensors, (grad,) = case.tensors(), case.grads(1)
    want = torch.nn.Parameter(value_of(tensors).double())
    want.grad = grad.double()
    torch.optim.AdamW([want], lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1).step()
    low_bit_adam(replace(tensors, grad=grad), hyper(1))
    got, want = value_of(tensors).double(), want.detach()
    # One step of the format that the target is rounded to, and three FP32 roundings.
    step = {"bf16": 2.0**-7, "split24": 2.0**-15}.get(kind, 2.0**-22)
    excess = (got - want).abs() - step * want.abs() - 1e-8
    worst = int(excess.argmax())
    assert excess[worst] <= 0, f"at {worst}: {got[worst]}, want {want[worst]}"


@pytest.mark.parametrize("kind", KINDS)
def test_stays_close_to_adamw(kind):
    """60 steps of noisy gradients with a mean: what the weights did, against FP64 AdamW."""
    size, steps, lr = 4096, 60, 1e-2
    generator = torch.Generator().manual_seed(1)
    tensors = LowBitCase(kind, size).tensors()
    start = value_of(tensors).double()
    want = torch.nn.Parameter(start.clone())
    optimizer = torch.optim.AdamW([want], lr=lr, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    scale = torch.exp2(torch.randn(size, generator=generator))  # as different as in a block of a real model
    mean = 0.3 * torch.randn(size, generator=generator)
    for step in range(1, steps + 1):
        grad = scale * (torch.randn(size, generator=generator) + mean)
        want.grad = grad.double()
        optimizer.step()
        low_bit_adam(replace(tensors, grad=grad), hyper(step, lr))
    # Codes of both moments are off by 2 to 3 % of a moment, again in each step, and last about ten steps: 32 dB. Sixty
    # roundings to BF16 add (60 / 6) ** 0.5 * 2^-7 to weights between 1 and 2, which move by about 0.3: 22 dB.
    floor = 20 if kind == "bf16" else 30
    assert_snr(value_of(tensors).double() - start, want.detach() - start, floor)


def test_no_step_is_thrown_far_out_by_rounding():
    """Coordinates with gradients a million times smaller than their block's: roots of moments near their least code."""
    tensors = LowBitCase("fp32", 128 * 50).tensors()
    generator = torch.Generator().manual_seed(1)
    before, lr = tensors.target.clone(), 1e-3
    for step in range(1, 41):
        grad = torch.randn(128 * 50, generator=generator) * torch.exp2(-20 * torch.rand(128 * 50, generator=generator))
        low_bit_adam(replace(tensors, grad=grad), replace(hyper(step, lr), weight_decay=0.0))
        # Without momentum in its way AdamW moves by (1 - beta1) / (1 - beta2) ** 0.5 = 0.45 of lr at most, at the
        # first step by lr itself; with codes of the moments on top it must stay of that size.
        moved = (tensors.target - before).abs().max()
        assert moved <= 4 * lr, f"step {step}: {moved / lr} times the learning rate"
        before = tensors.target.clone()


def test_random_bits_of_target_and_moments_are_even_and_apart():
    """The three fields of one hash: every value as often as the others, and none tells of another or of a neighbour."""
    bits = hash32(2**20, 12345, torch.device("cpu"))
    parts = [bits & 0xFFFF, bits >> 16 & 0xFF, bits >> 24 & 0xFF]
    for part, values in zip(parts, (2**16, 2**8, 2**8), strict=True):
        counts = torch.bincount(part, minlength=values).double()
        expected = 2**20 / values
        # The sum of squares over the expectation has mean `values` and deviation (2 * values) ** 0.5; six of them.
        spread = ((counts - expected) ** 2 / expected).sum().item()
        assert abs(spread - values) < 6 * (2 * values) ** 0.5
    rows = torch.stack([part.double() for part in (*parts, parts[0].roll(1), parts[1].roll(1), parts[2].roll(1))])
    apart = torch.corrcoef(rows).fill_diagonal_(0).abs().max().item()
    assert apart < 6 / 2**10, "correlations of 2^20 pairs have a deviation of 2^-10"


def test_no_gradient_at_all_changes_nothing_but_by_decay():
    tensors = LowBitCase("fp32", 300).tensors()
    before = tensors.target.clone()
    for step in range(1, 4):
        low_bit_adam(replace(tensors, grad=torch.zeros(300)), replace(hyper(step), weight_decay=0.0))
    assert torch.equal(tensors.target, before)
    assert not quadratic_map.decode(tensors.exp_avg, tensors.exp_avg_scale).any()
    assert not quadratic_map.decode(tensors.exp_avg_sq, tensors.exp_avg_sq_scale).any()


def test_what_is_not_finite_spoils_its_block_and_no_other():
    for bad in (torch.nan, torch.inf):
        tensors, grad = LowBitCase("split24", 300).tensors(), torch.ones(300)
        grad[130] = bad
        low_bit_adam(replace(tensors, grad=grad), hyper(1))
        assert tensors.exp_avg_scale.isfinite().tolist() == [[True, False, True]]
        assert value_of(tensors).isfinite().logical_not().nonzero().tolist() == [[130]]


@needs_compiler
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_cpp_has_the_bits_of_the_law(kind, size):
    case = LowBitCase(kind, size)
    ours, law = case.tensors(), case.tensors()
    for step, grad in enumerate(case.grads(6), 1):
        cpu.low_bit_adam(replace(ours, grad=grad), hyper(step))
        low_bit_adam(replace(law, grad=grad), hyper(step))
        assert_same(ours, law, f"{case}, step {step}")


@needs_compiler
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("kind", KINDS)
def test_cpp_has_the_bits_of_the_law_in_rows(kind, rows):
    case = LowBitCase(kind, rows[0] * rows[1], rows=rows[0])
    ours, law = case.tensors(), case.tensors()
    for step, grad in enumerate(case.grads(4), 1):
        cpu.low_bit_adam(replace(ours, grad=grad), hyper(step))
        low_bit_adam(replace(law, grad=grad), hyper(step))
        assert_same(ours, law, f"{case}, step {step}")


@pytest.mark.parametrize(("kind", "rows"), covering(tuple(KINDS), tuple(ROWS), pairs=False))
def test_a_row_has_the_bits_that_it_has_alone(kind, rows):
    """No row is read with another: scales are its own, and random bits count from the whole tensor's beginning."""
    case = LowBitCase(kind, rows[0] * rows[1], rows=rows[0])
    whole, parts = case.tensors(), case.tensors()
    for step, grad in enumerate(case.grads(3), 1):
        low_bit_adam(replace(whole, grad=grad), hyper(step))
        for row in range(rows[0]):
            low_bit_adam(_row(replace(parts, grad=grad), row, rows[1]), hyper(step))
        assert_same(parts, whole, f"{case}, step {step}")


def _row(tensors, row, length):
    cut = slice(row * length, (row + 1) * length)
    names = ["target", "grad", "exp_avg", "exp_avg_sq"]
    names += [name for name in ("low", "weight") if getattr(tensors, name) is not None]
    flat = {name: getattr(tensors, name)[cut] for name in names}
    scales = {name: getattr(tensors, name)[row : row + 1] for name in ("exp_avg_scale", "exp_avg_sq_scale")}
    return replace(tensors, **flat, **scales, first=row * length)


@needs_compiler
@pytest.mark.parametrize("kind", KINDS)
def test_cpp_with_numbers_that_are_awkward(kind):
    case = LowBitCase(kind, 128 * 8)
    ours, law = case.tensors(), case.tensors()
    for step, grad in enumerate(case.awkward_grads(5), 1):
        cpu.low_bit_adam(replace(ours, grad=grad), hyper(step))
        low_bit_adam(replace(law, grad=grad), hyper(step))
        assert_same(ours, law, f"{case}, step {step}")


@needs_compiler
@pytest.mark.parametrize("low", [-128, -1, 0, 1, 127])
def test_cpp_with_weights_that_were_written(low):
    ours, law = written_pairs(low), written_pairs(low)
    cpu.low_bit_adam(ours, hyper(1, lr=0.0))
    low_bit_adam(law, hyper(1, lr=0.0))
    assert_same(ours, law)
    assert torch.equal(ours.target.isnan(), written_pairs(low).target.isnan()), "a zero is no NaN"


@needs_compiler
@pytest.mark.parametrize("kind", HALF)
def test_cpp_with_masters_whose_weights_were_written(kind):
    """Every 16-bit number written; masters that are rounded up, down and to even; with a decay of 1 nothing moves."""
    ours, law = written_masters(kind), written_masters(kind)
    want, written = law.target.clone(), law.weight
    unlike = want.to(written.dtype).view(torch.int16) != written.view(torch.int16)
    want[unlike] = written[unlike].float()
    cpu.low_bit_adam(ours, hyper(1, lr=0.0))
    low_bit_adam(law, hyper(1, lr=0.0))
    assert_same(law, replace(law, target=want, weight=want.to(written.dtype)))
    assert_same(ours, law)


@needs_compiler
def test_cpp_on_several_threads():
    case = LowBitCase("split24", 128 * 64 * 5 + 77)
    outcomes = []
    threads = torch.get_num_threads()
    for count in (1, 3):
        tensors = case.tensors()
        torch.set_num_threads(count)
        try:
            for step, grad in enumerate(case.grads(2), 1):
                cpu.low_bit_adam(replace(tensors, grad=grad), hyper(step))
        finally:
            torch.set_num_threads(threads)
        outcomes.append(tensors)
    assert_same(*outcomes)


@needs_compiler
@pytest.mark.parametrize("kind", KINDS)
def test_nothing(kind):
    case = LowBitCase(kind, 0)
    for run in (cpu.low_bit_adam, low_bit_adam):
        run(replace(case.tensors(), grad=torch.empty(0)), hyper(1))
