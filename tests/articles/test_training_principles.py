"""Code samples of the article "Training principles of DeepSeek's large models: architecture and practice"."""

import pytest
import torch
import torch.distributed as dist

from tests.ranks import on_ranks
from tilewright import DynamicScaler, dynamic_quantize, load_recipe
from tilewright.parallel.communicate.communicator import AsyncCommunicator
from tilewright.precision.policy.schedule import ModeSchedule


class ArticleScaler:
    """The DynamicScaler sample as printed, but for a buffer that needs a GPU and is never read."""

    def __init__(self, init_scale=2**15):
        self.current_scale = init_scale
        self.found_inf = False

    def update_scale(self, has_overflow):
        if has_overflow:
            self.current_scale /= 2
            self.found_inf = True
        else:
            if self.found_inf and self.current_scale < 2**16:
                self.current_scale *= 2
                self.found_inf = False


def test_the_printed_scaler_never_grows_without_an_overflow():
    """Wrong, first: it only grows where an overflow came before, so a scale that starts too low stays there."""
    printed, ours = ArticleScaler(init_scale=2**4), DynamicScaler(2.0**4, window=10)
    for _ in range(100):
        printed.update_scale(False)
        ours.update(False)
    assert printed.current_scale == 2**4
    assert ours.scale_value == 2.0**14


def test_the_printed_scaler_doubles_right_back_into_the_overflow():
    """Wrong, second: it doubles after one clean step, without a window. Where gradients overflow above a scale of 2^10,
    it loses every other step for ever; ours loses one in `window`, and the steps of finding the scale."""
    limit, steps = 2**10, 1000
    printed, ours = ArticleScaler(), DynamicScaler(2.0**15, window=100)
    lost = {"printed": 0, "ours": 0}
    for _ in range(steps):
        overflow = printed.current_scale > limit
        lost["printed"] += overflow
        printed.update_scale(overflow)
        overflow = ours.scale_value > limit
        lost["ours"] += overflow
        ours.update(overflow)
    assert lost["printed"] >= steps // 2
    assert lost["ours"] == 5 + (steps - 5) // 101
    assert lost["ours"] == ours.skipped


def test_the_printed_scaler_has_no_floor():
    """Wrong, third: an overflow that no scale can mend drives it towards zero in silence; ours stops the run."""
    from tilewright.core.errors import NumericsError

    printed, ours = ArticleScaler(), DynamicScaler(2.0**15)
    for _ in range(60):
        printed.update_scale(True)
    assert printed.current_scale < 1e-12
    for _ in range(15):
        ours.update(True)
    assert ours.scale_value == ours.min
    with pytest.raises(NumericsError):
        ours.update(True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the line works where there is a GPU")
def test_the_printed_buffer_needs_a_gpu():
    """Wrong, fourth: `torch.cuda.FloatTensor([0.0])` fails without CUDA, and nothing reads it."""
    with pytest.raises((TypeError, RuntimeError)):
        torch.cuda.FloatTensor([0.0])


def test_tf32_for_a_fifth_of_the_steps_then_bf16():
    """Advice in section 5, as settings."""
    overrides = {"precision.mode": "bf16_mixed", "precision.start_mode": "tf32", "precision.start_fraction": "0.2"}
    section = load_recipe("default", overrides, environ={}).recipe.precision
    schedule = ModeSchedule.from_section(section, steps=1000)
    assert [schedule.at(step) for step in (0, 199, 200, 999)] == ["tf32", "tf32", "bf16_mixed", "bf16_mixed"]


def article_quantize(tensor, bit_width=8):
    """The dynamic_quantize sample as printed."""
    min_val = tensor.min()
    max_val = tensor.max()
    scale = (max_val - min_val) / ((1 << bit_width) - 1)
    quantized = torch.round((tensor - min_val) / scale)
    dequantized = quantized * scale + min_val
    return quantized.to(torch.int8), dequantized


def test_the_printed_quantizer_wraps_around():
    """Wrong, first: codes from 0 to 255 in signed bytes. Half of the values come back at the other end."""
    x = torch.linspace(-1, 1, 256)
    codes, _ = article_quantize(x)
    decoded = codes.float() * (2 / 255) - 1
    assert (codes < 0).sum() == 128
    assert (decoded - x).abs().max() > 1.9
    ours, values = dynamic_quantize(x)
    assert torch.equal(ours.dequantize().view(-1), values)
    assert (values - x).abs().max() <= 2 / 255


def test_the_printed_quantizer_divides_by_zero_for_a_constant():
    """Wrong, second; ours gives the constant. And an empty tensor has no minimum."""
    x = torch.full((4,), 3.0)
    assert article_quantize(x)[1].isnan().all()
    assert torch.equal(dynamic_quantize(x)[1], x)
    with pytest.raises(RuntimeError):
        article_quantize(torch.empty(0))
    assert dynamic_quantize(torch.empty(0))[1].shape == (0,)


def test_the_printed_codes_mean_nothing_by_themselves():
    """Wrong, third: scale and minimum are not returned. Ours come with them, in a quarter of the bytes."""
    x = torch.randn(64, 64)
    ours, values = dynamic_quantize(x, bit_width=8)
    assert ours.nbytes == x.nbytes // 4 + 5
    assert dynamic_quantize(x, bit_width=4)[0].nbytes == x.nbytes // 8 + 5
    assert (values - x).abs().max() <= (x.max() - x.min()) / 255


class ArticleCommunicator:
    """The article's class over ours: made of a rank and a world's size, it returns a handle and lets work go on.

    The printed one can't be run: it has no NCCL binding, no communicator, and reduces into a buffer that nobody reads.
    """

    def __init__(self, rank, world_size):
        self.rank, self.world_size = rank, world_size
        self.communicator = AsyncCommunicator(dist.group.WORLD, wire="bf16")

    def async_all_reduce(self, tensor):
        return self.communicator.async_all_reduce(tensor)


def article_sample(rank):
    communicator = ArticleCommunicator(rank, dist.get_world_size())
    tensor = torch.full((1000,), 1.0 + rank)
    handle = communicator.async_all_reduce(tensor)
    computed = torch.ones(8, 8) @ torch.ones(8, 8)
    return handle.wait().tolist() == [3.0] * 1000, float(computed.sum()), handle.done()


@pytest.mark.dist
def test_the_asynchronous_communicator_returns_before_the_sum_is_there():
    assert on_ranks(2, article_sample) == [(True, 512.0, True)] * 2
