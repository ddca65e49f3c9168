"""Attention on a GPU, forward and backward: rows of one document and of several, grouped heads, 16 and 32 bits.

For each case: which candidate a run takes, the device's time (`device_time`), memory beyond the inputs, and the rate by
the pairs of positions that attend. Beside it torch's own call with a mask, which is what rows of several documents
were computed with before; where that falls to scores of all pairs, its memory says so.

python -m benchmarks.card.attention_gpu [--seconds 30] [--tiny]
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.card.fp8_gpu import DEVICE, attempt, milliseconds, say
from benchmarks.common import Deadline, arguments_for_card, parser_of, write_result
from tilewright.ops.attention import attention_kind
from tilewright.ops.backends.ref.math import allowed_pairs
from tilewright.ops.base.documents import segments_of
from tilewright.ops.kernels import Kernels

CLAIM = "rows of several documents take no more time than rows of one, and nothing of all pairs of positions"


@dataclass(frozen=True)
class Case:
    """Rows of `seq` tokens with `docs` documents each."""

    dtype: torch.dtype
    docs: int
    rows: int = 2
    seq: int = 8192
    heads: int = 32
    kv_heads: int = 8
    width: int = 128

    @property
    def name(self) -> str:
        """`bf16 4 docs`, for example."""
        return f"{str(self.dtype).removeprefix('torch.')}, {self.docs} documents"

    def pairs(self) -> float:
        """Pairs of positions that attend, of all heads."""
        return self.rows * self.heads * self.seq**2 / 2 / self.docs

    def tensors(self) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor | None]:
        """Queries, keys and values as a layer has them, and segments."""
        heads = (self.heads, self.kv_heads, self.kv_heads)
        shapes = ((self.rows, self.seq, number, self.width) for number in heads)
        q, k, v = (torch.randn(shape, device=DEVICE, dtype=self.dtype).transpose(1, 2) for shape in shapes)
        if self.docs == 1:
            return (q, k, v), None
        segments_S = torch.arange(self.seq, device=DEVICE, dtype=torch.int32) // -(-self.seq // self.docs)
        return (q, k, v), segments_S.expand(self.rows, -1).contiguous()


CASES = (
    *(Case(torch.bfloat16, docs) for docs in (1, 4, 64)),
    *(Case(torch.float32, docs, rows=1, seq=4096) for docs in (1, 4)),
)
TINY = (Case(torch.float32, 1, 1, 32, 4, 2, 16), Case(torch.float32, 4, 1, 32, 4, 2, 16))


def measured(case: Case, run: Callable[[Tensor, Tensor, Tensor], Tensor]) -> dict[str, Any]:
    """Time, rate and memory of forward and backward."""
    leaves = [x.detach().requires_grad_() for x in case.tensors()[0]]
    out_grad = torch.randn_like(leaves[0])

    def both() -> object:
        return torch.autograd.grad(run(*leaves), leaves, out_grad)

    both()
    peak = 0
    if DEVICE == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        both()
        peak = torch.cuda.max_memory_allocated() - before
    found = milliseconds(both)
    flops = 7 * 2 * case.width * case.pairs()  # two matmuls forward, five backward
    return found | {"peak_bytes": peak, "tflops": flops / found["median"] / 1e9}


def masked(case: Case, segments: Tensor | None) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """torch's call with a mask."""
    allowed = allowed_pairs(segments, case.seq, torch.device(DEVICE))
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=allowed, enable_gqa=True)


def main() -> None:
    """All cases."""
    parser = parser_of(__doc__, tiny=True, seconds=True)
    args = arguments_for_card(parser)
    deadline, kernels = Deadline(args.seconds), Kernels.default()
    results: dict[str, Any] = {"unit": "ms"}
    for case in TINY if args.tiny else CASES:
        if deadline.passed(case.name, results):
            break
        segments = case.tensors()[1]
        documents = kernels.documents({} if segments is None else {"segments": segments})
        kind = attention_kind(DEVICE, case.width, documents is not None)
        results[case.name] = row = {
            "shape": {**asdict(case), "dtype": str(case.dtype)},
            "chosen": kernels.choices["attention", DEVICE, case.dtype, kind].candidate.name,
            "all_pairs_bytes": case.rows * case.heads * case.seq**2 * case.dtype.itemsize,
        }
        row["tilewright"] = attempt(
            lambda case=case, documents=documents: measured(
                case, lambda q, k, v: kernels.attention(q, k, v, segments=documents)
            )
        )
        write_result("attention", CLAIM, results)
        row["torch_masked"] = attempt(
            lambda case=case, documents=documents: measured(case, masked(case, segments_of(documents)))
        )
        say(case.name, row)
        write_result("attention", CLAIM, results)


if __name__ == "__main__":
    main()
