"""How a GPU's 16-bit GEMMs add partial sums: switches of torch, set before a run's first one, and recorded.

By default cuBLAS may cut the summed dimension into pieces whose sums are rounded to 16 bits before they are added. That
is what happens to weight gradients: few rows and columns, many tokens.
"""

import torch

_SWITCHES = ("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction")


def add_in_fp32(device: str) -> None:
    """Partial sums of GEMMs on this device stay in FP32. Nothing to do on a CPU.

    Args:
        device: "cpu" or "cuda".
    """
    if device == "cuda":
        for name in _SWITCHES:
            setattr(torch.backends.cuda.matmul, name, False)


def switches() -> dict[str, bool]:
    """What is set now, by torch's names."""
    return {name: getattr(torch.backends.cuda.matmul, name) for name in _SWITCHES}
