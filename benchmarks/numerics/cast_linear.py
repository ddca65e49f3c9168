"""Cost of casting the weight at each use: CastLinear with FP32 parameters against torch's own linear in BF16.

Forward and backward of one layer, gradients cleared before each pass, both in turns in one process. Also the share of a
cast that a copy kept between forwards could save at most: the forward cast alone.

python -m benchmarks.numerics.cast_linear [--rounds 40]
"""

import argparse
from collections.abc import Callable

import torch
from torch import nn

from benchmarks.common import spread, write_result
from benchmarks.turns import in_turns, ratio
from tilewright.precision.mixed.cast_layers import CastLinear

CLAIM = "a converted linear layer costs at most 5 % more than torch's own in BF16, forward and backward"
SHAPES = ((4096, 512, 1408), (4096, 1408, 512), (4096, 512, 512), (2048, 512, 1408))


def cases(tokens: int, inputs: int, outputs: int) -> dict[str, Callable[[], object]]:
    """The functions to time, by name."""
    plain = nn.Linear(inputs, outputs, bias=False, dtype=torch.bfloat16)
    cast = CastLinear(inputs, outputs, bias=False)
    cast.set_formats("bf16", "bf16", round_tf32=False)
    wide = nn.Linear(inputs, outputs, bias=False)
    x = torch.randn(tokens, inputs, dtype=torch.bfloat16)
    grad = torch.randn(tokens, outputs, dtype=torch.bfloat16)

    def both_ways(layer: nn.Linear) -> Callable[[], None]:
        dtype = torch.float32 if layer is wide else torch.bfloat16
        input_, grad_ = x.to(dtype).requires_grad_(), grad.to(dtype)

        def run() -> None:
            layer.weight.grad = input_.grad = None
            layer(input_).backward(grad_)

        return run

    return {
        "bf16": both_ways(plain),
        "cast": both_ways(cast),
        "fp32": both_ways(wide),
        "forward_cast_alone": lambda: cast.weight.detach().to(torch.bfloat16),
    }


def main() -> None:
    """Measure all shapes and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    rounds = parser.parse_args().rounds
    values = {}
    for shape in SHAPES:
        seconds = in_turns(cases(*shape), rounds)
        medians = {name: spread(samples) for name, samples in seconds.items()}
        over = ratio(seconds["cast"], seconds["bf16"])
        values["x".join(map(str, shape))] = {"seconds": medians, "cast_over_bf16": over}
        print(shape, {name: f"{s['median'] * 1e3:.2f} ms" for name, s in medians.items()}, f"{over['median']:.3f}")
    write_result("cast_linear", CLAIM, values)


if __name__ == "__main__":
    main()
