"""Code samples of the article "DeepSeek-R1 and FP8 mixed precision training". Those about FP8 itself come with FP8."""

import pytest
import torch

import tilewright
from tilewright import Policy


@pytest.mark.skipif(torch.cuda.is_available(), reason="the line works where there is a GPU")
def test_architecture_sample():
    """`if torch.cuda.get_device_capability()[0] >= 9: quant_mode = 'full_fp8' else: 'hybrid_fp16'`.

    Wrong: it raises where there is no CUDA, and "at least 9" takes every later card for one that has Hopper's kernels.
    The machine is detected instead, and the fallback is the mode `hybrid`; `full_fp8` waits for FP8.
    """
    with pytest.raises((AssertionError, RuntimeError)):
        torch.cuda.get_device_capability()
    machine = tilewright.detect_machine()
    assert machine.capability is None
    assert Policy("hybrid", device_type=machine.device).decide("layer", "linear").compute == "bf16"
    assert Policy("hybrid", device_type="cuda").decide("layer", "linear").compute == "fp16"
