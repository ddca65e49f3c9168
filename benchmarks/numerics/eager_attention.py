"""Attention outside of compiled layers: BF16 operands, by the kernel that this CPU gets, beside FP32 ones.

Forward and backward, 4 heads of 64, rows of several lengths, each row one document or several; both formats take turns
in one process. Processor time, one thread. Of a CPU without 16-bit units the kernel is `wide`, which multiplies in
FP32: `ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2` in the environment makes another CPU such a one.

python -m benchmarks.numerics.eager_attention [--turns 7] [--tiny]
"""

import time
from collections.abc import Callable

import torch

from benchmarks.common import Stolen, machine_kind, parser_of, spread, write_result
from benchmarks.turns import in_turns, ratio
from tilewright.core.hardware import detect_machine
from tilewright.ops.attention import ATTENTION
from tilewright.ops.base.dispatch import Case, choose
from tilewright.ops.kernels import Kernels

CLAIM = "eager attention of BF16 operands is at least 0.75 times as fast as of FP32 ones"
LENGTHS = (256, 512, 2048)
HEADS, WIDTH, TOKENS = 4, 64, 4096


def both_ways(kernels: Kernels, length: int, tokens: int, packed: bool, dtype: torch.dtype) -> Callable[[], object]:
    """Attention and its gradients, of rows with so many tokens together."""
    shape = max(1, tokens // length), length, HEADS, WIDTH
    generator = torch.Generator().manual_seed(0)
    *operands, upstream = (torch.randn(shape, generator=generator).to(dtype).transpose(1, 2) for _ in range(4))
    leaves = [x.requires_grad_() for x in operands]
    documents = None
    if packed:
        segments = (torch.arange(length) * 4 // length).int().expand(shape[0], -1)
        documents = kernels.documents({"segments": segments})
    return lambda: torch.autograd.grad(kernels.attention(*leaves, segments=documents), leaves, upstream)


def main() -> None:
    """Measure all lengths, and write the result."""
    parser = parser_of(__doc__)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--tiny", action="store_true", help="few tokens; the numbers mean nothing")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    kernels, tokens = Kernels.default(), 256 if asked.tiny else TOKENS
    chosen = choose(ATTENTION, detect_machine("cpu"), Case("cpu", torch.bfloat16)).candidate.name
    results: dict[str, object] = {"kernel": chosen, "turns": asked.turns, "tokens": tokens}
    with Stolen() as stolen:
        for length in LENGTHS:
            for packed in (False, True):
                ways = {
                    str(dtype).removeprefix("torch."): both_ways(kernels, length, tokens, packed, dtype)
                    for dtype in (torch.float32, torch.bfloat16)
                }
                seconds = in_turns(ways, asked.turns, warm_ups=1, clock=time.process_time)
                found = {name: spread(each) for name, each in seconds.items()}
                found["bf16_speed_of_fp32"] = ratio(seconds["float32"], seconds["bfloat16"])
                name = f"{length}{' packed' if packed else ''}"
                results[name] = found
                print(f"{name}: {found['bf16_speed_of_fp32']['median']:.2f} by {chosen}", flush=True)
    results["stolen_share"] = stolen.share
    write_result(f"eager_attention_{'tiny' if asked.tiny else machine_kind()}", CLAIM, results)


if __name__ == "__main__":
    main()
